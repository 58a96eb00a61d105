"""What callers were told, against what the store did. I1, I2, I13, I14, I16, and that every call is answered. Pure.

Where the store's commits are told as they happen, an answer is compared with them at once: whoever is told something before it
was committed was told too early. Where only the rows of the end are known, it is compared with those, at the end.
"""

from __future__ import annotations

from tasuki.core.job import TERMINAL, State
from tasuki.testing.sim.checker_findings import Findings, Handler, JobFacts, Judge
from tasuki.testing.sim.history import (
    AnsweredEvent,
    ArrivedEvent,
    AskedEvent,
    CanceledEvent,
    HistoryLine,
    ProcessEvent,
    ReportedEvent,
    RowEvent,
    SettledEvent,
    SubmittedEvent,
)

_SUBMITS = ("submit", "rerun")
_RESTARTS = ("rerun", "requeue")


class ClientJudge(Judge):
    """Follows calls from question to answer."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._open: dict[str, AskedEvent] = {}
        self._bodies: dict[str, str] = {}
        """Of acknowledged jobs whose stored body was not known yet."""
        self._new: set[str] = set()
        self._canceled: list[tuple[str, str]] = []
        self._arrived: list[ArrivedEvent] = []
        self._results: dict[tuple[str, int], str | None] = {}
        self._finished: dict[str, int] = {}
        """lease_id → how often its job had been set going when the finish was accepted."""

    def handlers(self) -> dict[type[HistoryLine], Handler]:
        return {
            AskedEvent: self._asked,
            AnsweredEvent: self._answered,
            ArrivedEvent: self._has_arrived,
            ReportedEvent: self._reported,
            SettledEvent: self._settled,
            ProcessEvent: self._process,
        }

    # ------------------------------------------------------------------------------------------------ calls

    def _asked(self, line: AskedEvent) -> None:
        self._open[line.call] = line
        submits, restarts = line.verb in _SUBMITS, line.verb in _RESTARTS
        if submits or restarts:
            for job_id in line.job_ids:
                job = self.job(job_id)
                job.asked |= submits
                job.asked_restarts += restarts

    def _answered(self, line: AnsweredEvent) -> None:
        asked = self._open.pop(line.call, None)
        if asked is None:
            return
        if line.answer == "unknown":
            # That it was not done twice is judged where it is done: by the ids of submits, and by counting the restarts.
            self.evidence["I16"] += 1
        if asked.verb in _SUBMITS:
            self._acked(asked, line)
        elif asked.verb == "cancel":
            self._cancel_answered(asked, line)

    def _acked(self, asked: AskedEvent, line: AnsweredEvent) -> None:
        """I1: what is acknowledged is stored by then. I2: all acknowledgements agree, and one at most calls it new."""
        bodies = dict(zip(asked.job_ids, asked.bodies, strict=True)) if asked.bodies else {}
        for job_id in line.accepted:
            job = self.job(job_id)
            job.acked = True
            self.evidence["I1"] += 1
            if SubmittedEvent in self.told and not job.existed:
                self.found("I1", f"{line.client} was told that {job_id} is stored, before it was")
            body = bodies.get(job_id)
            if body is not None and not job.removed:
                self.evidence["I2"] += 1
                known = self._bodies.setdefault(job_id, body) if job.body is None else job.body
                if known != body:
                    self.found("I2", f"{job_id} was acknowledged with body {body}; it has {known}")
        for job_id in line.created:
            self.evidence["I2"] += 1
            if job_id in self._new and not self.job(job_id).removed:
                self.found("I2", f"{job_id} was acknowledged as new a second time")
            self._new.add(job_id)

    def _cancel_answered(self, asked: AskedEvent, line: AnsweredEvent) -> None:
        """I14: a caller that is told an end is told the one that it came to."""
        for job_id, state in zip(asked.job_ids, line.states, strict=False):
            if state not in TERMINAL:
                continue
            if CanceledEvent in self.told and RowEvent in self.told:
                self._was_an_ending(job_id, state, "a cancel")
            else:
                self._canceled.append((job_id, state))

    def _was_an_ending(self, job_id: str, state: str, who: str) -> None:
        job = self.job(job_id)
        self.evidence["I14"] += 1
        if job.state != state and all(known != state for known, _ in job.endings):
            self.found("I14", f"{who} was told that {job_id} is {state}; it is {job.state}, and ended as {sorted(job.endings)}")

    def _process(self, line: ProcessEvent) -> None:
        if line.what in ("crashed", "exited"):
            for call in [call for call, asked in self._open.items() if asked.client == line.name]:
                del self._open[call]

    # ------------------------------------------------------------------------------------------------ how jobs ended

    def _has_arrived(self, line: ArrivedEvent) -> None:
        """I13: nobody is told another result than that of the accepted finish, nor sooner. I14: nor another end."""
        job = self.job(line.job_id)
        if line.state == State.SUCCEEDED:
            self.evidence["I13"] += 1
            known = self._results.setdefault((line.job_id, line.attempt), line.result_sha256)
            if known != line.result_sha256 and not job.removed:
                told = f"{known} and {line.result_sha256}"
                self.found("I13", f"clients were told two results of attempt {line.attempt} of {line.job_id}: {told}")
            elif ReportedEvent in self.told and not job.has_result(line.attempt, line.result_sha256):
                known_results = {attempt: sorted(map(str, results)) for attempt, results in job.results.items()}
                told = f"result {line.result_sha256} of attempt {line.attempt} of {line.job_id}"
                self.found("I13", f"{line.client} was told {told}; the finishes so far are {known_results}")
            elif ReportedEvent not in self.told:
                self._arrived.append(line)
        elif RowEvent not in self.told:
            self._arrived.append(line)
        elif (line.state, line.attempt) not in job.endings:
            self.evidence["I14"] += 1
            told = f"{line.job_id} is {line.state} in attempt {line.attempt}"
            self.found("I14", f"{line.client} was told that {told}; it ended as {sorted(job.endings)}")
        else:
            self.evidence["I14"] += 1

    def _reported(self, line: ReportedEvent) -> None:
        if line.accepted and line.verb == "finish" and line.lease_id:
            self._finished[line.lease_id] = self.job(line.job_id).restarts

    def _settled(self, line: SettledEvent) -> None:
        """I14: a worker learns whether its finish was taken."""
        lease = self.findings.leases.get(line.lease_id)
        if lease is None or ReportedEvent not in self.told:
            return
        job = self.job(lease.job_id)
        if job.removed:
            return
        self.evidence["I14"] += 1
        if line.recorded:
            if lease.attempt not in job.reports:
                self.found("I14", f"{line.worker_id} was told that its report on {job.job_id} is recorded; none of {lease} is")
        elif self._finished.get(line.lease_id) == job.restarts:
            # Set going again, a job does not know the reports of its earlier generations any more: those may hear "fenced".
            self.found("I14", f"{line.worker_id} was told that its finish of {job.job_id} was fenced; it had been accepted")

    # ------------------------------------------------------------------------------------------------ when all is over

    def end(self) -> None:
        for job_id, body in self._bodies.items():
            stored = self.job(job_id).body
            if stored not in (None, body):
                self.found("I2", f"{job_id} was acknowledged with body {body}; it has {stored}")
        for job_id, state in self._canceled:
            row = self.job(job_id).row
            if row is not None and row.generation == 0:
                self._was_an_ending(job_id, state, "a cancel")
        for line in self._arrived:
            self._arrived_as_stored(line, self.job(line.job_id))
        if self.findings.is_over and AnsweredEvent in self.told:
            self.evidence["liveness"] += 1
            if self._open:
                first = next(iter(self._open.values()))
                self.found(
                    "liveness", f"{len(self._open)} calls were never answered; the first is {first.verb} of {first.client}"
                )

    def _arrived_as_stored(self, line: ArrivedEvent, job: JobFacts) -> None:
        """I13, I14, where only the last row is known: it says the same, if it is of the same attempt."""
        row = job.row
        if row is None or row.attempt != line.attempt:
            return
        told = f"{line.client} was told that {line.job_id} is {line.state} with {line.result_sha256}"
        if line.state == State.SUCCEEDED == row.state:
            self.evidence["I13"] += 1
            if row.result_sha256 != line.result_sha256:
                self.found("I13", f"{told}; it has {row.result_sha256}")
        elif row.generation == (line.generation or 0):
            self.evidence["I14"] += 1
            if row.state != line.state:
                self.found("I14", f"{told}; it is {row.state}")
