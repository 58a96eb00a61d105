"""Why a job stands where it stands, in sentences and as facts, from what the store and the server know. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tasuki.core.job import TERMINAL, Incident, Job, State
from tasuki.core.lifecycle import ATTEMPT_STEP
from tasuki.core.subject import matches
from tasuki.core.verbs import Takes

NEAREST_MAX = 3


def explain(
    job: Job, incidents: Sequence[Incident], workers: Sequence[Mapping[str, Any]], ahead: int | None, now_wall: float
) -> dict[str, Any]:
    """{"state", "because": sentences, "story": incidents} for a person, with the facts beside them."""
    because: list[str] = []
    facts: dict[str, Any] = {}
    if job.state in (State.PENDING, State.ORPHANED):
        because, facts = _waiting(job, workers, ahead, now_wall)
    elif job.state in (State.ASSIGNED, State.RUNNING):
        because, facts = _held(job, workers)
    elif job.state in TERMINAL:
        because = [_ended(job)]
    if _is_of_an_earlier_life(job):
        because.append(f"The store was restored from a backup since; its next attempt is {job.attempt + 1}.")
    elif job.attempt > 1:
        because.append(f"This is attempt {job.attempt}: {_again(incidents)}")
    if job.generation:
        because.append(f"It was set going again {job.generation} time(s) after it had ended.")
    return {
        "job_id": job.job_id,
        "state": str(job.state),
        "subject": job.spec.subject,
        "attempt": job.attempt,
        "because": because,
        "facts": facts,
        "story": [_incident(incident) for incident in incidents],
    }


def _waiting(
    job: Job, workers: Sequence[Mapping[str, Any]], ahead: int | None, now_wall: float
) -> tuple[list[str], dict[str, Any]]:
    subject = job.spec.subject
    fitting = [worker for worker in workers if any(matches(pattern, subject) for pattern in worker["patterns"])]
    facts: dict[str, Any] = {
        "workers": len(workers),
        "fitting_workers": [worker["worker_id"] for worker in fitting],
        "ahead": ahead,
    }
    if job.not_before is not None and job.not_before > now_wall:
        facts["not_before"] = job.not_before
        return [f"It may not start for another {job.not_before - now_wall:.1f} s{_why_later(job)}."], facts
    if not workers:
        return ["No worker is connected. Start one with: tasuki worker --to URL"], facts
    able = [worker for worker in fitting if Takes(worker.get("takes", "any")).fits(job.spec.exec, job.submitter)]
    if fitting and not able:
        kind = f"the exec {job.spec.exec!r} for you" if job.spec.exec else "jobs without an exec, which need a Python handler"
        facts["fitting_workers"] = []
        hint = f"; allow it at one: tasuki worker --exec {job.spec.exec}=COMMAND" if job.spec.exec else ""
        return [f"The workers that subscribe to {subject!r} do not run {kind}{hint}."], facts
    fitting = [worker for worker in able if not worker.get("detached")]
    if able and not fitting:
        names = [worker["worker_id"] for worker in able]
        facts["detached_workers"] = names
        return [
            f"The workers that fit are detached: {', '.join(names[:NEAREST_MAX])}. Give one work: tasuki attach {names[0]}"
        ], facts
    if not fitting:
        nearest = sorted({pattern for worker in workers for pattern in worker["patterns"]}, key=lambda p: -_common(p, subject))
        facts["nearest_patterns"] = nearest[:NEAREST_MAX]
        shown = ", ".join(repr(pattern) for pattern in nearest[:NEAREST_MAX]) or "none"
        return [f"No connected worker subscribes to {subject!r}; the nearest patterns are {shown}."], facts
    free = [worker["worker_id"] for worker in fitting if worker["credit"] > 0]
    facts["workers_with_credit"] = free
    before = f" {ahead} ready job(s) of its subject and priority stand before it." if ahead else ""
    if not free:
        busy = ", ".join(f"{worker['worker_id']} ({worker['running']} running)" for worker in fitting[:NEAREST_MAX])
        return [f"All workers that fit are busy: {busy}.{before}"], facts
    return [f"It is ready, and {len(free)} worker(s) that fit have room: it is about to be leased.{before}"], facts


def _why_later(job: Job) -> str:
    if job.failures and job.outcome is not None:
        return f": retry {job.failures} of {job.spec.max_retries} after {job.outcome.message or job.outcome.error_code}"
    return ": its submitter said so" if job.spec.not_before == job.not_before else ""


def _held(job: Job, workers: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[str, Any]]:
    assert job.lease is not None
    lease = job.lease
    connected = any(w["worker_id"] == lease.worker_id and w["incarnation"] == lease.incarnation for w in workers)
    word = "runs at" if job.state is State.RUNNING else "was given to"
    because = [f"It {word} worker {lease.worker_id}, which is {'connected' if connected else 'not connected'}."]
    if not connected:
        because.append("If the worker does not come back before its lease ends, the job goes to another one.")
    if job.cancel_requested:
        because.append("It was asked to stop; it becomes CANCELED when the worker reports, or when its lease ends.")
    return because, {"worker_id": lease.worker_id, "connected": connected, "lease_expires_at": lease.expires_at}


def _ended(job: Job) -> str:
    outcome = job.outcome
    if job.state is State.SUCCEEDED:
        attempt = "" if _is_of_an_earlier_life(job) else f" in attempt {job.attempt}"
        return f"It succeeded{attempt} at worker {job.assigned_worker_id}."
    reason = outcome.message or outcome.error_code if outcome is not None else "no reason was recorded"
    return f"It is {job.state}: {reason}. Set it going again with: tasuki retry {job.job_id}"


def _is_of_an_earlier_life(job: Job) -> bool:
    """No attempt since the store was restored from a backup: the number says only where the next one begins."""
    return job.attempt > 0 and job.attempt % ATTEMPT_STEP == 0


def _again(incidents: Sequence[Incident]) -> str:
    told = [i for i in incidents if i.kind in ("failed", "lost", "orphaned", "released", "taken_over", "requeued", "restored")]
    if not told:
        return "earlier attempts were given back unstarted."
    last = told[-1]
    reason = f" ({last.reason})" if last.reason else ""
    return f"attempt {last.attempt} was {last.kind}{reason}." if last.attempt else f"{last.kind}{reason}."


def _incident(incident: Incident) -> dict[str, Any]:
    return {name: getattr(incident, name) for name in incident.__struct_fields__}


def _common(pattern: str, subject: str) -> int:
    count = 0
    for one, other in zip(pattern.split("."), subject.split("."), strict=False):
        if one not in (other, "*", ">"):
            break
        count += 1
    return count
