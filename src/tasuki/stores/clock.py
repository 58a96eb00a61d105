"""The real clocks of a store that runs on this machine."""

from __future__ import annotations

import time

from tasuki.clocks import boot_time


class SystemClock:
    """The boot clock for leases, the wall clock for times that people read."""

    def lease(self) -> float:
        return boot_time()

    def wall(self) -> float:
        return time.time()
