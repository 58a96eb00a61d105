"""The machines together: clients, the brokers of one or more servers, workers and a store, with no socket, thread or real clock.

A `Harness` has a fake clock and in-memory links; every message passes through the wire's bytes. Things happen one at a time and
only when a test says so: a message is delivered, the store takes or commits a turn, a clock moves. Links can be cut or held up,
servers killed between any two steps and started again on the same store, servers and workers frozen or killed. After every commit
`CheckedHistory` checks the invariants that the store decides (docs/invariants.md); `check()` adds what clients and workers see.

With several servers the harness is also their coordination: it tells each who is alive, carries their hints (or loses them), and
elects a leader when there is none or the last one has not ticked for LOCK_TTL_S.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, get_args

from tasuki.core.address import Address
from tasuki.core.broker.broker import Broker
from tasuki.core.broker.events import ClusterView, DiskSpace
from tasuki.core.cluster_messages import Hint
from tasuki.core.election import TakeOver
from tasuki.core.job import DEAD, Job, JobIncident, OnDisconnect
from tasuki.core.machine import Closed, Now, Opened, Peer, Received, Ticked
from tasuki.core.protocol import FRAME_MAX_BYTES, Message
from tasuki.core.store_messages import (
    Answers,
    Filter,
    Turn,
)
from tasuki.core.worker.events import WorkerIdentity
from tasuki.errors import TasukiError
from tasuki.stores.store import Store
from tasuki.testing.clocks import FakeClock
from tasuki.testing.sim.checker import Checker
from tasuki.testing.sim.history import AnyLine, LedEvent, StoreLine, WatchingEvent, kind_of
from tasuki.testing.sim.nodes import OWN_UID, ClientNode, Node, NodeLink, ServerNode, WorkerNode
from tasuki.testing.sim.recorder import Recorder
from tasuki.wire.messages import decode, encode

SAME_USER = Peer("unix", OWN_UID, "unix socket")
LOCK_TTL_S = 3.0  # how long a leader may be silent before the world elects another
STEP_S = 0.1  # how finely `run_for` cuts time: as the drivers tick
QUIET_STEPS_MAX = 20_000  # a world that has not come to rest by then is in a hot loop
WIDE_PAGE = 1_000
STORE_KINDS = tuple(kind_of(line.__name__) for line in get_args(StoreLine) if line is not LedEvent)


class Harness:
    """Servers, their store and their peers. `restart` makes the store of the next server from that of the only one."""

    def __init__(
        self,
        store: Store,
        clock: FakeClock,
        *,
        restart: Callable[[Store], Store] = lambda store: store,
        seed: int = 0,
        lease_ttl_s: float = 15.0,
        servers: int = 1,
    ) -> None:
        self.clock = clock
        self.store = store
        self.random = random.Random(seed)
        self.history = CheckedHistory(store, clock)
        self.nodes: list[Node] = []
        self.links: dict[int, NodeLink] = {}
        self.turns = 0
        self.disk_problem = ""
        """The problem that the driver sees when it looks at the disk; empty if there is none."""
        self.refuse: Callable[[Turn], TasukiError | None] = lambda turn: None
        """Return the error with which the store refuses a turn before it did anything."""
        self.lose_answer: Callable[[Turn], TasukiError | None] = lambda turn: None
        """Return the error with which the store answers a turn that it has committed."""
        self.lose_hints = False
        self._restart = restart
        self._numbers = itertools.count(1)
        self._leader_seen_at = -LOCK_TTL_S
        self.servers = [
            ServerNode(
                self, f"server-{number}", Address("tcp", f"10.0.0.{number}", 7000), shared=servers > 1, lease_ttl_s=lease_ttl_s
            )
            for number in range(1, servers + 1)
        ]
        for server in self.servers:
            server.start()
        self._coordinate()

    # -- time -----------------------------------------------------------------------------------------------------
    def now(self) -> Now:
        return Now(self.clock.lease(), self.clock.wall())

    def tick(self) -> None:
        """Fire the timers of all servers and peers."""
        self._coordinate()
        for server in self.servers:
            if server.awake:
                server.apply(DiskSpace(self.disk_problem))
                server.apply(Ticked())
        for node in self.nodes:
            if node.awake:
                node.apply(Ticked())

    def run_for(self, seconds: float, step_s: float = STEP_S) -> None:
        """Let time pass, and let everything happen that can."""
        end = self.clock.lease() + seconds
        while self.clock.lease() < end - 1e-9:
            self.clock.advance(min(step_s, end - self.clock.lease()))
            self.tick()
            self.settle()

    def run_until(self, condition: Callable[[], bool], within_s: float, step_s: float = STEP_S) -> None:
        """Let time pass until the condition holds; AssertionError if it does not within that time."""
        end = self.clock.lease() + within_s
        while not condition():
            assert self.clock.lease() < end, f"it did not happen within {within_s} s"
            self.run_for(step_s, step_s)

    # -- nodes ----------------------------------------------------------------------------------------------------
    def client(
        self, name: str = "client", *, peer: Peer = SAME_USER, token: str = "", to: Sequence[ServerNode] = ()
    ) -> ClientNode:
        """Add a client that knows the addresses of `to`, by default those of all servers."""
        return self._join(ClientNode(self, name, peer, token, self._given(to)))

    def worker(
        self,
        name: str = "w1",
        *,
        capacity: int = 1,
        incarnation: str = "",
        peer: Peer = SAME_USER,
        to: Sequence[ServerNode] = (),
        **fields: Any,
    ) -> WorkerNode:
        patterns = fields.pop("patterns", (">",))
        identity = WorkerIdentity(
            worker_id=name, incarnation=incarnation or f"{name}-1", capacity=capacity, patterns=patterns, **fields
        )
        return self._join(WorkerNode(self, name, peer, identity, self._given(to)))

    def _given(self, to: Sequence[ServerNode]) -> list[Address]:
        return [server.address for server in to or self.servers]

    def _join(self, node: Any) -> Any:
        self.nodes.append(node)
        node.apply(Ticked())
        self.settle()
        return node

    @property
    def workers(self) -> list[WorkerNode]:
        return [node for node in self.nodes if isinstance(node, WorkerNode)]

    @property
    def clients(self) -> list[ClientNode]:
        return [node for node in self.nodes if isinstance(node, ClientNode)]

    def kill(self, node: Node) -> None:
        """Kill the process of a peer, and cut its connection."""
        node.dead = True
        if isinstance(node, WorkerNode):
            node.running.clear()
        self.cut(node)

    def exit(self, node: Node) -> None:
        """Let the process of a peer end by itself: what it sent before still arrives."""
        node.dead = True
        link, node.link = node.link, None
        if link is not None:
            while link.to_server:
                self.deliver_to_server(link)
            self._server_loses(link, "the peer closed the connection")

    # -- links ----------------------------------------------------------------------------------------------------
    def dial(self, node: Node, address: Address) -> None:
        node.dials += 1
        [server] = [server for server in self.servers if server.address == address]
        if server.broker is None:
            node.apply(Closed(0, "connection refused"))
            return
        conn = next(self._numbers)
        node.link = self.links[conn] = NodeLink(conn, node, server)
        self._accept(node.link)
        node.apply(Opened(conn, node.peer))

    def _accept(self, link: NodeLink) -> None:
        """Tell the server of a connection that the kernel has taken, if the server runs."""
        if not link.accepted and link.server.awake:
            link.accepted = True
            link.server.apply(Opened(link.conn, link.node.peer))

    def send_to_server(self, node: Node, conn: int, message: Message) -> None:
        if node.link is not None and node.link.conn == conn and not node.link.mute:
            node.link.to_server.append(encode(message))

    def deliver_to_server(self, link: NodeLink) -> None:
        """Deliver the next piece of bytes to the server."""
        self._accept(link)
        data = link.to_server.popleft()
        for frame in link.server_decoder.feed(data):
            if link.conn in self.links:
                link.server.apply(Received(link.conn, decode(frame, FRAME_MAX_BYTES)))

    def deliver_to_node(self, link: NodeLink) -> None:
        """Deliver the next piece of bytes to the peer; after the last one, the end if the server hung up."""
        if link.to_node:
            data = link.to_node.popleft()
            for frame in link.node_decoder.feed(data):
                if link.node.awake:
                    link.node.apply(Received(link.conn, decode(frame, FRAME_MAX_BYTES)))
        elif link.ending:
            self._node_loses(link, link.ending)

    def cut(self, node: Node, reason: str = "the connection was cut") -> None:
        """Cut the connection for both sides, and lose all that was on its way."""
        if (link := node.link) is not None:
            self._server_loses(link, reason)
            self._node_loses(link, reason)

    def close_from_node(self, node: Node, reason: str) -> None:
        if (link := node.link) is not None:
            if not link.mute:
                self._server_loses(link, reason)
            self._node_loses(link, reason)

    def _server_loses(self, link: NodeLink, reason: str) -> None:
        if link.server.frozen:
            link.lost = reason  # it finds out when it runs again
        elif self.links.pop(link.conn, None) is not None:
            link.server.apply(Closed(link.conn, reason))

    def hang_up(self, conn: int, last_words: bytes, reason: str) -> None:
        """End a connection from the server: the peer hears of it when it has read what was sent before."""
        link = self.links.pop(conn, None)
        if link is not None and not link.mute:
            if last_words:
                link.to_node.append(last_words)
            link.ending = reason or "closed"

    def _node_loses(self, link: NodeLink, reason: str) -> None:
        link.ending = ""
        link.to_node.clear()
        node = link.node
        if node.link is link:
            node.link = None
            if not node.dead:
                node.apply(Closed(link.conn, reason))

    # -- servers --------------------------------------------------------------------------------------------------
    @property
    def broker(self) -> Broker | None:
        """The broker of the first server, as are `turn` and `answers`: where there is only one server, it needs no name."""
        return self.servers[0].broker

    @property
    def turn(self) -> Turn | None:
        return self.servers[0].turn

    @property
    def answers(self) -> Answers | None:
        return self.servers[0].answers

    def take_turn(self) -> bool:
        return self.servers[0].take_turn()

    def commit_turn(self) -> None:
        self.servers[0].commit_turn()

    def answer_turn(self) -> None:
        self.servers[0].answer_turn()

    def kill_server(self, server: ServerNode | None = None) -> None:
        """Kill a server (SIGKILL): its peers see a reset connection."""
        server = server or self.servers[0]
        server.die()
        for link in [link for link in self.links.values() if link.server is server]:
            self.links.pop(link.conn)
            self._node_loses(link, "connection reset")

    def restart_server(self, server: ServerNode | None = None) -> None:
        server = server or self.servers[0]
        if len(self.servers) == 1:
            self.store = self.history.store = self._restart(self.store)
        server.start()

    def freeze_server(self, server: ServerNode) -> None:
        """Freeze a server (SIGSTOP): connections stay, the kernel takes new ones, nothing is answered."""
        server.frozen = True

    def thaw_server(self, server: ServerNode) -> None:
        """Wake a frozen server (SIGCONT): it reads what came meanwhile, and hears of connections that are gone."""
        server.frozen = False
        for link in [link for link in self.links.values() if link.server is server and link.lost]:
            while link.to_server:
                self.deliver_to_server(link)
            self._server_loses(link, link.lost)

    def server_of(self, node: Node) -> ServerNode:
        """Return the server that a peer is connected to at the moment."""
        assert node.link is not None, f"{node.name} is not connected"
        return node.link.server

    def hint(self, sender: ServerNode, hint: Hint) -> None:
        """Send a hint to all other servers, unless hints are lost at the moment."""
        for server in self.servers:
            if server is not sender and server.broker is not None and not self.lose_hints:
                server.hints.append(hint)

    def _coordinate(self) -> None:
        """Tell the servers who is alive, and elect a leader if there is none."""
        if len(self.servers) == 1:
            return
        awake = [server for server in self.servers if server.awake]
        infos = tuple(server.broker.info for server in awake if server.broker is not None)
        for server in awake:
            server.apply(ClusterView(infos))
        now = self.clock.lease()
        epoch, holder = self.store.epoch()
        if any(server.server_id == holder and server.leads == epoch for server in awake):
            self._leader_seen_at = now
        elif awake and now - self._leader_seen_at >= LOCK_TTL_S:
            self._leader_seen_at = now
            self.random.choice(awake).apply(TakeOver(epoch + 1))

    # -- running --------------------------------------------------------------------------------------------------
    def choices(self) -> list[Callable[[], object]]:
        """Return everything that could happen next."""
        found: list[Callable[[], object]] = []
        for link in [node.link for node in self.nodes if node.link is not None]:
            if link.to_server and not link.hold_to_server and link.server.awake:
                found.append(lambda link=link: self.deliver_to_server(link))  # type: ignore[misc]
            if (link.to_node or link.ending) and not link.hold_to_node and link.node.awake:
                found.append(lambda link=link: self.deliver_to_node(link))  # type: ignore[misc]
        return found + [choice for server in self.servers for choice in server.choices()]

    def settle(self) -> None:
        """Let everything happen that needs no time to pass."""
        for _ in range(QUIET_STEPS_MAX):
            for node in self.nodes:
                if node.awake:
                    node.flush()
            choices = self.choices()
            if choices:
                choices[0]()
            elif not any(server.take_turn() for server in self.servers):
                return
        raise AssertionError("the world does not come to rest: a hot loop")

    # -- then -----------------------------------------------------------------------------------------------------
    def job(self, job_id: str) -> Job:
        [job] = self.store.get([job_id])
        assert job is not None, f"there is no job {job_id}"
        return job

    def all_jobs(self) -> list[Job]:
        jobs, cursor = [], None
        while True:
            page = self.store.find(Filter(), limit=WIDE_PAGE, cursor=cursor)
            jobs += page.jobs
            cursor = page.cursor
            if cursor is None:
                return jobs

    def check(self) -> None:
        """Check all that must hold between any two steps."""
        jobs = self.all_jobs()
        self.history.check(jobs, {job.job_id: self.store.incidents(job.job_id) for job in jobs})
        stored = {job.job_id: job for job in jobs}
        for worker in self.workers:
            assert worker.outstanding <= worker.identity.capacity, f"{worker.name} was given more than its credit"
            assert len(worker.runs) == len(set(worker.runs)), f"{worker.name} ran an attempt twice: {worker.runs}"
        self._check_runs()
        for client in self.clients:
            self._check_client(client, stored)

    def _check_runs(self) -> None:
        """Check that no attempt runs at two places and (I9) that of workers that stop when cut off, only one runs a job."""
        attempts = [run for worker in self.workers for run in worker.runs]
        assert len(attempts) == len(set(attempts)), "an attempt ran at two workers"
        now = [
            grant.job_id
            for worker in self.workers
            if worker.awake and worker.identity.on_disconnect is OnDisconnect.STOP
            for grant in worker.running.values()
        ]
        assert len(now) == len(set(now)), f"I9: a job runs at two workers: {sorted(now)}"

    def _check_client(self, client: ClientNode, stored: dict[str, Job]) -> None:
        for job_id in client.accepted:
            assert job_id in stored, f"I1: {job_id} was accepted and is gone"
        for job_id, results in client.results.items():
            for result in results:
                job = stored[job_id]
                if result.generation == job.generation:
                    assert job.state is result.state, f"I4, I14: {job_id} was told {result.state} and is {job.state}"
                    assert result.attempt == job.attempt, f"I13: {job_id} was told attempt {result.attempt} of {job.attempt}"
                    told, kept = result.outcome, job.outcome
                    assert kept is not None
                    assert (told.result, told.error_code) == (kept.result, kept.error_code), f"I13: {job_id}"


class CheckedHistory(Recorder):
    """A recorder whose lines go to the checker of the invariants (docs/invariants.md), as far as a store decides them.

    Raises at the first line that breaks one. Leaves out the times of a leader's turns, which are no matter of the store.
    """

    def __init__(self, store: Store, clock: FakeClock) -> None:
        super().__init__(self, store, clock)
        self._lease_clock = clock
        self._checker = Checker(raises=True)
        self.tell(WatchingEvent(at=self.at, kinds=STORE_KINDS))

    @property
    def at(self) -> float:
        return self._lease_clock.lease()

    def tell(self, line: AnyLine) -> None:
        if not isinstance(line, LedEvent):
            self._checker.observe(line)

    def check(self, jobs: Sequence[Job], stories: dict[str, list[JobIncident]]) -> None:
        """Check all jobs after a step."""
        assert {job.job_id for job in jobs} == self._checker.stored, "I1, I2: acked jobs and stored jobs differ"
        assert len(jobs) == len(stories), "I2: two jobs of one id"
        for job in jobs:
            self._row(job.job_id, job, always=True)
            if job.state in DEAD:
                reasons = [incident.reason for incident in stories[job.job_id] if incident.kind == "dead_lettered"]
                assert reasons, f"I11: {job.job_id} is {job.state} without a story"
                assert all(reasons), f"I11: {job.job_id} is {job.state} without a reason"
