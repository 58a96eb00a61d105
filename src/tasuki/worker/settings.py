"""What a worker is told at its start, checked before anything is started."""

from __future__ import annotations

import os

from tasuki.core.job import OnDisconnect
from tasuki.core.store_messages import Takes
from tasuki.errors import ConfigError

RECONNECT_GRACE_MAX_S = 3600.0  # the server waits no longer
HTTP_LEASE_TTL_S = 60.0
ASYNC_CONCURRENCY = 100
AHEAD_PER_PLACE = 4
AHEAD_MAX = 32
DAY_S = 86_400.0
SAVE_AT_ONCE_BYTES = 1024 * 1024  # a result from here on is on disk before its upload begins; smaller ones are if it takes long
ASIDE_MAX_BYTES = 1024**3  # of results that were refused, all together
ASIDE_MAX_ENTRIES = 1000
ASIDE_MAX_AGE_S = 7 * DAY_S
RESUMED_INPUT_MIN_BYTES = 1024 * 1024  # an input below this is fetched again from its start
INCOMING_MAX_BYTES = 64 * 1024**3  # of inputs that were partly fetched, all together
INCOMING_MAX_AGE_S = 7 * DAY_S


def ahead_of(capacity: int) -> int:
    """How many programs to ask for beyond the places, while programs are short. Handlers have places enough as it is."""
    return min(AHEAD_MAX, AHEAD_PER_PLACE * capacity)


def cut_off(
    on_disconnect: str | None, reconnect_grace_s: float, lease_ttl_s: float | None, *, over_http: bool
) -> tuple[OnDisconnect, float, float | None]:
    """What a worker does with its jobs when it cannot renew, how long others wait for it, and how long its leases are; checked.

    Over HTTP the line is the part that fails: the jobs go on, and leases are longer. None: as the server has it.
    """
    usual = OnDisconnect.KEEP if over_http else OnDisconnect.STOP
    chosen = usual if on_disconnect is None else on_disconnect
    if chosen not in list(OnDisconnect):
        raise ConfigError(f"on_disconnect must be stop or keep, got {on_disconnect!r}")
    if not 0.0 <= reconnect_grace_s <= RECONNECT_GRACE_MAX_S:
        raise ConfigError(f"reconnect_grace_s must be 0 to {RECONNECT_GRACE_MAX_S:g} seconds, got {reconnect_grace_s:g}")
    grace_s = reconnect_grace_s if chosen == OnDisconnect.KEEP else 0.0
    return OnDisconnect(chosen), grace_s, lease_ttl_s or (HTTP_LEASE_TTL_S if over_http else None)


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
