"""Pauses beside other connections: readers that may not write, and on PostgreSQL leases that are under way."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

from tasuki.core.pauses import PauseOrder
from tasuki.stores.sql.store import SqlStore
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_stage import Stage
from tests.support.postgres_service import PostgresService
from tests.support.waiting import until

PAUSE = [PauseOrder("render.>", "alice", "why")]


def seen_by_a_reader(store: SqlStore) -> tuple[list[str], list[str], list[str]]:
    reader = store.reader()
    try:
        queues = [queue.subject for queue in reader.ready_queues().queues]
        return [one.pattern for one in reader.paused()], queues, reader.ready_jobs("render.x")
    finally:
        reader.close()


def test_a_reader_of_sqlite_sees_pauses(tmp_path: Path) -> None:
    clock = FakeClock()
    store = SqlStore.open_sqlite(tmp_path / "jobs.db", clock=clock)
    stage = Stage(store, clock)
    stage.add("a", subject="render.x")
    stage.add("b", subject="mail.x")

    store.pause(PAUSE)

    assert seen_by_a_reader(store) == (["render.>"], ["mail.x"], [])
    store.close()


def test_a_reader_of_postgresql_sees_pauses(postgres_url: str) -> None:
    clock = FakeClock()
    with closing(SqlStore.open_postgresql(postgres_url, clock=clock)) as store:
        stage = Stage(store, clock)
        stage.add("a", subject="render.x")
        stage.add("b", subject="mail.x")

        store.pause(PAUSE)

        assert seen_by_a_reader(store) == (["render.>"], ["mail.x"], [])


def test_a_pause_waits_for_leases_under_way_and_holds_for_all_that_follow(postgres: PostgresService, postgres_url: str) -> None:
    clock = FakeClock()
    waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    done = threading.Event()

    def pause() -> None:
        with closing(SqlStore.open_postgresql(postgres_url, clock=clock)) as second:
            second.pause(PAUSE)
            done.set()

    thread = threading.Thread(target=pause)
    with closing(SqlStore.open_postgresql(postgres_url, clock=clock)) as first:
        stage = Stage(first, clock)
        stage.add("a", "b", subject="render.x")
        with first.turn():
            assert len(stage.lease(limit=1)) == 1
            thread.start()
            until(lambda: postgres.execute(waits, url=postgres_url), what="the pause waits")
            assert not done.is_set()
        thread.join(20)

        assert done.is_set()
        assert stage.lease() == []
