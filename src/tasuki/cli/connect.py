"""From `--to`, `--data`, `--token-file` and `--tls-ca` to a client. Reads the token, and finds the data folder's own.

The admin token of a data folder is sent over TCP or HTTP only to the server that owns the folder: it notes where it listens
in the folder (`listening`), and the note counts only while the folder's owner is alive. Any other listener on this machine
may belong to another user.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tasuki.blobs.files import durable_write
from tasuki.errors import ConfigError

if TYPE_CHECKING:
    from tasuki.client import AsyncClient
    from tasuki.config import Address, DataFolder

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0  # a person waits for the answer; a script sees exit code 5 and may try again
LISTENING_NAME = "listening"
STDIN = "-"


class Destination(NamedTuple):
    """Where a command goes, as the user said it."""

    to: str | None = None
    data: Path | None = None
    token_file: str | None = None
    tls_ca: str | None = None


def with_client(place: Destination, work: Callable[[AsyncClient], Awaitable[T]]) -> T:
    """Connect, do the work, leave."""
    from tasuki.cli.store_client import guest, is_store, store_of
    from tasuki.client import AsyncClient
    from tasuki.config import default_url

    async def main() -> T:
        there = place.to or default_url()
        if there is not None and is_store(there):
            async with guest(store_of(there)) as near, AsyncClient(near, connect_timeout_s=CONNECT_TIMEOUT_S) as client:
                return await work(client)
        url, token = find_server(place)
        client = AsyncClient(url, token=token, data=place.data, tls_ca=place.tls_ca, connect_timeout_s=CONNECT_TIMEOUT_S)
        async with client:
            return await work(client)

    return asyncio.run(main())


def find_server(place: Destination) -> tuple[str | None, str]:
    """The address, if one was given, and the token for it (empty for the unix socket of the same user)."""
    from tasuki.config import data_folder, default_url

    url = place.to or default_url()
    token = read_token(place.token_file)
    if not token and url is not None:
        token = own_token(data_folder(place.data), url)
    return url, token


def read_token(token_file: str | None) -> str:
    """--token-file (- for stdin), else TASUKI_TOKEN, else nothing. Never an argument: those are seen by every user."""
    from tasuki.config import TOKEN_MAX_CHARS, find_token

    if token_file != STDIN:
        return find_token(token_file)
    token = sys.stdin.readline().strip()
    if not token or len(token) > TOKEN_MAX_CHARS or not token.isprintable():
        raise ConfigError("no token came on stdin; give it as one line, as in: tasuki … --token-file - < token")
    return token


def own_token(folder: DataFolder, url: str) -> str:
    """The folder's token if the address is that of the folder's running server, else nothing."""
    from tasuki.config import parse_url

    addresses = parse_url(url)
    if any(address.scheme == "unix" for address in addresses) or not _has_its_owner(folder):
        return ""
    ours = listening(folder)
    if not all(_same_place(address, ours) for address in addresses):
        return ""
    try:
        return folder.token_file.read_text("utf-8").strip()
    except OSError:  # another user's folder: then its token is not ours to use
        return ""


def _same_place(address: Address, ours: list[Address]) -> bool:
    direct = address.loopback and not address.path  # a path leads on, through something that is not our server
    return direct and any(address.port == other.port and other.scheme == address.scheme for other in ours)


def listening(folder: DataFolder) -> list[Address]:
    """Where the folder's server said that it listens."""
    from tasuki.config import parse_url

    try:
        lines = (folder.root / LISTENING_NAME).read_text("utf-8").split()
    except OSError:
        return []
    return [address for line in lines for address in parse_url(line)]


def note_listening(folder: DataFolder, addresses: list[Address]) -> None:
    """Note in the folder where its server listens; no addresses: it does not any more."""
    path = folder.root / LISTENING_NAME
    if not addresses:
        path.unlink(missing_ok=True)
        return
    durable_write(path, "".join(f"{address}\n" for address in addresses).encode(), mode=0o666)


def owner_of(folder: DataFolder) -> str:
    """Who owns the folder's database ("pid 12 since 2026-01-31 10:00:00"); empty if nobody does.

    The lock itself is only ever tried by servers: to try it here, even for a moment, could refuse one that is starting.
    """
    from tasuki.cli.output import when
    from tasuki.client.embedded import read_owner

    owner = read_owner(folder)
    return f"pid {owner.pid} since {when(owner.since)}" if owner is not None else ""


def _has_its_owner(folder: DataFolder) -> bool:
    """The owner keeps the owner file open. Its pid alone is no proof: after a crash any process may get the number, and
    another user's may take the port as well."""
    from tasuki.client.embedded import owner_files, read_owner

    owner = read_owner(folder)
    if owner is None:
        return False
    try:
        ours = [path.stat() for path in owner_files(folder) if path.exists()]
        descriptors = Path(f"/proc/{owner.pid}/fd").iterdir()
        return any(_same_file(descriptor, file) for descriptor in descriptors for file in ours)
    except OSError:  # gone, or another user's, who has no use for our token
        return False


def _same_file(descriptor: Path, ours: os.stat_result) -> bool:
    try:
        return os.path.samestat(descriptor.stat(), ours)
    except OSError:  # closed since it was listed
        return False
