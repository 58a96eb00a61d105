"""What is promised to happen once faults have stopped, as far as no other judge has it: rest, without a hot loop. Pure."""

from __future__ import annotations

from tasuki.testing.sim.checker_findings import Findings, Handler, Judge
from tasuki.testing.sim.history import EndedEvent, HealedEvent, HistoryLine


class LivenessJudge(Judge):
    """Knows when the history was healed and when it ended."""

    def __init__(self, findings: Findings, events_per_s_max: float) -> None:
        super().__init__(findings)
        self._events_per_s_max = events_per_s_max

    def handlers(self) -> dict[type[HistoryLine], Handler]:
        return {HealedEvent: self._healed, EndedEvent: self._ended}

    def _healed(self, line: HealedEvent) -> None:
        self.findings.healed_at = line.at

    def _ended(self, line: EndedEvent) -> None:
        self.findings.ended = True
        healed_at = self.findings.healed_at
        if healed_at is None:
            return
        self.evidence["liveness"] += 1
        if not line.quiet:
            self.found("liveness", f"something is still left to do {line.at - healed_at:g} s after the last fault")
        if line.events:
            self.evidence["liveness"] += 1
            # The first second of quiet is counted whole: a short end has its events in a bunch.
            per_s = line.events / max(1.0, line.at - healed_at)
            if per_s > self._events_per_s_max:
                self.found("liveness", f"a hot loop: {line.events} events in {line.at - healed_at:g} s, {per_s:.0f} per second")
