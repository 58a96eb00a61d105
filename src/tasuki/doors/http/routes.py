"""The table of all routes: path, who may use it, and what the OpenAPI document has to say besides the handler.

Bodies and answers are read from a handler's annotations: the parameter `body` is decoded from JSON, or is bytes of the media type
`content`; the return type is the JSON answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import UnionType
from typing import Any, get_args, get_type_hints

import msgspec
from starlette.responses import Response

from tasuki.core.access import PeerKind
from tasuki.core.decoding import decodable
from tasuki.core.job import BUDGET_MAX, PRIORITY_MAX, TIMEOUT_MAX_S
from tasuki.core.protocol import BLOBS_PATH, CODECS, FRAMES_PATH, FRAMES_TYPE, LOG_WAIT_MAX_S, MESSAGES_PATH, WORKER_PATH
from tasuki.doors.http import app_jobs, app_workers, blobs, frames, messages, v1
from tasuki.doors.http.exchange import WAIT_MAX_S

CLIENTS = frozenset({PeerKind.CLIENT, PeerKind.ADMIN})
ADMINS = frozenset({PeerKind.ADMIN})
WORKERS = frozenset({PeerKind.WORKER})
ENROLLERS = frozenset({PeerKind.ENROL})
BLOB_USERS = CLIENTS | WORKERS


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One route. Without `kinds` no token is needed, and `handle` gets the HttpContext instead of a RequestContext."""

    method: str
    path: str
    handle: Callable[..., Awaitable[Any]]
    kinds: frozenset[PeerKind] = frozenset()
    body: Any = None
    """The type of a JSON body."""
    needs_body: bool = False
    """An empty body is refused; elsewhere it stands for {}."""
    batch: Any = None
    """The type of a JSON body with the field `jobs`."""
    answers: tuple[Any, ...] = ()
    """The types of JSON answers."""
    content: str = ""
    """The media type of a body that is bytes."""
    without_store: bool = False
    """`handle` has an answer also while the store is away."""
    streamed: bool = False
    """`handle` reads the body itself, which may be larger than any other."""
    empty: bool = False
    """The answer may be 204."""
    unrepeatable: bool = False
    """The answer is lost if it is not sent: it is not refused because others are unread."""
    media_types: tuple[str, ...] = ()
    """The media types of an answer that is not JSON."""
    partial: bool = False
    """The answer may be a part (206)."""
    errors: tuple[int, ...] = ()
    """Statuses besides those that all routes have."""
    query: tuple[tuple[str, dict[str, Any], str], ...] = ()
    """(name, JSON schema, description) of parameters."""


def _route(method: str, path: str, handle: Callable[..., Awaitable[Any]], **fields: Any) -> Route:
    hints = get_type_hints(handle)
    body, answer = hints.get("body"), hints["return"]
    if body is not None and body is not bytes:
        fields["body"], fields["batch"] = (*map(decodable, _members(body)), None)[:2]
    fields["answers"] = tuple(dict[str, Any] if kind is Any else kind for kind in _members(answer) if not _is_response(kind))
    return Route(method=method, path=path, handle=handle, **fields)


def _is_response(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Response)


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def _get(path: str, handle: Callable[..., Awaitable[Any]], **fields: Any) -> Route:
    return _route("GET", path, handle, **{"kinds": CLIENTS, "errors": (404,), **fields})


def _post(path: str, handle: Callable[..., Awaitable[Any]], **fields: Any) -> Route:
    return _route("POST", path, handle, **{"kinds": CLIENTS, **fields})


def _number(kind: str, least: float, most: float) -> dict[str, Any]:
    return {"type": kind, "minimum": least, "maximum": most}


_JOBS, _COMPUTE = "/calc/{app}/jobs", "/calc/{app}/compute"
_BLOB, _BYTES = BLOBS_PATH + "/{sha256}", "application/octet-stream"
_SESSION = WORKER_PATH + "/{session}"
_FRAMES: dict[str, Any] = {"content": FRAMES_TYPE, "media_types": (FRAMES_TYPE,)}
_TEXT = {"type": "string"}
_OFFSET = _number("integer", 0, v1.OFFSET_MAX)
_SESSION_NUMBER = "The number of this request, if it has frames; the numbers are consecutive."
_WAIT = ("wait", _number("number", 0, WAIT_MAX_S), "How many seconds the answer may wait for an event.")
_WORKER = (
    ("worker_id", _TEXT, "With a worker token: the worker that asks."),
    ("incarnation", _TEXT, "With a worker token: the process of the worker."),
)

ROUTES: tuple[Route, ...] = (
    _get("/healthz", v1.healthz, kinds=frozenset(), errors=()),
    _get("/readyz", v1.readyz, kinds=frozenset(), errors=(503,)),
    # -- an app's jobs
    _post(
        _JOBS,
        app_jobs.submit_one,
        needs_body=True,
        errors=(404, 409),
        query=(
            ("job_id", _TEXT, "Your own id."),
            ("priority", _number("integer", 0, PRIORITY_MAX), "Higher first."),
            ("max_retries", _number("integer", 0, BUDGET_MAX), "How often it is tried again after a failure."),
            ("backoff_s", _number("number", 0, TIMEOUT_MAX_S), "The delay of the first retry; it doubles with each."),
            ("timeout_s", {"type": "number", "exclusiveMinimum": 0, "maximum": TIMEOUT_MAX_S}, "The time limit of an attempt."),
        ),
    ),
    _post(_JOBS + "/batch", app_jobs.submit_many, errors=(404,)),
    _get(_JOBS + "/{job_id}", app_jobs.status),
    _post(_JOBS + "/{job_id}/cancel", app_jobs.cancel, errors=(404,)),
    _get(_JOBS + "/{job_id}/result", app_jobs.result, errors=(404, 409), query=(_WAIT,)),
    # -- an app's workers
    _post(_COMPUTE + "/enroll-tokens", app_workers.enroll_token, kinds=ADMINS, errors=(404,)),
    _get(_COMPUTE + "/servers", app_workers.list_workers, kinds=ADMINS),
    _post(_COMPUTE + "/servers/register", app_workers.register, kinds=ENROLLERS, errors=(404,)),
    _post(_COMPUTE + "/servers/{worker_id}/rotate", app_workers.rotate, kinds=WORKERS, errors=(404,)),
    _route("DELETE", _COMPUTE + "/servers/{worker_id}", app_workers.revoke, kinds=ADMINS, errors=(404,)),
    _post(
        _COMPUTE + "/jobs/lease", app_workers.lease, kinds=WORKERS, empty=True, unrepeatable=True, errors=(404,), query=(_WAIT,)
    ),
    _post(_COMPUTE + "/jobs/{job_id}/renew", app_workers.renew, kinds=WORKERS, errors=(404, 409)),
    _post(_COMPUTE + "/jobs/renew", app_workers.renew_many, kinds=WORKERS, errors=(404,)),
    _post(_COMPUTE + "/jobs/{job_id}/result", app_workers.finish, kinds=WORKERS, errors=(404, 409)),
    _post(_COMPUTE + "/jobs/result", app_workers.finish_many, kinds=WORKERS, errors=(404,)),
    _post(_COMPUTE + "/jobs/{job_id}/failed", app_workers.fail, kinds=WORKERS, errors=(404, 409)),
    _post(_COMPUTE + "/jobs/failed", app_workers.fail_many, kinds=WORKERS, errors=(404,)),
    # -- workers of any subject
    _post("/v1/workers/register", app_workers.register_worker, kinds=ENROLLERS),
    _get("/v1/workers/self", app_workers.describe_self, kinds=WORKERS, errors=()),
    # -- the general client API
    _post("/v1/jobs", v1.submit_jobs, needs_body=True, errors=(404, 409)),
    _get(
        "/v1/jobs",
        v1.list_jobs,
        errors=(),
        query=(
            *((name, _TEXT, "A filter.") for name in v1.FILTERS),
            ("limit", _number("integer", 1, 1000), "The most jobs to list."),
        ),
    ),
    _post("/v1/jobs/cancel", v1.cancel_many, errors=(404,)),
    _post("/v1/jobs/requeue", v1.requeue_many, errors=(404,)),
    _get("/v1/jobs/{job_id}", v1.get_job, query=(_WAIT,)),
    _post("/v1/jobs/{job_id}/cancel", v1.cancel_one, errors=(404,)),
    _post("/v1/jobs/{job_id}/requeue", v1.requeue_one, errors=(404,)),
    _get("/v1/jobs/{job_id}/result", v1.result, media_types=(_BYTES, "application/zip"), errors=(404, 409), query=(_WAIT,)),
    _get(
        "/v1/jobs/{job_id}/logs",
        v1.logs,
        query=(
            ("stream", {"type": "string", "enum": ["stdout", "stderr"]}, "The stream to read."),
            ("offset", _OFFSET, "Where to read on."),
            ("attempt", _OFFSET, "The attempt that the offset belongs to; 0: the current one."),
            ("wait", _number("number", 0, LOG_WAIT_MAX_S), "How many seconds to wait for new output."),
        ),
    ),
    _get("/v1/jobs/{job_id}/explain", v1.explain),
    _get("/v1/stats", v1.stats, kinds=ADMINS, errors=()),
    # -- messages, which are stored nowhere
    _post(MESSAGES_PATH, messages.publish, needs_body=True),
    _get(
        MESSAGES_PATH,
        messages.subscribe,
        media_types=(messages.EVENTS_TYPE,),
        errors=(),
        query=(
            ("pattern", {"type": "array", "items": _TEXT}, "Subjects, * and > allowed; several times."),
            ("queue", _TEXT, "Queue group: of its members one gets a message."),
        ),
    ),
    # -- the wire protocol of clients (`tasuki --to http://…`) and workers (`tasuki worker --to https://…`)
    _post(
        FRAMES_PATH,
        frames.frames,
        **_FRAMES,
        query=(_WAIT, ("codec", {"type": "string", "enum": list(CODECS)}, "A compression for the frames of the answer.")),
    ),
    _post(WORKER_PATH, frames.open_session, kinds=WORKERS, **_FRAMES),
    _post(
        _SESSION,
        frames.use_session,
        kinds=WORKERS,
        **_FRAMES,
        errors=(404, 409),
        query=(
            _WAIT,
            ("said", _number("integer", 1, frames.NUMBER_MAX), _SESSION_NUMBER),
            ("heard", _number("integer", 0, frames.NUMBER_MAX), "Confirms so many frames, and asks for those behind them."),
        ),
    ),
    _route("DELETE", _SESSION, frames.end_session, kinds=WORKERS, errors=(404,)),
    # -- blobs of clients and workers
    _post(_BLOB, blobs.offer, kinds=BLOB_USERS, query=_WORKER),
    _route("PUT", _BLOB, blobs.put, kinds=BLOB_USERS, content=_BYTES, streamed=True, errors=(409,), query=_WORKER),
    _get(
        _BLOB,
        blobs.get,
        kinds=BLOB_USERS,
        media_types=(_BYTES,),
        partial=True,
        query=(("job_id", _TEXT, "The job whose input or result the blob is."), *_WORKER),
    ),
    _post(_BLOB + "/download", blobs.download, kinds=BLOB_USERS, errors=(404,), query=_WORKER),
    _post(_BLOB + "/upload", blobs.upload, kinds=BLOB_USERS, query=_WORKER),
    _post(_BLOB + "/commit", blobs.commit, kinds=BLOB_USERS, query=_WORKER),
    _get("/metrics", v1.scrape, kinds=ADMINS, without_store=True, media_types=("text/plain",), errors=()),
)
