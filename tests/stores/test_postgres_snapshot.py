"""Leasing from PostgreSQL while somebody holds an old snapshot, which keeps the index entries of all leased jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from tasuki.core.job import State
from tasuki.stores.sql import postgres_ready
from tasuki.stores.sql.leader import DUE_ALL_INTERVAL_S
from tasuki.stores.sql.postgres import PostgresDatabase
from tasuki.stores.sql.postgres_ready import SLOW_ROW_S, SLOW_WALK_S, SLOW_WALKS, WalkMode
from tasuki.stores.sql.postgres_session import PostgresSession
from tasuki.stores.sql.store import SqlStore
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_stage import PAST_LEASE_S, Stage

BATCH = 250


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def open_stage(vacuumed_url: str, clock: FakeClock) -> Iterator[Callable[[], Stage]]:
    stages: list[Stage] = []

    def opened() -> Stage:
        stages.append(Stage(SqlStore.open_postgresql(vacuumed_url, clock=clock), clock))
        return stages[-1]

    yield opened
    for stage in stages:
        stage.store.close()


@pytest.fixture
def snapshot(postgres_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A transaction that sees the database as it was before all jobs."""
    with psycopg.connect(postgres_url) as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT count(*) FROM tasuki_jobrun")
        yield connection


def index_entries_read(stage: Stage, work: Callable[[], object], index: str = "tasuki_job_ready") -> int:
    """Return how many entries of an index are read by some work."""
    assert isinstance(stage.store, SqlStore)
    assert isinstance(stage.store._database, PostgresDatabase)
    connection = stage.store._database.connection

    def read_so_far() -> int:
        connection.execute("SELECT pg_stat_force_next_flush()")
        row = connection.execute("SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = %s", (index,)).fetchone()
        assert row is not None
        return int(row[0])

    before = read_so_far()
    work()
    return read_so_far() - before


def take(stage: Stage, batches: int) -> None:
    for number in range(batches):
        stage.store.submit([stage.submission(f"job-{number}-{place}") for place in range(BATCH)])
        assert len(stage.lease(limit=BATCH)) == BATCH


@pytest.mark.usefixtures("snapshot")
@pytest.mark.parametrize("patterns", [(">",), ("render.>",), ("render.eu",)])
def test_the_cost_of_a_lease_does_not_grow_with_the_jobs_that_were_taken(
    open_stage: Callable[[], Stage], monkeypatch: pytest.MonkeyPatch, patterns: tuple[str, ...]
) -> None:
    monkeypatch.setattr(postgres_ready, "RAISE_DELAY_S", 0.0)
    monkeypatch.setattr(postgres_ready, "SLOW_WALK_S", -1.0)
    monkeypatch.setattr(postgres_ready, "SLOW_WALKS", 1)
    monkeypatch.setattr(postgres_ready, "LOOK_MAX_S", 0.0)  # looks for what others brought back are measured below
    stage = open_stage()
    take(stage, 6)
    stage.add("last")

    read = index_entries_read(stage, lambda: stage.lease(patterns=patterns))

    assert stage.job("last").state is State.ASSIGNED
    assert read <= 2 * 4 * BATCH, f"{read} entries; two batches may lie above the floor, for each of four walks"


def test_walks_go_around_the_floors_after_some_that_took_long_and_the_next_plain_one_comes_ever_later() -> None:
    mode, now, pauses = WalkMode(), 1000.0, []
    for took_s, rows in [(SLOW_WALK_S, 0), (SLOW_WALK_S + 99 * SLOW_ROW_S, 100), *[(1.0, 0)] * (SLOW_WALKS - 1)]:
        mode.took(took_s, rows, now)
    assert mode.is_plain(now)

    for _ in range(6):
        mode.took(1.0, 0, now)
        began = now
        while not mode.is_plain(now):
            now += 1.0
        pauses.append(now - began)
    assert pauses == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]

    # and: one that was fast lets it begin anew
    mode.took(0.0, 0, now)
    mode.took(1.0, 0, now)
    assert mode.is_plain(now)


def test_without_dead_entries_walks_are_plain(open_stage: Callable[[], Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_ready, "FLOOR_JOBS_MIN", 1)
    monkeypatch.setattr(postgres_ready, "RAISE_DELAY_S", 0.0)
    monkeypatch.setattr(postgres_ready, "SLOW_WALK_S", 1e9)  # whatever else the machine does
    stage = open_stage()
    take(stage, 2)
    asked: list[str] = []
    plain_rows = PostgresSession.rows
    monkeypatch.setattr(
        PostgresSession, "rows", lambda session, name, *rest: asked.append(name) or plain_rows(session, name, *rest)
    )

    stage.lease()

    assert "band" in asked
    assert not [name for name in asked if name.endswith("_above")]


@pytest.mark.usefixtures("snapshot")
def test_a_look_for_what_others_brought_back_has_a_bound(
    open_stage: Callable[[], Stage], monkeypatch: pytest.MonkeyPatch, floors_at_once: None
) -> None:
    stage = open_stage()
    take(stage, 6)
    # given: each statement of a look takes longer than it may
    monkeypatch.setattr(postgres_ready, "LOOK_STEP_S", 0.0)
    monkeypatch.setattr(postgres_ready, "LOOK_MAX_S", 1e-9)
    monkeypatch.setattr(postgres_ready, "LOOK_SHARE", 1.0)
    for _ in range(12):
        stage.lease()

    assert index_entries_read(stage, stage.lease) <= BATCH  # of six batches


@pytest.mark.usefixtures("floors_at_once")
@pytest.mark.parametrize("event", ["retry", "release", "loss", "requeue"])
@pytest.mark.parametrize("is_other_server", [False, True])
@pytest.mark.parametrize("is_plain", [False, True])
def test_a_job_that_comes_back_below_the_floor_is_leased_again(
    open_stage: Callable[[], Stage], monkeypatch: pytest.MonkeyPatch, event: str, is_other_server: bool, is_plain: bool
) -> None:
    if is_plain:
        monkeypatch.setattr(postgres_ready, "SLOW_WALK_S", 1e9)
    if not is_other_server:
        monkeypatch.setattr(postgres_ready, "LOOK_MAX_S", 0.0)  # the server that brought it back needs no look
    monkeypatch.setattr(postgres_ready, "LOOK_SHARE", 1e9)
    stage = open_stage()
    other = open_stage() if is_other_server else stage
    stage.add("early", backoff_s=0.0)
    [early] = stage.lease()
    stage.add(*(f"job-{number}" for number in range(8)))
    for _ in range(8):
        stage.lease()
    assert stage.lease() == []

    if event == "retry":
        other.fail(early, error_code="EXIT_CODE")
        other.promote()
    elif event == "release":
        other.release(early)
    elif event == "loss":
        other.lose()
    else:
        other.finish(early)
        other.store.requeue(["early"], actor="alice")

    [again] = stage.lease()
    assert (again.job_id, again.attempt) == ("early", 2)


@pytest.mark.usefixtures("floors_at_once")
def test_a_job_that_is_committed_after_younger_ones_were_taken_is_leased(
    open_stage: Callable[[], Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_ready, "LOOK_SHARE", 1e9)
    stage, slow = open_stage(), open_stage()

    with slow.store.turn():
        slow.add("early")
        stage.add(*(f"job-{number}" for number in range(5)))
        for _ in range(6):
            stage.lease()

    assert [grant.job_id for grant in stage.lease()] == ["early"]


@pytest.mark.usefixtures("floors_at_once")
def test_leases_that_were_rolled_back_are_given_again(open_stage: Callable[[], Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_ready, "LOOK_MAX_S", 0.0)
    stage = open_stage()
    ids = [f"job-{number}" for number in range(5)]
    stage.add(*ids)

    def fail_after_leasing() -> None:
        with stage.store.turn():
            for _ in range(5):
                stage.lease()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_after_leasing()

    assert [grant.job_id for _ in range(5) for grant in stage.lease()] == ids


@pytest.mark.usefixtures("floors_at_once")
def test_priorities_groups_subjects_and_kinds_around_floors_are_found(open_stage: Callable[[], Stage]) -> None:
    stage = open_stage()
    # given: a floor in the middle of everything
    stage.add("a", "b", "c", subject="m.m", priority=5)
    for _ in range(4):
        stage.lease()
    places = [("m.m", 7), ("a.x", 5), ("m.a", 5), ("m.z", 5), ("z.x", 5), ("m.m", 5), ("m.m", 2), ("a.x", 0)]

    for number, (subject, priority) in enumerate(places):
        stage.add(f"job-{number}", subject=subject, priority=priority)
    order = [grant.job_id for _ in places for grant in stage.lease()]

    assert sorted(order) == [f"job-{number}" for number in range(len(places))]
    assert (order[0], order[-2:]) == ("job-0", ["job-6", "job-7"])
    assert stage.lease(patterns=("m.*", "a.x")) == []


@pytest.mark.usefixtures("snapshot")
def test_reaping_and_promotion_pass_over_what_earlier_calls_have_seen(open_stage: Callable[[], Stage], clock: FakeClock) -> None:
    stage = open_stage()
    stage.store.submit([stage.submission(f"job-{number}", backoff_s=1.0) for number in range(BATCH)])
    reports = [stage.report(grant, error_code="EXIT_CODE") for grant in stage.lease(limit=BATCH)]
    stage.store.fail(reports)
    clock.advance(2 * PAST_LEASE_S)
    assert (stage.reap(), stage.promote()) == ([], BATCH)
    clock.advance(1)

    assert index_entries_read(stage, stage.reap, "tasuki_job_leased") <= 1
    assert index_entries_read(stage, stage.promote, "tasuki_job_delayed") <= 1


def test_a_time_that_was_passed_over_is_seen_by_a_later_look_at_all(open_stage: Callable[[], Stage], clock: FakeClock) -> None:
    stage = open_stage()
    stage.reap()
    stage.promote()
    stage.running("leased")
    stage.add("delayed", not_before=clock.wall() + 1)
    database = stage.store._database  # type: ignore[attr-defined]
    database.connection.execute("UPDATE tasuki_jobrun SET lease_expires_at = 1 WHERE lease_expires_at IS NOT NULL")
    database.connection.execute("UPDATE tasuki_jobrun SET not_before = 1 WHERE not_before IS NOT NULL")

    assert (stage.reap(), stage.promote()) == ([], 0)
    clock.advance(DUE_ALL_INTERVAL_S)

    assert [reaped.job_id for reaped in stage.reap()] == ["leased"]
    assert stage.promote() == 1
