"""What a worker holds of one lease, from its delivery until a server has spoken on its ending, and then. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

import msgspec

from tasuki.core.job import Outcome, Progress
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.core.protocol import PROGRESS_MAX, Claim, Ending
from tasuki.core.store_messages import Grant

SEEN_S = 600.0  # how long a lease is remembered, so that a delivery that comes twice is run once


class WorkerLease(msgspec.Struct):
    """One lease."""

    claim: Claim
    deadline: float
    received_at: float
    waiting: Grant | None = None
    """It is here ahead of its time."""
    started_at: float | None = None
    reported_start: bool = False
    stopping: str = ""
    ending: Ending | None = None
    ended_at: float = 0.0
    saved: bool = False
    """The driver was asked to save it."""
    kept: bool = False
    """It is over, and its ending on disk. If its result is large and still on its way, it has no `ending` yet."""
    restored: bool = False
    """Of an earlier process: its ending may still count, but its lease cannot be renewed by this one."""

    def ended(self, outcome: Outcome) -> Ending:
        """Its ending, with this outcome."""
        return Ending(self.claim.job_id, self.claim.lease_id, self.claim.attempt, outcome, self.started_at)


class SeenLeases:
    """Leases that were delivered, and on which connection."""

    def __init__(self) -> None:
        self._conns: dict[str, int] = {}
        self._order: deque[tuple[float, str]] = deque()

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._conns

    def note(self, lease_id: str, conn: int, at: float) -> None:
        self._conns[lease_id] = conn
        self._order.append((at + SEEN_S, lease_id))

    def moved(self, lease_id: str, conn: int) -> bool:
        """Whether it was seen on another connection so far; it is on this one from now on."""
        before, self._conns[lease_id] = self._conns[lease_id], conn
        return before != conn

    def forget_old(self, at: float) -> None:
        while self._order and self._order[0][0] <= at:
            self._conns.pop(self._order.popleft()[1], None)


def deadline_of(sent_at: float, ttl_s: float) -> float:
    """When an attempt must be ended if no later message was answered. Short leases leave less time for the kill: a heartbeat
    (every third of the ttl) that is a little late must not end them."""
    return sent_at + ttl_s - min(LEASE_MARGIN_S, ttl_s / 4)


# ----------------------------------------------------------------------------------------------------
# The places of a worker: which attempts run now, which are here ahead of their time, and how many more to ask for. Pure.

SHORT_S = 0.05  # attempts that take less, on average, are worth asking for ahead
LATEST_SHARE = 1 / 8  # of the latest attempt in that average
AHEAD_WAIT_S = 0.2  # then somebody else had better run it


class Slots:
    """`asked` counts every place that the server may fill or has filled: the credit that it has, and what is here."""

    def __init__(self, capacity: int, ahead_max: int = 0) -> None:
        self.asked = 0
        self._capacity = capacity
        self._ahead_max = ahead_max
        self._average_s = SHORT_S
        self._running: dict[str, float] = {}
        """lease_id → since when."""
        self._waiting: deque[tuple[str, float]] = deque()

    def take(self, lease_id: str, at: float) -> bool:
        """An attempt came. True: there is a place for it; False: it waits here."""
        if len(self._running) < self._capacity:
            self._running[lease_id] = at
            return True
        self._waiting.append((lease_id, at))
        return False

    def leave(self, lease_id: str, at: float) -> None:
        """An attempt that ran is over, however it ended."""
        began = self._running.pop(lease_id, None)
        if began is not None:
            self.asked -= 1
            self._average_s += (at - began - self._average_s) * LATEST_SHARE

    def drop(self, lease_ids: set[str]) -> None:
        """These wait no more, and were not started."""
        before = len(self._waiting)
        self._waiting = deque(one for one in self._waiting if one[0] not in lease_ids)
        self.asked -= before - len(self._waiting)

    def advance(self, at: float) -> list[str]:
        """Those that waited and have a place now."""
        found = []
        while self._waiting and len(self._running) < self._capacity:
            lease_id, _ = self._waiting.popleft()
            self._running[lease_id] = at
            found.append(lease_id)
        return found

    def overdue(self, at: float) -> list[str]:
        """Those that have waited for too long: attempts are not that short any more."""
        found = [lease_id for lease_id, since in self._waiting if at - since >= AHEAD_WAIT_S]
        if found:
            self._average_s = SHORT_S
        return found

    @property
    def waiting(self) -> list[str]:
        return [lease_id for lease_id, _ in self._waiting]

    @property
    def well_stocked(self) -> bool:
        """Each place has a next attempt: nothing stands still while the server is told a little later what has ended."""
        return len(self._waiting) >= self._capacity

    @property
    def short(self) -> bool:
        """Attempts have been short, and are asked for ahead."""
        return self._ahead_max > 0 and self._average_s < SHORT_S

    def wanted(self, blocked: int) -> int:
        """How much credit to give now; `blocked` places are not to be filled yet."""
        ahead = self._ahead_max if self.short else 0
        return max(0, self._capacity + ahead - blocked - self.asked)


# ----------------------------------------------------------------------------------------------------
# What a worker's attempts said last about how far they are, and which of that no server was told yet. Pure.


class ProgressNotes:
    """By lease_id; only the latest word counts."""

    def __init__(self) -> None:
        self._said: dict[str, Progress] = {}
        self._due: dict[str, None] = {}

    def note(self, lease_id: str, progress: Progress) -> None:
        self._said[lease_id] = progress
        self._due[lease_id] = None

    def all_due(self) -> None:
        """Another server knows nothing of it yet."""
        self._due = dict.fromkeys(self._said)

    def to_tell(self, held: Container[str]) -> dict[str, Progress]:
        """What goes with the next Heartbeat, of the attempts that are still held; the rest goes with the one after it."""
        if not self._said:
            return {}
        self._said = {lease_id: said for lease_id, said in self._said.items() if lease_id in held}
        due = [lease_id for lease_id in self._due if lease_id in self._said]
        self._due = dict.fromkeys(due[PROGRESS_MAX:])
        return {lease_id: self._said[lease_id] for lease_id in due[:PROGRESS_MAX]}
