"""Every store keeps the contract: the shipped suite, run on each."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.stores.memory.store import MemoryStore
from tasuki.stores.sql.store import SqlStore
from tasuki.testing.store_suite import MakeStore, StoreSuite
from tests.support.sqlite_files import memory_folder, with_tables


class TestMemoryStore(StoreSuite):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda clock: MemoryStore(clock)


class TestSqliteStore(StoreSuite):
    @pytest.fixture
    def make_store(self) -> Iterator[MakeStore]:
        with tempfile.TemporaryDirectory(prefix="tasuki-conformance-", dir=memory_folder()) as folder:
            yield lambda clock: SqlStore.open_sqlite(with_tables(Path(folder) / "tasuki.sqlite3"), clock=clock)


class TestPostgresStore(StoreSuite):
    @pytest.fixture
    def make_store(self, postgres_url: str) -> MakeStore:
        return lambda clock: SqlStore.open_postgresql(postgres_url, clock=clock)
