"""The seam between the SQL store's verbs and a vendor: what a database gives, and what a connection to it can run.

The verbs are written once; a vendor brings its statements (`statements/<vendor>.sql`), a `Database` that opens, begins and
commits, and a `SqlSession` that runs statements by name on one connection. Where the fastest way to do a thing differs between
vendors as a whole (insert a batch, claim what is ready, record a batch of finishes), it is one call of the session.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from tasuki.stores.store import Clock, Feature

Parameters = Sequence[Any] | Mapping[str, Any]
"""Of one statement: by position, or by name where the statement has names."""

Batch = Sequence[tuple[Any, ...]]
"""One tuple for each row of a batch statement."""

WALL = 7  # where the time of granting stands among the terms of a grant

NOTHING_STORED = "nothing of this was stored"
NOT_KNOWN = "whether this was stored is not known"


class Inserted(NamedTuple):
    """A part of a batch of new jobs: how many rows it had, and of how many none was there before."""

    size: int
    created: int
    fresh: Container[int]
    """The row ids of the new ones."""


class Queues(NamedTuple):
    """Where to claim from: queues (subject and kind) of one group in one band, and how many of their oldest."""

    priority: int
    group: str
    members: list[tuple[str, int]]
    limit: int


class SqlSession(Protocol):
    """One connection that runs named statements. Errors are the driver's own: see `Database.translated`."""

    # -- any statement --------------------------------------------------------------------------------------------
    def rows(self, name: str, parameters: Parameters = ()) -> list[Any]:
        """What it returns."""
        ...

    def change(self, name: str, parameters: Parameters = ()) -> int:
        """How many rows it changed."""
        ...

    def changed(self, name: str, shared: tuple[Any, ...], batch: Batch) -> int:
        """Run a batch statement; how many rows it changed."""
        ...

    def returned(self, name: str, shared: tuple[Any, ...], batch: Batch) -> list[Any]:
        """Run a batch statement; what it returned, in no order."""
        ...

    def walk(self, name: str, conditions: str, values: dict[str, Any]) -> Iterator[Any]:
        """The rows of a `find` statement with further conditions, read as far as the caller asks; `values["most"]` at most."""
        ...

    # -- lists as parameters --------------------------------------------------------------------------------------
    def ids(self, ids: list[int]) -> Any: ...
    def texts(self, texts: list[str]) -> Any: ...
    def holders(self, pairs: list[tuple[str, str]]) -> tuple[Any, ...]:
        """The parameters of `held`."""
        ...

    def contains(self, column: str) -> str:
        """The condition that a text column contains the parameter :text."""
        ...

    # -- where vendors differ as a whole --------------------------------------------------------------------------
    def insert(self, name: str, wall: float, batch: Batch) -> Iterator[Inserted]:
        """Insert new jobs whose ids are not there, in this order; part by part, the parts in the order of the batch."""
        ...

    def claim(self, queues: Queues, terms: tuple[Any, ...]) -> list[Any]:
        """Grant the oldest ready jobs of these queues, by the terms (the parameters of `grant` but the ids); none that is too
        late to start.

        Rows, oldest first, as they were: (id, job_id, spec, submitter, attempt, state, result_sha256).
        """
        ...

    def finish(self, wall: float, plain: Batch, full: Batch) -> list[tuple[int, str]]:
        """Record finishes; (id, group) of the jobs that were leased to those who report, and have SUCCEEDED by this."""
        ...


class Database(Protocol):
    """A database that is open for writing by one thread at a time."""

    vendor: str
    features: frozenset[Feature]
    shard: int
    """Of the counters: each writer adds to a shard of its own."""

    @property
    def clock(self) -> Clock:
        """The one that times in this database are of."""
        ...

    @property
    def session(self) -> SqlSession:
        """On the current connection; ask again after `begin`, which may have made a new one."""
        ...

    def begin(self, *, lasting: bool = True) -> None:
        """A transaction; not `lasting`: its commit need not wait for the disk."""
        ...

    def commit(self) -> None: ...
    def rollback(self) -> None:
        """After whatever error: nothing of the transaction is left."""
        ...

    def close(self) -> None: ...
    def translated(self, fate: str = NOTHING_STORED) -> AbstractContextManager[None]:
        """Turns errors of the driver into ours. `fate`: what an error here means for what was to be stored."""
        ...

    def reader(self) -> ReadOnly:
        """A second connection that cannot write, for the calling thread."""
        ...


class ReadOnly(Protocol):
    """A connection for readers."""

    @property
    def session(self) -> SqlSession: ...
    def translated(self) -> AbstractContextManager[None]: ...
    def close(self) -> None: ...
