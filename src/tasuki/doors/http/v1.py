"""/v1: the general client API in JSON, the same requests that TCP clients make. /healthz, /readyz, /metrics: for monitoring."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from tasuki.core.job import BROADCAST_WITHIN_S, TERMINAL, InputFile, JobSpec, State, broadcast_specs
from tasuki.core.protocol import LOG_WAIT_MAX_S
from tasuki.doors.http.context import STORE_TIMEOUT_S, HttpContext, RequestContext, message_of
from tasuki.doors.http.exchange import (
    BATCH_MAX,
    CLIENT_GONE,
    Error,
    JobId,
    StreamedResponse,
    error_of,
    number,
    unless_left,
    whole_number,
)
from tasuki.errors import InvalidInput, NoResult, NotFinished, NotFound, TasukiError, Unavailable

OFFSET_MAX = 2**53
RESULT_HEADERS_MAX_CHARS = 4096  # of the one header that has them: proxies take few KiB
ZIP_MAGIC = b"PK\x03\x04"
FILTERS = ("state", "subject", "array_id", "worker_id", "text", "cursor")


# ---------------------------------------------------------------------------------------------------- submit


class FileBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An input file, inline or of a cache."""

    name: str
    data_base64: bytes | None = None
    cache: tuple[str, str] | None = None
    """(cache_id, name of the file in the cache)"""


class JobBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One job; see docs/concepts.md for each field. The payload is text, or base64."""

    job_id: JobId | None = None
    subject: str = "job.assign.default"
    exec: str = ""
    args: list[str] = []
    env: dict[str, str] = {}
    payload: str | None = None
    payload_base64: bytes | None = None
    files: list[FileBody] = []
    timeout_s: float | None = None
    max_retries: int = 3
    max_losses: int = 3
    backoff_s: float | None = None
    priority: int = 5
    not_before: float | None = None
    not_after: float | None = None
    permanent_exit_codes: list[int] = []
    retry_exit_codes: list[int] = []
    headers: dict[str, str] = {}
    array_id: str | None = None
    route_key: str = ""
    broadcast: bool = False
    """True: `subject` is a pattern, and each worker that meets it now gets a job, `JOB_ID.WORKER`; the answer names them."""
    on_failed: str = "return"


class JobsBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Several jobs, stored in one transaction."""

    jobs: Annotated[list[JobBody], Meta(min_length=1, max_length=BATCH_MAX)]
    on_failed: str = "return"


class JobAccepted(msgspec.Struct, omit_defaults=True):
    """The job is stored, now (`created`) or before. In a batch, a job that could not be stored has an error."""

    job_id: str
    state: str = ""
    created: bool = False
    error: Error | None = None


class AcceptedMany(msgspec.Struct):
    """The jobs in the order of the request."""

    jobs: list[JobAccepted]


_OTHER_FIELDS = {"job_id", "payload", "files", "args", "permanent_exit_codes", "retry_exit_codes"}
_SAME_FIELDS = {*JobBody.__struct_fields__} & {*JobSpec.__struct_fields__} - _OTHER_FIELDS


def _spec(context: RequestContext, body: JobBody) -> JobSpec:
    if body.payload is not None and body.payload_base64 is not None:
        raise InvalidInput("a job has payload or payload_base64, not both")
    payload = body.payload_base64 if body.payload_base64 is not None else (body.payload or "").encode("utf-8", "surrogatepass")
    return JobSpec(
        job_id=body.job_id or context.http.new_id(),
        payload=payload,
        files=tuple(InputFile(name=file.name, data=file.data_base64, cache=file.cache) for file in body.files),
        args=tuple(body.args),
        permanent_exit_codes=tuple(body.permanent_exit_codes),
        retry_exit_codes=tuple(body.retry_exit_codes),
        **{name: getattr(body, name) for name in _SAME_FIELDS},
    )


async def submit_jobs(context: RequestContext, body: JobBody | JobsBody) -> JobAccepted | AcceptedMany:
    """Submit one job, or several as {"jobs": [...]}."""
    specs = [_spec(context, one) for one in (body.jobs if isinstance(body, JobsBody) else [body])]
    is_broadcast = isinstance(body, JobBody) and body.broadcast
    if isinstance(body, JobsBody) and any(one.broadcast for one in body.jobs):
        raise InvalidInput("a broadcast is a request of its own: send it without `jobs`")
    async with context.client() as client:
        if is_broadcast:
            found = await client.request("targets", subject=specs[0].subject, exec=specs[0].exec)
            specs = broadcast_specs(specs[0], found["workers"], found["now"] + BROADCAST_WITHIN_S)
            if not specs:
                raise NotFound("no connected worker can run it and subscribes to what `subject` meets")
        context.http.metrics.submitted(len(specs))
        answers = await client.submit(specs, body.on_failed)
    is_one = isinstance(body, JobBody) and not is_broadcast
    if is_one and isinstance(answers[0], TasukiError):
        raise answers[0]
    jobs = []
    for spec, answer in zip(specs, answers, strict=True):
        if isinstance(answer, TasukiError):
            jobs.append(JobAccepted(spec.job_id, error=error_of(answer)))
        else:
            state = answer.state if answer is not None else State.PENDING
            jobs.append(JobAccepted(spec.job_id, state, created=answer is None))
    return jobs[0] if is_one else AcceptedMany(jobs)


# ---------------------------------------------------------------------------------------------------- read


async def get_job(context: RequestContext) -> dict[str, Any]:
    """Return a job. With `?wait=25` the answer waits for the job's end."""
    async with context.client() as client:
        return await client.view(context.job_id, context.request)


async def list_jobs(context: RequestContext) -> Any:
    """List jobs, newest first. Filters: state (several), subject, array_id, worker_id, text; limit, cursor."""
    query = context.request.query_params
    unknown = set(query) - {*FILTERS, "limit"}
    if unknown:
        raise InvalidInput(f"there is no filter {min(unknown)[:40]!r}; left out, it would quietly find everything")
    filters: dict[str, Any] = {name: query[name] for name in FILTERS[1:] if name in query}
    if states := query.getlist("state"):
        filters["states"] = states
    limit = whole_number(context.request, "limit", 50, 1000, least=1)
    return await context.ask("find", limit=limit, **filters)


async def explain(context: RequestContext) -> Any:
    """Explain why a job is in its state."""
    return await context.ask("explain", job_id=context.job_id)


async def stats(context: RequestContext) -> Any:
    """Count jobs by group and state, and describe workers and servers. For administrators."""
    async with context.client() as client:
        groups = await client.request("counts")
        return {"groups": groups, "workers": await client.request("workers"), "servers": await client.request("servers")}


async def result(context: RequestContext) -> Response:
    """Return the bytes of a result, of a command a ZIP; also of a failed job, if it left one."""
    stack = AsyncExitStack()
    try:
        client = await stack.enter_async_context(context.client())
        view = await client.view(context.job_id, context.request, result=True)
        outcome, state = view["outcome"], view["state"]
        if State(state) not in TERMINAL:
            raise NotFinished(f"job {context.job_id!r} is {state}; ask again later, or wait for it with ?wait=25")
        if state != State.SUCCEEDED and (outcome is None or not outcome["result_bytes"]):
            error_code = outcome["error_code"] if outcome is not None else None
            raise NoResult(f"job {context.job_id!r} is {state}: {message_of(view)}", state=state, error_code=error_code)
        headers = {"X-Tasuki-State": state, "X-Content-Type-Options": "nosniff", **result_headers(outcome["meta"])}
        if not outcome["result_is_blob"]:
            data = outcome["result"] or b""
            return Response(data, 200, headers, _media_type(data))
        headers["Content-Length"] = str(outcome["result_bytes"])
        pieces = await stack.enter_async_context(aclosing(client.connection.blob(outcome["result_sha256"], context.job_id)))
        first = await anext(pieces, b"")  # a blob that cannot be read is an error instead of half an answer
        return StreamedResponse(stream(first, pieces), stack.pop_all(), 200, headers, _media_type(first))
    finally:
        await stack.aclose()


async def stream(first: bytes, rest: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the body of an answer whose first piece was read already."""
    yield first
    async for piece in rest:
        yield piece


def result_headers(meta: dict[str, Any]) -> dict[str, str]:
    """Return what the response says of a result beside its bytes: its headers in JSON, since their names and values may be any
    text, and how many outputs are not in it."""
    text = json.dumps(found) if isinstance(found := meta.get("headers"), dict) else ""
    headers = {"X-Tasuki-Headers": text} if 0 < len(text) <= RESULT_HEADERS_MAX_CHARS else {}
    if isinstance(left_out := meta.get("left_out"), int) and left_out > 0:
        headers["Tasuki-Left-Out"] = str(left_out)
    return headers


def _media_type(data: bytes) -> str:
    return "application/zip" if data.startswith(ZIP_MAGIC) else "application/octet-stream"


class LogResponse(msgspec.Struct, kw_only=True):
    """A part of a log, from `offset` on; read on at `next`."""

    stream: str
    attempt: int
    offset: int
    next: int
    cut_bytes: int
    """Bytes before `offset` that are not kept."""
    data_base64: bytes
    text: str
    state: str
    ended: bool
    """The job has ended: the rest is in its result."""
    progress: float | None
    progress_text: str
    elsewhere: list[str] = []
    """The servers to ask instead: the job runs there."""


async def logs(context: RequestContext) -> LogResponse | Response:
    """Read a stream of a command's output from an offset on; with `?wait=25` the answer waits for new output."""
    params: dict[str, Any] = {
        "job_id": context.job_id,
        "stream": context.request.query_params.get("stream", "stdout"),
        "offset": whole_number(context.request, "offset", 0, OFFSET_MAX),
        "attempt": whole_number(context.request, "attempt", 0, OFFSET_MAX),
        "wait_s": number(context.request, "wait", 0.0, LOG_WAIT_MAX_S),
    }
    part = await unless_left(context.request, context.ask("logs", **params))
    if part is None:
        return Response(status_code=CLIENT_GONE)
    known = {name: part[name] for name in LogResponse.__struct_fields__ if name in part}
    data: bytes = part["data"]
    return LogResponse(**{**known, "data_base64": data, "text": data.decode("utf-8", "replace")})


# ---------------------------------------------------------------------------------------------------- change


class JobIds(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The jobs, and the reason that is recorded."""

    job_ids: Annotated[list[JobId], Meta(min_length=1, max_length=BATCH_MAX)]
    reason: str = ""


class ReasonBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The reason that is recorded."""

    reason: str = ""


async def cancel_one(context: RequestContext, body: ReasonBody) -> Any:
    """Cancel a job."""
    async with context.client() as client:
        states = await client.cancel([context.job_id], body.reason)
    return {"job_id": context.job_id, **states[context.job_id]}


async def cancel_many(context: RequestContext, body: JobIds) -> Any:
    """Cancel several jobs."""
    async with context.client() as client:
        return {"jobs": await client.cancel(body.job_ids, body.reason)}


async def requeue_one(context: RequestContext, body: ReasonBody) -> Any:
    """Run a job again that has ended."""
    states = await context.ask("requeue", job_ids=[context.job_id], reason=body.reason)
    return {"job_id": context.job_id, **states[context.job_id]}


async def requeue_many(context: RequestContext, body: JobIds) -> Any:
    """Run several jobs again that have ended."""
    return {"jobs": await context.ask("requeue", job_ids=body.job_ids, reason=body.reason)}


# ---------------------------------------------------------------------------------------------------- monitoring


class Health(msgspec.Struct):
    """The server is there."""

    status: str = "ok"


async def healthz(http: HttpContext) -> Health:
    """Answer: the process is alive."""
    return Health()


async def readyz(http: HttpContext) -> Health:
    """Answer if the store works and there is room; else 503. The reason is general: the caller has shown no token."""
    broker = http.server.broker
    if broker.disk_problem:
        raise Unavailable("there is too little space for new jobs")
    if broker.store_problem:
        raise Unavailable("the store does not take writes")
    try:
        async with asyncio.timeout(STORE_TIMEOUT_S):
            await http.server.ask(lambda reader: reader.epoch())
    except TimeoutError:
        raise Unavailable("the store does not answer") from None
    return Health("ready")


async def scrape(context: RequestContext) -> Response:
    """Return metrics for Prometheus, without those of the store while it is away. For administrators."""
    counts = None
    with suppress(TimeoutError, Unavailable):
        async with asyncio.timeout(STORE_TIMEOUT_S):
            counts = await context.http.server.ask(lambda reader: reader.counts())
    text = context.http.metrics.text(counts, context.http.server)
    return Response(text, 200, media_type=CONTENT_TYPE_LATEST)
