"""What workers tell the SQL store: start, renew, release, finish, fail; and the end of an attempt, which reaping shares.

A lease_id ends in the id of its row, so a claim or report finds its row without the unique key on job_id, whose pages are
cold when ids are random. It is only where to look: job_id, lease_id, worker_id and attempt are all compared in the write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tasuki.core.job import LEASED, OnDisconnect, Outcome, Progress, State
from tasuki.core.lifecycle import LEASE_MARGIN_S, RESUMED, Disposition, Event, after, after_failure, after_loss, sources
from tasuki.core.store_messages import HeldLease, LeaseStatus, Report, ReportAnswer, ReportStatus
from tasuki.errors import StaleEpoch
from tasuki.stores.sql.base import must_change
from tasuki.stores.sql.blobs import SqlBlobs
from tasuki.stores.sql.read import LEADER_SCOPE
from tasuki.stores.sql.rows import (
    DELAYED,
    READY,
    JobRow,
    decode_spec,
    meta_of,
    result_sha256_of,
    result_size_of,
    said_by,
    said_in,
)
from tasuki.stores.texts import storable

_KINDS: dict[Event, str] = {
    Event.RETRY: "failed",
    Event.FAIL: "dead_lettered",
    Event.TIME_OUT: "dead_lettered",
    Event.LOSE: "lost",
    Event.ORPHAN: "orphaned",
    Event.CANCEL: "canceled",
}
"""How the story calls what ended an attempt without success."""

_REPORTABLE = sources(Event.SUCCEED)
_RECORDED = ReportAnswer(ReportStatus.RECORDED, State.SUCCEEDED)
_DIGITS_MAX = 18  # of a row id; more would not be an integer for SQLite


def row_id_of(lease_id: str) -> int:
    """Where the lease says its row is; 0, where no row is, if it says nothing sensible."""
    digits = lease_id[33:]
    return int(digits) if digits.isdecimal() and len(digits) <= _DIGITS_MAX else 0


class SqlReport(SqlBlobs):
    """Verbs of workers that show a lease."""

    # -- claims ---------------------------------------------------------------------------------------------------
    def start(self, claims: Sequence[HeldLease]) -> list[LeaseStatus]:
        with self._turn:
            rows = [_claim_values(claim) for claim in claims]
            return self._standings(claims, self._session.returned("start", (self.clock.wall(),), rows))

    def renew(self, claims: Sequence[HeldLease]) -> list[LeaseStatus]:
        with self._turn:
            rows = [(*_claim_values(claim), claim.ttl_s) for claim in claims]
            base = self.clock.lease() + LEASE_MARGIN_S
            answers = self._standings(claims, self._session.returned("renew", (base,), rows))
            told = [(*_claim_values(claim), *_progress_values(claim.progress)) for claim in claims if claim.progress is not None]
            self._session.changed("tell_progress", (), told)
            return answers

    def _standings(self, claims: Sequence[HeldLease], changed: list[Any]) -> list[LeaseStatus]:
        """An answer for each claim. Those that changed no row may still be current: started before, or ORPHANED."""
        cancels = {tuple(shown): cancel for *shown, cancel in changed}
        rest = self._rows_seen(claim.job_id for claim in claims if _shown(claim) not in cancels)
        held = {_shown(claim): (claim, rest[claim.job_id]) for claim in claims if _is_held(rest.get(claim.job_id), claim)}
        cancels |= {shown: row.cancel_requested for shown, (_, row) in held.items() if row.job_state in LEASED}
        cancels |= self._resume([(claim, row) for claim, row in held.values() if row.job_state is State.ORPHANED])
        found = [cancels.get(_shown(claim)) for claim in claims]
        return [LeaseStatus.LOST if cancel is None else LeaseStatus.CANCEL if cancel else LeaseStatus.GO_ON for cancel in found]

    def _resume(self, held: list[tuple[HeldLease, JobRow]]) -> dict[tuple[Any, ...], int]:
        """Their workers are back. Who shows its lease while the job is given to another is not in the answer."""
        if not held:
            return {}
        batch = [(*_claim_values(claim), claim.ttl_s) for claim, _ in held]
        shared = (self.clock.lease() + LEASE_MARGIN_S, self.clock.wall())
        resumed = {tuple(shown): cancel for *shown, cancel in self._session.returned("resume", shared, batch)}
        for claim, row in held:
            if _shown(claim) in resumed:
                self._incident(row, "resumed", worker_id=claim.worker_id, reason=RESUMED)
                self._count(row.group, row.job_state, -1)
                self._count(row.group, after(row.job_state, Event.RESUME), 1)
        return resumed

    def release(self, claims: Sequence[HeldLease], *, reason: str = "") -> list[bool]:
        with self._turn:
            rows = self._rows(claim.job_id for claim in claims)
            answers = []
            released = []
            for claim in claims:
                row = rows.get(claim.job_id)
                if row is None or row.job_state not in sources(Event.RELEASE) or not _is_holder(row, claim):
                    answers.append(False)
                    continue
                del rows[claim.job_id]  # shown again in this batch, the lease is gone
                answers.append(True)
                if row.cancel_requested:
                    self._cancel_unstarted(row, reason)
                else:
                    released.append(row)
            self._give_back(released, reason)
            self._write_settled()
            return answers

    def _cancel_unstarted(self, row: JobRow, reason: str) -> None:
        worker_id = row.assigned_worker_id or ""
        outcome = Outcome(error_code="CANCELED", message=f"canceled; {worker_id} had not started it")
        self._incident(row, "canceled", worker_id=worker_id, reason=reason)
        self._settle(row, after(row.job_state, Event.CANCEL), outcome, keep_lease=False, not_before=row.not_before)

    def _give_back(self, rows: list[JobRow], reason: str) -> None:
        batch = [(row.id, row.version, row.lease_id) for row in rows]
        must_change(len(batch), self._session.changed("release", (), batch))
        for row in rows:
            self._incident(row, "released", worker_id=row.assigned_worker_id or "", reason=reason)
            self._count(row.group, row.job_state, -1)
            self._count(row.group, after(row.job_state, Event.RELEASE), 1)

    # -- reports --------------------------------------------------------------------------------------------------
    def finish(self, reports: Sequence[Report]) -> list[ReportAnswer]:
        if not reports:
            return []
        with self._turn:
            by_row = {row_id_of(report.lease_id): report for report in reports}
            if len(by_row) < len(reports) or len({report.job_id for report in reports}) < len(reports):
                # Several reports on one job: each is judged by what those before it left.
                changed: frozenset[int] = frozenset()
            else:
                changed = self._finish_batch(by_row)
            if len(changed) == len(reports):
                answers = [_RECORDED] * len(reports)
            else:
                answers = [
                    _RECORDED if row_id_of(report.lease_id) in changed else self._report(report, Event.SUCCEED)
                    for report in reports
                ]
                self._write_settled()
            self._at("finish.written")
            return answers

    def _finish_batch(self, by_row: dict[int, Report]) -> frozenset[int]:
        """Write all reports that are as they should be, in one statement for each kind; the ids of the rows that changed."""
        plain = [(row_id, *_plain_values(report)) for row_id, report in by_row.items() if _is_plain(report.outcome)]
        full = []
        if len(plain) < len(by_row):
            full = self._full_batch([(row_id, report) for row_id, report in by_row.items() if not _is_plain(report.outcome)])
        recorded = self._session.finish(self.clock.wall(), plain, full)
        for group, n in Counter([group for _, group in recorded]).items():
            self._count(group, State.RUNNING, -n)
            self._count(group, State.SUCCEEDED, n)
        changed_ids = frozenset([row_id for row_id, _ in recorded])
        for row_id in changed_ids if full else ():
            if (ref := by_row[row_id].outcome.result_ref) is not None:
                self._session.change("add_blob", (by_row[row_id].job_id, ref.sha256, "result"))
        return changed_ids

    def _full_batch(self, unusual: list[tuple[int, Report]]) -> list[tuple[Any, ...]]:
        """The rows of `finish_full`, without those whose result is a blob that is not stored: `_report` tells them."""
        refs = [report.outcome.result_ref for _, report in unusual if report.outcome.result_ref is not None]
        stored = self._stored_among(ref.sha256 for ref in refs)
        return [
            (row_id, *_full_values(report))
            for row_id, report in unusual
            if report.outcome.result_ref is None or report.outcome.result_ref.sha256 in stored
        ]

    def fail(self, reports: Sequence[Report]) -> list[ReportAnswer]:
        with self._turn:
            rows = self._rows(report.job_id for report in reports)
            # Taken out of those read before: a second report on one job is judged by what the first left.
            answers = [self._report(report, Event.FAIL, rows.pop(report.job_id, None)) for report in reports]
            self._write_settled()
            self._at("fail.written")
            return answers

    def _report(self, report: Report, verb: Event, row: JobRow | None = None) -> ReportAnswer:
        """One report, judged by its row, which is read unless it was just read."""
        row = row or self._row(report.job_id)
        if row is None:
            return ReportAnswer(ReportStatus.FENCED, None, "there is no such job")
        shown = (report.worker_id, report.lease_id, report.attempt)
        if row.job_state not in _REPORTABLE or shown != (row.assigned_worker_id, row.lease_id, row.attempt):
            return self._repeated_or_fenced(row, report, verb)
        ref = report.outcome.result_ref
        if ref is not None and not self._stored_among((ref.sha256,)):
            return ReportAnswer(
                ReportStatus.BLOB_MISSING, row.job_state, f"its result, blob {ref.sha256}, is not stored; bring it again"
            )
        started_at = row.started_at if row.started_at is not None else report.started_at
        if verb is Event.SUCCEED:
            state = after(row.job_state, verb)
            self._settle(row, state, report.outcome, not_before=row.not_before, started_at=started_at)
            return ReportAnswer(ReportStatus.RECORDED, state)
        verdict = after_failure(
            row.job_state,
            report.outcome,
            cancel_requested=bool(row.cancel_requested),
            failures=row.failures,
            losses=row.losses,
            max_retries=row.max_retries,
            backoff_s=row.backoff_s,
        )
        self._end_attempt(row._replace(started_at=started_at), verdict, report.outcome)
        return ReportAnswer(ReportStatus.RECORDED, verdict.state, verdict.reason)

    def _repeated_or_fenced(self, row: JobRow, report: Report, verb: Event) -> ReportAnswer:
        if _is_repeat(row, report, verb):
            return ReportAnswer(ReportStatus.REPEATED, row.job_state)
        reason = (
            f"attempt {report.attempt} of worker {report.worker_id} does not hold the lease; attempt {row.attempt} is {row.state}"
        )
        self._incident(row, "fenced", attempt=report.attempt, worker_id=report.worker_id, reason=reason)
        return ReportAnswer(ReportStatus.FENCED, row.job_state, reason)

    # -- the end of an attempt without success --------------------------------------------------------------------
    def _end_attempt(self, row: JobRow, verdict: Disposition, outcome: Outcome | None, epoch: int | None = None) -> None:
        """Do what the verdict says; without an outcome it is the store's own word on a lost worker."""
        self._incident(row, _KINDS[verdict.event], worker_id=row.assigned_worker_id or "", reason=verdict.reason)
        was_reported = outcome is not None
        not_before = row.not_before
        if verdict.state.terminal:
            code = "CANCELED" if verdict.event is Event.CANCEL else "LOST"
            outcome = outcome or Outcome(error_code=code, message=verdict.reason)
        else:
            not_before = self.clock.wall() + verdict.delay_s if verdict.delay_s > 0 else None
        self._settle(
            row,
            verdict.state,
            outcome,
            ready=0 if verdict.state.terminal else DELAYED if verdict.delay_s > 0 else READY,
            # After a report: to know its repeat. ORPHANED: its worker may still finish.
            keep_lease=was_reported or verdict.event is Event.ORPHAN,
            not_before=not_before,
            started_at=row.started_at,
            failures=verdict.failures,
            losses=verdict.losses,
            epoch=epoch,
        )

    def _loss(self, row: JobRow) -> Disposition:
        return after_loss(
            row.job_state,
            cancel_requested=bool(row.cancel_requested),
            keep=row.on_disconnect == OnDisconnect.KEEP.value,
            failures=row.failures,
            losses=row.losses,
            max_losses=row.max_losses,
            backoff_s=row.backoff_s,
            worker_id=row.assigned_worker_id or "",
            delay_first=decode_spec(row.spec).delay_first_loss,
        )

    def _check_epoch(self, epoch: int) -> None:
        """The first thing of every leader's verb, inside its transaction."""
        found = self._session.rows("epoch", (LEADER_SCOPE,))
        current, holder = found[0] if found else (0, "nobody")
        if epoch != current:
            raise StaleEpoch(f"epoch {epoch} does not lead, {current} does ({holder}); step down")


def _progress_values(progress: Progress) -> tuple[float, str]:
    return progress.fraction, storable(progress.text)


def _claim_values(claim: HeldLease) -> tuple[Any, ...]:
    return (row_id_of(claim.lease_id), *_shown(claim))


def _shown(claim: HeldLease) -> tuple[Any, ...]:
    return (claim.job_id, claim.lease_id, claim.worker_id, claim.incarnation, claim.attempt)


def _is_held(row: JobRow | None, claim: HeldLease) -> bool:
    """Whether the claim shows a lease that may still report."""
    return row is not None and row.job_state in _REPORTABLE and _is_holder(row, claim)


def _is_holder(row: JobRow, claim: HeldLease) -> bool:
    return _shown(claim) == (row.idempotency_key, row.lease_id, row.assigned_worker_id, row.incarnation, row.attempt)


def _is_plain(outcome: Outcome) -> bool:
    return not outcome.meta and not outcome.message and outcome.result_ref is None and outcome.error_code is None


def _plain_values(report: Report) -> tuple[Any, ...]:
    outcome = report.outcome
    return (
        report.job_id,
        report.lease_id,
        report.worker_id,
        report.attempt,
        report.started_at,
        outcome.exit_code,
        outcome.result,
        outcome.result_sha256,
    )


def _full_values(report: Report) -> tuple[Any, ...]:
    outcome = report.outcome
    return (
        report.job_id,
        report.lease_id,
        report.worker_id,
        report.attempt,
        report.started_at,
        outcome.exit_code,
        outcome.result if outcome.result_ref is None else None,
        result_sha256_of(outcome),
        result_size_of(outcome),
        outcome.error_code,
        storable(outcome.message),
        meta_of(outcome),
    )


def _is_repeat(row: JobRow, report: Report, verb: Event) -> bool:
    """Whether this very report was recorded."""
    recorded_by = Event.SUCCEED if row.job_state is State.SUCCEEDED else Event.FAIL
    shown = (report.worker_id, report.lease_id, report.attempt)
    is_same_attempt = shown == (row.assigned_worker_id, row.lease_id, row.attempt)
    return recorded_by is verb and is_same_attempt and said_by(report.outcome) == said_in(row)
