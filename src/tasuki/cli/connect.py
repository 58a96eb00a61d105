"""Clients for commands: from --to, --data, --token-file and --tls-ca to a connection.

The admin token of a data folder is sent over TCP or HTTP only to the server that owns the folder. The server notes in the folder
where it listens (`listening`), and the note counts only while the folder's owner is alive: any other listener on this machine
may belong to another user.

`--to redis://…` or `postgresql://…` goes straight to a store that servers share. A *guest*, a server inside this process, then
takes part in the store: it listens only on a unix socket in a private folder, makes no token, and does not stand for election.
The client connects to that socket as to any server, so all rules of servers hold.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from tasuki.blobs.files import durable_write
from tasuki.cli.command import STDIN, Destination
from tasuki.client.embedded import answers, owner_files, read_owner
from tasuki.config import (
    TOKEN_MAX_CHARS,
    DataFolder,
    check_app,
    data_folder,
    default_url,
    find_token,
    own_agent_token,
)
from tasuki.core.address import AGENTS, Address, parse_agents, parse_url, shown_address
from tasuki.core.apps import DEFAULT_APP
from tasuki.core.election import LOCK_TTL_S
from tasuki.core.lifecycle import LEASE_TTL_S
from tasuki.core.units import shown_time
from tasuki.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from tasuki.client.agents.client import AsyncAgentsClient
    from tasuki.client.aio import AsyncClient
    from tasuki.server.assembly import StorageLocations
    from tasuki.server.server import Server

T = TypeVar("T")
logger = logging.getLogger("tasuki.direct")

CONNECT_TIMEOUT_S = 5.0  # a person waits for the answer; a script sees exit code 5 and may try again
LISTENING_NAME = "listening"
STORE_SCHEMES = ("redis://", "rediss://", "redis+sentinel://", "rediss+sentinel://", "postgresql://", "postgres://")
LEADER_WAIT_S = 15.0  # longer than a takeover: a new leader may be on its way


def with_client(
    place: Destination, work: Callable[[AsyncClient], Awaitable[T]], *, agents: bool = False, embedded: bool = True
) -> T:
    """Connect, await `work(client)`, disconnect, and return its result.

    `agents`: the jobs may be those of node agents. `embedded`: without a server, one is started for the time of the command.
    """

    async def main() -> T:
        url = place.to or default_url()
        if agents and are_named(place):
            from tasuki.client.agents.jobs import AgentJobsClient

            async with open_agents_client(place) as nodes:
                return await work(cast("AsyncClient", AgentJobsClient(nodes)))
        from tasuki.client.aio import AsyncClient

        if url is not None and is_store(url):
            # Commands have no options for the settings that the servers of a store share.
            get = os.environ.get
            address = StoreAddress(url, get("TASUKI_APP"), get("TASUKI_BLOBS", ""), get("TASUKI_COORDINATION", ""))
            async with guest(address) as socket, AsyncClient(socket, connect_timeout_s=CONNECT_TIMEOUT_S) as client:
                client.hinted = True  # commands say themselves why a job waits, unless they are to be quiet
                return await work(client)
        url, token = find_server(place)
        if url is None and not embedded and not answers(data_folder(place.data).socket):
            raise Unavailable(
                f"no server runs on the data folder {data_folder(place.data).root}; start one with: tasuki up, or name another "
                "with --to URL or --data FOLDER"
            )
        client = AsyncClient(url, token=token, data=place.data, tls_ca=place.tls_ca, connect_timeout_s=CONNECT_TIMEOUT_S)
        client.hinted = True
        async with client:
            return await work(client)

    return asyncio.run(main())


def find_server(place: Destination) -> tuple[str | None, str]:
    """Return the address, if one was given, and the token for it (empty for the unix socket of the same user)."""
    url = place.to or default_url()
    token = read_token(place.token_file)
    if not token and url is not None:
        token = own_token(data_folder(place.data), url)
    return url, token


# ---------------------------------------------------------------------------------------------------- node agents


def are_named(place: Destination) -> bool:
    """Return whether --to, else TASUKI_URL, names node agents."""
    return (place.to or default_url() or "").startswith(AGENTS)


def open_agents_client(place: Destination) -> AsyncAgentsClient:
    """Make a client of the node agents; its breakers are remembered in the data folder."""
    from tasuki.client.agents.client import AsyncAgentsClient

    where = place.to or default_url() or ""
    if not are_named(place):
        named = f"--to {shown_address(where)!r} names no node agents" if where else "no node agents are named"
        raise ConfigError(f"{named}; write --to agents:http://n1:7090,http://n2:7090")
    folder = data_folder(place.data)
    token = read_token(place.token_file) or own_agent_token(parse_agents(where), place.data)
    return AsyncAgentsClient(where, token=token, tls_ca=place.tls_ca, notes=folder.root)


# ---------------------------------------------------------------------------------------------------- tokens and owners


def read_token(token_file: str | None) -> str:
    """Return the token of --token-file (- for stdin), else of TASUKI_TOKEN, else "". Every user can see arguments."""
    if token_file != STDIN:
        return find_token(token_file)
    token = sys.stdin.readline().strip()
    if not token or len(token) > TOKEN_MAX_CHARS or not token.isprintable():
        raise ConfigError("no token came on stdin; give it as one line, as in: tasuki … --token-file - < token")
    return token


def own_token(folder: DataFolder, url: str) -> str:
    """Return the folder's token if the address is that of the folder's running server, else ""."""
    addresses = parse_url(url)
    if any(address.scheme == "unix" for address in addresses) or not _owner_is_alive(folder):
        return ""
    noted = {(address.scheme, address.port) for address in listening(folder)}
    for address in addresses:
        direct = address.loopback and not address.path  # a path leads on, through something that is not the folder's server
        if not direct or (address.scheme, address.port) not in noted:
            return ""
    try:
        return folder.token_file.read_text("utf-8").strip()
    except OSError:  # the folder of another user, whose token is not ours to use
        return ""


def listening(folder: DataFolder) -> list[Address]:
    """Return the addresses that the folder's server noted."""
    try:
        lines = (folder.root / LISTENING_NAME).read_text("utf-8").split()
    except OSError:
        return []
    return [address for line in lines for address in parse_url(line)]


def note_listening(folder: DataFolder, addresses: list[Address]) -> None:
    """Note in the folder where its server listens; without addresses, remove the note."""
    path = folder.root / LISTENING_NAME
    if not addresses:
        path.unlink(missing_ok=True)
        return
    durable_write(path, "".join(f"{address}\n" for address in addresses).encode())


def owner_of(folder: DataFolder) -> str:
    """Return the owner of the folder's database ("pid 12 since 2026-01-31 10:00:00"), or "" if there is none.

    Only servers try the lock itself: to try it here, even for a moment, could refuse a server that is starting.
    """
    owner = read_owner(folder)
    return f"pid {owner.pid} since {shown_time(owner.since)}" if owner is not None else ""


def _owner_is_alive(folder: DataFolder) -> bool:
    """Return whether the process in the owner file has that file open.

    Its pid alone is no proof: after a crash any process may get the number, and another user's may take the port as well.
    """
    owner = read_owner(folder)
    if owner is None:
        return False
    try:
        files = [path.stat() for path in owner_files(folder) if path.exists()]
        descriptors = Path(f"/proc/{owner.pid}/fd").iterdir()
        return any(_same_file(descriptor, file) for descriptor in descriptors for file in files)
    except OSError:  # gone, or another user's, who has no use for our token
        return False


def _same_file(descriptor: Path, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(descriptor.stat(), file)
    except OSError:  # closed since it was listed
        return False


# ---------------------------------------------------------------------------------------------------- straight to a store


class StoreAddress(NamedTuple):
    """The address of a store, with the settings that its servers share."""

    url: str
    app: str | None = None
    blobs: str = ""
    coordination: str = ""
    lead_ttl_s: float = LOCK_TTL_S


def is_store(url: str | None) -> bool:
    """Return whether this is the address of a store, not of a server."""
    return url is not None and url.startswith(STORE_SCHEMES)


def guest_places(address: StoreAddress, folder: Path) -> StorageLocations:
    """Return where a guest on this store keeps its data."""
    from tasuki.server.assembly import StorageLocations

    if not is_store(address.url):
        raise ConfigError(
            f"{shown_address(address.url)!r} is not a store that servers share; use redis://host:6379/0 or "
            "postgresql://user@host/database"
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
async def guest(address: StoreAddress, *, lease_ttl_s: float = LEASE_TTL_S) -> AsyncIterator[str]:
    """Take part in a store while the block lasts; yields the address of the guest's socket."""

    from tasuki.cli.process import server_config
    from tasuki.doors.guest import open_guest
    from tasuki.server.assembly import make_guest

    def make(folder: Path) -> Server:
        config = server_config(folder, lease_ttl_s=lease_ttl_s)
        return make_guest(guest_places(address, folder), config, candidate=False)[0]

    async with open_guest(make) as (url, server):
        watching = asyncio.ensure_future(_warn_without_leader(server))
        try:
            yield url
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


async def _warn_without_leader(server: Server) -> None:
    """Warn once: without a leader, jobs of dead workers and delayed jobs stay where they are."""
    led = True
    while led:
        await asyncio.sleep(LEADER_WAIT_S)
        led = any(info["leads"] for info in server.broker.describe_servers())
    logger.warning(
        "no server leads on this store: expired leases and delayed jobs wait until one does; "
        "start one with tasuki server --store URL, or run tasuki duties --once every minute"
    )
