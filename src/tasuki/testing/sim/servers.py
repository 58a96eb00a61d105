"""A simulated server: the production broker, its election, and its turns at the shared store.

Stands in for `server/server.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from tasuki.core.address import Address
from tasuki.core.broker.broker import error_message
from tasuki.core.broker.events import (
    AskEnded,
    AskRevoked,
    Deposed,
    DiskSpace,
    Publish,
    Query,
    SomeEnded,
    SomeRevoked,
    TakeoverDone,
    TurnDone,
    TurnFailed,
)
from tasuki.core.machine import Hangup, Ticked
from tasuki.core.protocol import Message, Reply
from tasuki.core.store_messages import Answers, Turn
from tasuki.errors import TasukiError
from tasuki.server.queries import answer_query
from tasuki.server.server import STOP_TIMEOUT_S
from tasuki.testing.harness_servers import ServerNode
from tasuki.testing.sim.cluster import CoordinationNode, SimulatedCluster
from tasuki.testing.sim.history import LeadingEvent
from tasuki.testing.sim.network import Network, SimulatedLink
from tasuki.testing.sim.process import HostClock, Life
from tasuki.testing.sim.storage import StoreNode
from tasuki.testing.sim.world import World

if TYPE_CHECKING:
    from tasuki.core.broker.events import Event

DISK_LOOK_S = 1.0
START_AGAIN_S = 1.0  # a server that finds no store at its start ends, and whoever supervises it tries again


class SimServer(Life, ServerNode):
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
        Life.__init__(self, world, name, clock)
        self.now = clock.now  # type: ignore[method-assign]
        self.network = network
        self.storage = storage
        self.coordination = coordination
        self.company: SimulatedCluster | None = None
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
        self._begin(epoch, retention_s=self.sim.options.retention_s)
        assert self.broker is not None
        self.turn = None
        self._disk_at = 0.0
        self.stopping = False
        if self.coordination is not None:
            self.company = SimulatedCluster(self, self.coordination, f"{self.name}-{self.life}")
            self.company.join()
        else:
            self.sim.tell(LeadingEvent(at=self.sim.at, server_id=self.name, epoch=epoch))
        self.tick_for_ever(self._tick, self.sim.options.tick_s)

    def _start_again(self, life: int) -> None:
        if life == self.life and not self.alive:
            self.start()

    def crash(self, *, silent: bool = False) -> None:
        """SIGKILL, or (`silent`) its host loses power."""
        self._gone("crashed", silent=silent)

    def _gone(self, what: str, *, silent: bool = False) -> None:
        if self.leads:
            self.sim.tell(LeadingEvent(at=self.sim.at, server_id=self.name, epoch=0))
        self.died(what)
        self.die()
        self.company = None
        mine = [link for link in self.network.links.values() if link.server is self and link.server_open]
        self.network.process_gone(mine, server=True, silent=silent)

    def stop(self) -> None:
        """SIGTERM: the lock is given back, what is under way is answered, nothing new is heard; then it is started again."""
        self.stopping = True
        if self.company is not None:
            self.company.leave()
        self.later(self.sim.options.tick_s, f"{self.name} stops", self._stop_when_done, self.clock.monotonic() + STOP_TIMEOUT_S)

    def _stop_when_done(self, deadline: float) -> None:
        assert self.broker is not None
        under_way = self.turn is not None or (self.company is not None and self.company.asking)
        if (under_way or len(self.broker.draft)) and self.clock.monotonic() < deadline:
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
            self.apply(DiskSpace(problem))
        self.apply(Ticked())
        if self.company is not None and not self.stopping:
            self.company.tick()
        self.pump()

    # -- the broker's driver --------------------------------------------------------------------------------------
    def tell(self, event: Event) -> None:
        """Something happened: the broker decides, and the store begins if it is idle."""
        self.apply(event)
        self.pump()

    def pump(self) -> None:
        if self.take_turn():
            self.storage.take(self, cast(Turn, self.turn))

    def answered(self, turn: Turn, answer: Answers | TasukiError) -> None:
        """The store thread has brought this back."""
        self.turn = None
        self.tell(TurnDone(turn, answer) if isinstance(answer, Answers) else TurnFailed(turn, answer))

    def hinted(self, piece: bytes) -> None:
        if self.company is not None:
            self.company.heard(piece)

    def hear_later(self, link: SimulatedLink, reason: str) -> None:
        """Its kernel knows that a connection is gone."""
        self.later(0.0, f"{self.name} lost {link.node.name}", self._lost, link, reason)

    def _lost(self, link: SimulatedLink, reason: str) -> None:
        self.network.server_loses(link, reason)
        self.pump()

    # -- commands -------------------------------------------------------------------------------------------------
    def _send(self, conn: int, message: Message) -> None:
        self.network.send_down(conn, message)

    def _hang_up(self, command: Hangup) -> None:
        error = command.error
        last_words = error_message(0, error) if error is not None else None
        self.network.hang_up(command.conn, last_words, error.message if error is not None else "closed")

    def _told(self, command: Publish | TakeoverDone | Deposed) -> None:
        if self.company is not None:
            self.company.told(command)

    def _ask(self, command: AskEnded | AskRevoked) -> None:
        if isinstance(command, AskEnded):
            self.storage.read(self, "ends", lambda store: store.ended_among(command.job_ids), self._some_ended)
        else:
            self.storage.read(self, "tokens", lambda store: store.revoked_among(command.token_ids), self._some_revoked)

    def _some_ended(self, answer: list[str] | TasukiError) -> None:
        if not isinstance(answer, TasukiError):  # else the next look comes in a second
            self.tell(SomeEnded(answer))

    def _some_revoked(self, answer: list[str] | TasukiError) -> None:
        if not isinstance(answer, TasukiError):
            self.tell(SomeRevoked(answer))

    def _answer_query(self, query: Query) -> None:
        def then(answer: Any) -> None:
            failed = isinstance(answer, TasukiError)
            self._send(query.conn, error_message(query.msg_id, answer) if failed else Reply(query.msg_id, answer))

        self.storage.read(self, query.verb, lambda store: answer_query(store, query), then)
