"""`tasuki backup`, `restore`, `compact`, `migrate`, `duties`: work on a store itself, without a server that listens.

`duties --once` does what a leader does besides, for control planes that are not there all the time. It is a server without
listeners that stands for election and leaves when nothing is left to do: the rules are those of every other leader, and two
never do the duties at once.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from tasuki.cli import process
from tasuki.cli.command import PATH, argument, command, coordination_option, data_option, duration, flag, option
from tasuki.cli.connect import StoreAddress, guest_places, owner_of
from tasuki.cli.output import ExitCode, Output, plain
from tasuki.cli.server import blobs_option, lead_ttl_option, retention_option, store_option
from tasuki.config import DataFolder, data_folder, fault_hook
from tasuki.core.units import shown_duration, shown_time
from tasuki.errors import InvalidInput, Unavailable
from tasuki.server import backup as backups
from tasuki.server.archive import Manifest
from tasuki.server.assembly import StorageLocations, check_store, is_redis, make_guest, make_server
from tasuki.server.cluster import Cluster
from tasuki.server.server import Server

DUTIES_POLL_S = 0.02
COUNTED = ("reaped", "skipped", "promoted", "pruned", "blobs_deleted")


# ---------------------------------------------------------------------------------------------------- backup and restore


@command(
    "backup",
    examples=[
        "tasuki backup --data /srv/tasuki /backup/tasuki-$(date +%F).tar",
        "tasuki backup --no-blobs store.tar      # the bytes of large files and results are saved in another way",
        "tasuki restore --check store.tar        # can it be restored?",
    ],
)
@argument("file", metavar="FILE", help="The backup, a tar file; replaced if it exists.", type=PATH)
@data_option
@option("--blobs/--no-blobs", default=True, help="With the bytes of large inputs and results.")
def backup(output: Output, file: Path, data: Path | None, blobs: bool) -> int:
    """The server may continue running.

    Tokens are in the backup as hashes only; the folder's own admin token file is not in it.
    """
    made = backups.back_up(data_folder(data), file.absolute(), with_blobs=blobs, progress=output.progress)
    size_bytes = file.stat().st_size
    facts = {
        "file": str(file),
        "size_bytes": size_bytes,
        "epoch": made.epoch,
        "database_sha256": made.database_sha256,
        "blob_bytes": made.blob_bytes,
        **_facts(made),
    }
    output.show(facts, lambda: [f"{file}: {sum(made.jobs.values()):,} jobs, {len(made.blobs):,} blobs, {size_bytes:,} bytes"])
    if made.missing:
        output.hint(
            f"{len(made.missing)} blobs that jobs refer to are gone or damaged, and are not in the backup (--json names them); "
            "if they are kept elsewhere (--blobs of the server), use --no-blobs"
        )
    return ExitCode.FAILED if made.missing else ExitCode.OK


@command(
    "restore",
    examples=[
        "tasuki restore --check tasuki.tar                      # verify it, change nothing",
        "tasuki restore tasuki.tar --data /srv/tasuki           # into a folder without a store",
        "tasuki restore tasuki.tar --data /srv/tasuki --force   # what is there is moved aside, never deleted",
    ],
)
@argument("file", metavar="FILE", help="What tasuki backup made.", type=PATH)
@data_option
@flag("--force", help="Move a store that is there aside, to DATA/replaced-TIME.")
@flag("--check", help="Only verify the backup.")
def restore(output: Output, file: Path, data: Path | None, force: bool, check: bool) -> None:
    """No server may be running on it. All is verified before anything is changed.

    What workers of the lost server still run can no longer be recorded: jobs that they had wait again, and cost no loss.
    """
    if check:
        manifest = backups.check_backup(file.absolute(), progress=output.progress)
        facts = {"file": str(file), "tasuki": manifest.tasuki, **_facts(manifest)}
        output.show(facts, lambda: [f"{file} is whole: {_summary(manifest)}"])
        if manifest.missing:
            output.hint(f"{len(manifest.missing)} blobs were gone when it was made")
        return
    done = backups.restore(file.absolute(), data_folder(data), force=force, progress=output.progress, fault=fault_hook())
    facts = {
        "data": done.data,
        "epoch": done.epoch,
        "given_back": done.given_back,
        "canceled": done.canceled,
        "replaced": done.replaced,
        **_facts(done.manifest),
    }
    output.show(
        facts,
        lambda: [
            f"{done.data}: {_summary(done.manifest)}; epoch {done.epoch}, {done.given_back} jobs that were running wait again",
            *([f"the store that was there is in {done.replaced}"] if done.replaced else []),
        ],
    )
    if not done.manifest.with_blobs:
        output.hint(f"this backup has no blobs: bring them back to {done.data}/blobs before a server starts")
    output.hint("tokens revoked since the backup are valid again: look at tasuki token list")


def _facts(manifest: Manifest) -> dict[str, object]:
    return {
        "made_at": manifest.made_at,
        "schema_version": manifest.schema_version,
        "jobs": manifest.jobs,
        "with_blobs": manifest.with_blobs,
        "blobs": len(manifest.blobs),
        "missing": [sha256 for sha256, _ in manifest.missing],
    }


def _summary(manifest: Manifest) -> str:
    return f"{sum(manifest.jobs.values()):,} jobs and {len(manifest.blobs):,} blobs of {shown_time(manifest.made_at)}"


# ---------------------------------------------------------------------------------------------------- compact and migrate


@command(
    "compact",
    examples=[
        "tasuki compact --data /srv/tasuki",
        "systemctl stop tasuki-server && tasuki compact --data /var/lib/tasuki --json; systemctl start tasuki-server",
    ],
)
@data_option
def compact(output: Output, data: Path | None) -> None:
    """No server may be running on it. Deleted jobs leave room in the file, which new ones use; this gives it back to the disk.

    While it works, up to twice the size of what is left is needed beside it. tasuki doctor shows how much is unused.
    """
    from tasuki.stores.sql import sqlite_backup
    from tasuki.stores.sql.sqlite import OwnerLock

    folder = _folder_with_store(data, "name its folder with --data")
    lock = OwnerLock(folder.database)
    try:
        before = sqlite_backup.space_of(folder.database).size_bytes
        sqlite_backup.compact(folder.database)
        after = sqlite_backup.space_of(folder.database).size_bytes
    finally:
        lock.release()
    facts = {"database": str(folder.database), "before_bytes": before, "after_bytes": after}
    output.show(facts, lambda: [f"{folder.database}: {before:,} bytes before, {after:,} now"])


def _folder_with_store(data: Path | None, way_out: str) -> DataFolder:
    folder = data_folder(data)
    if not folder.database.exists():
        raise InvalidInput(f"there is no store in {folder.root}; {way_out}")
    return folder


@command(
    "migrate",
    examples=[
        "tasuki migrate --data /srv/tasuki      # before a new version starts; a server does it by itself, too",
        "tasuki migrate --store postgresql://tasuki@db/tasuki",
    ],
)
@data_option
@option("--store", metavar="URL", envvar="TASUKI_STORE", help="postgresql://…, instead of a data folder.")
@flag("--forget-coordination", help="Servers on PostgreSQL may use another --coordination than before; stop all first.")
def migrate(output: Output, data: Path | None, store: str | None, forget_coordination: bool) -> None:
    """No server may be running on a data folder.

    On PostgreSQL servers of the version before may continue, unless this says otherwise.
    """
    if forget_coordination and (not store or is_redis(store)):
        raise InvalidInput("--forget-coordination is for servers on PostgreSQL: give --store postgresql://…")
    name, applied = migrate_store(store, forget_coordination) if store else _migrate_folder(data_folder(data))
    done = f"applied {', '.join(applied)}" if applied else "already up to date"
    output.show({"database": name, "applied": applied}, lambda: [f"{name}: {done}"])


def _migrate_folder(folder: DataFolder) -> tuple[str, list[str]]:
    from tasuki.django import standalone
    from tasuki.stores.sql.sqlite import OwnerLock

    backups.prepare_folder(folder)
    lock = OwnerLock(folder.database)
    try:
        standalone.configure(folder.database)
        return str(folder.database), standalone.migrate(standalone.register(folder.database))
    finally:
        lock.release()


def migrate_store(url: str, forget_coordination: bool) -> tuple[str, list[str]]:
    """Return the name of the database, and the migrations that were applied."""
    check_store(url)
    if is_redis(url):
        return "Redis has no tables", []
    from tasuki.django import standalone
    from tasuki.stores.sql.postgres import connection_parameters
    from tasuki.stores.sql.postgres_session import Translated, name_of

    given = connection_parameters(url)
    standalone.configure()
    alias = standalone.register_postgresql(given)
    with Translated(given, "nothing was changed", lambda error: False):
        applied = standalone.migrate(alias)
        if forget_coordination:
            standalone.forget_coordination(alias)
        return name_of(given), applied


# ---------------------------------------------------------------------------------------------------- duties


@command(
    "duties",
    examples=[
        "TASUKI_STORE=redis://127.0.0.1:6379/0 tasuki duties --once --app zpe      # every minute, from cron",
        "tasuki duties --once --store postgresql://tasuki@db/tasuki --blobs s3://bucket/tasuki --json",
    ],
)
@flag("--once", help="Do what is due, and leave.")
@store_option
@option("--app", metavar="NAME", envvar="TASUKI_APP", help="With Redis: the prefix of its keys, as given to the servers.")
@blobs_option
@coordination_option
@retention_option
@lead_ttl_option
@duration("--timeout", default=300.0, help="Give up after so long, with exit code 5.")
@data_option
@option("--log-level", metavar="LEVEL", default="warning", help="debug, info, warning or error, on stderr.")
def duties(
    output: Output,
    once: bool,
    store: str | None,
    app: str | None,
    blobs: str | None,
    coordination: str | None,
    retention: float,
    lead_ttl: float,
    timeout: float,
    data: Path | None,
    log_level: str,
) -> None:
    """Ends leases that are over, skips what is too late, makes delayed jobs ready, deletes what is old.

    Does nothing while another leader is there. Blobs are deleted only where --blobs says how to reach them.
    """

    if not once:
        raise InvalidInput("duties are done once, with --once; a server does them all the time: tasuki server --store URL")
    process.configure_log(log_level, json=output.json)
    if store:
        address = StoreAddress(store, app, blobs or "", coordination or "", lead_ttl)
        report = asyncio.run(_lead_shared(address, retention, timeout))
    else:
        folder = _folder_with_store(data, "give --store URL, or --data FOLDER")
        report = asyncio.run(_lead_folder(folder, blobs or "", retention, timeout))
    if report["led"]:
        line = f"epoch {report['epoch']}: " + ", ".join(f"{report[name]} {name.replace('_', ' ')}" for name in COUNTED)
    else:
        line = f"nothing done: {plain(report['leader'])} leads"
    output.show(report, lambda: [line])


async def _lead_shared(address: StoreAddress, retention_s: float, timeout_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tasuki-duties-") as name:
        config = process.server_config(Path(name), retention_s=retention_s)
        server, cluster = make_guest(guest_places(address, config.data), config, candidate=True)
        return await _lead_once(server, cluster, timeout_s)


async def _lead_folder(folder: DataFolder, blobs: str, retention_s: float, timeout_s: float) -> dict[str, Any]:
    """Lead a SQLite store, if no server owns its folder."""
    if owner := owner_of(folder):
        return {"led": False, "leader": f"the server of {folder.root} ({owner})"}
    config = process.server_config(folder.root, retention_s=retention_s)
    return await _lead_once(make_server(StorageLocations(folder, blobs=blobs), config), None, timeout_s)


async def _lead_once(server: Server, cluster: Cluster | None, timeout_s: float) -> dict[str, Any]:
    await server.start()
    try:
        async with asyncio.timeout(timeout_s):
            while not server.broker.upkeep.caught_up:
                if cluster is not None and cluster.busy is not None:
                    return {"led": False, "leader": cluster.busy.holder}
                await asyncio.sleep(DUTIES_POLL_S)
            counts = server.broker.upkeep.counts
            return {"led": True, "epoch": server.broker.epoch, **{name: getattr(counts, name) for name in COUNTED}}
    except TimeoutError:
        why = server.broker.store_problem or "there is more to do than fits"
        raise Unavailable(
            f"the duties were not done within {shown_duration(timeout_s)}: {why}; the next run continues with them"
        ) from None
    finally:
        await server.stop()
