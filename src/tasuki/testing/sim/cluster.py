"""A server among others: its election and its beats over the shared coordination, and hints to and fro.

Stands in for `server/cluster.py`: the same machines (`core/election.py`, `cluster_messages.py`) and the reference coordination,
with calls
that can be lost before or after they were carried out, come late, or be carried out twice. Hints can be all that too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from tasuki.coords.coordination import BEAT_INTERVAL_S, ClusterMember, View
from tasuki.coords.memory import MemoryCoordination
from tasuki.core import election
from tasuki.core.broker.events import Deposed, Elected, Hinted, Met, Publish, TakeoverDone, Won
from tasuki.core.cluster_messages import ServerInfo, decode, everything, split
from tasuki.core.machine import Ticked
from tasuki.errors import TasukiError
from tasuki.server.cluster import SCOPE
from tasuki.testing.sim.history import LeadingEvent
from tasuki.testing.sim.network import Network
from tasuki.testing.sim.process import HostClock
from tasuki.testing.sim.world import World

if TYPE_CHECKING:
    from tasuki.testing.sim.servers import SimServer

NAME = "coordination"
TIMEOUT_SHARE = 0.4  # of the lock's ttl, as in coords/sql.py
LATE_MAX_S = 3.0

_encode = msgspec.msgpack.Encoder().encode
_decode = lru_cache(64)(msgspec.msgpack.Decoder(ServerInfo).decode)  # all servers are told the same of each


class CoordinationNode:
    """What all servers share besides the store. Its clock is the store's wall clock, as in a database, and may jump."""

    def __init__(self, world: World, network: Network, clock: HostClock) -> None:
        self.world = world
        self.network = network
        self.coordination = MemoryCoordination(clock.wall)
        self.servers: list[SimServer] = []
        self.lost = self.late = self.doubled = 0.0
        """How likely a call is."""
        self.hints_lost = self.hints_late = self.hints_doubled = 0.0
        self._chance = world.streams.network

    # -- calls ----------------------------------------------------------------------------------------------------
    def call(self, server: SimServer, name: str, verb: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """`then` gets the answer, or None if there was none in time."""
        chance, world = self._chance, self.world
        timeout_s = TIMEOUT_SHARE * (world.options.lock_ttl_s or election.LOCK_TTL_S)
        delay_s = self.network.delay_s(server.name, NAME)
        label = f"{server.name} {name}"
        if self.network.is_cut(server.name, NAME):
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
    """One server's part in it, for one life."""

    def __init__(self, server: SimServer, node: CoordinationNode, incarnation: str) -> None:
        self.server = server
        self.node = node
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
        """Be seen, and hear everything once: something may have been told before we listened."""
        self.tick()
        self.heard(everything())

    def leave(self) -> None:
        """Let the lock go, and say that we leave: the next leader need not wait for a ttl."""
        self._decide(election.Resign())
        me = (self.server.name, self._incarnation)
        self._call("leaves", lambda: self.node.coordination.leave(*me), _ignore)

    @property
    def asking(self) -> bool:
        return self._calling or bool(self._calls) or self.term.asking

    def tick(self) -> None:
        self._decide(Ticked())
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
            member_id=self.server.name, kind="server", incarnation=self._incarnation, version=self._version, info=info
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
        self.server.tell(Met(tuple(info for _, info in seen.values()), view.detached))

    # -- who leads ------------------------------------------------------------------------------------------------
    def told(self, command: Publish | TakeoverDone | Deposed) -> None:
        match command:
            case Publish():
                self.node.publish(self.server, split(command.hint))
            case TakeoverDone():
                self._decide(election.TookOver(command.epoch, command.done))
            case Deposed():
                self._decide(election.EpochFenced(command.epoch))

    def _decide(self, event: election.Event) -> None:
        server = self.server
        for command in self.term.apply(event, server.now().monotonic):
            match command:
                case election.Acquire():
                    self._find_floor(server.now().monotonic)
                case election.TakeOver():
                    server.tell(Won(command.epoch))
                case election.Renew():
                    self._renew(command.epoch, server.now().monotonic)
                case election.Release():
                    self._release(command.epoch)
                case election.Lead():
                    self._lead(command.epoch)
                case election.StepDown():
                    self._lead(0)

    def _lead(self, epoch: int) -> None:
        self.server.sim.tell(LeadingEvent(at=self.server.sim.at, server_id=self.server.name, epoch=epoch))
        self.server.tell(Elected(epoch))

    def _find_floor(self, asked_at: float) -> None:
        """No epoch that the store has ever seen is asked for again."""
        server = self.server
        server.storage.read(server, "the epoch", lambda store: store.epoch()[0], lambda floor: self._acquire(floor, asked_at))

    def _release(self, epoch: int) -> None:
        self._call("releases", lambda: self.node.coordination.release(SCOPE, self.server.name, epoch), _ignore)

    def _acquire(self, floor: int | TasukiError, asked_at: float) -> None:
        if isinstance(floor, TasukiError):
            self._decide(election.Acquired(None, asked_at))
            return
        holder, ttl_s = self.server.name, self.term.ttl_s
        self._call(
            "asks for the lock",
            lambda: self.node.coordination.acquire(SCOPE, holder, ttl_s, floor),
            lambda answer: self._decide(election.Acquired(answer, asked_at)),
        )

    def _renew(self, epoch: int, asked_at: float) -> None:
        holder, ttl_s = self.server.name, self.term.ttl_s
        self._call(
            "renews the lock",
            lambda: self.node.coordination.renew(SCOPE, holder, epoch, ttl_s),
            lambda done: self._decide(election.Renewed(done, asked_at)),
        )

    # -- hints ----------------------------------------------------------------------------------------------------
    def heard(self, piece: bytes) -> None:
        self.server.tell(Hinted(decode(piece)))


def _ignore(answer: Any) -> None:
    """Nothing follows from it."""
