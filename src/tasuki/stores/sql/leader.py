"""The leader's duties on the SQL store: take over, reap, skip, promote, prune. Each checks the epoch in its own transaction."""

from __future__ import annotations

import math

from tasuki.core.job import TERMINAL, State
from tasuki.core.lifecycle import LEASE_MARGIN_S, TAKEOVER_TIE_S, Event, after, skip_outcome
from tasuki.core.store_messages import Promoted, Reaped
from tasuki.stores.sql.read import LEADER_SCOPE
from tasuki.stores.sql.report import SqlReport
from tasuki.stores.sql.rows import JobRow, outcome_of

PRUNE_SCAN_MAX = 20_000  # rows that one prune looks at, some 20 ms; the next call goes on where it stopped
_PRUNE_STEP = 1_000
_CLOCK_SLACK_S = 3_600.0  # ids follow the wall clock but for what somebody set it back by
_TERMINAL_NAMES = {state.value: state for state in TERMINAL}


class SqlLeader(SqlReport):
    """Verbs of the one elected leader."""

    _prune_after: int
    """Where pruning goes on: rows up to this id were looked at. A hint that may be lost."""

    def take_over(self, holder: str, epoch: int) -> bool:
        with self._turn:
            now = self.clock.lease()
            earlier = self._earlier_takeover(now)
            if self._session.change("take_over", (LEADER_SCOPE, epoch, holder, now)) != 1:
                return False
            # Also what makes leases outlive a restart: their times are of a clock that began again with the machine.
            self._session.change("renew_all", (now + LEASE_MARGIN_S, earlier + LEASE_MARGIN_S + TAKEOVER_TIE_S))
            return True

    def _earlier_takeover(self, now: float) -> float:
        """When the last one was, on this lease clock. If another one comes in between, some leases are renewed once more."""
        found = self._session.rows("taken_over_at", (LEADER_SCOPE,))
        known = [at for (at,) in found if at is not None and at <= now]
        return known[0] if known else -math.inf

    def reap(self, *, epoch: int, limit: int = 256) -> list[Reaped]:
        with self._turn:
            self._check_epoch(epoch)
            ids = [row_id for (row_id,) in self._session.rows("leases_over", (self.clock.lease(), limit))]
            if not ids:
                return []
            reaped = [self._reap(row, epoch) for row in self._rows_of(ids)]
            self._write_settled()
            return reaped

    def _rows_of(self, ids: list[int]) -> list[JobRow]:
        """Rows that were just locked, in this order."""
        rows = {row[0]: JobRow._make(row) for row in self._session.rows("rows_by_id", (self._session.ids(ids),))}
        return [rows[row_id] for row_id in ids]

    def _reap(self, row: JobRow, epoch: int) -> Reaped:
        verdict = self._loss(row)
        self._end_attempt(row, verdict, None, epoch)
        return Reaped(row.idempotency_key, verdict.state, row.assigned_worker_id or "", row.attempt, verdict.reason)

    def skip(self, *, epoch: int, limit: int = 1024) -> list[str]:
        with self._turn:
            self._check_epoch(epoch)
            ids = [row_id for (row_id,) in self._session.rows("late", (self.clock.wall(), limit))]
            rows = self._rows_of(ids) if ids else []
            for row in rows:
                self._skip(row, epoch)
            self._write_settled()
            return [row.idempotency_key for row in rows]

    def _skip(self, row: JobRow, epoch: int) -> None:
        assert row.not_after is not None
        outcome = skip_outcome(row.not_after, outcome_of(row))
        self._incident(row, "skipped", reason=outcome.message)
        self._settle_waiting(row, after(row.job_state, Event.SKIP), outcome, epoch=epoch)

    def promote(self, *, epoch: int, limit: int = 1024) -> Promoted:
        with self._turn:
            self._check_epoch(epoch)
            due = self._session.rows("delayed_due", (self.clock.wall(), limit))
            if due:
                self._session.change("promote", (self._session.ids([row_id for row_id, _ in due]),))
            return Promoted(tuple(dict.fromkeys(subject for _, subject in due)), len(due))

    def prune(self, *, before: float, epoch: int, limit: int = 256) -> int:
        with self._turn:
            self._check_epoch(epoch)
            found = {row_id: (group, state) for row_id, group, state in self._find_old(before, limit)}
            if not found:
                return 0
            # Others may have set one going again since we looked: only what is still old, and locked now, goes.
            session = self._session
            doomed = [row_id for (row_id,) in session.rows("still_old", (session.ids(list(found)), before))]
            for row_id in doomed:
                group, state = found[row_id]
                self._count(group, state, -1)
            self._write_gathered()
            for name in ("prune_jobs", "prune_incidents", "prune_blobs"):
                session.change(name, (session.ids(doomed),))
            self._fold_counters({found[row_id][0] for row_id in doomed})
            return len(doomed)

    def _fold_counters(self, groups: set[str]) -> None:
        """Only pruning empties a group: its counters go if they are 0, and those of many shards become one."""
        for group, name, n in self._session.rows("take_counters", (self._session.texts(sorted(groups)),)):
            self._deltas[group, name] = self._deltas.get((group, name), 0) + n

    def _find_old(self, before: float, limit: int) -> list[tuple[int, str, State]]:
        """Jobs to delete, by age from where the last call stopped; from the young end it starts again at the oldest."""
        doomed: list[tuple[int, str, State]] = []
        looked = 0
        position = self._prune_after
        while looked < PRUNE_SCAN_MAX:
            rows = self._session.rows("old", (position, _PRUNE_STEP))
            for row_id, state, group, created_at, finished_at in rows:
                if created_at >= before + _CLOCK_SLACK_S:
                    rows = []  # ids are about in the order of time: all that follow are younger
                    break
                if state in _TERMINAL_NAMES and finished_at < before:
                    doomed.append((row_id, group, _TERMINAL_NAMES[state]))
                position = row_id
                if len(doomed) == limit:
                    self._prune_after = position
                    return doomed
            looked += _PRUNE_STEP
            if len(rows) < _PRUNE_STEP:
                # The end. What was skipped because it still lived is looked at again, unless this call began there.
                began_there, position = self._prune_after == 0, 0
                self._prune_after = 0
                if began_there or doomed:
                    return doomed
        self._prune_after = position
        return doomed

    def next_due(self) -> tuple[float | None, float | None]:
        ((lease_over,),) = self._select("next_lease_over")
        ((delayed,),) = self._select("next_delayed")
        return lease_over, delayed
