"""The store in plain dictionaries: for tests, for the simulator, and as the model that other stores are compared with.

No rule about states lives here: `core.lifecycle` decides, this file asks it and writes down what it says; what workers tell is
in `memory_reports.py`, records and indexes in `memory_records.py`. Touches nothing outside its own memory; clock and random
bytes are passed in.
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
from tasuki.core.fairness import FairTurns
from tasuki.core.job import (
    LEASED,
    Job,
    Lease,
    Outcome,
    State,
    differing_fields,
)
from tasuki.core.lifecycle import (
    LEASE_MARGIN_S,
    TAKEOVER_TIE_S,
    Event,
    after,
    cancel_is_immediate,
    is_late,
    not_after_again,
    skip_outcome,
)
from tasuki.core.store_messages import (
    Assignment,
    Canceled,
    Grant,
    LeaseRequest,
    MissingBlobs,
    Promoted,
    Reaped,
    Requeued,
    Submission,
    Submitted,
)
from tasuki.errors import Conflict, InvalidInput, StaleEpoch
from tasuki.stores.common import storable
from tasuki.stores.memory.records import Entry, MemoryJob, matches
from tasuki.stores.memory.reports import MemoryReports
from tasuki.stores.store import Clock, Feature

LEASE_ID_BYTES = 16

Answered = Submitted | Conflict | MissingBlobs

_encode = msgspec.msgpack.Encoder().encode


class MemoryStore(MemoryReports):
    """See `tasuki.stores.store.Store` for what each verb promises."""

    features = frozenset({Feature.FIND_TEXT})

    def __init__(self, clock: Clock, random: Callable[[int], bytes] = os.urandom) -> None:
        super().__init__(clock)
        self._random = random
        self._turns = FairTurns()
        self._epoch = (0, "")
        self._taken_over_at: float | None = None
        """On the lease clock."""
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
                not_after=spec.not_after,
            )
            self._put(spec.job_id, MemoryJob(self._last_seq, job, _encode(spec), delayed=self._is_later(spec.not_before)))
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

    def requeue(self, job_ids: Sequence[str], *, actor: str, reason: str = "", generation: int | None = None) -> list[Requeued]:
        with self.turn():
            return [self._requeue_one(job_id, actor, reason, generation) for job_id in job_ids]

    def _requeue_one(self, job_id: str, actor: str, reason: str, generation: int | None) -> Requeued:
        record = self._records.get(job_id)
        if record is None or not record.job.state.terminal or generation not in (None, record.job.generation):
            return Requeued(False, record.job.state if record else None)
        return Requeued(True, self._requeue(record, actor=actor, reason=reason).job.state)

    def _requeue(self, record: MemoryJob, *, actor: str, reason: str) -> MemoryJob:
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
            not_after=not_after_again(job.spec.not_after, self.clock.wall()),
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
                oldest = (self._records[job_id] for _, _, job_id in heapq.merge(*waiting[group]))
                in_time = list(islice((record for record in oldest if not self._is_late(record)), limit))
                return [self._grant(record, request) for record in in_time]

            grants += self._turns.fill(groups, request.limit - len(grants), take)
        return grants

    def _lease_named(self, request: LeaseRequest) -> list[Grant]:
        grants: list[Grant] = []
        for job_id in request.job_ids:
            if len(grants) >= request.limit:
                break
            record = self._records.get(job_id)
            if record is None or self._is_late(record):
                continue
            if record.job.state in LEASED:
                record = self._take_from_lost(record, request.worker_id) if record.over_at <= self.clock.lease() else None
            elif not record.ready:
                record = None
            if record is not None:
                grants.append(self._grant(record, request))
        return grants

    def _take_from_lost(self, record: MemoryJob, by: str) -> MemoryJob | None:
        """A lease that is over, asked for by job_id before the reaper came: the loss counts. None if that ended the job."""
        verdict = self._loss(record)
        if verdict.state.terminal:
            self._settle(record, verdict, None)
            return None
        assert record.job.lease is not None
        job = replace(record.job, losses=verdict.losses)
        reason = f"{verdict.reason}; taken over by {by}"
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
            progress=None,
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

    # -- the leader -----------------------------------------------------------------------------------------------
    def epoch(self) -> tuple[int, str]:
        return self._epoch

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
                if earlier is None or earlier > now or _heard_since(record, earlier):
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
        if record is None or not record.ready or self._is_late(record):
            return None
        return self._grant(record, assignment, epoch=epoch)

    def reap(self, *, epoch: int, limit: int = 256) -> list[Reaped]:
        with self.turn():
            self._check_epoch(epoch)
            return [self._reap(self._records[job_id], epoch) for job_id in _due(self._leased, self.clock.lease(), limit)]

    def _reap(self, record: MemoryJob, epoch: int) -> Reaped:
        lease = record.job.lease
        assert lease is not None
        verdict = self._loss(record)
        self._settle(replace(record, job=replace(record.job, leader_epoch=epoch)), verdict, None)
        return Reaped(record.job.job_id, verdict.state, lease.worker_id, lease.attempt, verdict.reason)

    def skip(self, *, epoch: int, limit: int = 1024) -> list[str]:
        with self.turn():
            self._check_epoch(epoch)
            late = [job_id for at, _, job_id in islice(self._late, limit) if is_late(at, self.clock.wall())]
            for job_id in late:
                self._skip(self._records[job_id], epoch)
            return late

    def _skip(self, record: MemoryJob, epoch: int) -> None:
        job = replace(record.job, leader_epoch=epoch)
        assert job.not_after is not None
        outcome = skip_outcome(job.not_after, job.outcome)
        self._end(record, job, Event.SKIP, outcome, self._incident("skipped", job, reason=outcome.message))

    def _is_late(self, record: MemoryJob) -> bool:
        return is_late(record.job.not_after, self.clock.wall())

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


def _heard_since(record: MemoryJob, at: float) -> bool:
    """Whether its worker got or renewed the lease after this time of the lease clock."""
    lease = record.job.lease
    assert lease is not None
    return lease.expires_at > at + record.ttl_s + LEASE_MARGIN_S + TAKEOVER_TIE_S


def _due(entries: list[Entry], now: float, limit: int) -> list[str]:
    """The first job_ids whose time has come."""
    return [job_id for at, _, job_id in islice(entries, limit) if at <= now]
