"""All back ends of the coordination keep its contract."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tasuki.coords.coordination import Coordination, MemoryCoordination
from tasuki.coords.redis import RedisCoordination
from tasuki.coords.scheduler_redis import SchedulerCoordination
from tasuki.coords.sql import SqlCoordination
from tasuki.stores.redis.connection import connect
from tasuki.testing.clocks import FakeClock
from tasuki.testing.coords_suite import CoordinationSuite
from tests.support.postgres_service import PostgresService


class TestMemoryCoordination(CoordinationSuite):
    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    def make_coordination(self, clock: FakeClock) -> Callable[[], Coordination]:
        shared = MemoryCoordination(clock.wall)
        return lambda: shared

    @pytest.fixture
    def let_pass(self, clock: FakeClock) -> Callable[[float], None]:
        return clock.jump_wall


class TestSqlCoordination(CoordinationSuite):
    """Time passes by moving what is stored into the past: the database's own clock is nobody's to turn."""

    @pytest.fixture
    def make_coordination(self, postgres_url: str) -> Iterator[Callable[[], Coordination]]:
        opened: list[SqlCoordination] = []

        def make() -> Coordination:
            opened.append(SqlCoordination(postgres_url))
            return opened[-1]

        yield make
        for coordination in opened:
            coordination.close()

    @pytest.fixture
    def let_pass(self, postgres: PostgresService, postgres_url: str) -> Callable[[float], None]:
        def let_pass(seconds: float) -> None:
            with postgres.connect(postgres_url) as connection:
                connection.execute("UPDATE tasuki_scopelease SET expires_at = expires_at - %s", (seconds,))
                connection.execute("UPDATE tasuki_member SET beat_at = beat_at - %s", (seconds,))

        return let_pass


class TestRedisCoordination(CoordinationSuite):
    """Likewise."""

    @pytest.fixture
    def make_coordination(self, redis_url: str) -> Iterator[Callable[[], Coordination]]:
        opened: list[RedisCoordination] = []

        def make() -> Coordination:
            opened.append(RedisCoordination(connect(redis_url, 5.0), where="Redis", app="zpe"))
            return opened[-1]

        yield make
        for coordination in opened:
            coordination.close()

    @pytest.fixture
    def let_pass(self, redis_url: str) -> Iterator[Callable[[float], None]]:
        raw: Any = connect(redis_url, 5.0)

        def let_pass(seconds: float) -> None:
            for scope in raw.keys("zpe:lock:*"):
                raw.hincrbyfloat(scope, "expires_at", -seconds)
            for member_id in raw.zrange("zpe:beats", 0, -1):
                raw.zincrby("zpe:beats", -seconds, member_id)

        yield let_pass
        raw.close()


class TestSchedulerCoordination(CoordinationSuite):
    """Likewise."""

    @pytest.fixture
    def make_coordination(self, redis_url: str) -> Iterator[Callable[[], Coordination]]:
        opened: list[SchedulerCoordination] = []

        def make() -> Coordination:
            opened.append(SchedulerCoordination(connect(redis_url, 5.0), where="Redis"))
            return opened[-1]

        yield make
        for coordination in opened:
            coordination.close()

    @pytest.fixture
    def let_pass(self, redis_url: str) -> Iterator[Callable[[float], None]]:
        raw: Any = connect(redis_url, 5.0)

        def let_pass(seconds: float) -> None:
            for key in raw.keys("scheduler:*"):
                if raw.pttl(key) > 0:
                    raw.pexpire(key, int(raw.pttl(key) - seconds * 1000))
            for member_id in raw.zrange("scheduler:members", 0, -1):
                raw.zincrby("scheduler:members", -seconds, member_id)

        yield let_pass
        raw.close()
