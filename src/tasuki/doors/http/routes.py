"""The one table of what there is over HTTP: path, who may use it, what it takes and answers. Everything else is made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tasuki.core.access import PeerKind
from tasuki.doors.http import (
    app_jobs,
    app_workers,
    blobs,
    enrolment,
    frames,
    health,
    metrics,
    presigned,
    request_schemas,
    response_schemas,
    v1,
    worker_session_routes,
)
from tasuki.doors.http.context import HttpContext, RequestContext
from tasuki.doors.http.exchange import WAIT_MAX_S
from tasuki.net.http.names import BLOBS_PATH, FRAMES_PATH, FRAMES_TYPE, WORKER_PATH
from tasuki.wire.compression import CODECS

CLIENTS = frozenset({PeerKind.CLIENT, PeerKind.ADMIN})
ADMINS = frozenset({PeerKind.ADMIN})
WORKERS = frozenset({PeerKind.WORKER})
ENROLLERS = frozenset({PeerKind.ENROL})
BLOB_USERS = CLIENTS | WORKERS


def _number(kind: str, least: float, most: float) -> dict[str, Any]:
    return {"type": kind, "minimum": least, "maximum": most}


_TEXT = {"type": "string"}
WAIT = ("wait", _number("number", 0, WAIT_MAX_S), "How many seconds the answer may wait for something to tell.")


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. Without `kinds` no token is needed, and `handle` gets the house instead of a call."""

    method: str
    path: str
    handle: Callable[[Any], Awaitable[Any]]
    kinds: frozenset[PeerKind] = frozenset()
    body: Any = None
    batch: Any = None
    """What the body is instead, if it has the field `jobs`."""
    content: str = ""
    """The media type of a body that is not JSON; `handle` gets it as bytes."""
    streamed: bool = False
    """`handle` reads the body itself: it may be larger than any other."""
    answer: Any = dict[str, Any]
    """One type, or several as a tuple."""
    empty: bool = False
    """It may answer 204."""
    binary: tuple[str, ...] = ()
    """The media types of an answer that is bytes."""
    partial: bool = False
    """It may answer with a part (206)."""
    text: bool = False
    errors: tuple[int, ...] = ()
    """Besides those that all routes of its kind have."""
    query: tuple[tuple[str, dict[str, Any], str], ...] = ()
    """(name, its JSON schema, what for)"""

    @property
    def summary(self) -> str:
        return (self.handle.__doc__ or self.handle.__name__.replace("_", " ").capitalize() + ".").strip().splitlines()[0]


def _open(path: str, handle: Callable[[HttpContext], Awaitable[Any]], errors: tuple[int, ...] = ()) -> Route:
    return Route(method="GET", path=path, handle=handle, answer=response_schemas.Health, errors=errors)


def _get(path: str, handle: Callable[[RequestContext], Awaitable[Any]], **fields: Any) -> Route:
    return Route(method="GET", path=path, handle=handle, **{"kinds": CLIENTS, "errors": (404,), **fields})


def _post(path: str, handle: Callable[[RequestContext], Awaitable[Any]], **fields: Any) -> Route:
    return Route(method="POST", path=path, handle=handle, **{"kinds": CLIENTS, **fields})


_JOBS, _COMPUTE = "/calc/{app}/jobs", "/calc/{app}/compute"
_BLOB, _BYTES = BLOBS_PATH + "/{sha256}", "application/octet-stream"
_QUERY = tuple((name, _TEXT, "A filter.") for name in ("state", "subject", "array_id", "worker_id", "text", "cursor"))

_WORKER = (
    ("worker_id", _TEXT, "With a worker token: which worker asks."),
    ("incarnation", _TEXT, "With a worker token: which of its processes."),
)

ROUTES: tuple[Route, ...] = (
    _open("/healthz", health.healthz),
    _open("/readyz", health.readyz, errors=(503,)),
    # -- an app's jobs
    _post(
        _JOBS,
        app_jobs.submit_one,
        body=dict[str, Any],
        answer=response_schemas.AppAccepted,
        errors=(404, 409),
        query=(("job_id", _TEXT, "Your own id."), ("priority", _number("integer", 0, 9), "Higher first.")),
    ),
    _post(
        _JOBS + "/batch",
        app_jobs.submit_many,
        body=request_schemas.AppJobs,
        answer=response_schemas.AppAcceptedMany,
        errors=(404,),
    ),
    _get(_JOBS + "/{job_id}", app_jobs.status, answer=response_schemas.AppStatus),
    _get(_JOBS + "/{job_id}/result", app_jobs.result, answer=response_schemas.AppResult, errors=(404, 409), query=(WAIT,)),
    # -- an app's workers
    _post(
        _COMPUTE + "/enroll-tokens",
        app_workers.enroll_token,
        kinds=ADMINS,
        body=request_schemas.Enrolment,
        answer=response_schemas.Enrolled,
        errors=(404,),
    ),
    _post(
        _COMPUTE + "/servers/register",
        app_workers.register,
        kinds=ENROLLERS,
        body=request_schemas.Registration,
        answer=response_schemas.WorkerRegistered,
        errors=(404,),
    ),
    _post(
        _COMPUTE + "/servers/{worker_id}/rotate",
        app_workers.rotate,
        kinds=WORKERS,
        answer=response_schemas.WorkerRegistered,
        errors=(404,),
    ),
    Route(
        method="DELETE",
        path=_COMPUTE + "/servers/{worker_id}",
        handle=app_workers.revoke,
        kinds=ADMINS,
        answer=response_schemas.WorkerRevoked,
        errors=(404,),
    ),
    _post(
        _COMPUTE + "/jobs/lease",
        app_workers.lease,
        kinds=WORKERS,
        body=request_schemas.LeaseWish,
        answer=(response_schemas.Leased, response_schemas.LeasedMany),
        empty=True,
        errors=(404, 429),
        query=(WAIT,),
    ),
    _post(
        _COMPUTE + "/jobs/{job_id}/renew",
        app_workers.renew,
        kinds=WORKERS,
        body=request_schemas.Renewal,
        answer=response_schemas.LeaseRenewed,
        errors=(404, 409),
    ),
    _post(
        _COMPUTE + "/jobs/renew",
        app_workers.renew_many,
        kinds=WORKERS,
        body=request_schemas.Renewals,
        answer=response_schemas.ToldMany,
        errors=(404,),
    ),
    _post(
        _COMPUTE + "/jobs/{job_id}/result",
        app_workers.finish,
        kinds=WORKERS,
        body=request_schemas.ResultReport,
        answer=response_schemas.ResultRecorded,
        errors=(404, 409),
    ),
    _post(
        _COMPUTE + "/jobs/result",
        app_workers.finish_many,
        kinds=WORKERS,
        body=request_schemas.ResultsOf,
        answer=response_schemas.ToldMany,
        errors=(404,),
    ),
    _post(
        _COMPUTE + "/jobs/{job_id}/failed",
        app_workers.fail,
        kinds=WORKERS,
        body=request_schemas.FailureReport,
        answer=response_schemas.FailureRecorded,
        errors=(404, 409),
    ),
    _post(
        _COMPUTE + "/jobs/failed",
        app_workers.fail_many,
        kinds=WORKERS,
        body=request_schemas.FailuresOf,
        answer=response_schemas.ToldMany,
        errors=(404,),
    ),
    # -- workers of any subject
    _post(
        "/v1/workers/register",
        enrolment.register,
        kinds=ENROLLERS,
        body=request_schemas.Registration,
        answer=response_schemas.WorkerRegistered,
    ),
    _get("/v1/workers/self", enrolment.itself, kinds=WORKERS, answer=response_schemas.WorkerSelf, errors=()),
    # -- the general client API
    _post(
        "/v1/jobs",
        v1.submit_jobs,
        body=request_schemas.JobBody,
        batch=request_schemas.JobsBody,
        answer=(response_schemas.JobAccepted, response_schemas.AcceptedMany),
        errors=(404, 409),
    ),
    _get("/v1/jobs", v1.list_jobs, query=(*_QUERY, ("limit", _number("integer", 1, 1000), "How many.")), errors=()),
    _post("/v1/jobs/cancel", v1.cancel_many, body=request_schemas.JobIds, errors=(404,)),
    _post("/v1/jobs/requeue", v1.requeue_many, body=request_schemas.JobIds, errors=(404,)),
    _get("/v1/jobs/{job_id}", v1.get_job, query=(WAIT,)),
    _post("/v1/jobs/{job_id}/cancel", v1.cancel_one, body=request_schemas.ReasonBody, errors=(404,)),
    _post("/v1/jobs/{job_id}/requeue", v1.requeue_one, body=request_schemas.ReasonBody, errors=(404,)),
    _get("/v1/jobs/{job_id}/result", v1.result, binary=(_BYTES, "application/zip"), errors=(404, 409), query=(WAIT,)),
    _get(
        "/v1/jobs/{job_id}/logs",
        v1.logs,
        answer=response_schemas.LogResponse,
        query=(
            ("stream", {"type": "string", "enum": ["stdout", "stderr"]}, "Which one."),
            ("offset", _number("integer", 0, v1.OFFSET_MAX), "Where to go on."),
            ("attempt", _number("integer", 0, v1.OFFSET_MAX), "The one that the offset is of; 0: the current one."),
            ("wait", _number("number", 0, v1.LOG_WAIT_MAX_S), "How many seconds to wait for something new."),
        ),
    ),
    _get("/v1/jobs/{job_id}/explain", v1.explain),
    _get("/v1/stats", v1.stats, kinds=ADMINS, errors=()),
    # -- what `tasuki --to http://…` speaks
    _post(
        FRAMES_PATH,
        frames.frames,
        content=FRAMES_TYPE,
        binary=(FRAMES_TYPE,),
        query=(WAIT, ("codec", {"type": "string", "enum": list(CODECS)}, "What the answer's frames may be compressed with.")),
    ),
    # -- what `tasuki worker --to https://…` speaks
    _post(WORKER_PATH, worker_session_routes.open_line, kinds=WORKERS, content=FRAMES_TYPE, binary=(FRAMES_TYPE,)),
    _post(
        WORKER_PATH + "/{session}",
        worker_session_routes.use_line,
        kinds=WORKERS,
        content=FRAMES_TYPE,
        binary=(FRAMES_TYPE,),
        errors=(404, 409),
        query=(
            WAIT,
            (
                "said",
                _number("integer", 1, worker_session_routes.NUMBER_MAX),
                "The number of this request, if it has frames: one after the other.",
            ),
            ("heard", _number("integer", 0, worker_session_routes.NUMBER_MAX), "Tell me what comes behind so many frames."),
        ),
    ),
    Route(
        method="DELETE",
        path=WORKER_PATH + "/{session}",
        handle=worker_session_routes.leave_line,
        kinds=WORKERS,
        answer=dict[str, str],
        errors=(404,),
    ),
    # -- large things, of clients and workers
    _post(_BLOB, blobs.offer, kinds=BLOB_USERS, body=request_schemas.BlobOffer, answer=response_schemas.BlobHad, query=_WORKER),
    Route(
        method="PUT",
        path=_BLOB,
        handle=blobs.put,
        kinds=BLOB_USERS,
        content=_BYTES,
        streamed=True,
        answer=(response_schemas.BlobKept, response_schemas.BlobPart),
        errors=(409,),
        query=_WORKER,
    ),
    _get(
        _BLOB,
        blobs.get,
        kinds=BLOB_USERS,
        binary=(_BYTES,),
        partial=True,
        query=(("job_id", _TEXT, "Whose input or result it is."), *_WORKER),
    ),
    _post(
        _BLOB + "/download",
        presigned.download,
        kinds=BLOB_USERS,
        body=request_schemas.BlobWanted,
        answer=response_schemas.BlobDownload,
        errors=(404,),
        query=_WORKER,
    ),
    _post(
        _BLOB + "/upload",
        presigned.upload,
        kinds=BLOB_USERS,
        body=request_schemas.BlobOffer,
        answer=response_schemas.BlobUpload,
        query=_WORKER,
    ),
    _post(
        _BLOB + "/commit",
        presigned.commit,
        kinds=BLOB_USERS,
        body=request_schemas.BlobOffer,
        answer=response_schemas.BlobTaken,
        query=_WORKER,
    ),
    _get("/metrics", metrics.scrape, kinds=ADMINS, text=True, errors=()),
)
