"""The store in an SQL database, through Django: `SqlStore.open_sqlite(path)` for a file of its own,
`SqlStore.open_postgresql(url)` for a database that servers share, `SqlStore.in_django(alias)` for that of a user's project.

Each verb enters the store's one `Transaction` and calls the function of the same name in `submit.py`, `lease.py`, `report.py`,
`leader.py` or `blobs.py`; the verbs that only read are in `read.py`. Importing this module needs no database driver.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tasuki.core.election import LOCK_TTL_S
from tasuki.core.job import JobIncident
from tasuki.core.store_messages import (
    Assignment,
    BlobClaim,
    BlobPlace,
    Canceled,
    Condemned,
    CondemnOrder,
    Grant,
    GroupCounts,
    HeldLease,
    LeaseRequest,
    LeaseStatus,
    Promoted,
    Reaped,
    Report,
    ReportAnswer,
    Requeued,
    Submission,
    TokenRow,
)
from tasuki.django.standalone import SCHEMA_VERSION
from tasuki.errors import ConfigError
from tasuki.stores.common import check_on_failed, storable
from tasuki.stores.sql import blobs, leader, lease, report, submit
from tasuki.stores.sql.database import Database, SqlSession
from tasuki.stores.sql.read import SqlReader, SqlReads
from tasuki.stores.sql.rows import token_values
from tasuki.stores.sql.sqlite import SqliteDatabase, SqliteInDjango, file_system_of
from tasuki.stores.sql.transaction import Transaction
from tasuki.stores.store import Clock

__all__ = ["FAULT_POINTS", "SCHEMA_VERSION", "SqlStore"]

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

    # -- submitters -----------------------------------------------------------------------------------------------
    def submit(self, submissions: Sequence[Submission], *, on_failed: str = "return") -> list[submit.Answered]:
        rerun = check_on_failed(on_failed)
        if not submissions:
            return []
        with self._tx:
            return submit.submit(self._tx, submissions, rerun=rerun)

    def cancel(self, job_ids: Sequence[str], *, actor: str, reason: str = "") -> list[Canceled]:
        with self._tx:
            return submit.cancel(self._tx, job_ids, actor, reason)

    def requeue(self, job_ids: Sequence[str], *, actor: str, reason: str = "", generation: int | None = None) -> list[Requeued]:
        with self._tx:
            return submit.requeue(self._tx, job_ids, actor, reason, generation)

    # -- workers --------------------------------------------------------------------------------------------------
    def lease(self, requests: Sequence[LeaseRequest]) -> list[list[Grant]]:
        if not requests:
            return []
        with self._tx:
            return lease.lease(self._tx, requests)

    def held(self, holders: Sequence[tuple[str, str]]) -> list[list[Grant]]:
        now = self.clock.lease()
        return self._read(lambda session: lease.held(session, holders, now))

    def start(self, claims: Sequence[HeldLease]) -> list[LeaseStatus]:
        with self._tx:
            return report.start(self._tx, claims)

    def renew(self, claims: Sequence[HeldLease]) -> list[LeaseStatus]:
        with self._tx:
            return report.renew(self._tx, claims)

    def release(self, claims: Sequence[HeldLease], *, reason: str = "") -> list[bool]:
        with self._tx:
            return report.release(self._tx, claims, reason)

    def finish(self, reports: Sequence[Report]) -> list[ReportAnswer]:
        if not reports:
            return []
        with self._tx:
            return report.finish(self._tx, reports)

    def fail(self, reports: Sequence[Report]) -> list[ReportAnswer]:
        with self._tx:
            return report.fail(self._tx, reports)

    # -- the leader -----------------------------------------------------------------------------------------------
    def take_over(self, holder: str, epoch: int) -> bool:
        with self._tx:
            return leader.take_over(self._tx, holder, epoch)

    def assign(self, assignments: Sequence[Assignment], *, epoch: int) -> list[Grant | None]:
        with self._tx:
            return lease.assign(self._tx, assignments, epoch)

    def reap(self, *, epoch: int, limit: int = 256) -> list[Reaped]:
        with self._tx:
            return leader.reap(self._tx, epoch, limit)

    def skip(self, *, epoch: int, limit: int = 1024) -> list[str]:
        with self._tx:
            return leader.skip(self._tx, epoch, limit)

    def promote(self, *, epoch: int, limit: int = 1024) -> Promoted:
        with self._tx:
            return leader.promote(self._tx, epoch, limit)

    def prune(self, *, before: float, epoch: int, limit: int = 256) -> int:
        with self._tx:
            return leader.prune(self._tx, before, epoch, limit)

    # -- blobs ----------------------------------------------------------------------------------------------------
    def place_blobs(self, claims: Sequence[BlobClaim]) -> list[BlobPlace]:
        if not claims:
            return []
        with self._tx:
            return blobs.place_blobs(self._tx, claims)

    def blobs_stored(self, places: Sequence[BlobPlace]) -> list[bool]:
        if not places:
            return []
        with self._tx:
            return blobs.blobs_stored(self._tx, places)

    def condemn_blobs(self, order: CondemnOrder, *, epoch: int) -> Condemned:
        with self._tx:
            return blobs.condemn_blobs(self._tx, order, epoch)

    def forget_blobs(self, places: Sequence[BlobPlace], *, epoch: int) -> int:
        with self._tx:
            return blobs.forget_blobs(self._tx, places, epoch)

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
