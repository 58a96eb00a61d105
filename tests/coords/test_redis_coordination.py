"""Coordination as only a real Redis shows it: many at once, lost connections, forgotten epochs, errors that keep secrets."""

import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tasuki.coords.coordination import FORGET_AFTER_S, FORGET_BATCH, ClusterMember
from tasuki.coords.redis import RedisCoordination
from tasuki.core.election import LOCK_TTL_MAX_S, Locked
from tasuki.errors import ConfigError, Unavailable
from tasuki.stores.redis.connection import connect, name_of
from tests.coords.contests import (
    SERVERS,
    TTL_S,
    it_ends_by_itself,
    never_two_hold_it_and_epochs_strictly_rise,
    one_of_many_gets_it,
)
from tests.support.redis_service import RedisService

TIMEOUT_S = 2.0
SECRET = "tasuki-test-secret"
ME = ClusterMember(member_id="me", incarnation="1")

Open = Callable[..., RedisCoordination]


@pytest.fixture
def open_coordination(redis_url: str) -> Iterator[Open]:
    opened: list[RedisCoordination] = []

    def open_one(url: str = redis_url, app: str = "zpe") -> RedisCoordination:
        opened.append(RedisCoordination(connect(url, TIMEOUT_S), where=name_of(url), app=app))
        return opened[-1]

    yield open_one
    for coordination in opened:
        coordination.close()


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    client = connect(redis_url, TIMEOUT_S)
    yield client
    client.close()


# -- many at once --------------------------------------------------------------------------------------------------


def test_of_many_that_ask_at_once_one_gets_the_lock(open_coordination: Open) -> None:
    one_of_many_gets_it(open_coordination)


def test_many_that_take_turns_never_hold_the_lock_together_and_epochs_strictly_rise(open_coordination: Open) -> None:
    never_two_hold_it_and_epochs_strictly_rise(open_coordination)


def test_threads_may_share_one_object(open_coordination: Open) -> None:
    shared = open_coordination()

    with ThreadPoolExecutor(SERVERS) as pool:
        answers = list(pool.map(lambda number: shared.acquire("leader", f"server-{number}", TTL_S, 0), range(4 * SERVERS)))

    assert [answer for answer in answers if isinstance(answer, Locked)] == [Locked(1)]


def test_a_lock_ends_on_the_clock_of_redis(open_coordination: Open) -> None:
    it_ends_by_itself(open_coordination)


def test_one_beat_removes_only_a_batch_of_the_dead_with_all_that_they_told(open_coordination: Open, raw: Any) -> None:
    now = time.time()
    for number in range(FORGET_BATCH + 5):
        raw.zadd("zpe:beats", {f"dead-{number}": now - FORGET_AFTER_S - 60})
        raw.hset(f"zpe:member:dead-{number}", "incarnation", "1")

    open_coordination().beat(ME, seen={})

    assert raw.zcard("zpe:beats") == 5 + 1
    assert len(raw.keys("zpe:member:*")) == 5 + 1


def test_apps_are_apart(open_coordination: Open) -> None:
    zpe, other = open_coordination(), open_coordination(app="other")
    zpe.acquire("leader", "one", TTL_S, 0)
    zpe.beat(ME, seen={})
    zpe.set_detached("w1", True, actor="admin")

    view = other.beat(ClusterMember(member_id="another", incarnation="1"), seen={})

    assert ([live.member_id for live in view.members], view.detached) == (["another"], frozenset())
    assert other.acquire("leader", "another", TTL_S, 0) == Locked(1)


# -- a Redis that forgot -------------------------------------------------------------------------------------------


def test_after_a_flush_the_floor_keeps_old_epochs_from_being_given_again(open_coordination: Open, raw: Any) -> None:
    coordination = open_coordination()
    for epoch in (1, 2, 3):
        assert coordination.acquire("leader", "one", TTL_S, epoch - 1) == Locked(epoch)
        coordination.release("leader", "one", epoch)
    assert coordination.acquire("leader", "one", TTL_S, 3) == Locked(4)

    raw.flushdb()

    assert not coordination.renew("leader", "one", 4, TTL_S)
    assert coordination.acquire("leader", "two", TTL_S, 4) == Locked(5)


def test_neither_lock_nor_epoch_expires(open_coordination: Open, raw: Any) -> None:
    open_coordination().acquire("leader", "one", 0.1, 0)

    assert raw.ttl("zpe:lock:leader") == -1


# -- trouble -------------------------------------------------------------------------------------------------------


def test_a_connection_that_was_lost_is_made_again(open_coordination: Open, redis_service: RedisService) -> None:
    coordination = open_coordination()
    coordination.beat(ME, seen={})
    admin: Any = redis_service.client()
    admin.execute_command("CLIENT", "KILL", "TYPE", "normal")

    assert [live.member_id for live in coordination.beat(ME, seen={}).members] == ["me"]
    admin.close()


def test_a_redis_that_is_away_is_unavailable_until_it_is_back_with_its_lock(open_coordination: Open) -> None:
    with RedisService() as service:
        coordination = open_coordination(service.url())
        coordination.acquire("leader", "one", LOCK_TTL_MAX_S, 0)
        service.stop()
        for _ in range(2):
            with pytest.raises(Unavailable):
                coordination.renew("leader", "one", 1, TTL_S)

        service.start()

        assert coordination.renew("leader", "one", 1, TTL_S)


def test_a_redis_that_hangs_is_given_up(redis_url: str) -> None:
    with RedisService() as service:
        coordination = RedisCoordination(connect(service.url(), 30.0), where="Redis", app="zpe")
        coordination.detached()
        coordination.set_lock_ttl(0.75)
        service.pause()
        begun_at = time.monotonic()

        with pytest.raises(Unavailable):
            coordination.detached()

        assert time.monotonic() - begun_at < 2.0
        service.resume()
        coordination.close()


def test_a_wrong_password_is_told_without_the_password(
    open_coordination: Open, redis_service: RedisService, redis_url: str
) -> None:
    admin: Any = redis_service.client()
    admin.execute_command("ACL", "SETUSER", "beater", "on", ">right", "~*", "+@all")
    try:
        with pytest.raises(ConfigError, match="check user, password and rights") as raised:
            open_coordination(redis_url.replace("redis://", f"redis://beater:{SECRET}@")).detached()
    finally:
        admin.acl_deluser("beater")
        admin.close()

    assert SECRET not in "".join(traceback.format_exception(raised.value))


def test_a_user_without_the_keys_is_told(open_coordination: Open, redis_service: RedisService, redis_url: str) -> None:
    admin: Any = redis_service.client()
    admin.execute_command("ACL", "SETUSER", "beater", "on", f">{SECRET}", "~other:*", "+@all")
    try:
        with pytest.raises(ConfigError, match="rights"):
            open_coordination(redis_url.replace("redis://", f"redis://beater:{SECRET}@")).beat(ME, seen={})
    finally:
        admin.acl_deluser("beater")
        admin.close()


def test_what_was_closed_stays_closed(open_coordination: Open) -> None:
    coordination = open_coordination()
    coordination.detached()

    coordination.close()

    with pytest.raises(Unavailable, match="closed"):
        coordination.detached()


def test_the_driver_is_not_loaded_before_it_is_needed() -> None:
    code = "import sys, tasuki.coords.redis; print('redis' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert done.stdout.strip() == "False"
