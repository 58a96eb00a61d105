"""Runs of definitions. I15: one for each nominal time that was due, and never two. Pure."""

from __future__ import annotations

from tasuki.testing.sim.checker_findings import Findings, Handler, Judge
from tasuki.testing.sim.history import DueEvent, FiredEvent, HistoryLine


class ScheduleJudge(Judge):
    """Compares what was due with what was fired."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._fired: dict[tuple[str, float], str] = {}
        self._due: set[tuple[str, float]] = set()

    def handlers(self) -> dict[type[HistoryLine], Handler]:
        return {DueEvent: self._is_due, FiredEvent: self._was_fired}

    def _is_due(self, line: DueEvent) -> None:
        self._due.add((line.definition, line.nominal))

    def _was_fired(self, line: FiredEvent) -> None:
        """At most one. A schedule is also who asked for the job."""
        self.job(line.job_id).asked = True
        self.evidence["I15"] += 1
        first = self._fired.setdefault((line.definition, line.nominal), line.job_id)
        if first != line.job_id:
            self.found("I15", f"{line.definition} ran twice for {line.nominal:.0f}: as {first} and as {line.job_id}")

    def end(self) -> None:
        """None is missed. What was due a moment before the end of a history that was cut off may still come."""
        if not self.findings.is_over:
            return
        for definition, nominal in sorted(self._due):
            self.evidence["I15"] += 1
            if (definition, nominal) not in self._fired:
                self.found("I15", f"{definition} never ran for {nominal:.0f}")
