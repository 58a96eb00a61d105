"""A clock that stands still until a test moves it. Touches nothing: no real time is read anywhere in it."""

from __future__ import annotations

LEASE_START_S = 1_000.0  # seconds since a boot that never was
REBOOTED_S = 30.0
WALL_START_S = 1_700_000_000.0  # 2023-11-14T22:13:20Z


class FakeClock:
    """Both clocks of a store (`tasuki.stores.store.Clock`), moved by hand."""

    def __init__(self, lease: float = LEASE_START_S, wall: float = WALL_START_S) -> None:
        self._lease = lease
        self._wall = self._highest_wall = wall

    def lease(self) -> float:
        """Return the seconds since boot."""
        return self._lease

    def wall(self) -> float:
        """Return the Unix time."""
        return self._wall

    def highest_wall(self) -> float:
        """Return the highest Unix time that it ever showed."""
        return max(self._highest_wall, self._wall)

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds} s; use jump_wall() for a clock that was set")
        self._lease += seconds
        self._wall += seconds

    def reboot(self) -> None:
        """Start the machine again: its lease clock begins anew."""
        self._lease = REBOOTED_S

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forwards or backwards; leases must not depend on it."""
        self._highest_wall = self.highest_wall()
        self._wall += seconds
