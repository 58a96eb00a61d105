"""The thresholds of a Django project's scheduler, as one row of its database has them: defaults, ranges, combinations. Pure.

Nodes read the row each tick; a change needs no restart (`django/models.py`: SchedulerSettings).
"""

from __future__ import annotations

import msgspec

from tasuki.core.election import LOCK_TTL_MAX_S
from tasuki.core.lifecycle import LEASE_MARGIN_S, LEASE_TTL_S, REASSIGN_AFTER_S
from tasuki.core.scheduler.firing import SKIP_LATE_RUNS_AFTER_MAX_S, SKIP_LATE_RUNS_AFTER_S


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """The columns of SchedulerSettings, in their order."""

    skip_late_runs_after_seconds: float = SKIP_LATE_RUNS_AFTER_S
    """A run that has not started so long after its nominal time is SKIPPED."""
    log_retention_days_db: float = 7.0
    """Logs are rows for so long."""
    leader_tick_seconds: float = 1.0
    """Interval at which the leader looks for changed definitions and new events, and every node for changed settings."""
    assign_ahead_seconds: float = 30.0
    """Time before its start at which a run is given to a worker."""
    heartbeat_interval_seconds: float = 1.0
    heartbeat_ttl_seconds: float = 5.0
    """A process that was silent for so long is taken to be dead."""
    worker_detach_grace_seconds: float = 5.0
    """A worker that does not answer is detached no sooner."""
    leader_stale_seconds: float = 5.0
    """A leader that was not seen for so long is suspected by sub-leaders."""
    leader_lock_ttl_seconds: float = 5.0
    """The leader's lock ends so long after its last renewal."""
    subleader_check_seconds: float = 1.0
    reassign_after_seconds: float = REASSIGN_AFTER_S
    """A run that its worker has not started so long after it was assigned, and after its time, goes to another."""
    max_jobs_per_worker: int = 0
    """No worker runs more at once, whatever its slots; 0: as many as it has slots."""
    continuation_retry_count: int = 3
    """Number of times that a worker which was cut off asks whether it may continue."""
    continuation_retry_interval_seconds: float = 0.3
    grpc_ping_timeout_seconds: float = 0.3
    grpc_ping_failures: int = 3
    """Calls without an answer, one after the other, before a worker is suspected."""

    @property
    def questions_s(self) -> float:
        """The time that all questions whether one run may continue take."""
        return self.continuation_retry_count * self.continuation_retry_interval_seconds + self.grpc_ping_timeout_seconds


RANGES: dict[str, tuple[float, float]] = {
    "skip_late_runs_after_seconds": (0, SKIP_LATE_RUNS_AFTER_MAX_S),
    "log_retention_days_db": (0, 36_500),
    "leader_tick_seconds": (0.1, 60),
    "assign_ahead_seconds": (0, 3_600),
    "heartbeat_interval_seconds": (0.2, 60),
    "heartbeat_ttl_seconds": (1, 600),
    "worker_detach_grace_seconds": (0, 3_600),
    "leader_stale_seconds": (1, 600),
    "leader_lock_ttl_seconds": (1, LOCK_TTL_MAX_S),
    "subleader_check_seconds": (0.1, 60),
    "reassign_after_seconds": (1, 86_400),
    "max_jobs_per_worker": (0, 10_000),
    "continuation_retry_count": (0, 100),
    "continuation_retry_interval_seconds": (0.05, 60),
    "grpc_ping_timeout_seconds": (0.05, 60),
    "grpc_ping_failures": (1, 100),
}
QUESTIONS_SLACK_S = 0.5  # between the last answer that could come and the deadline of the lease
QUESTIONS_MAX_S = LEASE_TTL_S * 2 / 3 - LEASE_MARGIN_S - QUESTIONS_SLACK_S  # renewed every third: nobody asks who is renewed


def problems_of(found: Thresholds) -> dict[str, str]:
    """Return what is wrong by the name of the field: values out of their range, and combinations that cannot work."""
    problems = {
        name: f"{getattr(found, name):g} is not between {least:g} and {most:g}"
        for name, (least, most) in RANGES.items()
        if not least <= getattr(found, name) <= most
    }
    for name, is_wrong, text in (
        (
            "heartbeat_ttl_seconds",
            found.heartbeat_ttl_seconds <= 2 * found.heartbeat_interval_seconds,
            f"must be more than two intervals of heartbeats, {2 * found.heartbeat_interval_seconds:g} s: one may be lost",
        ),
        (
            "leader_stale_seconds",
            found.leader_stale_seconds < 2 * max(found.leader_tick_seconds, found.heartbeat_interval_seconds),
            "must be at least two ticks of the leader and two heartbeats, or a leader that lives is suspected",
        ),
        (
            "subleader_check_seconds",
            found.subleader_check_seconds > found.leader_stale_seconds,
            f"must be at most leader_stale_seconds, {found.leader_stale_seconds:g} s",
        ),
        (
            "reassign_after_seconds",
            found.reassign_after_seconds < 2 * found.leader_tick_seconds,
            f"must be at least two ticks of the leader, {2 * found.leader_tick_seconds:g} s",
        ),
        (
            "continuation_retry_count",
            found.questions_s > QUESTIONS_MAX_S,
            f"all questions, and the wait for the last answer, take {found.questions_s:g} s, which must be at most "
            f"{QUESTIONS_MAX_S:g} s: between a renewal that had no answer and the deadline",
        ),
    ):
        if is_wrong:
            problems.setdefault(name, text)
    return problems
