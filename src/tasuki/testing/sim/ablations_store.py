"""Safeguards of the stores: reports of workers, and grants. `what` says what each leaves out.

Where both stores have a safeguard, both lose it; for SQLite that is a condition of a statement, or of the code that judges a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from tasuki.core.job import Lease, State
from tasuki.stores.memory import reports
from tasuki.stores.memory.records import MemoryRecords
from tasuki.stores.memory.reports import MemoryReports
from tasuki.stores.memory.store import MemoryStore
from tasuki.stores.sql import report, submit
from tasuki.testing.sim.options import SimOptions
from tasuki.testing.sim.patches import Ablation, Instead, Reworded

BOTH = ("memory", "sqlite")
EARLY_S = 60.0
MORE = 5

_SHOWN = " AND lease_id = column3 AND assigned_worker_id = column4 AND attempt = column5"

# What leaves leases without their workers.
LOSSES = ("pause", "partition", "one_way", "half_open", "power", "crash", "late", "reset")

Method = Callable[..., Any]


# ---------------------------------------------------------------------------------------------------- reports


def _taken_for_the_holder(report_on: Method) -> Method:
    def _report(self: Any, report: Any, verb: Any) -> Any:
        record = self._records.get(report.job_id)
        lease = record.job.lease if record is not None else None
        if lease is not None:
            report = replace(report, worker_id=lease.worker_id, lease_id=lease.lease_id, attempt=lease.attempt)
        return report_on(self, report, verb)

    return _report


def _taken_after_the_end(report_on: Method) -> Method:
    def _report(self: Any, report: Any, verb: Any) -> Any:
        record = self._records.get(report.job_id)
        if record is not None and record.job.state.terminal:
            lease = Lease(
                lease_id=report.lease_id, worker_id=report.worker_id, incarnation="", attempt=report.attempt, expires_at=0.0
            )
            self._put(report.job_id, replace(record, job=replace(record.job, state=State.RUNNING, lease=lease)))
        return report_on(self, report, verb)

    return _report


def _never_repeated(judge: Method) -> Method:
    return lambda self, record, *rest: judge(self, replace(record, said=None), *rest)


def _nothing_known(judge: Method) -> Method:
    def _claimed(self: Any, claim: Any) -> Any:
        record = self._records.get(claim.job_id)
        return record if record is not None and record.job.lease is not None else None

    return _claimed


def _costs_a_loss(release: Method) -> Method:
    def _release(self: Any, claim: Any, reason: str) -> bool:
        done: bool = release(self, claim, reason)
        record = self._records.get(claim.job_id)
        if done and record.job.state is State.PENDING:
            self._put(claim.job_id, replace(record, job=replace(record.job, losses=record.job.losses + 1)))
        return done

    return _release


_OF_REPORTS = (
    Ablation(
        name="finish_lease",
        what="a finish must show the current lease, its worker and its attempt",
        invariants=("I3", "I6", "I17"),
        seams=(
            Instead(MemoryReports, "_report", _taken_for_the_holder),
            Reworded("finish_plain", _SHOWN),
        ),
        options=SimOptions(kinds=LOSSES),
        stores=BOTH,
    ),
    Ablation(
        name="finish_state",
        what="a terminal job takes no report",
        invariants=("I3", "I4", "I6", "I14"),
        seams=(
            Instead(MemoryReports, "_report", _taken_after_the_end),
            Reworded("finish_plain", " AND state IN ('ASSIGNED', 'RUNNING')"),
            Reworded("leased_groups", " AND state IN ('ASSIGNED', 'RUNNING')"),
        ),
        options=SimOptions(kinds=LOSSES),
        stores=BOTH,
    ),
    Ablation(
        name="repeat_known",
        what="an exact repeat of a recorded report is answered as recorded",
        invariants=("I14",),
        seams=(
            Instead(MemoryReports, "_repeated_or_fenced", _never_repeated),
            Instead(report, "_is_repeat", lambda _: lambda *_: False),
        ),
        stores=BOTH,
    ),
    Ablation(
        name="owner",
        what="only the owner of a lease can start, renew or release it",
        invariants=("I17", "I5"),
        seams=(
            Instead(MemoryReports, "_claimed", _nothing_known),
            Instead(report, "_is_holder", lambda _: lambda *_: True),
        ),
        options=SimOptions(kinds=LOSSES),
        stores=BOTH,
    ),
    Ablation(
        name="release_is_free",
        what="an attempt that was given back unstarted is no loss",
        invariants=("I11",),
        seams=(
            Instead(MemoryReports, "_release", _costs_a_loss),
            Reworded("release", "ready = 1,", "ready = 1, losses = losses + 1,"),
        ),
        stores=BOTH,
    ),
)


# ---------------------------------------------------------------------------------------------------- grants


def _same_attempt(grant: Method) -> Method:
    def _grant(self: Any, record: Any, *rest: Any, **named: Any) -> Any:
        again = max(0, record.job.attempt - 1)
        return grant(self, replace(record, job=replace(record.job, attempt=again)), *rest, **named)

    return _grant


def _also_what_is_leased(lease_next: Method) -> Method:
    def _lease_next(self: Any, request: Any) -> list[Any]:
        grants: list[Any] = lease_next(self, request)
        leased = [self._records[job_id] for _, _, job_id in list(self._leased)]
        return grants + [self._grant(record, request) for record in leased[: request.limit - len(grants)]]

    return _lease_next


def _of_any_process(held: Method) -> Method:
    def _held(self: Any, holders: Any) -> list[list[Any]]:
        names = {worker_id for worker_id, _ in holders}
        lives = {
            (lease.worker_id, lease.incarnation)
            for _, _, job_id in self._leased
            if (lease := self._records[job_id].job.lease).worker_id in names
        }
        everybody = list(dict.fromkeys([*holders, *sorted(lives)]))
        found = dict(zip(everybody, held(self, everybody), strict=True))
        return [[grant for (name, _), grants in found.items() if name == holder[0] for grant in grants] for holder in holders]

    return _held


def ahead(duty: Method) -> Method:
    """A duty whose clock is fast."""

    def _duty(self: Any, **named: Any) -> Any:
        clock = self.clock
        self.clock = _Fast(clock)
        try:
            return duty(self, **named)
        finally:
            self.clock = clock

    return _duty


class _Fast:
    """A clock that is ahead of the store's."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock

    def wall(self) -> float:
        return float(self._clock.wall() + EARLY_S)

    def lease(self) -> float:
        return float(self._clock.lease() + EARLY_S)


def _with_more(budget: str) -> tuple[Instead, ...]:
    name = "after_failure" if budget == "max_retries" else "after_loss"

    def make(judge: Method) -> Method:
        return lambda *given, **named: judge(*given, **{**named, budget: named[budget] + MORE})

    return tuple(Instead(module, name, make) for module in (reports, report))


_OF_GRANTS = (
    Ablation(
        name="attempt_counts",
        what="each grant counts the attempt up by one",
        invariants=("I5",),
        seams=(
            Instead(MemoryStore, "_grant", _same_attempt),
            Reworded("grant", "attempt = attempt + 1", "attempt = max(attempt, 1)"),
        ),
        stores=BOTH,
    ),
    Ablation(
        name="one_lease",
        what="a leased job is not granted",
        invariants=("I5",),
        seams=(
            Instead(MemoryStore, "_lease_next", _also_what_is_leased),
            Reworded("grant", "ready = 0, "),
        ),
        stores=BOTH,
    ),
    Ablation(
        name="held_of_this_life",
        what="what a worker's earlier process was given is not delivered to the next one",
        invariants=("I5", "I9", "I17"),
        seams=(Instead(MemoryStore, "held", _of_any_process),),
        options=SimOptions(kinds=("crash", "store_lost"), faults=40),
    ),
    Ablation(
        name="not_before_at_submit",
        what="a job with a later not_before is not ready when it is submitted",
        invariants=("I12",),
        seams=(
            Instead(MemoryRecords, "_is_later", lambda _: lambda *_: False),
            Instead(submit, "ready_value", lambda _: lambda *_: 1),
        ),
        stores=BOTH,
    ),
    Ablation(
        name="not_before_at_promotion",
        what="a delayed job is made ready when its time has come, not before",
        invariants=("I12",),
        seams=(
            Instead(MemoryStore, "promote", ahead),
            Reworded("delayed_due", "not_before <= ?1", f"not_before <= ?1 + {EARLY_S}"),
        ),
        stores=BOTH,
    ),
    Ablation(
        name="not_after",
        what="a job is not granted after its not_after",
        invariants=("I12",),
        seams=(
            Instead(MemoryStore, "_is_late", lambda _: lambda *_: False),
            Reworded("oldest_of_queue", "not_after >= ?6", f"not_after >= ?6 - {EARLY_S}"),
            Reworded("oldest_of_queues", "not_after >= ?5", f"not_after >= ?5 - {EARLY_S}"),
            Reworded("grant", "not_after >= ?8", f"not_after >= ?8 - {EARLY_S}"),
        ),
        # While nobody leads, nobody skips what is late.
        options=SimOptions(servers=3, lock_ttl_s=5.0, kinds=("coordination_cut", "coordination_lost", "pause"), faults=30),
        stores=BOTH,
    ),
    Ablation(
        name="retry_budget",
        what="a job fails for good when its retries are used up",
        invariants=("I11",),
        seams=_with_more("max_retries"),
        stores=BOTH,
    ),
    Ablation(
        name="loss_budget",
        what="a job fails for good when its losses are used up",
        invariants=("I11",),
        seams=_with_more("max_losses"),
        stores=BOTH,
    ),
)

STORE = (*_OF_REPORTS, *_OF_GRANTS)
