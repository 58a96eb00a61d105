"""The places of a worker: which attempts run now, which are here ahead of their time, and how many more to ask for. Pure.

Where attempts are short, the way to the server and back costs more than the attempt itself. So a worker whose attempts have been
short asks for some more than it has places: the next one is here when a place is free, and what ended meanwhile is told together.
What waited here for AHEAD_WAIT_S is given back unstarted, and no more is asked for ahead until attempts are short again.
"""

from __future__ import annotations

from collections import deque

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
