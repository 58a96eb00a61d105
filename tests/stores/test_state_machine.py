"""Random histories on all stores: each must answer as the memory store does; the machine must notice a faulty store."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tasuki.core.job import JobSpec
from tasuki.core.lifecycle import JobEvent
from tasuki.core.store_messages import CachedFile, Grant, HeldLease, LeaseRequest, LeaseStatus, Report, ReportAnswer
from tasuki.stores.memory.records import MemoryJob
from tasuki.stores.memory.store import MemoryStore
from tasuki.stores.redis.store import RedisStore
from tasuki.stores.sql.store import SqlStore
from tasuki.stores.store import Store
from tasuki.testing.clocks import FakeClock
from tests.stores.store_machine import StoreMachine
from tests.support.postgres_service import PostgresService
from tests.support.redis_service import RedisService
from tests.support.sqlite_files import memory_folder, with_tables

# A history of 50 steps, with all that is compared after each, takes 0.1 s on SQLite and 0.5 s on PostgreSQL.
LONG = settings(max_examples=120, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
# Planted faults must be found the same way on every run, and need no shrinking to be found. With this seed the nine take 2 s.
HUNT = settings(LONG, max_examples=600, database=None, phases=[Phase.generate])
HUNT_SEED = 12

Machine = type[StoreMachine]


class MemoryMachine(StoreMachine):
    def make_store(self, clock: FakeClock) -> Store:
        return MemoryStore(clock)


class SqliteMachine(StoreMachine):
    def make_store(self, clock: FakeClock) -> Store:
        self.folder = Path(tempfile.mkdtemp(prefix="tasuki-machine-", dir=memory_folder()))
        return SqlStore.open_sqlite(with_tables(self.folder / "tasuki.sqlite3"), clock=clock)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


def postgres_machine(service: PostgresService) -> Machine:
    class PostgresMachine(StoreMachine):
        def make_store(self, clock: FakeClock) -> Store:
            self.url = service.borrow()
            return SqlStore.open_postgresql(self.url, clock=clock)

        def teardown(self) -> None:
            super().teardown()
            if hasattr(self, "url"):
                service.give_back(self.url)

    return PostgresMachine


def redis_machine(service: RedisService, subject: str) -> Machine:
    """Return a machine on Redis whose app has this subject as its own: its jobs wait in the list, others in sorted sets."""

    class RedisMachine(StoreMachine):
        def make_store(self, clock: FakeClock) -> Store:
            return RedisStore.open(service.url(), template=JobSpec(job_id="", subject=subject), clock=clock)

    return RedisMachine


# The number of histories in an ordinary run; the machine's jobs have the subject a.x among others.
STORES = {"memory": 30, "sqlite": 30, "postgresql": 12, "redis": 8, "redis with a.x in the list": 8}


@pytest.fixture(params=STORES)
def store_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def machine(store_name: str, request: pytest.FixtureRequest) -> Machine:
    if store_name == "postgresql":
        request.getfixturevalue("floors_at_once")
        return postgres_machine(request.getfixturevalue("postgres"))
    if store_name.startswith("redis"):
        subject = "a.x" if "a.x" in store_name else "job.assign.tasuki"
        return redis_machine(request.getfixturevalue("redis_service"), subject)
    return SqliteMachine if store_name == "sqlite" else MemoryMachine


@pytest.mark.slow
def test_a_store_answers_as_the_memory_store_does(machine: Machine, store_name: str) -> None:
    run_state_machine_as_test(machine, settings=settings(LONG, max_examples=STORES[store_name]))


@pytest.mark.soak
def test_a_store_answers_as_the_memory_store_does_for_long(machine: Machine) -> None:
    run_state_machine_as_test(machine, settings=LONG)


class AcceptsAnyLease(MemoryStore):
    """Records the finish of any worker that names the job."""

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
    """Renews the lease of a worker's earlier process."""

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
    """Grants jobs after their not_after."""

    def _is_late(self, record: MemoryJob) -> bool:
        return False


class LeavesOrphansOpen(MemoryStore):
    """Tells a worker that came back to go on, and grants its job to others all the same."""

    def _resume(self, record: MemoryJob, claim: HeldLease) -> MemoryJob:
        return record


class GrantsMoreThanAsked(MemoryStore):
    """Takes the limit for a hint."""

    def lease(self, requests: Sequence[LeaseRequest]) -> list[list[Grant]]:
        return super().lease([msgspec.structs.replace(request, limit=request.limit + 1) for request in requests])


class KeepsHalfATurn(MemoryStore):
    """Rolls nothing back."""

    @contextmanager
    def turn(self, *, lasting: bool = True) -> Iterator[None]:
        yield


class FencesARepeatAfterARequeue(MemoryStore):
    """Compares the repeat of a finish with a failure that a cancel replaced before the requeue."""

    def _repeated_or_fenced(self, record: MemoryJob, report: Report, verb: JobEvent) -> ReportAnswer:
        kinds = iter(incident.kind for incident in record.incidents)
        if all(kind in kinds for kind in ("failed", "canceled", "requeued")):
            record = msgspec.structs.replace(record, last_report=None)
        return super()._repeated_or_fenced(record, report, verb)


class CollectsWhatACacheHas(MemoryStore):
    """Keeps no reference from a cache to its blobs."""

    def _replace_cache(self, cache_id: str, files: dict[str, CachedFile]) -> None:
        self._caches[cache_id] = files


FAULTY = [
    CollectsWhatACacheHas,
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
def test_the_machine_notices_a_faulty_store(faulty: type[MemoryStore]) -> None:
    class FaultyMachine(StoreMachine):
        def make_store(self, clock: FakeClock) -> Store:
            return faulty(clock)

    seed(HUNT_SEED)(FaultyMachine)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(FaultyMachine, settings=HUNT)
