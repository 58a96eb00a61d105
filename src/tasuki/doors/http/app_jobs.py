"""/calc/{app}/jobs: the jobs of a calculation app, for the clients that submit them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tasuki.core.apps import WORDS, AppLimits, detail_of, result_of, template_of
from tasuki.core.job import BODY_INLINE_MAX_BYTES, BUDGET_MAX, PRIORITY_MAX, TIMEOUT_MAX_S, JobSpec, State
from tasuki.doors.http.context import RequestContext, iso, message_of
from tasuki.doors.http.exchange import BATCH_MAX, Error, JobId, error_of, number, whole_number
from tasuki.doors.http.v1 import ReasonBody
from tasuki.doors.http.virtual_connection import SubmitAnswer, TokenConnection
from tasuki.errors import InvalidInput, NoResult, NotFinished, TasukiError, TooLarge

RESULT_MAX_BYTES = 64 * 1024 * 1024  # of a document that is decoded here; results of /v1 are streamed


class AppJob(msgspec.Struct, kw_only=True):
    """One job of a batch."""

    payload: dict[str, Any]
    job_id: JobId | None = None
    priority: int = 5
    max_retries: int | None = None
    """Limit of the job; None: that of the app, as for the other limits."""
    backoff_s: float | None = None
    timeout_s: float | None = None


class AppJobs(msgspec.Struct):
    """Several jobs, stored in one transaction."""

    jobs: Annotated[list[AppJob], Meta(min_length=1, max_length=BATCH_MAX)]


class AppAccepted(msgspec.Struct, omit_defaults=True):
    """The job is stored. In a batch, a job that could not be stored has an error."""

    job_id: str
    status: str = ""
    error: Error | None = None


class AppAcceptedMany(msgspec.Struct):
    """The jobs in the order of the request."""

    jobs: list[AppAccepted]


async def submit_one(context: RequestContext, body: dict[str, Any]) -> AppAccepted:
    """Submit a job; the body is its payload. With `?job_id=` the request may be repeated safely."""
    query, request = context.request.query_params, context.request
    job = AppJob(payload=body, job_id=query.get("job_id"), priority=whole_number(request, "priority", 5, PRIORITY_MAX))
    if "max_retries" in query:
        job.max_retries = whole_number(request, "max_retries", 0, BUDGET_MAX)
    if "backoff_s" in query:
        job.backoff_s = number(request, "backoff_s", 0.0, TIMEOUT_MAX_S)
    if "timeout_s" in query:
        job.timeout_s = number(request, "timeout_s", 0.0, TIMEOUT_MAX_S)
    [accepted] = await _submit(context, [job])
    if isinstance(accepted, TasukiError):
        raise accepted
    return accepted


async def submit_many(context: RequestContext, body: AppJobs) -> AppAcceptedMany:
    """Submit several jobs."""
    accepted = zip(body.jobs, await _submit(context, body.jobs), strict=True)
    return AppAcceptedMany(
        [AppAccepted(job.job_id or "", error=error_of(one)) if isinstance(one, TasukiError) else one for job, one in accepted]
    )


async def _submit(context: RequestContext, jobs: list[AppJob]) -> list[AppAccepted | TasukiError]:
    """Check payloads, and submit those jobs that fit."""
    context.http.metrics.submitted(len(jobs))
    payloads = [msgspec.json.encode(job.payload) for job in jobs]
    problems: list[InvalidInput | None] = [None] * len(jobs)
    if check := context.http.config.payload_checks.get(context.app):
        problems = await check.problems(payloads, context.caller.identity.name)
    fitting = zip(jobs, payloads, problems, strict=True)
    specs = [_spec(context, job, payload) for job, payload, problem in fitting if problem is None]
    answers: Iterator[tuple[JobSpec, SubmitAnswer]] = iter(())
    if specs:
        async with context.client() as client:
            answers = zip(specs, await client.submit(specs), strict=True)
    return [_accepted(*next(answers)) if problem is None else problem for problem in problems]


def _spec(context: RequestContext, job: AppJob, payload: bytes) -> JobSpec:
    job.job_id = job.job_id or context.http.new_id()
    own = {name: value for name in AppLimits.__struct_fields__ if (value := getattr(job, name)) is not None}
    template = template_of(context.app, context.http.config.limits)
    return msgspec.structs.replace(template, job_id=job.job_id, payload=payload, priority=job.priority, **own)


def _accepted(spec: JobSpec, answer: SubmitAnswer) -> AppAccepted | TasukiError:
    if isinstance(answer, TooLarge):
        return TooLarge(
            f"the payload has {len(spec.payload)} bytes, the limit is {BODY_INLINE_MAX_BYTES}; "
            "keep what is larger where the workers can fetch it, and send its name"
        )
    if isinstance(answer, TasukiError):
        return answer
    return AppAccepted(spec.job_id, WORDS[answer.state] if answer is not None else "queued")


class AppStatus(msgspec.Struct, kw_only=True):
    """The state of a job."""

    job_id: str
    status: str
    """queued, running, finished, failed or canceled"""
    detail: str
    created_at: str
    updated_at: str
    retry_count: int
    """Failures and lost attempts so far."""


async def status(context: RequestContext) -> AppStatus:
    """Return the state of a job."""
    async with context.client() as client:
        view = await client.view(context.job_id, subject=context.subject)
    return AppStatus(
        job_id=view["job_id"],
        status=WORDS[view["state"]],
        detail=await _detail(context, view),
        created_at=iso(view["created_at"]),
        updated_at=iso(max(view[name] or 0.0 for name in ("created_at", "assigned_at", "started_at", "finished_at"))),
        retry_count=view["failures"] + view["losses"],
    )


async def _detail(context: RequestContext, view: dict[str, Any]) -> str:
    state = State(view["state"])
    if state is State.PENDING and not view["attempt"] and view["not_before"] is None:
        return ""  # the common case while a job is polled: nothing has happened to it
    incidents = await context.http.server.ask(lambda reader: reader.incidents(context.job_id))
    outcome = view["outcome"] or {"message": "", "error_code": ""}
    return detail_of(state, incidents, outcome["message"] or outcome["error_code"] or "", view["cancel_reason"])


class AppCanceled(msgspec.Struct):
    """The state of the job. `requested`: it runs, and ends when its worker has heard of it, or when its lease ends."""

    job_id: str
    status: str
    requested: bool


async def cancel(context: RequestContext, body: ReasonBody) -> AppCanceled:
    """Cancel a job. One that has ended stays as it is."""
    async with context.client() as client:
        await client.view(context.job_id, subject=context.subject)
        answer = (await client.cancel([context.job_id], body.reason))[context.job_id]
    return AppCanceled(context.job_id, WORDS[answer["state"]], answer["requested"])


class AppResult(msgspec.Struct, kw_only=True):
    """The result of a job."""

    job_id: str
    status: str
    result: Any
    summary_text: str
    freqs_csv: str
    meta: dict[str, Any]


async def result(context: RequestContext) -> AppResult:
    """Return the result of a job. With `?wait=25` the answer waits for the job's end."""
    async with context.client() as client:
        view = await client.view(context.job_id, context.request, result=True, subject=context.subject)
        word = WORDS[view["state"]]
        if word in ("queued", "running"):
            raise NotFinished(f"job {context.job_id!r} is {word}; ask again later, or wait for it with ?wait=25")
        if word != "finished":
            error_code = (view["outcome"] or {}).get("error_code")
            raise NoResult(f"job {context.job_id!r} is {word}: {message_of(view)}", status=word, error_code=error_code)
        data = await _bytes_of(client, view)
    return AppResult(job_id=view["job_id"], status=word, **result_of(data, view["outcome"]["meta"]))


async def _bytes_of(client: TokenConnection, view: dict[str, Any]) -> bytes:
    outcome = view["outcome"]
    if not outcome["result_is_blob"]:
        return outcome["result"] or b""
    if outcome["result_bytes"] > RESULT_MAX_BYTES:
        raise TooLarge(f"the result has {outcome['result_bytes']} bytes; read it from /v1/jobs/{view['job_id']}/result")
    return b"".join([piece async for piece in client.connection.blob(outcome["result_sha256"], view["job_id"])])
