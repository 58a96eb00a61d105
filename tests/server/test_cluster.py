"""Several servers in this process on one store and one coordination: who leads, who knows whom, what happens when one goes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tasuki.blobs.folder import FolderBlobs
from tasuki.cli.store import migrate_store
from tasuki.clocks import now
from tasuki.config import DataFolder
from tasuki.coords.coordination import ClusterMember, Coordination, MemoryCoordination
from tasuki.core.cluster_messages import PIECE_MAX_BYTES, ServerInfo, everything
from tasuki.core.election import Locked
from tasuki.core.job import JobSpec
from tasuki.core.machine import Now
from tasuki.core.protocol import (
    Accepted,
    AssignJobs,
    Claim,
    ErrorMessage,
    GiveCredit,
    Heartbeat,
    HeartbeatAnswer,
    PublishedMessage,
    PublishMessages,
    Reply,
    Request,
    SubmitJobs,
)
from tasuki.core.statistics import ROLLUP_S
from tasuki.errors import ConfigError, Unavailable
from tasuki.server.assembly import StorageLocations, make_guest
from tasuki.server.cluster import Cluster
from tasuki.server.server import Server, ServerConfig
from tasuki.stores.common import SystemClock
from tasuki.stores.memory.store import MemoryStore
from tasuki.stores.store import Feature
from tests.server.peers import client, worker
from tests.support.waiting import until_async

LOCK_TTL_S = 0.6


class MovableClock(SystemClock):
    """The clock of a store; a test can let time pass for its leases."""

    passed_s = 0.0

    def lease(self) -> float:
        return super().lease() + self.passed_s


class SharedStore(MemoryStore):
    """One that the threads of several servers may use, a turn each at a time."""

    features = MemoryStore.features | {Feature.SHARED}

    def __init__(self) -> None:
        super().__init__(MovableClock())
        self._lock = threading.RLock()
        self.away = False

    @contextlib.contextmanager
    def turn(self, *, lasting: bool = True) -> Iterator[None]:
        if self.away:
            raise Unavailable("the database is away")
        with self._lock, super().turn():
            yield

    def close(self) -> None:
        pass


class Grapevine:
    """Hints between the servers of this process. While `cut` nothing arrives."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[bytes], None]] = []
        self.cut = False


class LocalWakeups:
    piece_max_bytes = PIECE_MAX_BYTES

    def __init__(self, grapevine: Grapevine) -> None:
        self._grapevine = grapevine

    async def start(self, on_hint: Callable[[bytes], None]) -> None:
        self._mine = on_hint
        self._grapevine.listeners.append(on_hint)

    def publish(self, pieces: Sequence[bytes]) -> None:
        if not self._grapevine.cut:
            loop = asyncio.get_running_loop()
            for listener in self._grapevine.listeners:
                for piece in pieces:
                    loop.call_soon(listener, piece)

    def publish_messages(self, pieces: Sequence[bytes], lost: Callable[[], None]) -> None:
        if self._grapevine.cut:
            lost()
        else:
            self.publish(pieces)

    async def close(self) -> None:
        self._grapevine.listeners.remove(self._mine)


class Frail(MemoryCoordination):
    """A coordination that can be out of order for one of its users."""

    def __init__(self) -> None:
        super().__init__(SystemClock().lease)
        self.deaf_to: set[str] = set()

    def renew(self, scope: str, holder: str, epoch: int, ttl_s: float) -> bool:
        if holder in self.deaf_to:
            raise Unavailable("out of order")
        return super().renew(scope, holder, epoch, ttl_s)

    def acquire(self, scope: str, holder: str, ttl_s: float, floor: int):  # type: ignore[no-untyped-def]
        if holder in self.deaf_to:
            raise Unavailable("out of order")
        return super().acquire(scope, holder, ttl_s, floor)


class World:
    """The store, the coordination and the hints that the servers share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = SharedStore()
        self.coordination = Frail()
        self.grapevine = Grapevine()

    def make(self, name: str, *, candidate: bool = True, **settings: Any) -> Server:
        blobs = FolderBlobs(self.folder / "blobs", max_blob_bytes=10**6, floor_free_bytes=0)
        config = ServerConfig(server_id=name, data=self.folder, disk_floor_bytes=0, disk_floor_inodes=0, **settings)
        coordination: Coordination = self.coordination
        company = Cluster(
            lambda: coordination,
            LocalWakeups(self.grapevine),
            incarnation=f"{name}-1",
            schema_version=1,
            lock_ttl_s=LOCK_TTL_S,
            candidate=candidate,
        )
        return Server(config, lambda: self.store, lambda: self.store, blobs, company)

    def empty(self) -> None:
        """Forget everything that was stored."""
        with self.store.turn():
            self.coordination.__init__()  # type: ignore[misc]
            self.store.__init__()  # type: ignore[misc]

    @contextlib.asynccontextmanager
    async def servers(self, *names: str) -> AsyncIterator[list[Server]]:
        servers = [self.make(name) for name in names]
        for server in servers:
            await server.start()
        try:
            yield servers
        finally:
            for server in servers:
                if not server._stopping:  # a test may have stopped it
                    await server.stop()


def leaders(servers: list[Server]) -> list[Server]:
    return [server for server in servers if server.broker.epoch]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


def test_exactly_one_leads_and_all_know_each_other(world: World) -> None:
    async def work() -> None:
        async with world.servers("a", "b", "c") as servers:
            await until_async(lambda: leaders(servers))
            await until_async(lambda: all(len(server.broker.cluster.servers) == 2 for server in servers))
            assert len(leaders(servers)) == 1
            [leader] = leaders(servers)
            assert world.store.epoch() == (leader.broker.epoch, leader.config.server_id)

    run(work)


def test_one_that_does_not_stand_takes_part_and_never_leads(world: World) -> None:
    async def work() -> None:
        guest = world.make("guest", candidate=False)
        await guest.start()
        async with world.servers("a") as [server]:
            await until_async(lambda: server.broker.epoch)
            await until_async(lambda: guest.broker.cluster.servers and server.broker.cluster.servers)
            epoch = server.broker.epoch
            await server.stop()
            await until_async(lambda: not guest.broker.cluster.servers)
            # Nobody else asks for the lock, which is free.
            assert world.coordination.acquire("leader", "test", LOCK_TTL_S, 0) == Locked(epoch + 1)
            assert not guest.broker.epoch
        await guest.stop()

    run(work)


def test_a_leader_that_stops_hands_over_without_waiting_for_its_ttl(world: World) -> None:
    async def work() -> None:
        async with world.servers("a", "b") as servers:
            await until_async(lambda: leaders(servers))
            [first] = leaders(servers)
            epoch = first.broker.epoch
            [second] = [server for server in servers if server is not first]
            await first.stop()
            await until_async(lambda: second.broker.epoch > epoch)
            await until_async(lambda: not second.broker.cluster.servers)

    run(work)


def test_a_leader_that_cannot_renew_steps_down_by_itself_and_another_takes_over(world: World) -> None:
    async def work() -> None:
        async with world.servers("a", "b") as servers:
            await until_async(lambda: leaders(servers))
            [first] = leaders(servers)
            [second] = [server for server in servers if server is not first]
            epoch = first.broker.epoch
            world.coordination.deaf_to.add(first.config.server_id)
            await until_async(lambda: second.broker.epoch)
            assert not first.broker.epoch
            assert second.broker.epoch > epoch

    run(work)


def test_an_epoch_that_the_store_refuses_deposes_the_leader(world: World) -> None:
    async def work() -> None:
        async with world.servers("a") as [server]:
            await until_async(lambda: server.broker.epoch)
            epoch = server.broker.epoch
            # When somebody else has taken over in the store, whatever the lock says
            world.store.take_over("usurper", epoch + 5)
            await until_async(lambda: server.broker.epoch != epoch)
            # Then it leads again only under an epoch above that
            await until_async(lambda: server.broker.epoch)
            assert server.broker.epoch > epoch + 5

    run(work)


def test_a_leader_that_kept_its_lock_while_the_store_was_away_ends_no_lease_of_a_worker_that_lives(world: World) -> None:
    async def work() -> None:
        server = world.make("a", lease_ttl_s=1.0)
        await server.start()
        await until_async(lambda: server.broker.epoch)
        (mine, _), (its, runner) = await client(server), await worker(server)
        server.received(its, GiveCredit(1))
        server.received(mine, SubmitJobs(5, [JobSpec(job_id="job")]))
        [grant] = (await runner.wait_for(AssignJobs)).grants
        epoch = server.broker.epoch
        # When the store is away until all leases are over, and the coordination is not
        world.store.away = True
        await asyncio.sleep(0.7)  # longer than the leader may go without the store
        assert server.broker.epoch == epoch
        world.store.clock.passed_s = 60.0  # type: ignore[attr-defined]
        world.store.away = False
        # Then it takes a new epoch, and the attempt goes on
        await until_async(lambda: server.broker.epoch > epoch)
        await until_async(lambda: server.broker.upkeep.caught_up)
        server.received(its, Heartbeat(9, [Claim(grant.job_id, grant.lease_id, grant.attempt)]))
        assert (await runner.wait_for(HeartbeatAnswer)).lost == []
        assert server.broker.upkeep.counts.reaped == 0
        await server.stop()

    run(work)


async def start_on(folder: Path, store: str, coordination: str) -> int:
    """Start a server on these, wait until it leads, and stop it; its epoch."""
    config = ServerConfig(server_id="a", data=folder, disk_floor_bytes=0, disk_floor_inodes=0)
    server, _ = make_guest(
        StorageLocations(DataFolder(folder), store, coordination=coordination, lock_ttl_s=2.0), config, candidate=True
    )
    await server.start()
    try:
        await until_async(lambda: server.broker.epoch)
        return server.broker.epoch
    finally:
        await server.stop()


def test_a_server_with_another_coordination_than_the_first_one_does_not_start(
    tmp_path: Path, postgres_url: str, redis_url: str
) -> None:
    assert asyncio.run(start_on(tmp_path, postgres_url, redis_url)) == 1

    place, _, number = redis_url.rpartition("/")
    for other in ("", f"{place}/{14 if number == '15' else 15}"):
        with pytest.raises(ConfigError, match=r"elect their leader in redis://.*: all need the same coordination"):
            asyncio.run(start_on(tmp_path, postgres_url, other))
    assert asyncio.run(start_on(tmp_path, postgres_url, redis_url)) == 2
    migrate_store(postgres_url, forget_coordination=True)
    assert asyncio.run(start_on(tmp_path, postgres_url, "")) == 3


def test_a_leader_that_is_told_to_step_down_lets_another_lead(world: World) -> None:
    async def work() -> None:
        async with world.servers("a", "b") as servers:
            await until_async(lambda: leaders(servers))
            [first] = leaders(servers)
            [second] = [server for server in servers if server is not first]
            conn, admin = await client(second)
            await until_async(lambda: any(info.epoch for info in second.broker.cluster.servers.values()))
            second.received(conn, Request(7, "degrade", {"reason": "its machine is slow"}))
            assert (await admin.wait_for(Reply)).body == {"server_id": first.config.server_id}
            await until_async(lambda: second.broker.epoch)
            assert not first.broker.epoch
            assert [row.action for row in world.store.audit(limit=1)] == ["leader.degrade"]
            await first.stop()
            await until_async(lambda: second.broker.epoch and not second.broker.cluster.servers)
            second.received(conn, Request(8, "degrade", {}))
            assert "nobody else could lead" in (await admin.wait_for(ErrorMessage)).message

    run(work)


def test_a_server_whose_worker_is_detached_neither_leads_nor_stands(world: World) -> None:
    async def work() -> None:
        async with world.servers("a", "b") as servers:
            await until_async(lambda: leaders(servers))
            [first] = leaders(servers)
            [second] = [server for server in servers if server is not first]
            world.coordination.set_detached(first.config.server_id, True, actor="admin")
            await until_async(lambda: second.broker.epoch)
            await second.stop()
            await asyncio.sleep(3 * LOCK_TTL_S)  # for as long as it would take to be elected, had it stood
            assert not first.broker.epoch
            world.coordination.set_detached(first.config.server_id, False, actor="admin")
            await until_async(lambda: first.broker.epoch)

    run(work)


def test_a_store_that_was_emptied_is_warned_of_once_and_epochs_go_on_rising(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with world.servers("a") as [server]:
            await until_async(lambda: server.broker.epoch)
            world.store.take_over("earlier", 7)
            await until_async(lambda: server.broker.epoch > 7)
            # When store and coordination forget everything, as after a FLUSHALL of the Redis that is both
            world.empty()
            await until_async(lambda: server.broker.epoch > 8)

    run(work)

    warnings = [record.getMessage() for record in caplog.records]
    assert sum("the store was emptied" in warning for warning in warnings) == 1
    assert not any("another server leads" in warning for warning in warnings)


def test_a_job_submitted_at_one_server_runs_at_the_other(world: World) -> None:
    async def work() -> None:
        async with world.servers("a", "b") as servers:
            await until_async(lambda: all(server.broker.cluster.servers for server in servers))
            (mine, _), (its, runner) = await client(servers[0]), await worker(servers[1])
            servers[1].received(its, GiveCredit(1))
            await until_async(lambda: servers[1].broker.workers["w1"].account.available)
            servers[0].received(mine, SubmitJobs(5, [JobSpec(job_id="job")]))
            assert (await runner.wait_for(AssignJobs)).grants[0].job_id == "job"

    run(work)


def test_without_hints_the_job_is_found_by_looking(world: World) -> None:
    async def work() -> None:
        async with world.servers("a", "b") as servers:
            world.grapevine.cut = True
            (mine, _), (its, runner) = await client(servers[0]), await worker(servers[1])
            servers[1].received(its, GiveCredit(1))
            servers[0].received(mine, SubmitJobs(5, [JobSpec(job_id="job")]))
            assert (await runner.wait_for(AssignJobs)).grants[0].job_id == "job"

    run(work)


def test_a_worker_detached_at_one_server_gets_nothing_at_the_other(world: World) -> None:
    async def work() -> None:
        async with world.servers("a", "b") as [first, second]:
            await worker(second)
            conn, admin = await client(first)
            first.received(conn, Request(7, "detach", {"worker_id": "w1", "reason": "its disk is failing"}))
            assert (await admin.wait_for(Reply)).body == {"worker_id": "w1", "changed": True}
            await until_async(lambda: "w1" in second.broker.cluster.detached)
            first.received(conn, Request(8, "detach", {"worker_id": "w1"}))
            assert (await admin.wait_for(Reply, 2)).body == {"worker_id": "w1", "changed": False}
            first.received(conn, Request(9, "attach", {"worker_id": "w1"}))
            await until_async(lambda: not second.broker.cluster.detached)

    run(work)


def test_the_jobs_of_a_worker_that_is_detached_now_go_to_others(world: World) -> None:
    async def work() -> None:
        async with world.servers("a", "b") as [first, second]:
            its, hoarder = await worker(second)
            second.received(its, GiveCredit(2))
            conn, admin = await client(first)
            first.received(conn, SubmitJobs(5, [JobSpec(job_id="job")]))
            assert (await hoarder.wait_for(AssignJobs)).grants[0].attempt == 1

            first.received(conn, Request(7, "detach", {"worker_id": "w1", "now": True}))
            assert (await admin.wait_for(Reply)).body == {"worker_id": "w1", "changed": True}
            theirs, other = await worker(first, "w2")
            first.received(theirs, GiveCredit(1))

            assert (await other.wait_for(AssignJobs)).grants[0].attempt == 2

    run(work)


def test_what_is_no_hint_and_what_is_no_server_does_no_harm(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with world.servers("a") as [server]:
            await until_async(lambda: server.broker.epoch)
            strange = ClusterMember(member_id="future", incarnation="x", version=1, info=b"\xc1 not msgpack")
            world.coordination.beat(strange, seen={})
            for listener in world.grapevine.listeners:
                listener(b"{ this is no hint")
                listener(everything("elsewhere"))
            await until_async(lambda: "is not understood" in caplog.text)
            assert server.broker.cluster.servers == {"future": ServerInfo(server_id="future")}
            assert server.broker.epoch

    run(work)


def test_messages_that_could_not_be_passed_on_to_other_servers_are_counted(world: World) -> None:
    async def work() -> None:
        async with world.servers("a", "b") as servers:
            await until_async(lambda: all(server.broker.cluster.servers for server in servers))
            conn, _ = await client(servers[0])
            servers[0].received(conn, PublishMessages(5, [PublishedMessage("prices.a")]))
            world.grapevine.cut = True
            servers[0].received(
                conn, PublishMessages(6, [PublishedMessage(f"{group}.a") for group in ("news", "prices", "news")])
            )

            totals = servers[0].statistics.totals()

            assert {group: counted.unrelayed for group, counted in totals.items()} == {"news": 2, "prices": 1}

    run(work)


def test_every_server_writes_its_own_statistics_and_the_leader_the_queue_lengths(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with world.servers("a", "b") as servers:
            await until_async(lambda: leaders(servers))
            for number, server in enumerate(servers):
                conn, link = await client(server)
                server.received(conn, SubmitJobs(5, [JobSpec(job_id=f"job-{number}")]))
                await link.wait_for(Accepted)
            for server in servers:
                monkeypatch.setattr(server, "now", lambda: Now(now().monotonic, now().wall + ROLLUP_S))
            await until_async(lambda: len(world.store.rollups(0, 1 << 40)) == 2)
            found = {one.server_id: one for one in world.store.rollups(0, 1 << 40)}
            assert [counted.submitted for one in found.values() for counted in one.groups.values()] == [1, 1]
            [leader] = leaders(servers)
            lengths = {server_id: [length.queued for length in one.queues.values()] for server_id, one in found.items()}
            assert lengths == {server.server_id: [2] if server is leader else [] for server in servers}

    run(work)
