"""`tasuki migrate`: bring the tables of a store up to date, without starting a server."""

from __future__ import annotations

from typing import Annotated

import typer

from tasuki.cli import options
from tasuki.cli.command import command
from tasuki.cli.output import Output


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(
        app,
        "migrate",
        examples=[
            "tasuki migrate --data /srv/tasuki      # before a new version starts; a server does it by itself, too",
            "tasuki migrate --store postgresql://tasuki@db/tasuki",
        ],
    )(migrate)


def migrate(
    data: options.Data = None,
    store: Annotated[
        str | None,
        typer.Option("--store", metavar="URL", envvar="TASUKI_STORE", help="postgresql://…, instead of a data folder."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Bring the tables of a store up to date.

    No server may be running on a data folder. On PostgreSQL servers of the version before may go on, unless this says otherwise.
    """
    name, applied = _migrate_store(store) if store else _migrate_folder(data)
    done = f"applied {', '.join(applied)}" if applied else "already up to date"
    Output(json=json).show({"database": name, "applied": applied}, lambda: [f"{name}: {done}"])


def _migrate_folder(data: options.Data) -> tuple[str, list[str]]:
    from tasuki.config import data_folder
    from tasuki.django import standalone
    from tasuki.server.assembly import prepare_folder
    from tasuki.stores.sql.sqlite import OwnerLock

    folder = data_folder(data)
    prepare_folder(folder)
    lock = OwnerLock(folder.database)
    try:
        standalone.configure(folder.database)
        return str(folder.database), standalone.migrate(standalone.register(folder.database))
    finally:
        lock.release()


def _migrate_store(url: str) -> tuple[str, list[str]]:
    from tasuki.server.assembly import check_store, is_redis

    check_store(url)
    return ("Redis has no tables", []) if is_redis(url) else _migrate_postgresql(url)


def _migrate_postgresql(url: str) -> tuple[str, list[str]]:
    from tasuki.django import standalone
    from tasuki.stores.sql.postgres import connection_parameters
    from tasuki.stores.sql.postgres_session import Translated, name_of

    given = connection_parameters(url)
    standalone.configure()
    alias = standalone.register_postgresql(given)
    with Translated(given, "nothing was changed", lambda error: False):
        return name_of(given), standalone.migrate(alias)
