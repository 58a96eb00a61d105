"""Connections as TCP has them: in order, and nothing is lost inside one without its end, though the end may never be heard of.

Each `SimulatedLink` has two directions. A muted direction delivers nothing more (half-open). Between two hosts that are cut off
from each other it keeps what was sent, as retransmission does, until they are not. A sender to an end that is gone hears of
that.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tasuki.core.address import Address
from tasuki.core.broker.events import Event as BrokerEvent
from tasuki.core.machine import Closed, Now, Opened, Peer, Received
from tasuki.core.protocol import FRAME_MAX_BYTES, Message
from tasuki.core.reconnect import Connect
from tasuki.testing.sim.world import World
from tasuki.wire.messages import FrameDecoder, decode, encode


class NetworkServer(Protocol):
    """A server process as its connections see it."""

    name: str
    alive: bool
    paused: bool
    stopping: bool

    def apply(self, event: BrokerEvent) -> None: ...
    def pump(self) -> None: ...
    def hear_later(self, link: SimulatedLink, reason: str) -> None: ...


class NetworkPeer(Protocol):
    """A client or worker process as its connections see it."""

    name: str
    life: int
    paused: bool
    peer: Peer
    link: SimulatedLink | None

    @property
    def servers(self) -> Mapping[Address, NetworkServer]: ...
    def later(self, delay_s: float, label: str, action: Callable[..., None], *arguments: Any) -> None: ...
    def hear(self, event: Opened | Closed) -> None: ...
    def hear_message(self, event: Received) -> None: ...
    def flush(self) -> None: ...
    def exit_now(self) -> None: ...


class ConnectionBegin:
    """The first item on the way to a server: a connection is there."""


class End:
    """The last item in either direction: the other end is gone."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


Item = Message | ConnectionBegin | End


class LinkDirection:
    """One direction of a link."""

    def __init__(self, link: SimulatedLink, *, up: bool) -> None:
        self.link = link
        self.up = up
        self.mute = False
        self.stuck = False
        """Nothing arrives for now; the pieces arrive later."""
        self.pieces: deque[list[Any]] = deque()
        """Pieces on their way; each was written at once."""
        self.written_at = -1.0
        self.last_at = 0.0
        """The time at which the last piece arrives: later ones come later."""
        self.held = 0
        """The number of pieces that are held up on their way."""
        names = (link.node.name, link.server.name)
        self.sender, self.receiver = names if up else names[::-1]
        self.label = f"{self.sender} > {self.receiver}"

    @property
    def open(self) -> bool:
        """Somebody is at the receiving end."""
        return self.link.server_open if self.up else self.link.node_open


class SimulatedLink:
    """One connection, from a peer to a server."""

    def __init__(self, conn: int, node: NetworkPeer, server: NetworkServer) -> None:
        self.conn = conn
        self.node = node
        self.server = server
        self.node_open = self.server_open = True
        self.extra_s = 0.0
        """The extra delay of this connection."""
        self.to_server = LinkDirection(self, up=True)
        self.to_node = LinkDirection(self, up=False)


class Network:
    """All links, and the faults between hosts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.links: dict[int, SimulatedLink] = {}
        """Links of which at least one end is open."""
        self.cut: Counter[tuple[str, str]] = Counter()
        """(from, to): hosts between which nothing passes."""
        self.slow: dict[str, float] = {}
        """Extra seconds for everything from and to a host."""
        self.refusing: Counter[str] = Counter()
        """Servers to which nobody can connect."""
        self.random = world.streams.jitter
        self._chance = world.streams.network
        self._latency_s = world.options.latency_s or 0.002
        self._wire = bool(world.options.wire)
        self._number = 0

    def delay_s(self, one: str, other: str) -> float:
        """Return the time that something takes from one host to the other now."""
        delay_s = self._latency_s * (1.0 + 3.0 * self._chance.random())
        slow = self.slow
        if slow and (one in slow or other in slow):
            self.world.effects["slow"] += 1
            delay_s += (slow.get(one, 0.0) + slow.get(other, 0.0)) * self._chance.random()
        return delay_s

    def is_cut(self, one: str, other: str) -> bool:
        return bool(self.cut) and self.cut[one, other] > 0

    def now(self) -> Now:
        """Return virtual time: the network has no host with clocks of its own."""
        return Now(self.world.at, self.world.at)

    # -- connecting -----------------------------------------------------------------------------------------------
    def dial(self, node: NetworkPeer, address: Address) -> None:
        """Connect with the usual timeout."""
        self.connect(node, node.servers[address], Connect(address))

    def connect(self, node: NetworkPeer, server: NetworkServer, wanted: Connect) -> None:
        """Connect; the peer hears Opened or Closed."""
        delay_s = 2 * self.delay_s(node.name, server.name)
        if self.is_cut(node.name, server.name) or self.is_cut(server.name, node.name) or delay_s > wanted.timeout_s:
            node.later(wanted.timeout_s, f"{node.name} gives up on {server.name}", node.hear, Closed(0, "timed out"))
        else:
            node.later(delay_s, f"{node.name} dials {server.name}", self._dialed, node, server)

    def _dialed(self, node: NetworkPeer, server: NetworkServer) -> None:
        if self.refusing[server.name] or not server.alive:
            self.world.effects["refused"] += self.refusing[server.name] > 0
            node.hear(Closed(0, "connection refused"))
            return
        self._number += 1
        link = node.link = self.links[self._number] = SimulatedLink(self._number, node, server)
        if self.world.options.latency_s and self._chance.random() < 0.1:
            link.extra_s = 0.2 * self._chance.random()
        self._put(link.to_server, ConnectionBegin())
        node.hear(Opened(link.conn, node.peer))

    # -- sending --------------------------------------------------------------------------------------------------
    def send_to_server(self, node: NetworkPeer, conn: int, message: Message) -> None:
        link = node.link
        if link is not None and link.conn == conn:
            self._write(link.to_server, message)

    def send_down(self, conn: int, message: Message) -> None:
        link = self.links.get(conn)
        if link is not None and link.server_open:
            self._write(link.to_node, message)

    def _write(self, way: LinkDirection, message: Message) -> None:
        if not self._wire:
            self._put(way, message)
            return
        for frame in FrameDecoder(FRAME_MAX_BYTES).feed(encode(message)):
            self._put(way, decode(frame, FRAME_MAX_BYTES))

    def _put(self, way: LinkDirection, item: Item) -> None:
        if way.mute:
            self.world.effects["half_open"] += 1
            return
        world = self.world
        if way.written_at == world.at and way.pieces:
            way.pieces[-1].append(item)
            return
        way.written_at = world.at
        way.last_at = max(way.last_at, world.at + way.link.extra_s + self.delay_s(way.sender, way.receiver))
        way.pieces.append([item])
        world.at_time(way.last_at, f"{way.label}: {type(item).__name__}", self._arrive, way)

    def _arrive(self, way: LinkDirection) -> None:
        if not way.pieces:
            return
        receiver = way.link.server if way.up else way.link.node
        if way.stuck:
            self.world.effects["late"] += 1
            way.held += 1
        elif self.is_cut(way.sender, way.receiver):
            self.world.effects["cut"] += 1
            way.held += 1
        elif receiver.paused and way.open:
            self.world.effects["pause"] += 1
            way.held += 1
        else:
            piece = way.pieces.popleft()
            if way.open:
                self._deliver(way, piece)
            else:
                self._bounce(way, piece)

    def _bounce(self, way: LinkDirection, piece: list[Item]) -> None:
        """Tell the sender's kernel that nobody is at the receiving end any more."""
        back = way.link.to_node if way.up else way.link.to_server
        if not isinstance(piece[-1], End) and back.open and not back.mute:
            self._put(back, End("connection reset"))

    def _deliver(self, way: LinkDirection, piece: list[Item]) -> None:
        link = way.link
        if way.up:
            server = link.server
            for item in piece:
                if not link.server_open:
                    break
                if isinstance(item, ConnectionBegin):
                    server.apply(Opened(link.conn, link.node.peer))
                elif isinstance(item, End):
                    self.server_loses(link, item.reason)
                elif not server.stopping:
                    server.apply(Received(link.conn, item))
            server.pump()
        else:
            node, life = link.node, link.node.life
            for item in piece:
                if not link.node_open or node.life != life:
                    break
                if isinstance(item, End):
                    self.node_loses(link, item.reason)
                elif not isinstance(item, ConnectionBegin):
                    node.hear_message(Received(link.conn, item))
            if node.life == life:
                node.flush()

    # -- ends -----------------------------------------------------------------------------------------------------
    def node_loses(self, link: SimulatedLink, reason: str) -> None:
        """End the peer's side, and tell the peer."""
        if link.node_open:
            link.node_open = False
            node = link.node
            if node.link is link:
                node.link = None
            node.later(0.0, f"{node.name} lost {link.server.name}", node.hear, Closed(link.conn, reason))
            self._tidy(link)

    def server_loses(self, link: SimulatedLink, reason: str) -> None:
        if link.server_open:
            link.server_open = False
            self._tidy(link)
            link.server.apply(Closed(link.conn, reason))

    def close_from_node(self, node: NetworkPeer, reason: str) -> None:
        """Close from the peer: it hears so at once, the server when the end reaches it."""
        if (link := node.link) is not None:
            self._put(link.to_server, End(reason))
            self.node_loses(link, reason)

    def exit(self, node: NetworkPeer) -> None:
        """End the peer's process by itself: what it sent before still arrives."""
        node.exit_now()

    def hang_up(self, conn: int, last_words: Message | None, reason: str) -> None:
        """Close from the server: the peer hears of it when it has read what was sent before."""
        link = self.links.get(conn)
        if link is not None and link.server_open:
            if last_words is not None:
                self._write(link.to_node, last_words)
            self._put(link.to_node, End(reason))
            link.server_open = False
            self._tidy(link)

    def reset(self, link: SimulatedLink) -> None:
        """Break the connection, and lose what was on its way."""
        self.node_loses(link, "connection reset")
        link.to_server.pieces.clear()
        if link.server_open:
            link.server.hear_later(link, "connection reset")

    def come_late(self, link: SimulatedLink, late_s: float) -> None:
        """Break the connection for its peer; what was stuck comes to the server when the peer may have sent more on another."""
        self.node_loses(link, "connection reset")
        self.world.after(late_s, f"{link.to_server.label}: late", self._unstuck, link)

    def _unstuck(self, link: SimulatedLink) -> None:
        link.to_server.stuck = False
        self._put(link.to_server, End("connection reset"))
        self.go_on()

    def process_gone(self, links: list[SimulatedLink], *, server: bool, silent: bool) -> None:
        """End the links of a process. Its kernel tells the other ends, unless its host is gone too (`silent`)."""
        for link in links:
            mine, other = (link.to_node, link.to_server) if server else (link.to_server, link.to_node)
            if silent:
                mine.mute = other.mute = True
            else:
                self._put(mine, End("connection reset"))
            if server:
                link.server_open = False
            else:
                link.node_open = False
                link.node.link = None
            self._tidy(link)

    def _tidy(self, link: SimulatedLink) -> None:
        if not link.node_open and not link.server_open:
            self.links.pop(link.conn, None)

    # -- faults that end ------------------------------------------------------------------------------------------
    def go_on(self) -> None:
        """Deliver the pieces that were held up, after a fault is over or a process goes on."""
        for link in list(self.links.values()):
            for way in (link.to_server, link.to_node):
                held, way.held = way.held, 0
                for _ in range(held):
                    self.world.after(self.delay_s(way.sender, way.receiver), f"{way.label}: held", self._arrive, way)
