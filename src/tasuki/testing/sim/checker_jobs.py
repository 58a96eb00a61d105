"""What the store's commits did to jobs: submits, grants, reports, ends of leases, cancels, requeues. I2 to I6, I12, I14, I16,
I17 and `lease`.

Keeps the facts of each job (`checker_findings.JobFacts`), which the other judges read. One line breaks one invariant here: where
several are broken at once, the most telling one is named. Pure.
"""

from __future__ import annotations

from bisect import bisect_left

from tasuki.core.job import TERMINAL, State
from tasuki.core.lifecycle import TAKEOVER_TIE_S
from tasuki.testing.sim.checker_findings import STORE, Findings, GrantedLease, Handler, JobFacts, Judge
from tasuki.testing.sim.history import (
    AskedEvent,
    BeganEvent,
    CanceledEvent,
    GrantedEvent,
    HistoryLine,
    ReapedEvent,
    RemovedEvent,
    ReportedEvent,
    RequeuedEvent,
    RowEvent,
    ShownEvent,
    SubmittedEvent,
    TookOverEvent,
)

_ENDS = frozenset({ReportedEvent, ReapedEvent, ShownEvent})
"""Whoever tells these tells how every lease ends."""
_STATES = _ENDS | {CanceledEvent, RowEvent}
"""Whoever tells these tells every state."""
EARLY_S = 1e-6  # what rounding may take from the time between two events


class JobJudge(Judge):
    """Follows each job through its commits."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._leases = findings.leases
        self._latest_wall = float("-inf")

    def handlers(self) -> dict[type[HistoryLine], Handler]:
        return {
            SubmittedEvent: self._submitted,
            GrantedEvent: self._granted,
            ShownEvent: self._shown,
            ReportedEvent: self._reported,
            ReapedEvent: self._reaped,
            CanceledEvent: self._canceled,
            RequeuedEvent: self._requeued,
            RemovedEvent: self._removed,
            TookOverEvent: self._took_over,
        }

    # ------------------------------------------------------------------------------------------------ submitters

    def _submitted(self, line: SubmittedEvent) -> None:
        """I2: one job per id, all acks agree, another body is refused, and only another body."""
        if line.refused and line.refused != "CONFLICT":
            return
        job = self.job(line.job_id)
        self.evidence["I2"] += 1
        if line.refused:
            if job.body == line.body:
                self.found("I2", f"{line.job_id} was refused, though its body is the stored one")
            return
        if line.created and job.exists:
            self.found("I2", f"{line.job_id} was created a second time")
        elif job.body is not None and job.body != line.body:
            self.found("I2", f"{line.job_id} has body {job.body}, and a submit with {line.body} was accepted")
        if line.created:
            job.forget()
            job.attempt = job.generation = 0
            job.state = State.PENDING
            job.lease_known = job.counted = True
        job.exists = job.existed = True
        job.body = line.body
        if job.generation is None:
            job.generation = line.generation
        elif line.generation != job.generation:
            self._set_going(job, line.generation)

    def _requeued(self, line: RequeuedEvent) -> None:
        if line.done:
            job = self.job(line.job_id)
            expected = line.generation or (job.generation or 0) + 1
            self._set_going(job, expected)

    def _set_going(self, job: JobFacts, generation: int) -> None:
        """I4: only from a terminal state, one generation more. I16: for each call that asked for it, once at most."""
        self.evidence["I4"] += 1
        job.restarts += 1
        if job.state is not None and job.state not in TERMINAL and self.told >= _STATES:
            self.found("I4", f"{job.job_id} was set going again while it was {job.state}")
        elif (
            job.generation is not None
            and generation != job.generation + 1
            and (RequeuedEvent in self.told or RowEvent in self.told)
        ):
            self.found("I4", f"{job.job_id} went from generation {job.generation} to {generation}")
        elif AskedEvent in self.told:
            self.evidence["I16"] += 1
            if not job.asked_restarts:
                self.found("I4", f"{job.job_id} was set going again, and nobody had asked for it")
            elif job.restarts > job.asked_restarts:
                self.found("I16", f"{job.job_id} was set going {job.restarts} times for {job.asked_restarts} calls")
        job.generation = generation
        job.state = State.PENDING
        job.failures = job.losses = 0
        job.counted = True

    def _canceled(self, line: CanceledEvent) -> None:
        """I14: what a cancel was told is what came of it."""
        if not line.state:
            return
        job = self.job(line.job_id)
        self.evidence["I14"] += 1
        if job.state in TERMINAL and line.state != job.state and RowEvent in self.told:
            self.found("I14", f"{line.job_id} is {job.state}, and a cancel was told {line.state}")
            return
        if line.state in TERMINAL:
            attempt = job.attempt or 0
            job.endings.add((line.state, attempt))
            job.let_go(attempt, job.ends.get(attempt, "canceled"))
        job.state = line.state

    def _removed(self, line: RemovedEvent) -> None:
        """I4: nothing but what is over may go."""
        job = self.job(line.job_id)
        self.evidence["I4"] += 1
        if job.state is not None and job.state not in TERMINAL and self.told >= _STATES:
            self.found("I4", f"{line.job_id} was removed while it was {job.state}")
        job.forget()
        job.removed = job.existed = True

    # ------------------------------------------------------------------------------------------------ leases

    def _granted(self, line: GrantedEvent) -> None:
        """I5: one attempt more, and no other live lease. I4: of a job that is not over. I12: not before its time."""
        job = self.job(line.job_id)
        self.evidence["I5"] += 1
        if line.generation != job.generation:
            job.counted = job.counted and job.generation is None
            job.generation, job.state = line.generation, None
        if job.state in TERMINAL:
            self.found("I4", f"{line.job_id} is {job.state}, and attempt {line.attempt} of it was granted")
        elif job.attempt is not None and line.attempt != job.attempt + 1:
            self.found("I5", f"attempt {line.attempt} of {line.job_id} was granted after attempt {job.attempt}")
        elif job.lease is not None and not job.orphaned and self.told >= _ENDS:
            self.found("I5", f"attempt {line.attempt} of {line.job_id} was granted beside the live {job.lease}")
        elif line.lease_id in self._leases:
            self.found("I5", f"lease {line.lease_id} was given twice, for {line.job_id} the second time")
        self._in_time(line)
        lease = GrantedLease(line.lease_id, line.job_id, line.attempt, line.worker_id, line.incarnation)
        lease.keep = line.on_disconnect == "keep"
        lease.ttl_s = line.ttl_s + line.grace_s if line.ttl_s is not None else None
        lease.since = line.at
        self._leases[line.lease_id] = lease
        job.lease, job.lease_known, job.orphaned = lease, True, False
        job.attempt, job.state = line.attempt, State.ASSIGNED
        job.exists = job.existed = True

    def _in_time(self, line: GrantedEvent) -> None:
        """I12, on the highest that the store's wall clock ever showed; not_after on what it shows."""
        self._latest_wall = max(self._latest_wall, line.wall, line.highest_wall or line.wall)
        if line.not_before is not None:
            self.evidence["I12"] += 1
            if line.not_before > self._latest_wall + EARLY_S:
                early_s = line.not_before - self._latest_wall
                self.found("I12", f"attempt {line.attempt} of {line.job_id} was granted {early_s:g} s before its time")
        if line.not_after is not None:
            self.evidence["I12"] += 1
            if line.not_after < line.wall - EARLY_S:
                late_s = line.wall - line.not_after
                self.found("I12", f"attempt {line.attempt} of {line.job_id} was granted {late_s:g} s after its time")

    def _shown(self, line: ShownEvent) -> None:
        """I17: a lease that was taken for the current one is, and its owner showed it."""
        if not line.held:
            return
        job = self.job(line.job_id)
        lease = self._leases.get(line.lease_id)
        if lease is None:
            if line.verb == "release":
                job.let_go(line.attempt, "released")
            return
        self.evidence["I17"] += 1
        if job.lease is not lease or line.attempt != lease.attempt:
            self.found("I17", f"{line.verb} of {line.job_id} by {line.worker_id} was taken with {lease}, not the current one")
        elif (line.worker_id, line.incarnation) != (lease.worker_id, lease.incarnation):
            self.found("I17", f"{line.verb} of {line.job_id} was taken from {line.worker_id}, which is not the owner of {lease}")
        if line.verb == "release":
            job.let_go(line.attempt, "released")
            job.state = None  # PENDING, or CANCELED if that was asked for: the row tells
            return
        if job.orphaned:
            job.orphaned = False
            job.ends.pop(line.attempt, None)
            job.state, lease.since = State.RUNNING, line.at
        elif line.verb == "start":
            job.state = State.RUNNING
        else:
            lease.since = line.at

    def _reaped(self, line: ReapedEvent) -> None:
        """I5: each lease ends once. I4: terminal absorbs. `lease`: it lasts its time from its latest renewal; the first takeover
        after that is one."""
        job = self.job(line.job_id)
        self.evidence["I5"] += 1
        lease = job.lease
        is_known = GrantedEvent in self.told and job.lease_known
        if is_known and job.state in TERMINAL:
            self.found("I4", f"{line.job_id} is {job.state}, and attempt {line.attempt} of it was reaped to {line.state}")
        elif is_known and (lease is None or job.orphaned or lease.attempt != line.attempt):
            self.found("I5", f"attempt {line.attempt} of {line.job_id} was reaped without a lease; there is {lease}")
        elif line.attempt in job.ends:
            self.found("I5", f"attempt {line.attempt} of {line.job_id} had ended ({job.ends[line.attempt]}), and then was reaped")
        elif lease is not None and lease.ttl_s is not None and STORE not in self.findings.drifted:
            self._lasted(lease, lease.ttl_s)
        if line.state != State.CANCELED:
            job.losses += 1
        if line.state == State.ORPHANED:
            job.ends[line.attempt] = "orphaned"
            job.orphaned = True
        else:
            job.let_go(line.attempt, "reaped")
        job.state = line.state
        if line.state in TERMINAL:
            job.endings.add((line.state, line.attempt))

    def _lasted(self, lease: GrantedLease, ttl_s: float) -> None:
        self.evidence["lease"] += 1
        takeovers = self.findings.takeovers
        first = bisect_left(takeovers, lease.since - TAKEOVER_TIE_S)
        lasted_s = self.findings.at - max([lease.since, *takeovers[first : first + 1]])
        if lasted_s < ttl_s - EARLY_S:
            self.found("lease", f"{lease} of {lease.job_id} was ended {lasted_s:g} s after it was renewed; it lasts {ttl_s:g} s")

    def _took_over(self, line: TookOverEvent) -> None:
        """Every live lease counts as renewed, unless one before did that and its worker has not renewed it since."""
        if line.done:
            self.findings.takeovers.append(line.at)

    # ------------------------------------------------------------------------------------------------ reports

    def _reported(self, line: ReportedEvent) -> None:
        """I3: one per attempt. I6: with the current lease. I17: from its owner. I14: not besides a cancel."""
        if not line.accepted:
            return
        job = self.job(line.job_id)
        self.evidence["I3"] += 1
        if line.attempt in job.reports:
            earlier = job.reports[line.attempt]
            self.found("I3", f"attempt {line.attempt} of {line.job_id} had a {earlier}, and then a {line.verb} was accepted")
        elif line.verb == "finish" and job.state == State.CANCELED and GrantedEvent in self.told:
            self.evidence["I14"] += 1
            self.found("I14", f"{line.job_id} was canceled, and then a finish of attempt {line.attempt} was accepted")
        else:
            self._came_from_the_holder(job, line)
        # Whether it was right or not: this is what the store has from now on, and later lines are compared with it.
        job.reports[line.attempt] = line.verb
        job.let_go(line.attempt, line.verb)
        if line.state:
            job.state = line.state
        if line.state in TERMINAL:
            job.endings.add((line.state, line.attempt))
        if line.verb == "finish":
            job.results.setdefault(line.attempt, set()).add(line.result_sha256)
            if line.state and line.state != State.SUCCEEDED:
                self.found("I14", f"a finish of {line.job_id} was accepted, and it is {line.state}")
        elif line.state == State.SUCCEEDED:
            self.found("I14", f"a failure of {line.job_id} was accepted, and it is {line.state}")
        elif line.state != State.CANCELED:
            job.failures += 1

    def _came_from_the_holder(self, job: JobFacts, line: ReportedEvent) -> None:
        lease = job.lease
        self.evidence["I6"] += 1
        if job.lease_known and GrantedEvent in self.told:
            self.evidence["I17"] += 1
            if lease is None or lease.lease_id != line.lease_id or lease.attempt != line.attempt:
                self.found("I6", f"a {line.verb} of {line.job_id} was accepted for {_shown(line)}; the current one is {lease}")
                return
            if lease.worker_id != line.worker_id:
                self.found("I17", f"a {line.verb} of {line.job_id} was accepted from {line.worker_id}, not the owner of {lease}")
                return
        elif job.ends.get(line.attempt, "orphaned") != "orphaned":
            self.found(
                "I6", f"a {line.verb} of {line.job_id} was accepted for {_shown(line)}, which was {job.ends[line.attempt]} before"
            )
            return
        if line.verb == "finish" and BeganEvent in self.told and line.attempt not in job.began:
            self.found("I6", f"a finish of {line.job_id} was accepted for {_shown(line)}, which never ran")


def _shown(line: ReportedEvent) -> str:
    return f"attempt {line.attempt} under lease {line.lease_id}"
