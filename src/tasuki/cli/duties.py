"""`tasuki duties --once`: what a leader does besides, done once, for control planes that are not there all the time.

It is a server without doors: it stands for election, and leaves when its duties have nothing left to do. So the rules are those
of every other leader, and two never do them at once.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tasuki.cli import options
from tasuki.cli.command import command
from tasuki.cli.output import Output, plain
from tasuki.cli.server import BlobsUrl, Coordination, LeadTtl, RetentionDays, StoreUrl
from tasuki.errors import InvalidInput, Unavailable

if TYPE_CHECKING:
    from tasuki.cli.store_client import StoreAddress
    from tasuki.config import DataFolder
    from tasuki.server.cluster import Cluster
    from tasuki.server.server import Server

LOOK_S = 0.02
COUNTED = ("reaped", "skipped", "promoted", "pruned", "blobs_deleted")

Once = Annotated[bool, typer.Option("--once", help="Do what is due, and leave.")]
App = Annotated[
    str | None,
    typer.Option(
        "--app", metavar="NAME", envvar="TASUKI_APP", help="With Redis: the prefix of its keys, as given to the servers."
    ),
]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Give up after so long, with exit code 5.")]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(
        app,
        "duties",
        examples=[
            "TASUKI_STORE=redis://127.0.0.1:6379/0 tasuki duties --once --app zpe      # every minute, from cron",
            "tasuki duties --once --store postgresql://tasuki@db/tasuki --blobs s3://bucket/tasuki --json",
        ],
    )(duties)


def duties(
    once: Once = False,
    store: StoreUrl = None,
    app: App = None,
    blobs: BlobsUrl = None,
    coordination: Coordination = None,
    retention_days: RetentionDays = 30.0,
    lead_ttl: LeadTtl = 10.0,
    timeout: Timeout = 300.0,
    data: options.Data = None,
    log_level: options.LogLevel = "warning",
    json: options.Json = False,
) -> None:
    """Do a leader's duties once, for servers that scale to zero.

    Ends leases that are over, skips what is too late, makes delayed jobs ready, deletes what is old. Does nothing while another
    leader is there. Blobs are deleted only where --blobs says how to reach them.
    """
    from tasuki.cli import log
    from tasuki.cli.store_client import StoreAddress
    from tasuki.config import data_folder

    if not once:
        raise InvalidInput("duties are done once, with --once; a server does them all the time: tasuki server --store URL")
    log.configure(log_level, json=json)
    retention_s = retention_days * 86400.0
    if store:
        told = asyncio.run(_shared(StoreAddress(store, app, blobs or "", coordination or "", lead_ttl), retention_s, timeout))
    else:
        told = asyncio.run(_alone(data_folder(data), blobs or "", retention_s, timeout))
    Output(json=json).show(told, lambda: _lines(told))


def _lines(told: dict[str, Any]) -> Iterable[str]:
    if told["led"]:
        yield f"epoch {told['epoch']}: " + ", ".join(f"{told[name]} {name.replace('_', ' ')}" for name in COUNTED)
    else:
        yield f"nothing done: {plain(told['leader'])} leads"


async def _shared(address: StoreAddress, retention_s: float, timeout_s: float) -> dict[str, Any]:
    from tasuki.cli.server_process import host_name, new_server_id
    from tasuki.cli.store_client import guest_places
    from tasuki.server.assembly import make_guest
    from tasuki.server.server import ServerConfig

    with tempfile.TemporaryDirectory(prefix="tasuki-duties-") as name:
        folder = Path(name)
        config = ServerConfig(server_id=new_server_id(), data=folder, retention_s=retention_s, host=host_name())
        server, company = make_guest(guest_places(address, folder), config, stands=True)
        return await _lead_once(server, company, timeout_s)


async def _alone(folder: DataFolder, blobs: str, retention_s: float, timeout_s: float) -> dict[str, Any]:
    """SQLite: whoever owns the folder leads it."""
    from tasuki.cli.connect import owner_of
    from tasuki.cli.server_process import host_name, new_server_id
    from tasuki.server.assembly import StorageLocations, make_server
    from tasuki.server.server import ServerConfig

    if not folder.database.exists():
        raise InvalidInput(f"there is no store in {folder.root}; give --store URL, or --data FOLDER")
    if owner := owner_of(folder):
        return {"led": False, "leader": f"the server of {folder.root} ({owner})"}
    config = ServerConfig(server_id=new_server_id(), data=folder.root, retention_s=retention_s, host=host_name())
    return await _lead_once(make_server(StorageLocations(folder, blobs=blobs), config), None, timeout_s)


async def _lead_once(server: Server, company: Cluster | None, timeout_s: float) -> dict[str, Any]:
    await server.start()
    try:
        async with asyncio.timeout(timeout_s):
            while not server.broker.upkeep.caught_up:
                if company is not None and company.busy is not None:
                    return {"led": False, "leader": company.busy.holder}
                await asyncio.sleep(LOOK_S)
            counts = server.broker.upkeep.counts
            return {"led": True, "epoch": server.broker.epoch, **{name: getattr(counts, name) for name in COUNTED}}
    except TimeoutError:
        why = server.broker.store_problem or "there is more to do than fits"
        raise Unavailable(f"the duties were not done within {timeout_s:g} s: {why}; the next run goes on with them") from None
    finally:
        await server.stop()
