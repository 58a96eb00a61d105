"""Random histories on all stores: SQLite and PostgreSQL must answer as the memory store does; the machine must notice a liar."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tasuki.core.lifecycle import Event
from tasuki.core.store_messages import Grant, HeldLease, LeaseRequest, LeaseStatus, Report, ReportAnswer
from tasuki.stores.memory.records import MemoryJob
from tasuki.stores.memory.store import MemoryStore
from tasuki.stores.store import Store
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_machine import StoreMachine
from tests.support.postgres_service import PostgresService
from tests.support.sqlite_files import memory_folder, with_tables

# Measured: 30 histories of 50 steps take about 5 s on SQLite.
LONG = settings(max_examples=30, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
# A step on PostgreSQL with all that is compared after it is some fifty statements: 12 histories take about as long.
SHORT = settings(LONG, max_examples=12, stateful_step_count=40)
# Planted faults must be found the same way on every run, and need no shrinking to be found.
HUNT = settings(LONG, max_examples=600, derandomize=True, database=None, phases=[Phase.generate])


class SqliteMachine(StoreMachine):
    def make_store(self, clock: FakeClock) -> Store:
        from tasuki.stores.sql.store import SqlStore

        self.folder = Path(tempfile.mkdtemp(prefix="tasuki-machine-", dir=memory_folder()))
        return SqlStore.open_sqlite(with_tables(self.folder / "tasuki.sqlite3"), clock=clock)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


class MemoryMachine(StoreMachine):
    def make_store(self, clock: FakeClock) -> Store:
        return MemoryStore(clock)


class PostgresMachine(StoreMachine):
    service: PostgresService

    def make_store(self, clock: FakeClock) -> Store:
        from tasuki.stores.sql.store import SqlStore

        self.url = self.service.borrow()
        return SqlStore.open_postgresql(self.url, clock=clock)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "url"):
            self.service.give_back(self.url)


@pytest.mark.slow
def test_postgresql_answers_as_the_memory_store_does(postgres: PostgresService) -> None:
    class Machine(PostgresMachine):
        service = postgres

    run_state_machine_as_test(Machine, settings=SHORT)


@pytest.mark.soak
def test_postgresql_answers_as_the_memory_store_does_for_long(postgres: PostgresService) -> None:
    class Machine(PostgresMachine):
        service = postgres

    run_state_machine_as_test(Machine, settings=LONG)


@pytest.mark.slow
def test_sqlite_answers_as_the_memory_store_does() -> None:
    run_state_machine_as_test(SqliteMachine, settings=LONG)


def test_the_memory_store_keeps_the_invariants() -> None:
    run_state_machine_as_test(MemoryMachine, settings=LONG)


class AcceptsAnyLease(MemoryStore):
    """Records the finish of whoever names the job."""

    def finish(self, reports: Sequence[Report]) -> list[ReportAnswer]:
        jobs = self.get([report.job_id for report in reports])
        leases = [job.lease if job else None for job in jobs]
        forged = [
            msgspec.structs.replace(report, worker_id=lease.worker_id, lease_id=lease.lease_id, attempt=lease.attempt)
            if lease
            else report
            for report, lease in zip(reports, leases, strict=True)
        ]
        return super().finish(forged)


class ForgetsTheIncarnation(MemoryStore):
    """Renews the lease of a worker's dead self."""

    def renew(self, claims: Sequence[HeldLease]) -> list[LeaseStatus]:
        jobs = self.get([claim.job_id for claim in claims])
        return super().renew(
            [
                msgspec.structs.replace(claim, attempt=job.lease.attempt, lease_id=job.lease.lease_id)
                if job and job.lease
                else claim
                for claim, job in zip(claims, jobs, strict=True)
            ]
        )


class RetriesForEver(MemoryStore):
    """Never counts a failure."""

    def fail(self, reports: Sequence[Report]) -> list[ReportAnswer]:
        answers = super().fail(reports)
        for report in reports:
            if (record := self._records.get(report.job_id)) is not None and not record.job.state.terminal:
                self._put(report.job_id, msgspec.structs.replace(record, job=msgspec.structs.replace(record.job, failures=0)))
        return answers


class PromotesTooEarly(MemoryStore):
    """Lets a delayed job go at once."""

    def _is_later(self, not_before: float | None) -> bool:
        return False


class GrantsTooLate(MemoryStore):
    """Leaves it to the leader to keep jobs from starting after their time."""

    def _is_late(self, record: MemoryJob) -> bool:
        return False


class LeavesOrphansOpen(MemoryStore):
    """Tells a worker that came back to go on, and gives its job to others all the same."""

    def _resume(self, record: MemoryJob, claim: HeldLease) -> MemoryJob:
        return record


class GrantsMoreThanAsked(MemoryStore):
    """Takes the limit for a hint."""

    def lease(self, requests: Sequence[LeaseRequest]) -> list[list[Grant]]:
        return super().lease([msgspec.structs.replace(request, limit=request.limit + 1) for request in requests])


class KeepsHalfATurn(MemoryStore):
    """Takes nothing back."""

    @contextmanager
    def turn(self, *, lasting: bool = True) -> Iterator[None]:
        yield


class FencesARepeatAfterARequeue(MemoryStore):
    """Compares the repeat of a finish with a failure that a cancel replaced before the requeue."""

    def _repeated_or_fenced(self, record: MemoryJob, report: Report, verb: Event) -> ReportAnswer:
        kinds = iter(incident.kind for incident in record.incidents)
        if all(kind in kinds for kind in ("failed", "canceled", "requeued")):
            record = msgspec.structs.replace(record, last_report=None)
        return super()._repeated_or_fenced(record, report, verb)


FAULTY = [
    AcceptsAnyLease,
    ForgetsTheIncarnation,
    RetriesForEver,
    PromotesTooEarly,
    GrantsTooLate,
    LeavesOrphansOpen,
    GrantsMoreThanAsked,
    KeepsHalfATurn,
    FencesARepeatAfterARequeue,
]


@pytest.mark.parametrize("faulty", FAULTY)
def test_the_machine_notices_a_store_that_lies(faulty: type[MemoryStore]) -> None:
    class FaultyMachine(StoreMachine):
        def make_store(self, clock: FakeClock) -> Store:
            return faulty(clock)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(FaultyMachine, settings=HUNT)
