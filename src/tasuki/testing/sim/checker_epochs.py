"""Who led, and what was written under which epoch. I7, I8, I17, and that there is one leader in the end. Pure."""

from __future__ import annotations

from tasuki.testing.sim.checker_findings import Findings, Handler, Judge
from tasuki.testing.sim.history import HistoryLine, LeadingEvent, LedEvent, ProcessEvent, ReapedEvent, TookOverEvent


class EpochJudge(Judge):
    """Follows epochs in the order of commits, and what servers believe of themselves."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._holders: dict[int, str] = {}
        self._led_by: dict[int, str] = {}
        self._leaders: dict[str, int] = {}
        self._written = 0
        """The highest epoch that a duty was written under."""

    def handlers(self) -> dict[type[HistoryLine], Handler]:
        return {
            TookOverEvent: self._took_over,
            LedEvent: self._led,
            ReapedEvent: self._reaped,
            LeadingEvent: self._leading,
            ProcessEvent: self._process,
        }

    def _took_over(self, line: TookOverEvent) -> None:
        """I7: epochs strictly rise."""
        if not line.done:
            return
        self.evidence["I7"] += 1
        if line.epoch <= self.findings.registered:
            self.found("I7", f"{line.server_id} registered epoch {line.epoch} after {self.findings.registered}")
        self._holders.setdefault(line.epoch, line.server_id)
        self.findings.registered = max(self.findings.registered, line.epoch)

    def _led(self, line: LedEvent) -> None:
        """I8: never under an older epoch than the one registered last. I17: by its holder."""
        if not line.done:
            return
        self._write(line.epoch, line.server_id)
        holder = self._holders.get(line.epoch)
        if holder is not None:
            self.evidence["I17"] += 1
            if holder != line.server_id:
                self.found("I17", f"{line.server_id} wrote under epoch {line.epoch}, which is {holder}'s")
        elif TookOverEvent in self.told and line.epoch >= self.findings.registered:
            self.found("I17", f"{line.server_id} wrote under epoch {line.epoch}, which nobody registered")

    def _reaped(self, line: ReapedEvent) -> None:
        if line.epoch:
            self._write(line.epoch, "a reaper")

    def _write(self, epoch: int, who: str) -> None:
        self.evidence["I8"] += 1
        latest = max(self._written, self.findings.registered)
        if epoch < latest:
            self.found("I8", f"{who} wrote under epoch {epoch} after epoch {latest}")
        self._written = max(self._written, epoch)

    def _leading(self, line: LeadingEvent) -> None:
        """I7: each epoch has one holder, once."""
        if not line.epoch:
            self._leaders.pop(line.server_id, None)
            return
        self._leaders[line.server_id] = line.epoch
        self.evidence["I7"] += 1
        if line.epoch in self._led_by:
            self.found("I7", f"{line.server_id} leads under epoch {line.epoch}, as {self._led_by[line.epoch]} did before")
            return
        self._led_by[line.epoch] = line.server_id
        holder = self._holders.get(line.epoch, line.server_id)
        if holder != line.server_id:
            self.found("I7", f"{line.server_id} leads under epoch {line.epoch}, which is {holder}'s")

    def _process(self, line: ProcessEvent) -> None:
        if line.what in ("crashed", "exited"):
            self._leaders.pop(line.name, None)

    def end(self) -> None:
        """I7: nobody led under an epoch that was never registered. Liveness: one leader, of the latest epoch."""
        if TookOverEvent in self.told and self._led_by:
            self.evidence["I7"] += 1
            highest = max(self._led_by)
            if highest > self.findings.registered:
                registered = self.findings.registered
                self.found("I7", f"{self._led_by[highest]} led under epoch {highest}, and {registered} is the latest registered")
        if self.findings.is_over and LeadingEvent in self.told:
            self.evidence["liveness"] += 1
            if len(self._leaders) != 1:
                self.found("liveness", f"{len(self._leaders)} servers lead at the end: {self._leaders}")
            elif TookOverEvent in self.told and self.findings.registered not in self._leaders.values():
                self.found("liveness", f"{self._leaders} lead at the end, and {self.findings.registered} is the latest epoch")
