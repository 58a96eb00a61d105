"""Reasons for the state of a job, in sentences and as facts, from what the store and the server know. Pure.

`explain` answers for the state as it is: why the job waits, where it runs and why there, how it ended; and for the past: earlier
attempts, refused reports, waiting times. Sentences are for people and may change; the keys and words of `facts` are for programs
and do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tasuki.core.job import DEAD, READY, TERMINAL, Job, JobIncident, State
from tasuki.core.lifecycle import is_late, was_made
from tasuki.core.pauses import PausedPattern, pause_of
from tasuki.core.routing import ROUTE_WAIT_S, Candidate, SubjectRoute, choose, facts_of, route_of, why
from tasuki.core.store_messages import OWN_PROGRAMS, Offer, Takes, kind_of
from tasuki.core.subject import is_reached, matches, only_worker
from tasuki.core.units import shown_duration, shown_time
from tasuki.errors import quoted

SHOWN_MAX = 3  # names and patterns in one sentence; the facts have more
LISTED_MAX = 100  # names in one list of facts

Worker = Mapping[str, Any]
Explanation = tuple[str, list[str], dict[str, Any]]
"""A word for programs, sentences, and facts."""


class ExplainContext(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the workers, the queue and the server at the moment of the question."""

    workers: Sequence[Worker] = ()
    """Live workers, as `tasuki workers` shows them."""
    ahead: int | None = None
    """Ready jobs of its subject and priority that stand before it."""
    top_band: int | None = None
    """The highest priority of which anything is ready."""
    trouble: str = ""
    """Reason why this server grants nothing at all: the disk is full, or the store cannot be written to."""
    has_leader: bool = True
    """A live server leads; without one nothing that waits for a time becomes ready."""
    now_wall: float
    start_worker: str = "tasuki worker --to URL"
    """Command that starts a worker here."""
    run_again: str = "tasuki retry"
    """Command that runs ended jobs again, without their ids."""
    routes: Sequence[SubjectRoute] = ()
    """Routing policies, the first that matches."""
    route_wait_s: float = ROUTE_WAIT_S
    route_reason: tuple[str, str] = ("", "")
    """The worker that a policy chose for the job, and why, if the server that is asked knows it."""
    pauses: Sequence[PausedPattern] = ()
    resume: str = "tasuki resume"
    """Command that resumes a pattern, without it."""


def explain(job: Job, incidents: Sequence[JobIncident], context: ExplainContext) -> dict[str, Any]:
    """Return {"state", "because": sentences, "facts", "story": incidents}."""
    if job.state in READY:
        why, because, facts = _waiting(job, context)
    elif job.state in TERMINAL:
        why, because, facts = _ended(job, context)
        because.extend(_routed_before(job, context))
    else:
        why, because, facts = _held(job, context)
    if job.outcome is not None and isinstance(traceback := job.outcome.meta.get("traceback"), str):
        facts["traceback"] = traceback
    for sentences, more in (again(job, incidents), fenced(incidents), times(job, incidents, context.now_wall)):
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


def _waiting(job: Job, context: ExplainContext) -> Explanation:
    why, because, facts = _why_waiting(job, context)
    facts = {"workers": len(context.workers), "fitting_workers": [], **facts, "ahead": context.ahead, "priority": job.priority}
    if job.state is State.ORPHANED and job.lease is not None:
        silent = f"Worker {job.lease.worker_id} kept it and is silent. It may still finish it, and continues with it"
        because.append(f"{silent} if it is back before another one takes it.")
        facts["kept_by"] = job.lease.worker_id
    if job.not_after is not None:
        facts["not_after"] = job.not_after
        if why != "TOO_LATE":
            left_s = job.not_after - context.now_wall
            because.append(f"If it still waits in {shown_duration(left_s)}, it is too late to start, and skipped.")
    return why, because, facts


def _why_waiting(job: Job, context: ExplainContext) -> Explanation:
    """Return the first obstacle between the job and a worker."""
    if is_late(job.not_after, context.now_wall):
        return "TOO_LATE", ["It is too late to start it, by its not_after: it is about to be skipped."], {}
    if job.not_before is not None and job.not_before > context.now_wall:
        return _delayed(job, job.not_before - context.now_wall)
    if not context.has_leader and context.ahead is None:
        return "NO_LEADER", ["No process leads at the moment. What waits for a time becomes ready when one does."], {}
    if job.job_definition_id is not None and job.state is State.PENDING and context.ahead is None:
        return "PREDECESSOR", ["It replaces an earlier run of its definition, and starts when nothing of that one is left."], {}
    if (pause := pause_of(context.pauses, job.spec.subject)) is not None:
        return _paused(pause, context.resume)
    if context.trouble:
        return "TROUBLE", [f"This server gives out no job at the moment: {context.trouble}."], {"trouble": context.trouble}
    if not context.workers:
        return "NO_WORKERS", [f"No worker is connected. Start one with: {context.start_worker}"], {}
    if (only := only_worker(job.spec.subject)) is not None:
        return _for_one(job, only, context)
    fitting = [worker for worker in context.workers if _pattern_of(worker, job.spec.subject) is not None]
    if not fitting:
        return _no_pattern(job.spec.subject, context.workers)
    kind = kind_of(job.spec.exec, job.submitter)
    able = [worker for worker in fitting if _offer_of(worker).fits(kind, job.spec.exec)]
    if (addressed := _addressed(job, fitting)) and addressed[0] not in able:
        return _left_to(job, addressed[0])
    if not able:
        return _not_offered(job, fitting, context.workers)
    if named := [worker for worker in able if job.spec.exec in (worker.get("execs") or ())]:
        able = named  # workers that run any program leave it to these
    attached = [worker for worker in able if not worker.get("detached")]
    if not attached:
        names = _names(able)
        words = f"The workers that fit are detached: {', '.join(names[:SHOWN_MAX])}. Give one work: tasuki attach {names[0]}"
        return "DETACHED", [words], {"detached_workers": names}
    return _its_turn(job, attached, context)


def _paused(pause: PausedPattern, resume: str) -> Explanation:
    why = f" because: {pause.reason}" if pause.reason else ""
    words = f"Its subject is paused ({pause.pattern!r}) by {pause.actor} since {shown_time(pause.since)}{why}."
    facts = {"pattern": pause.pattern, "paused_by": pause.actor, "paused_since": pause.since, "pause_reason": pause.reason}
    return "PAUSED", [f"{words} It may start after: {resume} '{pause.pattern}'"], facts


def _for_one(job: Job, worker_id: str, context: ExplainContext) -> Explanation:
    """Explain the wait of a job that is for one worker alone."""
    facts: dict[str, Any] = {"addressed_to": worker_id}
    worker = next((worker for worker in context.workers if worker["worker_id"] == worker_id), None)
    if worker is None:
        return "WORKER_AWAY", [f"It is for worker {worker_id} alone, which is not connected: it gets it when it is back."], facts
    if not is_reached(worker["patterns"], job.spec.subject):
        near = ", ".join(worker["patterns"][:SHOWN_MAX])
        return "NO_PATTERN", [f"It is for worker {worker_id} alone, which subscribes to nothing that it meets ({near})."], facts
    if not _offer_of(worker).fits(kind_of(job.spec.exec, job.submitter), job.spec.exec):
        return _left_to(job, worker)
    return _its_turn(job, [worker], context)


def _delayed(job: Job, wait_s: float) -> Explanation:
    facts: dict[str, Any] = {"not_before": job.not_before, "wait_s": round(wait_s, 3)}
    if job.failures and job.outcome is not None:
        reason = job.outcome.message or job.outcome.error_code
        words = f"retry {job.failures} of {job.spec.max_retries} after {reason}"
        return "RETRY_DELAY", [f"It may not start for another {shown_duration(wait_s)}: {words}."], facts
    if job.losses and job.spec.not_before != job.not_before:
        words = f"attempt {job.attempt} was lost, loss {job.losses} of {job.spec.max_losses}"
        return "LOSS_DELAY", [f"It may not start for another {shown_duration(wait_s)}: {words}."], facts
    if job.job_definition_id is not None:
        words = "shortly before, the leader assigns it to a worker; if nobody has room, whoever is free takes it then"
        return "NOT_DUE", [f"It is due in {shown_duration(wait_s)}: {words}."], facts
    asked = ": its submitter asked for that" if job.spec.not_before == job.not_before else ""
    return "NOT_BEFORE", [f"It may not start for another {shown_duration(wait_s)}{asked}."], facts


def _no_pattern(subject: str, workers: Sequence[Worker]) -> Explanation:
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


def _not_offered(job: Job, fitting: Sequence[Worker], workers: Sequence[Worker]) -> Explanation:
    exec_, subject = job.spec.exec, job.spec.subject
    kind = f"offer the exec {exec_!r} to you" if exec_ else "run jobs without an exec, which need a Python handler"
    takes = {worker["worker_id"]: str(worker.get("takes", "any")) for worker in fitting[:LISTED_MAX]}
    shown = "; ".join(f"{worker['worker_id']}: {_offered_by(worker)}" for worker in fitting[:SHOWN_MAX])
    words = f"The workers that subscribe to {subject!r} do not {kind} ({shown})."
    facts: dict[str, Any] = {"other_kind_workers": takes}
    if not exec_:
        return "OTHER_KIND", [f"{words} Start one: tasuki worker --tasks MODULE:NAME, or a Worker with a handler"], facts
    facts["offered_by"] = _names([worker for worker in workers if exec_ in (worker.get("execs") or ())])
    if facts["offered_by"]:
        words += f" {', '.join(facts['offered_by'][:SHOWN_MAX])} offers it, but subscribes to other subjects."
    else:
        words += f" No connected worker offers it; start one with: tasuki worker --exec {exec_}=COMMAND"
    return "OTHER_KIND", [words], facts


def _offer_of(worker: Worker) -> Offer:
    execs = worker.get("execs")
    return Offer(Takes(worker.get("takes", "any")), None if execs is None else tuple(execs))


def _offered_by(worker: Worker) -> str:
    """Describe what a worker runs."""
    execs = worker.get("execs")
    if execs is None:
        return f"takes {worker.get('takes', 'any')}"
    names = ["any program of its own user" if name == OWN_PROGRAMS else name for name in execs]
    has_handlers = worker.get("takes") in (Takes.ANY, Takes.HANDLERS)
    return ", ".join([*(["handlers"] if has_handlers else []), *names[:SHOWN_MAX], *(["…"] if len(names) > SHOWN_MAX else [])])


def _addressed(job: Job, fitting: Sequence[Worker]) -> list[Worker]:
    """Return the worker that the subject names, if it is there: then no other gets the job."""
    last = job.spec.subject.rpartition(".")[2]
    named = (worker for worker in fitting if worker["worker_id"] == last)
    return [worker for worker in named if worker.get("addressed", True) and not worker.get("detached")]


def _left_to(job: Job, worker: Worker) -> Explanation:
    """Explain the wait for the worker that the subject names, which cannot run the job."""
    name, exec_ = worker["worker_id"], job.spec.exec
    needed = f"does not offer the exec {exec_!r} to you" if exec_ else "has no Python handlers"
    words = f"Its subject ends in {name}, so only that worker gets it, and it {needed} ({_offered_by(worker)})."
    facts = {"other_kind_workers": {name: str(worker.get("takes", "any"))}, "addressed_to": name}
    return "OTHER_KIND", [f"{words} Allow it there, or submit it with another subject."], facts


def _its_turn(job: Job, fitting: Sequence[Worker], context: ExplainContext) -> Explanation:
    last = job.spec.subject.rpartition(".")[2]
    addressed = _addressed(job, fitting)
    fitting = addressed or fitting
    free = _names([worker for worker in fitting if worker["credit"] > 0])
    facts: dict[str, Any] = {"fitting_workers": _names(fitting), "workers_with_credit": free, "top_band": context.top_band}
    if addressed:
        facts["addressed_to"] = last
    only = f"Its subject ends in {last}, so only that worker gets it. " if addressed else ""
    if (name := only_worker(job.spec.subject)) is not None:
        only, facts["addressed_to"] = f"It is for worker {name} alone. ", name
    line = ""
    if context.ahead:
        line = f" {context.ahead} ready job(s) of its subject stand before it in priority {job.priority}."
    if context.top_band is not None and context.top_band > job.priority:
        line += f" Jobs of priority {context.top_band} are ready; those that fit the same workers go first."
    if not free:
        busy = ", ".join(f"{worker['worker_id']} ({worker['running']} running)" for worker in fitting[:SHOWN_MAX])
        return "BUSY", [f"{only}All workers that fit are busy: {busy}.{line}"], facts
    if (route := route_of(context.routes, job.spec.subject)) is not None and not addressed:
        facts |= {"route": route.pattern, "policy": str(route.policy)}
        chosen = choose(route.policy, facts_of(job.spec), _candidates(fitting), waited=False)
        facts["chosen_worker"] = chosen.worker_id if chosen is not None else None
        if chosen is None:
            best = f"A worker is to have it by the route {route.pattern!r}, {route.policy}, and is full"
            return "ROUTE_WAIT", [f"{best}; others get it after {shown_duration(context.route_wait_s)}.{line}"], facts
        line = f" By the route {route.pattern!r}, {route.policy}, it is for {chosen.worker_id}.{line}"
    soon = f"{only}It is ready, and {len(free)} worker(s) that fit have room: it is about to be leased.{line}"
    return "ITS_TURN", [soon], facts


# ---------------------------------------------------------------------------------------------------- at a worker


def _held(job: Job, context: ExplainContext) -> Explanation:
    assert job.lease is not None
    lease, workers = job.lease, context.workers
    subject = job.spec.subject
    wait_s = (job.not_before or 0.0) - context.now_wall
    if job.state is State.ASSIGNED and wait_s > 0:
        words = f"It is assigned to worker {lease.worker_id}, and due in {shown_duration(wait_s)}; the leader orders the start."
        return "ASSIGNED_AHEAD", [words], {"worker_id": lease.worker_id, "not_before": job.not_before, "wait_s": round(wait_s, 3)}
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
    if only_worker(subject) is not None:
        because.append("It is for that worker alone.")
        facts["chosen_by"] = "ONLY_WORKER"
    elif pattern is not None:
        chosen_by, words = _why_there(job, lease.worker_id, context)
        because.append(f"Its pattern {pattern!r} matches. {words}")
        facts |= {"pattern": pattern, "chosen_by": chosen_by}
    if job.progress is not None:
        said = f" ({job.progress.text})" if job.progress.text else ""
        because.append(f"It reports that it is {job.progress.fraction:.0%} done{said}.")
        facts |= {"progress": job.progress.fraction, "progress_text": job.progress.text}
    if worker is not None and worker.get("detached"):
        because.append("That worker is detached: it gets no more jobs.")
        facts["detached"] = True
    if job.confirming_until is not None:
        because.append("Its worker was detached, and asks whether it may continue; no other one gets the job before the answer.")
        facts["confirming_until"] = job.confirming_until
    if worker is None:
        because.append("If the worker does not come back before its lease ends, the job goes to another one.")
    if job.cancel_requested:
        because.append("It was asked to stop; it becomes CANCELED when the worker reports, or when its lease ends.")
    return "AT_WORKER" if worker is not None else "WORKER_AWAY", because, facts


def _why_there(job: Job, worker_id: str, context: ExplainContext) -> tuple[str, str]:
    subject, workers = job.spec.subject, context.workers
    if subject.rpartition(".")[2] == worker_id:
        return "LAST_TOKEN", "The subject's last token is its id, so no other worker gets the job while it is there."
    others = [w["worker_id"] for w in workers if w["worker_id"] != worker_id and _pattern_of(w, subject) is not None]
    if not others:
        return "ONLY_ONE", "No other connected worker subscribes to the subject."
    if (route := route_of(context.routes, subject)) is not None:
        kind = kind_of(job.spec.exec, job.submitter)
        fitting = [w for w in workers if _pattern_of(w, subject) is not None and _offer_of(w).fits(kind, job.spec.exec)]
        chosen, reason = context.route_reason
        if chosen != worker_id:
            reason = why(route.policy, facts_of(job.spec), worker_id, _candidates(fitting))
        return route.policy.name, f"The route {route.pattern!r} chooses by {route.policy}. {reason}"
    shown = ", ".join(others[:SHOWN_MAX])
    return "LEAST_LOAD", f"So do others' ({shown}); the worker with the smallest share of its places in use is asked first."


def _candidates(workers: Sequence[Worker]) -> list[Candidate]:
    return [
        Candidate(w["worker_id"], w["credit"], w["running"], w.get("cpu", 0.0), bytes.fromhex(w.get("held", ""))) for w in workers
    ]


# ---------------------------------------------------------------------------------------------------- ended


def _ended(job: Job, context: ExplainContext) -> Explanation:
    outcome = job.outcome
    facts: dict[str, Any] = {"worker_id": job.assigned_worker_id}
    if outcome is not None:
        facts |= {"error_code": outcome.error_code, "exit_code": outcome.exit_code, "permanent": outcome.permanent}
    if job.state is State.SUCCEEDED:
        attempt = f" in attempt {job.attempt}" if was_made(job.attempt) else ""
        return "SUCCEEDED", [f"It succeeded{attempt} at worker {job.assigned_worker_id}."], facts
    reason = outcome.message or outcome.error_code if outcome is not None else "no reason was recorded"
    word = "TOO_LATE" if job.state is State.SKIPPED else str(job.state)
    return word, [f"It is {job.state}: {reason}. Set it going again with: {context.run_again} {job.job_id}"], facts


def _routed_before(job: Job, context: ExplainContext) -> Iterator[str]:
    """Say by which policy the worker of an ended job was chosen, and why, if this server chose it and still knows."""
    subject, worker_id = job.spec.subject, job.assigned_worker_id
    route = route_of(context.routes, subject)
    if route is not None and worker_id and only_worker(subject) is None and subject.rpartition(".")[2] != worker_id:
        chosen, reason = context.route_reason
        yield f"The route {route.pattern!r} chooses by {route.policy}. {reason if chosen == worker_id else ''}".rstrip()


def why_not_again(job_id: str, state: State | None, still_running: str | None) -> str:
    """Return why a requeue left a job as it is."""
    if still_running is not None:
        text = f"run {still_running} of the same definition has not ended, and its concurrency_policy forbids two"
        return f"job {quoted(job_id)} cannot run now: {text}; wait for that one, or cancel it"
    return f"job {quoted(job_id)} is {state}, not ended; cancel it first"


# ---------------------------------------------------------------------------------------------------- patterns


def _names(workers: Sequence[Worker]) -> list[str]:
    return [worker["worker_id"] for worker in workers[:LISTED_MAX]]


def _pattern_of(worker: Worker, subject: str) -> str | None:
    """Return the first pattern of the worker that matches the subject."""
    return next((pattern for pattern in worker["patterns"] if matches(pattern, subject)), None)


def _common(pattern: str, subject: str) -> int:
    """Count the tokens from the left that match."""
    count = 0
    for one, other in zip(pattern.split("."), subject.split("."), strict=False):
        if one not in (other, "*", ">"):
            break
        count += 1
    return count


def why_not(pattern: str, subject: str) -> str:
    """Return what keeps the pattern from matching: the first token that differs, or the number of tokens."""
    wanted, given = pattern.split("."), subject.split(".")
    place = _common(pattern, subject)
    if place < min(len(wanted), len(given)):
        only_case = " (only in case)" if wanted[place].casefold() == given[place].casefold() else ""
        return f"its token {place + 1} is {wanted[place]!r}, not {given[place]!r}{only_case}"
    if len(wanted) < len(given):
        return f"it ends after {len(wanted)} token(s), the subject has {len(given)}"
    return f"it needs {len(wanted)} tokens{' or more' if wanted[-1] == '>' else ''}, the subject has {len(given)}"


def takers(subject: str, exec_: str, submitter: str, workers: Sequence[Worker]) -> list[dict[str, Any]]:
    """Return, of each worker, whether it would take a job of this subject, exec and submitter, and why: a word, and a text."""
    kind = kind_of(exec_, submitter)
    named = any(exec_ in (worker.get("execs") or ()) for worker in workers) if exec_ else False
    last = subject.rpartition(".")[2]
    only = next((worker for worker in workers if worker["worker_id"] == last and _pattern_of(worker, subject)), None)
    found = []
    for worker in workers:
        pattern = _pattern_of(worker, subject)
        if pattern is None:
            nearest = sorted(worker["patterns"], key=lambda one: -_common(one, subject))[:SHOWN_MAX]
            because = "; ".join(f"{one!r}: {why_not(one, subject)}" for one in nearest) or "it subscribes to nothing"
            word = "NO_PATTERN"
        elif only is not None and worker is not only:
            word, because = "ADDRESSED", f"the subject ends in {last}, so only that worker gets it"
        elif not _offer_of(worker).fits(kind, exec_):
            offered = _offered_by(worker)
            offers = offered if offered.startswith("takes") else f"offers {offered}"
            word, because = "OTHER_KIND", f"its pattern {pattern!r} matches, but it {offers}"
        elif named and exec_ not in (worker.get("execs") or ()):
            word, because = "LEAVES_IT", f"it leaves the exec {exec_!r} to workers that name it"
        elif worker.get("detached"):
            word, because = "DETACHED", "it is detached"
        elif worker["credit"] > 0:
            word, because = "TAKES", f"its pattern {pattern!r} matches"
        else:
            ended = f"when one of its {worker['running']} running jobs has ended"
            word, because = "BUSY", f"its pattern {pattern!r} matches, {ended}"
        found.append({"worker_id": worker["worker_id"], "takes": word in ("TAKES", "BUSY"), "why": word, "because": because})
    return found


# ---------------------------------------------------------------------------------------------------- the past

ATTEMPTS_TOLD = 5  # earlier attempts in sentences, the latest ones; the facts have all
FENCED_TOLD = 3
LATE_S = 1.0  # less waiting than this is not worth a sentence

Sentences = tuple[list[str], dict[str, Any]]

_EARLIER = {
    "failed": "failed",
    "lost": "was lost",
    "orphaned": "was kept by its worker, which was silent",
    "released": "was given back unstarted",
    "taken_over": "was taken over by another worker",
    "requeued": "was the last before it was set going again",
    "restored": "ran when the backup was made from which this store was restored",
}
"""Kinds of incidents that lead to another attempt, each with its words in a sentence."""
_LAST = ("dead_lettered", "canceled", "skipped")


def again(job: Job, incidents: Sequence[JobIncident]) -> Sentences:
    """Tell how each earlier attempt ended, and why there is no further one."""
    ended = _endings(incidents)
    facts: dict[str, Any] = {
        "attempts": [
            {"attempt": it.attempt, "worker_id": it.worker_id, "ended": it.kind, "reason": it.reason, "at": it.at} for it in ended
        ],
        # The failure or loss that ended the job for good was one more than it had.
        "retries": {"used": min(job.failures, job.spec.max_retries), "of": job.spec.max_retries},
        "losses": {"used": min(job.losses, job.spec.max_losses), "of": job.spec.max_losses},
        "generation": job.generation,
    }
    because = []
    if was_made(job.attempt) and job.attempt > 1:
        because.append(f"This is attempt {job.attempt}.")
    elif job.attempt and not was_made(job.attempt):
        because.append(f"The store was restored from a backup since; its next attempt is {job.attempt + 1}.")
    earlier = [incident for incident in ended if incident.kind in _EARLIER and incident.attempt]
    for incident in earlier[-ATTEMPTS_TOLD:]:
        where = f" at {incident.worker_id}" if incident.worker_id else ""
        reason = f": {incident.reason}" if incident.reason else ""
        because.append(f"Attempt {incident.attempt}{where} {_EARLIER[incident.kind]}{reason}.")
    if job.state in DEAD and ended and ended[-1].kind == "dead_lettered":
        because.append(f"There is no further attempt: {ended[-1].reason}.")
    if job.generation:
        because.append(f"It was set going again {job.generation} time(s) after it had ended.")
    return because, facts


def _endings(incidents: Sequence[JobIncident]) -> list[JobIncident]:
    """Return the incidents after which the job waited again or had ended. An attempt that was resumed had not."""
    resumed = [incident for incident in incidents if incident.kind == "resumed"]
    return [
        incident
        for incident in incidents
        if (incident.kind in _EARLIER or incident.kind in _LAST)
        and not (incident.kind == "orphaned" and any(it.attempt == incident.attempt and it.at >= incident.at for it in resumed))
    ]


def fenced(incidents: Sequence[JobIncident]) -> Sentences:
    """Name the workers whose reports were refused, and the reasons."""
    refused = [incident for incident in incidents if incident.kind == "fenced"]
    because = [
        f"A report of {incident.worker_id} on attempt {incident.attempt} was refused (fenced): {incident.reason}."
        for incident in refused[-FENCED_TOLD:]
    ]
    facts = [{"attempt": it.attempt, "worker_id": it.worker_id, "reason": it.reason, "at": it.at} for it in refused]
    return because, {"fenced": facts}


def times(job: Job, incidents: Sequence[JobIncident], now_wall: float) -> Sentences:
    """Tell how long the latest attempt waited to be ready, to be given to a worker, and to be started."""
    ready_at, spans = _spans(job, incidents, now_wall)
    facts: dict[str, Any] = {name: getattr(job, name) for name in ("created_at", "assigned_at", "started_at", "finished_at")}
    facts["ready_at"] = ready_at
    facts |= {f"{name}_s": round(span_s, 3) for name, (span_s, _) in spans.items()}
    waits = {name: told for name, told in spans.items() if name != "running"}
    longest = max(waits, key=lambda name: waits[name][0])
    is_late = waits[longest][0] >= LATE_S
    facts["longest"] = longest if is_late else None
    if not is_late:
        return [], {"times": facts}
    told = {name: f"{shown_duration(span_s)} {words}" for name, (span_s, words) in waits.items() if span_s >= LATE_S / 10}
    if len(told) > 1:
        told[longest] += " (the longest)"
    return [f"It waited {', '.join(told.values())}."], {"times": facts}


def _spans(job: Job, incidents: Sequence[JobIncident], now_wall: float) -> tuple[float, dict[str, tuple[float, str]]]:
    """Return the time at which the latest attempt was ready, and the length and purpose of each part of the job's life."""
    ended_at = job.finished_at if job.finished_at is not None else now_wall
    # An end for good is no wait: what follows it is a requeue, which is an incident of its own.
    before = [incident.at for incident in _endings(incidents) if incident.kind in _EARLIER and incident.at < ended_at]
    # A job that ended by itself was at a worker to its end; one that was canceled or skipped may have waited again by then.
    may_wait = job.state in READY or job.state in (State.CANCELED, State.SKIPPED)
    waits = job.assigned_at is None or (may_wait and any(at >= job.assigned_at for at in before))
    assigned_at = None if waits else job.assigned_at
    began_at = max([at for at in before if assigned_at is None or at <= assigned_at], default=job.created_at)
    ready_at = min(max(began_at, job.not_before or 0.0), assigned_at or ended_at)
    started_at = job.started_at if assigned_at is not None else None
    return ready_at, {
        "earlier": (max(0.0, began_at - job.created_at), "for earlier attempts"),
        "held_back": (max(0.0, ready_at - began_at), "for its time to come"),
        "in_line": (max(0.0, (assigned_at or ended_at) - ready_at), "for a worker"),
        "starting": (max(0.0, (started_at or ended_at) - assigned_at) if assigned_at is not None else 0.0, "to be started"),
        "running": (max(0.0, ended_at - started_at) if started_at is not None else 0.0, "to run"),
    }
