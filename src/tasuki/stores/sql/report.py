"""The verbs of workers on the SQL store: start, renew, release, finish, fail; and the end of an attempt, which reaping shares.

A lease_id ends in the id of its row, so that a report finds its row without the unique key on job_id, whose pages are cold when
ids are random. The row id only says where to look: job_id, lease_id, worker_id, owner and attempt are compared in the write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from tasuki.core.job import LEASED, OnDisconnect, Outcome, State, nominal_time
from tasuki.core.lifecycle import LEASE_MARGIN_S, RESUMED, Disposition, JobEvent, after, after_failure, after_loss, sources
from tasuki.core.store_messages import (
    HeldLease,
    LeaseHolder,
    LeaseStatus,
    Report,
    ReportAnswer,
    ReportStatus,
    recorded_success,
    storable_text,
)
from tasuki.stores.common import (
    INCIDENT_OF,
    LEASES_ENDED_MAX,
    belongs_to_story,
    fenced_reason,
    missing_result,
    outcome_of_lost,
    outcome_of_unstarted,
)
from tasuki.stores.sql.database import Transaction, must_change
from tasuki.stores.sql.rows import (
    AHEAD,
    DELAYED,
    READY,
    JobRow,
    decode_spec,
    meta_of,
    report_key_in,
    report_key_of,
    result_sha256_of,
    result_size_of,
)

_REPORTABLE = sources(JobEvent.SUCCEED)
_DIGITS_MAX = 18  # of a row id; more would not be an integer for SQLite


def row_id_of(lease_id: str) -> int:
    """Return the row id that the lease_id ends in; 0, which no row has, if it ends in none."""
    digits = lease_id[33:]
    return int(digits) if digits.isdecimal() and len(digits) <= _DIGITS_MAX else 0


# ---------------------------------------------------------------------------------------------------- held leases


def start(tx: Transaction, claims: Sequence[HeldLease]) -> list[LeaseStatus]:
    rows = [_claim_values(claim) for claim in claims]
    answers = _statuses(tx, claims, tx.session.returned("start", (tx.clock.wall(),), rows))
    _end_windows(tx, [claim.job_id for claim, answer in zip(claims, answers, strict=True) if answer is not LeaseStatus.LOST])
    return answers


def _end_windows(tx: Transaction, job_ids: Iterable[str]) -> None:
    """Let runs of definitions that have begun be retried also after their window."""
    if runs := [job_id for job_id in job_ids if nominal_time(job_id) is not None]:
        tx.session.change("started_in_time", (tx.session.listed(runs),))


def renew(tx: Transaction, claims: Sequence[HeldLease]) -> list[LeaseStatus]:
    rows = [(*_claim_values(claim), max(claim.ttl_s, claim.confirm_s or 0.0)) for claim in claims]
    base = tx.clock.lease() + LEASE_MARGIN_S
    answers = _statuses(tx, claims, tx.session.returned("renew", (base,), rows))
    told = [(claim, claim.progress) for claim in claims if claim.progress is not None]
    progress = [(*_claim_values(claim), progress.fraction, storable_text(progress.text)) for claim, progress in told]
    tx.session.changed("tell_progress", (), progress)
    asked = [(*_claim_values(claim), claim.confirm_s) for claim in claims if claim.confirm_s is not None]
    tx.session.changed("tell_continuation", (tx.clock.wall(),), asked)
    return answers


def _statuses(tx: Transaction, claims: Sequence[HeldLease], changed: list[Any]) -> list[LeaseStatus]:
    """Return the status of each claim. One that changed no row may still be current: started before, or ORPHANED."""
    cancels = {tuple(key): cancel for *key, cancel in changed}
    rest = tx.rows_unlocked(claim.job_id for claim in claims if _key_of(claim) not in cancels)
    shown = {_key_of(claim): (claim, row) for claim in claims if (row := rest.get(claim.job_id)) and _is_holder(row, claim)}
    cancels |= {key: row.cancel_requested for key, (_, row) in shown.items() if row.job_state in LEASED}
    cancels |= _resume(tx, [(claim, row) for claim, row in shown.values() if row.job_state is State.ORPHANED])
    found = [cancels.get(_key_of(claim)) for claim in claims]
    return [LeaseStatus.LOST if cancel is None else LeaseStatus.CANCEL if cancel else LeaseStatus.GO_ON for cancel in found]


def _resume(tx: Transaction, held: list[tuple[HeldLease, JobRow]]) -> dict[tuple[Any, ...], int]:
    """Make ORPHANED jobs run again whose workers are back; a job that was granted to another meanwhile is not in the answer."""
    if not held:
        return {}
    batch = [(*_claim_values(claim), claim.ttl_s) for claim, _ in held]
    shared = (tx.clock.lease() + LEASE_MARGIN_S, tx.clock.wall())
    resumed = {tuple(key): cancel for *key, cancel in tx.session.returned("resume", shared, batch)}
    for claim, row in held:
        if _key_of(claim) in resumed:
            tx.incident(row, "resumed", worker_id=claim.worker_id, reason=RESUMED)
            tx.count_move(row.group, row.job_state, after(row.job_state, JobEvent.RESUME))
    return resumed


def release(tx: Transaction, claims: Sequence[HeldLease], *, reason: str = "") -> list[bool]:
    rows = tx.rows(claim.job_id for claim in claims)
    answers = []
    released = []
    for claim in claims:
        row = rows.get(claim.job_id)
        is_held = row is not None and row.job_state in sources(JobEvent.RELEASE) and _is_holder(row, claim)
        if row is None or not is_held or _lives_on(tx, row, claim):
            answers.append(False)
            continue
        del rows[claim.job_id]  # shown again in this batch, the lease is gone
        answers.append(True)
        if row.cancel_requested:
            outcome = outcome_of_unstarted(claim.worker_id)
            tx.incident(row, "canceled", worker_id=claim.worker_id, reason=reason)
            tx.change_state(row, after(row.job_state, JobEvent.CANCEL), outcome, keep_lease=False, not_before=row.not_before)
        else:
            tx.incident(row, "released", worker_id=claim.worker_id, reason=reason)
            tx.count_move(row.group, row.job_state, after(row.job_state, JobEvent.RELEASE))
            released.append((row.id, row.version, row.lease_id))
            if row.ready != AHEAD:
                tx.comes_back(row.queue, row.id)
    must_change(len(released), tx.session.changed("release", (), released))
    tx.write_state_changes()
    return answers


def _lives_on(tx: Transaction, row: JobRow, claim: HeldLease) -> bool:
    """Return whether a lease that must be over to be released has more left than the margin."""
    return claim.is_over and (row.lease_expires_at or 0.0) - LEASE_MARGIN_S > tx.clock.lease()


def end_leases(tx: Transaction, holders: Sequence[LeaseHolder]) -> list[int]:
    return [_end_leases(tx, holder) for holder in holders]


def _end_leases(tx: Transaction, holder: LeaseHolder) -> int:
    found = tx.session.rows("leases_of", (holder.owner, holder.worker_id, LEASES_ENDED_MAX))
    rows = tx.rows(job_id for (job_id,) in found).values()
    held = [row for row in rows if holder.has(row.lease_owner, row.assigned_worker_id) and row.job_state in LEASED]
    unstarted = [_lease_of(row) for row in held if row.job_state is State.ASSIGNED]
    release(tx, unstarted, reason=holder.reason)
    for row in held:
        if row.job_state is State.RUNNING:
            disposition = disposition_of_loss(row._replace(on_disconnect=OnDisconnect.STOP.value))
            end_attempt(tx, row, replace(disposition, reason=f"{disposition.reason}; {holder.reason}"), None)
    tx.write_state_changes()
    return len(found)


def _lease_of(row: JobRow) -> HeldLease:
    shown = (row.idempotency_key, row.assigned_worker_id or "", row.incarnation, row.lease_id, row.attempt)
    return HeldLease(*shown, owner=row.lease_owner)


# ---------------------------------------------------------------------------------------------------- reports


def finish(tx: Transaction, reports: Sequence[Report]) -> list[ReportAnswer]:
    by_row = {row_id_of(report.lease_id): report for report in reports}
    if len(by_row) < len(reports) or len({report.job_id for report in reports}) < len(reports):
        # Several reports on one job: each is judged by what those before it left.
        changed: dict[int, str] = {}
    else:
        changed = _finish_batch(tx, by_row)
    groups = (changed.get(row_id_of(report.lease_id)) for report in reports)
    answers = [
        _report(tx, report, JobEvent.SUCCEED) if group is None else recorded_success(group)
        for report, group in zip(reports, groups, strict=True)
    ]
    if len(changed) < len(reports):
        tx.write_state_changes()
    tx.at("finish.written")
    return answers


def _finish_batch(tx: Transaction, by_row: dict[int, Report]) -> dict[int, str]:
    """Write all reports of leased jobs, one statement for each kind; return the groups of the rows that changed, by id."""
    plain = [(row_id, *_plain_values(report)) for row_id, report in by_row.items() if _is_plain(report.outcome)]
    full = []
    if len(plain) < len(by_row):
        unusual = [(row_id, report) for row_id, report in by_row.items() if not _is_plain(report.outcome)]
        refs = {row_id: ref for row_id, report in unusual if (ref := report.outcome.result_ref) is not None}
        stored = tx.stored_among(refs.values())
        # A report whose result is a blob that is not stored is left to `_report`.
        full = [(row_id, *_full_values(report)) for row_id, report in unusual if row_id not in refs or refs[row_id] in stored]
    changed = dict(tx.session.finish(tx.clock.wall(), plain, full))
    for group, n in Counter(changed.values()).items():
        tx.count_move(group, State.RUNNING, State.SUCCEEDED, n)
    for row_id in changed if full else ():
        if (ref := by_row[row_id].outcome.result_ref) is not None:
            tx.session.change("add_blob", (by_row[row_id].job_id, ref.sha256, "result"))
    return changed


def fail(tx: Transaction, reports: Sequence[Report]) -> list[ReportAnswer]:
    rows = tx.rows(report.job_id for report in reports)
    # Each row is used once: a second report on one job is judged by what the first left.
    answers = [_report(tx, report, JobEvent.FAIL, rows.pop(report.job_id, None)) for report in reports]
    tx.write_state_changes()
    judged = zip(reports, answers, strict=True)
    _end_windows(tx, [report.job_id for report, answer in judged if answer.state is State.PENDING])
    tx.at("fail.written")
    return answers


def _report(tx: Transaction, report: Report, verb: JobEvent, row: JobRow | None = None) -> ReportAnswer:
    """Judge one report by its row, which is read unless it was just read."""
    row = row or tx.rows((report.job_id,)).get(report.job_id)
    if row is None:
        return ReportAnswer(ReportStatus.FENCED, None, "there is no such job")
    if row.job_state not in _REPORTABLE or not _is_of_attempt(row, report):
        return _repeated_or_fenced(tx, row, report, verb)
    ref = report.outcome.result_ref
    if ref is not None and ref not in tx.stored_among((ref,)):
        return ReportAnswer(ReportStatus.BLOB_MISSING, row.job_state, missing_result(ref), row.group)
    started_at = row.started_at if row.started_at is not None else report.started_at
    if verb is JobEvent.SUCCEED:
        state = after(row.job_state, verb)
        tx.change_state(row, state, report.outcome, not_before=row.not_before, started_at=started_at)
        return ReportAnswer(ReportStatus.RECORDED, state, group=row.group)
    disposition = after_failure(
        row.job_state,
        report.outcome,
        cancel_requested=bool(row.cancel_requested),
        failures=row.failures,
        losses=row.losses,
        max_retries=row.max_retries,
        backoff_s=row.backoff_s,
    )
    end_attempt(tx, row._replace(started_at=started_at), disposition, report.outcome)
    return ReportAnswer(ReportStatus.RECORDED, disposition.state, disposition.reason, row.group)


def _repeated_or_fenced(tx: Transaction, row: JobRow, report: Report, verb: JobEvent) -> ReportAnswer:
    if _is_repeat(row, report, verb):
        return ReportAnswer(ReportStatus.REPEATED, row.job_state, group=row.group)
    reason = fenced_reason(report, row.attempt, row.state)
    if belongs_to_story(report, row.attempt, row.assigned_worker_id, lambda: tx.incidents(report.job_id)):
        tx.incident(row, "fenced", attempt=report.attempt, worker_id=report.worker_id, reason=reason)
    return ReportAnswer(ReportStatus.FENCED, row.job_state, reason, row.group)


# ---------------------------------------------------------------------------------------------------- end without success


def end_attempt(
    tx: Transaction, row: JobRow, disposition: Disposition, outcome: Outcome | None, epoch: int | None = None
) -> None:
    """Do what the disposition says; without an outcome the store makes one for the lost worker."""
    tx.incident(row, INCIDENT_OF[disposition.event], worker_id=row.assigned_worker_id or "", reason=disposition.reason)
    was_reported = outcome is not None
    not_before = row.not_before
    if disposition.state.terminal:
        outcome = outcome or outcome_of_lost(disposition)
    else:
        not_before = tx.clock.wall() + disposition.delay_s if disposition.delay_s > 0 else None
    tx.change_state(
        row,
        disposition.state,
        outcome,
        ready=0 if disposition.state.terminal else DELAYED if disposition.delay_s > 0 else READY,
        # After a report, to recognize its repeat. ORPHANED: its worker may still finish.
        keep_lease=was_reported or disposition.event is JobEvent.ORPHAN,
        not_before=not_before,
        started_at=row.started_at,
        failures=disposition.failures,
        losses=disposition.losses,
        epoch=epoch,
    )


def disposition_of_loss(row: JobRow) -> Disposition:
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


# ---------------------------------------------------------------------------------------------------- values of statements


def _claim_values(claim: HeldLease) -> tuple[Any, ...]:
    return (row_id_of(claim.lease_id), *_key_of(claim))


def _key_of(claim: HeldLease) -> tuple[Any, ...]:
    return (claim.job_id, claim.lease_id, claim.worker_id, claim.incarnation, claim.attempt, claim.owner)


def _is_holder(row: JobRow, claim: HeldLease) -> bool:
    shown = (row.idempotency_key, row.lease_id, row.assigned_worker_id, row.incarnation, row.attempt, row.lease_owner)
    return _key_of(claim) == shown


def _is_plain(outcome: Outcome) -> bool:
    """Return whether the statement with fewer columns will do."""
    return not outcome.meta and not outcome.message and outcome.result_ref is None and outcome.error_code is None


def _plain_values(report: Report) -> tuple[Any, ...]:
    outcome = report.outcome
    return (
        report.job_id,
        report.lease_id,
        report.worker_id,
        report.attempt,
        report.owner,
        report.started_at,
        outcome.exit_code,
        outcome.result,
        outcome.result_sha256,
    )


def _full_values(report: Report) -> tuple[Any, ...]:
    outcome = report.outcome
    return (
        *_plain_values(report)[:7],
        outcome.result if outcome.result_ref is None else None,
        result_sha256_of(outcome),
        result_size_of(outcome),
        outcome.error_code,
        storable_text(outcome.message),
        meta_of(outcome),
    )


def _is_of_attempt(row: JobRow, report: Report) -> bool:
    shown = (report.worker_id, report.lease_id, report.attempt, report.owner)
    return shown == (row.assigned_worker_id, row.lease_id, row.attempt, row.lease_owner)


def _is_repeat(row: JobRow, report: Report, verb: JobEvent) -> bool:
    """Return whether this very report was recorded."""
    recorded_by = JobEvent.SUCCEED if row.job_state is State.SUCCEEDED else JobEvent.FAIL
    return recorded_by is verb and _is_of_attempt(row, report) and report_key_of(report.outcome) == report_key_in(row)
