"""What verbs cost and leave behind on SQLite: statements by the batch, not by the job; no rows that nothing needs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasuki.core.store_messages import Grant, GroupCounts, Submitted
from tasuki.stores.sql.store import SqlStore
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_stage import PAST_LEASE_S, Stage
from tests.support.sqlite_files import with_tables

JOBS = 256


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    store = SqlStore.open_sqlite(with_tables(tmp_path / "tasuki.sqlite3"), clock=FakeClock())
    yield store
    store.close()


@pytest.fixture
def stage(store: SqlStore) -> Stage:
    assert isinstance(store.clock, FakeClock)
    return Stage(store, store.clock)


@pytest.fixture
def grants(stage: Stage) -> list[Grant]:
    stage.add(*(f"job-{number}" for number in range(JOBS)))
    return stage.lease(limit=JOBS)


def statements(store: SqlStore, verb: Callable[[], object]) -> int:
    """How many statements SQLite runs for this."""
    seen: list[str] = []
    store._database.connection.set_trace_callback(seen.append)
    verb()
    store._database.connection.set_trace_callback(None)
    return len(seen)


def test_a_worker_gives_all_its_jobs_back_in_a_few_statements(store: SqlStore, stage: Stage, grants: list[Grant]) -> None:
    claims = [stage.claim(grant) for grant in grants]

    assert statements(store, lambda: store.release(claims)) < 10

    assert store.counts() == {"render": GroupCounts(pending=JOBS)}
    assert stage.kinds("job-7") == ["released"]


def test_reaping_a_lost_worker_takes_a_few_statements(store: SqlStore, stage: Stage, grants: list[Grant]) -> None:
    stage.clock.advance(PAST_LEASE_S)

    assert statements(store, stage.reap) < 12
    assert store.counts() == {"render": GroupCounts(pending=JOBS)}


def test_what_many_jobs_come_to_is_written_in_a_few_statements(store: SqlStore, stage: Stage, grants: list[Grant]) -> None:
    ids = [grant.job_id for grant in grants]
    reports = [stage.report(grant, error_code="EXIT_CODE") for grant in grants]

    assert statements(store, lambda: store.cancel(ids, actor="alice")) < 10  # asks their workers
    assert statements(store, lambda: store.fail(reports)) < 10
    assert statements(store, lambda: store.requeue(ids, actor="alice")) < 10
    assert statements(store, lambda: store.cancel(ids, actor="alice")) < 10  # ends them at once
    assert store.counts() == {"render": GroupCounts(canceled=JOBS)}


def test_what_is_too_late_is_skipped_in_a_few_statements(store: SqlStore, stage: Stage) -> None:
    stage.add(*(f"late-{number}" for number in range(JOBS)), not_after=stage.clock.wall() + 1)
    stage.clock.advance(2)

    assert statements(store, stage.skip) < 12
    assert store.counts() == {"render": GroupCounts(skipped=JOBS)}


def test_failures_take_a_few_statements(store: SqlStore, stage: Stage, grants: list[Grant]) -> None:
    reports = [stage.report(grant, error_code="EXIT_CODE") for grant in grants]

    assert statements(store, lambda: store.fail(reports)) < 10

    assert stage.kinds("job-7") == ["failed"]


def test_what_many_workers_hold_is_one_statement(store: SqlStore, grants: list[Grant]) -> None:
    holders = [(f"w{number}", f"w{number}/1", "") for number in range(100)]

    assert statements(store, lambda: store.held(holders)) == 1
    assert [len(held) for held in store.held(holders)] == [0, JOBS] + [0] * 98


def test_known_ids_are_answered_without_reading_their_results(store: SqlStore, stage: Stage) -> None:
    stage.add(*(f"job-{number}" for number in range(JOBS)))
    store.finish([stage.report(grant, result=bytes(60_000)) for grant in stage.lease(limit=JOBS)])

    tracemalloc.start()
    answers = store.submit([stage.submission(f"job-{number}") for number in range(JOBS)])
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert [answer.job_id for answer in answers if isinstance(answer, Submitted) and answer.job] == [
        f"job-{number}" for number in range(JOBS)
    ]
    assert most_bytes < JOBS * 60_000 / 4


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
