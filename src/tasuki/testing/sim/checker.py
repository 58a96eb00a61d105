"""The one checker of the invariants (docs/invariants.md): reads a history line by line, and says what was broken and what it
had evidence for.

    checker = Checker()
    for line in history:
        checker.observe(line)
    checker.end()
    assert not checker.violations, checker.report()
    print(checker.evidence)        # Counter({"I5": 812, …}): on how many facts each invariant was judged

It states the invariants once more, in its own words: it shares no rule with the code that it judges, only the names of the
states. Facts that a history does not tell are never a violation, but no evidence either; a test that means to show I9 asserts
`checker.evidence["I9"]` as well.

Each judge has its share: `checker_store.py` those of the store's commits (JobJudge) and of the rows that they left (RowJudge);
this module those of answers to clients, processes of workers, leadership, schedules and liveness. Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Self

from tasuki.core.job import TERMINAL, State
from tasuki.testing.sim import history
from tasuki.testing.sim.checker_store import (
    INVARIANTS,
    STORE,
    Findings,
    Handler,
    JobFacts,
    JobJudge,
    Judge,
    RowJudge,
    Violation,
)

__all__ = ["INVARIANTS", "Checker", "Violation"]

# ---------------------------------------------------------------------------------------------------- clients

_SUBMITS = ("submit", "rerun")
_RESTARTS = ("rerun", "requeue")


class ClientJudge(Judge):
    """Judge of calls: compares each answer with what the store did."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._open: dict[str, history.AskedEvent] = {}
        self._bodies: dict[str, str] = {}
        """Bodies of acknowledged jobs whose stored body was not known yet."""
        self._new: set[str] = set()
        self._canceled: list[tuple[str, str]] = []
        self._arrived: list[history.ArrivedEvent] = []
        self._results: dict[tuple[str, int], str | None] = {}
        self._finished: dict[str, int] = {}
        """lease_id → the number of restarts of its job when the finish was accepted."""

    def handlers(self) -> dict[type[history.HistoryLine], Handler]:
        return {
            history.AskedEvent: self._asked,
            history.AnsweredEvent: self._answered,
            history.ArrivedEvent: self._has_arrived,
            history.ReportedEvent: self._reported,
            history.SettledEvent: self._settled,
            history.ProcessEvent: self._process,
        }

    # ------------------------------------------------------------------------------------------------ calls

    def _asked(self, line: history.AskedEvent) -> None:
        self._open[line.call] = line
        submits, restarts = line.verb in _SUBMITS, line.verb in _RESTARTS
        if submits or restarts:
            for job_id in line.job_ids:
                job = self.job(job_id)
                job.asked |= submits
                job.asked_restarts += restarts

    def _answered(self, line: history.AnsweredEvent) -> None:
        asked = self._open.pop(line.call, None)
        if asked is None:
            return
        if line.answer == "unknown":
            # Judges of the store find out whether it was done twice: by the ids of submits, and by counting the restarts.
            self.evidence["I16"] += 1
        if asked.verb in _SUBMITS:
            self._acked(asked, line)
        elif asked.verb == "cancel":
            self._cancel_answered(asked, line)

    def _acked(self, asked: history.AskedEvent, line: history.AnsweredEvent) -> None:
        """Judge I1: what is acknowledged is stored by then. I2: all acknowledgements agree, and one at most calls it new."""
        bodies = dict(zip(asked.job_ids, asked.bodies, strict=True)) if asked.bodies else {}
        for job_id in line.accepted:
            job = self.job(job_id)
            job.acked = True
            self.evidence["I1"] += 1
            if history.SubmittedEvent in self.told and not job.existed:
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

    def _cancel_answered(self, asked: history.AskedEvent, line: history.AnsweredEvent) -> None:
        """Judge I14: a caller that is told an end is told the one that the job came to."""
        for job_id, state in zip(asked.job_ids, line.states, strict=False):
            if state not in TERMINAL:
                continue
            if history.CanceledEvent in self.told and history.RowEvent in self.told:
                self._was_an_ending(job_id, state, "a cancel")
            else:
                self._canceled.append((job_id, state))

    def _was_an_ending(self, job_id: str, state: str, who: str) -> None:
        job = self.job(job_id)
        self.evidence["I14"] += 1
        if job.state != state and all(known != state for known, _ in job.endings):
            self.found("I14", f"{who} was told that {job_id} is {state}; it is {job.state}, and ended as {sorted(job.endings)}")

    def _process(self, line: history.ProcessEvent) -> None:
        if line.what in ("crashed", "exited"):
            for call in [call for call, asked in self._open.items() if asked.client == line.name]:
                del self._open[call]

    # ------------------------------------------------------------------------------------------------ how jobs ended

    def _has_arrived(self, line: history.ArrivedEvent) -> None:
        """Judge I13: a client is told the result of the accepted finish, and not sooner. I14: no other end either."""
        job = self.job(line.job_id)
        if line.state == State.SUCCEEDED:
            self.evidence["I13"] += 1
            known = self._results.setdefault((line.job_id, line.attempt), line.result_sha256)
            if known != line.result_sha256 and not job.removed:
                told = f"{known} and {line.result_sha256}"
                self.found("I13", f"clients were told two results of attempt {line.attempt} of {line.job_id}: {told}")
            elif history.ReportedEvent in self.told and not job.has_result(line.attempt, line.result_sha256):
                known_results = {attempt: sorted(map(str, results)) for attempt, results in job.results.items()}
                told = f"result {line.result_sha256} of attempt {line.attempt} of {line.job_id}"
                self.found("I13", f"{line.client} was told {told}; the finishes so far are {known_results}")
            elif history.ReportedEvent not in self.told:
                self._arrived.append(line)
        elif history.RowEvent not in self.told:
            self._arrived.append(line)
        elif (line.state, line.attempt) not in job.endings:
            self.evidence["I14"] += 1
            told = f"{line.job_id} is {line.state} in attempt {line.attempt}"
            self.found("I14", f"{line.client} was told that {told}; it ended as {sorted(job.endings)}")
        else:
            self.evidence["I14"] += 1

    def _reported(self, line: history.ReportedEvent) -> None:
        if line.accepted and line.verb == "finish" and line.lease_id:
            self._finished[line.lease_id] = self.job(line.job_id).restarts

    def _settled(self, line: history.SettledEvent) -> None:
        """Judge I14: a worker learns whether its finish was taken."""
        lease = self.findings.leases.get(line.lease_id)
        if lease is None or history.ReportedEvent not in self.told:
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
        if self.findings.is_over and history.AnsweredEvent in self.told:
            self.evidence["liveness"] += 1
            if self._open:
                first = next(iter(self._open.values()))
                self.found(
                    "liveness", f"{len(self._open)} calls were never answered; the first is {first.verb} of {first.client}"
                )

    def _arrived_as_stored(self, line: history.ArrivedEvent, job: JobFacts) -> None:
        """Judge I13 and I14 where only the last row is known: it agrees, if it is of the same attempt."""
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


# ---------------------------------------------------------------------------------------------------- workers

_ENDS = ("crashed", "exited")
KEEPER = "/keeper"
STOPPED_WITHIN_S = 1.0  # an attempt may end by itself while it is stopped
FOUND_AGAIN = 3  # times what it asks for: other servers may have had as much for it, which is found and delivered besides


class WorkerJudge(Judge):
    """Judge of processes: which attempts run where."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._by_job: dict[str, dict[int, history.BeganEvent]] = {}
        self._by_worker: dict[str, dict[tuple[str, int], history.BeganEvent]] = {}
        self._lives: dict[str, set[str]] = {}
        """worker → the incarnations that ran something."""
        self._dead: set[str] = set()
        """Processes that ended and did not start again."""
        self._unkept: dict[str, int] = {}
        """worker → the line at which its keeper was killed: attempts may then outlive the worker until it starts again."""
        self._began_at: dict[tuple[str, int], int] = {}
        self._denied: dict[tuple[str, int], float] = {}
        """(job, attempt) → when it was denied to go on"""

    def handlers(self) -> dict[type[history.HistoryLine], Handler]:
        return {
            history.BeganEvent: self._began,
            history.GoneEvent: self._gone,
            history.DeniedEvent: self._was_denied,
            history.BusyEvent: self._busy,
            history.ProcessEvent: self._process,
            history.DriftedEvent: self._drifted,
        }

    def _began(self, line: history.BeganEvent) -> None:
        job = self.job(line.job_id)
        self.evidence["I5"] += 1
        if line.attempt in job.began:
            self.found("I5", f"attempt {line.attempt} of {line.job_id} ran a second time, at {line.worker_id}")
        elif history.GrantedEvent in self.told and line.lease_id not in self.findings.leases:
            self.found("I5", f"attempt {line.attempt} of {line.job_id} ran at {line.worker_id}, and was never granted")
        elif line.lease_id in self.findings.leases and not self.findings.leases[line.lease_id].fetched:
            self.found("I12", f"attempt {line.attempt} of {line.job_id} ran at {line.worker_id}, which had not fetched it")
        lives = self._lives.setdefault(line.worker_id, set())
        lives.add(line.incarnation)
        if history.GoneEvent in self.told:
            if job.began:
                self._no_other_runs(line)
            if len(lives) > 1:
                self._earlier_life_is_gone(line)
            if line.job_id in self.findings.others_of:
                self._no_other_run_of_its_definition(line, self.findings.others_of[line.job_id])
        job.began.add(line.attempt)
        self._by_job.setdefault(line.job_id, {})[line.attempt] = line
        self._by_worker.setdefault(line.worker_id, {})[line.job_id, line.attempt] = line
        self._began_at[line.job_id, line.attempt] = self.findings.line

    def _no_other_runs(self, line: history.BeganEvent) -> None:
        """Judge I9: a worker that lost its lease has stopped by now. The lower attempt is the one that lost it."""
        self.evidence["I9"] += 1
        for other in self._by_job.get(line.job_id, {}).values():
            older, newer = (line, other) if line.attempt < other.attempt else (other, line)
            if not self._may_go_on(older):
                ran = f"attempt {older.attempt} of {line.job_id} ran at {older.worker_id}"
                self.found("I9", f"{ran} while attempt {newer.attempt} did at {newer.worker_id}")

    def _no_other_run_of_its_definition(self, line: history.BeganEvent, runs: list[str]) -> None:
        """Judge I18: nothing of an earlier run is left when the next one begins."""
        self.evidence["I18"] += 1
        for other in [began for run in runs if run != line.job_id for began in self._by_job.get(run, {}).values()]:
            if not self._may_go_on(other):
                self.found("I18", f"{line.job_id} began at {line.worker_id} while {other.job_id} ran at {other.worker_id}")

    def _may_go_on(self, began: history.BeganEvent) -> bool:
        """Return whether an attempt may go on: by order, for a wrong clock, for want of a keeper; or if that is not known."""
        lease = self.findings.leases.get(began.lease_id)
        return (
            lease is None
            or lease.keep
            or began.worker_id in self.findings.drifted
            or STORE in self.findings.drifted
            or self._lost_its_keeper(began)
        )

    def _lost_its_keeper(self, began: history.BeganEvent) -> bool:
        killed = self._unkept.get(began.worker_id)
        return killed is not None and killed > self._began_at[began.job_id, began.attempt]

    def _earlier_life_is_gone(self, line: history.BeganEvent) -> None:
        """Judge I10: a worker that starts again ends what an earlier life left behind, before it takes work."""
        self.evidence["I10"] += 1
        for other in self._by_worker.get(line.worker_id, {}).values():
            if other.incarnation != line.incarnation:
                left = f"attempt {other.attempt} of {other.job_id}"
                self.found("I10", f"{line.worker_id} runs {line.job_id} while {left} of an earlier life of it is not gone")

    def _was_denied(self, line: history.DeniedEvent) -> None:
        self._denied.setdefault((line.job_id, line.attempt), line.at)

    def _gone(self, line: history.GoneEvent) -> None:
        if line.how != "ended":
            self.evidence["I10"] += 1
        if (denied_at := self._denied.pop((line.job_id, line.attempt), None)) is not None:
            self.evidence["I21"] += 1
            if line.how == "ended" and line.at > denied_at + STOPPED_WITHIN_S:
                went_on = f"went on for {line.at - denied_at:g} s at {line.worker_id}"
                self.found("I21", f"attempt {line.attempt} of {line.job_id} {went_on}, though nobody said that it may")
        self._by_job.get(line.job_id, {}).pop(line.attempt, None)
        self._by_worker.get(line.worker_id, {}).pop((line.job_id, line.attempt), None)

    def _busy(self, line: history.BusyEvent) -> None:
        self.evidence["credit"] += 1
        if line.attempts > line.capacity:
            self.found("credit", f"{line.worker_id} has {line.attempts} attempts and room for {line.capacity}")
        asked = line.capacity + line.ahead
        if line.attempts + line.waiting > FOUND_AGAIN * asked:
            held = line.attempts + line.waiting
            self.found("credit", f"{line.worker_id} was given {held} attempts and asks for {asked} at a time")

    def _process(self, line: history.ProcessEvent) -> None:
        if line.what == "started":
            self._dead.discard(line.name)
        elif line.what in _ENDS:
            self._dead.add(line.name)
            if line.name.endswith(KEEPER):
                self._unkept[line.name.removesuffix(KEEPER)] = self.findings.line

    def _drifted(self, line: history.DriftedEvent) -> None:
        self.findings.drifted.add(line.name)

    def end(self) -> None:
        """Judge I10: an attempt that runs when all is over belongs to a live worker that holds its lease."""
        if not self.findings.is_over or history.GoneEvent not in self.told:
            return
        for runs in self._by_job.values():
            for began in runs.values():
                self.evidence["I10"] += 1
                self._may_still_run(began)

    def _may_still_run(self, began: history.BeganEvent) -> None:
        what = f"attempt {began.attempt} of {began.job_id} still runs at {began.worker_id}"
        if began.worker_id in self._dead:
            if not self._lost_its_keeper(began):
                self.found("I10", f"{what}, which is dead")
            return
        job = self.job(began.job_id)
        if job.lease_known and history.GrantedEvent in self.told and (job.lease is None or job.lease.lease_id != began.lease_id):
            self.found("I10", f"{what}, and its lease is over; the job is {job.state}")


# ---------------------------------------------------------------------------------------------------- leadership


class EpochJudge(Judge):
    """Judge of leadership: epochs in the order of commits, and what servers believe of themselves."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._holders: dict[int, str] = {}
        self._led_by: dict[int, str] = {}
        self._leaders: dict[str, int] = {}
        self._written = 0
        """The highest epoch that a duty was written under."""

    def handlers(self) -> dict[type[history.HistoryLine], Handler]:
        return {
            history.TookOverEvent: self._took_over,
            history.LedEvent: self._led,
            history.ReapedEvent: self._reaped,
            history.LeadingEvent: self._leading,
            history.ProcessEvent: self._process,
        }

    def _took_over(self, line: history.TookOverEvent) -> None:
        """Judge I7: epochs strictly rise."""
        if not line.done:
            return
        self.evidence["I7"] += 1
        if line.epoch <= self.findings.registered:
            self.found("I7", f"{line.server_id} registered epoch {line.epoch} after {self.findings.registered}")
        self._holders.setdefault(line.epoch, line.server_id)
        self.findings.registered = max(self.findings.registered, line.epoch)

    def _led(self, line: history.LedEvent) -> None:
        """Judge I8: no write is under an older epoch than the one registered last. I17: writes are by its holder."""
        if not line.done:
            return
        self._write(line.epoch, line.server_id)
        holder = self._holders.get(line.epoch)
        if holder is not None:
            self.evidence["I17"] += 1
            if holder != line.server_id:
                self.found("I17", f"{line.server_id} wrote under epoch {line.epoch}, which is {holder}'s")
        elif history.TookOverEvent in self.told and line.epoch >= self.findings.registered:
            self.found("I17", f"{line.server_id} wrote under epoch {line.epoch}, which nobody registered")

    def _reaped(self, line: history.ReapedEvent) -> None:
        if line.epoch:
            self._write(line.epoch, "a reaper")

    def _write(self, epoch: int, who: str) -> None:
        self.evidence["I8"] += 1
        latest = max(self._written, self.findings.registered)
        if epoch < latest:
            self.found("I8", f"{who} wrote under epoch {epoch} after epoch {latest}")
        self._written = max(self._written, epoch)

    def _leading(self, line: history.LeadingEvent) -> None:
        """Judge I7: each epoch has one holder, once."""
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

    def _process(self, line: history.ProcessEvent) -> None:
        if line.what in ("crashed", "exited"):
            self._leaders.pop(line.name, None)

    def end(self) -> None:
        """Judge I7: nobody led under an epoch that was never registered. Liveness: one leader, of the latest epoch."""
        if history.TookOverEvent in self.told and self._led_by:
            self.evidence["I7"] += 1
            highest = max(self._led_by)
            if highest > self.findings.registered:
                registered = self.findings.registered
                self.found("I7", f"{self._led_by[highest]} led under epoch {highest}, and {registered} is the latest registered")
        if self.findings.is_over and history.LeadingEvent in self.told:
            self.evidence["liveness"] += 1
            if len(self._leaders) != 1:
                self.found("liveness", f"{len(self._leaders)} servers lead at the end: {self._leaders}")
            elif history.TookOverEvent in self.told and self.findings.registered not in self._leaders.values():
                self.found("liveness", f"{self._leaders} lead at the end, and {self.findings.registered} is the latest epoch")


# ---------------------------------------------------------------------------------------------------- schedules


class ScheduleJudge(Judge):
    """Judge of definitions: compares times and events with the runs, and the runs with each other."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._definitions: dict[str, history.DefinitionEvent] = {}
        self._fired: dict[tuple[str, float], str] = {}
        self._due: set[tuple[str, float]] = set()
        self._runs: dict[str, list[str]] = {}

    def handlers(self) -> dict[type[history.HistoryLine], Handler]:
        return {
            history.DefinitionEvent: self._was_defined,
            history.DueEvent: self._is_due,
            history.FiredEvent: self._was_fired,
            history.RowEvent: self._row,
        }

    def _was_defined(self, line: history.DefinitionEvent) -> None:
        self._definitions[line.definition] = line
        if line.policy == "allow":
            for run in self._runs.pop(line.definition, ()):
                del self.findings.others_of[run]

    def _is_due(self, line: history.DueEvent) -> None:
        self._due.add((line.definition, line.nominal))

    def _invariant(self, definition: str) -> str:
        known = self._definitions.get(definition)
        return "I19" if known is not None and known.by_event else "I15"

    def _was_fired(self, line: history.FiredEvent) -> None:
        """Judge I15, I19: at most one run, of the definition as it is. It also counts as a caller that asked for the job."""
        job, definition, invariant = (
            self.job(line.job_id),
            self._definitions.get(line.definition),
            self._invariant(line.definition),
        )
        self.evidence[invariant] += 1
        first = self._fired.setdefault((line.definition, line.nominal), line.job_id)
        if first != line.job_id or (job.asked and not job.removed):
            self.found(invariant, f"{line.definition} ran twice for {line.nominal:.0f}: as {first} and as {line.job_id}")
        job.asked = True
        if definition is None:
            return
        if not definition.enabled or (definition.every_s and not definition.by_event and line.nominal % definition.every_s):
            self.found(invariant, f"{line.definition} ran for {line.nominal:.0f}, which it has not, as it is: {definition}")
        if definition.policy != "allow":
            self._runs.setdefault(line.definition, []).append(line.job_id)
            self.findings.others_of[line.job_id] = self._runs[line.definition]

    def _row(self, line: history.RowEvent) -> None:
        """Judge I18: of the runs of a definition one at most was begun and is not over."""
        runs = self.findings.others_of.get(line.job_id)
        if runs is None or not self._was_given(self.job(line.job_id)) or line.state in TERMINAL:
            return
        self.evidence["I18"] += 1
        for other in runs:
            job = self.job(other)
            if other != line.job_id and job.exists and self._was_given(job) and job.state not in TERMINAL:
                self.found("I18", f"{line.job_id} is {line.state}, and {other} of the same definition is {job.state}")

    def _was_given(self, job: JobFacts) -> bool:
        """Return whether a worker got an attempt of the run."""
        return job.given if history.GrantedEvent in self.told else bool(job.attempt)

    def end(self) -> None:
        """Judge I15, I19: no run is missed. A time due a moment before a history was cut off may still get its run."""
        if not self.findings.is_over:
            return
        for definition, nominal in sorted(self._due):
            self.evidence[self._invariant(definition)] += 1
            if (definition, nominal) not in self._fired:
                self.found(self._invariant(definition), f"{definition} never ran for {nominal:.0f}")


class OrderJudge(Judge):
    """Judge of the orders that leaders give to servers."""

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self._obeyed: dict[tuple[str, str], int] = {}

    def handlers(self) -> dict[type[history.HistoryLine], Handler]:
        return {history.OrderedEvent: self._ordered}

    def _ordered(self, line: history.OrderedEvent) -> None:
        """Judge I20: no process obeys an order below the epoch of one that it obeyed before."""
        process = line.server_id, line.incarnation
        highest = self._obeyed.get(process, 0)
        self.evidence["I20"] += 1
        if line.obeyed and line.epoch < highest:
            self.found("I20", f"{line.server_id} obeyed an order of epoch {line.epoch} after one of epoch {highest}")
        if line.obeyed:
            self._obeyed[process] = max(highest, line.epoch)


# ---------------------------------------------------------------------------------------------------- liveness


class LivenessJudge(Judge):
    """Judge of rest: when the faults ended, and whether the system came to rest without a hot loop."""

    def __init__(self, findings: Findings, events_per_s_max: float) -> None:
        super().__init__(findings)
        self._events_per_s_max = events_per_s_max

    def handlers(self) -> dict[type[history.HistoryLine], Handler]:
        return {history.HealedEvent: self._healed, history.EndedEvent: self._ended}

    def _healed(self, line: history.HealedEvent) -> None:
        self.findings.healed_at = line.at

    def _ended(self, line: history.EndedEvent) -> None:
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


# ---------------------------------------------------------------------------------------------------- all judges together

EVENTS_PER_S_MAX = 1000.0  # of a small world at rest after its faults: ticks, heartbeats and the last jobs are a tenth of this

_KINDS: dict[str, type[history.HistoryLine]] = {
    history.kind_of(kind.__name__): kind
    for kind in vars(history).values()
    if isinstance(kind, type) and issubclass(kind, history.HistoryLine)
}


class Checker:
    """All judges on one history.

    `whole`: the observer sees everything, as a simulator does; the same as a first line that is `WatchingEvent` of all kinds.
    `raises`: the first violation is raised as `ViolationFound` instead of only being kept.
    """

    def __init__(self, *, whole: bool = False, raises: bool = False, events_per_s_max: float = EVENTS_PER_S_MAX) -> None:
        self._findings = findings = Findings(raises=raises)
        self._judges: tuple[Judge, ...] = (
            JobJudge(findings),
            RowJudge(findings),
            EpochJudge(findings),
            ClientJudge(findings),
            WorkerJudge(findings),
            ScheduleJudge(findings),
            OrderJudge(findings),
            LivenessJudge(findings, events_per_s_max),
        )
        self._all: dict[type[history.HistoryLine], list[Handler]] = {}
        for judge in self._judges:
            for kind, handler in judge.handlers().items():
                self._all.setdefault(kind, []).append(handler)
        # Filled as kinds appear: so that to know which have been told costs nothing per line.
        self._active: dict[type[history.HistoryLine], list[Handler]] = {}
        if whole:
            self._watch(_KINDS)

    @property
    def violations(self) -> list[Violation]:
        return self._findings.violations

    @property
    def evidence(self) -> Counter[str]:
        """The number of facts on which each invariant was judged; a missing one was not judged at all."""
        return self._findings.evidence

    @property
    def stored(self) -> set[str]:
        """The ids of the jobs that are stored, by what was told so far."""
        return {job.job_id for job in self._findings.jobs.values() if job.exists}

    def observe(self, line: history.AnyLine) -> None:
        """Judge the next line."""
        findings = self._findings
        findings.at = line.at
        findings.line += 1
        handlers = self._active.get(type(line))
        if handlers is None:
            handlers = self._first_of(line)
        for handle in handlers:
            handle(line)

    def _first_of(self, line: history.AnyLine) -> list[Handler]:
        kind = type(line)
        if isinstance(line, history.WatchingEvent):
            self._watch(line.kinds)
            return []
        self._findings.told.add(kind)
        return self._active.setdefault(kind, self._all.get(kind, []))

    def _watch(self, kinds: Iterable[str]) -> None:
        self._findings.watched = frozenset(_KINDS[name] for name in kinds)
        self._findings.told |= self._findings.watched

    def end(self) -> None:
        """Judge what only the end of the whole history can show."""
        for judge in self._judges:
            judge.end()

    def check(self, lines: Iterable[history.AnyLine]) -> Self:
        """Judge a whole history at once."""
        for line in lines:
            self.observe(line)
        self.end()
        return self

    def report(self) -> str:
        """Return the violations as text, one per line."""
        return "\n".join(map(str, self.violations)) or "no violation"
