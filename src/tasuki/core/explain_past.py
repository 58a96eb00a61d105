"""What befell a job before: earlier attempts, refused reports, and where the time went. The second half of `explain.py`; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasuki.core.job import READY, Job, JobIncident, State
from tasuki.core.lifecycle import was_made

ATTEMPTS_TOLD = 5  # earlier attempts in sentences, the latest ones; the facts have all
FENCED_TOLD = 3
LATE_S = 1.0  # less waiting than this is not worth a sentence

Told = tuple[list[str], dict[str, Any]]

_EARLIER = {
    "failed": "failed",
    "lost": "was lost",
    "orphaned": "was kept by its worker, which was silent",
    "released": "was given back unstarted",
    "taken_over": "was taken over by another worker",
    "requeued": "was the last before it was set going again",
    "restored": "ran when the backup was made from which this store was restored",
}
"""What leads to another attempt, and how a sentence calls it."""
_LAST = ("dead_lettered", "canceled", "skipped")


def again(job: Job, incidents: Sequence[JobIncident]) -> Told:
    """Why this is not the first attempt, or why there is no further one: what became of each."""
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
    because += [_sentence(incident) for incident in earlier[-ATTEMPTS_TOLD:]]
    if job.state in (State.FAILED, State.TIMED_OUT) and ended and ended[-1].kind == "dead_lettered":
        because.append(f"There is no further attempt: {ended[-1].reason}.")
    if job.generation:
        because.append(f"It was set going again {job.generation} time(s) after it had ended.")
    return because, facts


def _endings(incidents: Sequence[JobIncident]) -> list[JobIncident]:
    """After which the job waited again, or had ended. An attempt that was resumed had not."""
    resumed = [incident for incident in incidents if incident.kind == "resumed"]
    return [
        incident
        for incident in incidents
        if (incident.kind in _EARLIER or incident.kind in _LAST)
        and not (incident.kind == "orphaned" and any(it.attempt == incident.attempt and it.at >= incident.at for it in resumed))
    ]


def _sentence(incident: JobIncident) -> str:
    where = f" at {incident.worker_id}" if incident.worker_id else ""
    reason = f": {incident.reason}" if incident.reason else ""
    return f"Attempt {incident.attempt}{where} {_EARLIER[incident.kind]}{reason}."


def fenced(incidents: Sequence[JobIncident]) -> Told:
    """Whose reports were refused, and why."""
    refused = [incident for incident in incidents if incident.kind == "fenced"]
    because = [
        f"A report of {incident.worker_id} on attempt {incident.attempt} was refused (fenced): {incident.reason}."
        for incident in refused[-FENCED_TOLD:]
    ]
    facts = [{"attempt": it.attempt, "worker_id": it.worker_id, "reason": it.reason, "at": it.at} for it in refused]
    return because, {"fenced": facts}


def times(job: Job, incidents: Sequence[JobIncident], now_wall: float) -> Told:
    """Where the time went: until the latest attempt was ready, given to a worker, and started."""
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
    told = {name: f"{span_s:.1f} s {words}" for name, (span_s, words) in waits.items() if span_s >= LATE_S / 10}
    if len(told) > 1:
        told[longest] += " (the longest)"
    return [f"It waited {', '.join(told.values())}."], {"times": facts}


def _spans(job: Job, incidents: Sequence[JobIncident], now_wall: float) -> tuple[float, dict[str, tuple[float, str]]]:
    """When the latest attempt was ready, and how long each part of the job's life took, and what for; 0: it has not begun."""
    ended_at = job.finished_at if job.finished_at is not None else now_wall
    before = [incident.at for incident in _endings(incidents) if incident.at < ended_at]
    # What ended by itself was at a worker to its end; what was canceled or skipped may have waited again by then.
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
