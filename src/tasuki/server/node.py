"""A server with all its parts: what `tasuki up` and `tasuki server` start. SQLite and blobs in a data folder, or PostgreSQL and
S3 for several servers; then the folder holds only the socket and the token of this server's own user.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from tasuki.blobs.opening import open_blobs
from tasuki.config import DataFolder
from tasuki.core.access import TOKEN_PREFIXES, token_sha256
from tasuki.core.term import LOCK_TTL_S
from tasuki.core.verbs import TokenRow
from tasuki.errors import ConfigError
from tasuki.server.app import Server, ServerConfig
from tasuki.server.publish import finish_publishing
from tasuki.server.queries import Reader
from tasuki.server.together import Together
from tasuki.stores.store import Store

logger = logging.getLogger("tasuki.server")
JOURNAL_STRETCH_BYTES = 8 * 1024 * 1024  # some hundred jobs at idle; under load many share a commit
BLOB_MAX_BYTES = 64 * 1024 * 1024 * 1024
SHARED_READERS = 4  # read-only connections of a server to a database that it shares; SQLite's reader is quick enough alone


def make_secret(kind: str) -> str:
    """A new token: its kind in the prefix, 256 random bits."""
    return TOKEN_PREFIXES[kind] + secrets.token_urlsafe(32)


def prepare_folder(folder: DataFolder) -> None:
    """Make the folder, for this user only; finish a restore that was killed while its store took its place."""
    try:
        folder.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"the data folder {folder.root} cannot be made: {error.strerror or error}") from None
    finish_publishing(folder)


def kill_at(points: str) -> Callable[[str], None]:
    """For tests: the process kills itself at a named point, `name`, or the nth time it comes there, `name:n`.

    `one,other` counts `other` only after `one`: `submit.written,turn.committed` is right after the commit of a submit.
    """
    ahead = [(name, int(count or 1)) for name, _, count in (point.partition(":") for point in points.split(",") if point)]

    def fault(name: str) -> None:
        if not ahead or ahead[0][0] != name:
            return
        wanted, count = ahead.pop(0)
        if count > 1:
            ahead.insert(0, (wanted, count - 1))
        elif not ahead:
            os.kill(os.getpid(), signal.SIGKILL)

    return fault


def open_sqlite(folder: DataFolder, fault: Callable[[str], None]) -> Callable[[], Store]:
    """How the store thread opens its store. Django is imported here, not before."""

    def open_store() -> Store:
        from tasuki.stores.sql import SqlStore

        store = SqlStore.open_sqlite(folder.database, fault=fault, stretch_bytes=JOURNAL_STRETCH_BYTES)
        ensure_admin_token(store, folder.token_file)
        return store

    return open_store


def open_sqlite_reader(folder: DataFolder) -> Callable[[], Reader]:
    """How the reader thread opens its own, read-only connection."""

    def open_reader() -> Reader:
        from tasuki.stores.sql_read import SqlReader
        from tasuki.stores.sql_sqlite import SqliteReadOnly

        return SqlReader(SqliteReadOnly(folder.database))

    return open_reader


def open_postgresql(
    url: str, folder: DataFolder, fault: Callable[[str], None], lock_ttl_s: float = LOCK_TTL_S
) -> Callable[[], Store]:
    """The same for a database that several servers share. Its tables are made or brought up to date first."""

    def open_store() -> Store:
        from tasuki.stores.sql import SqlStore

        store = SqlStore.open_postgresql(url, fault=fault, lock_ttl_s=lock_ttl_s)
        ensure_admin_token(store, folder.token_file)
        return store

    return open_store


def open_postgresql_reader(url: str) -> Callable[[], Reader]:
    def open_reader() -> Reader:
        from tasuki.stores.sql_postgres import PostgresReadOnly, connection_parameters
        from tasuki.stores.sql_read import SqlReader

        return SqlReader(PostgresReadOnly(connection_parameters(url)))

    return open_reader


def company_on_postgresql(url: str, server_id: str, lock_ttl_s: float) -> Together:
    """The other servers on that database."""
    from tasuki.coords.sql import SqlCoordination
    from tasuki.stores.sql import SCHEMA_VERSION
    from tasuki.stores.sql_wakeups import PostgresWakeups

    return Together(
        lambda: SqlCoordination(url, ttl_s=lock_ttl_s),
        PostgresWakeups(url, server_id=server_id),
        incarnation=secrets.token_hex(8),
        schema_version=SCHEMA_VERSION,
        lock_ttl_s=lock_ttl_s,
    )


def ensure_admin_token(store: Store, path: Path) -> None:
    """The folder's own admin token: made at the first start, mode 0600, made again if its file was lost."""
    try:
        known = store.token(token_sha256(path.read_text("utf-8").strip()))
    except FileNotFoundError:
        known = None
    if known is not None and known.revoked_at is None:
        return
    secret = make_secret("admin")
    row = TokenRow(
        token_id=secrets.token_hex(6),
        kind="admin",
        sha256=token_sha256(secret),
        label="made by the server for its own folder",
        created_at=store.clock.wall(),
        created_by="server",
    )
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret + "\n")
        file.flush()
        os.fsync(file.fileno())
    store.add_token(row)
    temporary.replace(path)


class Places(NamedTuple):
    """Where a server keeps what must survive."""

    folder: DataFolder
    store: str = ""
    """postgresql://…; empty: SQLite in the folder."""
    blobs: str = ""
    """s3://…, or a folder; empty: in the data folder."""
    lock_ttl_s: float = LOCK_TTL_S


def make_server(places: Places, config: ServerConfig, fault: Callable[[str], None] = lambda point: None) -> Server:
    """A server over these places; `await server.start()` opens them."""
    folder = places.folder
    blobs = open_blobs(places.blobs or folder.blobs, max_blob_bytes=BLOB_MAX_BYTES, floor_free_bytes=config.disk_floor_bytes)
    if not places.store:
        return Server(config, open_sqlite(folder, fault), open_sqlite_reader(folder), blobs, fault=fault)
    check_store(places.store)
    own_folder(folder)
    if not places.blobs:
        logger.warning("the blobs of this server are in %s: other servers cannot reach them; give --blobs s3://…", folder.blobs)
    return Server(
        msgspec.structs.replace(config, readers=SHARED_READERS),
        open_postgresql(places.store, folder, fault, places.lock_ttl_s),
        open_postgresql_reader(places.store),
        blobs,
        company_on_postgresql(places.store, config.server_id, places.lock_ttl_s),
        fault,
    )


def own_folder(folder: DataFolder) -> None:
    """One server for one data folder, for as long as this process lives: a second one would take the socket away."""
    from tasuki.stores.sql_sqlite import OwnerLock

    OwnerLock(folder.root / "server")


def check_store(url: str) -> None:
    """ConfigError for what is no store that several servers can share."""
    if not url.startswith(("postgresql://", "postgres://")):
        scheme = url.partition("://")[0][:40]
        raise ConfigError(f"--store {scheme}://…: use postgresql://user@host/database, or none for the data folder")
