"""The coordination of nodes on Redis behind Sentinel and on Redis Cluster, whose masters die. Real servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tasuki.coords.coordination import ClusterMember, Coordination
from tasuki.coords.scheduler_redis import SchedulerCoordination
from tasuki.core.cluster_messages import Hint, decode, split
from tasuki.core.election import Locked
from tasuki.errors import ConfigError, Unavailable
from tasuki.server.assembly import open_scheduler_coordination
from tasuki.stores.redis.connection import RedisWakeups, connect, place_of
from tasuki.testing.coords_suite import CoordinationSuite
from tests.coords.contests import never_two_hold_it_and_epochs_strictly_rise
from tests.support.redis_service import RedisService
from tests.support.waiting import until

FAILOVER_S = 40.0
SLOTS = 16384
TTL_S = 5.0
ME = ClusterMember(member_id="7", incarnation="1", led_ago_s=0.0, workers={"7": {"role": "leader", "load": 0}})


class RedisClusterService:
    """A Redis Cluster of three masters, and a replica of the one that has a key."""

    def __init__(self, stack: ExitStack, replica_of: str) -> None:
        settings = {"cluster_enabled": "yes", "cluster_node_timeout": "1000", "databases": "1", "appendonly": "no"}
        self.masters = [stack.enter_context(RedisService(**settings)) for _ in range(3)]
        self.replica = stack.enter_context(RedisService(**settings))
        with ExitStack() as clients:
            first, *others = [clients.enter_context(one.client()) for one in (*self.masters, self.replica)]
            nodes = [first, *others]
            for number, client in enumerate(nodes[:3]):
                begin, end = SLOTS * number // 3, SLOTS * (number + 1) // 3
                client.execute_command("CLUSTER ADDSLOTS", *range(begin, end))
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            for service in (*self.masters[1:], self.replica):
                first.execute_command("CLUSTER MEET", "127.0.0.1", service.port)
            until(lambda: all(_info(client)["cluster_known_nodes"] == "4" for client in nodes), FAILOVER_S, "all have met")
            slot = int(first.execute_command("CLUSTER KEYSLOT", replica_of))
            self.owner = self.masters[slot * 3 // SLOTS]
            owner_id = nodes[self.masters.index(self.owner)].execute_command("CLUSTER MYID")
            until(lambda: _is_done(nodes[3], "CLUSTER REPLICATE", owner_id), FAILOVER_S, "the replica knows its master")
            until(lambda: nodes[3].info("replication")["master_link_status"] == "up", FAILOVER_S, "the replica has all")
            until(lambda: all(_info(client)["cluster_state"] == "ok" for client in nodes), FAILOVER_S, "the cluster works")

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{service.port}" for service in self.masters)


def _info(client: object) -> dict[str, str]:
    found = client.execute_command("CLUSTER INFO")  # type: ignore[attr-defined]
    return found if isinstance(found, dict) else dict(line.split(":") for line in found.split())


def _is_done(client: object, *command: str) -> bool:
    import redis

    with contextlib.suppress(redis.ResponseError):
        client.execute_command(*command)  # type: ignore[attr-defined]
        return True
    return False


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[RedisClusterService]:
    with ExitStack() as stack:
        yield RedisClusterService(stack, "scheduler:leader:lock")


@pytest.fixture
def cluster(shared_cluster: RedisClusterService) -> RedisClusterService:
    for master in shared_cluster.masters:
        with master.client() as client:
            client.flushall()
    return shared_cluster


class TestOnRedisCluster(CoordinationSuite):
    @pytest.fixture
    def make_coordination(self, cluster: RedisClusterService) -> Iterator[object]:
        with ExitStack() as stack:
            yield lambda: stack.enter_context(contextlib.closing(open_scheduler_coordination(cluster.url)))

    @pytest.fixture
    def let_pass(self, cluster: RedisClusterService) -> object:
        def let_pass(seconds: float) -> None:
            for master in cluster.masters:
                with master.client() as raw:
                    for key in raw.keys("scheduler:*"):
                        if raw.pttl(key) > 0:
                            raw.pexpire(key, int(raw.pttl(key) - seconds * 1000))
                        if key == "scheduler:members":
                            for member_id in raw.zrange(key, 0, -1):
                                raw.zincrby(key, -seconds, member_id)

        return let_pass


def test_on_a_cluster_never_do_two_hold_the_lock(cluster: RedisClusterService) -> None:
    with ExitStack() as stack:
        never_two_hold_it_and_epochs_strictly_rise(
            lambda: stack.enter_context(contextlib.closing(open_scheduler_coordination(cluster.url)))
        )


def test_hints_reach_the_servers_that_listen_at_any_server_of_a_cluster(cluster: RedisClusterService) -> None:
    async def scenario() -> None:
        heard: list[asyncio.Queue[bytes]] = [asyncio.Queue() for _ in range(4)]
        members = [RedisWakeups(cluster.url, app="tasuki-servers", server_id=f"s{n}") for n in range(4)]
        for member, queue in zip(members, heard, strict=True):
            await member.start(queue.put_nowait)
        hint = Hint(server_id="s0", everything=True)
        async with asyncio.timeout(FAILOVER_S):
            for queue in heard[1:]:
                while queue.empty():  # a listener that is not yet subscribed gets none
                    members[0].publish(split(hint))
                    with contextlib.suppress(TimeoutError):
                        assert decode(await asyncio.wait_for(queue.get(), 0.5)).everything
                        break
        for member in members:
            await member.close()

    asyncio.run(scenario())


def goes_on_after_the_death_of(master: RedisService, coordination: Coordination) -> None:
    """Kill the master that has the lock, and check that the replica is used, and that epochs and numbers rise."""
    assert isinstance(coordination, SchedulerCoordination)
    coordination.beat(ME, seen={})
    first = coordination.acquire("leader", "7", TTL_S, floor=0)
    assert isinstance(first, Locked)
    number = coordination.enlist(0)
    master.kill()

    def again() -> Locked | None:
        with contextlib.suppress(Unavailable):
            coordination.beat(ME, seen={})
            answer = coordination.acquire("leader", "8", TTL_S, floor=first.epoch)
            return answer if isinstance(answer, Locked) else None
        return None

    second = until(again, FAILOVER_S, "another one has the lock")
    assert second.epoch > first.epoch
    assert not coordination.renew("leader", "7", first.epoch, TTL_S)
    assert coordination.renew("leader", "8", second.epoch, TTL_S)
    assert coordination.enlist(number) > number


def test_it_goes_on_when_a_master_of_the_cluster_dies() -> None:
    with ExitStack() as stack:
        cluster = RedisClusterService(stack, "scheduler:leader:lock")
        coordination = stack.enter_context(contextlib.closing(open_scheduler_coordination(cluster.url)))

        goes_on_after_the_death_of(cluster.owner, coordination)


def test_it_goes_on_when_the_master_behind_a_sentinel_dies(tmp_path: Path) -> None:
    with ExitStack() as stack:
        master = stack.enter_context(RedisService())
        replica = stack.enter_context(RedisService())
        client = stack.enter_context(replica.client())
        client.replicaof("127.0.0.1", master.port)
        until(lambda: client.info("replication")["master_link_status"] == "up", FAILOVER_S, "the replica has all")
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"sentinel monitor main 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds main 1000\nsentinel failover-timeout main 5000\n"
        )
        sentinel = stack.enter_context(RedisService(str(config), "--sentinel", only={"bind": "127.0.0.1"}))
        watch = stack.enter_context(sentinel.client())
        until(lambda: watch.execute_command("SENTINEL REPLICAS", "main"), FAILOVER_S, "the Sentinel knows the replica")
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main/0"
        coordination = stack.enter_context(contextlib.closing(open_scheduler_coordination(url)))

        goes_on_after_the_death_of(master, coordination)


@pytest.mark.parametrize(
    "url", ["redis+cluster://", "redis+cluster://a:1/3", "redis+cluster://a:x", "redis+cluster://u:hunter2@"]
)
def test_addresses_of_a_cluster_that_are_not_understood_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not understood") as refused:
        open_scheduler_coordination(url)
    assert "hunter2" not in str(refused.value)


def test_a_cluster_is_no_store() -> None:
    with pytest.raises(ConfigError, match="it can be the coordination, not the store"):
        connect("redis+cluster://a:1,b:2", TTL_S)


def test_a_cluster_that_cannot_be_reached_is_unavailable() -> None:
    with (
        contextlib.closing(open_scheduler_coordination("redis+cluster://127.0.0.1:1")) as coordination,
        pytest.raises(Unavailable),
    ):
        coordination.detached()


def test_a_cluster_has_one_name_whatever_the_order_of_its_servers() -> None:
    assert place_of("redis+cluster://b:1,a:2") == place_of("redis+cluster://u:p@a:2,b:1/0") == "redis://a:2,b:1/0"
