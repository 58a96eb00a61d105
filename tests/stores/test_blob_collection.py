"""Blobs in the SQL store: collection is bounded work that goes on where it stopped, and jobs without blobs pay nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasuki.core.job import InputFile
from tasuki.core.store_messages import CondemnOrder
from tasuki.stores.sql.sqlite import SqliteSession
from tasuki.stores.sql.store import SqlStore
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_stage import Stage
from tests.support.sqlite_files import with_tables

WINDOW = 10


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr("tasuki.stores.sql.blobs.SCAN_MAX", WINDOW)
    clock = FakeClock()
    store = SqlStore.open_sqlite(with_tables(tmp_path / "tasuki.sqlite3"), clock=clock)
    yield Stage(store, clock)
    store.close()


def used(stage: Stage, job_id: str, count: int) -> None:
    blobs = [f"{job_id:0>32}{number:032x}" for number in range(count)]
    stage.store_blobs(*blobs)
    stage.add(job_id, files=tuple(InputFile(f"in{number}", sha256=blob, size_bytes=3) for number, blob in enumerate(blobs)))


def condemned(stage: Stage, limit: int = 256) -> int:
    return len(stage.store.condemn_blobs(CondemnOrder(1e12, limit=limit), epoch=stage.epoch).places)


def test_many_that_are_in_use_do_not_hide_the_others(stage: Stage) -> None:
    used(stage, "a", 2 * WINDOW + 5)
    stage.store_blobs("f" * 64)
    assert [condemned(stage) for _ in range(3)] == [0, 0, 1]


def test_at_the_young_end_it_begins_again(stage: Stage) -> None:
    used(stage, "a", WINDOW)
    assert [condemned(stage) for _ in range(2)] == [0, 0]
    stage.store.cancel(["a"], actor="alice")
    stage.store.prune(before=1e12, epoch=stage.epoch)
    assert condemned(stage) == WINDOW


def test_a_limit_in_the_middle_of_a_window_loses_nothing(stage: Stage) -> None:
    stage.store_blobs(*(f"{number:064x}" for number in range(WINDOW)))
    for left in range(WINDOW, 0, -1):
        places = stage.store.condemn_blobs(CondemnOrder(1e12, limit=1), epoch=stage.epoch).places
        assert len(places) == 1, f"{left} are left"
        stage.store.forget_blobs(places, epoch=stage.epoch)
    assert condemned(stage) == 0


def test_a_job_without_blobs_runs_no_statement_for_them(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    for verb in ("rows", "change", "changed", "returned"):
        run = getattr(SqliteSession, verb)

        def noted(session: SqliteSession, name: str, *arguments: Any, run: Any = run) -> Any:
            names.append(name)
            return run(session, name, *arguments)

        monkeypatch.setattr(SqliteSession, verb, noted)
    stage.finish(stage.running("a"), result=b"1")
    stage.fail(stage.running("b"), message="it broke")
    stage.finish(stage.running("c"), message="all good", meta={"n": 1})
    assert names
    assert [name for name in names if "blob" in name] == []
    stage.submit("d", files=(InputFile("in", sha256="f" * 64, size_bytes=3),))
    assert [name for name in names if "blob" in name] == ["stored_blobs"]
