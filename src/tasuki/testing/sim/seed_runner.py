"""Many seeds on several processes (`crew.py`), and what came of them added up.

summary = run_many(orders(range(1, 2001), sqlite_every=10), processes=2)
print(*summary.lines_of_numbers(), *summary.lines_of_failures(), summary.verdict(), sep="\n")
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing

import msgspec
from msgspec.structs import replace

from tasuki.testing.sim.coverage import missing
from tasuki.testing.sim.narrative import short
from tasuki.testing.sim.options import SimOptions
from tasuki.testing.sim.run import SeedOutcome
from tasuki.testing.sim.seed_workers import PROGRAM, SeedOrder, SeedReport, results

COUNTED_SHARE_MIN = 0.95  # a run of which more seeds show too little is not worth its name
SLOWEST_KEPT = 3
FAILURES_SHOWN = 20
RAREST_SHOWN = 8


class Summary(msgspec.Struct, kw_only=True):
    """What came of many seeds."""

    seeds: int = 0
    first: int | None = None
    last: int = 0
    on_sqlite: int = 0
    counted: int = 0
    """Seeds in which enough happened."""
    processes: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Of all seeds."""
    events: int = 0
    turns: int = 0
    lines: int = 0
    virtual_s: float = 0.0
    verbs: Counter[str] = msgspec.field(default_factory=Counter)
    faults: Counter[str] = msgspec.field(default_factory=Counter)
    effects: Counter[str] = msgspec.field(default_factory=Counter)
    slowest: list[tuple[float, int]] = msgspec.field(default_factory=list)
    """(seconds of CPU, seed)"""
    longest: list[tuple[float, int]] = msgspec.field(default_factory=list)
    """(virtual seconds from the last fault until all was at rest, seed)"""
    failures: list[SeedReport] = msgspec.field(default_factory=list)
    too_little: list[int] = msgspec.field(default_factory=list)
    """Seeds that do not count."""
    covered: Counter[str] = msgspec.field(default_factory=Counter)
    """What of the rare came, if that was wanted (`SeedRunner.cover`)."""
    is_interrupted: bool = False

    def add(self, ran: SeedReport) -> None:
        self.seeds += 1
        seed = ran.order.seed
        self.first = seed if self.first is None else min(self.first, seed)
        self.last = max(self.last, seed)
        self.on_sqlite += ran.order.options.store == "sqlite"
        self.cpu_s += ran.cpu_s
        self.covered.update(ran.covered)
        self.slowest = sorted([*self.slowest, (ran.cpu_s, seed)], reverse=True)[:SLOWEST_KEPT]
        if ran.failure is not None:
            self.failures.append(ran)
        if ran.outcome is not None:
            self._add_outcome(ran.outcome, is_good=ran.failure is None)

    def _add_outcome(self, outcome: SeedOutcome, *, is_good: bool) -> None:
        self.events += outcome.events
        self.turns += outcome.turns
        self.lines += outcome.lines
        self.virtual_s += outcome.virtual_s
        self.verbs.update(outcome.verbs)
        self.faults.update(outcome.faults)
        self.effects.update(outcome.effects)
        if not is_good:
            return
        self.longest = sorted([*self.longest, (outcome.healed_after_s, outcome.seed)], reverse=True)[:SLOWEST_KEPT]
        self.counted += outcome.counts
        if not outcome.counts:
            self.too_little.append(outcome.seed)

    @property
    def good(self) -> bool:
        return not self.failures

    @property
    def lacking(self) -> list[str]:
        """Name what a run that claims to cover everything (`SeedRunner.cover`) lacks: rare things, and seeds that count."""
        few = [] if self.counted >= COUNTED_SHARE_MIN * self.seeds else [f"seeds that count (only {self.counted} do)"]
        return few + missing(self.covered)

    # -- for people -----------------------------------------------------------------------------------------------
    def lines_of_failures(self) -> Iterator[str]:
        for ran in sorted(self.failures, key=lambda ran: ran.order.seed)[:FAILURES_SHOWN]:
            yield f"FAILED seed {ran.order.seed}: {short(str(ran.failure))}"
            yield f"    {ran.order.command} --trace"
        if len(self.failures) > FAILURES_SHOWN:
            yield f"… and {len(self.failures) - FAILURES_SHOWN} more seeds"

    def lines_of_numbers(self) -> Iterator[str]:
        each_ms = 1000.0 * self.cpu_s / max(1, self.seeds)
        yield (
            f"{self.verbs.total():,} store verbs in {self.turns:,} turns, {self.faults.total():,} faults, "
            f"{self.events:,} events, {self.lines:,} lines of history, {self.virtual_s / 3600:.1f} h of virtual time; "
            f"{each_ms:.0f} ms of CPU per seed"
        )
        yield "verbs:  " + _listed(self.verbs)
        yield "faults: " + _listed(self.faults)
        if self.covered:
            rarest = self.covered.most_common()[: -RAREST_SHOWN - 1 : -1]
            yield f"rarest of {len(self.covered)} that are counted: " + ", ".join(f"{name} {count:,}" for name, count in rarest)
        yield "slowest: " + ", ".join(f"seed {seed} ({1000 * cpu_s:.0f} ms)" for cpu_s, seed in self.slowest)
        yield "longest until all was at rest: " + ", ".join(f"seed {seed} ({rest_s:.1f} s)" for rest_s, seed in self.longest)

    def verdict(self) -> str:
        """In one line."""
        wrong = f"{len(self.failures)} FAILED" if self.failures else "no violation"
        few = f", {len(self.too_little)} too quiet to count" if self.too_little else ""
        sqlite = f"; {self.on_sqlite} on SQLite" if self.on_sqlite else ""
        span = f"{self.first} to {self.last}{few}{sqlite}" if self.seeds else "none"
        interrupted = "INTERRUPTED: " if self.is_interrupted else ""
        return (
            f"{interrupted}{self.seeds} seeds ({span}) in {self.wall_s:.1f} s on {self.processes} "
            f"process{'es' if self.processes > 1 else ''}: {wrong}"
        )


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common())


def options_for(seed: int, options: SimOptions, sqlite_every: int) -> SimOptions:
    """Every `sqlite_every`-th seed runs on SQLite; 0: none does, unless `options` say so."""
    return replace(options, store="sqlite") if sqlite_every and seed % sqlite_every == 0 else options


class SeedRunner(msgspec.Struct, frozen=True, kw_only=True):
    """Which seeds: so many that count, from the first on. For each that does not count one more is run, up to a tenth more."""

    first: int = 1
    count: int
    options: SimOptions = SimOptions()
    sqlite_every: int = 0
    without: str = ""
    """The name of a safeguard that is switched off."""
    cover: bool = False
    """Count what of the rare happens."""

    def orders(self, seeds: Iterable[int]) -> Iterator[SeedOrder]:
        return (SeedOrder(seed, options_for(seed, self.options, self.sqlite_every), self.without, self.cover) for seed in seeds)

    def rounds(self, summary: Summary) -> Iterator[Iterator[SeedOrder]]:
        """All of them; then as many as were too quiet, and so on."""
        begin, missing, end = self.first, self.count, self.first + self.count + self.count // 10
        while missing and begin < end:
            following = min(end, begin + missing)
            yield self.orders(range(begin, following))
            begin, missing = following, self.count - summary.counted - len(summary.failures)


def run_many(
    many: SeedRunner,
    *,
    processes: int | None = None,
    heard: Callable[[Summary], None] | None = None,
    program: Sequence[str] = PROGRAM,
) -> Summary:
    """Default: one process per core. `heard` is told after each seed. Ctrl-C ends it with what there is."""
    summary = Summary(processes=processes or len(os.sched_getaffinity(0)))
    began = time.monotonic()
    try:
        for orders in many.rounds(summary):
            with closing(results(summary.processes, orders, program)) as found:
                for ran in found:
                    summary.add(ran)
                    summary.wall_s = time.monotonic() - began
                    if heard is not None:
                        heard(summary)
    except KeyboardInterrupt:
        summary.is_interrupted = True
    summary.wall_s = time.monotonic() - began
    return summary
