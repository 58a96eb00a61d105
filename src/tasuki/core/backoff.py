"""Delays between tries that double with each failure. Pure: time and chance are the caller's."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

DOUBLINGS_MAX = 60  # 2**60 s is past any cap; the bound keeps the power from growing without end


def jittered(delay_s: float, jitter: Callable[[], float]) -> float:
    """Shorten a delay by up to half, so that peers which failed together do not try again together."""
    return delay_s * (0.5 + jitter() / 2)


class Backoff:
    """Delays from `first_s`, doubling up to `max_s`. `jitter()` returns a number from 0 to 1; without it delays are exact."""

    def __init__(self, first_s: float, max_s: float = inf, jitter: Callable[[], float] | None = None) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._jitter = jitter
        self._failures = 0

    def delay_s(self, n: int) -> float:
        """Return the delay before retry `n`; the first is 0."""
        exact_s = min(self._max_s, self._first_s * float(1 << min(n, DOUBLINGS_MAX)))
        return exact_s if self._jitter is None else jittered(exact_s, self._jitter)

    def next_s(self) -> float:
        """Count one more failure and return the delay after it."""
        self._failures += 1
        return self.delay_s(self._failures - 1)

    def reset(self) -> None:
        """Begin again with `first_s`: a try succeeded."""
        self._failures = 0
