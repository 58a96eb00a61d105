"""Straight to a store that servers share, `--to redis://…` or `postgresql://…`: for those who may know its address.

Nothing here speaks to the store itself. A *guest*, a server of this process's own, takes part in it: it opens no door but a unix
socket in a private folder, makes no token, and does not stand for election. Workers and clients of this process connect to that
socket as to any server, so all rules, batches and hints are those of every server.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tasuki.errors import ConfigError

if TYPE_CHECKING:
    from tasuki.server.assembly import StorageLocations
    from tasuki.server.server import Server

logger = logging.getLogger("tasuki.direct")
SCHEMES = ("redis://", "rediss://", "redis+sentinel://", "rediss+sentinel://", "postgresql://", "postgres://")
FOLDER_PREFIX, LOCK_NAME = "tasuki-guest-", "lock"
LEADER_WAIT_S = 15.0  # longer than a takeover: a new leader may be on its way


class StoreAddress(NamedTuple):
    """A store, and what belongs to it."""

    url: str
    app: str | None = None
    blobs: str = ""
    coordination: str = ""
    lead_ttl_s: float = 10.0


def is_store(url: str | None) -> bool:
    """Whether this is the address of a store, not of a server."""
    return url is not None and url.startswith(SCHEMES)


def store_of(url: str) -> StoreAddress:
    """For commands that have no option for the rest: TASUKI_APP, TASUKI_BLOBS and TASUKI_COORDINATION."""
    wanted = os.environ.get
    return StoreAddress(url, wanted("TASUKI_APP"), wanted("TASUKI_BLOBS", ""), wanted("TASUKI_COORDINATION", ""))


def guest_places(address: StoreAddress, folder: Path) -> StorageLocations:
    from tasuki.config import DataFolder, check_app
    from tasuki.core.apps import DEFAULT_APP
    from tasuki.server.assembly import StorageLocations

    if not is_store(address.url):
        scheme = address.url.partition("://")[0][:40]
        raise ConfigError(
            f"{scheme}://… is no store that servers share; use redis://host:6379/0 or postgresql://user@host/database"
        )
    return StorageLocations(
        DataFolder(folder),
        address.url,
        address.blobs,
        address.lead_ttl_s,
        coordination=address.coordination,
        app=check_app(address.app) if address.app else DEFAULT_APP,
    )


@asynccontextmanager
async def guest(address: StoreAddress, *, lease_ttl_s: float = 15.0) -> AsyncIterator[str]:
    """Take part while the block lasts; the address of the socket."""
    from tasuki.cli.server_process import host_name, new_server_id
    from tasuki.doors.tcp import TcpDoor
    from tasuki.server.assembly import make_guest
    from tasuki.server.server import ServerConfig

    with _private_folder() as folder:
        config = ServerConfig(server_id=new_server_id(), data=folder, lease_ttl_s=lease_ttl_s, host=host_name())
        server, _ = make_guest(guest_places(address, folder), config, stands=False)
        await server.start()
        door = TcpDoor(server)
        watching = asyncio.ensure_future(_miss_a_leader(server))
        try:
            yield str(await door.listen_unix(folder / "socket"))
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await door.close()
            await server.stop()


@contextmanager
def _private_folder() -> Iterator[Path]:
    """For this user only. Those of processes that were killed are removed: nobody holds their lock any more."""
    for left in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*/{LOCK_NAME}"):
        with suppress(OSError), left.open() as lock:  # another user's, or gone meanwhile
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as name:
        folder = Path(name)
        with (folder / "lock.new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "lock.new").rename(folder / LOCK_NAME)
            yield folder


async def _miss_a_leader(server: Server) -> None:
    """Said once: without a leader, jobs of workers that died and jobs that wait for their time stay where they are."""
    led = True
    while led:
        await asyncio.sleep(LEADER_WAIT_S)
        led = any(info["leads"] for info in server.broker.describe_servers())
    logger.warning(
        "no server leads on this store: expired leases and delayed jobs wait until one does; "
        "start one with tasuki server --store URL, or run tasuki duties --once every minute"
    )
