"""/calc/{app}/jobs: the jobs of an app, for those who submit them."""

from __future__ import annotations

from typing import Any

import msgspec

from tasuki.core.apps import WORDS, result_of, template_of
from tasuki.core.job import BlobRef, JobSpec
from tasuki.core.protocol import Acceptance
from tasuki.doors.http.clients import TokenConnection
from tasuki.doors.http.context import RequestContext, iso, refusal_of, submit, told
from tasuki.doors.http.exchange import wait_of, whole_number
from tasuki.doors.http.response_schemas import AppAccepted, AppAcceptedMany, AppResult, AppStatus
from tasuki.errors import NoResult, NotFinished, NotFound, TooLarge

RESULT_MAX_BYTES = 64 * 1024 * 1024  # of a document that is taken apart here; results of /v1 are streamed


def _spec(call: RequestContext, job_id: str | None, payload: dict[str, Any], priority: int) -> JobSpec:
    config = call.house.config
    template = template_of(call.app, max_retries=config.max_retries, backoff_s=config.backoff_s)
    own = {"job_id": job_id or call.house.new_id(), "payload": msgspec.json.encode(payload), "priority": priority}
    return msgspec.structs.replace(template, **own)


def _accepted(spec: JobSpec, acceptance: Acceptance | None) -> AppAccepted:
    return AppAccepted(spec.job_id, WORDS[acceptance.state] if acceptance is not None else "queued")


async def submit_one(call: RequestContext) -> AppAccepted:
    """The body is the payload; `?job_id=` makes asking again harmless."""
    priority = whole_number(call.request, "priority", 5, 9)
    spec = _spec(call, call.request.query_params.get("job_id"), call.body, priority)
    call.house.metrics.submitted(1)
    async with call.house.clients.use(call.caller) as client:
        [acceptance] = await submit(client, [spec])
    refusal = refusal_of(acceptance)
    if refusal is not None:
        raise refusal
    return _accepted(spec, acceptance)


async def submit_many(call: RequestContext) -> AppAcceptedMany:
    specs = [_spec(call, job.job_id, job.payload, job.priority) for job in call.body.jobs]
    call.house.metrics.submitted(len(specs))
    async with call.house.clients.use(call.caller) as client:
        acceptances = await submit(client, specs)
    jobs = []
    for spec, acceptance in zip(specs, acceptances, strict=True):
        refusal = refusal_of(acceptance)
        jobs.append(AppAccepted(spec.job_id, error=told(refusal)) if refusal is not None else _accepted(spec, acceptance))
    return AppAcceptedMany(jobs)


async def view_of(client: TokenConnection, call: RequestContext, *, result: bool = False) -> dict[str, Any]:
    """The job, if it is one of this app that the caller may see."""
    [view] = await client.request("get", job_ids=[call.job_id], result=result)
    if view["subject"] != call.subject:
        raise NotFound(f"there is no job {call.job_id[:128]!r}, or it is not yours")
    found: dict[str, Any] = view
    return found


async def status(call: RequestContext) -> AppStatus:
    async with call.house.clients.use(call.caller) as client:
        view = await view_of(client, call)
    return AppStatus(
        job_id=view["job_id"],
        status=WORDS[view["state"]],
        detail=detail_of(view),
        created_at=iso(view["created_at"]),
        updated_at=iso(max(view[name] or 0.0 for name in ("created_at", "assigned_at", "started_at", "finished_at"))),
        retry_count=view["failures"] + view["losses"],
    )


def detail_of(view: dict[str, Any]) -> str:
    outcome = view["outcome"]
    return (outcome["message"] or outcome["error_code"] or "") if outcome is not None else ""


async def result(call: RequestContext) -> AppResult:
    """With `?wait=25` the answer comes when the job has ended."""
    wait_s = wait_of(call.request)
    async with call.house.clients.use(call.caller) as client:
        view = await view_of(client, call, result=True)
        if wait_s and WORDS[view["state"]] in ("queued", "running"):
            await client.until_ended(call.job_id, wait_s)
            view = await view_of(client, call, result=True)
        word = WORDS[view["state"]]
        if word in ("queued", "running"):
            raise NotFinished(f"job {call.job_id!r} is {word}; ask again later, or wait for it with ?wait=25")
        if word != "finished":
            outcome = view["outcome"] or {}
            raise NoResult(f"job {call.job_id!r} is {word}: {detail_of(view)}", status=word, error_code=outcome.get("error_code"))
        data = await _bytes_of(client, view)
    return AppResult(job_id=view["job_id"], status=word, **result_of(data, view["outcome"]["meta"]))


async def _bytes_of(client: TokenConnection, view: dict[str, Any]) -> bytes:
    outcome = view["outcome"]
    if not outcome["result_is_blob"]:
        return outcome["result"] or b""
    if outcome["result_bytes"] > RESULT_MAX_BYTES:
        raise TooLarge(f"the result has {outcome['result_bytes']} bytes; read it from /v1/jobs/{view['job_id']}/result")
    ref = BlobRef(outcome["result_sha256"], outcome["result_bytes"])
    return b"".join([piece async for piece in client.talk.blob(ref.sha256, view["job_id"])])
