"""/calc/{app}/compute: the workers of an app enrol, lease, renew and report. /v1/workers: enrolment for any subject."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace
from starlette.responses import Response

from tasuki.core.access import ENROL_TOKEN_S, PeerKind, in_scope, token_sha256
from tasuki.core.apps import WORDS, json_or_base64, outcome_of
from tasuki.core.job import LEASED, Job, JobSpec, Outcome, State
from tasuki.core.protocol import ERROR_CODE_MAX_CHARS, Claim, check_outcome
from tasuki.core.store_messages import LeaseStatus
from tasuki.doors.http.context import RequestContext, iso
from tasuki.doors.http.exchange import BATCH_MAX, Error, JobId, disconnected, error_of, status_of, wait_of
from tasuki.doors.http.workers import claim_of, shown_lease_id
from tasuki.errors import Fenced, Forbidden, NotFound, ResultConflict, TasukiError
from tasuki.server.assembly import make_secret

LISTED_JOBS_MAX = 1000
TRACEBACK_MAX_CHARS = 8 * 1024
LeaseId = Annotated[str, Meta(min_length=1, max_length=200)]
Label = Annotated[str, Meta(max_length=200)]
SUBJECTS_MAX = 100

_decode_spec = msgspec.msgpack.Decoder(JobSpec).decode


# ---------------------------------------------------------------------------------------------------- tokens


class Enrolment(msgspec.Struct, kw_only=True):
    """The worker that an enrol token is for. With `worker_id`, it registers that worker again."""

    label: Label = ""
    worker_id: Annotated[str, Meta(max_length=64)] = ""


class Enrolled(msgspec.Struct, kw_only=True):
    """A token that registers one worker, once. Shown this once."""

    enroll_token: str
    token_id: str
    expires_at: str
    ttl_seconds: int


async def enroll_token(context: RequestContext, body: Enrolment) -> Enrolled:
    """Create a token that registers one worker. For administrators."""
    secret, token_id, now = make_secret("enrol"), secrets.token_hex(6), context.http.server.now().wall
    expires_at = now + ENROL_TOKEN_S
    token = {"token_id": token_id, "kind": "enrol", "sha256": token_sha256(secret), "scope": [context.subject]}
    about = {"label": body.label, "worker_id": body.worker_id, "created_at": now, "expires_at": expires_at}
    await context.ask("token.create", **token, **about)
    return Enrolled(enroll_token=secret, token_id=token_id, expires_at=iso(expires_at), ttl_seconds=int(ENROL_TOKEN_S))


class WorkerRegistration(msgspec.Struct, kw_only=True):
    """A worker's description of itself."""

    label: Label = ""
    subjects: Annotated[list[str], Meta(max_length=SUBJECTS_MAX)] = []
    """Subjects that it is to take. If the enrol token is not for all of them, it is refused and not spent."""


class WorkerRegistered(msgspec.Struct, kw_only=True):
    """The worker's own token. Shown this once."""

    worker_id: str
    worker_token: str
    token_id: str
    expires_at: str
    ttl_seconds: int
    scope: list[str]
    """The subjects that the worker may take; none: all."""


async def register(context: RequestContext, body: WorkerRegistration) -> WorkerRegistered:
    """Exchange an enrol token for a worker's own token of this app."""
    context.caller.identity.check_patterns((context.subject,))
    return await register_worker(context, body)


async def register_worker(context: RequestContext, body: WorkerRegistration) -> WorkerRegistered:
    """Exchange an enrol token for a worker's own token, with the same scope."""
    context.caller.identity.check_patterns(tuple(body.subjects))
    secret, token_id = make_secret("worker"), secrets.token_hex(6)
    async with context.client() as client:
        token = await client.request("worker.register", token_id=token_id, sha256=token_sha256(secret), label=body.label)
        if client.users == 1:  # other requests with the same token have still to learn that it is spent
            client.connection.leave()
    return _registered(secret, token)


def _registered(secret: str, token: dict[str, Any]) -> WorkerRegistered:
    facts = {name: token[name] for name in ("worker_id", "token_id", "scope")}
    return WorkerRegistered(worker_token=secret, expires_at=iso(token["expires_at"]), ttl_seconds=int(token["ttl_s"]), **facts)


class WorkerSelf(msgspec.Struct, kw_only=True):
    """The rights of a worker's token. Without `worker_id`: for any worker. Without `expires_at`: until it is revoked."""

    worker_id: str
    token_id: str
    scope: list[str]
    expires_at: str | None


async def describe_self(context: RequestContext) -> WorkerSelf:
    """Return the rights of the calling worker's token."""
    identity = context.caller.identity
    expires_at = None if identity.expires_at is None else iso(identity.expires_at)
    return WorkerSelf(worker_id=identity.worker_id, token_id=identity.token_id, scope=list(identity.scope), expires_at=expires_at)


async def rotate(context: RequestContext) -> WorkerRegistered:
    """Exchange the calling worker's token for a new one."""
    context.caller.identity.check_worker_id(str(context.request.path_params["worker_id"]))
    secret, token_id = make_secret("worker"), secrets.token_hex(6)
    with context.worker() as worker:
        token = await worker.rotate(context.caller, token_id, token_sha256(secret))
    return _registered(secret, token)


class EnrolledWorker(msgspec.Struct, kw_only=True):
    """A worker with a valid token for this app."""

    worker_id: str
    label: str
    token_id: str
    registered_at: str
    """Time at which the worker got its present token, by registration or rotation."""
    expires_at: str | None
    connected: bool
    """A server heard of it within a lease's lifetime."""
    job_ids: list[str]
    """The jobs that it has now."""


class EnrolledWorkers(msgspec.Struct):
    """The workers of an app."""

    servers: list[EnrolledWorker]


async def list_workers(context: RequestContext) -> EnrolledWorkers:
    """List the workers of this app, and the jobs that they have. For administrators."""
    subject, now = context.subject, context.http.server.now().wall
    async with context.client() as client:
        tokens = await client.request("token.list")
        connected = {worker["worker_id"] for worker in await client.request("workers")}
        found = await client.request("find", subject=subject, states=list(LEASED), limit=LISTED_JOBS_MAX)
    jobs: dict[str, list[str]] = {}
    for job in found["jobs"]:
        jobs.setdefault(job["assigned_worker_id"], []).append(job["job_id"])
    workers = {
        token["worker_id"]: EnrolledWorker(
            worker_id=token["worker_id"],
            label=token["label"],
            token_id=token["token_id"],
            registered_at=iso(token["created_at"]),
            expires_at=None if token["expires_at"] is None else iso(token["expires_at"]),
            connected=token["worker_id"] in connected,
            job_ids=jobs.get(token["worker_id"], []),
        )
        for token in sorted(tokens, key=lambda token: token["created_at"])
        if token["kind"] == PeerKind.WORKER and token["worker_id"] and token["revoked_at"] is None
        if (token["expires_at"] or now) >= now and in_scope(token["scope"], subject)
    }
    return EnrolledWorkers(list(workers.values()))


class WorkerRevoked(msgspec.Struct):
    """The number of tokens of the worker that were still valid."""

    worker_id: str
    revoked: int


async def revoke(context: RequestContext) -> WorkerRevoked:
    """Revoke all tokens with which a worker takes jobs of this app. For administrators."""
    worker_id = str(context.request.path_params["worker_id"])
    answer = await context.ask("worker.revoke", worker_id=worker_id, subject=context.subject)
    return WorkerRevoked(worker_id, len(answer["revoked"]))


# ---------------------------------------------------------------------------------------------------- lease


class LeaseOptions(msgspec.Struct, kw_only=True):
    """Lease one job; with `max_jobs` up to so many, as a list."""

    max_jobs: Annotated[int, Meta(ge=1, le=BATCH_MAX)] | None = None


class Leased(msgspec.Struct, kw_only=True):
    """One job, to be finished or renewed before the lease ends."""

    job_id: str
    payload: Any
    lease_id: str
    lease_ttl_seconds: float
    attempt: int
    timeout_seconds: float | None
    """The time limit of the attempt, which the worker keeps: it then reports a failure with the error_code TIMED_OUT."""


class LeasedMany(msgspec.Struct):
    """The jobs that there were, at most `max_jobs`."""

    jobs: list[Leased]


async def lease(context: RequestContext, body: LeaseOptions) -> Leased | LeasedMany | Response:
    """Lease one job, or with `max_jobs` several; 204 if there is none, with `?wait=25` only after that time."""
    wait_s = wait_of(context.request)
    with disconnected(context.request) as left, context.worker() as worker:
        grants = await worker.lease(context.caller, body.max_jobs or 1, wait_s, left)
    context.http.metrics.leased(context.app, len(grants))
    if not grants:
        return Response(status_code=204)
    jobs = [
        Leased(
            job_id=grant.job_id,
            payload=json_or_base64(spec.payload),
            lease_id=shown_lease_id(grant),
            lease_ttl_seconds=worker.ttl_s,
            attempt=grant.attempt,
            timeout_seconds=spec.timeout_s,
        )
        for grant, spec in ((grant, _decode_spec(grant.spec)) for grant in grants)
    ]
    return jobs[0] if body.max_jobs is None else LeasedMany(jobs)


# ---------------------------------------------------------------------------------------------------- renew


class Renewal(msgspec.Struct, kw_only=True):
    """The lease to renew."""

    lease_id: LeaseId


class LeaseItem(msgspec.Struct, kw_only=True):
    """One lease of a batch."""

    job_id: JobId
    lease_id: LeaseId


class Renewals(msgspec.Struct):
    """Several leases."""

    leases: Annotated[list[LeaseItem], Meta(min_length=1, max_length=BATCH_MAX)]


class LeaseRenewed(msgspec.Struct):
    """The lease lasts so long from now. `cancel`: stop, and report a failure with the error_code CANCELED."""

    lease_ttl_seconds: float
    cancel: bool


class BatchItem(msgspec.Struct, omit_defaults=True):
    """One item of a batch: an error, or the fields of the single form's answer."""

    job_id: str
    lease_id: str
    status: int
    error: Error | None = None
    lease_ttl_seconds: float | None = None
    cancel: bool | None = None


class BatchAnswer(msgspec.Struct):
    """The items in the order of the request."""

    items: list[BatchItem]


async def renew(context: RequestContext, body: Renewal) -> LeaseRenewed:
    """Renew a lease."""
    [answer] = await _renew(context, [claim_of(context.job_id, body.lease_id)])
    if isinstance(answer, TasukiError):
        raise answer
    return answer


async def renew_many(context: RequestContext, body: Renewals) -> BatchAnswer:
    """Renew several leases."""
    return _batch(body.leases, await _renew(context, [claim_of(item.job_id, item.lease_id) for item in body.leases]))


async def _renew(context: RequestContext, claims: list[Claim]) -> list[LeaseRenewed | TasukiError]:
    with context.worker() as worker:
        statuses = await worker.renew(context.caller, claims)
    errors = await _why_lost(context, claims, [status is LeaseStatus.LOST for status in statuses])
    renewed = [LeaseRenewed(worker.ttl_s, status is LeaseStatus.CANCEL) for status in statuses]
    return [error or answer for error, answer in zip(errors, renewed, strict=True)]


def _batch(
    items: Sequence[LeaseItem | BatchResult | BatchFailure], answers: Sequence[LeaseRenewed | TasukiError | None]
) -> BatchAnswer:
    found = []
    for item, answer in zip(items, answers, strict=True):
        if isinstance(answer, TasukiError):
            found.append(BatchItem(item.job_id, item.lease_id, status_of(answer), error_of(answer)))
        else:
            facts = {} if answer is None else msgspec.structs.asdict(answer)
            found.append(BatchItem(item.job_id, item.lease_id, 200, **facts))
    return BatchAnswer(found)


async def _why_lost(context: RequestContext, claims: Sequence[Claim], lost: Sequence[bool]) -> list[TasukiError | None]:
    """Return for each claim that is lost why its lease is not the current one, else None."""
    job_ids = [claim.job_id for claim, is_lost in zip(claims, lost, strict=True) if is_lost]
    jobs = iter(await context.http.server.ask(lambda reader: reader.get(job_ids)) if job_ids else ())
    return [
        why_lost(claim, next(jobs), context.worker_id, context.subject) if is_lost else None
        for claim, is_lost in zip(claims, lost, strict=True)
    ]


def why_lost(claim: Claim, job: Job | None, worker_id: str, subject: str) -> TasukiError:
    """Return why a lease is not current: no such job, another worker's lease, a result that is there, a newer attempt."""
    if job is None or job.spec.subject != subject:
        return NotFound(f"there is no job {claim.job_id[:128]!r}")
    lease = job.lease
    if lease is not None and lease.lease_id == claim.lease_id and lease.worker_id != worker_id:
        return Forbidden(f"the lease of job {job.job_id!r} belongs to another worker")
    if job.state is State.SUCCEEDED and (job.assigned_worker_id, job.attempt) == (worker_id, claim.attempt):
        return ResultConflict(f"job {job.job_id!r} is finished, and what was recorded is not this result under this lease")
    now = "another attempt runs" if job.state in LEASED else f"the job is {WORDS[job.state]}"
    return Fenced(f"this is not the current lease of job {job.job_id!r}: {now}; drop the work")


# ---------------------------------------------------------------------------------------------------- report


class ResultReport(msgspec.Struct, kw_only=True):
    """The result of an attempt."""

    lease_id: LeaseId
    result: dict[str, Any]
    summary_text: str
    freqs_csv: str
    meta: dict[str, Any] = {}


class BatchResult(ResultReport, kw_only=True):
    """One result of a batch."""

    job_id: JobId


class BatchResults(msgspec.Struct):
    """Several results."""

    results: Annotated[list[BatchResult], Meta(min_length=1, max_length=BATCH_MAX)]


class FailureReport(msgspec.Struct, kw_only=True):
    """The reason why an attempt failed. `permanent`: another attempt can never succeed."""

    lease_id: LeaseId
    error_code: Annotated[str, Meta(min_length=1, max_length=ERROR_CODE_MAX_CHARS)]
    error_message: Annotated[str, Meta(max_length=16_384)] = ""
    traceback: str | None = None
    permanent: bool = False


class BatchFailure(FailureReport, kw_only=True):
    """One failure of a batch."""

    job_id: JobId


class BatchFailures(msgspec.Struct):
    """Several failures."""

    failures: Annotated[list[BatchFailure], Meta(min_length=1, max_length=BATCH_MAX)]


class ResultRecorded(msgspec.Struct):
    """The result is stored. The job is finished."""

    job_id: str
    status: str = "finished"


class FailureRecorded(msgspec.Struct):
    """The failure is stored. The job is queued (it will be tried again), failed or canceled."""

    job_id: str
    status: str
    retry_count: int
    """Failures and lost attempts so far."""


async def finish(context: RequestContext, body: ResultReport) -> ResultRecorded:
    """Report the result of a job."""
    await _report_one(context, body)
    return ResultRecorded(context.job_id)


async def finish_many(context: RequestContext, body: BatchResults) -> BatchAnswer:
    """Report the results of several jobs."""
    return _batch(body.results, await _report(context, [(report.job_id, report) for report in body.results]))


async def fail(context: RequestContext, body: FailureReport) -> FailureRecorded:
    """Report that an attempt failed."""
    await _report_one(context, body)
    [job] = await context.http.server.ask(lambda reader: reader.get([context.job_id]))
    if job is None:
        raise NotFound(f"there is no job {context.job_id[:128]!r}")
    return FailureRecorded(job.job_id, WORDS[job.state], job.failures + job.losses)


async def fail_many(context: RequestContext, body: BatchFailures) -> BatchAnswer:
    """Report that several attempts failed."""
    return _batch(body.failures, await _report(context, [(report.job_id, report) for report in body.failures]))


async def _report_one(context: RequestContext, body: ResultReport | FailureReport) -> None:
    [error] = await _report(context, [(context.job_id, body)])
    if error is not None:
        raise error


async def _report(
    context: RequestContext, reports: Sequence[tuple[str, ResultReport | FailureReport]]
) -> list[TasukiError | None]:
    """Check all reports, store large results, then record all in one transaction; return for each why it is fenced, or None."""
    outcomes = [_outcome(body) for _, body in reports]
    claims = [claim_of(job_id, body.lease_id) for job_id, body in reports]
    with context.worker() as worker:
        sent = []
        for claim, (outcome, blob) in zip(claims, outcomes, strict=True):
            ref = await worker.put_blob(context.caller, blob) if blob is not None else None
            sent.append((claim, outcome if ref is None else replace(outcome, result_ref=ref)))
        answers = await worker.report(context.caller, sent)
    recorded = answers.count(None)
    what = "result" if isinstance(reports[0][1], ResultReport) else "failed"
    context.http.metrics.reported(context.app, what, recorded=recorded, fenced=len(answers) - recorded)
    return await _why_lost(context, claims, [fenced is not None for fenced in answers])


def _outcome(body: ResultReport | FailureReport) -> tuple[Outcome, bytes | None]:
    if isinstance(body, ResultReport):
        outcome, blob = outcome_of(body.result, body.summary_text, body.freqs_csv, body.meta)
    else:
        meta: dict[str, Any] = {"traceback": body.traceback[-TRACEBACK_MAX_CHARS:]} if body.traceback else {}
        outcome, blob = Outcome(error_code=body.error_code, message=body.error_message, permanent=body.permanent, meta=meta), None
    check_outcome(outcome)
    return outcome, blob
