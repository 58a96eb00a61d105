"""`tasuki migrate`: bring the tables of a data folder up to date, without starting a server."""

from __future__ import annotations

import typer

from tasuki.cli import options
from tasuki.cli.command import command
from tasuki.cli.output import Output


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(
        app,
        "migrate",
        examples=["tasuki migrate --data /srv/tasuki      # before a new version starts; a server does it by itself, too"],
    )(migrate)


def migrate(data: options.Data = None, json: options.Json = False) -> None:
    """Bring the database of a data folder up to date.

    No server may be running on it.
    """
    from tasuki.config import data_folder
    from tasuki.django import standalone
    from tasuki.server.node import prepare_folder
    from tasuki.stores.sql_sqlite import OwnerLock

    folder = data_folder(data)
    prepare_folder(folder)
    lock = OwnerLock(folder.database)
    try:
        standalone.configure(folder.database)
        alias = standalone.register(folder.database)
        applied = standalone.migrate(alias)
    finally:
        lock.release()
    done = f"applied {', '.join(applied)}" if applied else "already up to date"
    Output(json=json).show({"database": str(folder.database), "applied": applied}, lambda: [f"{folder.database}: {done}"])
