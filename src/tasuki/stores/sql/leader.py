"""The verbs of the leader on the SQL store: take over, reap, skip, promote, prune, archive logs. Each first checks the epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tasuki.core.election import LEADER_SCOPE
from tasuki.core.job import TERMINAL, BlobRef, State
from tasuki.core.lifecycle import LEASE_MARGIN_S, TAKEOVER_TIE_S, JobEvent, after, skip_outcome
from tasuki.core.statistics import ROLLUP_DAYS
from tasuki.core.store_messages import JobKind, LateJob, ReadyQueue, Reaped
from tasuki.stores.sql import report
from tasuki.stores.sql.database import Transaction
from tasuki.stores.sql.rows import JobRow, outcome_of

LOCKED_LOOKS = 10  # for leases that others have locked, 50 ms apart; one that an application locks for longer ends at its time
PRUNE_SCAN_MAX = 20_000  # rows that one prune looks at, some 20 ms; the next call continues where it stopped
_PRUNE_STEP = 1_000
PRUNE_ROWS_MAX = 2_000  # of a project's events, and of rollups, that one prune looks at, the oldest first
FOLD_MAX = 20_000  # counters that transactions of users left, added up by one prune, some 50 ms; the next call continues
DUE_SLACK_S = 5.0  # for turns of other servers that began earlier than the look that did not see them
DUE_ALL_INTERVAL_S = 10.0  # for clocks that were set back, and locks that were held for longer
_CLOCK_SLACK_S = 3_600.0  # ids follow the wall clock, except for the time by which it was set back
LOG_REF_BLOB = "blob:"  # before the sha256 of the log, in `log_ref`
_TERMINAL_NAMES = {state.value: state for state in TERMINAL}


def take_over(tx: Transaction, holder: str, epoch: int) -> bool:
    now = tx.clock.lease()
    earlier = _earlier_takeover(tx, now)
    if tx.session.change("take_over", (LEADER_SCOPE, epoch, holder, now)) != 1:
        return False
    tx.due_seen.clear()
    tx.checked_epoch = None
    # This also makes leases outlive a restart: their times are of a clock that began again with the machine.
    times = (now + LEASE_MARGIN_S, earlier + LEASE_MARGIN_S + TAKEOVER_TIE_S)
    tx.session.change("renew_all", times)
    for _ in range(LOCKED_LOOKS):
        if not tx.session.rows("not_renewed", times):
            break
        tx.session.change("renew_all", times)
    return True


def _earlier_takeover(tx: Transaction, now: float) -> float:
    """Return the lease-clock time of the last takeover. If one more comes in between, some leases are renewed once more."""
    found = tx.session.rows("taken_over_at", (LEADER_SCOPE,))
    known = [at for (at,) in found if at is not None and at <= now]
    return known[0] if known else -math.inf


def reap(tx: Transaction, *, epoch: int, limit: int = 256) -> list[Reaped]:
    tx.check_epoch(epoch)
    ids = [row_id for (row_id,) in _due(tx, "leases_over", tx.clock.lease(), limit)]
    reaped = [_reap(tx, row, epoch) for row in _rows_of(tx, ids)]
    tx.write_state_changes()
    return reaped


def _due(tx: Transaction, name: str, now: float, limit: int) -> list[Any]:
    """Return rows whose time has come, the earliest first.

    Times are written when they lie ahead. So times that earlier calls have seen are passed over: on PostgreSQL an old snapshot
    keeps their index entries, and every call would walk all of them.
    """
    seen_to, all_at = tx.due_seen.get(name, (-math.inf, -math.inf))
    since = seen_to - DUE_SLACK_S
    if now >= all_at or now < seen_to:
        since, all_at = -math.inf, now + DUE_ALL_INTERVAL_S
    rows = tx.session.rows(name, (since, now, limit))
    if len(rows) < limit:
        tx.due_seen[name] = (now, all_at)
    else:
        tx.due_seen.pop(name, None)  # some may be left, of any time
    return rows


def _rows_of(tx: Transaction, ids: list[int]) -> list[JobRow]:
    """Return rows that were just locked, in this order."""
    if not ids:
        return []
    rows = {row[0]: JobRow._make(row) for row in tx.session.rows("rows_by_id", (tx.session.listed(ids),))}
    return [rows[row_id] for row_id in ids]


def _reap(tx: Transaction, row: JobRow, epoch: int) -> Reaped:
    disposition = report.disposition_of_loss(row)
    report.end_attempt(tx, row, disposition, None, epoch)
    worker_id = row.assigned_worker_id or ""
    return Reaped(row.idempotency_key, disposition.state, worker_id, row.attempt, disposition.reason, row.group)


def skip(tx: Transaction, *, epoch: int, limit: int = 1024) -> list[LateJob]:
    tx.check_epoch(epoch)
    rows = _rows_of(tx, [row_id for (row_id,) in tx.session.rows("late", (tx.clock.wall(), limit))])
    for row in rows:
        assert row.not_after is not None
        outcome = skip_outcome(row.not_after, outcome_of(row))
        tx.incident(row, "skipped", reason=outcome.message)
        tx.end_waiting(row, after(row.job_state, JobEvent.SKIP), outcome, epoch=epoch)
    tx.write_state_changes()
    return [LateJob(row.idempotency_key, row.group) for row in rows]


def promote(tx: Transaction, *, epoch: int, limit: int = 1024) -> int:
    tx.check_epoch(epoch)
    due = _due(tx, "delayed_due", tx.clock.wall(), limit)
    if due:
        tx.session.change("promote", (tx.session.listed([row_id for row_id, *_ in due]),))
    for row_id, subject, kind, exec_ in due:
        tx.comes_back(ReadyQueue(subject, JobKind(kind), exec_), row_id)
    return len(due)


def prune(tx: Transaction, *, before: float, epoch: int, limit: int = 256) -> int:
    tx.check_epoch(epoch)
    _add_up(tx, "take_deltas", FOLD_MAX)
    tx.session.change("prune_events", (PRUNE_ROWS_MAX, before))
    tx.session.change("prune_notes")
    tx.session.change("prune_rollups", (PRUNE_ROWS_MAX, tx.clock.wall() - ROLLUP_DAYS * 86_400.0))
    found = {row_id: (group, state) for row_id, group, state in _find_old(tx, before, limit)}
    if not found:
        return 0
    # Others may have requeued one since it was read: only rows that are still old, and locked now, are deleted.
    session = tx.session
    doomed = [row_id for (row_id,) in session.rows("still_old", (session.listed(list(found)), before))]
    for row_id in doomed:
        group, state = found[row_id]
        tx.count(group, state, -1)
    tx.write_collected()
    for name in ("prune_jobs", "prune_incidents", "prune_logs", "prune_blobs"):
        session.change(name, (session.listed(doomed),))
    # Only pruning empties a group: its counters are deleted, those of many shards added up.
    _add_up(tx, "take_counters", session.listed(sorted({found[row_id][0] for row_id in doomed})))
    return len(doomed)


def archive_log(tx: Transaction, row_id: int, version: int, log: BlobRef | None, chunks: Sequence[int], *, epoch: int) -> bool:
    """Let a job refer to the blob that has its log, and delete the rows of the parts that are in it.

    False, and nothing is changed: the job is another version by now, or the blob is not stored any more. Without a blob the rows
    are those of a job that was deleted.
    """
    tx.check_epoch(epoch)
    session = tx.session
    if log is not None:
        if not session.rows("job_to_archive", (row_id, version)) or log not in tx.stored_among([log]):
            return False
        session.change("forget_log", (row_id,))
        session.change("add_log", (row_id, log.sha256))
        session.change("set_log_ref", (row_id, f"{LOG_REF_BLOB}{log.sha256}"))
        tx.at("archive.referred")
    session.change("delete_log_chunks", (session.listed(list(chunks)),))
    return True


def _add_up(tx: Transaction, name: str, which: Any) -> None:
    """Delete counters, and add their numbers to this writer's own shard; a sum of 0 leaves none."""
    for group, state, n in tx.session.rows(name, (which,)):
        tx.add_to_counter(group, state, n)


def _find_old(tx: Transaction, before: float, limit: int) -> list[tuple[int, str, State]]:
    """Return jobs to delete, by age from where the last call stopped; at the young end it starts again at the oldest."""
    doomed: list[tuple[int, str, State]] = []
    looked = 0
    position = tx.prune_after
    while looked < PRUNE_SCAN_MAX:
        rows = tx.session.rows("old", (position, _PRUNE_STEP))
        for row_id, state, group, created_at, finished_at in rows:
            if created_at >= before + _CLOCK_SLACK_S:
                rows = []  # ids are about in the order of time: all that follow are younger
                break
            if state in _TERMINAL_NAMES and finished_at < before:
                doomed.append((row_id, group, _TERMINAL_NAMES[state]))
            position = row_id
            if len(doomed) == limit:
                tx.prune_after = position
                return doomed
        looked += _PRUNE_STEP
        if len(rows) < _PRUNE_STEP:
            # The end. Rows that were passed over because they still lived are looked at again, unless this call began there.
            began_there, position = tx.prune_after == 0, 0
            tx.prune_after = 0
            if began_there or doomed:
                return doomed
    tx.prune_after = position
    return doomed
