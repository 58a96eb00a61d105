"""What a worker is told at its start, checked before anything is started."""

from __future__ import annotations

import os

from tasuki.core.job import OnDisconnect
from tasuki.core.verbs import Takes
from tasuki.errors import ConfigError

RECONNECT_GRACE_MAX_S = 3600.0  # the server waits no longer
ASYNC_CONCURRENCY = 100
AHEAD_PER_PLACE = 4
AHEAD_MAX = 32


def ahead_of(capacity: int) -> int:
    """How many programs to ask for beyond the places, while programs are short. Handlers have places enough as it is."""
    return min(AHEAD_MAX, AHEAD_PER_PLACE * capacity)


def cut_off(on_disconnect: str, reconnect_grace_s: float) -> tuple[OnDisconnect, float]:
    """What a worker does with its jobs when it cannot renew, and how long others wait for it; checked."""
    if on_disconnect not in list(OnDisconnect):
        raise ConfigError(f"on_disconnect must be stop or keep, got {on_disconnect!r}")
    if not 0.0 <= reconnect_grace_s <= RECONNECT_GRACE_MAX_S:
        raise ConfigError(f"reconnect_grace_s must be 0 to {RECONNECT_GRACE_MAX_S:g} seconds, got {reconnect_grace_s:g}")
    chosen = OnDisconnect(on_disconnect)
    return chosen, reconnect_grace_s if chosen is OnDisconnect.KEEP else 0.0


def check_slots(concurrency: int | None) -> int | None:
    """None: one per core, or as many as async handlers like."""
    if concurrency is not None and concurrency < 1:
        raise ConfigError(f"a worker needs at least one slot, got {concurrency}")
    return concurrency


def capacity_of(concurrency: int | None, *, only_async: bool) -> int:
    """How many attempts at once: what was asked for, else what suits what it runs."""
    if concurrency is not None:
        return concurrency
    return ASYNC_CONCURRENCY if only_async else os.cpu_count() or 1


def what_it_takes(handlers: bool, execs: bool, any_program: bool) -> Takes:
    """Only what it can run: the rest is left for those who can."""
    if handlers:
        return Takes.ANY if execs or any_program else Takes.HANDLERS
    if execs:
        return Takes.COMMANDS
    if any_program:
        return Takes.OWN
    raise ConfigError("this worker has nothing to run: give it execs (--exec NAME=COMMAND, --config FILE) or handlers")
