"""When and where to connect again: at once the first time, then with growing, jittered waits, round the addresses. Pure."""

from __future__ import annotations

from collections.abc import Callable

BACKOFF_FIRST_S = 0.2
BACKOFF_MAX_S = 5.0
STEADY_S = 1.0  # a connection that ended sooner was none: dialing again at once would be a hot loop


class Redial:
    """`jitter()` gives a number from 0 to 1; the driver's random source."""

    def __init__(self, addresses: int, jitter: Callable[[], float]) -> None:
        self._addresses = addresses
        self._jitter = jitter
        self._failures = 0
        self._place = 0
        self._connected_at: float | None = None
        self.due_at: float | None = 0.0
        """When to dial next; None while a connection is there or being made."""

    def dialed(self) -> int:
        """Which address is tried now."""
        self.due_at = None
        return self._place

    def connected(self, now: float) -> None:
        """The server took our Hello."""
        self._connected_at = now

    def lost(self, now: float) -> None:
        """The connection ended, or could not be made."""
        if self._connected_at is not None and now - self._connected_at >= STEADY_S:
            self._failures = 0
        self._connected_at = None
        if self._failures == 0:
            wait_s = 0.0
        else:
            wait_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * float(1 << min(self._failures - 1, 16))) * (0.5 + self._jitter() / 2)
        self._failures += 1
        self._place = (self._place + 1) % self._addresses if self._failures > 1 else self._place
        self.due_at = now + wait_s
