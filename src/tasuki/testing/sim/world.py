"""The heap of events: the only time there is, chance in one stream per concern, and a hash over all that happened.

Touches nothing: no clock, thread or socket. What happens at one moment happens in the order in which it was planned.
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

from tasuki.testing.sim import history
from tasuki.testing.sim.history import AnyLine, HistoryLine
from tasuki.testing.sim.options import SimOptions

STORM_EVENTS = 4_000  # in one second of virtual time, for a small world; ten times what the busiest seeds need
STORM_EVENTS_PER_NODE = 400

Observe = Callable[[AnyLine], None]
Trace = Callable[[float, str], None]

_encode = msgspec.msgpack.Encoder().encode


class HotLoop(AssertionError):
    """So much happened in so little time that nothing will come of it."""


class Streams:
    """One source of chance per concern, so that a fault more or less does not change what clients ask for."""

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


def _stream(seed: int, concern: str) -> random.Random:
    # A text is hashed by sha512 here, never by hash(): the same under every PYTHONHASHSEED.
    return random.Random(f"tasuki {seed} {concern}")  # noqa: S311 - it must be the same again


class World:
    """Time, chance, and what is told to the observer."""

    def __init__(self, seed: int, options: SimOptions, observe: Observe, trace: Trace | None = None) -> None:
        self.seed = seed
        self.options = options
        self.streams = Streams(seed)
        self.at = 0.0
        """Seconds of virtual time since the start."""
        self.events = 0
        self.idle_events = 0
        """Of these, timers that fire whether or not anything is to be done."""
        self.effects: Counter[str] = Counter()
        """What the faults did: how often each kind made a difference to somebody."""
        self._observe = observe
        self._trace = trace
        self._heap: list[tuple[float, int, str, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._labels: list[str] = []
        self._times = array("d")
        self._lines: list[bytes] = []
        """What goes into the hash next: many at once cost less."""
        self._storm_until = 0.0
        self._storm_from = 0
        nodes = (options.servers or 0) + (options.workers or 0) + (options.clients or 0)
        self._storm_events = max(STORM_EVENTS, STORM_EVENTS_PER_NODE * nodes)

    # -- time -----------------------------------------------------------------------------------------------------
    def after(self, delay_s: float, label: str, action: Callable[..., None], *arguments: Any) -> None:
        """Have this happen so much later; the label is what the trace says of it."""
        self._number += 1
        heapq.heappush(self._heap, (self.at + delay_s, self._number, label, action, arguments))

    def at_time(self, at: float, label: str, action: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._heap, (max(at, self.at), self._number, label, action, arguments))

    def run_until(self, end: float) -> None:
        """Let everything happen that is due by then."""
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
        """The observer hears it, and the hash has it."""
        self._lines.append(_encode(_HASHED[type(line)](line)))
        self._observe(line)
        if self._trace is not None:
            self._trace(self.at, f"· {told(line)}")

    @property
    def trace_hash(self) -> str:
        """Of everything that has happened so far."""
        self._digest()
        return self._hash.hexdigest()


def told(line: HistoryLine) -> str:
    """A line for people."""
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
