"""The node: `manage.py tasuki_worker`. A guest server on the project's database and a worker, in one process.

    worker ──unix socket──► guest ──► database of the project
       └─ processes of tasks: forked with Django set up, reused

On PostgreSQL any number of nodes may run; their guests elect the one that does the upkeep. On SQLite the guest is the only one
that leases, kept by a lock file beside the database; other processes of the project only enqueue.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from django.db import connections

from tasuki.blobs.open_blobs import open_blobs
from tasuki.config import DataFolder, host_name
from tasuki.core.broker.events import Hinted
from tasuki.core.cluster_messages import Hint
from tasuki.django import standalone
from tasuki.django.conf import ProjectSettings, project_settings
from tasuki.django.enqueueing import COMMAND, TASK
from tasuki.doors.guest import open_guest
from tasuki.errors import ConfigError
from tasuki.server.assembly import BLOB_MAX_BYTES, NoBlobs, StorageLocations, make_guest
from tasuki.server.server import Server, ServerConfig
from tasuki.stores.sql.sqlite import FileWatch, OwnerLock, SqliteReadOnly
from tasuki.stores.sql.store import SqlReader, SqlStore
from tasuki.worker import Worker

SQLITE_LOOK_S = 0.05  # between two looks whether another process has changed the file: 10 µs each


class NodeWorker(Worker):
    """The worker of a node, and around it the guest that it takes its jobs from."""

    def __init__(self, queues: Sequence[str] = (), **options: Any) -> None:
        kinds = (TASK, COMMAND)
        super().__init__(None, subjects=[f"{queue}.{kind}.>" for queue in queues or ("*",) for kind in kinds], **options)
        self._project = project_settings()
        self._alias = self._project.worker_database or self._project.database
        try:
            from tasuki.django.task_backend import run_task

            self.handler(f"*.{TASK}.>")(run_task)
        except ConfigError:  # Django 5.2 without the package of tasks
            pass

    def run(self) -> None:
        """Work until a signal. No connection may be open: the processes of tasks are forked from here."""
        standalone.check_tables(self._alias)
        connections.close_all()
        super().run()

    async def serve(self, *, signals: bool = False) -> None:
        is_sqlite = connections.databases[self._alias]["ENGINE"].endswith("sqlite3")
        async with open_guest(self._make_sqlite_guest if is_sqlite else self._make_guest) as (url, server):
            self.url = url
            watching = asyncio.ensure_future(_watch_file(server, _file_of(self._alias))) if is_sqlite else None
            try:
                await super().serve(signals=signals)
            finally:
                if watching is not None:
                    watching.cancel()
                    with suppress(asyncio.CancelledError):
                        await watching

    def _make_guest(self, folder: Path) -> Server:
        places = StorageLocations(DataFolder(folder), libpq_url(self._alias), self._project.blobs, migrates=False)
        return make_guest(places, _server_config(folder), candidate=True)[0]

    def _make_sqlite_guest(self, folder: Path) -> Server:
        file = _file_of(self._alias)
        alias = writing_alias(self._alias)
        config = _server_config(folder, collects_blobs=bool(self._project.blobs))

        def open_store() -> SqlStore:
            OwnerLock(file)  # held until the process ends
            return SqlStore.in_django(alias)

        blobs = _open_blobs(self._project, folder, config)
        return Server(config, open_store, lambda: SqlReader(SqliteReadOnly(file)), blobs)


def _open_blobs(project: ProjectSettings, folder: Path, config: ServerConfig) -> Any:
    if project.blobs:
        return open_blobs(project.blobs, max_blob_bytes=BLOB_MAX_BYTES, floor_free_bytes=config.disk_floor_bytes)
    return NoBlobs(DataFolder(folder).blobs, max_blob_bytes=0, floor_free_bytes=config.disk_floor_bytes)


def _server_config(folder: Path, **settings: Any) -> ServerConfig:
    server_id = f"{host_name()}-{os.getpid()}-{secrets.token_hex(3)}"
    return ServerConfig(server_id=server_id, host=host_name(), data=folder, **settings)


def libpq_url(alias: str) -> str:
    """Return the address of a PostgreSQL of the project, with every parameter that libpq itself knows."""
    from psycopg.pq import Conninfo

    known = {option.keyword.decode() for option in Conninfo.get_defaults()}
    given = connections[alias].get_connection_params()
    return "postgresql:///?" + urlencode({name: str(given[name]) for name in given if name in known}, quote_via=quote)


def writing_alias(alias: str) -> str:
    """Return an alias of the same SQLite file whose transactions begin as writers: those of the guest read before they write."""
    given = connections.databases[alias]
    options = {"timeout": 20, **given.get("OPTIONS", {}), "transaction_mode": "IMMEDIATE"}
    return standalone.register_copy(alias, {**given, "OPTIONS": options, "CONN_MAX_AGE": None})


def _file_of(alias: str) -> Path:
    return Path(str(connections.databases[alias]["NAME"])).resolve()


async def _watch_file(server: Server, file: Path) -> None:
    """Have the guest look for new jobs whenever a process has written to the file."""
    with closing(FileWatch(file)) as watch:
        while True:
            await asyncio.sleep(SQLITE_LOOK_S)
            if watch.has_changed():
                server.tell(Hinted(Hint(everything=True)))
