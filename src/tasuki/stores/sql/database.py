"""The database under the SQL store: the interface of a vendor, named statements, and the transaction that the verbs share.

The verbs are written once. A vendor adds its statements (`statements/<vendor>.sql`), a `Database` that opens, begins and commits,
and a `SqlSession` that runs statements by name on one connection. Where the fastest way to do a thing differs between vendors as
a whole (insert a batch, claim ready jobs, record a batch of finishes), it is one call of the session.

A store has one `Transaction` object. `with store.turn():` enters it, and every verb enters it again; only the outermost exit
commits. Between transactions it keeps the hints that make scans continue where they stopped. Counters are added up and incidents
collected in Python, and written once at the end: a turn of 256 jobs changes a few counter rows, and its incidents are one
statement. State changes that one verb decided are one statement too (`change_state` collects them, `write_state_changes` writes
them).

A statement with `{rows: …}` takes a whole batch. It exists in sizes of 1, 2, 4, … 256 rows, so that a batch of any length is a
handful of statements out of a set small enough to stay compiled.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, wraps
from importlib.resources import files
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

from tasuki.core.election import LEADER_SCOPE
from tasuki.core.job import BlobRef, JobIncident, Outcome, State
from tasuki.core.statistics import COUNTED
from tasuki.core.store_messages import ReadyQueue, storable_text
from tasuki.errors import TasukiError, Unavailable
from tasuki.stores.common import FairTurns, stale_epoch
from tasuki.stores.sql.rows import READY, JobRow, fragments, outcome_values, replaced_report_of
from tasuki.stores.store import Clock, Feature

if TYPE_CHECKING:
    from django.db import transaction
    from django.db.backends.base.base import BaseDatabaseWrapper

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")

Parameters = Sequence[Any] | Mapping[str, Any]
"""Parameters of one statement: by position, or by name where the statement has names."""

Batch = Sequence[tuple[Any, ...]]
"""One tuple for each row of a batch statement."""

WALL = 7  # position of the wall clock time among the terms of a grant
BATCH_MAX = 256  # rows of one statement; twice as many brought nothing more
ABOVE_ALL_PRIORITIES = 1_000
NOTHING_STORED = "nothing of this was stored"
NOT_KNOWN = "whether this was stored is not known"


class InsertedRows(NamedTuple):
    """A part of a batch of new jobs: the number of its rows, and how many of them were not there before."""

    size: int
    created: int
    new_ids: Collection[int]
    """Row ids of the new jobs."""


class Queues(NamedTuple):
    """Queues to claim from (subject, kind and exec) of one group and priority, and how many of their oldest jobs."""

    priority: int
    group: str
    members: list[tuple[str, int, str]]
    limit: int


class SqlSession(Protocol):
    """One connection that runs named statements. Errors are the driver's own: see `Database.translated`."""

    # -- any statement --------------------------------------------------------------------------------------------
    def rows(self, name: str, parameters: Parameters = ()) -> list[Any]:
        """Run a statement and return its rows."""

    def change(self, name: str, parameters: Parameters = ()) -> int:
        """Run a statement and return how many rows it changed."""

    def changed(self, name: str, shared: tuple[Any, ...], batch: Batch) -> int:
        """Run a batch statement and return how many rows it changed."""

    def returned(self, name: str, shared: tuple[Any, ...], batch: Batch) -> list[Any]:
        """Run a batch statement and return its rows, in no order."""

    def walk(self, name: str, conditions: str, values: dict[str, Any]) -> Iterator[Any]:
        """Yield the rows of a `find` statement with further conditions, read as far as the caller asks; at most
        `values["most"]`."""

    # -- lists as parameters --------------------------------------------------------------------------------------
    def listed(self, values: Sequence[Any]) -> Any:
        """Return the parameter for a list."""

    def holders(self, holders: list[tuple[str, str, str]]) -> tuple[Any, ...]:
        """Return the parameters of the statement `held`."""

    def contains(self, column: str) -> str:
        """Return the condition that a text column contains the parameter :text."""

    # -- where vendors differ as a whole --------------------------------------------------------------------------
    def insert(self, name: str, wall: float, batch: Batch) -> Iterator[InsertedRows]:
        """Insert the jobs whose ids are new, in this order; part by part, the parts in the order of the batch."""

    def claim(self, queues: Queues, terms: tuple[Any, ...]) -> list[Any]:
        """Grant the oldest ready jobs of these queues by the terms (the parameters of `grant` without the ids), except those
        that are too late to start.

        Return the rows, oldest first, as they were: (id, job_id, spec, submitter, attempt, state, result_sha256).
        """

    def came_back(self, row_id: int) -> None:
        """Note that a job that was taken is ready again."""

    def finish(self, wall: float, plain: Batch, full: Batch) -> list[tuple[int, str]]:
        """Record finishes; return (id, group) of the jobs that were leased to the reporting worker and are SUCCEEDED now."""


class ReadOnly(Protocol):
    """A connection for readers."""

    @property
    def session(self) -> SqlSession:
        """The session of the current connection; ask again after `Database.begin`, which may have connected anew."""

    def translated(self) -> AbstractContextManager[None]:
        """Turn errors of the driver into tasuki's."""

    def close(self) -> None: ...


class Database(ReadOnly, Protocol):
    """A database that is open for writing by one thread at a time."""

    features: frozenset[Feature]

    @property
    def shard(self) -> int | None:
        """Shard of the counters that this writer adds to; None: its numbers are rows of their own."""

    @property
    def clock(self) -> Clock:
        """The clock that the times in this database are of."""

    def begin(self, *, lasting: bool = True) -> None:
        """Begin a transaction; unless `lasting`, its commit need not wait for the disk."""

    def commit(self) -> None: ...
    def rollback(self) -> None:
        """Undo the transaction, whatever error occurred."""

    def translated(self, fate: str = NOTHING_STORED) -> AbstractContextManager[None]:
        """Turn errors of the driver into tasuki's. `fate`: what an error here means for the data that was to be stored."""

    def reader(self) -> ReadOnly:
        """Open a second connection that cannot write, for the calling thread."""


class TranslatedErrors:
    """Context that turns errors of the driver into tasuki's."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None and not isinstance(error, TasukiError) and (replacement := self.replacement(error)) is not None:
            raise replacement from error

    @abstractmethod
    def replacement(self, error: BaseException) -> TasukiError | None:
        """Return tasuki's error for one of the driver, None for any other. Django wraps some of the driver's in its own."""


class InDjango:
    """Transactions in a user's own Django project: verbs join the `transaction.atomic()` that the calling thread is in.

    The connection, its settings and the consequences of its errors are the project's: nothing is tuned, nothing is retried.
    Their transactions may last, so they write no row that another transaction would wait for.
    """

    def __init__(self, alias: str) -> None:
        from django.db import transaction

        self._alias = alias
        self._atomic = transaction.atomic
        self._open: list[transaction.Atomic] = []

    def wrapper(self) -> BaseDatabaseWrapper:
        """Return Django's connection of the calling thread, connected."""
        from django.db import connections

        wrapper = connections[self._alias]
        wrapper.ensure_connection()
        return wrapper

    def begin(self, *, lasting: bool = True) -> None:
        """Set a savepoint inside the user's transaction, so that a verb that fails leaves nothing behind; else begin one."""
        block = self._atomic(using=self._alias)
        block.__enter__()
        self._open.append(block)

    def commit(self) -> None:
        self._open.pop().__exit__(None, None, None)

    def rollback(self) -> None:
        if self._open:
            error = Unavailable("rolled back")
            self._open.pop().__exit__(type(error), error, None)

    def close(self) -> None:
        """Do nothing: the connection is Django's."""


# ---------------------------------------------------------------------------------------------------- named statements

_NAME = re.compile(r"^-- (name|part): (\w+)$", re.MULTILINE)
_ROWS = re.compile(r"\{rows: (\(.*?\))\}")


class Statements:
    """The statements of one vendor by name: `one[name]`, or `many[name][size]` for those that take batches."""

    def __init__(self, text: str, fragments: Mapping[str, str]) -> None:
        self.one: dict[str, str] = {}
        self.many: dict[str, dict[int, str]] = {}
        fragments = dict(fragments)
        pieces = _NAME.split(text)[1:]
        for kind, name, block in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True):
            lines = (line.strip() for line in block.splitlines())
            statement = " ".join(line for line in lines if line and not line.startswith("--"))
            for key, fragment in fragments.items():
                statement = statement.replace(f"{{{key}}}", fragment)
            rows = _ROWS.search(statement)
            if kind == "part":
                fragments[name] = statement
            elif rows is None:
                self.one[name] = statement
            else:
                sizes = [1 << exponent for exponent in range(BATCH_MAX.bit_length())]
                self.many[name] = {size: _repeated(statement, rows, size) for size in sizes}


def _repeated(statement: str, rows: re.Match[str], size: int) -> str:
    return statement[: rows.start()] + ", ".join([rows[1]] * size) + statement[rows.end() :]


@lru_cache
def load_statements(vendor: str) -> Statements:
    """Load the statements for `sqlite` or `postgresql`, once per process."""
    text = files("tasuki.stores.sql").joinpath("statements", f"{vendor}.sql").read_text("utf-8")
    return Statements(text, fragments(vendor))


# ---------------------------------------------------------------------------------------------------- transactions


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
        self.checked_epoch: int | None = None
        """Epoch that this transaction has found to lead, and keeps from being replaced by its lock."""
        self._counted: dict[tuple[str, str], int] = {}
        self._incidents: list[tuple[Any, ...]] = []
        self._state_changes: list[tuple[Any, ...]] = []
        self.came_back: dict[ReadyQueue, None] = {}
        """Queues that jobs came back to in this transaction, or in the last one."""
        self.cut: list[int] = []
        """Positions of its lease requests that ended at their bound."""

        # Hints that outlive the transaction, and may be lost.
        self.fairness = FairTurns()
        self.ready_starts: dict[Any, str] = {}
        """Start of the next scan of each place of the ready index (see `lease.py`)."""
        self.due_seen: dict[str, tuple[float, float]] = {}
        """Time up to which each look for due rows has seen all, and time at which it looks at all of them again."""
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
        self.checked_epoch = None
        self.came_back, self.cut = {}, []
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
        self.due_seen.clear()
        self._database.rollback()

    def at(self, point: str) -> None:
        """Mark a named point at which tests end the process."""
        if self._fault is not None:
            self._fault(point)

    def check_epoch(self, epoch: int) -> None:
        """StaleEpoch unless this epoch leads. The first statement of every leader's verb, once in a transaction."""
        if epoch == self.checked_epoch:
            return
        found = self.session.rows("epoch", (LEADER_SCOPE,))
        current, holder = found[0] if found else (0, "")
        if epoch != current:
            raise stale_epoch(epoch, current, holder)
        self.checked_epoch = epoch

    # -- rows -----------------------------------------------------------------------------------------------------
    def rows(self, job_ids: Iterable[str], statement: str = "rows_to_judge") -> dict[str, JobRow]:
        """Return the rows of the jobs that exist, without the bytes of their results, locked until the transaction ends."""
        self.write_state_changes()
        names = list(job_ids)
        found = self.session.rows(statement, (self.session.listed(names),)) if names else []
        return {row[1]: JobRow._make(row) for row in found}

    def rows_unlocked(self, job_ids: Iterable[str]) -> dict[str, JobRow]:
        """Return the rows of the jobs that exist, without a lock: others may change them meanwhile."""
        return self.rows(job_ids, "rows_seen")

    def stored_among(self, refs: Iterable[BlobRef]) -> set[BlobRef]:
        """Return the blobs that a job may refer to; they stay stored until the transaction ends (see `blobs.py`)."""
        names = sorted({ref.sha256 for ref in refs})
        return {BlobRef(*row) for row in self.session.rows("stored_blobs", (self.session.listed(names),))} if names else set()

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
        if ready == READY:
            self.comes_back(row.queue, row.id)
        if outcome is not None and outcome.result_ref is not None:
            self.session.change("add_blob", (row.idempotency_key, outcome.result_ref.sha256, "result"))

    def comes_back(self, queue: ReadyQueue, row_id: int) -> None:
        """Note that a job becomes ready again."""
        self.came_back[queue] = None
        self.session.came_back(row_id)

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
            self.session.change("forget_results", (self.session.listed(row_ids),))

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
        self._incidents.append((row.id, self.clock.wall(), kind, attempt, worker_id, actor, storable_text(reason)))

    def incidents(self, job_id: str) -> list[JobIncident]:
        """Return all incidents of a job, those of this transaction too."""
        self.write_collected()
        return [JobIncident(*row) for row in self.session.rows("incidents", (job_id,))]

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


def verb(function: Callable[Concatenate[Transaction, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return the method of a store that calls a verb's function in its transaction."""

    @wraps(function)
    def method(store: Any, /, *arguments: P.args, **named: P.kwargs) -> T:
        with store._tx:
            return function(store._tx, *arguments, **named)

    return method


def batch_verb(
    function: Callable[Concatenate[Transaction, Sequence[Item], P], list[T]],
) -> Callable[Concatenate[Any, Sequence[Item], P], list[T]]:
    """Return such a method for a verb with an answer for each item; without items there is no transaction."""

    @wraps(function)
    def method(store: Any, items: Sequence[Item], /, *arguments: P.args, **named: P.kwargs) -> list[T]:
        if not items:
            return []
        with store._tx:
            return function(store._tx, items, *arguments, **named)

    return method


def must_change(wanted: int, changed: int) -> None:
    """Unavailable unless all rows were changed: they were read and locked in this transaction, so the other writer is foreign."""
    if changed != wanted:
        raise Unavailable(f"{wanted - changed} of {wanted} jobs were changed by another writer meanwhile; {NOTHING_STORED}")
