"""The clocks of this machine. `core` never reads them: its callers pass the time in.

`boot_time()` returns the seconds since boot, the clock of all deadlines: CLOCK_BOOTTIME counts on while the machine sleeps, and
nobody can set it; every process of a machine reads the same value. Systems without it (macOS, Windows) get the monotonic clock.
"""

from __future__ import annotations

import functools
import time

from tasuki.core.machine import Now

boot_time = functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic


def now() -> Now:
    """Return both clocks as a state machine takes them."""
    return Now(boot_time(), time.time())
