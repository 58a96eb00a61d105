"""The leader's duties on the SQL store: take over, reap, promote, prune. Each checks the epoch inside its own transaction."""

from __future__ import annotations

from tasuki.core.job import TERMINAL, State
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.core.verbs import Promoted, Reaped
from tasuki.stores.sql_report import LEADER_SCOPE, SqlReport
from tasuki.stores.sql_rows import JobRow, id_list, text_list

PRUNE_SCAN_MAX = 20_000  # rows that one prune looks at, some 20 ms; the next call goes on where it stopped
_PRUNE_STEP = 1_000
_CLOCK_SLACK_S = 3_600.0  # ids follow the wall clock but for what somebody set it back by
_TERMINAL_NAMES = {state.value: state for state in TERMINAL}


class SqlLeader(SqlReport):
    """Verbs of the one elected leader."""

    _prune_after: int
    """Where pruning goes on: rows up to this id were looked at. A hint that may be lost."""

    def take_over(self, holder: str) -> int:
        with self._turn:
            (epoch,) = self._execute(self._one["take_over"], (LEADER_SCOPE, holder)).fetchall()[0]
            # Also what makes leases outlive a restart: their times are of a clock that began again with the machine.
            self._execute(self._one["renew_all"], (self.clock.lease() + LEASE_MARGIN_S,))
            return int(epoch)

    def reap(self, *, epoch: int, limit: int = 256) -> list[Reaped]:
        with self._turn:
            self._check_epoch(epoch)
            ids = [row[0] for row in self._execute(self._one["leases_over"], (self.clock.lease(), limit))]
            if not ids:
                return []
            rows = {row[0]: JobRow._make(row) for row in self._execute(self._one["rows_by_id"], (id_list(ids),))}
            return [self._reap(rows[row_id], epoch) for row_id in ids]

    def _reap(self, row: JobRow, epoch: int) -> Reaped:
        verdict = self._loss(row)
        self._end_attempt(row, verdict, None, epoch)
        return Reaped(row.idempotency_key, verdict.state, row.assigned_worker_id or "", row.attempt, verdict.reason)

    def promote(self, *, epoch: int, limit: int = 1024) -> Promoted:
        with self._turn:
            self._check_epoch(epoch)
            due = self._execute(self._one["delayed_due"], (self.clock.wall(), limit)).fetchall()
            if due:
                self._execute(self._one["promote"], (id_list([row_id for row_id, _ in due]),))
            return Promoted(tuple(dict.fromkeys(subject for _, subject in due)), len(due))

    def prune(self, *, before: float, epoch: int, limit: int = 256) -> int:
        with self._turn:
            self._check_epoch(epoch)
            doomed = self._find_old(before, limit)
            if doomed:
                for _, group, state in doomed:
                    self._count(group, state, -1)
                self._write_gathered()
                ids = id_list([row_id for row_id, _, _ in doomed])
                for name in ("prune_jobs", "prune_incidents", "prune_blobs"):
                    self._execute(self._one[name], (ids,))
                self._execute(self._one["prune_counters"], (text_list(list({group for _, group, _ in doomed})),))
            return len(doomed)

    def _find_old(self, before: float, limit: int) -> list[tuple[int, str, State]]:
        """Jobs to delete, by age from where the last call stopped; from the young end it starts again at the oldest."""
        doomed: list[tuple[int, str, State]] = []
        looked = 0
        position = self._prune_after
        while looked < PRUNE_SCAN_MAX:
            rows = self._execute(self._one["old"], (position, _PRUNE_STEP)).fetchall()
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
