"""The store in plain dictionaries: for tests, for the simulator, and as the model that other stores are compared with.

No rule about states lives here: `core.lifecycle` decides, this file asks it and writes down what it says
(`memory_records.py` keeps records and indexes). Touches nothing outside its own memory; clock and random bytes are passed in.
"""

from __future__ import annotations

import heapq
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec
from msgspec.structs import replace

from tasuki.core import subject as subjects
from tasuki.core.fair import FairTurns
from tasuki.core.job import (
    LEASED,
    Incident,
    Job,
    Lease,
    OnDisconnect,
    Outcome,
    State,
    differing_fields,
)
from tasuki.core.lifecycle import (
    LEASE_MARGIN_S,
    Event,
    Verdict,
    after,
    after_failure,
    after_loss,
    cancel_is_immediate,
    sources,
)
from tasuki.core.verbs import (
    Answer,
    Assignment,
    Canceled,
    Grant,
    Held,
    LeaseRequest,
    MissingBlobs,
    Promoted,
    Reaped,
    Recorded,
    Report,
    Requeued,
    Standing,
    Submission,
    Submitted,
)
from tasuki.errors import Conflict, InvalidInput, StaleEpoch
from tasuki.stores.memory_blobs import MemoryBlobs
from tasuki.stores.memory_records import Entry, Record, Said, matches
from tasuki.stores.store import Clock, Feature
from tasuki.stores.texts import storable

LEASE_ID_BYTES = 16

_KINDS: dict[Event, str] = {
    Event.RETRY: "failed",
    Event.FAIL: "dead_lettered",
    Event.TIME_OUT: "dead_lettered",
    Event.LOSE: "lost",
    Event.ORPHAN: "orphaned",
    Event.CANCEL: "canceled",
}
"""How the story calls what ended an attempt without success."""

Answered = Submitted | Conflict | MissingBlobs

_encode = msgspec.msgpack.Encoder().encode


class MemoryStore(MemoryBlobs):
    """See `tasuki.stores.store.Store` for what each verb promises."""

    features = frozenset({Feature.FIND_TEXT})

    def __init__(self, clock: Clock, random: Callable[[int], bytes] = os.urandom) -> None:
        super().__init__(clock)
        self._random = random
        self._turns = FairTurns()
        self._epoch = (0, "")
        self._last_seq = 0

    # -- submitters -----------------------------------------------------------------------------------------------
    def submit(self, submissions: Sequence[Submission], *, on_failed: str = "return") -> list[Answered]:
        if on_failed not in ("return", "rerun"):
            raise InvalidInput(f"on_failed must be 'return' or 'rerun', got {on_failed!r}")
        with self.turn():
            return [self._submit(submission, rerun=on_failed == "rerun") for submission in submissions]

    def _submit(self, submission: Submission, *, rerun: bool) -> Answered:
        spec = submission.spec
        record = self._records.get(spec.job_id)
        if record is None:
            missing = self._missing_among(file.sha256 for file in spec.files if file.sha256 is not None)
            if missing:
                return MissingBlobs(spec.job_id, missing)
            self._last_seq += 1
            job = Job(
                spec=spec,
                state=State.PENDING,
                submitter=submission.submitter,
                body_hash=submission.body_hash,
                created_at=self.clock.wall(),
                priority=spec.priority,
                not_before=spec.not_before,
            )
            self._put(spec.job_id, Record(self._last_seq, job, _encode(spec), delayed=self._is_later(spec.not_before)))
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
        if cancel_is_immediate(job.state):
            outcome = Outcome(error_code="CANCELED", message=storable(reason) or f"canceled by {actor}")
            incident = self._incident("canceled", job, actor=actor, reason=reason)
            return Canceled(self._end(record, job, Event.CANCEL, outcome, incident).job.state)
        assert job.lease is not None
        if not job.cancel_requested:
            incident = self._incident("cancel_requested", job, worker_id=job.lease.worker_id, actor=actor, reason=reason)
            self._change(record, replace(job, cancel_requested=True), incident)
        return Canceled(job.state, requested=True, worker_id=job.lease.worker_id, lease_id=job.lease.lease_id)

    def requeue(self, job_ids: Sequence[str], *, actor: str, reason: str = "") -> list[Requeued]:
        with self.turn():
            return [self._requeue_one(job_id, actor, reason) for job_id in job_ids]

    def _requeue_one(self, job_id: str, actor: str, reason: str) -> Requeued:
        record = self._records.get(job_id)
        if record is None or not record.job.state.terminal:
            return Requeued(False, record.job.state if record else None)
        return Requeued(True, self._requeue(record, actor=actor, reason=reason).job.state)

    def _requeue(self, record: Record, *, actor: str, reason: str) -> Record:
        job = record.job
        was = f"was {job.state}"
        if job.outcome is not None and (job.outcome.message or job.outcome.error_code):
            was += f": {job.outcome.message or job.outcome.error_code}"
        story = f"{reason}; {was}" if reason else was
        incident = self._incident("requeued", job, worker_id=job.assigned_worker_id or "", actor=actor, reason=story)
        job = replace(
            job,
            state=after(job.state, Event.REQUEUE),
            generation=job.generation + 1,
            failures=0,
            losses=0,
            not_before=job.spec.not_before,
            started_at=None,
            finished_at=None,
            cancel_requested=False,
            outcome=None,
        )
        return self._change(replace(record, said=None), job, incident, delayed=self._is_later(job.not_before))

    # -- workers: getting work ------------------------------------------------------------------------------------
    def lease(self, requests: Sequence[LeaseRequest]) -> list[list[Grant]]:
        with self.turn():
            return [self._lease_named(request) if request.job_ids else self._lease_next(request) for request in requests]

    def _lease_next(self, request: LeaseRequest) -> list[Grant]:
        """By patterns: band after band from the highest, evenly between the groups of a band, the oldest of a group first."""
        grants: list[Grant] = []
        for priority in sorted(self._ready, reverse=True):
            if len(grants) >= request.limit:
                break
            groups: dict[str, list[list[Entry]]] = {}
            for (subject, kind), entries in self._ready[priority].items():
                if kind in request.takes.kinds and _may_take(request, subject):
                    groups.setdefault(subjects.group_of(subject), []).append(entries)

            def take(group: str, limit: int, waiting: dict[str, list[list[Entry]]] = groups) -> list[Grant]:
                oldest = list(islice(heapq.merge(*waiting[group]), limit))
                return [self._grant(self._records[job_id], request) for _, _, job_id in oldest]

            grants += self._turns.fill(groups, request.limit - len(grants), take)
        return grants

    def _lease_named(self, request: LeaseRequest) -> list[Grant]:
        grants: list[Grant] = []
        for job_id in request.job_ids:
            if len(grants) >= request.limit:
                break
            record = self._records.get(job_id)
            if record is not None and record.job.state in LEASED:
                record = self._take_from_lost(record, request.worker_id) if record.over_at <= self.clock.lease() else None
            elif record is not None and not record.ready:
                record = None
            if record is not None:
                grants.append(self._grant(record, request))
        return grants

    def _take_from_lost(self, record: Record, by: str) -> Record | None:
        """A lease that is over, asked for by job_id before the reaper came: the loss counts. None if that ended the job."""
        verdict = self._loss(record)
        if verdict.state.terminal:
            self._settle(record, verdict, None)
            return None
        assert record.job.lease is not None
        job = replace(record.job, losses=verdict.losses)
        reason = f"{verdict.reason}; taken over by {by}"
        return self._change(record, job, self._incident("taken_over", job, worker_id=record.job.lease.worker_id, reason=reason))

    def _grant(self, record: Record, to: LeaseRequest | Assignment, *, epoch: int | None = None) -> Grant:
        attempt = record.job.attempt + 1
        lease = Lease(
            lease_id=self._random(LEASE_ID_BYTES).hex(),
            worker_id=to.worker_id,
            incarnation=to.incarnation,
            attempt=attempt,
            expires_at=self.clock.lease() + to.ttl_s + LEASE_MARGIN_S,
            on_disconnect=to.on_disconnect,
            reconnect_grace_s=to.reconnect_grace_s,
        )
        job = replace(
            record.job,
            state=after(record.job.state, Event.GRANT),
            attempt=attempt,
            lease=lease,
            assigned_worker_id=to.worker_id,
            assigned_at=self.clock.wall(),
            started_at=None,
            outcome=None,
            leader_epoch=record.job.leader_epoch if epoch is None else epoch,
        )
        self._change(replace(record, ttl_s=to.ttl_s, said=None), job)
        return Grant(job.job_id, record.spec, job.submitter, lease.lease_id, attempt, to.ttl_s)

    def held(self, holders: Sequence[tuple[str, str]]) -> list[list[Grant]]:
        now = self.clock.lease()
        grants: dict[tuple[str, str], list[Grant]] = {holder: [] for holder in holders}
        for _, _, job_id in self._leased:
            record = self._records[job_id]
            job, lease = record.job, record.job.lease
            assert lease is not None
            if job.state is not State.ASSIGNED or lease.expires_at <= now:
                continue
            found = grants.get((lease.worker_id, lease.incarnation))
            if found is not None:
                # What is left, not the whole: this does not renew. The worker counts from its last answered heartbeat, so its
                # own deadline lies before ours.
                left_s = max(0.0, lease.expires_at - LEASE_MARGIN_S - now)
                found.append(Grant(job_id, record.spec, job.submitter, lease.lease_id, lease.attempt, left_s))
        return [list(grants[holder]) for holder in holders]

    # -- workers: showing a lease ---------------------------------------------------------------------------------
    def start(self, claims: Sequence[Held]) -> list[Standing]:
        with self.turn():
            return [self._start(claim) for claim in claims]

    def _start(self, claim: Held) -> Standing:
        record = self._claimed(claim)
        if record is None or record.job.state not in LEASED:
            return Standing.LOST
        job = record.job
        if job.state is State.ASSIGNED:
            self._change(record, replace(job, state=after(job.state, Event.START), started_at=self.clock.wall()))
        return Standing.CANCEL if job.cancel_requested else Standing.GO_ON

    def renew(self, claims: Sequence[Held]) -> list[Standing]:
        with self.turn():
            return [self._renew(claim) for claim in claims]

    def _renew(self, claim: Held) -> Standing:
        record = self._claimed(claim)
        if record is None:
            return Standing.LOST
        if record.job.state in LEASED:
            self._extend(record, claim.ttl_s)
        return Standing.CANCEL if record.job.cancel_requested else Standing.GO_ON

    def _extend(self, record: Record, ttl_s: float) -> None:
        assert record.job.lease is not None
        lease = replace(record.job.lease, expires_at=self.clock.lease() + ttl_s + LEASE_MARGIN_S)
        self._put(record.job.job_id, replace(record, job=replace(record.job, lease=lease), ttl_s=ttl_s))

    def release(self, claims: Sequence[Held], *, reason: str = "") -> list[bool]:
        with self.turn():
            return [self._release(claim, reason) for claim in claims]

    def _release(self, claim: Held, reason: str) -> bool:
        record = self._claimed(claim)
        if record is None or record.job.state not in sources(Event.RELEASE):
            return False
        job = record.job
        if job.cancel_requested:
            outcome = Outcome(error_code="CANCELED", message=f"canceled; {claim.worker_id} had not started it")
            incident = self._incident("canceled", job, worker_id=claim.worker_id, reason=reason)
            self._end(record, job, Event.CANCEL, outcome, incident)
            return True
        incident = self._incident("released", job, worker_id=claim.worker_id, reason=reason)
        self._change(record, replace(job, state=after(job.state, Event.RELEASE), lease=None), incident)
        return True

    def _claimed(self, claim: Held) -> Record | None:
        """The record, if the claim shows its current lease."""
        record = self._records.get(claim.job_id)
        lease = record.job.lease if record else None
        if lease is None or (lease.worker_id, lease.incarnation, lease.lease_id, lease.attempt) != (
            claim.worker_id,
            claim.incarnation,
            claim.lease_id,
            claim.attempt,
        ):
            return None
        return record

    # -- workers: reporting ---------------------------------------------------------------------------------------
    def finish(self, reports: Sequence[Report]) -> list[Recorded]:
        with self.turn():
            return [self._report(report, Event.SUCCEED) for report in reports]

    def fail(self, reports: Sequence[Report]) -> list[Recorded]:
        with self.turn():
            return [self._report(report, Event.FAIL) for report in reports]

    def _report(self, report: Report, verb: Event) -> Recorded:
        record = self._records.get(report.job_id)
        if record is None:
            return Recorded(Answer.FENCED, None, "there is no such job")
        job, lease = record.job, record.job.lease
        shown = (report.worker_id, report.lease_id, report.attempt)
        if lease is None or shown != (lease.worker_id, lease.lease_id, lease.attempt):
            return self._repeated_or_fenced(record, report, verb)
        ref = report.outcome.result_ref
        if ref is not None and self._missing_among((ref.sha256,)):
            return Recorded(Answer.BLOB_MISSING, job.state, f"its result, blob {ref.sha256}, is not stored; bring it again")
        if job.started_at is None:
            job = replace(job, started_at=report.started_at)
        report = replace(report, outcome=replace(report.outcome, message=storable(report.outcome.message)))
        if verb is Event.SUCCEED:
            answer = Recorded(Answer.RECORDED, after(job.state, verb))
            record = self._end(record, job, verb, report.outcome)
        else:
            verdict = after_failure(
                job.state,
                report.outcome,
                cancel_requested=job.cancel_requested,
                failures=job.failures,
                losses=job.losses,
                max_retries=job.spec.max_retries,
                backoff_s=job.spec.backoff_s,
            )
            answer = Recorded(Answer.RECORDED, verdict.state, verdict.reason)
            record = self._settle(replace(record, job=job), verdict, report.outcome)
        self._put(job.job_id, replace(record, said=Said.of(report, verb)))
        return answer

    def _repeated_or_fenced(self, record: Record, report: Report, verb: Event) -> Recorded:
        if record.said == Said.of(report, verb):
            return Recorded(Answer.REPEATED, record.job.state)
        job = record.job
        reason = (
            f"attempt {report.attempt} of worker {report.worker_id} does not hold the lease; attempt {job.attempt} is {job.state}"
        )
        incident = Incident(self.clock.wall(), "fenced", report.attempt, report.worker_id, "", reason)
        self._put(job.job_id, replace(record, incidents=(*record.incidents, incident)))
        return Recorded(Answer.FENCED, job.state, reason)

    def _end(self, record: Record, job: Job, event: Event, outcome: Outcome, *incidents: Incident) -> Record:
        """The job becomes terminal."""
        ended = replace(job, state=after(job.state, event), lease=None, outcome=outcome, finished_at=self.clock.wall())
        return self._change(record, ended, *incidents)

    def _settle(self, record: Record, verdict: Verdict, outcome: Outcome | None) -> Record:
        """Do what the verdict on an attempt says; without an outcome it is the store's own word on a lost worker."""
        lease = record.job.lease
        assert lease is not None
        job = replace(record.job, failures=verdict.failures, losses=verdict.losses)
        incident = self._incident(_KINDS[verdict.event], job, worker_id=lease.worker_id, reason=verdict.reason)
        if verdict.state.terminal:
            code = "CANCELED" if verdict.event is Event.CANCEL else "LOST"
            last = outcome or Outcome(error_code=code, message=verdict.reason)
            return self._end(record, job, verdict.event, last, incident)
        not_before = self.clock.wall() + verdict.delay_s if verdict.delay_s > 0 else None
        job = replace(
            job,
            state=verdict.state,
            lease=lease if verdict.event is Event.ORPHAN else None,  # kept: its worker may still finish
            outcome=outcome or job.outcome,
            not_before=not_before,
        )
        return self._change(record, job, incident, delayed=not_before is not None)

    def _loss(self, record: Record) -> Verdict:
        job = record.job
        assert job.lease is not None
        return after_loss(
            job.state,
            cancel_requested=job.cancel_requested,
            keep=job.lease.on_disconnect is OnDisconnect.KEEP,
            failures=job.failures,
            losses=job.losses,
            max_losses=job.spec.max_losses,
            backoff_s=job.spec.backoff_s,
            worker_id=job.lease.worker_id,
        )

    # -- the leader -----------------------------------------------------------------------------------------------
    def epoch(self) -> tuple[int, str]:
        return self._epoch

    def take_over(self, holder: str, epoch: int) -> bool:
        with self.turn():
            if epoch <= self._epoch[0]:
                return False
            old = self._epoch
            self._undo.append(lambda: setattr(self, "_epoch", old))
            self._epoch = (epoch, holder)
            for _, _, job_id in list(self._leased):
                record = self._records[job_id]
                self._extend(record, record.ttl_s)
            return True

    def _check_epoch(self, epoch: int) -> None:
        current, holder = self._epoch
        if epoch != current:
            raise StaleEpoch(f"epoch {epoch} does not lead, {current} does ({holder or 'nobody'}); step down")

    def assign(self, assignments: Sequence[Assignment], *, epoch: int) -> list[Grant | None]:
        with self.turn():
            self._check_epoch(epoch)
            return [self._assign(assignment, epoch) for assignment in assignments]

    def _assign(self, assignment: Assignment, epoch: int) -> Grant | None:
        record = self._records.get(assignment.job_id)
        return self._grant(record, assignment, epoch=epoch) if record is not None and record.ready else None

    def reap(self, *, epoch: int, limit: int = 256) -> list[Reaped]:
        with self.turn():
            self._check_epoch(epoch)
            return [self._reap(self._records[job_id], epoch) for job_id in _due(self._leased, self.clock.lease(), limit)]

    def _reap(self, record: Record, epoch: int) -> Reaped:
        lease = record.job.lease
        assert lease is not None
        verdict = self._loss(record)
        self._settle(replace(record, job=replace(record.job, leader_epoch=epoch)), verdict, None)
        return Reaped(record.job.job_id, verdict.state, lease.worker_id, lease.attempt, verdict.reason)

    def promote(self, *, epoch: int, limit: int = 1024) -> Promoted:
        with self.turn():
            self._check_epoch(epoch)
            records = [self._records[job_id] for job_id in _due(self._delayed, self.clock.wall(), limit)]
            for record in records:
                self._change(record, record.job)
            return Promoted(tuple(dict.fromkeys(record.job.spec.subject for record in records)), len(records))

    def prune(self, *, before: float, epoch: int, limit: int = 256) -> int:
        with self.turn():
            self._check_epoch(epoch)
            end = bisect_left(self._ended, (before, 0, ""))
            doomed = [job_id for _, _, job_id in self._ended[: min(end, limit)]]
            for job_id in doomed:
                self._put(job_id, None)
            return len(doomed)

    def next_due(self) -> tuple[float | None, float | None]:
        return (
            self._leased[0][0] if self._leased else None,
            self._delayed[0][0] if self._delayed else None,
        )


def _may_take(request: LeaseRequest, subject: str) -> bool:
    return any(matches(pattern, subject) for pattern in request.patterns) and not request.leaves(subject)


def _due(entries: list[Entry], now: float, limit: int) -> list[str]:
    """The first job_ids whose time has come."""
    return [job_id for at, _, job_id in islice(entries, limit) if at <= now]
