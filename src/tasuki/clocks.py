"""The clocks of this machine. `core` never reads them: its callers pass the time in."""

from __future__ import annotations

import time

from tasuki.core.machine import Now


def boot_time() -> float:
    """Return the seconds since boot: the clock of all deadlines.

    CLOCK_BOOTTIME counts on while the machine sleeps, and nobody can set it; every process of a machine reads the same value.
    Systems without it (macOS) get the monotonic clock.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def now() -> Now:
    """Return both clocks as a state machine takes them."""
    return Now(boot_time(), time.time())
