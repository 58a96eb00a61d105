"""The store in an SQL database, through Django: `SqlStore.open_sqlite(path)` for a file of our own, `SqlStore.in_django(alias)`
for the database of a user's project.

Where to look: transactions and what verbs share are in sql_base.py; the verbs in sql_submit.py, sql_lease.py (with sql_ready.py),
sql_report.py, sql_leader.py and sql_read.py; the statements in statements/<vendor>.sql; the vendor's own matters in
sql_<vendor>.py; the schema in tasuki/django/models.py. Nothing of this is imported unless the store is SQL.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tasuki.core.fair import FairTurns
from tasuki.core.job import Incident
from tasuki.core.verbs import GroupCounts, TokenRow
from tasuki.stores.clock import SystemClock
from tasuki.stores.sql_base import Database
from tasuki.stores.sql_leader import SqlLeader
from tasuki.stores.sql_lease import SqlLease
from tasuki.stores.sql_read import SqlReader
from tasuki.stores.sql_rows import token_values
from tasuki.stores.sql_sqlite import DjangoDatabase, SqliteDatabase, file_system_of
from tasuki.stores.sql_submit import SqlSubmit
from tasuki.stores.store import Clock, Feature

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


class SqlStore(SqlSubmit, SqlLease, SqlLeader):
    """See `tasuki.stores.store.Store` for what each verb promises."""

    features = frozenset({Feature.FIND_TEXT, Feature.DURABLE})

    def __init__(
        self,
        database: Database,
        *,
        clock: Clock | None = None,
        random: Callable[[int], bytes] = os.urandom,
        fault: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(database, clock or SystemClock(), random, fault)
        self._fair = FairTurns()
        self._starts = {}
        self._prune_after = 0

    @classmethod
    def open_sqlite(
        cls,
        path: Path,
        *,
        clock: Clock | None = None,
        random: Callable[[int], bytes] = os.urandom,
        fault: Callable[[str], None] | None = None,
        file_system: Callable[[Path], str] = file_system_of,
    ) -> SqlStore:
        """Own this file, made if it is not there, its tables up to date. Unavailable if another process owns it."""
        return cls(SqliteDatabase(path, file_system=file_system), clock=clock, random=random, fault=fault)

    @classmethod
    def in_django(cls, alias: str = "default", *, clock: Clock | None = None) -> SqlStore:
        """On a database of the running Django project: verbs inside `transaction.atomic()` commit or roll back with it."""
        return cls(DjangoDatabase(alias), clock=clock)

    def reader(self) -> SqlReader:
        """The read verbs on a second, read-only connection for the calling thread. Close it there."""
        return SqlReader(self._database.path.absolute(), self._database.vendor)

    def counts(self) -> dict[str, GroupCounts]:
        self._write_gathered_so_far()
        return super().counts()

    def incidents(self, job_id: str) -> list[Incident]:
        self._write_gathered_so_far()
        return super().incidents(job_id)

    def _write_gathered_so_far(self) -> None:
        if self._depth > 0:
            with self._turn:
                self._write_gathered()

    # -- tokens ---------------------------------------------------------------------------------------------------
    def add_token(self, token: TokenRow) -> bool:
        with self._turn:
            if self._execute(self._one["add_token"], token_values(token)).rowcount == 1:
                return True
            return self.token(token.sha256) == token

    def revoke_token(self, token_id: str, *, actor: str) -> bool:
        with self._turn:
            return self._execute(self._one["revoke_token"], (token_id, self.clock.wall(), actor)).rowcount == 1
