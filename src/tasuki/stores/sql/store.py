"""The store in an SQL database, through Django: `SqlStore.open_sqlite(path)` for a file of our own,
`SqlStore.open_postgresql(url)` for a database that servers share, `SqlStore.in_django(alias)` for that of a user's project.

Where to look: transactions and what verbs share are in sql_base.py; the verbs in sql_submit.py, sql_lease.py (with sql_ready.py),
sql_report.py, sql_leader.py, sql_blobs.py (with sql_collect.py) and sql_read.py; the statements in statements/<vendor>.sql; the
vendor's own matters in sql_<vendor>.py; the schema in tasuki/django/models.py. Nothing of this is imported unless the store is
SQL.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tasuki.core.election import LOCK_TTL_S
from tasuki.core.fairness import FairTurns
from tasuki.core.job import JobIncident
from tasuki.core.store_messages import GroupCounts, TokenRow
from tasuki.django.schema import SCHEMA_VERSION
from tasuki.errors import ConfigError
from tasuki.stores.sql.collect import SqlCollect
from tasuki.stores.sql.database import Database
from tasuki.stores.sql.leader import SqlLeader
from tasuki.stores.sql.lease import SqlLease
from tasuki.stores.sql.read import SqlReader
from tasuki.stores.sql.rows import token_values
from tasuki.stores.sql.sqlite import SqliteDatabase, SqliteInDjango, file_system_of
from tasuki.stores.sql.submit import SqlSubmit
from tasuki.stores.store import Clock
from tasuki.stores.texts import storable

__all__ = ["FAULT_POINTS", "SCHEMA_VERSION", "SqlStore"]

FAULT_POINTS = (
    "turn.begun",
    "submit.written",
    "lease.written",
    "finish.written",
    "fail.written",
    "turn.before_commit",
    "turn.committed",
)
"""Where `fault` is called, so that a test can end the process exactly there."""


class SqlStore(SqlSubmit, SqlLease, SqlLeader, SqlCollect):
    """See `tasuki.stores.store.Store` for what each verb promises."""

    def __init__(
        self,
        database: Database,
        *,
        clock: Clock | None = None,
        random: Callable[[int], bytes] = os.urandom,
        fault: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(database, clock or database.clock, random, fault)
        self.features = database.features
        self._fair = FairTurns()
        self._starts = {}
        self._prune_after = 0
        self._condemn_after = (0.0, 0)

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
        """Own this file, made if it is not there, its tables up to date. Unavailable if another process owns it. The journal is
        given so many bytes before the first commit needs them."""
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
        """Work on this database, together with all others who do, its tables made or brought up to date.

        `url` is an address or any other connection string of libpq. `clock`: another than the database's, for tests.
        `lock_ttl_s`: of the leader's lock; no transaction may hang for as long as half of it.
        """
        from tasuki.stores.sql.postgres import PostgresDatabase

        return cls(PostgresDatabase(url, shard=shard, lock_ttl_s=lock_ttl_s), clock=clock, random=random, fault=fault)

    @classmethod
    def in_django(cls, alias: str = "default", *, clock: Clock | None = None) -> SqlStore:
        """On a database of the running Django project: verbs inside `transaction.atomic()` commit or roll back with it."""
        from django.db import connections

        vendor = connections[alias].vendor
        if vendor == "sqlite":
            return cls(SqliteInDjango(alias), clock=clock)
        if vendor == "postgresql":
            from tasuki.stores.sql.postgres import PostgresInDjango

            return cls(PostgresInDjango(alias), clock=clock)
        raise ConfigError(f"the store has no statements for {vendor} (database {alias!r}); use PostgreSQL or SQLite")

    def reader(self) -> SqlReader:
        """The read verbs on a second, read-only connection for the calling thread. Close it there."""
        return SqlReader(self._database.reader())

    def counts(self) -> dict[str, GroupCounts]:
        self._write_gathered_so_far()
        return super().counts()

    def incidents(self, job_id: str) -> list[JobIncident]:
        self._write_gathered_so_far()
        return super().incidents(job_id)

    def _write_gathered_so_far(self) -> None:
        if self._depth > 0:
            with self._turn:
                self._write_gathered()

    # -- tokens ---------------------------------------------------------------------------------------------------
    def add_token(self, token: TokenRow) -> bool:
        with self._turn:
            if self._session.change("add_token", token_values(token)) == 1:
                self._audit(token.created_by, "token.create", token.token_id, f"{token.kind} {token.label}".rstrip())
                return True
            return self.token(token.sha256) == token

    def revoke_token(self, token_id: str, *, actor: str) -> bool:
        with self._turn:
            if self._session.change("revoke_token", (token_id, self.clock.wall(), actor)) != 1:
                return False
            self._audit(actor, "token.revoke", token_id)
            return True

    def _audit(self, actor: str, action: str, target: str, detail: str = "") -> None:
        self._session.change("add_audit", (self.clock.wall(), actor, action, target, storable(detail)))
