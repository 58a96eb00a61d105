"""The interface between the SQL store's verbs and a vendor, and what both vendors use: named statements, Django's transactions.

The verbs are written once. A vendor adds its statements (`statements/<vendor>.sql`), a `Database` that opens, begins and commits,
and a `SqlSession` that runs statements by name on one connection. Where the fastest way to do a thing differs between vendors as
a whole (insert a batch, claim ready jobs, record a batch of finishes), it is one call of the session.

A statement with `{rows: …}` takes a whole batch. It exists in sizes of 1, 2, 4, … 256 rows, so that a batch of any length is a
handful of statements out of a set small enough to stay compiled.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tasuki.errors import Unavailable
from tasuki.stores.sql.rows import fragments
from tasuki.stores.store import Clock, Feature

if TYPE_CHECKING:
    from django.db import transaction
    from django.db.backends.base.base import BaseDatabaseWrapper

Parameters = Sequence[Any] | Mapping[str, Any]
"""Parameters of one statement: by position, or by name where the statement has names."""

Batch = Sequence[tuple[Any, ...]]
"""One tuple for each row of a batch statement."""

WALL = 7  # position of the wall clock time among the terms of a grant
BATCH_MAX = 256  # rows of one statement; twice as many brought nothing more
LEADER_SCOPE = "leader"
ABOVE_ALL_PRIORITIES = 1_000
NOTHING_STORED = "nothing of this was stored"
NOT_KNOWN = "whether this was stored is not known"


class InsertedRows(NamedTuple):
    """A part of a batch of new jobs: the number of its rows, and how many of them were not there before."""

    size: int
    created: int
    new_ids: Container[int]
    """Row ids of the new jobs."""


class Queues(NamedTuple):
    """Queues to claim from (subject and kind) of one group and priority, and how many of their oldest jobs."""

    priority: int
    group: str
    members: list[tuple[str, int]]
    limit: int


class SqlSession(Protocol):
    """One connection that runs named statements. Errors are the driver's own: see `Database.translated`."""

    # -- any statement --------------------------------------------------------------------------------------------
    def rows(self, name: str, parameters: Parameters = ()) -> list[Any]:
        """Run a statement and return its rows."""
        ...

    def change(self, name: str, parameters: Parameters = ()) -> int:
        """Run a statement and return how many rows it changed."""
        ...

    def changed(self, name: str, shared: tuple[Any, ...], batch: Batch) -> int:
        """Run a batch statement and return how many rows it changed."""
        ...

    def returned(self, name: str, shared: tuple[Any, ...], batch: Batch) -> list[Any]:
        """Run a batch statement and return its rows, in no order."""
        ...

    def walk(self, name: str, conditions: str, values: dict[str, Any]) -> Iterator[Any]:
        """Yield the rows of a `find` statement with further conditions, read as far as the caller asks; at most
        `values["most"]`."""
        ...

    # -- lists as parameters --------------------------------------------------------------------------------------
    def ids(self, ids: list[int]) -> Any: ...
    def texts(self, texts: list[str]) -> Any: ...
    def holders(self, pairs: list[tuple[str, str]]) -> tuple[Any, ...]:
        """Return the parameters of the statement `held`."""
        ...

    def contains(self, column: str) -> str:
        """Return the condition that a text column contains the parameter :text."""
        ...

    # -- where vendors differ as a whole --------------------------------------------------------------------------
    def insert(self, name: str, wall: float, batch: Batch) -> Iterator[InsertedRows]:
        """Insert the jobs whose ids are new, in this order; part by part, the parts in the order of the batch."""
        ...

    def claim(self, queues: Queues, terms: tuple[Any, ...]) -> list[Any]:
        """Grant the oldest ready jobs of these queues by the terms (the parameters of `grant` without the ids), except those
        that are too late to start.

        Return the rows, oldest first, as they were: (id, job_id, spec, submitter, attempt, state, result_sha256).
        """
        ...

    def finish(self, wall: float, plain: Batch, full: Batch) -> list[tuple[int, str]]:
        """Record finishes; return (id, group) of the jobs that were leased to the reporting worker and are SUCCEEDED now."""
        ...


class Database(Protocol):
    """A database that is open for writing by one thread at a time."""

    vendor: str
    features: frozenset[Feature]
    shard: int
    """Shard of the counters that this writer adds to."""

    @property
    def clock(self) -> Clock:
        """The clock that the times in this database are of."""
        ...

    @property
    def session(self) -> SqlSession:
        """The session of the current connection; ask again after `begin`, which may have connected anew."""
        ...

    def begin(self, *, lasting: bool = True) -> None:
        """Begin a transaction; unless `lasting`, its commit need not wait for the disk."""
        ...

    def commit(self) -> None: ...
    def rollback(self) -> None:
        """Undo the transaction, whatever error occurred."""
        ...

    def close(self) -> None: ...
    def translated(self, fate: str = NOTHING_STORED) -> AbstractContextManager[None]:
        """Turn errors of the driver into tasuki's. `fate`: what an error here means for the data that was to be stored."""
        ...

    def reader(self) -> ReadOnly:
        """Open a second connection that cannot write, for the calling thread."""
        ...


class ReadOnly(Protocol):
    """A connection for readers."""

    @property
    def session(self) -> SqlSession: ...
    def translated(self) -> AbstractContextManager[None]: ...
    def close(self) -> None: ...


class InDjango:
    """Transactions in a user's own Django project: verbs join the `transaction.atomic()` that the calling thread is in.

    The connection, its settings and the consequences of its errors are the project's: nothing is tuned, nothing is retried.
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


def pieces(count: int) -> Iterator[tuple[int, int]]:
    """Yield (start, size) of the statements that together take `count` rows: whole BATCH_MAX ones, then the powers of two."""
    start = 0
    while start < count:
        size = min(BATCH_MAX, 1 << ((count - start).bit_length() - 1))
        yield start, size
        start += size


@lru_cache
def load_statements(vendor: str) -> Statements:
    """Load the statements for `sqlite` or `postgresql`, once per process."""
    text = files("tasuki.stores.sql").joinpath("statements", f"{vendor}.sql").read_text("utf-8")
    return Statements(text, fragments(vendor))
