"""The one checker of RELIABILITY §1: reads a history line by line, and says what was broken and what it had evidence for.

    checker = Checker()
    for line in history:
        checker.observe(line)
    checker.end()
    assert not checker.violations, checker.report()
    print(checker.evidence)        # Counter({"I5": 812, …}): on how many facts each invariant was judged

It states the invariants once more, in its own words: it shares no rule with the code that it judges, only the names of the
states. What a history does not tell is never a violation, but no evidence either; a test that means to show I9 asserts
`checker.evidence["I9"]` as well.

Each part judges its share: `checker_jobs.py` what the store's commits did to jobs, `checker_rows.py` what they left in the rows,
`checker_epochs.py` leadership, `checker_clients.py` what callers were told, `checker_workers.py` processes of attempts,
`checker_schedules.py` runs of definitions. Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Self

from tasuki.testing.sim import history
from tasuki.testing.sim.checker_clients import ClientJudge
from tasuki.testing.sim.checker_epochs import EpochJudge
from tasuki.testing.sim.checker_findings import INVARIANTS, Broken, Findings, Handler, Judge, Violation
from tasuki.testing.sim.checker_jobs import JobJudge
from tasuki.testing.sim.checker_liveness import LivenessJudge
from tasuki.testing.sim.checker_rows import RowJudge
from tasuki.testing.sim.checker_schedules import ScheduleJudge
from tasuki.testing.sim.checker_workers import WorkerJudge
from tasuki.testing.sim.history import AnyLine, HistoryLine, WatchingEvent

__all__ = ["INVARIANTS", "Broken", "Checker", "Violation"]

EVENTS_PER_S_MAX = 1000.0  # of a small world at rest after its faults: ticks, heartbeats and the last jobs are a tenth of this

_KINDS: dict[str, type[HistoryLine]] = {
    history.kind_of(kind.__name__): kind
    for kind in vars(history).values()
    if isinstance(kind, type) and issubclass(kind, HistoryLine)
}


class Checker:
    """`whole`: the observer sees everything, as a simulator does; the same as a first line that is `WatchingEvent` all kinds.
    `raises`: the first violation is raised as `Broken` instead of only being kept."""

    def __init__(self, *, whole: bool = False, raises: bool = False, events_per_s_max: float = EVENTS_PER_S_MAX) -> None:
        self._findings = findings = Findings(raises=raises)
        self._judges: tuple[Judge, ...] = (
            JobJudge(findings),
            RowJudge(findings),
            EpochJudge(findings),
            ClientJudge(findings),
            WorkerJudge(findings),
            ScheduleJudge(findings),
            LivenessJudge(findings, events_per_s_max),
        )
        self._all: dict[type[HistoryLine], list[Handler]] = {}
        for judge in self._judges:
            for kind, handler in judge.handlers().items():
                self._all.setdefault(kind, []).append(handler)
        # Filled as kinds appear: so that to know which have been told costs nothing per line.
        self._active: dict[type[HistoryLine], list[Handler]] = {}
        if whole:
            self._watch(_KINDS)

    @property
    def violations(self) -> list[Violation]:
        return self._findings.violations

    @property
    def evidence(self) -> Counter[str]:
        """For each invariant, on how many facts it was judged; one that is missing was not judged at all."""
        return self._findings.evidence

    def observe(self, line: AnyLine) -> None:
        """The next thing that happened."""
        findings = self._findings
        findings.at = line.at
        findings.line += 1
        handlers = self._active.get(type(line))
        if handlers is None:
            handlers = self._first_of(line)
        for handle in handlers:
            handle(line)

    def _first_of(self, line: AnyLine) -> list[Handler]:
        kind = type(line)
        if isinstance(line, WatchingEvent):
            self._watch(line.kinds)
            return []
        self._findings.told.add(kind)
        return self._active.setdefault(kind, self._all.get(kind, []))

    def _watch(self, kinds: Iterable[str]) -> None:
        self._findings.watched = frozenset(_KINDS[name] for name in kinds)
        self._findings.told |= self._findings.watched

    def end(self) -> None:
        """The history is whole: judge what only its end can show."""
        for judge in self._judges:
            judge.end()

    def check(self, lines: Iterable[AnyLine]) -> Self:
        """All of a history at once."""
        for line in lines:
            self.observe(line)
        self.end()
        return self

    def report(self) -> str:
        """The violations for people, one per line."""
        return "\n".join(map(str, self.violations)) or "no violation"
