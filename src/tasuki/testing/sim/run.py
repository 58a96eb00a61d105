"""One seed from its first event to the verdict: chaos, then a healed world that must come to its end.

    outcome = check_seed(7)                         # SeedOutcome(seed=7, trace_hash=…, violations=[…], …)
    outcome = check_seed(7, SimOptions(servers=2))  # options that are not chosen are drawn from the seed
    outcome = check_plan(7, options, plan)          # with another plan: a seed's, and some of it left out

`run_plan` runs without the checker.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from tasuki.testing.sim import clients, faults
from tasuki.testing.sim.checker import Checker, Violation
from tasuki.testing.sim.checker_store import ViolationFound
from tasuki.testing.sim.history import AnyLine, EndedEvent, HealedEvent, WatchingEvent
from tasuki.testing.sim.project import draw_writes, short_schedules
from tasuki.testing.sim.servers import MakeStore
from tasuki.testing.sim.system import System
from tasuki.testing.sim.world import HotLoop, SimOptions, Streams, Trace, World, derived

LOOK_S = 0.5  # how often a healed world is asked whether it is at rest
WATCHED = (
    "submitted", "granted", "shown", "reported", "reaped", "canceled", "requeued", "tookover", "led", "row", "removed", "asked",
    "answered", "arrived", "began", "gone", "settled", "busy", "process", "fault", "drifted", "leading", "definition", "fired",
)  # fmt: skip
VERBS_MIN, FAULTS_MIN = 250, 10  # below these a seed shows too little to count


class Plan(msgspec.Struct, frozen=True):
    """All that a seed does to its world. Any part of it may be left out."""

    faults: tuple[faults.PlannedFault, ...]
    operations: tuple[clients.Operation, ...]


class SeedOutcome(msgspec.Struct, kw_only=True):
    """The result of one seed."""

    seed: int
    options: SimOptions
    trace_hash: str = ""
    events: int = 0
    virtual_s: float = 0.0
    lines: int = 0
    turns: int = 0
    verbs: Counter[str] = msgspec.field(default_factory=Counter)
    """Calls of the store's verbs, without a leader's that found nothing to do."""
    faults: Counter[str] = msgspec.field(default_factory=Counter)
    """The faults that happened, by kind."""
    effects: Counter[str] = msgspec.field(default_factory=Counter)
    """The number of times that each kind made a difference."""
    healed_after_s: float = 0.0
    """The time from the last fault until nothing was left to do."""
    unfinished: str = ""
    """The work that was still to be done when the time was over."""
    problem: str = ""
    """The reason why the run could not go on: a hot loop."""
    violations: list[Violation] = msgspec.field(default_factory=list)
    """Violations found by the checker, which stops at the first."""

    @property
    def good(self) -> bool:
        return not (self.violations or self.problem or self.unfinished)

    @property
    def counts(self) -> bool:
        """Enough happened for this seed to count as evidence."""
        return self.verbs.total() >= VERBS_MIN and self.faults.total() >= FAULTS_MIN

    def text(self) -> str:
        """Return one line for people."""
        wrong = [*map(str, self.violations), self.problem, f"unfinished: {self.unfinished}" if self.unfinished else ""]
        verdict = "; ".join(filter(None, wrong)) or "ok"
        done = f"{self.verbs.total()} verbs, {self.faults.total()} faults, {self.events} events, {self.virtual_s:.0f} s"
        return f"seed {self.seed} [{self.trace_hash}] {done}: {verdict} | {self.options.text()}"


def plan_of(seed: int, options: SimOptions) -> Plan:
    """Return the plan of this seed under these options, which are complete."""
    streams = Streams(seed)
    operations = sorted([*clients.draw_operations(streams, options), *draw_writes(streams, options)], key=attrgetter("at"))
    numbered = tuple(replace(operation, number=place) for place, operation in enumerate(operations))
    return Plan(tuple(faults.draw_faults(streams, options)), numbered)


def run_plan(
    seed: int,
    options: SimOptions,
    plan: Plan,
    observe: Callable[[AnyLine], None] | None = None,
    *,
    trace: Trace | None = None,
    make_store: MakeStore | None = None,
) -> SeedOutcome:
    """Run a plan. A `ViolationFound` that `observe` raises ends it; anything else that goes wrong is raised here."""
    outcome = SeedOutcome(seed=seed, options=options)

    def heard(line: AnyLine) -> None:
        outcome.lines += 1
        if observe is not None:
            observe(line)

    world = World(seed, options, heard, trace)
    world.tell(WatchingEvent(at=0.0, kinds=WATCHED))
    system = System(world, make_store)
    chaos = faults.Faults(system)
    try:
        with _seldom_collected(), short_schedules():
            _run(system, chaos, plan, outcome)
    except HotLoop as error:
        outcome.problem = str(error)
    except ViolationFound as error:
        outcome.violations = [error.violation]
    finally:
        _note(system, chaos, outcome)
        system.storage.close()
    return outcome


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Collect garbage seldom: a world is one large graph until its end, and searching it often costs a tenth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(1_000_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _run(system: System, chaos: faults.Faults, plan: Plan, outcome: SeedOutcome) -> None:
    world, options = system.world, system.world.options
    system.plan(plan.operations)
    chaos.plan(list(plan.faults))
    system.start()
    world.run_until(options.chaos_s)
    chaos.heal()
    system.heal()
    world.tell(HealedEvent(at=world.at))
    healed_at, healed_events = world.at, world.events - world.idle_events
    rested_s = 0.0
    while rested_s < options.rest_s and world.at < healed_at + options.heal_limit_s:
        world.run_until(world.at + LOOK_S)
        outcome.unfinished = system.unfinished()
        rested_s = 0.0 if outcome.unfinished else rested_s + LOOK_S
    outcome.healed_after_s = world.at - rested_s - healed_at
    system.storage.recorder.all_rows()
    system.project.tell_what_was_due()
    events = world.events - world.idle_events - healed_events
    world.tell(EndedEvent(at=world.at, quiet=not outcome.unfinished, events=events))


def _note(system: System, chaos: faults.Faults, outcome: SeedOutcome) -> None:
    world = system.world
    outcome.trace_hash = world.trace_hash
    outcome.events = world.events
    outcome.virtual_s = world.at
    outcome.turns = system.storage.turns
    outcome.verbs = system.storage.recorder.verbs
    outcome.faults = chaos.happened
    outcome.effects = +world.effects


def check_seed(
    seed: int,
    options: SimOptions | None = None,
    observe: Callable[[AnyLine], None] | None = None,
    *,
    trace: Trace | None = None,
    make_store: MakeStore | None = None,
) -> SeedOutcome:
    """Run a seed, its open options drawn from it, under the checker: safety after every event, liveness at the end."""
    complete = derived(seed, options or SimOptions(), faults.DRAWN_KINDS)
    return check_plan(seed, complete, plan_of(seed, complete), observe, trace=trace, make_store=make_store)


def check_plan(
    seed: int,
    options: SimOptions,
    plan: Plan,
    observe: Callable[[AnyLine], None] | None = None,
    *,
    trace: Trace | None = None,
    make_store: MakeStore | None = None,
) -> SeedOutcome:
    """Run a plan under the checker; `observe` hears each line before the checker does, also the one that breaks an invariant."""
    checker = Checker(raises=True)

    def heard(line: AnyLine) -> None:
        if observe is not None:
            observe(line)
        checker.observe(line)

    judge = checker.observe if observe is None else heard
    outcome = run_plan(seed, options, plan, judge, trace=trace, make_store=make_store)
    if outcome.good:
        try:
            checker.end()
        except ViolationFound as error:
            outcome.violations = [error.violation]
    return outcome
