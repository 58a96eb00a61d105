"""What every driver of a machine needs of the operating system: a clock for deadlines, and the fastest event loop there is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tasuki.core.machine import Now


def now() -> Now:
    """The clocks a machine is given. The first counts on while the machine sleeps, where the system has such a clock."""
    monotonic = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
    return Now(monotonic, time.time())


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """For asyncio.Runner: uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
