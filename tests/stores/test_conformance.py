"""Every store keeps the contract: the shipped suite, run on each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.stores.memory.store import MemoryStore
from tasuki.testing.store_suite import MakeStore, StoreSuite
from tests.support.sqlite_files import with_tables


class TestMemoryStore(StoreSuite):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda clock: MemoryStore(clock)


class TestSqliteStore(StoreSuite):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        from tasuki.stores.sql.store import SqlStore

        return lambda clock: SqlStore.open_sqlite(with_tables(tmp_path / "tasuki.sqlite3"), clock=clock)


class TestPostgresStore(StoreSuite):
    @pytest.fixture
    def make_store(self, postgres_url: str) -> MakeStore:
        from tasuki.stores.sql.store import SqlStore

        return lambda clock: SqlStore.open_postgresql(postgres_url, clock=clock)
