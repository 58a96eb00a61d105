"""Records of the worker's machine: its leases, its slots, and the progress of its attempts. Pure.

Slots. Where attempts are short, the way to the server and back costs more than the attempt itself. So a worker whose attempts
have been short requests more than it has slots for: the next attempt is here when a slot is free, and ends are reported
together. An attempt that waited here for AHEAD_WAIT_S is given back unstarted, and none is requested ahead until attempts are
short again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container

import msgspec

from tasuki.core.job import Outcome, Progress
from tasuki.core.protocol import PROGRESS_MAX, Claim, Ending
from tasuki.core.store_messages import Grant

SEEN_S = 600.0  # how long a lease is remembered, so that a delivery that comes twice is run once
SHORT_S = 0.05  # attempts that take less, on average, are worth requesting ahead
LATEST_SHARE = 1 / 8  # weight of the latest attempt in that average
AHEAD_WAIT_S = 0.2  # after that another worker had better run it


class WorkerLease(msgspec.Struct):
    """One lease, from its delivery until a server has answered its ending."""

    claim: Claim
    deadline: float
    received_at: float
    waiting: Grant | None = None
    """Set while it waits here for a free slot."""
    started_at: float | None = None
    reported_start: bool = False
    stopping: str = ""
    ending: Ending | None = None
    ended_at: float = 0.0
    saved: bool = False
    """True if the driver was asked to save the ending."""
    kept: bool = False
    """True if it is over and its ending is on disk. While a large result is being uploaded, it has no `ending` yet."""
    restored: bool = False
    """True if it is of an earlier process: its ending may still count, but this process cannot renew its lease."""

    def ended(self, outcome: Outcome) -> Ending:
        """Return its ending, with this outcome."""
        return Ending(self.claim.job_id, self.claim.lease_id, self.claim.attempt, outcome, self.started_at)


class SeenLeases:
    """Delivered leases, each with the connection that delivered it."""

    def __init__(self) -> None:
        self._conns: dict[str, int] = {}
        self._order: deque[tuple[float, str]] = deque()

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._conns

    def note(self, lease_id: str, conn: int, at: float) -> None:
        self._conns[lease_id] = conn
        self._order.append((at + SEEN_S, lease_id))

    def moved(self, lease_id: str, conn: int) -> bool:
        """Move a lease to this connection, and return whether it was on another one."""
        before, self._conns[lease_id] = self._conns[lease_id], conn
        return before != conn

    def forget_old(self, at: float) -> None:
        while self._order and self._order[0][0] <= at:
            self._conns.pop(self._order.popleft()[1], None)


class Slots:
    """The slots of a worker: running attempts, attempts that wait for a slot, and how many more to request.

    `asked` counts every slot that the server may fill or has filled: its credit, and the attempts that are here.
    """

    def __init__(self, capacity: int, ahead_max: int = 0) -> None:
        self.asked = 0
        self._capacity = capacity
        self._ahead_max = ahead_max
        self._average_s = SHORT_S
        self._running: dict[str, float] = {}  # lease_id → start
        self._waiting: deque[tuple[str, float]] = deque()

    def take(self, lease_id: str, at: float) -> bool:
        """Give a delivered attempt a slot; False: it waits for one."""
        if len(self._running) < self._capacity:
            self._running[lease_id] = at
            return True
        self._waiting.append((lease_id, at))
        return False

    def leave(self, lease_id: str, at: float) -> None:
        """Free the slot of an attempt that is over."""
        began = self._running.pop(lease_id, None)
        if began is not None:
            self.asked -= 1
            self._average_s += (at - began - self._average_s) * LATEST_SHARE

    def drop(self, lease_ids: set[str]) -> None:
        """Remove attempts that wait and were not started."""
        before = len(self._waiting)
        self._waiting = deque(one for one in self._waiting if one[0] not in lease_ids)
        self.asked -= before - len(self._waiting)

    def advance(self, at: float) -> list[str]:
        """Give free slots to waiting attempts, and return those."""
        found = []
        while self._waiting and len(self._running) < self._capacity:
            lease_id, _ = self._waiting.popleft()
            self._running[lease_id] = at
            found.append(lease_id)
        return found

    def overdue(self, at: float) -> list[str]:
        """Return the attempts that have waited for too long: attempts are not that short any more."""
        found = [lease_id for lease_id, since in self._waiting if at - since >= AHEAD_WAIT_S]
        if found:
            self._average_s = SHORT_S
        return found

    @property
    def waiting(self) -> list[str]:
        return [lease_id for lease_id, _ in self._waiting]

    @property
    def well_stocked(self) -> bool:
        """True if each slot has a next attempt: nothing stands still if ends are reported a little later."""
        return len(self._waiting) >= self._capacity

    @property
    def short(self) -> bool:
        """True if attempts have been short, so that more are requested ahead."""
        return self._ahead_max > 0 and self._average_s < SHORT_S

    def wanted(self, blocked: int) -> int:
        """Return how much credit to give now; `blocked` slots are not to be filled yet."""
        ahead = self._ahead_max if self.short else 0
        return max(0, self._capacity + ahead - blocked - self.asked)


class ProgressNotes:
    """The latest progress of each attempt, by lease_id, and which of it no server has received yet."""

    def __init__(self) -> None:
        self._latest: dict[str, Progress] = {}
        self._due: dict[str, None] = {}

    def note(self, lease_id: str, progress: Progress) -> None:
        self._latest[lease_id] = progress
        self._due[lease_id] = None

    def all_due(self) -> None:
        """Mark everything as unsent: another server knows nothing of it yet."""
        self._due = dict.fromkeys(self._latest)

    def to_tell(self, held: Container[str]) -> dict[str, Progress]:
        """Return the progress for the next Heartbeat, of attempts that are still held; the rest goes with the one after it."""
        if not self._latest:
            return {}
        self._latest = {lease_id: latest for lease_id, latest in self._latest.items() if lease_id in held}
        due = [lease_id for lease_id in self._due if lease_id in self._latest]
        self._due = dict.fromkeys(due[PROGRESS_MAX:])
        return {lease_id: self._latest[lease_id] for lease_id in due[:PROGRESS_MAX]}
