"""A simulated process: its life, its pauses, its clocks. What is planned for it dies with it, and waits while it is paused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tasuki.core.machine import Now
from tasuki.testing.sim.history import ProcessEvent
from tasuki.testing.sim.world import World

WALL_START_S = 1_700_000_000.0


class HostClock:
    """One host's clocks: a monotonic one with a rate of its own that nobody can set, and a wall clock that jumps.

    It is also the clock of a store (`tasuki.stores.store.Clock`).
    """

    def __init__(self, world: World, offset_s: float = 0.0, wall_offset_s: float = 0.0) -> None:
        self._world = world
        self._since = world.at
        self._monotonic = offset_s
        self._wall_ahead = WALL_START_S + wall_offset_s - offset_s
        self._highest_wall = 0.0
        self._now, self._now_at = Now(0.0, 0.0), -1.0
        self.rate = 1.0

    def monotonic(self) -> float:
        return self._monotonic + (self._world.at - self._since) * self.rate

    def lease(self) -> float:
        return self.monotonic()

    def wall(self) -> float:
        return self.monotonic() + self._wall_ahead

    def now(self) -> Now:
        """Both; kept while no time passes, because every event asks several times."""
        if self._now_at != self._world.at:
            monotonic = self._monotonic + (self._world.at - self._since) * self.rate
            self._now, self._now_at = Now(monotonic, monotonic + self._wall_ahead), self._world.at
        return self._now

    def set_rate(self, rate: float) -> None:
        """From now on it runs faster or slower than time does."""
        self._monotonic, self._since = self.monotonic(), self._world.at
        self.rate = rate

    def jump_wall(self, seconds: float) -> None:
        """Somebody set the wall clock."""
        self._highest_wall = self.highest_wall()
        self._wall_ahead += seconds
        self._now_at = -1.0

    def highest_wall(self) -> float:
        """That it has ever shown."""
        return max(self._highest_wall, self.wall())

    def when(self, monotonic: float) -> float:
        """The virtual time at which it will show this, if its rate stays."""
        return self._world.at + (monotonic - self.monotonic()) / self.rate


class Life:
    """What a simulated process is besides its machine. `life` counts its starts: what was planned for an earlier one is void."""

    def __init__(self, world: World, name: str, clock: HostClock) -> None:
        self.sim = world
        self.name = name
        self.clock = clock
        self.life = 0
        self.alive = False
        self.paused = False
        self._waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """What became due while it was paused."""

    def later(self, delay_s: float, label: str, action: Callable[..., None], *arguments: Any) -> None:
        """Have this happen in the process so much later, if it lives so long."""
        self.sim.after(delay_s, label, self._due, self.life, action, arguments)

    def _due(self, life: int, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if life != self.life or not self.alive:
            return
        if self.paused:
            self._waiting.append((action, arguments))
            return
        action(*arguments)

    def tick_for_ever(self, tick: Callable[[], None], every_s: float) -> None:
        """Its timer, from a moment of its own on."""
        label = f"{self.name} ticks"

        def again(life: int) -> None:
            if life != self.life or not self.alive:
                return
            self.sim.idle_events += 1
            if not self.paused:
                tick()
            self.sim.after(every_s, label, again, life)

        self.sim.after(every_s * self.sim.streams.processes.random(), label, again, self.life)

    # -- what is done to it ---------------------------------------------------------------------------------------
    def born(self) -> None:
        self.life += 1
        self.alive, self.paused = True, False
        self._waiting = []
        self.sim.tell(ProcessEvent(at=self.sim.at, name=self.name, what="started"))

    def died(self, what: str = "crashed") -> None:
        self.life += 1
        self.alive = self.paused = False
        self._waiting = []
        self.sim.tell(ProcessEvent(at=self.sim.at, name=self.name, what=what))

    def pause(self) -> None:
        """SIGSTOP: nothing runs, nothing is lost."""
        self.paused = True
        self.sim.tell(ProcessEvent(at=self.sim.at, name=self.name, what="paused"))

    def resume(self) -> None:
        """SIGCONT: what became due meanwhile happens now, in its order."""
        self.paused = False
        self.sim.tell(ProcessEvent(at=self.sim.at, name=self.name, what="resumed"))
        waiting, self._waiting = self._waiting, []
        for action, arguments in waiting:
            self.later(0.0, f"{self.name} catches up", action, *arguments)
