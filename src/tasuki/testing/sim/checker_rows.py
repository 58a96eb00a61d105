"""What the store's commits left in the rows, and what must be there when all is over. I1, I2, I4, I5, I8, I11, I13, I14.

A row is compared with the row before it, and with what the commits in between said that they did. Pure.
"""

from __future__ import annotations

from tasuki.core.job import LEASED, READY, TERMINAL, State
from tasuki.testing.sim.checker_findings import Findings, Handler, JobFacts, Judge
from tasuki.testing.sim.history import (
    AskedEvent,
    GrantedEvent,
    HistoryLine,
    ReapedEvent,
    ReportedEvent,
    RequeuedEvent,
    RowEvent,
    ShownEvent,
    SubmittedEvent,
    TookOverEvent,
)

_DEAD = frozenset({State.FAILED, State.TIMED_OUT})
"""What a job becomes whose budgets are used up, by one failure or loss more than they allow."""


class RowJudge(Judge):
    """Looks at every row."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._at_end: set[str] | None = None

    def handlers(self) -> dict[type[HistoryLine], Handler]:
        return {RowEvent: self._row}

    def _row(self, line: RowEvent) -> None:
        job = self.job(line.job_id)
        self._identity(job, line)
        self._generation(job, line)
        self._attempt(job, line)
        self._budgets(job, line)
        self._result(job, line)
        self._cancel(line)
        if line.at_end:
            if self._at_end is None:
                self._at_end = set()
            self._at_end.add(line.job_id)
        if line.state in TERMINAL:
            job.endings.add((line.state, line.attempt))
        if line.lease_id is None:
            job.lease, job.orphaned = None, False
        job.exists = job.existed = True
        job.attempt, job.generation, job.state = line.attempt, line.generation, line.state
        job.row = line

    def _identity(self, job: JobFacts, line: RowEvent) -> None:
        """I2: the body of a job never changes. I8: nor do leader writes on it go back to an older epoch. I17: nor go beyond."""
        if line.body:
            self.evidence["I2"] += 1
            if job.body is not None and job.body != line.body:
                self.found("I2", f"{line.job_id} was submitted with body {job.body} and has {line.body}")
            job.body = line.body
        if line.leader_epoch:
            self._epoch(line.job_id, line.leader_epoch, 0 if job.row is None else job.row.leader_epoch)

    def _epoch(self, job_id: str, epoch: int, before: int) -> None:
        if before:
            self.evidence["I8"] += 1
            if epoch < before:
                self.found("I8", f"{job_id} was written under epoch {epoch} after {before}")
        if TookOverEvent in self.told:
            self.evidence["I17"] += 1
            if epoch > self.findings.registered:
                self.found(
                    "I17", f"{job_id} was written under epoch {epoch}; {self.findings.registered} is the latest registered"
                )

    def _generation(self, job: JobFacts, line: RowEvent) -> None:
        """I4: terminal absorbs; only a new generation that was asked for leaves it, with both budgets whole."""
        if job.generation is None:
            return
        self.evidence["I4"] += 1
        if line.generation < job.generation:
            self.found("I4", f"{line.job_id} went back from generation {job.generation} to {line.generation}")
        elif line.generation == job.generation:
            if job.state in TERMINAL and line.state != job.state:
                both = {job.state, line.state}
                invariant = "I14" if both == {State.CANCELED, State.SUCCEEDED} else "I4"
                self.found(invariant, f"{line.job_id} was {job.state} and is {line.state}, in the same generation")
        elif RequeuedEvent in self.told and SubmittedEvent in self.told:
            # Whatever was told of it has moved job.generation already.
            self.found("I4", f"{line.job_id} is in generation {line.generation}, and nothing was told beyond {job.generation}")
        elif AskedEvent in self.told and line.generation - job.generation > job.asked_restarts:
            self.found("I4", f"{line.job_id} is in generation {line.generation}, asked for {job.asked_restarts} times")
        if line.generation != job.generation:
            job.counted = False  # it was set going without a word: what was counted is of another generation
        before = job.row
        if before is not None and before.generation < line.generation and before.attempt == line.attempt:
            self.evidence["I4"] += 1
            if line.failures or line.losses:
                spent = f"{line.failures} failures and {line.losses} losses"
                self.found("I4", f"{line.job_id} was set going again with {spent} on its budgets")

    def _attempt(self, job: JobFacts, line: RowEvent) -> None:
        """I5: as many attempts as grants; a lease while somebody holds it, and only then."""
        self.evidence["I5"] += 1
        if job.attempt is not None and line.attempt != job.attempt:
            if line.attempt < job.attempt:
                self.found("I5", f"{line.job_id} went back from attempt {job.attempt} to {line.attempt}")
            elif GrantedEvent in self.told:
                self.found("I5", f"{line.job_id} is at attempt {line.attempt}, and was granted {job.attempt} times")
        is_held = line.state in LEASED or line.state == State.ORPHANED
        if is_held != (line.lease_id is not None):
            self.found("I5", f"{line.job_id} is {line.state} with lease {line.lease_id}")
        elif (
            job.lease_known
            and is_held
            and GrantedEvent in self.told
            and (job.lease is None or job.lease.lease_id != line.lease_id)
        ):
            self.found("I5", f"{line.job_id} has lease {line.lease_id}, and the current one is {job.lease}")

    def _budgets(self, job: JobFacts, line: RowEvent) -> None:
        """I11: as many failures and losses as there were, within the budgets; more of them end the job, with a reason."""
        self.evidence["I11"] += 1
        over = max(line.failures - line.max_retries, line.losses - line.max_losses)
        if over > (line.state in _DEAD):
            self.found("I11", f"{line.job_id} is {line.state} after {_spent(line)}")
        elif job.counted and ReportedEvent in self.told and line.failures != job.failures:
            self.found("I11", f"{line.job_id} has {_spent(line)}, and {job.failures} failures were reported")
        elif job.counted and ReapedEvent in self.told and line.losses != job.losses:
            self.found("I11", f"{line.job_id} has {_spent(line)}, and {job.losses} attempts were lost")
        elif line.state in _DEAD and not line.error_code:
            self.found("I11", f"{line.job_id} is {line.state} without a reason")

    def _result(self, job: JobFacts, line: RowEvent) -> None:
        """I13: the result of the accepted finish, and none before it."""
        if line.state == State.SUCCEEDED and line.attempt in job.results:
            self.evidence["I13"] += 1
            if not job.has_result(line.attempt, line.result_sha256):
                self.found("I13", f"{line.job_id} has result {line.result_sha256}, its finish {job.results[line.attempt]}")
        elif line.state in LEASED:
            self.evidence["I13"] += 1
            if line.result_sha256 is not None:
                self.found("I13", f"{line.job_id} is {line.state} and has a result")
        if line.state == State.SUCCEEDED and ReportedEvent in self.told:
            self.evidence["I6"] += 1
            if job.reports.get(line.attempt) != "finish":
                self.found("I6", f"{line.job_id} succeeded without a finish of attempt {line.attempt}")

    def _cancel(self, line: RowEvent) -> None:
        """I14: what somebody was told is being canceled is not tried again."""
        if line.cancel_requested:
            self.evidence["I14"] += 1
            if line.state in READY:
                self.found("I14", f"{line.job_id} was to be canceled, and is {line.state}")

    # ------------------------------------------------------------------------------------------------ when all is over

    def end(self) -> None:
        tells_ends = self.findings.watched.issuperset((ReportedEvent, ReapedEvent, ShownEvent)) and GrantedEvent not in self.told
        for job in self.findings.jobs.values():
            exists = job.exists if self._at_end is None else job.job_id in self._at_end
            self._kept(job, exists=exists)
            if exists:
                self._wanted(job)
                if tells_ends and job.row is not None:
                    self._each_attempt_ended(job, job.row)

    def _kept(self, job: JobFacts, *, exists: bool) -> None:
        """I1: what was acknowledged is there, and over once there were no more faults. What was not acknowledged as well."""
        if not job.acked and not exists:
            return
        if job.acked and (self._at_end is not None or SubmittedEvent in self.told or RowEvent in self.told) and not job.removed:
            self.evidence["I1"] += 1
            if not exists:
                self.found("I1", f"{job.job_id} was acknowledged, and is not there")
                return
        if self.findings.is_over and exists and job.row is not None:
            invariant = "I1" if job.acked else "liveness"
            self.evidence[invariant] += 1
            if job.row.state not in TERMINAL:
                self.found(invariant, f"{job.job_id} is still {job.row.state} at the end")

    def _wanted(self, job: JobFacts) -> None:
        """I2: there is no job that nobody asked for."""
        if AskedEvent in self.told:
            self.evidence["I2"] += 1
            if not job.asked:
                self.found("I2", f"{job.job_id} exists, and nobody submitted it")

    def _each_attempt_ended(self, job: JobFacts, row: RowEvent) -> None:
        """I5, where grants are not told: each attempt but the latest has its end, and there are no others."""
        self.evidence["I5"] += 1
        missing = [attempt for attempt in range(1, row.attempt) if attempt not in job.ends]
        if missing:
            self.found("I5", f"{job.job_id} is at attempt {row.attempt}, and nothing ended {missing}")
        beyond = max(job.ends.keys() | job.began, default=0)
        if beyond > row.attempt:
            self.found("I5", f"{job.job_id} is at attempt {row.attempt}, and attempt {beyond} was never granted")


def _spent(line: RowEvent) -> str:
    return f"{line.failures} failures of {line.max_retries}, {line.losses} losses of {line.max_losses}"
