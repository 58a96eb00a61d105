"""Errors of the driver come out of every verb as ours, and say what they mean for what was to be stored."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasuki.core.job import State
from tasuki.core.store_messages import Filter
from tasuki.errors import TasukiError, Unavailable
from tasuki.stores.sql.sqlite import SqliteDatabase, SqliteSession
from tasuki.stores.sql.store import SqlReader, SqlStore
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_stage import Stage
from tests.support.sqlite_files import with_tables

READS: dict[str, Callable[[SqlReader], object]] = {
    "get": lambda reader: reader.get(["a"]),
    "find": lambda reader: reader.find(Filter()),
    "find failed": lambda reader: reader.find(Filter(states=(State.FAILED,))),
    "find leased": lambda reader: reader.find(Filter(states=(State.RUNNING,))),
    "find an array": lambda reader: reader.find(Filter(array_id="x")),
    "incidents": lambda reader: reader.incidents("a"),
    "counts": lambda reader: reader.counts(),
    "ready_ahead": lambda reader: reader.ready_ahead("a"),
    "blob_owners": lambda reader: reader.blob_owners("0" * 64),
    "token": lambda reader: reader.token("0" * 64),
    "tokens": lambda reader: reader.tokens(),
    "ended_among": lambda reader: reader.ended_among(["a"]),
    "revoked_among": lambda reader: reader.revoked_among(["a"]),
    "audit": lambda reader: reader.audit(),
    "epoch": lambda reader: reader.epoch(),
}


def connection_of(store: SqlStore) -> sqlite3.Connection:
    assert isinstance(store._database, SqliteDatabase)
    return store._database.connection


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    clock = FakeClock()
    store = SqlStore.open_sqlite(with_tables(tmp_path / "tasuki.sqlite3"), clock=clock)
    stage = Stage(store, clock)
    stage.add("a")
    yield stage
    store.close()


@pytest.fixture
def store(stage: Stage) -> SqlStore:
    assert isinstance(stage.store, SqlStore)
    return stage.store


@pytest.mark.parametrize("name", READS)
def test_a_reader_whose_statement_fails_raises_an_error_of_ours(store: SqlStore, name: str) -> None:
    reader = store.reader()
    session = reader._own.session
    assert isinstance(session, SqliteSession)
    # All but the range of ids, with which `find` begins: its walk must fail too.
    session.one = {name: "SELECT * FROM nowhere" if name != "id_range" else text for name, text in session.one.items()}

    with pytest.raises(TasukiError):
        READS[name](reader)

    reader.close()


def test_a_statement_that_fails_says_that_nothing_was_stored(stage: Stage, store: SqlStore) -> None:
    connection_of(store).execute("DROP TABLE tasuki_counter")

    with pytest.raises(Unavailable, match="nothing of this was stored"):
        stage.add("b")


def test_a_commit_that_fails_says_that_nobody_knows(stage: Stage, store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(store._database, "commit", fail)

    with pytest.raises(Unavailable, match="whether this was stored is not known"):
        stage.add("b")
