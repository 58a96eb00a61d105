"""Findings of a check, the facts that its judges share, and the judges of the store's commits and rows. Pure.

`JobJudge` and `RowJudge` keep the facts about jobs and leases up to date; the judges in `checker.py` read them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from tasuki.core.job import DEAD, LEASED, READY, TERMINAL, State
from tasuki.core.lifecycle import TAKEOVER_TIE_S
from tasuki.core.subject import matches
from tasuki.testing.sim import history

# Without I22: what a token may do is judged by the tests of the doors with hostile peers.
INVARIANTS = (*(f"I{n}" for n in range(1, 22)), "I23", "lease", "credit", "liveness")
"""The invariants of docs/invariants.md; `lease`: none ends before its time; `credit`: no worker gets more than it asks for, or
other jobs."""

STORE = "store"
"""The name of the store in lines about a wrong clock."""

Handler = Callable[[Any], None]


class Violation(msgspec.Struct, frozen=True):
    """One broken invariant: when, in which line (from 0), and how."""

    invariant: str
    message: str
    at: float = 0.0
    line: int = 0

    def __str__(self) -> str:
        return f"{self.invariant}: {self.message} (line {self.line}, at {self.at:g})"


class ViolationFound(AssertionError):
    """Raised for the first violation, where that was asked for."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(str(violation))
        self.violation = violation


class GrantedLease(msgspec.Struct, eq=False):
    """The right to one attempt, as it was granted."""

    lease_id: str
    job_id: str
    attempt: int
    worker_id: str
    incarnation: str
    owner: str
    keep: bool = False
    grace_s: float = 0.0
    ttl_s: float | None = None
    """The time until it is over, with the grace."""
    renew_s: float = 0.0
    """The time after which its worker renews it."""
    since: float = 0.0
    """The time of the grant, or of the last renewal."""
    fetched: bool = True
    """The worker may have the lease, which was not assigned ahead, or was fetched."""
    confirming_until: float = 0.0
    """The time until which its worker asks whether it may go on."""
    promised_until: float = 0.0
    """The time until which its attempt may run, as a leader said that could not reach the store."""

    def __str__(self) -> str:
        return f"lease {self.lease_id} (attempt {self.attempt}, {self.worker_id})"


class JobFacts:
    """The facts known of one job. None: not known."""

    __slots__ = (
        "acked", "asked", "asked_restarts", "attempt", "began", "body", "counted", "endings", "ends", "existed", "exists",
        "failures", "generation", "given", "job_id", "lease", "lease_known", "losses", "orphaned", "removed", "reports",
        "restarts", "results", "retry_at", "row", "state",
    )  # fmt: skip

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.endings: set[tuple[str, int]] = set()
        """(state, attempt) of each of its ends."""
        self.results: dict[int, set[str | None]] = {}
        """attempt → sha256 of its accepted finish; empty if not known."""
        self.removed = False
        """The job was removed at least once."""
        self.existed = False
        self.acked = False
        """A client was told that the job is stored."""
        self.asked = False
        """A client or a schedule asked for the job."""
        self.asked_restarts = 0
        self.restarts = 0
        self.forget()

    def forget(self) -> None:
        """Forget the facts of one life of the job, which is not there any more. Answers to clients about earlier lives stay."""
        self.exists = False
        self.body: str | None = None
        self.attempt: int | None = None
        self.generation: int | None = None
        self.state: str | None = None
        self.lease: GrantedLease | None = None
        self.lease_known = False
        """`lease` is the current one, or there is none."""
        self.orphaned = False
        """The lease is over, and yet counts until another is granted."""
        self.reports: dict[int, str] = {}
        """attempt → the verb of its accepted report."""
        self.ends: dict[int, str] = {}
        """attempt → the way in which it ended."""
        self.began: set[int] = set()
        self.given = False
        """A worker got an attempt; what was assigned ahead and not fetched does not count."""
        self.counted = False
        """Failures and losses of this generation are known from its first moment."""
        self.failures = self.losses = 0
        self.retry_at: float | None = None
        """The earliest time of the next attempt, by the report of the last one."""
        self.row: history.RowEvent | None = None

    def has_result(self, attempt: int, sha256: str | None) -> bool:
        """Return whether this may be the result of that attempt."""
        results = self.results.get(attempt, ())
        return sha256 in results or "" in results

    def let_go(self, attempt: int, how: str) -> None:
        """Note that no lease is current any more."""
        self.ends[attempt] = how
        self.lease, self.lease_known, self.orphaned = None, True, False


class Findings:
    """Violations, evidence, and the facts that judges share."""

    def __init__(self, *, raises: bool) -> None:
        self.violations: list[Violation] = []
        self.evidence: Counter[str] = Counter()
        self.raises = raises
        self.told: set[type[history.HistoryLine]] = set()
        """Kinds of which no line is missing."""
        self.watched: frozenset[type[history.HistoryLine]] = frozenset()
        """Kinds of which no line was missing from the start."""
        self.at = 0.0
        self.line = -1
        self.healed_at: float | None = None
        self.ended = False
        self.jobs: dict[str, JobFacts] = {}
        self.leases: dict[str, GrantedLease] = {}
        self.drifted: set[str] = set()
        self.takeovers: list[float] = []
        """Times of the takeovers, in order."""
        self.registered = 0
        """The highest epoch that a server took over."""
        self.others_of: dict[str, list[str]] = {}
        """run → all runs of its definition, if they must not overlap."""

    def found(self, invariant: str, message: str) -> None:
        violation = Violation(invariant, message, self.at, self.line)
        self.violations.append(violation)
        if self.raises:
            raise ViolationFound(violation)

    def job(self, job_id: str) -> JobFacts:
        facts = self.jobs.get(job_id)
        if facts is None:
            facts = self.jobs[job_id] = JobFacts(job_id)
            facts.counted = self.watched.issuperset((history.ReportedEvent, history.ReapedEvent))
        return facts

    @property
    def is_over(self) -> bool:
        """Faults had stopped, and the system had its time to end everything."""
        return self.healed_at is not None and self.ended


class Judge:
    """Base of the judges. `handlers` maps the kinds of line that a judge looks at; `end` judges what only the end can show."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.evidence = findings.evidence
        self.found = findings.found
        self.told = findings.told
        self.job = findings.job

    def handlers(self) -> dict[type[history.HistoryLine], Handler]:
        raise NotImplementedError

    def end(self) -> None:
        """Judge nothing, unless a subclass says otherwise."""


# ---------------------------------------------------------------------------------------------------- the store's commits

_ENDS = frozenset({history.ReportedEvent, history.ReapedEvent, history.ShownEvent})
"""Kinds that together tell how every lease ends."""
_STATES = _ENDS | {history.CanceledEvent, history.RowEvent}
"""Kinds that together tell every state."""
RENEWALS = 3.0  # in each ttl
EARLY_S = 1e-6  # what rounding may take from the time between two events


class JobJudge(Judge):
    """Judge of the store's commits: submits, grants, reports, ends of leases, cancels, requeues."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._leases = findings.leases
        self._latest_wall = float("-inf")
        self._paused: dict[str, None] = {}
        """Patterns that are paused."""
        self._led: list[tuple[float, float]] = []
        """Time and duration of the last two writes by turns of leaders."""

    def handlers(self) -> dict[type[history.HistoryLine], Handler]:
        return {
            history.SubmittedEvent: self._submitted,
            history.GrantedEvent: self._granted,
            history.PausedEvent: self._pause,
            history.ShownEvent: self._shown,
            history.ReportedEvent: self._reported,
            history.ReapedEvent: self._reaped,
            history.CanceledEvent: self._canceled,
            history.RequeuedEvent: self._requeued,
            history.RemovedEvent: self._removed,
            history.TookOverEvent: self._took_over,
            history.LedEvent: self._wrote,
            history.FetchedEvent: self._was_fetched,
            history.WithdrawnEvent: self._withdrawn,
            history.ConfirmedEvent: self._promised,
        }

    # ------------------------------------------------------------------------------------------------ submitters

    def _submitted(self, line: history.SubmittedEvent) -> None:
        """Judge I2: one job per id, all acknowledgements agree, another body is refused, and only another body."""
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

    def _requeued(self, line: history.RequeuedEvent) -> None:
        if line.done:
            job = self.job(line.job_id)
            expected = line.generation or (job.generation or 0) + 1
            self._set_going(job, expected)

    def _set_going(self, job: JobFacts, generation: int) -> None:
        """Judge I4: only from a terminal state, one generation more. I16: once at most for each call that asked for it."""
        self.evidence["I4"] += 1
        job.restarts += 1
        if job.state is not None and job.state not in TERMINAL and self.told >= _STATES:
            self.found("I4", f"{job.job_id} was set going again while it was {job.state}")
        elif (
            job.generation is not None
            and generation != job.generation + 1
            and (history.RequeuedEvent in self.told or history.RowEvent in self.told)
        ):
            self.found("I4", f"{job.job_id} went from generation {job.generation} to {generation}")
        elif history.AskedEvent in self.told:
            self.evidence["I16"] += 1
            if not job.asked_restarts:
                self.found("I4", f"{job.job_id} was set going again, and nobody had asked for it")
            elif job.restarts > job.asked_restarts:
                self.found("I16", f"{job.job_id} was set going {job.restarts} times for {job.asked_restarts} calls")
        job.generation = generation
        job.state = State.PENDING
        job.failures = job.losses = 0
        job.retry_at = None
        job.counted = True

    def _canceled(self, line: history.CanceledEvent) -> None:
        """Judge I14: a cancel is told what came of it."""
        if not line.state:
            return
        job = self.job(line.job_id)
        self.evidence["I14"] += 1
        if job.state in TERMINAL and line.state != job.state and history.RowEvent in self.told:
            self.found("I14", f"{line.job_id} is {job.state}, and a cancel was told {line.state}")
            return
        if line.state in TERMINAL:
            attempt = job.attempt or 0
            job.endings.add((line.state, attempt))
            job.let_go(attempt, job.ends.get(attempt, "canceled"))
        job.state = line.state

    def _removed(self, line: history.RemovedEvent) -> None:
        """Judge I4: only terminal jobs are removed."""
        job = self.job(line.job_id)
        self.evidence["I4"] += 1
        if job.state is not None and job.state not in TERMINAL and self.told >= _STATES:
            self.found("I4", f"{line.job_id} was removed while it was {job.state}")
        job.forget()
        job.removed = job.existed = True

    # ------------------------------------------------------------------------------------------------ leases

    def _granted(self, line: history.GrantedEvent) -> None:
        """Judge I5: one attempt more, and no other live lease. I4: of a job that is not over. I12: not before its time.
        I23: not of a subject that is paused. Credit: for what the worker asked for, and to the one that its subject names."""
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
        if self._paused and line.subject:
            self.evidence["I23"] += 1
            if (pattern := next((one for one in self._paused if matches(one, line.subject)), None)) is not None:
                self.found("I23", f"{line.job_id} of {line.subject} was granted while {pattern} was paused")
        before, named, only = line.subject.rpartition("@")
        if named and before[-1:] in ("", "."):
            self.evidence["credit"] += 1
            if only != line.worker_id:
                self.found("credit", f"{line.job_id} of {line.subject} was granted to {line.worker_id}")
        if not line.offered:
            self.found("credit", f"{line.worker_id} was given {line.job_id}, and does not offer its program")
        if not line.ahead:
            self._in_time(line, job.retry_at)
            job.retry_at, job.given = None, True
        lease = GrantedLease(line.lease_id, line.job_id, line.attempt, line.worker_id, line.incarnation, line.owner)
        lease.keep, lease.fetched = line.on_disconnect == "keep", not line.ahead
        lease.ttl_s = line.ttl_s + line.grace_s if line.ttl_s is not None else None
        lease.renew_s = line.ttl_s / RENEWALS if line.ttl_s is not None else 0.0
        lease.since, lease.grace_s = line.at, line.grace_s
        self._leases[line.lease_id] = lease
        job.lease, job.lease_known, job.orphaned = lease, True, False
        job.attempt, job.state = line.attempt, State.ASSIGNED
        job.exists = job.existed = True

    def _pause(self, line: history.PausedEvent) -> None:
        self._paused.pop(line.pattern, None)
        if line.paused:
            self._paused[line.pattern] = None

    def _was_fetched(self, line: history.FetchedEvent) -> None:
        """Judge I12: a run that was assigned ahead is given to its worker at its time. I5: and it is the worker's still."""
        job, lease = self.job(line.job_id), self._leases.get(line.lease_id)
        if lease is None:
            return
        self.evidence["I12"] += 1
        self._latest_wall = max(self._latest_wall, line.wall, line.highest_wall)
        if line.not_before is not None and line.not_before > self._latest_wall + EARLY_S:
            early_s = line.not_before - self._latest_wall
            self.found("I12", f"attempt {line.attempt} of {line.job_id} was given to its worker {early_s:g} s before its time")
        if job.lease is not lease:
            self.found("I5", f"{line.job_id} was given to the worker of {lease}, and {job.lease} is the current one")
        if not job.asked:
            self.found("I15", f"{line.job_id} was given to its worker, and its definition was not fired for its time")
        lease.fetched, lease.since, lease.ttl_s = True, line.at, line.ttl_s
        lease.renew_s = line.ttl_s / RENEWALS if line.ttl_s is not None else 0.0
        job.given = True

    def _withdrawn(self, line: history.WithdrawnEvent) -> None:
        """Judge I15: a run is withdrawn only before its time."""
        job = self.job(line.job_id)
        self.evidence["I15"] += 1
        if job.asked and not job.removed:
            self.found("I15", f"{line.job_id} was withdrawn after its definition was fired for its time")
        job.forget()

    def _in_time(self, line: history.GrantedEvent, retry_at: float | None) -> None:
        """Judge I12, by the highest value of the store's wall clock so far; not_after by its current value."""
        self._latest_wall = max(self._latest_wall, line.wall, line.highest_wall or line.wall)
        not_before = max(line.not_before or 0.0, retry_at or 0.0)
        if not_before:
            self.evidence["I12"] += 1
            if not_before > self._latest_wall + EARLY_S:
                early_s = not_before - self._latest_wall
                self.found("I12", f"attempt {line.attempt} of {line.job_id} was granted {early_s:g} s before its time")
        if line.not_after is not None:
            self.evidence["I12"] += 1
            if line.not_after < line.wall - EARLY_S:
                late_s = line.wall - line.not_after
                self.found("I12", f"attempt {line.attempt} of {line.job_id} was granted {late_s:g} s after its time")

    def _shown(self, line: history.ShownEvent) -> None:
        """Judge I17: a lease that was taken for the current one is, and its owner showed it."""
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
        elif (line.worker_id, line.incarnation, line.owner) != (lease.worker_id, lease.incarnation, lease.owner):
            self.found("I17", f"{line.verb} of {line.job_id} was taken from {line.worker_id}, which is not the owner of {lease}")
        if line.verb == "release":
            job.let_go(line.attempt, "released")
            job.state = None  # PENDING, or CANCELED if that was asked for: the row tells
            return
        if line.ttl_s is not None and (line.verb == "renew" or job.orphaned):
            lease.ttl_s = line.ttl_s + lease.grace_s
        if job.orphaned:
            job.orphaned = False
            job.ends.pop(line.attempt, None)
            job.state, lease.since = State.RUNNING, line.at
        elif line.verb == "start":
            job.state = State.RUNNING
        else:
            lease.since = line.at
        if line.confirm_s is not None:
            self.evidence["I21"] += 1
            lease.confirming_until = line.at + line.confirm_s if line.confirm_s else 0.0

    def _promised(self, line: history.ConfirmedEvent) -> None:
        """Judge I21: what a leader says may go on has not been ended; nor is it, before its time (`_reaped`)."""
        job = self.job(line.job_id)
        self.evidence["I21"] += 1
        if job.ends.get(line.attempt) in ("reaped", "orphaned"):
            self.found("I21", f"attempt {line.attempt} of {line.job_id} was ended, and then a leader said that it goes on")
        elif (lease := self._leases.get(line.lease_id)) is not None:
            lease.promised_until = line.at + line.for_s

    def _reaped(self, line: history.ReapedEvent) -> None:
        """Judge I5: each lease ends once. I4: terminal absorbs. `lease`: it lasts its time from its latest renewal; the first
        takeover after that is one. I21: nor does it end before the worker that asks whether it may go on has heard.
        """
        job = self.job(line.job_id)
        self.evidence["I5"] += 1
        lease = job.lease
        is_known = history.GrantedEvent in self.told and job.lease_known
        if is_known and job.state in TERMINAL:
            self.found("I4", f"{line.job_id} is {job.state}, and attempt {line.attempt} of it was reaped to {line.state}")
        elif is_known and (lease is None or job.orphaned or lease.attempt != line.attempt):
            self.found("I5", f"attempt {line.attempt} of {line.job_id} was reaped without a lease; there is {lease}")
        elif line.attempt in job.ends:
            self.found("I5", f"attempt {line.attempt} of {line.job_id} had ended ({job.ends[line.attempt]}), and then was reaped")
        elif lease is not None and lease.ttl_s is not None and STORE not in self.findings.drifted:
            self._lasted(lease, lease.ttl_s)
            if self.findings.at < lease.confirming_until - EARLY_S:
                left_s = lease.confirming_until - self.findings.at
                self.found("I21", f"{lease} of {lease.job_id} was ended {left_s:g} s before its worker has to have heard")
            if self.findings.at < lease.promised_until - EARLY_S and lease.worker_id not in self.findings.drifted:
                left_s = lease.promised_until - self.findings.at
                self.found("I21", f"{lease} of {lease.job_id} was ended {left_s:g} s before the time that a leader gave it")
            if line.epoch:
                self._was_renewable(lease)
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
        lasted_s = self.findings.at - self._renewed_at(lease)
        if lasted_s < ttl_s - EARLY_S:
            self.found("lease", f"{lease} of {lease.job_id} was ended {lasted_s:g} s after it was renewed; it lasts {ttl_s:g} s")

    def _renewed_at(self, lease: GrantedLease) -> float:
        takeovers = self.findings.takeovers
        first = bisect_left(takeovers, lease.since - TAKEOVER_TIE_S)
        return max([lease.since, *takeovers[first : first + 1]])

    def _took_over(self, line: history.TookOverEvent) -> None:
        """Count every live lease as renewed, unless an earlier takeover did that and its worker has not renewed it since."""
        if line.done:
            self.findings.takeovers.append(line.at)
            self._led = [*self._led[-1:], (line.at, 0.0)]

    def _wrote(self, line: history.LedEvent) -> None:
        if line.done:
            self._led = [*self._led[-1:], (line.at, line.waited_s)]

    def _was_renewable(self, lease: GrantedLease) -> None:
        """Judge `lease`: its leader has seen the store take turns since the worker was to renew it: before, nobody could."""
        if len(self._led) < 2 or history.LedEvent not in self.told:
            return
        (before, _), (at, waited_s) = self._led
        if before + waited_s < self._renewed_at(lease) + lease.renew_s - EARLY_S:
            self.found(
                "lease",
                f"{lease} of {lease.job_id} was ended by a leader that had written nothing for {at - before:g} s, "
                "in which nobody could renew it",
            )

    # ------------------------------------------------------------------------------------------------ reports

    def _reported(self, line: history.ReportedEvent) -> None:
        """Judge I3: one report per attempt. I6: with the current lease. I17: from its owner. I14: not besides a cancel."""
        if not line.accepted:
            return
        job = self.job(line.job_id)
        self.evidence["I3"] += 1
        if line.attempt in job.reports:
            earlier = job.reports[line.attempt]
            self.found("I3", f"attempt {line.attempt} of {line.job_id} had a {earlier}, and then a {line.verb} was accepted")
        elif line.verb == "finish" and job.state == State.CANCELED and history.GrantedEvent in self.told:
            self.evidence["I14"] += 1
            self.found("I14", f"{line.job_id} was canceled, and then a finish of attempt {line.attempt} was accepted")
        else:
            self._came_from_the_holder(job, line)
        # Right or wrong, the store has this from now on, and later lines are compared with it.
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
            job.retry_at = line.retry_at

    def _came_from_the_holder(self, job: JobFacts, line: history.ReportedEvent) -> None:
        lease = job.lease
        self.evidence["I6"] += 1
        if job.lease_known and history.GrantedEvent in self.told:
            self.evidence["I17"] += 1
            if lease is None or lease.lease_id != line.lease_id or lease.attempt != line.attempt:
                self.found("I6", f"a {line.verb} of {line.job_id} was accepted for {_shown(line)}; the current one is {lease}")
                return
            if (lease.worker_id, lease.owner) != (line.worker_id, line.owner):
                self.found("I17", f"a {line.verb} of {line.job_id} was accepted from {line.worker_id}, not the owner of {lease}")
                return
        elif job.ends.get(line.attempt, "orphaned") != "orphaned":
            self.found(
                "I6", f"a {line.verb} of {line.job_id} was accepted for {_shown(line)}, which was {job.ends[line.attempt]} before"
            )
            return
        if line.verb == "finish" and history.BeganEvent in self.told and line.attempt not in job.began:
            self.found("I6", f"a finish of {line.job_id} was accepted for {_shown(line)}, which never ran")


def _shown(line: history.ReportedEvent) -> str:
    return f"attempt {line.attempt} under lease {line.lease_id}"


# ---------------------------------------------------------------------------------------------------- rows

"""States of a job whose budgets are used up, by one failure or loss more than they allow."""


class RowJudge(Judge):
    """Judge of the rows that the store's commits left, and of those at the end."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._at_end: set[str] | None = None

    def handlers(self) -> dict[type[history.HistoryLine], Handler]:
        return {history.RowEvent: self._row}

    def _row(self, line: history.RowEvent) -> None:
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

    def _identity(self, job: JobFacts, line: history.RowEvent) -> None:
        """Judge I2: a body never changes. I8: writes of leaders to a job never go back to an older epoch. I17: nor go beyond."""
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
        if history.TookOverEvent in self.told:
            self.evidence["I17"] += 1
            if epoch > self.findings.registered:
                self.found(
                    "I17", f"{job_id} was written under epoch {epoch}; {self.findings.registered} is the latest registered"
                )

    def _generation(self, job: JobFacts, line: history.RowEvent) -> None:
        """Judge I4: terminal absorbs; only a new generation that was asked for leaves it, with both budgets whole."""
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
        elif history.RequeuedEvent in self.told and history.SubmittedEvent in self.told:
            # Each requeue that was told has moved job.generation already.
            self.found("I4", f"{line.job_id} is in generation {line.generation}, and nothing was told beyond {job.generation}")
        elif history.AskedEvent in self.told and line.generation - job.generation > job.asked_restarts:
            self.found("I4", f"{line.job_id} is in generation {line.generation}, asked for {job.asked_restarts} times")
        if line.generation != job.generation:
            job.counted = False  # it was set going without a word: what was counted is of another generation
        before = job.row
        if before is not None and before.generation < line.generation and before.attempt == line.attempt:
            self.evidence["I4"] += 1
            if line.failures or line.losses:
                spent = f"{line.failures} failures and {line.losses} losses"
                self.found("I4", f"{line.job_id} was set going again with {spent} on its budgets")

    def _attempt(self, job: JobFacts, line: history.RowEvent) -> None:
        """Judge I5: as many attempts as grants; a lease while somebody holds it, and only then."""
        self.evidence["I5"] += 1
        if job.attempt is not None and line.attempt != job.attempt:
            if line.attempt < job.attempt:
                self.found("I5", f"{line.job_id} went back from attempt {job.attempt} to {line.attempt}")
            elif history.GrantedEvent in self.told:
                self.found("I5", f"{line.job_id} is at attempt {line.attempt}, and was granted {job.attempt} times")
        is_held = line.state in LEASED or line.state == State.ORPHANED
        if is_held != (line.lease_id is not None):
            self.found("I5", f"{line.job_id} is {line.state} with lease {line.lease_id}")
        elif (
            job.lease_known
            and is_held
            and history.GrantedEvent in self.told
            and (job.lease is None or job.lease.lease_id != line.lease_id)
        ):
            self.found("I5", f"{line.job_id} has lease {line.lease_id}, and the current one is {job.lease}")

    def _budgets(self, job: JobFacts, line: history.RowEvent) -> None:
        """Judge I11: the failures and losses that happened, within the budgets; more of them end the job, with a reason."""
        self.evidence["I11"] += 1
        over = max(line.failures - line.max_retries, line.losses - line.max_losses)
        if over > (line.state in DEAD):
            self.found("I11", f"{line.job_id} is {line.state} after {_spent(line)}")
        elif job.counted and history.ReportedEvent in self.told and line.failures != job.failures:
            self.found("I11", f"{line.job_id} has {_spent(line)}, and {job.failures} failures were reported")
        elif job.counted and history.ReapedEvent in self.told and line.losses != job.losses:
            self.found("I11", f"{line.job_id} has {_spent(line)}, and {job.losses} attempts were lost")
        elif line.state in DEAD and not line.error_code:
            self.found("I11", f"{line.job_id} is {line.state} without a reason")

    def _result(self, job: JobFacts, line: history.RowEvent) -> None:
        """Judge I13: the result of the accepted finish, and none before it."""
        if line.state == State.SUCCEEDED and line.attempt in job.results:
            self.evidence["I13"] += 1
            if not job.has_result(line.attempt, line.result_sha256):
                self.found("I13", f"{line.job_id} has result {line.result_sha256}, its finish {job.results[line.attempt]}")
        elif line.state in LEASED:
            self.evidence["I13"] += 1
            if line.result_sha256 is not None:
                self.found("I13", f"{line.job_id} is {line.state} and has a result")
        if line.state == State.SUCCEEDED and history.ReportedEvent in self.told:
            self.evidence["I6"] += 1
            if job.reports.get(line.attempt) != "finish":
                self.found("I6", f"{line.job_id} succeeded without a finish of attempt {line.attempt}")

    def _cancel(self, line: history.RowEvent) -> None:
        """Judge I14: a job that is being canceled is not tried again."""
        if line.cancel_requested:
            self.evidence["I14"] += 1
            if line.state in READY:
                self.found("I14", f"{line.job_id} was to be canceled, and is {line.state}")

    # ------------------------------------------------------------------------------------------------ when all is over

    def end(self) -> None:
        ends = (history.ReportedEvent, history.ReapedEvent, history.ShownEvent)
        tells_ends = self.findings.watched.issuperset(ends) and history.GrantedEvent not in self.told
        for job in self.findings.jobs.values():
            exists = job.exists if self._at_end is None else job.job_id in self._at_end
            self._kept(job, exists=exists)
            if exists:
                self._wanted(job)
                if tells_ends and job.row is not None:
                    self._each_attempt_ended(job, job.row)

    def _kept(self, job: JobFacts, *, exists: bool) -> None:
        """Judge I1: acknowledged jobs are there, and over once there were no more faults. Liveness: others are over as well."""
        if not job.acked and not exists:
            return
        is_known = self._at_end is not None or history.SubmittedEvent in self.told or history.RowEvent in self.told
        if job.acked and is_known and not job.removed:
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
        """Judge I2: there is no job that nobody asked for."""
        if history.AskedEvent in self.told:
            self.evidence["I2"] += 1
            if not job.asked:
                self.found("I2", f"{job.job_id} exists, and nobody submitted it")

    def _each_attempt_ended(self, job: JobFacts, row: history.RowEvent) -> None:
        """Judge I5 where grants are not told: each attempt but the latest has its end, and there are no others."""
        self.evidence["I5"] += 1
        missing = [attempt for attempt in range(1, row.attempt) if attempt not in job.ends]
        if missing:
            self.found("I5", f"{job.job_id} is at attempt {row.attempt}, and nothing ended {missing}")
        beyond = max(job.ends.keys() | job.began, default=0)
        if beyond > row.attempt:
            self.found("I5", f"{job.job_id} is at attempt {row.attempt}, and attempt {beyond} was never granted")


def _spent(line: history.RowEvent) -> str:
    return f"{line.failures} failures of {line.max_retries}, {line.losses} losses of {line.max_losses}"
