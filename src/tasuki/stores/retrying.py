"""Turns that a store could not finish for a reason that passes, and how often they are tried again. Pure: waits are the caller's.

A turn is one transaction, so all of it is tried again: nothing of the failed one was stored. `Fenced` and `StaleEpoch` are final
words, not interruptions; they never come here.
"""

from __future__ import annotations

from collections.abc import Callable

from tasuki.core.backoff import Backoff
from tasuki.errors import InterruptCause

RETRY_S = 30.0  # how long a lost connection is tried for: a restart of the database takes seconds, a failover some ten
CONFLICT_TRIES = 5
TIMEOUT_TRIES = 3  # a statement that ran out of time is tried twice more: the third time it is not bad luck
FIRST_WAIT_S = 0.01
LOST_WAIT_MAX_S = 2.0


class Retries:
    """For one turn: how long to wait before the next try. `random()` gives 0 to 1."""

    def __init__(self, now: float, random: Callable[[], float]) -> None:
        self._until = now + RETRY_S
        self._lost = Backoff(FIRST_WAIT_S, LOST_WAIT_MAX_S, random)
        self._conflict = Backoff(FIRST_WAIT_S, jitter=random)
        self._seen = dict.fromkeys(InterruptCause, 0)

    def wait_s(self, why: InterruptCause, now: float) -> float | None:
        """None: enough."""
        self._seen[why] += 1
        seen = self._seen[why]
        if why is InterruptCause.CONNECTION:
            if now >= self._until:
                return None
            # At once first: a backend that was ended, or a connection that idled too long, is whole again with the next one.
            return 0.0 if seen == 1 else self._lost.delay_s(seen)
        if seen >= (CONFLICT_TRIES if why is InterruptCause.CONFLICT else TIMEOUT_TRIES):
            return None
        return self._conflict.delay_s(seen)
