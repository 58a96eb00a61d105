"""The keys `scheduler:…` as others see them: names, fields, times to live, and what they may write."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tasuki.coords.coordination import ASSIGNED_S, LEADER_DETACH_S, MEMBER_TIMEOUT_S, ClusterMember
from tasuki.coords.coordination import LEADER as NOT_A_PERSON
from tasuki.coords.scheduler_redis import SchedulerCoordination
from tasuki.core.election import Locked
from tasuki.stores.redis.connection import connect, place_of
from tests.coords.contests import never_two_hold_it_and_epochs_strictly_rise, one_of_many_gets_it

FACTS = {
    "node_id": "n1",
    "pid": 4711,
    "grpc_host": "10.0.0.7",
    "grpc_port": "50051",
    "role": "leader",
    "load": 1,
    "current_job_run_id": "d7-60",
}
LEADER = ClusterMember(member_id="7", incarnation="1", led_ago_s=0.0, workers={"7": FACTS})

Open = Callable[[], SchedulerCoordination]


@pytest.fixture
def open_coordination(redis_url: str) -> Iterator[Open]:
    opened: list[SchedulerCoordination] = []

    def open_one() -> SchedulerCoordination:
        opened.append(SchedulerCoordination(connect(redis_url, 5.0), where="Redis"))
        return opened[-1]

    yield open_one
    for coordination in opened:
        coordination.close()


@pytest.fixture
def coordination(open_coordination: Open) -> SchedulerCoordination:
    return open_coordination()


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    client = connect(redis_url, 5.0)
    yield client
    client.close()


def text(found: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in found.items()}


def test_a_worker_is_a_hash_with_the_fields_of_the_contract_that_ends_with_its_beats(
    coordination: SchedulerCoordination, raw: Any
) -> None:
    coordination.beat(LEADER, seen={})

    found = text(raw.hgetall("scheduler:worker:7"))
    assert abs(float(found.pop("last_heartbeat_ts")) - raw.time()[0]) < 30
    assert found == {name: str(value) for name, value in FACTS.items()} | {"detached": "0", "degrade_leader": "0"}
    assert 0 < raw.pttl("scheduler:worker:7") <= MEMBER_TIMEOUT_S * 1000
    assert float(raw.get("scheduler:leader:last_seen_ts")) > 0
    assert raw.ttl("scheduler:leader:last_seen_ts") == -1


def test_who_leaves_leaves_no_hash(coordination: SchedulerCoordination, raw: Any) -> None:
    coordination.beat(LEADER, seen={})
    coordination.leave("7", "1")

    assert raw.exists("scheduler:worker:7", "scheduler:member:7") == 0


def test_the_lock_of_the_leader_is_its_id_with_a_ttl_and_the_epoch_has_none(
    coordination: SchedulerCoordination, raw: Any
) -> None:
    assert coordination.acquire("leader", "7", 5.0, floor=0) == Locked(1)
    assert coordination.acquire("subleader:n1", "8", 5.0, floor=0) == Locked(1)

    assert (raw.get("scheduler:leader:lock"), raw.get("scheduler:subleader:n1:lock")) == (b"7", b"8")
    assert 0 < raw.pttl("scheduler:leader:lock") <= 5000
    assert (raw.get("scheduler:leader:epoch"), raw.ttl("scheduler:leader:epoch")) == (b"1", -1)


def test_after_a_flush_numbers_and_epochs_go_on_above_those_of_the_database(
    coordination: SchedulerCoordination, raw: Any
) -> None:
    assert [coordination.enlist(0), coordination.enlist(0)] == [1, 2]
    coordination.acquire("leader", "1", 5.0, floor=0)
    raw.flushdb()

    assert not coordination.renew("leader", "1", 1, 5.0)
    assert coordination.enlist(floor=2) == 3
    assert coordination.acquire("leader", "1", 5.0, floor=1) == Locked(2)


def test_a_flag_that_somebody_else_sets_detaches_a_worker_until_it_is_deleted(
    coordination: SchedulerCoordination, open_coordination: Open, raw: Any
) -> None:
    other = open_coordination()
    coordination.beat(LEADER, seen={})

    raw.set("scheduler:detach:7", 1)

    view = coordination.beat(LEADER, seen={})
    assert view.detached == view.detached_by_leader == {"7"}
    assert raw.hget("scheduler:worker:7", "detached") == b"1"
    assert other.beat(ClusterMember(member_id="8", incarnation="1"), seen={}).detached == {"7"}, "others know it from then on"
    raw.delete("scheduler:detach:7")
    assert coordination.beat(LEADER, seen={}).detached == other.detached() == frozenset()


def test_a_run_that_is_assigned_has_a_key_with_its_worker_for_five_seconds(coordination: SchedulerCoordination, raw: Any) -> None:
    coordination.note_assigned({"d7-60": "7", "d8-60": "8"})
    coordination.note_assigned({"d7-60": "9"})

    assert (raw.get("scheduler:jobrun:lease:d7-60"), raw.get("scheduler:jobrun:lease:d8-60")) == (b"7", b"8")
    assert 0 < raw.pttl("scheduler:jobrun:lease:d7-60") <= ASSIGNED_S * 1000


def test_who_was_detached_by_a_leader_is_forgotten_after_a_day_and_by_a_person_never(
    coordination: SchedulerCoordination, raw: Any
) -> None:
    raw.set("scheduler:detach:9", 0)
    for worker_id, actor in (("7", NOT_A_PERSON), ("8", "admin"), ("9", "admin")):
        assert coordination.set_detached(worker_id, True, actor=actor)

    keys = [f"scheduler:detach:{worker_id}" for worker_id in "789"]
    assert [(raw.get(key), raw.ttl(key)) for key in keys] == [(b"1", LEADER_DETACH_S), (b"by admin", -1), (b"by admin", -1)]


@pytest.mark.parametrize("key", ["scheduler:leader:degrade", "scheduler:worker:7"])
def test_a_leader_steps_down_if_somebody_else_sets_either_flag(coordination: SchedulerCoordination, raw: Any, key: str) -> None:
    coordination.beat(LEADER, seen={})
    if key.endswith("degrade"):
        raw.set(key, 1)
    else:
        raw.hset(key, "degrade_leader", 1)

    assert [coordination.beat(LEADER, seen={}).degraded for _ in range(2)] == [True, False]


def test_a_lock_without_a_ttl_that_somebody_else_wrote_holds_nobody_up(coordination: SchedulerCoordination, raw: Any) -> None:
    raw.set("scheduler:leader:lock", "7")

    assert coordination.acquire("leader", "8", 5.0, floor=0) == Locked(1)


def test_of_many_that_ask_at_once_one_gets_the_lock(open_coordination: Open) -> None:
    one_of_many_gets_it(open_coordination)


def test_never_do_two_hold_the_lock(open_coordination: Open) -> None:
    never_two_hold_it_and_epochs_strictly_rise(open_coordination)


def test_a_redis_has_one_name_whatever_the_user_and_the_order_of_its_sentinels() -> None:
    assert place_of("redis://:secret@Cache:6379") == place_of("redis://cache:6379/0") == "redis://cache:6379/0"
    assert place_of("redis+sentinel://b:1,a:2/master/0") == place_of("redis+sentinel://u:p@a:2,b:1/master/0")
    assert place_of("redis://cache/1") != place_of("redis://cache/2")
