"""Processes that run seeds, one after another, and say what came of each: an order is a line of JSON, and so is the answer.

`python -m tasuki.testing.sim.seed_workers` is such a process. It ends when nobody gives it orders any more, so also when its
parent was
killed. One that dies or hangs over a seed is that seed's failure, and is replaced.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from typing import Any

import msgspec

from tasuki.testing.sim.cases import CaseFailure, case_of, command_of, switched_off, try_case
from tasuki.testing.sim.coverage import Coverage
from tasuki.testing.sim.options import SimOptions
from tasuki.testing.sim.run import SeedOutcome

SEED_LIMIT_S = 120.0  # a seed takes a tenth of a second; one that takes so long never ends
LOOK_S = 1.0  # how often that is looked at
END_TIMEOUT_S = 5.0  # for a process that has no more to do
PROGRAM = (sys.executable, "-m", "tasuki.testing.sim.seed_workers")


class SeedOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """One seed to be run."""

    seed: int
    options: SimOptions = SimOptions()
    """Those that were chosen; what is left open is drawn from the seed."""
    without: str = ""
    """The name of a safeguard that is switched off (`ablations.py`)."""
    cover: bool = False
    """Count what of the rare happens (`coverage.py`)."""

    @property
    def command(self) -> str:
        """What repeats it."""
        return command_of(self.seed, self.options, self.without)


class SeedReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of an order. Without an outcome it ended with an exception, or with its process."""

    order: SeedOrder
    cpu_s: float = 0.0
    """The same on a busy machine, more or less."""
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
    """What came of the orders, as it comes. Whoever stops asking for more has all processes ended."""
    crew = _SeedWorkers(processes, orders, program)
    try:
        yield from crew.results()
    finally:
        crew.end()


class _SeedWorkers:
    """So many processes, each with the order that it has."""

    def __init__(self, processes: int, orders: Iterator[SeedOrder], program: Sequence[str]) -> None:
        self._processes = processes
        self._orders = orders
        self._program = program
        self._busy: list[_Runner] = []

    def results(self) -> Iterator[SeedReport]:
        """As they come."""
        for order in islice(self._orders, self._processes):
            self._busy.append(_Runner(self._program, order))
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
            self._busy.append(_Runner(self._program, following))
        return ran

    def end(self) -> None:
        """Whatever they do: it is not wanted any more."""
        for runner in self._busy:
            runner.kill()
            runner.end()
        self._busy.clear()


class _Runner:
    """One process and its order."""

    def __init__(self, program: Sequence[str], order: SeedOrder) -> None:
        with _uninterrupted():
            self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.is_alive = True
        self.give(order)

    def fileno(self) -> int:
        """Where its answer can be read: for `select`."""
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
    """What is started meanwhile never hears of a Ctrl-C, which a terminal sends to all: its parent decides."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def main() -> None:
    """One order after another, until there are no more. What the code under test prints goes to stderr."""
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
