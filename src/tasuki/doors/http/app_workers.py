"""/calc/{app}/compute: the workers of an app. They enrol, lease, renew, and report."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.responses import Response

from tasuki.core.access import ENROL_TOKEN_S, token_sha256
from tasuki.core.apps import WORDS, outcome_of, payload_of
from tasuki.core.job import LEASED, Job, JobSpec, Outcome, State
from tasuki.core.protocol import Claim
from tasuki.core.report_limits import check_outcome
from tasuki.core.store_messages import Grant, LeaseStatus
from tasuki.doors.http import enrolment
from tasuki.doors.http.context import RequestContext, iso, status_and_error
from tasuki.doors.http.exchange import disconnected, wait_of
from tasuki.doors.http.request_schemas import FailureReport, ResultReport
from tasuki.doors.http.response_schemas import (
    BatchItem,
    Enrolled,
    FailureRecorded,
    Leased,
    LeasedMany,
    LeaseRenewed,
    ResultRecorded,
    ToldMany,
    WorkerRegistered,
    WorkerRevoked,
)
from tasuki.doors.http.workers import HttpWorker, claim_of, shown_lease_id
from tasuki.errors import Fenced, Forbidden, NotFound, ResultConflict, TasukiError
from tasuki.server.assembly import make_secret

TRACEBACK_MAX_CHARS = 8 * 1024
_decode_spec = msgspec.msgpack.Decoder(JobSpec).decode


# ---------------------------------------------------------------------------------------------------- tokens


async def enroll_token(call: RequestContext) -> Enrolled:
    """For an administrator."""
    secret, token_id, now = make_secret("enrol"), secrets.token_hex(6), call.house.server.now().wall
    async with call.house.clients.use(call.caller) as client:
        await client.request(
            "token.create",
            token_id=token_id,
            kind="enrol",
            sha256=token_sha256(secret),
            label=call.body.label,
            scope=[call.subject],
            worker_id=call.body.worker_id,
            created_at=now,
            expires_at=now + ENROL_TOKEN_S,
        )
    expires_at = iso(now + ENROL_TOKEN_S)
    return Enrolled(enroll_token=secret, token_id=token_id, expires_at=expires_at, ttl_seconds=int(ENROL_TOKEN_S))


async def register(call: RequestContext) -> WorkerRegistered:
    """For who has an enrol token, which is spent by this."""
    call.caller.identity.check_patterns((call.subject,))
    return await enrolment.register(call)


async def rotate(call: RequestContext) -> WorkerRegistered:
    """For the worker itself: another token in place of the one that it shows."""
    call.caller.identity.check_worker_id(str(call.request.path_params["worker_id"]))
    secret, token_id = make_secret("worker"), secrets.token_hex(6)
    with call.house.workers.of(call.worker_id, call.subject) as worker:
        told = await worker.rotate(call.caller, token_id, token_sha256(secret))
    return enrolment.registered(secret, told)


async def revoke(call: RequestContext) -> WorkerRevoked:
    """For an administrator: all tokens with which a worker takes jobs of this app."""
    worker_id = str(call.request.path_params["worker_id"])
    async with call.house.clients.use(call.caller) as client:
        told = await client.request("worker.revoke", worker_id=worker_id, subject=call.subject)
    return WorkerRevoked(worker_id, len(told["revoked"]))


# ---------------------------------------------------------------------------------------------------- lease


async def lease(call: RequestContext) -> Leased | LeasedMany | Response:
    """One job, or with `max_jobs` several; 204 if there is none, with `?wait=25` only after so long."""
    wait_s = wait_of(call.request)
    left = disconnected(call.request)
    wanted = call.body.max_jobs
    try:
        with call.house.workers.of(call.worker_id, call.subject) as worker:
            grants = await worker.lease(call.caller, wanted or 1, wait_s, left)
    finally:
        left.cancel()
    call.house.metrics.leased(call.app, len(grants))
    if not grants:
        return Response(status_code=204)
    jobs = [_leased(grant, worker) for grant in grants]
    return jobs[0] if wanted is None else LeasedMany(jobs)


def _leased(grant: Grant, worker: HttpWorker) -> Leased:
    payload = payload_of(_decode_spec(grant.spec).payload)
    return Leased(job_id=grant.job_id, payload=payload, lease_id=shown_lease_id(grant), lease_ttl_seconds=worker.ttl_s)


# ---------------------------------------------------------------------------------------------------- renew


async def renew(call: RequestContext) -> LeaseRenewed:
    claim = claim_of(call.job_id, call.body.lease_id)
    with call.house.workers.of(call.worker_id, call.subject) as worker:
        [standing] = await worker.renew(call.caller, [claim])
    if standing is LeaseStatus.LOST:
        [error] = await _judged(call, [claim])
        raise error
    return LeaseRenewed(worker.ttl_s, standing is LeaseStatus.CANCEL)


async def renew_many(call: RequestContext) -> ToldMany:
    claims = [claim_of(shown.job_id, shown.lease_id) for shown in call.body.leases]
    with call.house.workers.of(call.worker_id, call.subject) as worker:
        standings = await worker.renew(call.caller, claims)
    lost = [claim for claim, standing in zip(claims, standings, strict=True) if standing is LeaseStatus.LOST]
    errors = iter(await _judged(call, lost))
    items = []
    for shown, standing in zip(call.body.leases, standings, strict=True):
        if standing is LeaseStatus.LOST:
            status, error = status_and_error(next(errors))
            items.append(BatchItem(shown.job_id, shown.lease_id, status, error))
        else:
            cancel = standing is LeaseStatus.CANCEL
            items.append(BatchItem(shown.job_id, shown.lease_id, 200, lease_ttl_seconds=worker.ttl_s, cancel=cancel))
    return ToldMany(items)


async def _judged(call: RequestContext, claims: Sequence[Claim]) -> list[TasukiError]:
    """Why these leases are not what their worker takes them for."""
    if not claims:
        return []
    job_ids = [claim.job_id for claim in claims]
    jobs = await call.house.server.ask(lambda reader: reader.get(job_ids))
    return [why_not(claim, job, call.worker_id, call.subject) for claim, job in zip(claims, jobs, strict=True)]


def why_not(claim: Claim, job: Job | None, worker_id: str, subject: str) -> TasukiError:
    """404: no such job. 403: the lease is another worker's. 409: the job has a result already, or the lease is not current."""
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


async def finish(call: RequestContext) -> ResultRecorded:
    await _report_one(call)
    return ResultRecorded(call.job_id)


async def finish_many(call: RequestContext) -> ToldMany:
    return await _report_many(call, [(body.job_id, body) for body in call.body.results])


async def fail(call: RequestContext) -> FailureRecorded:
    await _report_one(call)
    [job] = await call.house.server.ask(lambda reader: reader.get([call.job_id]))
    if job is None:
        raise NotFound(f"there is no job {call.job_id[:128]!r}")
    return FailureRecorded(job.job_id, WORDS[job.state], job.failures + job.losses)


async def fail_many(call: RequestContext) -> ToldMany:
    return await _report_many(call, [(body.job_id, body) for body in call.body.failures])


async def _report_one(call: RequestContext) -> None:
    claims, [fenced] = await _report(call, [(call.job_id, call.body)])
    if fenced is not None:
        [error] = await _judged(call, claims)
        raise error


async def _report_many(call: RequestContext, reports: Sequence[tuple[str, ResultReport | FailureReport]]) -> ToldMany:
    claims, answers = await _report(call, reports)
    refused = [claim for claim, fenced in zip(claims, answers, strict=True) if fenced is not None]
    errors = iter(await _judged(call, refused))
    items = []
    for (job_id, body), fenced in zip(reports, answers, strict=True):
        status, error = (200, None) if fenced is None else status_and_error(next(errors))
        items.append(BatchItem(job_id, body.lease_id, status, error))
    return ToldMany(items)


async def _report(
    call: RequestContext, reports: Sequence[tuple[str, ResultReport | FailureReport]]
) -> tuple[list[Claim], list[str | None]]:
    """Check all, bring the large results, then have all of them recorded in one transaction. Why each is fenced, or None."""
    outcomes = [_outcome(body) for _, body in reports]
    claims = [claim_of(job_id, body.lease_id) for job_id, body in reports]
    with call.house.workers.of(call.worker_id, call.subject) as worker:
        sent = []
        for claim, (outcome, blob) in zip(claims, outcomes, strict=True):
            ref = await worker.put_blob(call.caller, blob) if blob is not None else None
            sent.append((claim, outcome if ref is None else replace(outcome, result_ref=ref)))
        answers = await worker.report(call.caller, sent)
    recorded = answers.count(None)
    what = "result" if isinstance(reports[0][1], ResultReport) else "failed"
    call.house.metrics.reported(call.app, what, recorded=recorded, fenced=len(answers) - recorded)
    return claims, answers


def _outcome(body: ResultReport | FailureReport) -> tuple[Outcome, bytes | None]:
    if isinstance(body, ResultReport):
        outcome, blob = outcome_of(body.result, body.summary_text, body.freqs_csv, body.meta)
    else:
        meta: dict[str, Any] = {"traceback": body.traceback[-TRACEBACK_MAX_CHARS:]} if body.traceback else {}
        outcome, blob = Outcome(error_code=body.error_code, message=body.error_message, permanent=body.permanent, meta=meta), None
    check_outcome(outcome)
    return outcome, blob
