"""SQLite under the SQL store: opening a file as its one owner, its settings, transactions, statements and errors.

One owner: a lock file beside the database is held with flock for as long as the store is open. The kernel releases it when the
process ends, however it ends. Several writing processes on one WAL file would work most of the time, which is not enough: the
row ids of a batch are taken to be consecutive, and a lease to be safe without a lock on its row.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tasuki.core.units import shown_time
from tasuki.errors import ConfigError, DiskFull, TasukiError, Unavailable
from tasuki.stores.common import SystemClock
from tasuki.stores.sql.database import (
    BATCH_MAX,
    NOTHING_STORED,
    WALL,
    Batch,
    InDjango,
    InsertedRows,
    Parameters,
    Queues,
    TranslatedErrors,
    load_statements,
)
from tasuki.stores.store import Feature

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

logger = logging.getLogger("tasuki.store")
CACHE_KIB = 64 * 1024  # pages in memory; the owner has to stay below 250 MB with millions of rows
READER_CACHE_KIB = 8 * 1024
CHECKPOINT_PAGES = 32_000  # 128 MB of WAL between checkpoints: insert, grant and finish of a row are written back once
WAL_KEEP_BYTES = 160 * 1024 * 1024
BUSY_TIMEOUT_MS = 5_000

FEATURES = frozenset({Feature.FIND_TEXT, Feature.DURABLE, Feature.DEFINITIONS})

_encode_json = msgspec.json.Encoder().encode

# File systems whose locks and shared memory cannot be trusted between hosts.
NETWORK_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "smb3", "smbfs"}
    | {"fuse.ceph", "fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs"}
)


def pieces(count: int) -> Iterator[tuple[int, int]]:
    """Yield (start, size) of the statements that together take `count` rows: whole BATCH_MAX ones, then the powers of two."""
    start = 0
    while start < count:
        size = min(BATCH_MAX, 1 << ((count - start).bit_length() - 1))
        yield start, size
        start += size


def file_system_of(path: Path) -> str:
    """Return the type of the file system that `path` is or will be on, by the kernel's mount table."""
    target = path.resolve()
    best, found = -1, "unknown"
    for line in Path("/proc/self/mounts").read_text("utf-8", "surrogateescape").splitlines():
        _device, folder, kind, *_ = line.split(" ")
        mounted = Path(folder.encode("utf-8", "surrogateescape").decode("unicode_escape"))
        # Later mounts hide earlier ones at the same place, so an equal length wins too.
        if len(mounted.parts) >= best and target.is_relative_to(mounted):
            best, found = len(mounted.parts), kind
    return found


class OwnerLock:
    """The lock that lets one process open a database file. The file holds its owner's pid and start time, for messages."""

    def __init__(self, database: Path) -> None:
        self.path = database.with_name(database.name + ".owner")
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot open {self.path}: {error.strerror}; choose a folder that this user may write to"
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self._descriptor, 200, 0).decode("utf-8", "replace").strip() or "pid unknown"
            owner = re.sub(r"(?<=since )\d{1,12}$", lambda since: shown_time(int(since[0])), owner)
            os.close(self._descriptor)
            raise Unavailable(
                f"{database} is in use by another process ({owner}); connect to that server, or stop it first"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"pid {os.getpid()} since {int(time.time())}\n".encode(), 0)

    def release(self) -> None:
        """Free the file for the next owner. The lock file stays: if deleted, two processes could lock two files of one name."""
        os.ftruncate(self._descriptor, 0)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a process that is just being started has the descriptor until its exec
        os.close(self._descriptor)


class SqliteErrors(TranslatedErrors):
    """Context that turns errors of SQLite into tasuki's. `fate`: what an error means for the data to be stored."""

    def __init__(self, fate: str = NOTHING_STORED) -> None:
        self._fate = fate

    def replacement(self, error: BaseException) -> TasukiError | None:
        cause = error if isinstance(error, sqlite3.Error) else error.__cause__
        if not isinstance(cause, sqlite3.Error):
            return None
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            return DiskFull(f"the disk of the database is full; {self._fate}, try again when there is space")
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return Unavailable(f"the database is locked by another process; {self._fate}")
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            return ConfigError(f"the file is damaged or not a database: {cause}; restore it from a backup, or name another file")
        return Unavailable(f"the database cannot be used: {cause}; {self._fate}")


class SqliteSession:
    """Statements of `statements/sqlite.sql` on one connection. See `database.SqlSession` for what each call promises.

    Lists of any length are one JSON text, for json_each.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        statements = load_statements("sqlite")
        self.one = statements.one
        self.many = statements.many
        self._execute = connection.execute

    # -- any statement --------------------------------------------------------------------------------------------
    def rows(self, name: str, parameters: Parameters = ()) -> list[Any]:
        return self._execute(self.one[name], parameters).fetchall()

    def change(self, name: str, parameters: Parameters = ()) -> int:
        return self._execute(self.one[name], parameters).rowcount

    def changed(self, name: str, shared: tuple[Any, ...], batch: Batch) -> int:
        return sum([cursor.rowcount for _, cursor in self._run(name, shared, batch)])

    def returned(self, name: str, shared: tuple[Any, ...], batch: Batch) -> list[Any]:
        returned: list[Any] = []
        for _, cursor in self._run(name, shared, batch):
            returned += cursor.fetchall()
        return returned

    def _run(self, name: str, shared: tuple[Any, ...], batch: Batch) -> Iterator[tuple[int, sqlite3.Cursor]]:
        """Run a batch statement piece by piece; yield the size of each piece and its cursor."""
        statements = self.many[name]
        for start, size in pieces(len(batch)):
            part = batch if size == len(batch) else batch[start : start + size]
            yield size, self._execute(statements[size], (*shared, *chain.from_iterable(part)))

    def walk(self, name: str, conditions: str, values: dict[str, Any]) -> Iterator[Any]:
        return self._execute(self.one[name].replace("{and}", conditions), values)

    # -- lists as parameters --------------------------------------------------------------------------------------
    def listed(self, values: Sequence[Any]) -> str:
        return _encode_json(values).decode()

    def holders(self, holders: list[tuple[str, str, str]]) -> tuple[str]:
        return (self.listed(holders),)

    def contains(self, column: str) -> str:
        return f"instr({column}, :text) > 0"

    # -- where vendors differ as a whole --------------------------------------------------------------------------
    def insert(self, name: str, wall: float, batch: Batch) -> Iterator[InsertedRows]:
        for size, cursor in self._run(name, (wall,), batch):
            created = cursor.rowcount
            newest = cursor.lastrowid or 0
            # One writer: the new rows of one statement have consecutive ids.
            yield InsertedRows(size, created, range(newest - created + 1, newest + 1) if created else ())

    def claim(self, queues: Queues, terms: tuple[Any, ...]) -> list[Any]:
        wall = terms[WALL]
        if len(queues.members) == 1:
            rows = self.rows("oldest_of_queue", (queues.priority, queues.group, *queues.members[0], queues.limit, wall))
        else:
            members = self.listed(queues.members)
            rows = self.rows("oldest_of_queues", (queues.priority, queues.group, members, queues.limit, wall))
        if rows:
            changed = self.change("grant", (*terms, self.listed([row[0] for row in rows])))
            if changed != len(rows):
                raise Unavailable(
                    f"{len(rows)} jobs were ready and {changed} could be leased: another process writes to this file"
                )
        return rows

    def came_back(self, row_id: int) -> None:
        pass

    def finish(self, wall: float, plain: Batch, full: Batch) -> list[tuple[int, str]]:
        ids = self.listed([row[0] for row in chain(plain, full)])
        leased = self.rows("leased_groups", (ids,))
        changed = self.changed("finish_plain", (wall,), plain) + self.changed("finish_full", (wall,), full)
        if changed < len(leased):
            # Leased before and SUCCEEDED now: these are the rows that the statements changed.
            succeeded = {row_id for (row_id,) in self.rows("succeeded_of", (ids,))}
            leased = [(row_id, group) for row_id, group in leased if row_id in succeeded]
        return leased


class SqliteDatabase:
    """One owned file, on a connection that Django made; used by one thread at a time, any thread."""

    features = FEATURES
    shard = 0
    translated = SqliteErrors

    def __init__(self, path: Path, *, file_system: Callable[[Path], str] = file_system_of, stretch_bytes: int = 0) -> None:
        from django.db import connections

        from tasuki.django import standalone

        self.path = path = path.resolve()  # one file, one lock, whatever links lead to it
        self.clock = SystemClock()
        kind = file_system(path.parent)
        if kind in NETWORK_FILE_SYSTEMS:
            raise ConfigError(
                f"{path} is on a network file system ({kind}), where SQLite can lose data; use a local disk, or PostgreSQL"
            )
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)  # the journal gets the same mode from SQLite
            self._lock = OwnerLock(path)
        except OSError as error:
            raise ConfigError(
                f"cannot keep a database at {path}: {error.strerror}; choose a folder that this user may write to"
            ) from error
        try:
            standalone.configure(path)
            self._alias = standalone.register(path)
        except BaseException:
            self._lock.release()
            raise
        self._wrapper: BaseDatabaseWrapper = connections[self._alias]
        self._wrapper.inc_thread_sharing()
        self._is_open = True
        self._lasting = True
        try:
            with SqliteErrors():
                self._wrapper.ensure_connection()
                self.connection: sqlite3.Connection = self._wrapper.connection
                _tune(self.connection)
                standalone.migrate(self._alias)
            _stretch(self.connection, stretch_bytes)
            self.session = SqliteSession(self.connection)
        except BaseException:
            self.close()
            raise

    def begin(self, *, lasting: bool = True) -> None:
        if lasting != self._lasting:
            # As a script, compiled anew: this pragma acts when it is compiled, and `execute` caches compiled statements.
            self.connection.executescript(f"PRAGMA synchronous = {'FULL' if lasting else 'NORMAL'}")
            self._lasting = lasting
        self.connection.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self.connection.execute("COMMIT")

    def rollback(self) -> None:
        # After a full disk or an I/O error SQLite may have rolled back by itself.
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def reader(self) -> SqliteReadOnly:
        return SqliteReadOnly(self.path)

    def close(self) -> None:
        """Close the connection and free the file. A second call does nothing."""
        from tasuki.django import standalone

        if self._is_open:
            self._is_open = False
            self._wrapper.close()
            standalone.forget(self._alias)
            self._lock.release()


class SqliteInDjango(InDjango):
    """A SQLite file of the user's own Django project."""

    features = FEATURES
    shard = 0
    translated = SqliteErrors

    def __init__(self, alias: str = "default") -> None:
        super().__init__(alias)
        self.clock = SystemClock()

    @property
    def session(self) -> SqliteSession:
        return SqliteSession(self.wrapper().connection)

    def reader(self) -> SqliteReadOnly:
        return SqliteReadOnly(Path(str(self.wrapper().settings_dict["NAME"])).absolute())


class SqliteReadOnly:
    """A second connection that cannot write, for the calling thread."""

    translated = SqliteErrors

    def __init__(self, path: Path) -> None:
        with SqliteErrors():
            self._connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, isolation_level=None)
            self._connection.execute("PRAGMA query_only = 1")
            self._connection.execute(f"PRAGMA cache_size = -{READER_CACHE_KIB}")
            self._connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        self.session = SqliteSession(self._connection)

    def close(self) -> None:
        self._connection.close()


class FileWatch:
    """Looks whether others have changed a file. For the calling thread, which it never blocks."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=0.0)
        self._seen = 0

    def has_changed(self) -> bool:
        """Return whether the file was changed since the last call that returned True, or since the first."""
        try:
            ((found,),) = self._connection.execute("PRAGMA data_version")
        except sqlite3.OperationalError:  # locked at this moment, by one who changes it
            return False
        before, self._seen = self._seen, found
        return before not in (0, found)

    def close(self) -> None:
        self._connection.close()


def _tune(connection: sqlite3.Connection) -> None:
    for setting in (
        "journal_mode = WAL",
        "synchronous = FULL",  # NORMAL loses acknowledged commits at a power cut
        f"cache_size = -{CACHE_KIB}",
        f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
        f"journal_size_limit = {WAL_KEEP_BYTES}",
        f"busy_timeout = {BUSY_TIMEOUT_MS}",
        "mmap_size = 0",  # a mapped file would count as the process's memory
        "temp_store = MEMORY",
        "secure_delete = OFF",  # Debian's build zeroes what is deleted; here that is every index entry of every job
    ):
        connection.execute(f"PRAGMA {setting}").fetchall()


def _stretch(connection: sqlite3.Connection, wanted_bytes: int) -> None:
    """Make the journal file longer than it needs to be: a commit that makes a file grow waits half as long again for the disk.

    A transaction that is too large for the cache is rolled back: its pages stay in the file, and are not used.
    """
    if not wanted_bytes:
        return
    try:
        connection.execute("PRAGMA cache_size = -256")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE tasuki_stretch (filler BLOB)")
        connection.executemany("INSERT INTO tasuki_stretch VALUES (zeroblob(1048576))", [()] * (wanted_bytes >> 20))
    except sqlite3.Error as error:  # without room for it the store works all the same
        logger.info("the journal was not made longer: %s", error)
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
