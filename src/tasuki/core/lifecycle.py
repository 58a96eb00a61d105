"""The life of a job: one transition table, and the decisions that budgets and backoff make. Pure.

    PENDING ──grant──► ASSIGNED ──start──► RUNNING ──succeed──► SUCCEEDED
       ▲                   │                  │
       ├──release──────────┤                  ├──fail──► FAILED      time_out──► TIMED_OUT
       ├──retry────────────┼──────────────────┤
       ├──lose─────────────┴──────────────────┤──orphan──► ORPHANED ──grant──► ASSIGNED
       ├──requeue── (any terminal state)      │                └──resume──► RUNNING
       └──skip──► SKIPPED                     └──cancel──► CANCELED

Every store asks this module which transition an event makes; none has a rule of its own. `finish` of an attempt that
was never reported as started goes straight from ASSIGNED: short handlers spare themselves the extra write.
"""

from __future__ import annotations

import enum

import msgspec

from tasuki.core.backoff import Backoff
from tasuki.core.job import LEASED, READY, TERMINAL, Outcome, State
from tasuki.errors import InvalidTransition

LEASE_TTL_S = 15.0  # TCP and local workers
LEASE_TTL_RANGE_S = (1, 86_400)  # a day: a worker that never renews has leases as long as its jobs
LEASE_TTL_MAX_S = 600.0  # ten times what workers over HTTP need; a token that is not revoked can hold jobs no longer
GRACE_MAX_S = 3600.0  # of kept jobs whose worker is silent
HTTP_LEASE_TTL_S = 60.0  # over HTTP the connection is the part that fails
LEASE_MARGIN_S = 2.0  # what the store waits past the ttl, and what a kill may take
TAKEOVER_TIE_S = 0.001  # renewed so soon after a takeover counts as renewed by it: times are sums, which are not quite exact
REASSIGN_AFTER_S = 60.0  # an assigned run that nobody has fetched so long after its time goes to another worker
RETRY_DELAY_MAX_S = 300.0
RETENTION_DAYS = 30.0
BLOB_GRACE_S = 3600.0
# A restored store continues from the next multiples (docs/decisions/0024): the millions of an attempt count the restores.
ATTEMPT_STEP = 1_000_000
EPOCH_STEP = 1_000_000_000  # an epoch costs the start of a server: a hundred a second reach this in four months


class JobEvent(enum.StrEnum):
    """Events in the life of a job."""

    GRANT = "grant"
    START = "start"
    RELEASE = "release"
    SUCCEED = "succeed"
    RETRY = "retry"
    FAIL = "fail"
    TIME_OUT = "time_out"
    LOSE = "lose"
    ORPHAN = "orphan"
    RESUME = "resume"
    CANCEL = "cancel"
    SKIP = "skip"
    REQUEUE = "requeue"


_HELD = (State.ASSIGNED, State.RUNNING, State.ORPHANED)  # states in which an attempt may still report

TRANSITIONS: dict[tuple[State, JobEvent], State] = {
    (State.PENDING, JobEvent.GRANT): State.ASSIGNED,
    (State.ORPHANED, JobEvent.GRANT): State.ASSIGNED,
    # By job_id, a lease that is over may be taken over without waiting for the reaper.
    (State.ASSIGNED, JobEvent.GRANT): State.ASSIGNED,
    (State.RUNNING, JobEvent.GRANT): State.ASSIGNED,
    (State.ASSIGNED, JobEvent.START): State.RUNNING,
    (State.ASSIGNED, JobEvent.RELEASE): State.PENDING,
    **{(state, JobEvent.SUCCEED): State.SUCCEEDED for state in _HELD},
    **{(state, JobEvent.RETRY): State.PENDING for state in _HELD},
    **{(state, JobEvent.FAIL): State.FAILED for state in _HELD},
    **{(state, JobEvent.TIME_OUT): State.TIMED_OUT for state in _HELD},
    **{(state, JobEvent.LOSE): State.PENDING for state in sorted(LEASED)},
    **{(state, JobEvent.ORPHAN): State.ORPHANED for state in sorted(LEASED)},
    (State.ORPHANED, JobEvent.RESUME): State.RUNNING,
    **{(state, JobEvent.CANCEL): State.CANCELED for state in (*_HELD, State.PENDING)},
    (State.PENDING, JobEvent.SKIP): State.SKIPPED,
    (State.ORPHANED, JobEvent.SKIP): State.SKIPPED,
    **{(state, JobEvent.REQUEUE): State.PENDING for state in sorted(TERMINAL)},
}


def after(state: State, event: JobEvent) -> State:
    """Return the state that `event` leads to, or raise InvalidTransition."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InvalidTransition(f"a job that is {state} cannot {event}") from None


def sources(event: JobEvent) -> frozenset[State]:
    """Return the states in which `event` can happen; the SQL statements' predicates are tested against this."""
    return frozenset(state for state, happening in TRANSITIONS if happening is event)


class Disposition(msgspec.Struct, frozen=True, gc=False):
    """The next state of a job after an attempt that did not succeed."""

    event: JobEvent
    state: State
    delay_s: float
    failures: int
    losses: int
    reason: str


def retry_delay_s(backoff_s: float, n: int) -> float:
    """Return the delay of retry n, the first is 0. Exact: jitter is for polls and reconnects."""
    return Backoff(backoff_s, RETRY_DELAY_MAX_S).delay_s(n)


def after_failure(
    state: State,
    outcome: Outcome,
    *,
    cancel_requested: bool,
    failures: int,
    losses: int,
    max_retries: int,
    backoff_s: float,
) -> Disposition:
    """Return the disposition of a job whose worker reported a failed attempt."""
    what = outcome.message or outcome.error_code or "failed"
    if cancel_requested:  # there is no retry, also if the attempt failed by itself before the cancel reached it
        reason = what if outcome.error_code == "CANCELED" else f"canceled; last attempt: {what}"
        return Disposition(JobEvent.CANCEL, after(state, JobEvent.CANCEL), 0.0, failures, losses, reason)
    failures += 1
    if not outcome.permanent and failures <= max_retries:
        asked_s = outcome.retry_in_s
        delay_s = retry_delay_s(backoff_s, failures - 1) if asked_s is None else asked_s
        reason = f"{what}; retry {failures} of {max_retries} in {delay_s:g} s"
        return Disposition(JobEvent.RETRY, after(state, JobEvent.RETRY), delay_s, failures, losses, reason)
    event = JobEvent.TIME_OUT if outcome.error_code == "TIMED_OUT" else JobEvent.FAIL
    why = "permanent" if outcome.permanent else f"no retry left of {max_retries}"
    return Disposition(event, after(state, event), 0.0, failures, losses, f"{what}; {why}")


def after_loss(
    state: State,
    *,
    cancel_requested: bool,
    keep: bool,
    failures: int,
    losses: int,
    max_losses: int,
    backoff_s: float,
    worker_id: str,
    delay_first: bool = False,
) -> Disposition:
    """Return the disposition of a job whose lease ran out. The first loss is tried again at once, unless `delay_first`."""
    if cancel_requested:
        reason = f"canceled; worker {worker_id} was lost"
        return Disposition(JobEvent.CANCEL, after(state, JobEvent.CANCEL), 0.0, failures, losses, reason)
    losses += 1
    if losses > max_losses:
        reason = f"worker {worker_id} was lost; no loss left of {max_losses}"
        return Disposition(JobEvent.FAIL, after(state, JobEvent.FAIL), 0.0, failures, losses, reason)
    what = f"worker {worker_id} was lost (loss {losses} of {max_losses})"
    if keep:
        return Disposition(
            JobEvent.ORPHAN, after(state, JobEvent.ORPHAN), 0.0, failures, losses, f"{what}; kept until the next grant"
        )
    waits = losses if delay_first else losses - 1
    delay_s = retry_delay_s(backoff_s, waits - 1) if waits else 0.0
    return Disposition(JobEvent.LOSE, after(state, JobEvent.LOSE), delay_s, failures, losses, what)


def is_late(not_after: float | None, wall: float) -> bool:
    """Return True if a job is too late to be granted. `not_after` itself is the last moment at which it may be."""
    return not_after is not None and not_after < wall


def skip_outcome(not_after: float, last: Outcome | None) -> Outcome:
    """Return the outcome of a job that waited past its `not_after`; `last` is that of the latest failed attempt, if any."""
    message = f"it was too late to start: not_after was {not_after:.3f}"
    if last is not None:
        message += f"; last attempt: {last.message or last.error_code or 'failed'}"
    return Outcome(error_code="TOO_LATE", message=message)


RESUMED = "its worker came back, and no other one had taken it"
"""Reason of the incident of a resumed job."""


def not_after_again(asked: float | None, wall: float) -> float | None:
    """Return the `not_after` of a job that is retried; None if it is past, since the retry asks for a run all the same."""
    return None if is_late(asked, wall) else asked


def was_made(attempt: int) -> bool:
    """Return False if no attempt was made yet, or none since the store was restored: the number is only a starting point."""
    return attempt % ATTEMPT_STEP != 0


def attempt_again(attempt: int, epoch: int) -> int:
    """Return the attempt after which a retried job continues: above all that were made before the store was last restored."""
    return max(attempt, epoch // EPOCH_STEP * ATTEMPT_STEP)


def cancel_is_immediate(state: State) -> bool:
    """Return True for waiting jobs, which the store cancels at once; leased ones end by a worker's report or by reaping."""
    return state in READY
