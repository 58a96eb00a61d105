"""A verb without items is answered at once: no call to Redis, no transaction and no statement in SQL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.stores.redis.scripts import RedisSession
from tasuki.stores.redis.store import RedisStore
from tasuki.stores.sql.sqlite import SqliteDatabase, SqliteSession
from tasuki.stores.sql.store import SqlStore
from tasuki.stores.store import Store

VERBS: dict[str, dict[str, str]] = {
    "submit": {},
    "cancel": {"actor": "alice"},
    "requeue": {"actor": "alice"},
    "lease": {},
    "held": {},
    "start": {},
    "renew": {},
    "release": {},
    "finish": {},
    "fail": {},
    "get": {},
    "ended_among": {},
    "revoked_among": {},
    "blob_places": {},
    "place_blobs": {},
    "blobs_stored": {},
}


def refuse(*_arguments: object, **_named: object) -> None:
    raise AssertionError("the service was asked")


def nothing_is_asked(store: Store) -> None:
    try:
        assert {name: getattr(store, name)([], **named) for name, named in VERBS.items()} == {name: [] for name in VERBS}
    finally:
        store.close()


def test_redis_gets_no_call(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RedisStore.open(redis_url, app="zpe")
    monkeypatch.setattr(RedisSession, "_send", refuse)
    nothing_is_asked(store)


def test_sql_gets_no_transaction_and_no_statement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqlStore.open_sqlite(tmp_path / "tasuki.db")
    monkeypatch.setattr(SqliteDatabase, "begin", refuse)
    monkeypatch.setattr(SqliteSession, "rows", refuse)
    nothing_is_asked(store)
