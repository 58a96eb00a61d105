"""Django for a process that has no Django project: just enough settings for the tables, and nothing else switched on.

Inside a user's project nothing is configured here; the project's own settings stand, and must list `tasuki.django`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasuki.errors import ConfigError

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.migrations.migration import Migration

BUSY_TIMEOUT_S = 5.0
CACHED_STATEMENTS = 256  # all statements in all their batch sizes; Python's default of 128 would compile some again and again

MIGRATING_TABLE = "tasuki_migrating"

_lock = threading.Lock()
_numbers = count(1)


def configure(path: Path | None = None) -> None:
    """Set Django up unless a project did; `path` is then the default database. A second call changes nothing."""
    import django
    from django.apps import apps
    from django.conf import settings

    with _lock:
        if not settings.configured:
            default = sqlite_settings(path) if path is not None else {}
            settings.configure(
                INSTALLED_APPS=["tasuki.django"],
                DATABASES={"default": default} if default else {},
                USE_TZ=True,
                DEFAULT_AUTO_FIELD="tasuki.django.fields.RowIdField",
            )
            # What django.setup() does besides is for projects with URLs and mail, and takes longer than all the rest.
            apps.populate(settings.INSTALLED_APPS)
        if not apps.ready:
            django.setup()
        if not apps.is_installed("tasuki.django"):
            raise ConfigError('Django is configured without tasuki: add "tasuki.django" to INSTALLED_APPS')


def sqlite_settings(path: Path) -> dict[str, Any]:
    """One entry of Django's DATABASES for a file that we own."""
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(path),
        "CONN_MAX_AGE": None,
        "OPTIONS": {
            "timeout": BUSY_TIMEOUT_S,
            "cached_statements": CACHED_STATEMENTS,
            "detect_types": 0,  # we store no column that Python would have to convert; looking for one costs each execute
        },
    }


def register(path: Path) -> str:
    """Make the file known to Django as a database of its own; its alias. Several files may be open in one process."""
    return _add(f"tasuki:{path}", sqlite_settings(path))


def register_postgresql(parameters: Mapping[str, Any]) -> str:
    """Make a PostgreSQL, given by libpq's parameters, known to Django; its alias, which is of this one caller."""
    return _add(f"tasuki:postgresql:{next(_numbers)}", postgresql_settings(parameters))


def postgresql_settings(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of Django's DATABASES. All parameters go to libpq as they are, so that passfile and service work."""
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parameters.get("dbname", ""),
        "CONN_MAX_AGE": None,
        "OPTIONS": {**parameters, "prepare_threshold": 5},
    }


def _add(alias: str, settings: dict[str, Any]) -> str:
    from django.db import connections

    connections.databases[alias] = connections.configure_settings({"default": {}, alias: settings})[alias]
    return alias


def forget(alias: str) -> None:
    """Take back `register`; the connection was closed by its user."""
    from django.db import connections

    if any(wrapper.alias == alias for wrapper in connections.all(initialized_only=True)):  # this thread's
        del connections[alias]
    connections.databases.pop(alias, None)


def migrate(alias: str = "default") -> list[str]:
    """Bring the tables of one database up to date; the names of the migrations that were applied.

    Of several servers that start at once on one PostgreSQL, one does it and the others wait. ConfigError if the tables are too
    new for this code, or if a server is alive that the new ones would be too new for.
    """
    from django.db import connections

    from tasuki.django import schema

    connection = connections[alias]
    schema.check_code(connection)
    if not _plan(connection) and schema.has_version(connection):
        return []
    with _alone(connection):
        schema.check_code(connection)
        if connection.vendor == "postgresql" and _plan(connection):
            schema.check_servers(connection)
        applied = _migrate(connection)
        schema.write_version(connection)
        return applied


def _plan(connection: BaseDatabaseWrapper) -> list[tuple[Migration, bool]]:
    from django.db.migrations.executor import MigrationExecutor

    executor = MigrationExecutor(connection)
    return executor.migration_plan(executor.loader.graph.leaf_nodes("tasuki"))


def _migrate(connection: BaseDatabaseWrapper) -> list[str]:
    """Only our own app's migrations, straight from the executor: 30 ms; the `migrate` command with its signals takes 300."""
    from django.db.migrations.executor import MigrationExecutor

    executor = MigrationExecutor(connection)
    targets = executor.loader.graph.leaf_nodes("tasuki")
    plan = executor.migration_plan(targets)
    if plan:
        executor.migrate(targets, plan)
    return [migration.name for migration, _backwards in plan]


@contextmanager
def _alone(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """While the block runs, no other server migrates this database: it would wait here. SQLite has one owner anyway.

    A lock on a table of its own, held by a second connection: Django commits between migrations, which would let go of a lock of
    the first. No advisory lock: those do not survive a connection pooler.
    """
    if connection.vendor != "postgresql":
        yield
        return
    import psycopg

    parameters = connection.get_connection_params()
    own: dict[str, Any] = {name: value for name, value in parameters.items() if isinstance(value, str | int)}
    with closing(psycopg.connect(**{**own, "prepare_threshold": None})) as second:
        with suppress(psycopg.errors.UniqueViolation, psycopg.errors.DuplicateTable):  # another made it in this moment
            second.execute(f"CREATE TABLE IF NOT EXISTS {MIGRATING_TABLE} ()")
        second.commit()
        second.execute(f"LOCK TABLE {MIGRATING_TABLE} IN EXCLUSIVE MODE")
        yield
