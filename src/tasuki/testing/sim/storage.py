"""The store that the simulated servers share, behind its faults: slow, refusing, away for a while, full, silent after a commit.

`stores.batching.execute` is what a turn means. What the real store thread does with an interrupted turn is done here too, with
the same `Retries` but without a thread: `execute_surely` itself waits, and so cannot be driven from a heap of events.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tasuki.core.store_messages import Answers, Turn
from tasuki.errors import DiskFull, InterruptCause, StaleEpoch, TasukiError, TurnInterrupted, Unavailable
from tasuki.stores.batching import execute
from tasuki.stores.memory.store import MemoryStore
from tasuki.stores.retrying import Retries
from tasuki.stores.store import Clock, Store
from tasuki.testing.sim.network import Network
from tasuki.testing.sim.process import HostClock
from tasuki.testing.sim.recorder import Recorder
from tasuki.testing.sim.world import World

if TYPE_CHECKING:
    from tasuki.testing.sim.servers import SimServer

NAME = "store"
LATENCY_S = 0.002
ANSWER_APART = 0.3  # how often a server could die between a commit and its answer
COMMITS_ALONE = 0.5  # how often a turn whose server died on the way is committed all the same
KNOWN_AFTER_ALL = 0.5  # how often a server that lost the answer can find out what became of its turn

Random = Callable[[int], bytes]
MakeStore = Callable[[Clock, Random], Store]
"""How a test puts a store of its own in the place of the real one."""


class Task(msgspec.Struct, eq=False):
    """One turn of one server, until it is answered."""

    server: Any
    life: int
    turn: Turn
    begun_at: float
    """On its server's clock."""
    retries: Retries | None = None
    answers: Answers | None = None
    """It is committed, and its server does not know yet."""


class Troubles:
    """What is wrong with the store at the moment. Each is 0 when nothing is."""

    def __init__(self) -> None:
        self.slow_s = 0.0
        self.lost = 0.0
        """How likely the answer to a commit is lost."""
        self.refused = 0.0
        """How likely a turn is refused before it did anything."""
        self.down: Counter[str] = Counter()
        self.full: Counter[str] = Counter()
        """`hard`: nothing can be written. `floor`: there is so little room that servers take no new jobs."""


class StoreNode:
    """One store, and the turns that are on their way to it."""

    def __init__(self, world: World, network: Network, make_store: MakeStore | None = None) -> None:
        self.world = world
        self.network = network
        self.clock = HostClock(world, 1_000.0)
        self.troubles = Troubles()
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
        """This server cannot reach it now."""
        if self.troubles.down and self.troubles.down["restart"]:
            self.world.effects["store_restart"] += 1
            return True
        if self.network.is_cut(server.name, NAME):
            self.world.effects["store_cut"] += 1
            return True
        return False

    def disk_problem(self) -> str:
        """What a server sees when it looks at the disk."""
        return "the disk is full" if any(self.troubles.full.values()) else ""

    # -- turns ----------------------------------------------------------------------------------------------------
    def take(self, server: SimServer, turn: Turn) -> None:
        """The server's store thread begins with it."""
        self._try(Task(server, server.life, turn, server.clock.monotonic()), 0.0)

    def _try(self, task: Task, wait_s: float) -> None:
        self.world.after(wait_s + self.latency_s(), f"{task.server.name} commits", self._commit, task)

    def _commit(self, task: Task) -> None:
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
                self.recorder.turn(server.name, task.turn, task.answers)
                self._lose_answer()
        except TurnInterrupted as error:
            task.retries = task.retries or Retries(task.begun_at, self._chance.random)
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

    def _answer(self, task: Task, answer: Answers | TasukiError) -> None:
        server = task.server
        if server.life != task.life:
            return
        if self._chance.random() < ANSWER_APART or server.paused:
            server.later(self.latency_s(), f"{server.name} hears of its turn", server.answered, task.turn, answer)
        else:
            server.answered(task.turn, answer)

    # -- reads ----------------------------------------------------------------------------------------------------
    def read(self, server: SimServer, what: str, ask: Callable[[Store], Any], then: Callable[[Any], None]) -> None:
        """On a connection of its own; `then` gets the answer, or the error."""
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
