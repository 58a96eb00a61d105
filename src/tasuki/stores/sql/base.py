"""What the verbs of the SQL store stand on: transactions, batches of rows, counters, incidents. The verbs are in sql_*.py.

Counters are added up and incidents gathered in Python, and written once at the end of a turn: a turn of 256 jobs changes a few
rows of counters, and its incidents are one statement. So are the endings that one verb judged: `_settle` gathers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar

from tasuki.core.job import Outcome, State
from tasuki.core.store_messages import COUNTED
from tasuki.errors import TasukiError, Unavailable
from tasuki.stores.sql.database import NOT_KNOWN, NOTHING_STORED, Database, SqlSession
from tasuki.stores.sql.read import SqlReads
from tasuki.stores.sql.rows import JobRow, outcome_values, replaced_report_of
from tasuki.stores.store import Clock
from tasuki.stores.texts import storable

T = TypeVar("T")


class SqlTurn:
    """`with store.turn():`; one object per store, entered again by every verb inside."""

    def __init__(self, begin: Callable[[], None], end: Callable[[BaseException | None], None]) -> None:
        self._begin = begin
        self._end = end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        self._end(error)


class SqlBase(SqlReads):
    """One transaction at a time, and the writes that several verbs share."""

    def __init__(
        self, database: Database, clock: Clock, random: Callable[[int], bytes], fault: Callable[[str], None] | None
    ) -> None:
        self.clock = clock
        self._database = database
        self._random = random
        self._fault = fault
        self._translated = database.translated
        self._turn = SqlTurn(self._begin, self._end)
        self._depth = 0
        self._lasting = True
        """Of the next transaction."""
        self._doomed: BaseException | None = None
        self._deltas: dict[tuple[str, str], int] = {}
        self._incidents: list[tuple[Any, ...]] = []
        self._settled: list[tuple[Any, ...]] = []
        self._session: SqlSession
        """In a turn: its connection's."""

    # -- transactions ---------------------------------------------------------------------------------------------
    def turn(self, *, lasting: bool = True) -> SqlTurn:
        """One transaction around several verbs. Durable when it returns without an error; DiskFull, Unavailable otherwise."""
        self._lasting = lasting
        return self._turn

    def close(self) -> None:
        """Give back everything; the file is free for another owner afterwards."""
        self._database.close()

    def _read(self, read: Callable[[SqlSession], T]) -> T:
        with self._translated():
            return read(self._session if self._depth > 0 else self._database.session)

    def _begin(self) -> None:
        if self._depth > 0:
            self._depth += 1
            return
        with self._translated():
            lasting, self._lasting = self._lasting, True
            self._database.begin(lasting=lasting)
            self._session = self._database.session
        self._doomed = None
        self._forget_gathered()
        self._depth = 1
        try:
            self._at("turn.begun")
        except BaseException as error:
            self._end(error)
            raise

    def _end(self, error: BaseException | None) -> None:
        self._depth -= 1
        if error is not None and (not isinstance(error, TasukiError) or isinstance(error, Unavailable)):
            # Our own refusals come before a verb's first write; after anything else the transaction is half done.
            self._doomed = error
        with self._translated():
            if self._depth == 0:
                self._close_transaction(error)
            elif error is not None:
                raise error

    def _close_transaction(self, error: BaseException | None) -> None:
        if error is not None or self._doomed is not None:
            self._give_up()
            if error is not None:
                raise error
            raise Unavailable(f"an earlier part of this turn failed, all of it was rolled back: {self._doomed}") from self._doomed
        try:
            self._write_gathered()
            self._at("turn.before_commit")
            with self._translated(NOT_KNOWN):
                self._database.commit()
        except BaseException:
            self._give_up()
            raise
        self._at("turn.committed")

    def _give_up(self) -> None:
        self._forget_gathered()
        self._database.rollback()

    def _at(self, point: str) -> None:
        """A named point at which tests let the process die."""
        if self._fault is not None:
            self._fault(point)

    # -- rows -----------------------------------------------------------------------------------------------------
    def _rows(self, job_ids: Iterable[str], statement: str = "rows_to_judge") -> dict[str, JobRow]:
        """The rows of those jobs that exist, without the bytes of their results; nobody else changes them in this turn."""
        self._write_settled()
        names = list(job_ids)
        found = self._session.rows(statement, (self._session.texts(names),)) if names else []
        return {row[1]: JobRow._make(row) for row in found}

    def _rows_seen(self, job_ids: Iterable[str]) -> dict[str, JobRow]:
        """The same, only to look at: others may change them meanwhile."""
        return self._rows(job_ids, "rows_seen")

    def _row(self, job_id: str) -> JobRow | None:
        return self._rows((job_id,)).get(job_id)

    def _settle(
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
        """What became of a job whose row was judged in this turn, counted now, and written with others by `_write_settled`."""
        self._settled.append(
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
        self._count(row.group, row.job_state, -1)
        self._count(row.group, state, 1)
        if outcome is not None and outcome.result_ref is not None:
            self._session.change("add_blob", (row.idempotency_key, outcome.result_ref.sha256, "result"))

    def _settle_waiting(self, row: JobRow, state: State, outcome: Outcome, *, epoch: int | None = None) -> None:
        """A job that nobody runs comes to its end. What its last attempt reported stays known, and a repeat of it is one."""
        report = replaced_report_of(row)
        self._settle(
            row,
            state,
            outcome,
            keep_lease=report is not None,
            not_before=row.not_before,
            started_at=row.started_at,
            epoch=epoch,
            replaced_report=report,
        )

    def _write_settled(self) -> None:
        """At the end of every verb that settles, and before one reads a row again."""
        if self._settled:
            batch, self._settled = self._settled, []
            must_change(len(batch), self._session.changed("settle", (), batch))

    def _clear_results(self, row_ids: list[int]) -> None:
        """The results of earlier attempts are no longer these jobs' blobs."""
        if row_ids:
            self._session.change("forget_results", (self._session.ids(row_ids),))

    # -- counters and incidents -----------------------------------------------------------------------------------
    def _count(self, group: str, state: State, n: int) -> None:
        key = (group, COUNTED[state])
        self._deltas[key] = self._deltas.get(key, 0) + n

    def _write_gathered(self) -> None:
        """At the end of a turn, and before what reads or deletes counters or incidents in it."""
        self._write_settled()
        # In one order everywhere: two writers that share a shard cannot wait for each other in a circle.
        rows = sorted((group, name, n) for (group, name), n in self._deltas.items() if n)
        if rows:
            self._session.changed("count", (self._database.shard,), rows)
        if self._incidents:
            self._session.changed("add_incidents", (), self._incidents)
        self._forget_gathered()

    def _forget_gathered(self) -> None:
        self._deltas.clear()
        self._incidents.clear()
        self._settled.clear()

    def _incident(
        self, row: JobRow, kind: str, *, attempt: int | None = None, worker_id: str = "", actor: str = "", reason: str = ""
    ) -> None:
        attempt = row.attempt if attempt is None else attempt
        self._incidents.append((row.id, self.clock.wall(), kind, attempt, worker_id, actor, storable(reason)))


def must_change(wanted: int, changed: int) -> None:
    """The rows were read in this transaction, and locked: whoever changed one since is no tasuki."""
    if changed != wanted:
        raise Unavailable(f"{wanted - changed} of {wanted} jobs were changed by another writer meanwhile; {NOTHING_STORED}")
