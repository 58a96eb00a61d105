"""The chaos rig: processes that are killed and frozen at random, and the history that they leave for the one checker.

    with scenario.make(request, tmp_path, seed) as rig:    # scenarios.py has the table
        print(rig.run())                                   # storm, calm, check; AssertionError names what does not hold

Killed processes come back after a moment, as under systemd; frozen ones go on. Faults are drawn from the plan's seed: the same
seed gives much the same faults, though not at the same instruction. A subclass starts its processes, submits jobs, and checks
what its scenario promises besides the invariants.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Protocol, Self

from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.testing.sim.checker import Checker
from tasuki.testing.sim.history import AnyLine, FaultEvent, write
from tests.e2e.stage import Ledger
from tests.support.processes import ChildProcess, ServerProcess
from tests.support.waiting import until

REVIVED_WITHIN_S = 60.0
STOPPED_WITHIN_S = 30.0


class Fault(StrEnum):
    """Things that happen to a process."""

    KILLED = "killed"
    KILLED_FOR_LONG = "killed for longer than a lease"
    FROZEN = "frozen"
    FROZEN_FOR_LONG = "frozen for longer than a lease"
    KILLED_WHILE_FROZEN = "killed while frozen"
    STOPPED = "stopped in order"


class Plan(Protocol):
    """The part of a plan that all scenarios share."""

    @property
    def seed(self) -> int: ...
    @property
    def lease_ttl_s(self) -> float: ...


class Rig:
    """Processes of one run. A subclass fills `servers` and `workers` in `start`."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger(folder / "ledger")
        self.servers: list[ServerProcess] = []
        self.workers: list[ChildProcess] = []
        self.faults: list[FaultEvent] = []
        self.healed_at = 0.0
        """The wall clock when the last fault was over."""
        self.chance = random.Random(plan.seed)
        self._lease_over_s = plan.lease_ttl_s + LEASE_MARGIN_S
        self._moment = threading.Event()  # never set: its wait is the random moment of a fault, and no wait for anything
        self.busy: dict[ChildProcess, Future[None]] = {}
        """Processes to which something happens at the moment."""
        self._stack = contextlib.ExitStack()

    def start(self, stack: contextlib.ExitStack) -> None:
        """Start all processes."""
        raise NotImplementedError

    def storm(self) -> None:
        """Let faults happen while jobs are submitted and run."""
        raise NotImplementedError

    def calm(self) -> None:
        """Wait until everything has come to its end without faults."""
        raise NotImplementedError

    def check(self) -> str:
        """Check everything; return figures for people."""
        raise NotImplementedError

    def run(self) -> str:
        """Run the scenario to its end, and check it; return figures for people."""
        self.storm()
        self.calm()
        return self.check()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.pool = stack.enter_context(ThreadPoolExecutor(16))
            self.start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)  # no fault may start a process again that is ended below
        self._stack.close()

    # ------------------------------------------------------------------------------------------------ faults

    def wait(self, seconds: tuple[float, float]) -> None:
        """Wait for a random moment."""
        self._moment.wait(self.chance.uniform(*seconds))

    def note(self, what: str, target: str = "") -> None:
        self.faults.append(FaultEvent(at=time.time(), fault=what, target=target))

    def hit(self, processes: Sequence[ChildProcess], faults: Sequence[Fault], away_s: tuple[float, float]) -> None:
        """Let one of the faults happen to one of the processes that are well.

        A process that is away for long finds its leases, or its leadership, over when it comes back.
        """
        victims = [process for process in processes if process not in self.busy]
        if not victims:
            return
        victim, fault, seconds = self.chance.choice(victims), self.chance.choice(faults), self.chance.uniform(*away_s)
        self.note(f"{victim.kind}s {fault}", victim.log.stem)
        if fault in (Fault.KILLED_FOR_LONG, Fault.FROZEN_FOR_LONG):
            seconds += self._lease_over_s
        self.busy[victim] = self.pool.submit(self._suffer, victim, fault, seconds)

    def _suffer(self, victim: ChildProcess, fault: Fault, away_s: float) -> None:
        if fault in (Fault.FROZEN, Fault.FROZEN_FOR_LONG, Fault.KILLED_WHILE_FROZEN):
            with contextlib.suppress(ProcessLookupError):
                victim.signal(signal.SIGSTOP)
                self._moment.wait(away_s)
                victim.signal(signal.SIGCONT if fault is not Fault.KILLED_WHILE_FROZEN else signal.SIGKILL)
        if fault in (Fault.FROZEN, Fault.FROZEN_FOR_LONG):
            return
        if fault is Fault.STOPPED:
            assert victim.stop(STOPPED_WITHIN_S) == 0, victim.output()[-4000:]
        victim.kill()
        if fault is not Fault.KILLED_WHILE_FROZEN:
            self._moment.wait(away_s)

        start = victim.restart if isinstance(victim, ServerProcess) else victim.start_again

        def started() -> bool:
            try:
                start()
            except AssertionError:  # without its store a server ends again, and is started again
                return False
            return True

        until(started, REVIVED_WITHIN_S, f"{victim.command} starts again")

    def raise_failures(self) -> None:
        """Forget the faults that are over, and raise what went wrong; no process may have ended by itself."""
        for victim, fault in list(self.busy.items()):
            if fault.done():
                del self.busy[victim]
                fault.result()
        for process in (*self.servers, *self.workers):
            if process not in self.busy and not process.running:
                self.ended_by_itself(process)

    def ended_by_itself(self, process: ChildProcess) -> None:
        raise AssertionError(f"{process.command} ended by itself:\n{process.output()[-4000:]}")

    def heal(self) -> None:
        """Wait until all faults are over."""
        for fault in list(self.busy.values()):
            fault.result()
        self.raise_failures()
        self.healed_at = time.time()

    # ------------------------------------------------------------------------------------------------ the check

    def judge(self, lines: Iterable[AnyLine], shown: Sequence[str]) -> None:
        """Write the history, and check that no invariant is broken and that there is evidence for those of `shown`."""
        path = self.folder / "history.jsonl"
        lines = list(lines)
        with path.open("wb") as file:
            write(lines, file)
        invariants_hold(lines, shown, f"the history is in {path}")

    def faults_text(self) -> str:
        counts = Counter(fault.fault for fault in self.faults)
        return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))


def invariants_hold(lines: Iterable[AnyLine], shown: Sequence[str], where: str = "") -> None:
    """Check a history; AssertionError with the violations, or with invariants for which it has no evidence."""
    checker = Checker().check(lines)
    assert not checker.violations, f"{checker.report()}\n{where}"
    missing = [invariant for invariant in shown if not checker.evidence[invariant]]
    assert not missing, f"nothing shows that {missing} hold; {where}"
