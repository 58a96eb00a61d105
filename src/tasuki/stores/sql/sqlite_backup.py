"""Files of a SQLite store: a consistent copy of one in use, the facts of a copy, its preparation for use; sizes, compaction.

Taking a copy only reads, on a connection of its own: the server continues writing. `begin_new_life` makes a copy safe to open:
workers, clients and servers from after the copy may still exist, and the leases and epochs that they show must be refused
(docs/decisions/0024). Touches only the files that it is given.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path

import msgspec

from tasuki.core.election import LEADER_SCOPE
from tasuki.core.job import State
from tasuki.core.lifecycle import ATTEMPT_STEP, EPOCH_STEP, LEASE_MARGIN_S
from tasuki.core.statistics import COUNTED
from tasuki.core.store_messages import BlobPlace
from tasuki.errors import Corrupt, DiskFull, InvalidInput
from tasuki.stores.sql.database import Statements
from tasuki.stores.sql.sqlite import BUSY_TIMEOUT_MS, SqliteDatabase, SqliteErrors

PAGES_PER_STEP = 4096  # 16 MiB between two calls of progress
RESTORER = "restore"
_REASON = "the store was restored from a backup; a worker that still runs this attempt can no longer report it"
_TABLES = ("tasuki_jobrun", "tasuki_scopeepoch", "tasuki_blob", "tasuki_jobblob", "tasuki_schema", "django_migrations")

Progress = Callable[[int, int], None]
"""(done, all), in bytes."""


class BackupFacts(msgspec.Struct, frozen=True):
    """Contents of a copy, for people and for the manifest."""

    schema_version: int
    migrations: tuple[str, ...]
    epoch: int
    holder: str
    jobs: dict[str, int]


class RestoredFacts(msgspec.Struct, frozen=True):
    """Facts of a restored database before its first use."""

    epoch: int
    given_back: int
    """Jobs that a worker held when the copy was taken."""
    canceled: int
    unknown_blobs: tuple[tuple[str, int], ...] = ()
    """(sha256, generation) of bytes that came with the copy and that no row names."""


class DatabaseSpace(msgspec.Struct, frozen=True):
    """Bytes of a database and its journal on disk, and those inside that a compaction would give back."""

    size_bytes: int
    unused_bytes: int


def space_of(database: Path) -> DatabaseSpace:
    """Return the size of a database, which may be in use."""
    address = f"{database.absolute().as_uri()}?mode=ro"
    with SqliteErrors("nothing was changed"), closing(sqlite3.connect(address, uri=True)) as connection:
        unused, page_bytes = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("freelist_count", "page_size"))
        files_there = (path for path in (database, database.with_name(f"{database.name}-wal")) if path.exists())
        return DatabaseSpace(sum(path.stat().st_size for path in files_there), unused * page_bytes)


def compact(database: Path) -> None:
    """Rewrite a database without its unused pages. The caller holds its owner's lock; killed at any point, it is whole.

    A plain VACUUM would need room in the folder for temporary files, which is often another disk, or memory.
    """
    space = space_of(database)
    needed_bytes = 2 * (space.size_bytes - space.unused_bytes)  # the rewritten pages, and once more in the journal
    free_bytes = shutil.disk_usage(database.parent).free
    if free_bytes < needed_bytes:
        raise DiskFull(f"up to {needed_bytes:,} bytes are needed beside the store, and {free_bytes:,} are free; make room")
    smaller = database.with_name(f"{database.name}.compact")
    smaller.unlink(missing_ok=True)  # of a compaction that was killed
    smaller.touch(mode=0o600, exist_ok=False)  # it has payloads and results, and the folder may be open to others
    try:
        with SqliteErrors("nothing was changed"), closing(sqlite3.connect(database, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("VACUUM INTO ?", (str(smaller),))
            with closing(sqlite3.connect(smaller)) as copy:
                copy.backup(connection)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        smaller.unlink(missing_ok=True)


def snapshot(database: Path, target: Path, progress: Progress = lambda done, whole: None) -> None:
    """Copy a database, which may be in use, as it is now. `target` is made durable by the caller.

    The read transaction around the steps pins one state: without it the copy would begin again after every write in between.
    """
    address = f"{database.absolute().as_uri()}?mode=ro"
    with (
        SqliteErrors("nothing was copied"),
        closing(sqlite3.connect(address, uri=True, isolation_level=None)) as source,
        closing(sqlite3.connect(target)) as copy,
    ):
        source.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        copy.execute("PRAGMA synchronous = OFF")
        (page_bytes,) = source.execute("PRAGMA page_size").fetchone()
        source.execute("BEGIN")
        source.execute("SELECT count(*) FROM sqlite_master").fetchone()
        source.backup(
            copy,
            pages=PAGES_PER_STEP,
            progress=lambda _status, left, whole: progress((whole - left) * page_bytes, whole * page_bytes),
        )
        source.execute("COMMIT")


@contextmanager
def _copy_at(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a copy for reading. `immutable`: not even the files beside it are made."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
        connection.execute("PRAGMA trusted_schema = OFF")
        yield connection


def facts_of(path: Path) -> BackupFacts:
    """Read the facts of a copy."""
    with _copy_at(path) as connection:
        schema = connection.execute("SELECT version FROM tasuki_schema WHERE id = 1").fetchone()
        migrations = connection.execute("SELECT name FROM django_migrations WHERE app = 'tasuki' ORDER BY id").fetchall()
        epoch = connection.execute("SELECT epoch, holder FROM tasuki_scopeepoch WHERE scope = ?", (LEADER_SCOPE,)).fetchone()
        jobs = connection.execute("SELECT state, count(*) FROM tasuki_jobrun GROUP BY state ORDER BY state").fetchall()
    number, holder = epoch or (0, "")
    return BackupFacts(schema[0] if schema else 0, tuple(name for (name,) in migrations), number, holder, dict(jobs))


def blobs_of(path: Path) -> list[BlobPlace]:
    """Return the stored blobs that jobs and caches of a copy refer to."""
    with _copy_at(path) as connection:
        rows = connection.execute(
            "SELECT sha256, size_bytes, generation FROM tasuki_blob"
            " WHERE stored = 1 AND condemned = 0 AND (sha256 IN (SELECT sha256 FROM tasuki_jobblob)"
            " OR sha256 IN (SELECT sha256 FROM tasuki_cachefile)) ORDER BY sha256"
        )
        return [BlobPlace(sha256, size_bytes, generation, stored=True) for sha256, size_bytes, generation in rows]


def check_copy(path: Path) -> None:
    """Corrupt unless it is a complete database of tasuki; InvalidInput if it is of a newer version than this code."""
    try:
        with _copy_at(path) as connection:
            names: dict[str, str] = dict(connection.execute("SELECT name, type FROM sqlite_master"))
            found = [line for (line,) in connection.execute("PRAGMA integrity_check(10)")]
            absent = [name for name in _TABLES if names.get(name) != "table"]
            applied = [] if absent else list(facts_of(path).migrations)
    except sqlite3.Error as error:
        raise Corrupt(f"the database in the backup is damaged or not a database: {error}; use another backup") from None
    if found != ["ok"]:
        raise Corrupt(f"the database in the backup is damaged: {'; '.join(found)}; use another backup")
    if absent or not {"trigger", "view"}.isdisjoint(names.values()):
        raise Corrupt("the database in the backup is not a store of tasuki; use another backup")
    if newer := sorted(set(applied) - _known_migrations()):
        raise InvalidInput(
            f"the backup is of a newer tasuki than this one, which does not know {', '.join(newer)}; "
            "restore it with the version that made it, or a newer one"
        )


def _known_migrations() -> set[str]:
    return {file.name.removesuffix(".py") for file in files("tasuki.django").joinpath("migrations").iterdir()}


def begin_new_life(path: Path, *, now: float, present: Iterable[tuple[str, int]] | None) -> RestoredFacts:
    """Bring a copy up to date and make it safe to open: epoch and attempts raised, leases ended, counters correct.

    `present`: the blobs whose bytes came with it; rows of others are deleted. None: the bytes are elsewhere, all rows stay.
    """
    text = files("tasuki.stores.sql").joinpath("statements", "sqlite_restore.sql").read_text("utf-8")
    statements = Statements(text, {}).one
    database = SqliteDatabase(path)

    def run(name: str, parameters: tuple[str | float, ...] = ()) -> sqlite3.Cursor:
        return database.connection.execute(statements[name], parameters)

    try:
        with SqliteErrors():
            database.begin()
            run("add_incidents", (now, RESTORER, _REASON))
            canceled = run("cancel", (now, "canceled; the store was restored from a backup")).rowcount
            given_back = run("give_back", (now, LEASE_MARGIN_S)).rowcount + run("free_orphaned").rowcount
            run("raise_attempts", (ATTEMPT_STEP,))
            run("forget_counters")
            for group, state, n in run("count_by_state").fetchall():
                if state not in COUNTED:
                    raise Corrupt(f"a job in the backup has the unknown state {state!r}; use another backup")
                run("add_counter", (group, COUNTED[State(state)], n))
            unknown: tuple[tuple[str, int], ...] = ()
            if present is not None:
                run("make_present")
                database.connection.executemany(statements["add_present"], present)
                unknown = tuple(run("unknown_blobs").fetchall())
                run("forget_absent_blobs")
            run("raise_epochs", (EPOCH_STEP, RESTORER))
            run("first_epoch", (LEADER_SCOPE, EPOCH_STEP, RESTORER))
            [[epoch, _]] = database.session.rows("epoch", (LEADER_SCOPE,))
            database.commit()
    finally:
        database.close()
    return RestoredFacts(epoch, given_back, canceled, unknown)
