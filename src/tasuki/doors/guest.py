"""A guest: a server inside a process that wants to use a store itself. It listens on a unix socket in a private folder.

Clients and workers of the process connect to that socket as to any server, so all rules of servers hold.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from tasuki.config import check_folder
from tasuki.doors.tcp import TcpDoor
from tasuki.errors import ConfigError
from tasuki.server.server import Server

GUEST_PREFIX, LOCK_NAME = "tasuki-guest-", "lock"


@asynccontextmanager
async def open_guest(make: Callable[[Path], Server]) -> AsyncIterator[tuple[str, Server]]:
    """Run the server that `make` returns for a private folder while the block lasts; yields the address of its socket, and it."""
    with private_folder() as folder:
        server = make(folder)
        await server.start()
        door = TcpDoor(server)
        try:
            yield str(await door.listen_unix(folder / "socket")), server
        finally:
            await door.close()
            await server.stop()


@contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder for this user only. Folders of processes that were killed are removed: nobody holds their lock."""
    for left in Path(tempfile.gettempdir()).glob(f"{GUEST_PREFIX}*"):
        with suppress(OSError, ConfigError):  # another user's, or gone meanwhile
            check_folder(left)
            with (left / LOCK_NAME).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=GUEST_PREFIX) as name:
        folder = Path(name)
        with (folder / "lock.new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "lock.new").rename(folder / LOCK_NAME)
            yield folder
