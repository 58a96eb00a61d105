"""Every store keeps the contract: the shipped suite, run on each."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.core.job import JobSpec
from tasuki.stores.memory.store import MemoryStore
from tasuki.stores.redis.store import RedisStore
from tasuki.stores.sql.store import SqlStore
from tasuki.testing.store_suite import MakeStore, StoreSuite
from tests.support.redis_service import RedisService, other_redis_program, redis_program, version_of
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


# The state machine goes around floors in every run; all cases do so only in the soak.
@pytest.mark.soak
@pytest.mark.usefixtures("floors_at_once")
class TestPostgresStoreWithFloors(TestPostgresStore):
    pass


class TestRedisStore(StoreSuite):
    @pytest.fixture
    def make_store(self, redis_url: str) -> MakeStore:
        return lambda clock: RedisStore.open(redis_url, clock=clock)


def test_the_redis_of_the_system_is_another_version(system_redis: RedisService) -> None:
    usual = redis_program()

    assert usual is not None
    assert system_redis.client().info()["redis_version"] != version_of(usual)


class TestRedisStoreInTheRedisOfTheSystem(StoreSuite):
    """Debian's is 7, the wheel's 6.2. Where there is none, the test above says so, once for all."""

    __test__ = other_redis_program() is not None

    @pytest.fixture
    def make_store(self, system_redis_url: str) -> MakeStore:
        return lambda clock: RedisStore.open(system_redis_url, clock=clock)


# The state machine goes through the list in every run (test_state_machine.py); all cases do so only in the soak.
@pytest.mark.soak
class TestRedisStoreWithTheListOfItsApp(StoreSuite):
    @pytest.fixture
    def make_store(self, redis_url: str) -> MakeStore:
        template = JobSpec(job_id="", subject="render.eu")
        return lambda clock: RedisStore.open(redis_url, app="zpe", template=template, clock=clock)
