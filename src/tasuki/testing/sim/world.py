"""The world of a simulation: options, the heap of events that is the only time there is, randomness in one stream per concern,
a hash over all events, and the base of all processes (`SimProcess`) with their clocks.

Touches nothing: no clock, thread or socket. Events of one moment happen in the order in which they were planned.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from array import array
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace

from tasuki.core.decoding import decodable
from tasuki.core.machine import Now
from tasuki.core.routing import Policy
from tasuki.testing.sim import history
from tasuki.testing.sim.history import AnyLine, HistoryLine, ProcessEvent

# ---------------------------------------------------------------------------------------------------- options


@decodable
class SimOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of a simulated world; a field that is None is drawn from the seed."""

    servers: int | None = None
    workers: int | None = None
    clients: int | None = None
    jobs: int | None = None
    store: str = "memory"
    """memory or sqlite."""
    tokens: bool | None = None
    """Peers show tokens, which the store looks up; else all are the server's own user."""
    wire: bool | None = None
    """Messages pass through the wire's bytes."""
    kinds: tuple[str, ...] | None = None
    """Kinds of fault (`faults.KINDS`) among which the seed chooses."""
    faults: int | None = None
    """The number of planned faults."""
    chaos_s: float = 18.0
    """The duration of faults and load."""
    heal_limit_s: float = 150.0
    """The time within which everything must have ended after that."""
    rest_s: float = 2.0
    """The time for which a world at rest is watched: nothing must happen any more."""
    tick_s: float = 0.25
    """The interval of a process's timers. Real processes have 0.05 to 0.1 s."""
    lease_ttl_s: float | None = None
    lock_ttl_s: float | None = None
    retention_s: float | None = None
    """The time for which finished jobs are kept."""
    attempts_scale: float | None = None
    """The factor by which attempts take longer. While they are short, workers are sent jobs ahead."""
    definitions: int | None = None
    """The number of definitions that the project has."""
    ahead_s: float | None = None
    """The time before their own for which the leader stores and assigns runs; 0: it does not."""
    latency_s: float | None = None
    """The latency of one message on a healthy network; each message draws up to four times that."""
    policy: str | None = None
    """The routing policy of all subjects; empty: none."""
    begin_within_s: float | None = None
    """The time after which a server takes back what its worker has not begun."""
    pauses: int = 0
    """The number of times at which clients pause a pattern of subjects, and resume it later; they must be administrators."""

    def text(self) -> str:
        """Return the options as text, for people who want the same run again."""
        return " ".join(f"{name}={_shown(getattr(self, name))}" for name in self.__struct_fields__)


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def derived(seed: int, options: SimOptions, kinds: tuple[str, ...]) -> SimOptions:
    """Return the options with every open field drawn from the seed; `kinds` are all kinds of fault."""
    chance = random.Random(f"tasuki {seed} options")  # noqa: S311 - it must be the same again
    swarm = [kind for kind in kinds if chance.random() < 0.4]
    swarm += [kind for kind in chance.sample(kinds, min(4, len(kinds))) if kind not in swarm]
    servers = options.servers or chance.choice((1, 2, 2, 3, 3))
    drawn = {
        "servers": servers,
        "workers": chance.randint(3, 5),
        "clients": chance.randint(2, 3),
        "jobs": chance.randint(88, 100) if servers == 1 else chance.randint(52, 62),
        "tokens": chance.random() < 0.4,
        "wire": chance.random() < 0.1,
        "kinds": tuple(sorted(swarm, key=kinds.index)),
        "faults": chance.randint(14, 24),
        "lease_ttl_s": chance.choice((2.0, 3.0, 4.0)),
        "lock_ttl_s": chance.choice((2.0, 3.0, 5.0)),
        "latency_s": chance.choice((0.0005, 0.002, 0.01)),
        "retention_s": chance.choice((86_400.0,) * 6 + (8.0,)),
        "definitions": chance.randint(2, 4),
        "ahead_s": chance.choice((0.0, 3.0, 3.0)),
        "policy": chance.choice(("", "", "", *Policy)),
        "attempts_scale": chance.choice((1.0, 1.0, 0.1)),
        "begin_within_s": chance.choice((300.0, 1.0)),
    }
    return replace(options, **{name: value for name, value in drawn.items() if getattr(options, name) is None})


STORM_EVENTS = 4_000  # in one second of virtual time, for a small world; ten times what the busiest seeds need
STORM_EVENTS_PER_NODE = 400

Observe = Callable[[AnyLine], None]
Trace = Callable[[float, str], None]

_encode = msgspec.msgpack.Encoder().encode


class HotLoop(AssertionError):
    """Raised when so many events happen in so little time that the run makes no progress."""


class Streams:
    """One source of randomness per concern, so that a fault more or less does not change what clients ask for."""

    def __init__(self, seed: int) -> None:
        self.network = _stream(seed, "network")
        self.processes = _stream(seed, "processes")
        self.clocks = _stream(seed, "clocks")
        self.store = _stream(seed, "store")
        self.load = _stream(seed, "load")
        self.faults = _stream(seed, "faults")
        self.attempts = _stream(seed, "attempts")
        self.jitter = _stream(seed, "jitter")
        self.leases = _stream(seed, "leases")
        self.applications = _stream(seed, "applications")
        self.pauses = _stream(seed, "pauses")
        self.routes = _stream(seed, "routes")


def _stream(seed: int, concern: str) -> random.Random:
    # A text is hashed by sha512 here, never by hash(): the same under every PYTHONHASHSEED.
    return random.Random(f"tasuki {seed} {concern}")  # noqa: S311 - it must be the same again


class World:
    """The heap of events: time, randomness, and the lines that the observer hears."""

    def __init__(self, seed: int, options: SimOptions, observe: Observe, trace: Trace | None = None) -> None:
        self.seed = seed
        self.options = options
        self.streams = Streams(seed)
        self.at = 0.0
        """Seconds of virtual time since the start."""
        self.events = 0
        self.idle_events = 0
        """The number of these events that were timers, which fire whether or not anything is to be done."""
        self.effects: Counter[str] = Counter()
        """The number of times that each kind of fault made a difference to somebody."""
        self._observe = observe
        self._trace = trace
        self._heap: list[tuple[float, int, str, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._labels: list[str] = []
        self._times = array("d")
        self._lines: list[bytes] = []
        """Lines that go into the hash next: many at once cost less."""
        self._storm_until = 0.0
        self._storm_from = 0
        nodes = (options.servers or 0) + (options.workers or 0) + (options.clients or 0)
        self._storm_events = max(STORM_EVENTS, STORM_EVENTS_PER_NODE * nodes)

    # -- time -----------------------------------------------------------------------------------------------------
    def after(self, delay_s: float, label: str, action: Callable[..., None], *arguments: Any) -> None:
        """Plan an action; the label is its text in the trace."""
        self._number += 1
        heapq.heappush(self._heap, (self.at + delay_s, self._number, label, action, arguments))

    def at_time(self, at: float, label: str, action: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._heap, (max(at, self.at), self._number, label, action, arguments))

    def run_until(self, end: float) -> None:
        """Run all events that are due by `end`."""
        heap, pop, trace = self._heap, heapq.heappop, self._trace
        label_it, time_it = self._labels.append, self._times.append
        while heap and heap[0][0] <= end:
            at, _, label, action, arguments = pop(heap)
            self.at = at
            self.events += 1
            label_it(label)
            time_it(at)
            if trace is not None:
                trace(at, label)
            if at >= self._storm_until:
                self._storm_until, self._storm_from = at + 1.0, self.events
            elif self.events - self._storm_from > self._storm_events:
                raise HotLoop(f"more than {self._storm_events} events within a second, the last at {at:.3f} s: {label}")
            action(*arguments)
        self.at = end
        self._digest()

    def _digest(self) -> None:
        for part in ("\n".join(self._labels).encode(), self._times.tobytes(), b"".join(self._lines)):
            self._hash.update(part)
        self._labels.clear()
        del self._times[:]
        self._lines.clear()

    # -- what is told ---------------------------------------------------------------------------------------------
    def tell(self, line: AnyLine) -> None:
        """Pass a line to the observer, and add it to the hash."""
        self._lines.append(_encode(_HASHED[type(line)](line)))
        self._observe(line)
        if self._trace is not None:
            self._trace(self.at, f"· {line_text(line)}")

    @property
    def trace_hash(self) -> str:
        """The hash of everything that has happened so far."""
        self._digest()
        return self._hash.hexdigest()


def line_text(line: HistoryLine) -> str:
    """Return a line as text for people."""
    shown = ((name, getattr(line, name)) for name in line.__struct_fields__ if name != "at")
    return f"{type(line).__name__.removesuffix('Event')} " + " ".join(
        f"{name}={value}" for name, value in shown if value not in (None, "", ())
    )


def _hashed(kind: type[HistoryLine]) -> Callable[[HistoryLine], Any]:
    # Stores make lease_ids in forms of their own; job and attempt name the same thing, and are in the hash.
    return attrgetter("at", *(name for name in kind.__struct_fields__ if name not in ("at", "lease_id")))


_HASHED = {
    kind: _hashed(kind)
    for kind in vars(history).values()
    if isinstance(kind, type) and issubclass(kind, HistoryLine) and kind is not HistoryLine
}


# ---------------------------------------------------------------------------------------------------- processes

WALL_START_S = 1_700_000_000.0


class HostClock:
    """Clocks of one host: a monotonic one with a rate of its own that nobody can set, and a wall clock that jumps.

    A store can use it as its clock (`tasuki.stores.store.Clock`).
    """

    def __init__(self, world: World, offset_s: float = 0.0, wall_offset_s: float = 0.0) -> None:
        self._world = world
        self._since = world.at
        self._monotonic = offset_s
        self._wall_ahead = WALL_START_S + wall_offset_s - offset_s
        self._highest_wall = 0.0
        self._now, self._now_at = Now(0.0, 0.0), -1.0
        self.rate = 1.0

    def monotonic(self) -> float:
        return self._monotonic + (self._world.at - self._since) * self.rate

    def lease(self) -> float:
        return self.monotonic()

    def wall(self) -> float:
        return self.monotonic() + self._wall_ahead

    def now(self) -> Now:
        """Return both clocks; the value is kept while no time passes, because every event asks several times."""
        if self._now_at != self._world.at:
            monotonic = self._monotonic + (self._world.at - self._since) * self.rate
            self._now, self._now_at = Now(monotonic, monotonic + self._wall_ahead), self._world.at
        return self._now

    def set_rate(self, rate: float) -> None:
        """Let the monotonic clock run faster or slower than time does, from now on."""
        self._monotonic, self._since = self.monotonic(), self._world.at
        self.rate = rate

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forwards or backwards."""
        self._highest_wall = self.highest_wall()
        self._wall_ahead += seconds
        self._now_at = -1.0

    def highest_wall(self) -> float:
        """Return the highest wall time that was ever shown."""
        return max(self._highest_wall, self.wall())

    def when(self, monotonic: float) -> float:
        """Return the virtual time at which the monotonic clock will show this, if its rate stays."""
        return self._world.at + (monotonic - self.monotonic()) / self.rate


class SimProcess:
    """A simulated process without its machine. `life` counts its starts: events planned for an earlier life are void."""

    def __init__(self, world: World, name: str, clock: HostClock) -> None:
        self.sim = world
        self.name = name
        self.clock = clock
        self.life = 0
        self.alive = False
        self.paused = False
        self._waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """Actions that became due while the process was paused."""

    def later(self, delay_s: float, label: str, action: Callable[..., None], *arguments: Any) -> None:
        """Plan an action of the process; it is void if the process ends before."""
        self.sim.after(delay_s, label, self._due, self.life, action, arguments)

    def _due(self, life: int, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if life != self.life or not self.alive:
            return
        if self.paused:
            self._waiting.append((action, arguments))
            return
        action(*arguments)

    def tick_for_ever(self, tick: Callable[[], None], every_s: float) -> None:
        """Start the periodic timer of the process, at a random moment."""
        label = f"{self.name} ticks"

        def again(life: int) -> None:
            if life != self.life or not self.alive:
                return
            self.sim.idle_events += 1
            if not self.paused:
                tick()
            self.sim.after(every_s, label, again, life)

        self.sim.after(every_s * self.sim.streams.processes.random(), label, again, self.life)

    # -- what is done to it ---------------------------------------------------------------------------------------
    def born(self) -> None:
        self.life += 1
        self.alive, self.paused = True, False
        self._waiting = []
        self.sim.tell(ProcessEvent(at=self.sim.at, name=self.name, what="started"))

    def died(self, what: str = "crashed") -> None:
        self.life += 1
        self.alive = self.paused = False
        self._waiting = []
        self.sim.tell(ProcessEvent(at=self.sim.at, name=self.name, what=what))

    def pause(self) -> None:
        """Stop the process (SIGSTOP): nothing runs, nothing is lost."""
        self.paused = True
        self.sim.tell(ProcessEvent(at=self.sim.at, name=self.name, what="paused"))

    def resume(self) -> None:
        """Continue the process (SIGCONT): actions that became due meanwhile happen now, in their order."""
        self.paused = False
        self.sim.tell(ProcessEvent(at=self.sim.at, name=self.name, what="resumed"))
        waiting, self._waiting = self._waiting, []
        for action, arguments in waiting:
            self.later(0.0, f"{self.name} catches up", action, *arguments)
