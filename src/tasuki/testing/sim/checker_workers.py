"""Processes of attempts: who ran what, and for how long. I5, I9, I10, `credit`. Pure."""

from __future__ import annotations

from tasuki.testing.sim.checker_findings import STORE, Findings, Handler, Judge
from tasuki.testing.sim.history import BeganEvent, BusyEvent, DriftedEvent, GoneEvent, GrantedEvent, HistoryLine, ProcessEvent

_ENDS = ("crashed", "exited")
KEEPER = "/keeper"
FOUND_AGAIN = 3  # times what it asks for: other servers may have had as much for it, which is found and delivered besides


class WorkerJudge(Judge):
    """Knows which attempts run where."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._by_job: dict[str, dict[int, BeganEvent]] = {}
        self._by_worker: dict[str, dict[tuple[str, int], BeganEvent]] = {}
        self._lives: dict[str, set[str]] = {}
        """worker → the incarnations that ran something."""
        self._dead: set[str] = set()
        """Processes that ended and did not start again."""
        self._unkept: dict[str, int] = {}
        """worker → the line at which its keeper was killed: what ran then may outlive the worker until it starts again."""
        self._began_at: dict[tuple[str, int], int] = {}

    def handlers(self) -> dict[type[HistoryLine], Handler]:
        return {
            BeganEvent: self._began,
            GoneEvent: self._gone,
            BusyEvent: self._busy,
            ProcessEvent: self._process,
            DriftedEvent: self._drifted,
        }

    def _began(self, line: BeganEvent) -> None:
        job = self.job(line.job_id)
        self.evidence["I5"] += 1
        if line.attempt in job.began:
            self.found("I5", f"attempt {line.attempt} of {line.job_id} ran a second time, at {line.worker_id}")
        elif GrantedEvent in self.told and line.lease_id not in self.findings.leases:
            self.found("I5", f"attempt {line.attempt} of {line.job_id} ran at {line.worker_id}, and was never granted")
        lives = self._lives.setdefault(line.worker_id, set())
        lives.add(line.incarnation)
        if GoneEvent in self.told:
            if job.began:
                self._no_other_runs(line)
            if len(lives) > 1:
                self._earlier_life_is_gone(line)
        job.began.add(line.attempt)
        self._by_job.setdefault(line.job_id, {})[line.attempt] = line
        self._by_worker.setdefault(line.worker_id, {})[line.job_id, line.attempt] = line
        self._began_at[line.job_id, line.attempt] = self.findings.line

    def _no_other_runs(self, line: BeganEvent) -> None:
        """I9: whoever lost its lease has stopped by now. The one with the lower attempt is the one that lost it."""
        self.evidence["I9"] += 1
        for other in self._by_job.get(line.job_id, {}).values():
            older, newer = (line, other) if line.attempt < other.attempt else (other, line)
            if not self._may_go_on(older):
                ran = f"attempt {older.attempt} of {line.job_id} ran at {older.worker_id}"
                self.found("I9", f"{ran} while attempt {newer.attempt} did at {newer.worker_id}")

    def _may_go_on(self, began: BeganEvent) -> bool:
        """It was told to, its clock was wrong, or nobody was left to stop it; or it is not known whether one of these holds."""
        lease = self.findings.leases.get(began.lease_id)
        return (
            lease is None
            or lease.keep
            or began.worker_id in self.findings.drifted
            or STORE in self.findings.drifted
            or self._lost_its_keeper(began)
        )

    def _lost_its_keeper(self, began: BeganEvent) -> bool:
        killed = self._unkept.get(began.worker_id)
        return killed is not None and killed > self._began_at[began.job_id, began.attempt]

    def _earlier_life_is_gone(self, line: BeganEvent) -> None:
        """I10: a worker that starts again sweeps what an earlier life of it left behind, before it takes work."""
        self.evidence["I10"] += 1
        for other in self._by_worker.get(line.worker_id, {}).values():
            if other.incarnation != line.incarnation:
                left = f"attempt {other.attempt} of {other.job_id}"
                self.found("I10", f"{line.worker_id} runs {line.job_id} while {left} of an earlier life of it is not gone")

    def _gone(self, line: GoneEvent) -> None:
        if line.how != "ended":
            self.evidence["I10"] += 1
        self._by_job.get(line.job_id, {}).pop(line.attempt, None)
        self._by_worker.get(line.worker_id, {}).pop((line.job_id, line.attempt), None)

    def _busy(self, line: BusyEvent) -> None:
        self.evidence["credit"] += 1
        if line.attempts > line.capacity:
            self.found("credit", f"{line.worker_id} has {line.attempts} attempts and room for {line.capacity}")
        asked = line.capacity + line.ahead
        if line.attempts + line.waiting > FOUND_AGAIN * asked:
            held = line.attempts + line.waiting
            self.found("credit", f"{line.worker_id} was given {held} attempts and asks for {asked} at a time")

    def _process(self, line: ProcessEvent) -> None:
        if line.what == "started":
            self._dead.discard(line.name)
        elif line.what in _ENDS:
            self._dead.add(line.name)
            if line.name.endswith(KEEPER):
                self._unkept[line.name.removesuffix(KEEPER)] = self.findings.line

    def _drifted(self, line: DriftedEvent) -> None:
        self.findings.drifted.add(line.name)

    def end(self) -> None:
        """I10: what still runs when all is over belongs to a live worker that still holds its lease."""
        if not self.findings.is_over or GoneEvent not in self.told:
            return
        for runs in self._by_job.values():
            for began in runs.values():
                self.evidence["I10"] += 1
                self._may_still_run(began)

    def _may_still_run(self, began: BeganEvent) -> None:
        what = f"attempt {began.attempt} of {began.job_id} still runs at {began.worker_id}"
        if began.worker_id in self._dead:
            if not self._lost_its_keeper(began):
                self.found("I10", f"{what}, which is dead")
            return
        job = self.job(began.job_id)
        if job.lease_known and GrantedEvent in self.told and (job.lease is None or job.lease.lease_id != began.lease_id):
            self.found("I10", f"{what}, and its lease is over; the job is {job.state}")
