"""/v1: the general client API, a thin face of what TCP clients ask."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from starlette.responses import Response, StreamingResponse

from tasuki.core.job import TERMINAL, InputFile, JobSpec, State
from tasuki.core.protocol import Acceptance
from tasuki.doors.http.app_jobs import detail_of
from tasuki.doors.http.clients import TokenConnection
from tasuki.doors.http.context import RequestContext, refusal_of, submit, told
from tasuki.doors.http.exchange import number, wait_of, whole_number
from tasuki.doors.http.request_schemas import JobBody, JobsBody
from tasuki.doors.http.response_schemas import AcceptedMany, JobAccepted, LogResponse
from tasuki.errors import InvalidInput, NoResult, NotFinished

LOG_WAIT_MAX_S = 25.0
OFFSET_MAX = 2**53
ZIP_MAGIC = b"PK\x03\x04"


def _spec(call: RequestContext, body: JobBody) -> JobSpec:
    if body.payload is not None and body.payload_base64 is not None:
        raise InvalidInput("a job has payload or payload_base64, not both")
    payload = body.payload_base64 if body.payload_base64 is not None else (body.payload or "").encode("utf-8", "surrogatepass")
    return JobSpec(
        job_id=body.job_id or call.house.new_id(),
        subject=body.subject,
        exec=body.exec,
        args=tuple(body.args),
        env=body.env,
        payload=payload,
        files=tuple(InputFile(name=file.name, data=file.data_base64) for file in body.files),
        timeout_s=body.timeout_s,
        max_retries=body.max_retries,
        max_losses=body.max_losses,
        backoff_s=body.backoff_s,
        priority=body.priority,
        not_before=body.not_before,
        not_after=body.not_after,
        permanent_exit_codes=tuple(body.permanent_exit_codes),
        retry_exit_codes=tuple(body.retry_exit_codes),
        headers=body.headers,
        array_id=body.array_id,
    )


def _accepted(spec: JobSpec, acceptance: Acceptance | None) -> JobAccepted:
    if acceptance is None:
        return JobAccepted(spec.job_id, State.PENDING, created=True)
    return JobAccepted(spec.job_id, acceptance.state)


async def submit_jobs(call: RequestContext) -> JobAccepted | AcceptedMany:
    """One job, or {"jobs": [...]}."""
    body: JobBody | JobsBody = call.body
    bodies = body.jobs if isinstance(body, JobsBody) else [body]
    specs = [_spec(call, one) for one in bodies]
    call.house.metrics.submitted(len(specs))
    async with call.house.clients.use(call.caller) as client:
        acceptances = await submit(client, specs, body.on_failed)
    if isinstance(body, JobBody):
        refusal = refusal_of(acceptances[0])
        if refusal is not None:
            raise refusal
        return _accepted(specs[0], acceptances[0])
    jobs = []
    for spec, acceptance in zip(specs, acceptances, strict=True):
        refusal = refusal_of(acceptance)
        jobs.append(JobAccepted(spec.job_id, error=told(refusal)) if refusal is not None else _accepted(spec, acceptance))
    return AcceptedMany(jobs)


async def _ended_view(client: TokenConnection, call: RequestContext, wait_s: float, *, result: bool = False) -> dict[str, Any]:
    """The job, after its end if that comes in time."""
    [view] = await client.request("get", job_ids=[call.job_id], result=result)
    if wait_s and State(view["state"]) not in TERMINAL:
        await client.until_ended(call.job_id, wait_s)
        [view] = await client.request("get", job_ids=[call.job_id], result=result)
    found: dict[str, Any] = view
    return found


async def get_job(call: RequestContext) -> dict[str, Any]:
    """With `?wait=25` the answer comes when the job has ended."""
    wait_s = wait_of(call.request)
    async with call.house.clients.use(call.caller) as client:
        return await _ended_view(client, call, wait_s)


async def list_jobs(call: RequestContext) -> Any:
    """Newest first. Filters: state (several), subject, array_id, worker_id, text; limit, cursor."""
    query = call.request.query_params
    filters: dict[str, Any] = {
        name: query[name] for name in ("subject", "array_id", "worker_id", "text", "cursor") if name in query
    }
    if states := query.getlist("state"):
        filters["states"] = states
    unknown = set(query) - {"state", "subject", "array_id", "worker_id", "text", "cursor", "limit"}
    if unknown:
        raise InvalidInput(f"there is no filter {min(unknown)[:40]!r}; left out, it would quietly find everything")
    limit = whole_number(call.request, "limit", 50, 1000, least=1)
    async with call.house.clients.use(call.caller) as client:
        return await client.request("find", limit=limit, **filters)


async def cancel_one(call: RequestContext) -> Any:
    async with call.house.clients.use(call.caller) as client:
        states = await client.cancel([call.job_id], call.body.reason)
    return {"job_id": call.job_id, **states[call.job_id]}


async def cancel_many(call: RequestContext) -> Any:
    async with call.house.clients.use(call.caller) as client:
        return {"jobs": await client.cancel(call.body.job_ids, call.body.reason)}


async def requeue_one(call: RequestContext) -> Any:
    async with call.house.clients.use(call.caller) as client:
        states = await client.request("requeue", job_ids=[call.job_id], reason=call.body.reason)
    return {"job_id": call.job_id, **states[call.job_id]}


async def requeue_many(call: RequestContext) -> Any:
    async with call.house.clients.use(call.caller) as client:
        return {"jobs": await client.request("requeue", job_ids=call.body.job_ids, reason=call.body.reason)}


async def explain(call: RequestContext) -> Any:
    async with call.house.clients.use(call.caller) as client:
        return await client.request("explain", job_id=call.job_id)


async def stats(call: RequestContext) -> Any:
    """For an administrator: jobs by group and state, workers, servers."""
    async with call.house.clients.use(call.caller) as client:
        groups = await client.request("counts")
        return {"groups": groups, "workers": await client.request("workers"), "servers": await client.request("servers")}


async def result(call: RequestContext) -> Response:
    """The bytes as they are: of a command a ZIP. Also of one that failed, if it left a result."""
    wait_s = wait_of(call.request)
    stack = AsyncExitStack()
    try:
        client = await stack.enter_async_context(call.house.clients.use(call.caller))
        view = await _ended_view(client, call, wait_s, result=True)
        outcome = view["outcome"]
        if State(view["state"]) not in TERMINAL:
            raise NotFinished(f"job {call.job_id!r} is {view['state']}; ask again later, or wait for it with ?wait=25")
        if view["state"] != State.SUCCEEDED and (outcome is None or not outcome["result_bytes"]):
            error_code = outcome["error_code"] if outcome is not None else None
            raise NoResult(
                f"job {call.job_id!r} is {view['state']}: {detail_of(view)}", state=view["state"], error_code=error_code
            )
        headers = {"X-Tasuki-State": view["state"], "X-Content-Type-Options": "nosniff"}
        if not outcome["result_is_blob"]:
            data = outcome["result"] or b""
            return Response(data, 200, headers, _media_type(data))
        headers["Content-Length"] = str(outcome["result_bytes"])
        pieces = client.talk.blob(outcome["result_sha256"], call.job_id)
        first = await anext(pieces, b"")  # what cannot be read is an error, and no half answer
        kept = stack.pop_all()
        return StreamingResponse(stream(kept, first, pieces), 200, headers, _media_type(first))
    finally:
        await stack.aclose()


async def stream(kept: AsyncExitStack, first: bytes, rest: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """An answer's body; what it needs is kept until its end."""
    async with kept:
        yield first
        async for piece in rest:
            yield piece


def _media_type(data: bytes) -> str:
    return "application/zip" if data.startswith(ZIP_MAGIC) else "application/octet-stream"


async def logs(call: RequestContext) -> LogResponse:
    """What a command wrote to a stream, from an offset on; with `?wait=25` not before there is something new."""
    query = call.request.query_params
    params: dict[str, Any] = {
        "job_id": call.job_id,
        "stream": query.get("stream", "stdout"),
        "offset": whole_number(call.request, "offset", 0, OFFSET_MAX),
        "attempt": whole_number(call.request, "attempt", 0, OFFSET_MAX),
        "wait_s": number(call.request, "wait", 0.0, LOG_WAIT_MAX_S),
    }
    async with call.house.clients.use(call.caller) as client:
        part = await client.request("logs", **params)
    known = {name: part[name] for name in LogResponse.__struct_fields__ if name in part}
    data: bytes = part["data"]
    return LogResponse(**{**known, "data_base64": data, "text": data.decode("utf-8", "replace")})
