"""Why a job stands where it stands, in sentences and as facts, from what the store and the server know. Pure.

`explain` answers for the state as it is: why it waits, where it is and why there, how it ended. What came before (earlier
attempts, refused reports, where the time went) is told by `explain_past.py`. Sentences are for people and may change; the keys
and the words of `facts` are for programs, and do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tasuki.core.explain_past import again, fenced, times
from tasuki.core.job import READY, TERMINAL, Job, JobIncident, State
from tasuki.core.lifecycle import is_late, was_made
from tasuki.core.store_messages import Takes
from tasuki.core.subject import matches

SHOWN_MAX = 3  # names and patterns in one sentence; the facts have more
LISTED_MAX = 100  # names in one list of facts

Worker = Mapping[str, Any]
Told = tuple[str, list[str], dict[str, Any]]
"""A word for programs, sentences, and facts."""


class ExplainContext(msgspec.Struct, frozen=True, kw_only=True):
    """What is known besides the job itself."""

    workers: Sequence[Worker] = ()
    """The live ones, as `tasuki workers` shows them."""
    ahead: int | None = None
    """Ready jobs of its subject and priority that stand before it."""
    top_band: int | None = None
    """The highest priority of which anything is ready."""
    trouble: str = ""
    """Why this server grants nothing at all: the disk is full, or the store cannot be written to."""
    now_wall: float


def explain(job: Job, incidents: Sequence[JobIncident], around: ExplainContext) -> dict[str, Any]:
    """{"state", "because": sentences, "facts", "story": incidents}."""
    if job.state in READY:
        why, because, facts = _waiting(job, around)
    elif job.state in TERMINAL:
        why, because, facts = _ended(job)
    else:
        why, because, facts = _held(job, around.workers)
    for sentences, more in (again(job, incidents), fenced(incidents), times(job, incidents, around.now_wall)):
        because += sentences
        facts |= more
    return {
        "job_id": job.job_id,
        "state": str(job.state),
        "subject": job.spec.subject,
        "attempt": job.attempt,
        "because": because,
        "facts": {"why": why, **facts},
        "story": [{name: getattr(incident, name) for name in incident.__struct_fields__} for incident in incidents],
    }


# ---------------------------------------------------------------------------------------------------- waiting


def _waiting(job: Job, around: ExplainContext) -> Told:
    why, because, facts = _why_waiting(job, around)
    facts = {"workers": len(around.workers), "fitting_workers": [], **facts, "ahead": around.ahead, "priority": job.priority}
    if job.state is State.ORPHANED and job.lease is not None:
        because.append(
            f"Worker {job.lease.worker_id} kept it and is silent. It may still finish it, and goes on with it if it is back "
            "before another one takes it."
        )
        facts["kept_by"] = job.lease.worker_id
    if job.not_after is not None:
        facts["not_after"] = job.not_after
        if why != "TOO_LATE":
            because.append(f"If it still waits in {job.not_after - around.now_wall:.1f} s, it is too late to start, and skipped.")
    return why, because, facts


def _why_waiting(job: Job, around: ExplainContext) -> Told:
    """The first thing that is in its way."""
    if is_late(job.not_after, around.now_wall):
        return "TOO_LATE", ["It is too late to start it, by its not_after: it is about to be skipped."], {}
    if job.not_before is not None and job.not_before > around.now_wall:
        return _delayed(job, job.not_before - around.now_wall)
    if around.trouble:
        return "TROUBLE", [f"This server gives out no job at the moment: {around.trouble}."], {"trouble": around.trouble}
    if not around.workers:
        return "NO_WORKERS", ["No worker is connected. Start one with: tasuki worker --to URL"], {}
    fitting = [worker for worker in around.workers if _pattern_of(worker, job.spec.subject) is not None]
    if not fitting:
        return _no_pattern(job.spec.subject, around.workers)
    able = [worker for worker in fitting if Takes(worker.get("takes", "any")).fits(job.spec.exec, job.submitter)]
    if not able:
        return _other_kind(job, fitting)
    attached = [worker for worker in able if not worker.get("detached")]
    if not attached:
        names = _names(able)
        return (
            "DETACHED",
            [f"The workers that fit are detached: {', '.join(names[:SHOWN_MAX])}. Give one work: tasuki attach {names[0]}"],
            {"detached_workers": names},
        )
    return _its_turn(job, attached, around)


def _delayed(job: Job, wait_s: float) -> Told:
    facts: dict[str, Any] = {"not_before": job.not_before, "wait_s": round(wait_s, 3)}
    if job.failures and job.outcome is not None:
        reason = job.outcome.message or job.outcome.error_code
        words = f"It may not start for another {wait_s:.1f} s: retry {job.failures} of {job.spec.max_retries} after {reason}."
        return "RETRY_DELAY", [words], facts
    if job.losses and job.spec.not_before != job.not_before:
        words = f"attempt {job.attempt} was lost, loss {job.losses} of {job.spec.max_losses}"
        return "LOSS_DELAY", [f"It may not start for another {wait_s:.1f} s: {words}."], facts
    asked = ": its submitter said so" if job.spec.not_before == job.not_before else ""
    return "NOT_BEFORE", [f"It may not start for another {wait_s:.1f} s{asked}."], facts


def _no_pattern(subject: str, workers: Sequence[Worker]) -> Told:
    holders: dict[str, list[str]] = {}
    for worker in workers:
        for pattern in worker["patterns"]:
            holders.setdefault(pattern, []).append(worker["worker_id"])
    nearest = sorted(holders, key=lambda pattern: -_common(pattern, subject))[:SHOWN_MAX]
    reasons = {pattern: why_not(pattern, subject) for pattern in nearest}
    shown = "; ".join(f"{pattern!r} of {holders[pattern][0]}: {reason}" for pattern, reason in reasons.items())
    near = f"The nearest patterns are {shown}." if shown else "They subscribe to nothing at all."
    facts = {
        "nearest_patterns": nearest,
        "nearest": [
            {"pattern": pattern, "why_not": reason, "worker_ids": holders[pattern][:LISTED_MAX]}
            for pattern, reason in reasons.items()
        ],
    }
    return "NO_PATTERN", [f"No connected worker subscribes to {subject!r}. {near}"], facts


def _other_kind(job: Job, fitting: Sequence[Worker]) -> Told:
    exec_ = job.spec.exec
    kind = f"the exec {exec_!r} for you" if exec_ else "jobs without an exec, which need a Python handler"
    hint = f"; allow it at one: tasuki worker --exec {exec_}=COMMAND" if exec_ else ""
    takes = {worker["worker_id"]: str(worker.get("takes", "any")) for worker in fitting[:LISTED_MAX]}
    shown = ", ".join(f"{name} takes {what}" for name, what in list(takes.items())[:SHOWN_MAX])
    return (
        "OTHER_KIND",
        [f"The workers that subscribe to {job.spec.subject!r} do not run {kind} ({shown}){hint}."],
        {"other_kind_workers": takes},
    )


def _its_turn(job: Job, fitting: Sequence[Worker], around: ExplainContext) -> Told:
    addressed = _addressed(job.spec.subject, fitting)
    fitting = [addressed] if addressed is not None else fitting
    free = _names([worker for worker in fitting if worker["credit"] > 0])
    facts: dict[str, Any] = {"fitting_workers": _names(fitting), "workers_with_credit": free, "top_band": around.top_band}
    if addressed is not None:
        facts["addressed_to"] = addressed["worker_id"]
    only = f"Its subject ends in {addressed['worker_id']}, so only that worker gets it. " if addressed is not None else ""
    line = _place_in_line(job, around)
    if not free:
        busy = ", ".join(f"{worker['worker_id']} ({worker['running']} running)" for worker in fitting[:SHOWN_MAX])
        return "BUSY", [f"{only}All workers that fit are busy: {busy}.{line}"], facts
    return (
        "ITS_TURN",
        [f"{only}It is ready, and {len(free)} worker(s) that fit have room: it is about to be leased.{line}"],
        facts,
    )


def _place_in_line(job: Job, around: ExplainContext) -> str:
    """How many go before it, in its own band of priority and above."""
    line = ""
    if around.ahead:
        line = f" {around.ahead} ready job(s) of its subject stand before it in priority {job.priority}."
    if around.top_band is not None and around.top_band > job.priority:
        line += f" Jobs of priority {around.top_band} are ready; those that fit the same workers go first."
    return line


# ---------------------------------------------------------------------------------------------------- at a worker


def _held(job: Job, workers: Sequence[Worker]) -> Told:
    assert job.lease is not None
    lease = job.lease
    subject = job.spec.subject
    worker = next((w for w in workers if (w["worker_id"], w["incarnation"]) == (lease.worker_id, lease.incarnation)), None)
    word = "runs at" if job.state is State.RUNNING else "was given to"
    because = [f"It {word} worker {lease.worker_id}, which is {'not ' if worker is None else ''}connected."]
    facts: dict[str, Any] = {
        "worker_id": lease.worker_id,
        "connected": worker is not None,
        "lease_expires_at": lease.expires_at,
        "cancel_requested": job.cancel_requested,
    }
    pattern = _pattern_of(worker, subject) if worker is not None else None
    if pattern is not None:
        chosen_by, words = _why_there(subject, lease.worker_id, workers)
        because.append(f"Its pattern {pattern!r} matches. {words}")
        facts |= {"pattern": pattern, "chosen_by": chosen_by}
    if job.progress is not None:
        said = f" ({job.progress.text})" if job.progress.text else ""
        because.append(f"It says that it is {job.progress.fraction:.0%} done{said}.")
        facts |= {"progress": job.progress.fraction, "progress_text": job.progress.text}
    if worker is None:
        because.append("If the worker does not come back before its lease ends, the job goes to another one.")
    if job.cancel_requested:
        because.append("It was asked to stop; it becomes CANCELED when the worker reports, or when its lease ends.")
    return "AT_WORKER" if worker is not None else "WORKER_AWAY", because, facts


def _why_there(subject: str, worker_id: str, workers: Sequence[Worker]) -> tuple[str, str]:
    if subject.rpartition(".")[2] == worker_id:
        return "LAST_TOKEN", "The subject's last token is its id, so no other worker gets the job while it is there."
    others = [w["worker_id"] for w in workers if w["worker_id"] != worker_id and _pattern_of(w, subject) is not None]
    if not others:
        return "ONLY_ONE", "No other connected worker subscribes to the subject."
    shown = ", ".join(others[:SHOWN_MAX])
    return "LEAST_LOAD", f"So do others' ({shown}); the worker with the smallest share of its places in use is asked first."


# ---------------------------------------------------------------------------------------------------- ended


def _ended(job: Job) -> Told:
    outcome = job.outcome
    facts: dict[str, Any] = {"worker_id": job.assigned_worker_id}
    if outcome is not None:
        facts |= {"error_code": outcome.error_code, "exit_code": outcome.exit_code, "permanent": outcome.permanent}
    if job.state is State.SUCCEEDED:
        attempt = f" in attempt {job.attempt}" if was_made(job.attempt) else ""
        return "SUCCEEDED", [f"It succeeded{attempt} at worker {job.assigned_worker_id}."], facts
    reason = outcome.message or outcome.error_code if outcome is not None else "no reason was recorded"
    word = "TOO_LATE" if job.state is State.SKIPPED else str(job.state)
    return word, [f"It is {job.state}: {reason}. Set it going again with: tasuki retry {job.job_id}"], facts


# ---------------------------------------------------------------------------------------------------- patterns


def _names(workers: Sequence[Worker]) -> list[str]:
    return [worker["worker_id"] for worker in workers[:LISTED_MAX]]


def _pattern_of(worker: Worker, subject: str) -> str | None:
    """By which of its patterns the worker gets the subject."""
    return next((pattern for pattern in worker["patterns"] if matches(pattern, subject)), None)


def _addressed(subject: str, workers: Sequence[Worker]) -> Worker | None:
    """The one worker that the subject's last token names."""
    last = subject.rpartition(".")[2]
    return next((worker for worker in workers if worker["worker_id"] == last), None)


def _common(pattern: str, subject: str) -> int:
    """How many tokens from the left fit."""
    count = 0
    for one, other in zip(pattern.split("."), subject.split("."), strict=False):
        if one not in (other, "*", ">"):
            break
        count += 1
    return count


def why_not(pattern: str, subject: str) -> str:
    """What keeps the pattern from matching: the first token that differs, or the number of tokens."""
    wanted, given = pattern.split("."), subject.split(".")
    place = _common(pattern, subject)
    if place < min(len(wanted), len(given)):
        only_case = " (only in case)" if wanted[place].casefold() == given[place].casefold() else ""
        return f"its token {place + 1} is {wanted[place]!r}, not {given[place]!r}{only_case}"
    if len(wanted) < len(given):
        return f"it ends after {len(wanted)} token(s), the subject has {len(given)}"
    return f"it needs {len(wanted)} tokens{' or more' if wanted[-1] == '>' else ''}, the subject has {len(given)}"
