"""The one table of what there is over HTTP: path, who may use it, what it takes and answers. Everything else is made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tasuki.core.access import Kind
from tasuki.doors.http import bodies, calc, compute, health, metrics, replies, v1
from tasuki.doors.http.call import Call, House

CLIENTS = frozenset({Kind.CLIENT, Kind.ADMIN})
ADMINS = frozenset({Kind.ADMIN})
WORKERS = frozenset({Kind.WORKER})
ENROLLERS = frozenset({Kind.ENROL})

WAIT = ("wait", "number", "How many seconds the answer may wait for something to tell, 0 to 60.")


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. Without `kinds` no token is needed, and `handle` gets the house instead of a call."""

    method: str
    path: str
    handle: Callable[[Any], Awaitable[Any]]
    kinds: frozenset[Kind] = frozenset()
    body: Any = None
    batch: Any = None
    """What the body is instead, if it has the field `jobs`."""
    answer: Any = dict[str, Any]
    """One type, or several as a tuple."""
    empty: bool = False
    """It may answer 204."""
    binary: bool = False
    """It answers with bytes."""
    text: bool = False
    errors: tuple[int, ...] = ()
    """Besides those that all routes of its kind have."""
    query: tuple[tuple[str, str, str], ...] = ()
    """(name, type, what for)"""

    @property
    def summary(self) -> str:
        return (self.handle.__doc__ or self.handle.__name__.replace("_", " ").capitalize() + ".").strip().splitlines()[0]


def _open(path: str, handle: Callable[[House], Awaitable[Any]], errors: tuple[int, ...] = ()) -> Route:
    return Route(method="GET", path=path, handle=handle, answer=replies.Health, errors=errors)


def _get(path: str, handle: Callable[[Call], Awaitable[Any]], **fields: Any) -> Route:
    return Route(method="GET", path=path, handle=handle, **{"kinds": CLIENTS, "errors": (404,), **fields})


def _post(path: str, handle: Callable[[Call], Awaitable[Any]], **fields: Any) -> Route:
    return Route(method="POST", path=path, handle=handle, **{"kinds": CLIENTS, **fields})


_JOBS, _COMPUTE = "/calc/{app}/jobs", "/calc/{app}/compute"
_QUERY = tuple((name, "string", "A filter.") for name in ("state", "subject", "array_id", "worker_id", "text", "cursor"))

ROUTES: tuple[Route, ...] = (
    _open("/healthz", health.healthz),
    _open("/readyz", health.readyz, errors=(503,)),
    # -- an app's jobs
    _post(
        _JOBS,
        calc.submit_one,
        body=dict[str, Any],
        answer=replies.AppAccepted,
        errors=(404, 409),
        query=(("job_id", "string", "Your own id."), ("priority", "integer", "0 to 9, higher first.")),
    ),
    _post(_JOBS + "/batch", calc.submit_many, body=bodies.AppJobs, answer=replies.AppAcceptedMany, errors=(404,)),
    _get(_JOBS + "/{job_id}", calc.status, answer=replies.AppStatus),
    _get(_JOBS + "/{job_id}/result", calc.result, answer=replies.AppResult, errors=(404, 409), query=(WAIT,)),
    # -- an app's workers
    _post(
        _COMPUTE + "/enroll-tokens",
        compute.enroll_token,
        kinds=ADMINS,
        body=bodies.Enrolment,
        answer=replies.Enrolled,
        errors=(404,),
    ),
    _post(
        _COMPUTE + "/servers/register",
        compute.register,
        kinds=ENROLLERS,
        body=bodies.Registration,
        answer=replies.Registered,
        errors=(404,),
    ),
    _post(_COMPUTE + "/servers/{worker_id}/rotate", compute.rotate, kinds=WORKERS, answer=replies.Registered, errors=(404,)),
    Route(
        method="DELETE",
        path=_COMPUTE + "/servers/{worker_id}",
        handle=compute.revoke,
        kinds=ADMINS,
        answer=replies.WorkerRevoked,
        errors=(404,),
    ),
    _post(
        _COMPUTE + "/jobs/lease",
        compute.lease,
        kinds=WORKERS,
        body=bodies.LeaseWish,
        answer=(replies.Leased, replies.LeasedMany),
        empty=True,
        errors=(404, 429),
        query=(WAIT,),
    ),
    _post(
        _COMPUTE + "/jobs/{job_id}/renew",
        compute.renew,
        kinds=WORKERS,
        body=bodies.Renewal,
        answer=replies.Renewed,
        errors=(404, 409),
    ),
    _post(
        _COMPUTE + "/jobs/renew",
        compute.renew_many,
        kinds=WORKERS,
        body=bodies.Renewals,
        answer=replies.ToldMany,
        errors=(404,),
    ),
    _post(
        _COMPUTE + "/jobs/{job_id}/result",
        compute.finish,
        kinds=WORKERS,
        body=bodies.Result,
        answer=replies.Recorded,
        errors=(404, 409),
    ),
    _post(
        _COMPUTE + "/jobs/result",
        compute.finish_many,
        kinds=WORKERS,
        body=bodies.ResultsOf,
        answer=replies.ToldMany,
        errors=(404,),
    ),
    _post(
        _COMPUTE + "/jobs/{job_id}/failed",
        compute.fail,
        kinds=WORKERS,
        body=bodies.Failure,
        answer=replies.FailureRecorded,
        errors=(404, 409),
    ),
    _post(
        _COMPUTE + "/jobs/failed",
        compute.fail_many,
        kinds=WORKERS,
        body=bodies.FailuresOf,
        answer=replies.ToldMany,
        errors=(404,),
    ),
    # -- the general client API
    _post(
        "/v1/jobs",
        v1.submit_jobs,
        body=bodies.JobBody,
        batch=bodies.JobsBody,
        answer=(replies.Accepted, replies.AcceptedMany),
        errors=(404, 409),
    ),
    _get("/v1/jobs", v1.list_jobs, query=(*_QUERY, ("limit", "integer", "1 to 1000.")), errors=()),
    _post("/v1/jobs/cancel", v1.cancel_many, body=bodies.JobIds, errors=(404,)),
    _post("/v1/jobs/requeue", v1.requeue_many, body=bodies.JobIds, errors=(404,)),
    _get("/v1/jobs/{job_id}", v1.get_job, query=(WAIT,)),
    _post("/v1/jobs/{job_id}/cancel", v1.cancel_one, body=bodies.Reason, errors=(404,)),
    _post("/v1/jobs/{job_id}/requeue", v1.requeue_one, body=bodies.Reason, errors=(404,)),
    _get("/v1/jobs/{job_id}/result", v1.result, binary=True, errors=(404, 409), query=(WAIT,)),
    _get(
        "/v1/jobs/{job_id}/logs",
        v1.logs,
        answer=replies.LogPart,
        query=(
            ("stream", "string", "stdout or stderr."),
            ("offset", "integer", "Where to go on."),
            ("attempt", "integer", "The one that the offset is of; 0: the current one."),
            ("wait", "number", "How many seconds to wait for something new, 0 to 25."),
        ),
    ),
    _get("/v1/jobs/{job_id}/explain", v1.explain),
    _get("/v1/stats", v1.stats, kinds=ADMINS, errors=()),
    _get("/metrics", metrics.scrape, kinds=ADMINS, text=True, errors=()),
)
