"""The store in an SQL database, through Django: `SqlStore.open_sqlite(path)` for a file of its own,
`SqlStore.open_postgresql(url)` for a database that servers share, `SqlStore.in_django(alias)` for that of a user's project.

Each verb that writes enters the store's one `Transaction` and calls the function of the same name in `submit.py`, `lease.py`,
`report.py`, `leader.py`, `fire.py` or `blobs.py`. Verbs that only read are methods of `SqlReads`, on the store's own connection
or on a second one that cannot write. Importing this module needs no database driver.
"""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tasuki.core.election import LEADER_SCOPE, LOCK_TTL_S
from tasuki.core.job import LEASED, Job, JobIncident
from tasuki.core.pauses import PAUSES_MAX, PauseAnswer, PausedPattern, PauseOrder
from tasuki.core.scheduler.thresholds import Thresholds
from tasuki.core.statistics import GroupCounts, Rollup, decode_rollup, encode_rollup
from tasuki.core.store_messages import (
    AuditRow,
    BlobPlace,
    CachedFile,
    CacheSummary,
    Filter,
    Grant,
    Page,
    ReadyPage,
    Submission,
    TokenRow,
    TurnNotes,
    storable_text,
)
from tasuki.core.subject import literal_prefix
from tasuki.django.standalone import COORDINATION_SCOPE, SCHEMA_VERSION
from tasuki.errors import ConfigError, InterruptCause, TurnInterrupted
from tasuki.stores.common import is_wanted, unknown_cursor
from tasuki.stores.sql import blobs, fire, leader, lease, report, submit
from tasuki.stores.sql.database import (
    ABOVE_ALL_PRIORITIES,
    Database,
    InDjango,
    Parameters,
    ReadOnly,
    SqlSession,
    Transaction,
    batch_verb,
    verb,
)
from tasuki.stores.sql.lease import fetch, held_leases, ready_jobs, ready_queues
from tasuki.stores.sql.rows import FAILED_STATES, JobRow, job_of, token_of, token_values
from tasuki.stores.sql.sqlite import SqliteDatabase, SqliteInDjango, file_system_of
from tasuki.stores.store import Answered, Clock

if TYPE_CHECKING:
    from tasuki.stores.sql.postgres import PostgresInDjango

__all__ = ["FAULT_POINTS", "SCHEMA_VERSION", "SqlReader", "SqlStore"]

T = TypeVar("T")

CREATED_SLACK_S = 60.0
AFTER_ALL = 2**62  # a row id above all
FIND_SCAN_MAX = 20_000  # rows that one find looks at, some 20 ms; the caller continues with the cursor


class SqlReads:
    """The read verbs, on the connection that a subclass provides."""

    @abstractmethod
    def _read(self, read: Callable[[SqlSession], T]) -> T:
        """Call `read` with the connection's session, with errors of the driver translated."""

    def _select(self, name: str, parameters: Parameters = ()) -> list[Any]:
        return self._read(lambda session: session.rows(name, parameters))

    def _select_by_texts(self, name: str, texts: Sequence[str]) -> list[Any]:
        if not texts:
            return []
        return self._read(lambda session: session.rows(name, (session.listed(list(dict.fromkeys(texts))),)))

    def get(self, job_ids: Sequence[str]) -> list[Job | None]:
        jobs = {row[1]: job_of(JobRow._make(row)) for row in self._select_by_texts("rows_by_key", job_ids)}
        return [jobs.get(job_id) for job_id in job_ids]

    def ended_among(self, job_ids: Sequence[str]) -> list[str]:
        alive = {job_id for (job_id,) in self._select_by_texts("alive_among", job_ids)}
        return [job_id for job_id in dict.fromkeys(job_ids) if job_id not in alive]

    def incidents(self, job_id: str) -> list[JobIncident]:
        return [JobIncident(*row) for row in self._select("incidents", (job_id,))]

    def counts(self) -> dict[str, GroupCounts]:
        groups: dict[str, dict[str, int]] = {}
        for group, name, n in self._select("counts"):
            groups.setdefault(group, {})[name] = n
        return {group: GroupCounts(**numbers) for group, numbers in groups.items()}

    def ready_ahead(self, job_id: str, *, limit: int = 10_000) -> int | None:
        place = self._select("place", (job_id,))
        if not place:
            return None
        ((ahead,),) = self._select("ahead", (*place[0], limit))
        return int(ahead)

    def top_band(self) -> int | None:
        found = self._select("band", (ABOVE_ALL_PRIORITIES,))
        return int(found[0][0]) if found else None

    def ready_queues(self, place: Any = None, *, limit: int = 256) -> ReadyPage:
        return self._read(lambda session: ready_queues(session, place, limit))

    def ready_jobs(self, subject: str, *, limit: int = 256) -> list[str]:
        return self._read(lambda session: ready_jobs(session, subject, limit))

    def blob_owners(self, sha256: str, *, limit: int = 16) -> list[str]:
        return [job_id for (job_id,) in self._select("blob_owners", (sha256, limit))]

    def blob_places(self, sha256s: Sequence[str]) -> list[BlobPlace | None]:
        places = {row[0]: BlobPlace(row[0], row[1], row[2], stored=True) for row in self._select_by_texts("blob_places", sha256s)}
        return [places.get(sha256) for sha256 in sha256s]

    def cached_files(self, names: Sequence[tuple[str, str]]) -> list[CachedFile | None]:
        by_cache: dict[str, list[str]] = {}
        for cache_id, name in names:
            by_cache.setdefault(cache_id, []).append(name)
        found: dict[tuple[str, str], CachedFile] = {}
        for cache_id, wanted in by_cache.items():
            rows = self._read(partial(_named_files, cache_id=cache_id, names=wanted))
            found |= {(row[0], row[1]): CachedFile(*row[1:]) for row in rows}
        return [found.get(one) for one in names]

    def cache(self, cache_id: str, *, after: str = "", limit: int = 1000) -> list[CachedFile]:
        return [CachedFile(*row) for row in self._select("cache", (cache_id, after, limit))]

    def caches(self, *, after: str = "", limit: int = 100) -> list[CacheSummary]:
        return [CacheSummary(*row) for row in self._select("caches", (after, limit))]

    def rollups(self, since: int, until: int) -> list[Rollup]:
        return [decode_rollup(data) for (data,) in self._select("rollups", (since, until))]

    def token(self, sha256: str) -> TokenRow | None:
        rows = self._select("token", (sha256,))
        return token_of(rows[0]) if rows else None

    def tokens(self) -> list[TokenRow]:
        return [token_of(row) for row in self._select("tokens")]

    def revoked_among(self, token_ids: Sequence[str]) -> list[str]:
        valid = {token_id for (token_id,) in self._select_by_texts("unrevoked_among", token_ids)}
        return [token_id for token_id in dict.fromkeys(token_ids) if token_id not in valid]

    def audit(self, *, limit: int = 100, before: int | None = None) -> list[AuditRow]:
        return [
            AuditRow(number=number, at=at, actor=actor, action=action, target=target, detail=detail)
            for number, at, actor, action, target, detail in self._select("audit", (limit, before or AFTER_ALL))
        ]

    def paused(self) -> list[PausedPattern]:
        return [PausedPattern(*row) for row in self._select("pauses")]

    def epoch(self) -> tuple[int, str]:
        rows = self._select("epoch_seen", (LEADER_SCOPE,))
        return (rows[0][0], rows[0][1]) if rows else (0, "")

    def thresholds(self) -> Thresholds:
        """Return the settings of a Django project's scheduler; the defaults where there is no row."""
        rows = self._select("thresholds")
        return Thresholds(**dict(zip(Thresholds.__struct_fields__, rows[0], strict=True))) if rows else Thresholds()

    def detached(self) -> frozenset[str]:
        """Return the workers that get no more work, by the database."""
        return frozenset(name for (name,) in self._select("detached"))

    def next_due(self) -> tuple[float | None, float | None]:
        ((lease_over,),) = self._select("next_lease_over")
        ((delayed,),) = self._select("next_delayed", (-math.inf,))
        return lease_over, delayed

    # -- find -----------------------------------------------------------------------------------------------------
    def find(self, filter: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
        if cursor is not None and not (cursor.isdecimal() and len(cursor) <= 18):
            raise unknown_cursor(cursor)
        return self._read(lambda session: _find(session, filter, limit, cursor))


def _find(session: SqlSession, filter: Filter, limit: int, cursor: str | None) -> Page:
    """Walk jobs from the newest on. If the filter names an array, or only failed or only leased states, walk just those by their
    partial index; else by id, a bounded number of rows per call."""
    oldest, newest = session.rows("id_range")[0]
    if newest is None:
        return Page([], None)
    if filter.created_until is not None:
        newest = _first_since(session, filter.created_until + CREATED_SLACK_S, oldest, newest) - 1
    if filter.created_from is not None:
        oldest = _first_since(session, filter.created_from - CREATED_SLACK_S, oldest, newest)
    high = min(int(cursor), newest + 1) if cursor is not None else newest + 1
    ids: list[int] = []
    looked = 0
    position = high
    low, walk = _walk(session, filter, high, oldest)
    for row in islice(walk, FIND_SCAN_MAX):
        looked += 1
        position = row[0]
        _, job_id, state, subject, submitter, worker_id, array_id, created_at, error_code, error_summary = row
        texts = (job_id, error_code or "", error_summary)
        if is_wanted(filter, job_id, state, subject, submitter, worker_id, array_id, created_at, texts):
            ids.append(position)
            if len(ids) == limit:
                break
    if len(ids) < limit and looked < FIND_SCAN_MAX:
        position = low  # the walk came to its end
    rows = sorted(map(JobRow._make, session.rows("rows_by_id", (session.listed(ids),))), reverse=True, key=lambda row: row.id)
    return Page([job_of(row) for row in rows], str(position) if position > oldest else None)


def _first_since(session: SqlSession, at: float, low: int, high: int) -> int:
    """Return the lowest id from `low` to `high` of a job that was submitted at this time or later, else the id after `high`.

    Ids grow with time, but for transactions that overlapped: hence CREATED_SLACK_S.
    """
    while low <= high:
        middle = (low + high) // 2
        found = session.rows("created_from_id", (middle,))
        if not found or found[0][1] >= at:
            high = middle - 1
        else:
            low = found[0][0] + 1
    return low


def _walk(session: SqlSession, filter: Filter, high: int, oldest: int) -> tuple[int, Iterator[Any]]:
    """Return the id down to which the walk is complete, and the rows below `high` that may be wanted, the newest first."""
    states = frozenset(filter.states)
    at = {"high": high, "low": oldest, "most": FIND_SCAN_MAX}
    if filter.array_id is not None:
        return oldest, session.walk("find_by_array", "", {**at, "array_id": filter.array_id})
    if states and states <= FAILED_STATES:
        return oldest, session.walk("find_failed", "", at)
    if states and states <= LEASED:
        return oldest, session.walk("find_leased", "", at)
    low = max(oldest, high - FIND_SCAN_MAX)
    conditions, values = _conditions(filter, session.contains)
    return low, session.walk("find_by_id", conditions, {**at, **values, "low": low})


def _conditions(filter: Filter, contains: Callable[[str], str]) -> tuple[str, dict[str, Any]]:
    """Return the part of the filter that the database can judge, so that few rows reach Python, where `is_wanted` judges all."""
    conditions: list[str] = []
    values: dict[str, Any] = {}
    if filter.states:
        conditions.append("state IN (" + ", ".join(f"'{state.value}'" for state in sorted(set(filter.states))) + ")")
    if filter.worker_id is not None:
        conditions.append("assigned_worker_id = :worker_id")
        values["worker_id"] = filter.worker_id
    if filter.definition_id is not None:
        conditions.append("job_definition_id = :definition_id")
        values["definition_id"] = filter.definition_id
    if filter.submitter is not None and not filter.scope:
        conditions.append("submitter = :submitter")
        values["submitter"] = filter.submitter
    if filter.subject is not None and (prefix := literal_prefix(filter.subject)):
        conditions.append("subject >= :prefix AND subject < :prefix_end")
        values |= {"prefix": prefix, "prefix_end": prefix + "/"}
    if filter.text is not None:
        places = ("idempotency_key", "error_summary", "coalesce(error_code, '')")
        conditions.append("(" + " OR ".join(map(contains, places)) + ")")
        values["text"] = filter.text
    return "".join(f" AND {condition}" for condition in conditions), values


def _named_files(session: SqlSession, cache_id: str, names: list[str]) -> list[Any]:
    return session.rows("cached_files", (cache_id, session.listed(names)))


def _add_rollups(tx: Transaction, rollups: Sequence[Rollup]) -> list[None]:
    tx.session.changed("add_rollups", (), [(one.minute, one.server_id, encode_rollup(one)) for one in rollups])
    return [None] * len(rollups)


class SqlReader(SqlReads):
    """The read verbs on a connection of their own, for the thread that made it: slow reads do not delay the writer."""

    def __init__(self, own: ReadOnly) -> None:
        self._own = own

    def _read(self, read: Callable[[SqlSession], T]) -> T:
        try:
            with self._own.translated():
                return read(self._own.session)
        except TurnInterrupted as error:
            if error.why is not InterruptCause.CONNECTION:
                raise
        # The connection idled through a restart of the database: the session is a new one.
        with self._own.translated():
            return read(self._own.session)

    def close(self) -> None:
        self._own.close()


FAULT_POINTS = (
    "turn.begun",
    "submit.written",
    "lease.written",
    "finish.written",
    "fail.written",
    "fire.written",
    "fire.judged",
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
        migrates: bool = True,
    ) -> SqlStore:
        """Open a database that several servers may share, its tables created or brought up to date, or only checked.

        `url` is an address or any other connection string of libpq. `clock`: another than the database's, for tests.
        `lock_ttl_s`: of the leader's lock; no transaction may hang for as long as half of it.
        """
        from tasuki.stores.sql.postgres import PostgresDatabase

        database = PostgresDatabase(url, shard=shard, lock_ttl_s=lock_ttl_s, migrates=migrates)
        return cls(database, clock=clock, random=random, fault=fault)

    @classmethod
    def in_django(
        cls, alias: str = "default", *, clock: Clock | None = None, fault: Callable[[str], None] | None = None
    ) -> SqlStore:
        """Open a database of the running Django project: verbs inside `transaction.atomic()` commit or roll back with it."""
        from django.db import connections

        vendor = connections[alias].vendor
        if vendor == "sqlite":
            return cls(SqliteInDjango(alias), clock=clock, fault=fault)
        if vendor == "postgresql":
            from tasuki.stores.sql.postgres import PostgresInDjango

            return cls(PostgresInDjango(alias), clock=clock, fault=fault)
        raise ConfigError(f"the store has no statements for {vendor} (database {alias!r}); use PostgreSQL or SQLite")

    def turn(self, *, lasting: bool = True) -> Transaction:
        """Return the context of one transaction around several verbs."""
        self._tx.is_durable = lasting
        return self._tx

    def notes(self) -> TurnNotes:
        return TurnNotes(tuple(self._tx.came_back), tuple(self._tx.cut))

    def reader(self) -> SqlReader:
        """Open the read verbs on a second, read-only connection for the calling thread. Close it there."""
        return SqlReader(self._database.reader())

    def close(self) -> None:
        self._database.close()

    # -- verbs ----------------------------------------------------------------------------------------------------
    # `submit`, `lease` and `fire` hide their modules from there on, so they come after the other verbs of these.
    cancel = batch_verb(submit.cancel)
    requeue = batch_verb(submit.requeue)
    submit = batch_verb(submit.submit)
    assign = batch_verb(lease.assign)
    lease = batch_verb(lease.lease)
    start = batch_verb(report.start)
    renew = batch_verb(report.renew)
    release = batch_verb(report.release)
    end_leases = batch_verb(report.end_leases)
    finish = batch_verb(report.finish)
    fail = batch_verb(report.fail)
    take_over = verb(leader.take_over)
    reap = verb(leader.reap)
    skip = verb(leader.skip)
    promote = verb(leader.promote)
    fire = verb(fire.fire)
    prune = verb(leader.prune)
    archive_log = verb(leader.archive_log)
    place_blobs = batch_verb(blobs.place_blobs)
    blobs_stored = batch_verb(blobs.blobs_stored)
    condemn_blobs = verb(blobs.condemn_blobs)
    forget_blobs = verb(blobs.forget_blobs)
    put_cache = batch_verb(blobs.put_cache)
    remove_cache = batch_verb(blobs.remove_cache)
    add_rollups = batch_verb(_add_rollups)

    def enqueue(self, submissions: Sequence[Submission]) -> list[Answered]:
        """Submit jobs without input files in the transaction of the calling thread; for a store `in_django`.

        On PostgreSQL that is one statement without a savepoint, and its errors are Django's, like those of the ORM.
        """
        database = self._database
        assert isinstance(database, InDjango)
        wrapper = database.wrapper()
        if wrapper.vendor == "sqlite":  # no round trips to save, and one transaction writes at a time anyway
            return self.submit(submissions)
        wrapper.validate_no_broken_transaction()
        with wrapper.wrap_database_errors:
            return submit.enqueue(cast("PostgresInDjango", database).session_on(wrapper.connection), submissions)

    def rest(self) -> None:
        """Close a connection that the next turn opens again; see `StoreThread`."""
        from tasuki.stores.sql.postgres import PostgresDatabase

        if isinstance(self._database, PostgresDatabase):
            self._database.rest()

    def record_coordination(self, name: str) -> str:
        """Record by which coordination the servers of this store elect their leader, and return what was recorded first."""
        with self._tx:
            self._tx.session.change("record_once", (COORDINATION_SCOPE, name))
            ((_, recorded),) = self._select("epoch_seen", (COORDINATION_SCOPE,))
        return str(recorded)

    def held(self, holders: Sequence[tuple[str, str, str]]) -> list[list[Grant]]:
        if not holders:
            return []
        now = self.clock.lease()
        found, is_due = self._read(lambda session: held_leases(session, holders, now))
        if is_due:
            with self._tx:
                fetch(self._tx, holders)
                found, _ = held_leases(self._tx.session, holders, now)
        return found

    # -- pauses ---------------------------------------------------------------------------------------------------
    def pause(self, orders: Sequence[PauseOrder]) -> list[PauseAnswer]:
        if not orders:
            return []
        with self._tx:
            self._tx.session.change("lock_pauses")
            return [self._pause(order) for order in orders]

    def _pause(self, order: PauseOrder) -> PauseAnswer:
        session = self._tx.session
        if order.resume:
            return PauseAnswer.DONE if session.change("remove_pause", (order.pattern,)) else PauseAnswer.AS_BEFORE
        known = {pattern for (pattern,) in session.rows("paused_patterns")}
        if order.pattern in known:
            return PauseAnswer.AS_BEFORE
        if len(known) >= PAUSES_MAX:
            return PauseAnswer.TOO_MANY
        session.change("add_pause", (order.pattern, self.clock.wall(), order.actor, storable_text(order.reason)))
        return PauseAnswer.DONE

    # -- tokens ---------------------------------------------------------------------------------------------------
    def add_token(self, token: TokenRow) -> bool:
        with self._tx:
            if self._tx.session.change("add_token", token_values(token)) == 1:
                self.note(token.created_by, "token.create", token.token_id, f"{token.kind} {token.label}".rstrip())
                return True
            return self.token(token.sha256) == token

    def revoke_token(self, token_id: str, *, actor: str) -> bool:
        with self._tx:
            if self._tx.session.change("revoke_token", (token_id, self.clock.wall(), actor)) != 1:
                return False
            self.note(actor, "token.revoke", token_id)
            return True

    def note(self, actor: str, action: str, target: str, detail: str = "") -> None:
        with self._tx:
            self._tx.session.change("add_audit", (self.clock.wall(), actor, action, target, storable_text(detail)))

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
