"""The store in plain dictionaries: for tests, for the simulator, and as the model that other stores are compared with.

This file has the verbs that change jobs; definitions are in `definitions.py`, records, indexes and other verbs in `records.py`.
No rule about states is here: `core.lifecycle` decides. Touches nothing outside its own memory; clock and random bytes are passed
in.
"""

from __future__ import annotations

import heapq
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from itertools import islice

import msgspec
from msgspec.structs import replace

from tasuki.core import subject as subjects
from tasuki.core.job import LEASED, Job, JobIncident, Lease, OnDisconnect, Outcome, Progress, State, differing_fields
from tasuki.core.lifecycle import (
    LEASE_MARGIN_S,
    RESUMED,
    Disposition,
    JobEvent,
    after,
    after_failure,
    after_loss,
    cancel_is_immediate,
    is_late,
    not_after_again,
    skip_outcome,
    sources,
)
from tasuki.core.pauses import is_paused
from tasuki.core.statistics import ROLLUP_DAYS
from tasuki.core.store_messages import (
    Assignment,
    Canceled,
    Grant,
    HeldLease,
    LateJob,
    LeaseHolder,
    LeaseRequest,
    LeaseStatus,
    MissingBlobs,
    ReadyQueue,
    Reaped,
    Report,
    ReportAnswer,
    ReportStatus,
    Requeued,
    Submission,
    Submitted,
    storable_text,
)
from tasuki.core.subject import group_of
from tasuki.errors import Conflict
from tasuki.stores.common import (
    INCIDENT_OF,
    LEASES_ENDED_MAX,
    TAKEN_BACK,
    FairTurns,
    belongs_to_story,
    check_on_failed,
    fenced_reason,
    input_refs,
    matches,
    missing_result,
    outcome_of_lost,
    outcome_of_unstarted,
    report_identity,
    requeue_reason,
)
from tasuki.stores.memory.definitions import MemoryDefinitions
from tasuki.stores.memory.records import Entry, MemoryJob
from tasuki.stores.store import Answered, Clock, Feature

LEASE_ID_BYTES = 16
IN_VAIN_MAX = 512  # queues from which a walk grants nothing, before it is cut short

_encode = msgspec.msgpack.Encoder().encode


class MemoryStore(MemoryDefinitions):
    """A store in memory. See `tasuki.stores.store.Store` for what each verb promises."""

    features = frozenset({Feature.FIND_TEXT, Feature.DEFINITIONS})

    def __init__(self, clock: Clock, random: Callable[[int], bytes] = os.urandom) -> None:
        super().__init__(clock)
        self._random = random
        self._walks_begin_at = 0
        self._turns = FairTurns()
        self._taken_over_at: float | None = None
        """Lease-clock time of the last takeover."""

    # -- submitters -----------------------------------------------------------------------------------------------
    def submit(self, submissions: Sequence[Submission], *, on_failed: str = "return") -> list[Answered]:
        rerun = check_on_failed(on_failed)
        with self.turn():
            return [self._submit(submission, rerun=rerun) for submission in submissions]

    def _submit(self, submission: Submission, *, rerun: bool) -> Answered:
        spec = submission.spec
        record = self._records.get(spec.job_id)
        if record is None:
            missing = self._missing_among(input_refs(spec))
            if missing:
                return MissingBlobs(spec.job_id, missing)
            self._put(spec.job_id, self._new_record(submission))
            return Submitted(spec.job_id, created=True)
        if record.job.body_hash != submission.body_hash:
            owner = (record.job.submitter, record.job.spec.subject)
            return Conflict(spec.job_id, differing_fields(record.job.spec, spec), owner)
        if (
            rerun
            and record.job.submitter == submission.submitter
            and record.job.state.terminal
            and record.job.state is not State.SUCCEEDED
        ):
            record = self._requeue(record, actor=submission.submitter, reason="submitted again")
        return Submitted.before(record.job)

    def cancel(self, job_ids: Sequence[str], *, actor: str, reason: str = "") -> list[Canceled]:
        with self.turn():
            return [self._cancel(job_id, actor, reason) for job_id in job_ids]

    def _cancel(self, job_id: str, actor: str, reason: str) -> Canceled:
        record = self._records.get(job_id)
        if record is None:
            return Canceled(None)
        job = record.job
        if job.state.terminal:
            return Canceled(job.state)
        if cancel_is_immediate(job.state) or record.ahead or record.due:
            outcome = Outcome(error_code="CANCELED", message=storable_text(reason) or f"canceled by {actor}")
            incident = self._incident("canceled", job, actor=actor, reason=reason)
            ended = self._end(record, job, JobEvent.CANCEL, outcome, incident)
            return Canceled(ended.job.state, group=group_of(job.spec.subject))
        assert job.lease is not None
        if not job.cancel_requested:
            incident = self._incident("cancel_requested", job, worker_id=job.lease.worker_id, actor=actor, reason=reason)
            self._change(record, replace(job, cancel_requested=True), incident)
        return Canceled(job.state, requested=True, worker_id=job.lease.worker_id, lease_id=job.lease.lease_id)

    def requeue(self, job_ids: Sequence[str], *, actor: str, reason: str = "", generation: int | None = None) -> list[Requeued]:
        with self.turn():
            return [self._requeue_one(job_id, actor, reason, generation) for job_id in job_ids]

    def _requeue_one(self, job_id: str, actor: str, reason: str, generation: int | None) -> Requeued:
        record = self._records.get(job_id)
        if record is None:
            return Requeued(False, None)
        group = group_of(record.job.spec.subject)
        if not record.job.state.terminal or generation not in (None, record.job.generation):
            return Requeued(False, record.job.state, group=group)
        if (still_running := self._begin_again(record.job)) is not None:
            return Requeued(False, record.job.state, still_running, group)
        return Requeued(True, self._requeue(record, actor=actor, reason=reason).job.state, group=group)

    def _requeue(self, record: MemoryJob, *, actor: str, reason: str) -> MemoryJob:
        job = record.job
        reason = requeue_reason(job.state, job.outcome, reason)
        incident = self._incident("requeued", job, worker_id=job.assigned_worker_id or "", actor=actor, reason=reason)
        job = replace(
            job,
            state=after(job.state, JobEvent.REQUEUE),
            generation=job.generation + 1,
            failures=0,
            losses=0,
            not_before=job.spec.not_before,
            not_after=not_after_again(job.spec.not_after, self.clock.wall()),
            started_at=None,
            finished_at=None,
            cancel_requested=False,
            outcome=None,
        )
        return self._change(replace(record, last_report=None), job, incident, delayed=self._is_later(job.not_before))

    # -- workers: getting work ------------------------------------------------------------------------------------
    def lease(self, requests: Sequence[LeaseRequest]) -> list[list[Grant]]:
        with self.turn():
            return [
                self._lease_named(request) if request.job_ids else self._lease_next(request, position)
                for position, request in enumerate(requests)
            ]

    def _lease_next(self, request: LeaseRequest, position: int) -> list[Grant]:
        """Lease by patterns: the highest priority first, evenly between its groups, the oldest of a group first."""
        grants: list[Grant] = []
        is_cut = False
        for priority in sorted(self._ready, reverse=True):
            if len(grants) >= request.limit:
                break
            groups, was_cut = self._takeable(request, priority)
            is_cut = is_cut or was_cut
            for chosen in request.chosen:
                record = self._records.get(chosen.job_id)
                if chosen.priority == priority and record is not None and record.ready and not self._is_paused(record):
                    groups.setdefault(chosen.group, []).append([(0.0, record.seq, chosen.job_id)])

            def take(group: str, limit: int, waiting: dict[str, list[list[Entry]]] = groups) -> list[Grant]:
                oldest = (
                    self._records[job_id] for job_id in dict.fromkeys(job_id for *_, job_id in heapq.merge(*waiting[group]))
                )
                in_time = list(islice((record for record in oldest if record.ready and not self._is_late(record)), limit))
                return [self._grant(record, request) for record in in_time]

            grants += self._turns.fill(groups, request.limit - len(grants), take)
        if is_cut and len(grants) < request.limit:
            self._cut.append(position)
        return grants

    def _takeable(self, request: LeaseRequest, priority: int) -> tuple[dict[str, list[list[Entry]]], bool]:
        """Return the queues that the request may take from, by group, and whether a walk over them was cut short."""
        groups: dict[str, list[list[Entry]]] = {}
        waiting = self._ready[priority].items()
        queues = [(queue, entries) for queue, entries in waiting if not is_paused(self._paused, queue.subject)]
        begin = self._walks_begin_at % len(queues) if queues else 0
        in_vain, is_cut = 0, False
        for queue, entries in queues[begin:] + queues[:begin]:
            is_walked = in_vain < IN_VAIN_MAX
            is_cut = is_cut or not is_walked
            if (is_walked or queue.subject in request.patterns) and _may_take(request, queue):
                groups.setdefault(subjects.group_of(queue.subject), []).append(entries)
            elif is_walked:
                in_vain += 1
                self._walks_begin_at += 1
        return groups, is_cut

    def _lease_named(self, request: LeaseRequest) -> list[Grant]:
        grants: list[Grant] = []
        for job_id in request.job_ids:
            if len(grants) >= request.limit:
                break
            record = self._records.get(job_id)
            if record is None or self._is_late(record) or self._is_paused(record):
                continue
            if record.ahead:
                record = None
            elif record.job.state in LEASED:
                record = self._take_from_lost(record, request.worker_id) if record.over_at <= self.clock.lease() else None
            elif not record.ready:
                record = None
            if record is not None:
                grants.append(self._grant(record, request))
        return grants

    def _take_from_lost(self, record: MemoryJob, by: str) -> MemoryJob | None:
        """Take over an expired lease that the reaper has not ended yet: it counts as a loss. None if that ended the job."""
        disposition = self._disposition_of_loss(record)
        if disposition.state.terminal:
            self._end_attempt(record, disposition, None)
            return None
        assert record.job.lease is not None
        job = replace(record.job, losses=disposition.losses)
        reason = f"{disposition.reason}; taken over by {by}"
        return self._change(record, job, self._incident("taken_over", job, worker_id=record.job.lease.worker_id, reason=reason))

    def _grant(self, record: MemoryJob, to: LeaseRequest | Assignment, *, epoch: int | None = None) -> Grant:
        attempt = record.job.attempt + 1
        lease = Lease(
            lease_id=self._random(LEASE_ID_BYTES).hex(),
            worker_id=to.worker_id,
            incarnation=to.incarnation,
            attempt=attempt,
            expires_at=self.clock.lease() + to.ttl_s + LEASE_MARGIN_S,
            on_disconnect=to.on_disconnect,
            reconnect_grace_s=to.reconnect_grace_s,
            owner=to.owner,
        )
        job = replace(
            record.job,
            state=after(record.job.state, JobEvent.GRANT),
            attempt=attempt,
            lease=lease,
            assigned_worker_id=to.worker_id,
            assigned_at=self.clock.wall(),
            started_at=None,
            outcome=None,
            progress=None,
            confirming_until=None,
            leader_epoch=record.job.leader_epoch if epoch is None else epoch,
        )
        self._change(replace(record, ttl_s=to.ttl_s, last_report=None), job, ahead=record.ahead, due=record.due)
        return Grant(job.job_id, record.spec, job.submitter, lease.lease_id, attempt, to.ttl_s)

    def held(self, holders: Sequence[tuple[str, str, str]]) -> list[list[Grant]]:
        now = self.clock.lease()
        grants: dict[tuple[str, str, str], list[Grant]] = {holder: [] for holder in holders}
        self._fetch(grants)
        for _, _, job_id in self._leased:
            record = self._records[job_id]
            job, lease = record.job, record.job.lease
            assert lease is not None
            if job.state is not State.ASSIGNED or lease.expires_at <= now or record.due:
                continue
            found = grants.get((lease.worker_id, lease.incarnation, lease.owner))
            if found is not None:
                # The rest of the lease, not the whole: this does not renew. The worker counts from its last answered heartbeat,
                # so its own deadline lies before the store's.
                left_s = max(0.0, lease.expires_at - LEASE_MARGIN_S - now)
                found.append(Grant(job_id, record.spec, job.submitter, lease.lease_id, lease.attempt, left_s))
        return [list(grants[holder]) for holder in holders]

    def _fetch(self, holders: Collection[tuple[str, str, str]]) -> None:
        """Begin the leases of runs that were assigned ahead and may start."""
        now = self.clock.lease()
        with self.turn():
            for _, _, job_id in list(self._leased):
                record = self._records[job_id]
                lease = record.job.lease
                assert lease is not None
                is_asked_for = (lease.worker_id, lease.incarnation, lease.owner) in holders
                if record.due and is_asked_for and lease.expires_at > now and not self._is_later(record.job.not_before):
                    self._extend(self._change(record, record.job), record.ttl_s)

    # -- workers: held leases ---------------------------------------------------------------------------------------
    def start(self, claims: Sequence[HeldLease]) -> list[LeaseStatus]:
        with self.turn():
            return [self._start(claim) for claim in claims]

    def _start(self, claim: HeldLease) -> LeaseStatus:
        record = self._claimed(claim)
        if record is None:
            return LeaseStatus.LOST
        job = record.job
        if job.state is State.ASSIGNED:
            begun = replace(job, state=after(job.state, JobEvent.START), started_at=self.clock.wall())
            self._change(record, replace(begun, not_after=_window_after_start(job)))
        elif job.state is State.ORPHANED:
            self._resume(record, claim)
        return LeaseStatus.CANCEL if job.cancel_requested else LeaseStatus.GO_ON

    def renew(self, claims: Sequence[HeldLease]) -> list[LeaseStatus]:
        with self.turn():
            return [self._renew(claim) for claim in claims]

    def _renew(self, claim: HeldLease) -> LeaseStatus:
        record = self._claimed(claim)
        if record is None:
            return LeaseStatus.LOST
        if record.job.state is State.ORPHANED:
            record = self._resume(record, claim)
        self._extend(record, max(claim.ttl_s, claim.confirm_s or 0.0), claim.progress)
        if claim.confirm_s is not None:
            record = self._records[claim.job_id]
            until = self.clock.wall() + claim.confirm_s if claim.confirm_s > 0 else None
            self._put(claim.job_id, replace(record, job=replace(record.job, confirming_until=until)))
        return LeaseStatus.CANCEL if record.job.cancel_requested else LeaseStatus.GO_ON

    def _resume(self, record: MemoryJob, claim: HeldLease) -> MemoryJob:
        """Make an ORPHANED job run again whose worker is back before another was granted it."""
        job = record.job
        assert job.lease is not None
        lease = replace(job.lease, expires_at=self.clock.lease() + claim.ttl_s + LEASE_MARGIN_S)
        started_at = self.clock.wall() if job.started_at is None else job.started_at
        incident = self._incident("resumed", job, worker_id=claim.worker_id, reason=RESUMED)
        job = replace(job, state=after(job.state, JobEvent.RESUME), lease=lease, started_at=started_at)
        return self._change(replace(record, ttl_s=claim.ttl_s), job, incident)

    def _extend(self, record: MemoryJob, ttl_s: float, progress: Progress | None = None) -> None:
        assert record.job.lease is not None
        lease = replace(record.job.lease, expires_at=self.clock.lease() + ttl_s + LEASE_MARGIN_S)
        job = replace(record.job, lease=lease, progress=progress or record.job.progress)
        self._put(job.job_id, replace(record, job=job, ttl_s=ttl_s))

    def release(self, claims: Sequence[HeldLease], *, reason: str = "") -> list[bool]:
        with self.turn():
            return [self._release(claim, reason) for claim in claims]

    def _release(self, claim: HeldLease, reason: str) -> bool:
        record = self._claimed(claim)
        if record is None or record.job.state not in sources(JobEvent.RELEASE):
            return False
        if claim.is_over and record.over_at - LEASE_MARGIN_S > self.clock.lease():
            return False
        job = record.job
        if job.cancel_requested:
            outcome = outcome_of_unstarted(claim.worker_id)
            incident = self._incident("canceled", job, worker_id=claim.worker_id, reason=reason)
            self._end(record, job, JobEvent.CANCEL, outcome, incident)
            return True
        incident = self._incident("released", job, worker_id=claim.worker_id, reason=reason)
        self._change(record, replace(job, state=after(job.state, JobEvent.RELEASE), lease=None), incident, ahead=record.ahead)
        return True

    def end_leases(self, holders: Sequence[LeaseHolder]) -> list[int]:
        with self.turn():
            return [self._end_leases(holder) for holder in holders]

    def _end_leases(self, holder: LeaseHolder) -> int:
        leased = [self._records[job_id] for _, _, job_id in (*self._leased, *self._ahead)]
        found = [(one, held) for one in leased if (held := one.job.lease) is not None and holder.has(held.owner, held.worker_id)]
        for record, lease in found[:LEASES_ENDED_MAX]:
            shown = (lease.worker_id, lease.incarnation, lease.lease_id, lease.attempt)
            if not self._release(HeldLease(record.job.job_id, *shown, owner=lease.owner), holder.reason):
                job = replace(record.job, lease=replace(lease, on_disconnect=OnDisconnect.STOP))
                lost = self._disposition_of_loss(replace(record, job=job))
                self._end_attempt(record, replace(lost, reason=f"{lost.reason}; {holder.reason}"), None)
        return min(len(found), LEASES_ENDED_MAX)

    # -- workers: reports -------------------------------------------------------------------------------------------
    def finish(self, reports: Sequence[Report]) -> list[ReportAnswer]:
        with self.turn():
            return [self._report(report, JobEvent.SUCCEED) for report in reports]

    def fail(self, reports: Sequence[Report]) -> list[ReportAnswer]:
        with self.turn():
            return [self._report(report, JobEvent.FAIL) for report in reports]

    def _report(self, report: Report, verb: JobEvent) -> ReportAnswer:
        record = self._records.get(report.job_id)
        if record is None:
            return ReportAnswer(ReportStatus.FENCED, None, "there is no such job")
        job, lease, group = record.job, record.job.lease, group_of(record.job.spec.subject)
        shown = (report.worker_id, report.lease_id, report.attempt, report.owner)
        if lease is None or shown != (lease.worker_id, lease.lease_id, lease.attempt, lease.owner):
            return self._repeated_or_fenced(record, report, verb)
        ref = report.outcome.result_ref
        if ref is not None and self._missing_among((ref,)):
            return ReportAnswer(ReportStatus.BLOB_MISSING, job.state, missing_result(ref), group)
        if job.started_at is None:
            job = replace(job, started_at=report.started_at)
        report = replace(report, outcome=replace(report.outcome, message=storable_text(report.outcome.message)))
        if verb is JobEvent.SUCCEED:
            answer = ReportAnswer(ReportStatus.RECORDED, after(job.state, verb), group=group)
            record = self._end(record, job, verb, report.outcome)
        else:
            disposition = after_failure(
                job.state,
                report.outcome,
                cancel_requested=job.cancel_requested,
                failures=job.failures,
                losses=job.losses,
                max_retries=job.spec.max_retries,
                backoff_s=job.spec.retry_backoff_s,
            )
            answer = ReportAnswer(ReportStatus.RECORDED, disposition.state, disposition.reason, group)
            record = self._end_attempt(replace(record, job=job), disposition, replace(report.outcome, retry_in_s=None))
        self._put(job.job_id, replace(record, last_report=report_identity(report, verb)))
        return answer

    def _repeated_or_fenced(self, record: MemoryJob, report: Report, verb: JobEvent) -> ReportAnswer:
        group = group_of(record.job.spec.subject)
        if record.last_report == report_identity(report, verb):
            return ReportAnswer(ReportStatus.REPEATED, record.job.state, group=group)
        job, reason = record.job, fenced_reason(report, record.job.attempt, record.job.state)
        if belongs_to_story(report, job.attempt, job.assigned_worker_id, lambda: record.incidents):
            incident = JobIncident(self.clock.wall(), "fenced", report.attempt, report.worker_id, "", reason)
            self._put(job.job_id, replace(record, incidents=(*record.incidents, incident)))
        return ReportAnswer(ReportStatus.FENCED, job.state, reason, group)

    def _end(self, record: MemoryJob, job: Job, event: JobEvent, outcome: Outcome, *incidents: JobIncident) -> MemoryJob:
        """Make the job terminal."""
        ended = replace(job, state=after(job.state, event), lease=None, outcome=outcome, finished_at=self.clock.wall())
        return self._change(record, ended, *incidents)

    def _end_attempt(self, record: MemoryJob, disposition: Disposition, outcome: Outcome | None) -> MemoryJob:
        """End an attempt as the disposition says; without an outcome the store makes one for the lost worker."""
        lease = record.job.lease
        assert lease is not None
        job = replace(record.job, failures=disposition.failures, losses=disposition.losses)
        incident = self._incident(INCIDENT_OF[disposition.event], job, worker_id=lease.worker_id, reason=disposition.reason)
        if disposition.state.terminal:
            return self._end(record, job, disposition.event, outcome or outcome_of_lost(disposition), incident)
        not_before = self.clock.wall() + disposition.delay_s if disposition.delay_s > 0 else None
        job = replace(
            job,
            state=disposition.state,
            lease=lease if disposition.event is JobEvent.ORPHAN else None,  # an orphan's worker may still finish
            outcome=outcome or job.outcome,
            not_before=not_before,
            not_after=job.not_after if outcome is None else _window_after_start(job),
        )
        return self._change(record, job, incident, delayed=not_before is not None)

    def _disposition_of_loss(self, record: MemoryJob) -> Disposition:
        job = record.job
        assert job.lease is not None
        return after_loss(
            job.state,
            cancel_requested=job.cancel_requested,
            keep=job.lease.on_disconnect is OnDisconnect.KEEP,
            failures=job.failures,
            losses=job.losses,
            max_losses=job.spec.max_losses,
            backoff_s=job.spec.retry_backoff_s,
            worker_id=job.lease.worker_id,
            delay_first=job.spec.delay_first_loss,
        )

    # -- the leader -----------------------------------------------------------------------------------------------
    def take_over(self, holder: str, epoch: int) -> bool:
        with self.turn():
            if epoch <= self._epoch[0]:
                return False
            now, old, earlier = self.clock.lease(), self._epoch, self._taken_over_at
            self._undo.append(lambda: setattr(self, "_epoch", old))
            self._undo.append(lambda: setattr(self, "_taken_over_at", earlier))
            self._epoch, self._taken_over_at = (epoch, holder), now
            for _, _, job_id in list(self._leased):
                record = self._records[job_id]
                if not record.due and (earlier is None or earlier > now or record.was_renewed_since(earlier)):
                    self._extend(record, record.ttl_s)
            return True

    def assign(self, assignments: Sequence[Assignment], *, epoch: int) -> list[Grant | None]:
        with self.turn():
            self._check_epoch(epoch)
            return [self._assign(assignment, epoch) for assignment in assignments]

    def _assign(self, assignment: Assignment, epoch: int) -> Grant | None:
        record = self._records.get(assignment.job_id)
        if record is None:
            return None
        if not assignment.worker_id:
            lease = record.job.lease
            if lease is not None and (record.ahead or record.due):
                shown = (lease.worker_id, lease.incarnation, lease.lease_id, lease.attempt)
                self._release(HeldLease(assignment.job_id, *shown, owner=lease.owner), TAKEN_BACK)
            return None
        may = (record.ready or record.ahead) and not self._is_late(record) and not self._is_paused(record)
        return self._grant(record, assignment, epoch=epoch) if may else None

    def reap(self, *, epoch: int, limit: int = 256) -> list[Reaped]:
        with self.turn():
            self._check_epoch(epoch)
            return [self._reap(self._records[job_id], epoch) for job_id in _due(self._leased, self.clock.lease(), limit)]

    def _reap(self, record: MemoryJob, epoch: int) -> Reaped:
        lease = record.job.lease
        assert lease is not None
        disposition = self._disposition_of_loss(record)
        self._end_attempt(replace(record, job=replace(record.job, leader_epoch=epoch)), disposition, None)
        group = group_of(record.job.spec.subject)
        return Reaped(record.job.job_id, disposition.state, lease.worker_id, lease.attempt, disposition.reason, group)

    def skip(self, *, epoch: int, limit: int = 1024) -> list[LateJob]:
        with self.turn():
            self._check_epoch(epoch)
            late = [job_id for at, _, job_id in islice(self._late, limit) if is_late(at, self.clock.wall())]
            return [self._skip(self._records[job_id], epoch) for job_id in late]

    def _skip(self, record: MemoryJob, epoch: int) -> LateJob:
        job = replace(record.job, leader_epoch=epoch)
        assert job.not_after is not None
        outcome = skip_outcome(job.not_after, job.outcome)
        self._end(record, job, JobEvent.SKIP, outcome, self._incident("skipped", job, reason=outcome.message))
        return LateJob(job.job_id, group_of(job.spec.subject))

    def _is_late(self, record: MemoryJob) -> bool:
        return is_late(record.job.not_after, self.clock.wall())

    def _is_paused(self, record: MemoryJob) -> bool:
        return is_paused(self._paused, record.job.spec.subject)

    def promote(self, *, epoch: int, limit: int = 1024) -> int:
        with self.turn():
            self._check_epoch(epoch)
            records = [self._records[job_id] for job_id in _due(self._delayed, self.clock.wall(), limit)]
            for record in records:
                self._change(record, record.job)
            return len(records)

    def prune(self, *, before: float, epoch: int, limit: int = 256) -> int:
        with self.turn():
            self._check_epoch(epoch)
            oldest = self.clock.wall() - ROLLUP_DAYS * 86_400.0
            self._replace_rollups({key: one for key, one in self._rollups.items() if key[0] >= oldest})
            end = bisect_left(self._ended, (before, 0, ""))
            doomed = [job_id for _, _, job_id in self._ended[: min(end, limit)]]
            for job_id in doomed:
                self._put(job_id, None)
            return len(doomed)


def _window_after_start(job: Job) -> float | None:
    """Return the `not_after` of a job that has begun: a run of a definition is retried also after its window."""
    return job.not_after if job.job_definition_id is None else None


def _may_take(request: LeaseRequest, queue: ReadyQueue) -> bool:
    is_asked_for = any(matches(pattern, queue.subject) for pattern in request.patterns)
    return is_asked_for and request.may_take(*queue) and not request.leaves(queue.subject)


def _due(entries: list[Entry], now: float, limit: int) -> list[str]:
    """Return the first job_ids whose time has come."""
    return [job_id for at, _, job_id in islice(entries, limit) if at <= now]
