"""Costs of verbs on the SQL stores: statements by the batch, not by the job; no rows are left behind that nothing needs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasuki.core.statistics import GroupCounts
from tasuki.core.store_messages import Grant, Submitted, Turn
from tasuki.stores.batching import execute
from tasuki.stores.sql.postgres_session import PostgresSession
from tasuki.stores.sql.store import SqlStore
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_stage import PAST_LEASE_S, Stage
from tests.support.sqlite_files import with_tables

JOBS = 256

Count = Callable[[Callable[[], object]], int]


@pytest.fixture(params=["sqlite", "postgresql"])
def vendor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(vendor: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlStore]:
    if vendor == "sqlite":
        store = SqlStore.open_sqlite(with_tables(tmp_path / "tasuki.sqlite3"), clock=FakeClock())
    else:
        store = SqlStore.open_postgresql(request.getfixturevalue("postgres_url"), clock=FakeClock())
    yield store
    store.close()


@pytest.fixture
def stage(store: SqlStore) -> Stage:
    assert isinstance(store.clock, FakeClock)
    return Stage(store, store.clock)


@pytest.fixture
def grants(stage: Stage) -> list[Grant]:
    stage.add(*(f"job-{number}" for number in range(JOBS)), backoff_s=0.0)
    return stage.lease(limit=JOBS)


@pytest.fixture
def statements(vendor: str, store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> Count:
    """Counts the statements that a verb runs; on PostgreSQL each is a round trip, begin and commit not among them."""
    seen: list[object] = []
    run = PostgresSession._run

    def counted(session: PostgresSession, *arguments: Any) -> Any:
        seen.append(arguments)
        return run(session, *arguments)

    if vendor == "sqlite":
        store._database.connection.set_trace_callback(seen.append)
    else:
        monkeypatch.setattr(PostgresSession, "_run", counted)

    def count(verb: Callable[[], object]) -> int:
        seen.clear()
        verb()
        return len(seen)

    return count


def test_a_worker_gives_all_its_jobs_back_in_a_few_statements(
    store: SqlStore, stage: Stage, grants: list[Grant], statements: Count
) -> None:
    claims = [stage.claim(grant) for grant in grants]

    assert statements(lambda: store.release(claims)) < 10

    assert store.counts() == {"render": GroupCounts(pending=JOBS)}
    assert stage.kinds("job-7") == ["released"]


def test_reaping_a_lost_worker_takes_a_few_statements(
    vendor: str, store: SqlStore, stage: Stage, grants: list[Grant], statements: Count
) -> None:
    stage.clock.advance(PAST_LEASE_S)

    assert statements(stage.reap) <= {"sqlite": 11, "postgresql": 7}[vendor]
    assert store.counts() == {"render": GroupCounts(pending=JOBS)}


def test_what_many_jobs_come_to_is_written_in_a_few_statements(
    vendor: str, store: SqlStore, stage: Stage, grants: list[Grant], statements: Count
) -> None:
    ids = [grant.job_id for grant in grants]
    reports = [stage.report(grant, error_code="EXIT_CODE") for grant in grants]

    assert statements(lambda: store.cancel(ids, actor="alice")) < 10  # asks their workers
    assert statements(lambda: store.fail(reports)) < 10
    # PostgreSQL: one of them for the epoch, above which attempts go on
    assert statements(lambda: store.requeue(ids, actor="alice")) <= {"sqlite": 9, "postgresql": 7}[vendor]
    assert statements(lambda: store.cancel(ids, actor="alice")) < 10  # ends them at once
    assert store.counts() == {"render": GroupCounts(canceled=JOBS)}


def test_what_is_too_late_is_skipped_in_a_few_statements(vendor: str, store: SqlStore, stage: Stage, statements: Count) -> None:
    stage.add(*(f"late-{number}" for number in range(JOBS)), not_after=stage.clock.wall() + 1)
    stage.clock.advance(2)

    assert statements(stage.skip) <= {"sqlite": 11, "postgresql": 7}[vendor]
    assert store.counts() == {"render": GroupCounts(skipped=JOBS)}


def test_failures_take_a_few_statements(
    vendor: str, store: SqlStore, stage: Stage, grants: list[Grant], statements: Count
) -> None:
    reports = [stage.report(grant, error_code="EXIT_CODE") for grant in grants]

    # PostgreSQL: the mark of the turn, rows, endings, counters, incidents
    assert statements(lambda: store.fail(reports)) <= {"sqlite": 9, "postgresql": 5}[vendor]

    assert stage.kinds("job-7") == ["failed"]


def test_what_many_workers_hold_is_one_statement(store: SqlStore, grants: list[Grant], statements: Count) -> None:
    holders = [(f"w{number}", f"w{number}/1", "") for number in range(100)]

    assert statements(lambda: store.held(holders)) == 1
    assert [len(held) for held in store.held(holders)] == [0, JOBS] + [0] * 98


def test_the_orders_of_one_actor_in_a_turn_are_one_batch(vendor: str, store: SqlStore, stage: Stage, statements: Count) -> None:
    ids = [f"job-{number}" for number in range(JOBS)]
    stage.add(*ids)
    stage.lease(limit=JOBS // 2)
    # given: orders of two actors, one after the other
    turn = Turn(cancel=[(job_id, ("alice", "bob")[place % 2], "no more") for place, job_id in enumerate(ids)])

    assert statements(lambda: execute(store, turn)) <= {"sqlite": 11, "postgresql": 9}[vendor]

    assert [store.incidents(job_id)[0].actor for job_id in ids[:3]] == ["alice", "bob", "alice"]
    assert store.counts() == {"render": GroupCounts(active=JOBS // 2, canceled=JOBS // 2)}


def test_known_ids_are_answered_without_reading_their_results(store: SqlStore, stage: Stage) -> None:
    stage.add(*(f"job-{number}" for number in range(JOBS)))
    store.finish([stage.report(grant, result=bytes(20_000)) for grant in stage.lease(limit=JOBS)])

    tracemalloc.start()
    answers = store.submit([stage.submission(f"job-{number}") for number in range(JOBS)])
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert [answer.job_id for answer in answers if isinstance(answer, Submitted) and answer.job] == [
        f"job-{number}" for number in range(JOBS)
    ]
    assert most_bytes < JOBS * 20_000 / 4


def test_a_group_whose_last_job_is_pruned_leaves_no_counters(store: SqlStore, stage: Stage) -> None:
    stage.finish(stage.running("gone", subject="passing.x"))
    stage.finish(stage.running("old", subject="lasting.x"))
    stage.add("new", subject="lasting.x")
    stage.clock.advance(60)

    assert store.prune(before=stage.clock.wall(), epoch=stage.epoch) == 2

    rows = store._database.connection.execute('SELECT DISTINCT "group" FROM tasuki_counter').fetchall()
    assert rows == [("lasting",)]
    assert store.counts() == {"lasting": GroupCounts(pending=1)}


def test_counters_are_right_when_a_group_is_pruned_and_filled_in_one_turn(store: SqlStore, stage: Stage) -> None:
    stage.finish(stage.running("old", subject="g.x"))
    stage.clock.advance(60)

    with store.turn():
        stage.add("before", subject="g.x")
        store.prune(before=stage.clock.wall(), epoch=stage.epoch)
        stage.add("after", subject="g.x")

    assert store.counts() == {"g": GroupCounts(pending=2)}


def test_the_columns_of_a_run_show_whether_its_worker_asks_whether_it_may_go_on(stage: Stage, store: SqlStore) -> None:
    from tasuki.django.models import JobRun

    def columns() -> tuple[Any, ...]:
        names = ("continuation_state", "continuation_check_started_at", "continuation_check_deadline_at")
        [found] = JobRun.objects.using(store._database._alias).values_list(*names)
        return tuple(one if one is None or isinstance(one, str) else one.timestamp() for one in found)

    grant, now = stage.running("a"), stage.clock.wall()
    assert columns() == ("NONE", None, None)
    stage.renew(grant, confirm_s=3.2)
    assert columns() == ("CONFIRMING", pytest.approx(now), pytest.approx(now + 3.2))
    stage.renew(grant)
    assert columns()[0] == "CONFIRMING"
    stage.renew(grant, confirm_s=0.0)
    assert columns() == ("NONE", None, None)
