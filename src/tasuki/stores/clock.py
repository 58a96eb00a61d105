"""The real clocks of a store that runs on this machine."""

from __future__ import annotations

import time


class SystemClock:
    """Leases by CLOCK_BOOTTIME, which goes on while the machine sleeps and which nobody can set; the wall clock for people."""

    def lease(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()
