"""The store in an SQL database, through Django: `SqlStore.open_sqlite(path)` for a file of its own,
`SqlStore.open_postgresql(url)` for a database that servers share, `SqlStore.in_django(alias)` for that of a user's project.

Each verb enters the store's one `Transaction` and calls the function of the same name in `submit.py`, `lease.py`, `report.py`,
`leader.py` or `blobs.py`; the verbs that only read are in `read.py`. Importing this module needs no database driver.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from tasuki.core.election import LOCK_TTL_S
from tasuki.core.job import JobIncident
from tasuki.core.store_messages import Grant, GroupCounts, TokenRow
from tasuki.django.standalone import SCHEMA_VERSION
from tasuki.errors import ConfigError
from tasuki.stores.common import storable
from tasuki.stores.sql import blobs, leader, lease, report, submit
from tasuki.stores.sql.database import Database, SqlSession
from tasuki.stores.sql.lease import held_leases
from tasuki.stores.sql.read import SqlReader, SqlReads
from tasuki.stores.sql.rows import token_values
from tasuki.stores.sql.sqlite import SqliteDatabase, SqliteInDjango, file_system_of
from tasuki.stores.sql.transaction import Transaction
from tasuki.stores.store import Clock

__all__ = ["FAULT_POINTS", "SCHEMA_VERSION", "SqlStore"]

P = ParamSpec("P")
T = TypeVar("T")

FAULT_POINTS = (
    "turn.begun",
    "submit.written",
    "lease.written",
    "finish.written",
    "fail.written",
    "turn.before_commit",
    "turn.committed",
)
"""Points at which `fault` is called, so that a test can end the process exactly there."""


def _verb(function: Callable[Concatenate[Transaction, P], T]) -> Callable[Concatenate[SqlStore, P], T]:
    """Return the method that calls a verb's function in the store's transaction."""

    @wraps(function)
    def method(store: SqlStore, /, *arguments: P.args, **named: P.kwargs) -> T:
        with store._tx:
            return function(store._tx, *arguments, **named)

    return method


class SqlStore(SqlReads):
    """A store in an SQL database. See `tasuki.stores.store.Store` for what each verb promises."""

    def __init__(
        self,
        database: Database,
        *,
        clock: Clock | None = None,
        random: Callable[[int], bytes] = os.urandom,
        fault: Callable[[str], None] | None = None,
    ) -> None:
        self.clock = clock or database.clock
        self.features = database.features
        self._database = database
        self._tx = Transaction(database, self.clock, random, fault)

    @classmethod
    def open_sqlite(
        cls,
        path: Path,
        *,
        clock: Clock | None = None,
        random: Callable[[int], bytes] = os.urandom,
        fault: Callable[[str], None] | None = None,
        file_system: Callable[[Path], str] = file_system_of,
        stretch_bytes: int = 0,
    ) -> SqlStore:
        """Own this file, created if it does not exist, its tables up to date. Unavailable if another process owns it.

        The journal gets `stretch_bytes` before the first commit needs them.
        """
        database = SqliteDatabase(path, file_system=file_system, stretch_bytes=stretch_bytes)
        return cls(database, clock=clock, random=random, fault=fault)

    @classmethod
    def open_postgresql(
        cls,
        url: str,
        *,
        clock: Clock | None = None,
        random: Callable[[int], bytes] = os.urandom,
        fault: Callable[[str], None] | None = None,
        shard: int | None = None,
        lock_ttl_s: float = LOCK_TTL_S,
    ) -> SqlStore:
        """Open a database that several servers may share, its tables created or brought up to date.

        `url` is an address or any other connection string of libpq. `clock`: another than the database's, for tests.
        `lock_ttl_s`: of the leader's lock; no transaction may hang for as long as half of it.
        """
        from tasuki.stores.sql.postgres import PostgresDatabase

        return cls(PostgresDatabase(url, shard=shard, lock_ttl_s=lock_ttl_s), clock=clock, random=random, fault=fault)

    @classmethod
    def in_django(cls, alias: str = "default", *, clock: Clock | None = None) -> SqlStore:
        """Open a database of the running Django project: verbs inside `transaction.atomic()` commit or roll back with it."""
        from django.db import connections

        vendor = connections[alias].vendor
        if vendor == "sqlite":
            return cls(SqliteInDjango(alias), clock=clock)
        if vendor == "postgresql":
            from tasuki.stores.sql.postgres import PostgresInDjango

            return cls(PostgresInDjango(alias), clock=clock)
        raise ConfigError(f"the store has no statements for {vendor} (database {alias!r}); use PostgreSQL or SQLite")

    def turn(self, *, lasting: bool = True) -> Transaction:
        """Return the context of one transaction around several verbs."""
        self._tx.is_durable = lasting
        return self._tx

    def reader(self) -> SqlReader:
        """Open the read verbs on a second, read-only connection for the calling thread. Close it there."""
        return SqlReader(self._database.reader())

    def close(self) -> None:
        self._database.close()

    # -- verbs ----------------------------------------------------------------------------------------------------
    # `submit` and `lease` hide their modules from there on, so they come after the other verbs of these.
    cancel = _verb(submit.cancel)
    requeue = _verb(submit.requeue)
    submit = _verb(submit.submit)
    assign = _verb(lease.assign)
    lease = _verb(lease.lease)
    start = _verb(report.start)
    renew = _verb(report.renew)
    release = _verb(report.release)
    finish = _verb(report.finish)
    fail = _verb(report.fail)
    take_over = _verb(leader.take_over)
    reap = _verb(leader.reap)
    skip = _verb(leader.skip)
    promote = _verb(leader.promote)
    prune = _verb(leader.prune)
    place_blobs = _verb(blobs.place_blobs)
    blobs_stored = _verb(blobs.blobs_stored)
    condemn_blobs = _verb(blobs.condemn_blobs)
    forget_blobs = _verb(blobs.forget_blobs)

    def held(self, holders: Sequence[tuple[str, str]]) -> list[list[Grant]]:
        now = self.clock.lease()
        return self._read(lambda session: held_leases(session, holders, now))

    # -- tokens ---------------------------------------------------------------------------------------------------
    def add_token(self, token: TokenRow) -> bool:
        with self._tx:
            if self._tx.session.change("add_token", token_values(token)) == 1:
                self._add_audit(token.created_by, "token.create", token.token_id, f"{token.kind} {token.label}".rstrip())
                return True
            return self.token(token.sha256) == token

    def revoke_token(self, token_id: str, *, actor: str) -> bool:
        with self._tx:
            if self._tx.session.change("revoke_token", (token_id, self.clock.wall(), actor)) != 1:
                return False
            self._add_audit(actor, "token.revoke", token_id)
            return True

    def _add_audit(self, actor: str, action: str, target: str, detail: str = "") -> None:
        self._tx.session.change("add_audit", (self.clock.wall(), actor, action, target, storable(detail)))

    # -- readers --------------------------------------------------------------------------------------------------
    def _read(self, read: Callable[[SqlSession], T]) -> T:
        return self._tx.read(read)

    def counts(self) -> dict[str, GroupCounts]:
        self._write_collected()
        return super().counts()

    def incidents(self, job_id: str) -> list[JobIncident]:
        self._write_collected()
        return super().incidents(job_id)

    def _write_collected(self) -> None:
        if self._tx.is_open:
            with self._tx:
                self._tx.write_collected()
