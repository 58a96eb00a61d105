"""Simulated servers: the production broker and election, and the store and coordination that they share, behind their faults.

`SimServer` stands in for `server/server.py`, `SimulatedCluster` for `server/cluster.py`: calls to the reference coordination
can be lost before or after they were carried out, come late, or be carried out twice, and so can hints. `StoreNode` is slow,
refuses, is away, full, or silent after a commit; `stores.batching.execute` is what a turn means. An interrupted turn is retried
here with the `Retries` of the real store thread, but without a thread: `execute_surely` waits, and cannot be driven from a heap
of events.
"""

from __future__ import annotations

import tempfile
from collections import Counter, deque
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import msgspec

from tasuki.coords.coordination import BEAT_INTERVAL_S, LEADER, TIMEOUT_SHARE, ClusterMember, MemoryCoordination, View
from tasuki.core import election
from tasuki.core.address import Address
from tasuki.core.broker import events
from tasuki.core.broker.upkeep import FIRE_BATCH
from tasuki.core.cluster_messages import ServerInfo, decode, everything, split
from tasuki.core.election import LEADER_SCOPE
from tasuki.core.job import Job
from tasuki.core.machine import Hangup, Ticked
from tasuki.core.protocol import Message, Reply, error_message
from tasuki.core.routing import Policy, SubjectRoute
from tasuki.core.scheduler.orders import OrderEpochs
from tasuki.core.store_messages import Answers, FireOrder, ReadyPage, Turn
from tasuki.errors import DiskFull, InterruptCause, StaleEpoch, TasukiError, TurnInterrupted, Unavailable
from tasuki.server.cluster import ClusterCommand
from tasuki.server.queries import answer_query, routed_jobs
from tasuki.server.server import STOP_TIMEOUT_S
from tasuki.stores.batching import execute
from tasuki.stores.common import Retries
from tasuki.stores.memory.store import MemoryStore
from tasuki.stores.store import Clock, Store
from tasuki.testing.sim.history import LeadingEvent, OrderedEvent
from tasuki.testing.sim.network import Network, SimulatedLink
from tasuki.testing.sim.nodes import ServerNode
from tasuki.testing.sim.recorder import Recorder
from tasuki.testing.sim.roles import SimulatedRoles
from tasuki.testing.sim.world import HostClock, SimProcess, World

# ---------------------------------------------------------------------------------------------------- the store

STORE = "store"
LATENCY_S = 0.002
ANSWER_APART = 0.3  # how often a server could die between a commit and its answer
COMMITS_ALONE = 0.5  # how often a turn whose server died on the way is committed all the same
KNOWN_AFTER_ALL = 0.5  # how often a server that lost the answer can find out what became of its turn

Random = Callable[[int], bytes]
MakeStore = Callable[[Clock, Random], Store]
"""Returns a store of a test's own in the place of the real one."""


class StoreTask(msgspec.Struct, eq=False):
    """One turn of one server, until it is answered."""

    server: Any
    life: int
    turn: Turn
    begun_at: float
    """The time on its server's clock."""
    retries: Retries | None = None
    answers: Answers | None = None
    """Answers of a committed turn that its server does not know yet."""


class StoreFaults:
    """Faults of the store at the moment. Each is 0 when there is none."""

    def __init__(self) -> None:
        self.slow_s = 0.0
        self.held = 0.0
        """The probability that a turn is held up for seconds, while others pass: its connection stalls."""
        self.lost = 0.0
        """The probability that the answer to a commit is lost."""
        self.refused = 0.0
        """The probability that a turn is refused before it did anything."""
        self.down: Counter[str] = Counter()
        self.full: Counter[str] = Counter()
        """`hard`: nothing can be written. `floor`: there is so little room that servers take no new jobs."""


HELD_MAX_S = 4.5  # longer than a leader's lock, so that another one leads when the turn goes on; shorter than half a lease
PAGE_QUEUES = 2  # so few jobs wait here that a walk would never have a second page


class StoreNode:
    """One store, and the turns on their way to it."""

    def __init__(self, world: World, network: Network, make_store: MakeStore | None = None) -> None:
        self.world = world
        self.network = network
        self.clock = HostClock(world, 1_000.0)
        self.troubles = StoreFaults()
        self._chance = world.streams.store
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.store = make_store(self.clock, world.streams.leases.randbytes) if make_store is not None else self._opened()
        self.recorder = Recorder(world, self.store, self.clock)
        self.turns = 0

    def _opened(self) -> Store:
        if self.world.options.store == "memory":
            return MemoryStore(self.clock, self.world.streams.leases.randbytes)
        from tasuki.stores.sql.store import SqlStore

        shared_memory = Path("/dev/shm")  # noqa: S108 - where there is one, commits cost no disk
        self._folder = tempfile.TemporaryDirectory(prefix="tasuki-sim-", dir=shared_memory if shared_memory.is_dir() else None)
        path = Path(self._folder.name) / "tasuki.sqlite3"
        return SqlStore.open_sqlite(path, clock=self.clock, random=self.world.streams.leases.randbytes)

    def close(self) -> None:
        self.store.close()
        if self._folder is not None:
            self._folder.cleanup()

    # -- how it is ------------------------------------------------------------------------------------------------
    def latency_s(self) -> float:
        troubles, chance = self.troubles, self._chance
        slow_s = troubles.slow_s * chance.random() if troubles.slow_s else 0.0
        self.world.effects["store_slow"] += slow_s > 0
        return LATENCY_S * (0.5 + chance.random()) + slow_s

    def away(self, server: SimServer) -> bool:
        """Return whether this server cannot reach the store now."""
        if self.troubles.down and self.troubles.down["restart"]:
            self.world.effects["store_restart"] += 1
            return True
        if self.network.is_cut(server.name, STORE):
            self.world.effects["store_cut"] += 1
            return True
        return False

    def disk_problem(self) -> str:
        """Return the problem that a server sees when it looks at the disk."""
        return "the disk is full" if any(self.troubles.full.values()) else ""

    # -- turns ----------------------------------------------------------------------------------------------------
    def take(self, server: SimServer, turn: Turn) -> None:
        """Begin a turn, as the server's store thread does."""
        self._try(StoreTask(server, server.life, turn, server.clock.monotonic()), 0.0)

    def _try(self, task: StoreTask, wait_s: float) -> None:
        if self.troubles.held and self._chance.random() < self.troubles.held:
            self.world.effects["store_held"] += 1
            wait_s += HELD_MAX_S * self._chance.random()
        self.world.after(wait_s + self.latency_s(), f"{task.server.name} commits", self._commit, task)

    def _commit(self, task: StoreTask) -> None:
        server = task.server
        if server.life != task.life and self._chance.random() >= COMMITS_ALONE:
            return
        try:
            if self.away(server):
                raise TurnInterrupted("the connection to the store was lost", InterruptCause.CONNECTION)
            if task.answers is None:
                self._refuse()
                task.answers = execute(self.store, task.turn)
                self.turns += 1
                self.recorder.turn(server.name, task.turn, task.answers, waited_s=server.clock.monotonic() - task.begun_at)
                self._lose_answer()
        except TurnInterrupted as error:
            task.retries = task.retries or Retries(task.begun_at, self._chance.random, leads=bool(task.turn.epoch))
            wait_s = task.retries.wait_s(error.why, server.clock.monotonic())
            if wait_s is None:
                self._answer(task, error)
            elif server.life == task.life:
                self._try(task, wait_s)
        except TasukiError as error:
            if isinstance(error, StaleEpoch):
                self.recorder.refused(server.name, task.turn)
            self._answer(task, error)
        else:
            self._answer(task, task.answers)

    def _refuse(self) -> None:
        troubles, chance = self.troubles, self._chance
        if troubles.full and troubles.full["hard"]:
            self.world.effects["disk_full"] += 1
            raise DiskFull("the disk of the database is full; nothing was stored")
        if troubles.refused and chance.random() < troubles.refused:
            self.world.effects["store_refused"] += 1
            if chance.random() < 0.5:
                raise TurnInterrupted("a deadlock", InterruptCause.CONFLICT)
            raise Unavailable("the database is locked by another process; nothing was stored")

    def _lose_answer(self) -> None:
        chance = self._chance
        if self.troubles.lost and chance.random() < self.troubles.lost:
            self.world.effects["store_lost"] += 1
            if chance.random() < KNOWN_AFTER_ALL:
                raise TurnInterrupted("the connection broke while it was committed", InterruptCause.CONNECTION)
            raise Unavailable("the connection broke while it was committed; it is not known whether it was stored")

    def _answer(self, task: StoreTask, answer: Answers | TasukiError) -> None:
        server = task.server
        if server.life != task.life:
            return
        if self._chance.random() < ANSWER_APART or server.paused:
            server.later(self.latency_s(), f"{server.name} hears of its turn", server.answered, task.turn, answer)
        else:
            server.answered(task.turn, answer)

    # -- reads ----------------------------------------------------------------------------------------------------
    def read(self, server: SimServer, what: str, ask: Callable[[Store], Any], then: Callable[[Any], None]) -> None:
        """Read on a connection of its own; `then` gets the answer, or the error."""
        server.later(self.latency_s(), f"{server.name} reads {what}", self._read, server, ask, then)

    def _read(self, server: SimServer, ask: Callable[[Store], Any], then: Callable[[Any], None]) -> None:
        answer: Any
        try:
            if self.away(server):
                raise Unavailable("the connection to the store was lost")
            answer = ask(self.store)
        except TasukiError as error:
            answer = error
        then(answer)


# ---------------------------------------------------------------------------------------------------- the cluster

COORDINATION = "coordination"
LATE_MAX_S = 3.0

_encode = msgspec.msgpack.Encoder().encode
_decode = lru_cache(64)(msgspec.msgpack.Decoder(ServerInfo).decode)  # all servers are told the same of each


class CoordinationNode:
    """The coordination that all servers share. Its clock is the store's wall clock, as in a database, and may jump."""

    def __init__(self, world: World, network: Network, clock: HostClock) -> None:
        self.world = world
        self.network = network
        self.coordination = MemoryCoordination(clock.wall)
        self.servers: list[SimServer] = []
        self.workers: dict[str, SimProcess] = {}
        self.detached_by_leader: set[str] = set()
        """Workers that a leader has detached, and that have not come back as others."""
        self.lost = self.late = self.doubled = 0.0
        """Probabilities that a call is lost, late or carried out twice."""
        self.hints_lost = self.hints_late = self.hints_doubled = 0.0
        self._chance = world.streams.network

    # -- calls ----------------------------------------------------------------------------------------------------
    def call(self, server: SimServer, name: str, verb: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Carry out a call; `then` gets the answer, or None if there was none in time."""
        chance, world = self._chance, self.world
        timeout_s = TIMEOUT_SHARE * (world.options.lock_ttl_s or election.LOCK_TTL_S)
        delay_s = self.network.delay_s(server.name, COORDINATION)
        label = f"{server.name} {name}"
        if self.network.is_cut(server.name, COORDINATION):
            world.effects["coordination_cut"] += 1
            server.later(timeout_s, f"{label}: no answer", then, None)
        elif self.lost and chance.random() < self.lost:
            world.effects["coordination_lost"] += 1
            if chance.random() < 0.5:
                world.after(delay_s, f"{label}, unheard", _carry_out, verb)
            server.later(timeout_s, f"{label}: no answer", then, None)
        elif self.late and chance.random() < self.late:
            world.effects["coordination_late"] += 1
            world.after(timeout_s + LATE_MAX_S * chance.random(), f"{label}, late", _carry_out, verb)
            server.later(timeout_s, f"{label}: no answer", then, None)
        else:
            if self.doubled and chance.random() < self.doubled:
                world.effects["coordination_doubled"] += 1
                world.after(delay_s + LATE_MAX_S * chance.random(), f"{label}, again", _carry_out, verb)
            server.later(delay_s, label, self._answer, verb, then)

    def _answer(self, verb: Callable[[], Any], then: Callable[[Any], None]) -> None:
        then(verb())

    # -- orders ---------------------------------------------------------------------------------------------------
    def order(self, sender: SimServer, command: events.StartRuns) -> None:
        """Carry an order to another server, as a call of gRPC: through the same troubles as hints."""
        chance = self._chance
        for server in [server for server in self.servers if server.name == command.address and server.alive]:
            delay_s = self.network.delay_s(sender.name, server.name)
            if self.network.is_cut(sender.name, server.name) or (self.hints_lost and chance.random() < self.hints_lost):
                continue
            if self.hints_late and chance.random() < self.hints_late:
                delay_s += LATE_MAX_S * chance.random()
            if self.hints_doubled and chance.random() < self.hints_doubled:
                server.later(delay_s + LATE_MAX_S * chance.random(), f"{server.name} is ordered again", server.ordered, command)
            server.later(delay_s, f"{server.name} is ordered", server.ordered, command)

    # -- hints ----------------------------------------------------------------------------------------------------
    def publish(self, sender: SimServer, pieces: list[bytes]) -> None:
        chance, world = self._chance, self.world
        for server in self.servers:
            if server is sender or not server.alive:
                continue
            for piece in pieces:
                delay_s = self.network.delay_s(sender.name, server.name)
                if self.hints_lost and chance.random() < self.hints_lost:
                    world.effects["hints_lost"] += 1
                    continue
                if self.hints_late and chance.random() < self.hints_late:
                    world.effects["hints_late"] += 1
                    delay_s += LATE_MAX_S * chance.random()
                if self.hints_doubled and chance.random() < self.hints_doubled:
                    world.effects["hints_doubled"] += 1
                    server.later(delay_s + LATE_MAX_S * chance.random(), f"{server.name} is hinted again", server.hinted, piece)
                server.later(delay_s, f"{server.name} is hinted", server.hinted, piece)


def _carry_out(verb: Callable[[], Any]) -> None:
    verb()


class SimulatedCluster:
    """The part of one server in the cluster, for one life of its process."""

    def __init__(self, server: SimServer, node: CoordinationNode, incarnation: str) -> None:
        self.server = server
        self.node = node
        self.roles = SimulatedRoles(self)
        self.term = election.Election(server.name, ttl_s=server.sim.options.lock_ttl_s or election.LOCK_TTL_S)
        self._incarnation = incarnation
        self._info = b""
        self._version = int(server.now().wall * 1000)
        self._seen: dict[str, tuple[int, ServerInfo]] = {}
        self._beat_at = 0.0
        self._beating = False
        self._calls: deque[tuple[str, Callable[[], Any], Callable[[Any], None]]] = deque()
        self._calling = False

    def join(self) -> None:
        """Become a member, and hear everything once: something may have been published before."""
        self.tick()
        self.heard(everything())

    def leave(self) -> None:
        """Release the lock and leave: the next leader need not wait for a ttl."""
        self._decide(election.Resign())
        me = (self.server.name, self._incarnation)
        self._call("leaves", lambda: self.node.coordination.leave(*me), _ignore)

    @property
    def asking(self) -> bool:
        return self._calling or bool(self._calls) or self.term.asking

    def tick(self) -> None:
        self._decide(Ticked())
        self.roles.tick()
        now = self.server.now().monotonic
        if now >= self._beat_at and not self._beating:
            self._beat_at = now + BEAT_INTERVAL_S
            self._beat()

    # -- calls, one at a time as on the coordination's own thread -----------------------------------------------------
    def _call(self, name: str, verb: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self._calls.append((name, verb, then))
        self._next_call()

    def _next_call(self) -> None:
        if self._calls and not self._calling:
            self._calling = True
            name, verb, then = self._calls.popleft()
            self.node.call(self.server, name, verb, lambda answer: self._called(then, answer))

    def _called(self, then: Callable[[Any], None], answer: Any) -> None:
        self._calling = False
        then(answer)
        self._next_call()

    # -- who is there ---------------------------------------------------------------------------------------------
    def _beat(self) -> None:
        self._beating = True
        assert self.server.broker is not None
        info = _encode(self.server.broker.info)
        if info != self._info:
            self._info, self._version = info, self._version + 1
        me = ClusterMember(
            member_id=self.server.name,
            kind="server",
            incarnation=self._incarnation,
            version=self._version,
            info=info,
            led_ago_s=self.server.broker.upkeep.led_ago_s(self.server.now()),
        )
        known = {member_id: version for member_id, (version, _) in self._seen.items()}
        self._call("beats", lambda: self.node.coordination.beat(me, seen=known), self._met)

    def _met(self, view: View | None) -> None:
        self._beating = False
        if view is None:
            return
        seen: dict[str, tuple[int, ServerInfo]] = {}
        for member in view.members:
            if member.info is not None:
                seen[member.member_id] = (member.version, _decode(member.info))
            elif member.member_id in self._seen:
                seen[member.member_id] = self._seen[member.member_id]
        self._seen = seen
        self.roles.met(view, [info for _, info in seen.values()])
        ages_s = {member.member_id: member.age_s for member in view.members}
        self.server.tell(events.ClusterView(tuple(info for _, info in seen.values()), view.detached, ages_s))

    def detach(self, worker_id: str) -> None:
        """Detach a worker, as a leader does."""

        def set_detached() -> None:
            self.node.coordination.set_detached(worker_id, True, actor=LEADER)
            self.node.detached_by_leader.add(worker_id)

        self._call("detaches", set_detached, _ignore)

    # -- who leads ------------------------------------------------------------------------------------------------
    def told(self, command: ClusterCommand) -> None:
        match command:
            case events.Publish():
                self.node.publish(self.server, split(command.hint))
            case events.StartRuns():
                self.node.order(self.server, command)
            case events.NoteAssigned():
                pass
            case election.TookOver() | election.EpochFenced() | election.Lapsed():
                self._decide(command)

    def _decide(self, event: election.Event) -> None:
        server = self.server
        for command in self.term.apply(event, server.now().monotonic):
            match command:
                case election.Acquire():
                    self._find_floor(server.now().monotonic)
                case election.TakeOver():
                    server.tell(command)
                case election.Renew():
                    self._renew(command.epoch, server.now().monotonic)
                case election.Release():
                    self._release(command.epoch)
                case election.Lead():
                    self.roles.leads_now()
                    server.tell(events.Elected(command.epoch))
                case election.StepDown():
                    server.tell(events.Elected(0))

    def _find_floor(self, asked_at: float) -> None:
        """Read the latest epoch of the store, so that no epoch is used a second time."""
        server = self.server
        server.storage.read(server, "the epoch", lambda store: store.epoch()[0], lambda floor: self._acquire(floor, asked_at))

    def depose(self, leader: ServerInfo) -> None:
        """Release the lock in the name of a leader that is taken to be dead, and ask for it."""
        release = self.node.coordination.release
        self._call(
            "deposes",
            lambda: release(LEADER_SCOPE, leader.server_id, leader.epoch),
            lambda _: self.set_deference(0.0, now_free=True),
        )

    def set_deference(self, deference_s: float, *, now_free: bool = False) -> None:
        """Let others ask for the lock for so long before this server does; `now_free`: its holder was deposed."""
        is_sooner, self.term.deference_s = deference_s < self.term.deference_s, deference_s
        if now_free or is_sooner:
            self._decide(election.LockReleased())

    def hold(self, epoch: int, then: Callable[[bool | None], None]) -> None:
        """Ask the coordination whether this server still has the lock of its epoch."""
        self._call("holds", lambda: self.node.coordination.renew(LEADER_SCOPE, self.server.name, epoch, self.term.ttl_s), then)

    def _release(self, epoch: int) -> None:
        self._call("releases", lambda: self.node.coordination.release(LEADER_SCOPE, self.server.name, epoch), _ignore)

    def _acquire(self, floor: int | TasukiError, asked_at: float) -> None:
        if isinstance(floor, TasukiError):
            self._decide(election.Acquired(None, asked_at))
            return
        holder, ttl_s = self.server.name, self.term.ttl_s
        self._call(
            "asks for the lock",
            lambda: self.node.coordination.acquire(LEADER_SCOPE, holder, ttl_s, floor),
            lambda answer: self._decide(election.Acquired(answer, asked_at)),
        )

    def _renew(self, epoch: int, asked_at: float) -> None:
        holder, ttl_s = self.server.name, self.term.ttl_s
        self._call(
            "renews the lock",
            lambda: self.node.coordination.renew(LEADER_SCOPE, holder, epoch, ttl_s),
            lambda done: self._decide(election.Renewed(done, asked_at)),
        )

    # -- hints ----------------------------------------------------------------------------------------------------
    def heard(self, piece: bytes) -> None:
        self.server.tell(events.Hinted(decode(piece)))


def _ignore(answer: Any) -> None:
    """Ignore an answer from which nothing follows."""


DISK_LOOK_S = 1.0
REASSIGN_AFTER_S = 4.0
START_AGAIN_S = 1.0  # a server that finds no store at its start ends, and whoever supervises it tries again


class SimServer(SimProcess, ServerNode):
    """One server process; `shared` ones elect a leader, the only one of its store leads from its start."""

    def __init__(
        self,
        world: World,
        number: int,
        network: Network,
        storage: StoreNode,
        coordination: CoordinationNode | None,
        clock: HostClock,
    ) -> None:
        name = f"server-{number}"
        ttl_s = world.options.lease_ttl_s or 15.0
        address, harness = Address("tcp", f"10.0.0.{number}", 7000), cast(Any, None)  # all that it would ask of one is below
        ServerNode.__init__(self, harness, name, address, shared=coordination is not None, lease_ttl_s=ttl_s)
        SimProcess.__init__(self, world, name, clock)
        self.now = clock.now  # type: ignore[method-assign]
        self.network = network
        self.storage = storage
        self.coordination = coordination
        self.cluster: SimulatedCluster | None = None
        self.stopping = False
        self._disk_at = 0.0

    # -- life -----------------------------------------------------------------------------------------------------
    def start(self) -> None:
        if self.storage.away(self):
            self.sim.after(START_AGAIN_S, f"{self.name} is started again", self._start_again, self.life)
            return
        self.born()
        epoch = 0
        if self.coordination is None:
            store = self.storage.store
            epoch = store.epoch()[0] + 1
            self.storage.recorder.took_over(self.name, epoch, done=store.take_over(self.name, epoch))
        # Only one server was started with the route; the others learn it.
        policy = self.sim.options.policy if self.name.endswith("1") else ""
        routes = (SubjectRoute(">", Policy(policy)),) if policy else ()
        options = self.sim.options
        begin_within_s = events.BEGIN_WITHIN_S if options.begin_within_s is None else options.begin_within_s
        self._begin(epoch, retention_s=options.retention_s, begin_within_s=begin_within_s, routes=routes)
        assert self.broker is not None
        self.broker.grpc_address = self.name
        self.broker.upkeep.ahead = FireOrder(FIRE_BATCH, self.sim.options.ahead_s or 0.0, REASSIGN_AFTER_S)
        self._orders = OrderEpochs()
        self.turn = None
        self._disk_at = 0.0
        self.stopping = False
        if self.coordination is not None:
            self.cluster = SimulatedCluster(self, self.coordination, f"{self.name}-{self.life}")
            self.cluster.join()
        else:
            self.sim.tell(LeadingEvent(at=self.sim.at, server_id=self.name, epoch=epoch))
        self.tick_for_ever(self._tick, self.sim.options.tick_s)

    def _start_again(self, life: int) -> None:
        if life == self.life and not self.alive:
            self.start()

    def crash(self, *, silent: bool = False) -> None:
        """Kill the process (SIGKILL); if `silent`, its host loses power."""
        self._gone("crashed", silent=silent)

    def _gone(self, what: str, *, silent: bool = False) -> None:
        if self.leads:
            self.sim.tell(LeadingEvent(at=self.sim.at, server_id=self.name, epoch=0))
        self.died(what)
        self.die()
        self.cluster = None
        mine = [link for link in self.network.links.values() if link.server is self and link.server_open]
        self.network.process_gone(mine, server=True, silent=silent)

    def stop(self) -> None:
        """Stop in order (SIGTERM): release the lock, answer what is under way, hear nothing new; then start again."""
        self.stopping = True
        if self.cluster is not None:
            self.cluster.leave()
        self.later(self.sim.options.tick_s, f"{self.name} stops", self._stop_when_done, self.clock.monotonic() + STOP_TIMEOUT_S)

    def _stop_when_done(self, deadline: float) -> None:
        assert self.broker is not None
        under_way = self.turn is not None or (self.cluster is not None and self.cluster.asking)
        if (under_way or len(self.broker.builder)) and self.clock.monotonic() < deadline:
            self.pump()
            self.later(self.sim.options.tick_s, f"{self.name} stops", self._stop_when_done, deadline)
            return
        self.sim.effects["stop"] += 1
        self._gone("exited")
        self.sim.after(START_AGAIN_S, f"{self.name} is started again", self._start_again, self.life)

    def resume(self) -> None:
        super().resume()
        self.network.go_on()

    def _tick(self) -> None:
        now = self.clock.monotonic()
        if now >= self._disk_at:
            self._disk_at = now + DISK_LOOK_S
            problem = self.storage.disk_problem()
            self.sim.effects["disk_full"] += bool(problem)
            self.apply(events.DiskSpace(problem))
        self.apply(Ticked())
        if self.cluster is not None and not self.stopping:
            self.cluster.tick()
        self.pump()

    # -- the broker's driver --------------------------------------------------------------------------------------
    def tell(self, event: events.Event) -> None:
        """Apply an event to the broker, and let the store begin if it is idle."""
        if isinstance(event, events.Elected):
            self.sim.tell(LeadingEvent(at=self.sim.at, server_id=self.name, epoch=event.epoch))
        self.apply(event)
        self.pump()

    def pump(self) -> None:
        if self.take_turn():
            self.storage.take(self, cast(Turn, self.turn))

    def answered(self, turn: Turn, answer: Answers | TasukiError) -> None:
        """Tell the broker what its turn came to."""
        self.turn = None
        self.tell(events.TurnDone(turn, answer) if isinstance(answer, Answers) else events.TurnFailed(turn, answer))

    def ordered(self, command: events.StartRuns) -> None:
        """Judge an order as `doors/grpc/service.py` does, and let the worker fetch what is assigned to it."""
        self.storage.read(self, "the epoch", lambda store: store.epoch()[0], lambda answer: self._ordered(command, answer))

    def _ordered(self, command: events.StartRuns, answer: int | TasukiError) -> None:
        if self.broker is None:
            return
        known = max(self.broker.epoch, *(info.epoch for info in self.broker.cluster.servers.values()), 0)
        obeyed = not self._orders.problem(command.epoch, known, answer if isinstance(answer, int) else None)
        line = OrderedEvent(at=self.sim.at, server_id=self.name, incarnation=str(self.life), epoch=command.epoch, obeyed=obeyed)
        self.sim.tell(line)
        if obeyed:
            self.tell(events.StartAssigned(command.worker_id))

    def hinted(self, piece: bytes) -> None:
        if self.cluster is not None:
            self.cluster.heard(piece)

    def hear_later(self, link: SimulatedLink, reason: str) -> None:
        """Lose a connection, of which the kernel knows already."""
        self.later(0.0, f"{self.name} lost {link.node.name}", self._lost, link, reason)

    def _lost(self, link: SimulatedLink, reason: str) -> None:
        self.network.server_loses(link, reason)
        self.pump()

    def say_led_ago(self, answer: Callable[[float | None], None]) -> None:
        """Tell how long ago the store took a turn of this leader; None: it does not lead."""
        answer(self.broker.upkeep.led_ago_s(self.now()) if self.broker is not None else None)

    # -- commands -------------------------------------------------------------------------------------------------
    def _send(self, conn: int, message: Message) -> None:
        self.network.send_down(conn, message)

    def _hang_up(self, command: Hangup) -> None:
        error = command.error
        last_words = error_message(0, error) if error is not None else None
        self.network.hang_up(command.conn, last_words, error.message if error is not None else "closed")

    def _told(self, command: ClusterCommand) -> None:
        if self.cluster is not None:
            self.cluster.told(command)
        else:
            super()._told(command)

    def _ask(self, command: events.StoreQuestion) -> None:
        if isinstance(command, events.AskEnded):
            self.storage.read(self, "ends", lambda store: store.ended_among(command.job_ids), self._some_ended)
        elif isinstance(command, events.AskReady):
            self.storage.read(
                self, "ready", lambda store: store.ready_queues(command.place, limit=PAGE_QUEUES), self._ready_found
            )
        elif isinstance(command, events.AskRouted):
            self.storage.read(self, "routed", lambda store: routed_jobs(store, command), self._routed_found)
        else:
            self.storage.read(self, "tokens", lambda store: store.revoked_among(command.token_ids), self._some_revoked)

    def _some_ended(self, answer: list[str] | TasukiError) -> None:
        if not isinstance(answer, TasukiError):  # else the next look comes in a second
            self.tell(events.SomeEnded(answer))

    def _ready_found(self, answer: ReadyPage | TasukiError) -> None:
        self.tell(events.ReadyFound(None if isinstance(answer, TasukiError) else answer))

    def _routed_found(self, answer: list[Job] | TasukiError) -> None:
        self.tell(events.RoutedFound(None if isinstance(answer, TasukiError) else answer))

    def _some_revoked(self, answer: list[str] | TasukiError) -> None:
        if not isinstance(answer, TasukiError):
            self.tell(events.SomeRevoked(answer))

    def _answer_query(self, query: events.Query) -> None:
        def then(answer: Any) -> None:
            failed = isinstance(answer, TasukiError)
            self._send(query.conn, error_message(query.msg_id, answer) if failed else Reply(query.msg_id, answer))

        self.storage.read(self, query.verb, lambda store: answer_query(store, query), then)
