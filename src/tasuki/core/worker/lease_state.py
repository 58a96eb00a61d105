"""What a worker holds of one lease, from its delivery until a server has spoken on its ending, and then. Pure."""

from __future__ import annotations

from collections import deque

import msgspec

from tasuki.core.job import Outcome
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.core.protocol import Claim, Ending
from tasuki.core.store_messages import Grant

SEEN_S = 600.0  # how long a lease is remembered, so that a delivery that comes twice is run once


class HeldLease(msgspec.Struct):
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
