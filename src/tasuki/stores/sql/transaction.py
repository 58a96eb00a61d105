"""The transaction that the verbs of the SQL store share, and the writes that several verbs need.

A store has one `Transaction` object. `with store.turn():` enters it, and every verb enters it again; only the outermost exit
commits. Between transactions it keeps the hints that make scans go on where they stopped.

Counters are added up and incidents collected in Python, and written once at the end: a turn of 256 jobs changes a few counter
rows, and its incidents are one statement. State changes that one verb decided are one statement too (`change_state` collects
them, `write_state_changes` writes them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar

from tasuki.core.job import Outcome, State
from tasuki.core.store_messages import COUNTED
from tasuki.errors import TasukiError, Unavailable
from tasuki.stores.common import FairTurns, stale_epoch, storable
from tasuki.stores.sql.database import LEADER_SCOPE, NOT_KNOWN, NOTHING_STORED, Database, SqlSession
from tasuki.stores.sql.rows import JobRow, outcome_values, replaced_report_of
from tasuki.stores.store import Clock

T = TypeVar("T")


class Transaction:
    """The current transaction of a store: its session, its clock, and what is to be written when it ends."""

    def __init__(
        self, database: Database, clock: Clock, random: Callable[[int], bytes], fault: Callable[[str], None] | None
    ) -> None:
        self.clock = clock
        self.random = random
        self.is_durable = True
        """True if the next transaction must survive a power cut."""
        self.session: SqlSession
        """The session of the connection that the transaction runs on; set while a transaction is open."""
        self._database = database
        self._translated = database.translated
        self._fault = fault
        self._depth = 0
        self._failed_by: BaseException | None = None
        self._counted: dict[tuple[str, str], int] = {}
        self._incidents: list[tuple[Any, ...]] = []
        self._state_changes: list[tuple[Any, ...]] = []

        # Hints that outlive the transaction, and may be lost.
        self.fairness = FairTurns()
        self.ready_starts: dict[Any, str] = {}
        """Start of the next scan of each place of the ready index (see `lease.py`)."""
        self.prune_after = 0
        """Row id up to which pruning has looked."""
        self.condemn_after = (0.0, 0)
        """(touched_at, id) of the last blob that collection looked at."""

    # -- begin and end --------------------------------------------------------------------------------------------
    @property
    def is_open(self) -> bool:
        return self._depth > 0

    def read(self, read: Callable[[SqlSession], T]) -> T:
        """Call `read` with the session of the transaction, or outside of one with the connection's."""
        with self._translated():
            return read(self.session if self._depth > 0 else self._database.session)

    def __enter__(self) -> None:
        if self._depth > 0:
            self._depth += 1
            return
        with self._translated():
            is_durable, self.is_durable = self.is_durable, True
            self._database.begin(lasting=is_durable)
            self.session = self._database.session
        self._failed_by = None
        self._drop_collected()
        self._depth = 1
        try:
            self.at("turn.begun")
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        self._depth -= 1
        if error is not None and (not isinstance(error, TasukiError) or isinstance(error, Unavailable)):
            # A verb's own refusal comes before its first write; after any other error the transaction is half done.
            self._failed_by = error
        with self._translated():
            if self._depth == 0:
                self._close(error)
            elif error is not None:
                raise error

    def _close(self, error: BaseException | None) -> None:
        if error is not None or self._failed_by is not None:
            self._roll_back()
            if error is not None:
                raise error
            story = f"an earlier part of this turn failed, all of it was rolled back: {self._failed_by}"
            raise Unavailable(story) from self._failed_by
        try:
            self.write_collected()
            self.at("turn.before_commit")
            with self._translated(NOT_KNOWN):
                self._database.commit()
        except BaseException:
            self._roll_back()
            raise
        self.at("turn.committed")

    def _roll_back(self) -> None:
        self._drop_collected()
        self._database.rollback()

    def at(self, point: str) -> None:
        """Mark a named point at which tests end the process."""
        if self._fault is not None:
            self._fault(point)

    def check_epoch(self, epoch: int) -> None:
        """StaleEpoch unless this epoch leads. The first statement of every leader's verb."""
        found = self.session.rows("epoch", (LEADER_SCOPE,))
        current, holder = found[0] if found else (0, "")
        if epoch != current:
            raise stale_epoch(epoch, current, holder)

    # -- rows -----------------------------------------------------------------------------------------------------
    def rows(self, job_ids: Iterable[str], statement: str = "rows_to_judge") -> dict[str, JobRow]:
        """Return the rows of the jobs that exist, without the bytes of their results, locked until the transaction ends."""
        self.write_state_changes()
        names = list(job_ids)
        found = self.session.rows(statement, (self.session.texts(names),)) if names else []
        return {row[1]: JobRow._make(row) for row in found}

    def rows_unlocked(self, job_ids: Iterable[str]) -> dict[str, JobRow]:
        """Return the rows of the jobs that exist, without a lock: others may change them meanwhile."""
        return self.rows(job_ids, "rows_seen")

    def stored_among(self, sha256s: Iterable[str]) -> set[str]:
        """Return the blobs that a job may refer to; they stay stored until the transaction ends (see `blobs.py`)."""
        names = sorted(set(sha256s))
        return {sha256 for (sha256,) in self.session.rows("stored_blobs", (self.session.texts(names),))} if names else set()

    def change_state(
        self,
        row: JobRow,
        state: State,
        outcome: Outcome | None,
        *,
        ready: int = 0,
        keep_lease: bool = True,
        not_before: float | None = None,
        started_at: float | None = None,
        failures: int | None = None,
        losses: int | None = None,
        epoch: int | None = None,
        replaced_report: bytes | None = None,
    ) -> None:
        """Give a job whose row was read in this transaction a new state; written with others by `write_state_changes`."""
        self._state_changes.append(
            (
                row.id,
                row.state,
                row.version,
                row.attempt,
                row.lease_id,
                row.assigned_worker_id,
                row.lease_expires_at,
                state.value,
                ready,
                not_before,
                row.lease_id if keep_lease else "",
                row.failures if failures is None else failures,
                row.losses if losses is None else losses,
                started_at,
                self.clock.wall() if state.terminal else None,
                row.leader_epoch if epoch is None else epoch,
                *outcome_values(outcome, state),
                replaced_report,
            )
        )
        self.count_move(row.group, row.job_state, state)
        if outcome is not None and outcome.result_ref is not None:
            self.session.change("add_blob", (row.idempotency_key, outcome.result_ref.sha256, "result"))

    def end_waiting(self, row: JobRow, state: State, outcome: Outcome, *, epoch: int | None = None) -> None:
        """End a job that no worker runs. The report of its last attempt stays known, so that its repeat is recognized."""
        report = replaced_report_of(row)
        self.change_state(
            row,
            state,
            outcome,
            keep_lease=report is not None,
            not_before=row.not_before,
            started_at=row.started_at,
            epoch=epoch,
            replaced_report=report,
        )

    def write_state_changes(self) -> None:
        """Write the collected state changes: at the end of every verb that makes some, and before a row is read again."""
        if self._state_changes:
            batch, self._state_changes = self._state_changes, []
            must_change(len(batch), self.session.changed("settle", (), batch))

    def clear_results(self, row_ids: list[int]) -> None:
        """Drop the references of these jobs to the results of earlier attempts."""
        if row_ids:
            self.session.change("forget_results", (self.session.ids(row_ids),))

    # -- counters and incidents -----------------------------------------------------------------------------------
    def count(self, group: str, state: State, n: int) -> None:
        self.add_to_counter(group, COUNTED[state], n)

    def count_move(self, group: str, before: State, now: State, n: int = 1) -> None:
        self.add_to_counter(group, COUNTED[before], -n)
        self.add_to_counter(group, COUNTED[now], n)

    def add_to_counter(self, group: str, name: str, n: int) -> None:
        key = (group, name)
        self._counted[key] = self._counted.get(key, 0) + n

    def incident(
        self, row: JobRow, kind: str, *, attempt: int | None = None, worker_id: str = "", actor: str = "", reason: str = ""
    ) -> None:
        attempt = row.attempt if attempt is None else attempt
        self._incidents.append((row.id, self.clock.wall(), kind, attempt, worker_id, actor, storable(reason)))

    def write_collected(self) -> None:
        """Write all that was collected: at the end, and before a verb reads or deletes counters or incidents."""
        self.write_state_changes()
        # In one order everywhere: two writers that share a shard cannot wait for each other in a circle.
        rows = sorted((group, name, n) for (group, name), n in self._counted.items() if n)
        if rows:
            self.session.changed("count", (self._database.shard,), rows)
        if self._incidents:
            self.session.changed("add_incidents", (), self._incidents)
        self._drop_collected()

    def _drop_collected(self) -> None:
        self._counted.clear()
        self._incidents.clear()
        self._state_changes.clear()


def must_change(wanted: int, changed: int) -> None:
    """Unavailable unless all rows were changed: they were read and locked in this transaction, so the other writer is foreign."""
    if changed != wanted:
        raise Unavailable(f"{wanted - changed} of {wanted} jobs were changed by another writer meanwhile; {NOTHING_STORED}")
