"""A standalone server on a data folder: SQLite, blobs, the first token. What `tasuki up` and `tasuki server` start."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable
from pathlib import Path

from tasuki.blobs.folder import FolderBlobs
from tasuki.config import DataFolder
from tasuki.core.access import TOKEN_PREFIXES, token_sha256
from tasuki.core.verbs import TokenRow
from tasuki.errors import ConfigError
from tasuki.server.app import Server, ServerConfig
from tasuki.server.queries import Reader
from tasuki.server.transfers import Transfers
from tasuki.stores.store import Store

BLOB_MAX_BYTES = 64 * 1024 * 1024 * 1024


def make_secret(kind: str) -> str:
    """A new token: its kind in the prefix, 256 random bits."""
    return TOKEN_PREFIXES[kind] + secrets.token_urlsafe(32)


def prepare_folder(folder: DataFolder) -> None:
    """Make the folder, for this user only."""
    try:
        folder.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"the data folder {folder.root} cannot be made: {error.strerror or error}") from None


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

        store = SqlStore.open_sqlite(folder.database, fault=fault)
        ensure_admin_token(store, folder.token_file)
        return store

    return open_store


def open_sqlite_reader(folder: DataFolder) -> Callable[[], Reader]:
    """How the reader thread opens its own, read-only connection."""

    def open_reader() -> Reader:
        from tasuki.stores.sql_read import SqlReader

        return SqlReader(folder.database)

    return open_reader


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


def make_server(folder: DataFolder, config: ServerConfig, fault: Callable[[str], None] = lambda point: None) -> Server:
    """A server over the folder's SQLite file and blobs; `await server.start()` opens them."""
    blobs = FolderBlobs(folder.blobs, max_blob_bytes=BLOB_MAX_BYTES, floor_free_bytes=config.disk_floor_bytes)
    return Server(config, open_sqlite(folder, fault), open_sqlite_reader(folder), Transfers(blobs), fault)
