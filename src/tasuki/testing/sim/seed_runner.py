"""Many seeds on several processes, and their results added up.

    summary = run_seeds(SeedRunner(count=2000, sqlite_every=10), processes=2)
    print(*summary.lines_of_numbers(), *summary.lines_of_failures(), summary.verdict(), sep="\n")

`python -m tasuki.testing.sim.seed_runner` is one such process: an order is a line of JSON, and so is the answer. It ends when
nobody gives it orders any more, so also when its parent was killed. A process that dies or hangs over a seed is that seed's
failure, and is replaced.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from itertools import islice
from typing import Any

import msgspec
from msgspec.structs import replace

from tasuki.testing.sim.cases import CaseFailure, case_of, command_of, short, switched_off, try_case
from tasuki.testing.sim.coverage import Coverage, missing
from tasuki.testing.sim.run import SeedOutcome
from tasuki.testing.sim.world import SimOptions

# ---------------------------------------------------------------------------------------------------- processes that run seeds

SEED_LIMIT_S = 120.0  # a seed takes a tenth of a second; one that takes so long never ends
LOOK_S = 1.0  # how often that is looked at
END_TIMEOUT_S = 5.0  # for a process that has no more to do
PROGRAM = (sys.executable, "-m", "tasuki.testing.sim.seed_runner")


class SeedOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """One seed to run."""

    seed: int
    options: SimOptions = SimOptions()
    """The options that were chosen; open ones are drawn from the seed."""
    without: str = ""
    """The name of a safeguard that is switched off (`ablations.py`)."""
    cover: bool = False
    """Count the rare events that happen (`coverage.py`)."""

    @property
    def command(self) -> str:
        """The command that repeats the seed."""
        return command_of(self.seed, self.options, self.without)


class SeedReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of an order. Without an outcome it ended with an exception, or with its process."""

    order: SeedOrder
    cpu_s: float = 0.0
    """The CPU time, which is about the same on a busy machine."""
    outcome: SeedOutcome | None = None
    failure: CaseFailure | None = None
    covered: Counter[str] = msgspec.field(default_factory=Counter)


def run_order(order: SeedOrder) -> SeedReport:
    began = time.process_time()
    coverage = Coverage()
    with switched_off(order.without), coverage.watching() if order.cover else nullcontext():
        tried = try_case(case_of(order.seed, order.options), coverage.observe if order.cover else None)
    if order.cover and tried.outcome is not None:
        coverage.end(tried.outcome)
    cpu_s = time.process_time() - began
    return SeedReport(order=order, cpu_s=cpu_s, outcome=tried.outcome, failure=tried.failure, covered=+coverage.counts)


def _counter(kind: Any, value: Any) -> Counter[str]:
    return Counter(value)


_encode = msgspec.json.Encoder().encode
_decode_order = msgspec.json.Decoder(SeedOrder).decode
_decode_ran = msgspec.json.Decoder(SeedReport, dec_hook=_counter).decode


def results(processes: int, orders: Iterator[SeedOrder], program: Sequence[str] = PROGRAM) -> Generator[SeedReport, None, None]:
    """Yield the reports of the orders as they come. Closing the generator ends all processes."""
    workers = _SeedWorkers(processes, orders, program)
    try:
        yield from workers.results()
    finally:
        workers.end()


class _SeedWorkers:
    """A number of processes, each with its current order."""

    def __init__(self, processes: int, orders: Iterator[SeedOrder], program: Sequence[str]) -> None:
        self._processes = processes
        self._orders = orders
        self._program = program
        self._busy: list[_Runner] = []

    def results(self) -> Iterator[SeedReport]:
        """Yield reports as they come."""
        for order in islice(self._orders, self._processes):
            self._start(order)
        while self._busy:
            ready, _, _ = select.select(self._busy, (), (), LOOK_S)
            for runner in ready:
                yield self._take(runner)
            for runner in self._busy:
                if runner.is_late:
                    runner.kill()  # the next look finds that it is dead

    def _take(self, runner: _Runner) -> SeedReport:
        ran = runner.take()
        following = next(self._orders, None)
        if following is not None and runner.is_alive:
            runner.give(following)
            return ran
        self._busy.remove(runner)
        runner.end()
        if following is not None:
            self._start(following)
        return ran

    def _start(self, order: SeedOrder) -> None:
        with _uninterrupted():  # until `end` knows of it
            self._busy.append(_Runner(self._program, order))

    def end(self) -> None:
        """Kill all processes."""
        for runner in self._busy:
            runner.kill()
            runner.end()
        self._busy.clear()


class _Runner:
    """One process and its order."""

    def __init__(self, program: Sequence[str], order: SeedOrder) -> None:
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.is_alive = True
        self.give(order)

    def fileno(self) -> int:
        """Return the descriptor from which the answer is read, for `select`."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def give(self, order: SeedOrder) -> None:
        self._order, self._since = order, time.monotonic()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died: `take` finds out, and blames this order
            self._process.stdin.write(_encode(order) + b"\n")
            self._process.stdin.flush()

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self._since > SEED_LIMIT_S

    def take(self) -> SeedReport:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.endswith(b"\n"):
            return _decode_ran(line)
        self.is_alive = False
        lasted_s = time.monotonic() - self._since
        message = f"its process ended with exit code {self._process.wait()} after {lasted_s:.1f} s"
        return SeedReport(order=self._order, failure=CaseFailure(what="process", message=message))

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Block SIGINT for processes started meanwhile: a terminal sends Ctrl-C to all, and the parent decides."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


COUNTED_SHARE_MIN = 0.95  # a run of which more seeds show too little is not worth its name
SLOWEST_KEPT = 3
FAILURES_SHOWN = 20
RAREST_SHOWN = 8


class Summary(msgspec.Struct, kw_only=True):
    """Sums over many seeds."""

    seeds: int = 0
    first: int | None = None
    last: int = 0
    on_sqlite: int = 0
    counted: int = 0
    """The number of seeds in which enough happened."""
    processes: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """The CPU time of all seeds."""
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
    """Seeds in which too little happened."""
    covered: Counter[str] = msgspec.field(default_factory=Counter)
    """Counts of rare events, if they were wanted (`SeedRunner.cover`)."""
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
        """Return the verdict in one line."""
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
    """Return the options of a seed: every `sqlite_every`-th runs on SQLite; 0: none does, unless `options` say so."""
    return replace(options, store="sqlite") if sqlite_every and seed % sqlite_every == 0 else options


class SeedRunner(msgspec.Struct, frozen=True, kw_only=True):
    """The seeds to run: `count` of them must count as evidence. For each that does not, one more is run, up to a tenth."""

    first: int = 1
    count: int
    options: SimOptions = SimOptions()
    sqlite_every: int = 0
    without: str = ""
    """The name of a safeguard that is switched off."""
    cover: bool = False
    """Count the rare events that happen."""

    def orders(self, seeds: Iterable[int]) -> Iterator[SeedOrder]:
        return (SeedOrder(seed, options_for(seed, self.options, self.sqlite_every), self.without, self.cover) for seed in seeds)

    def rounds(self, summary: Summary) -> Iterator[Iterator[SeedOrder]]:
        """Yield the orders of all seeds, then of as many more as were too quiet, and so on."""
        begin, missing, end = self.first, self.count, self.first + self.count + self.count // 10
        while missing and begin < end:
            following = min(end, begin + missing)
            yield self.orders(range(begin, following))
            begin, missing = following, self.count - summary.counted - len(summary.failures)


def run_seeds(
    many: SeedRunner,
    *,
    processes: int | None = None,
    heard: Callable[[Summary], None] | None = None,
    program: Sequence[str] = PROGRAM,
) -> Summary:
    """Run seeds on several processes, by default one per core. `heard` is called after each seed. Ctrl-C ends the run early."""
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


def main() -> None:
    """Run one order after another, until there are no more. Output of the code under test goes to stderr."""
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with os.fdopen(answers, "wb", buffering=0) as file:
        for line in sys.stdin.buffer:
            answer = _encode(run_order(_decode_order(line))) + b"\n"
            try:
                file.write(answer)
            except BrokenPipeError:
                return


if __name__ == "__main__":
    main()
