"""What workers tell the memory store: start, renew, release, finish, fail; and the end of an attempt, which reaping shares.

No rule about states lives here: `core.lifecycle` decides. Touches nothing outside its own memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from tasuki.core.job import Job, JobIncident, OnDisconnect, Outcome, Progress, State
from tasuki.core.lifecycle import LEASE_MARGIN_S, RESUMED, Disposition, Event, after, after_failure, after_loss, sources
from tasuki.core.store_messages import HeldLease, LeaseStatus, Report, ReportAnswer, ReportStatus
from tasuki.stores.common import storable
from tasuki.stores.memory.blobs import MemoryBlobs
from tasuki.stores.memory.records import MemoryJob, ReportDigest

_KINDS: dict[Event, str] = {
    Event.RETRY: "failed",
    Event.FAIL: "dead_lettered",
    Event.TIME_OUT: "dead_lettered",
    Event.LOSE: "lost",
    Event.ORPHAN: "orphaned",
    Event.CANCEL: "canceled",
}
"""How the story calls what ended an attempt without success."""


class MemoryReports(MemoryBlobs):
    """Verbs of workers that show a lease."""

    # -- workers: showing a lease ---------------------------------------------------------------------------------
    def start(self, claims: Sequence[HeldLease]) -> list[LeaseStatus]:
        with self.turn():
            return [self._start(claim) for claim in claims]

    def _start(self, claim: HeldLease) -> LeaseStatus:
        record = self._claimed(claim)
        if record is None:
            return LeaseStatus.LOST
        job = record.job
        if job.state is State.ASSIGNED:
            self._change(record, replace(job, state=after(job.state, Event.START), started_at=self.clock.wall()))
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
        self._extend(record, claim.ttl_s, claim.progress)
        return LeaseStatus.CANCEL if record.job.cancel_requested else LeaseStatus.GO_ON

    def _resume(self, record: MemoryJob, claim: HeldLease) -> MemoryJob:
        """Its worker is back before anybody took the job."""
        job = record.job
        assert job.lease is not None
        lease = replace(job.lease, expires_at=self.clock.lease() + claim.ttl_s + LEASE_MARGIN_S)
        started_at = self.clock.wall() if job.started_at is None else job.started_at
        incident = self._incident("resumed", job, worker_id=claim.worker_id, reason=RESUMED)
        job = replace(job, state=after(job.state, Event.RESUME), lease=lease, started_at=started_at)
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

    def _claimed(self, claim: HeldLease) -> MemoryJob | None:
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
    def finish(self, reports: Sequence[Report]) -> list[ReportAnswer]:
        with self.turn():
            return [self._report(report, Event.SUCCEED) for report in reports]

    def fail(self, reports: Sequence[Report]) -> list[ReportAnswer]:
        with self.turn():
            return [self._report(report, Event.FAIL) for report in reports]

    def _report(self, report: Report, verb: Event) -> ReportAnswer:
        record = self._records.get(report.job_id)
        if record is None:
            return ReportAnswer(ReportStatus.FENCED, None, "there is no such job")
        job, lease = record.job, record.job.lease
        shown = (report.worker_id, report.lease_id, report.attempt)
        if lease is None or shown != (lease.worker_id, lease.lease_id, lease.attempt):
            return self._repeated_or_fenced(record, report, verb)
        ref = report.outcome.result_ref
        if ref is not None and self._missing_among((ref.sha256,)):
            return ReportAnswer(
                ReportStatus.BLOB_MISSING, job.state, f"its result, blob {ref.sha256}, is not stored; bring it again"
            )
        if job.started_at is None:
            job = replace(job, started_at=report.started_at)
        report = replace(report, outcome=replace(report.outcome, message=storable(report.outcome.message)))
        if verb is Event.SUCCEED:
            answer = ReportAnswer(ReportStatus.RECORDED, after(job.state, verb))
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
            answer = ReportAnswer(ReportStatus.RECORDED, verdict.state, verdict.reason)
            record = self._settle(replace(record, job=job), verdict, report.outcome)
        self._put(job.job_id, replace(record, said=ReportDigest.of(report, verb)))
        return answer

    def _repeated_or_fenced(self, record: MemoryJob, report: Report, verb: Event) -> ReportAnswer:
        if record.said == ReportDigest.of(report, verb):
            return ReportAnswer(ReportStatus.REPEATED, record.job.state)
        job = record.job
        reason = (
            f"attempt {report.attempt} of worker {report.worker_id} does not hold the lease; attempt {job.attempt} is {job.state}"
        )
        incident = JobIncident(self.clock.wall(), "fenced", report.attempt, report.worker_id, "", reason)
        self._put(job.job_id, replace(record, incidents=(*record.incidents, incident)))
        return ReportAnswer(ReportStatus.FENCED, job.state, reason)

    def _end(self, record: MemoryJob, job: Job, event: Event, outcome: Outcome, *incidents: JobIncident) -> MemoryJob:
        """The job becomes terminal."""
        ended = replace(job, state=after(job.state, event), lease=None, outcome=outcome, finished_at=self.clock.wall())
        return self._change(record, ended, *incidents)

    def _settle(self, record: MemoryJob, verdict: Disposition, outcome: Outcome | None) -> MemoryJob:
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

    def _loss(self, record: MemoryJob) -> Disposition:
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
            delay_first=job.spec.delay_first_loss,
        )
