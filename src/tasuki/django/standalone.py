"""Django for a process that has no Django project: just enough settings for the tables; and migrations with their version check.

Inside a user's project nothing is configured here; the project's own settings hold, and must list `tasuki.django`.

A migration adds 1 to SCHEMA_VERSION. OLDEST_CODE is the lowest version of code that can work with the tables after it: it stays
if a migration only adds what older code does not see, so that the new server migrates while older ones are still up; a migration
that would break older code raises it to SCHEMA_VERSION, and is refused while such a server is alive.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasuki.errors import ConfigError

if TYPE_CHECKING:
    import psycopg
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.migrations.executor import MigrationExecutor
    from django.db.migrations.migration import Migration

BUSY_TIMEOUT_S = 5.0
CACHED_STATEMENTS = 256  # all statements in all their batch sizes; Python's default of 128 would compile some again and again

MIGRATING_TABLE = "tasuki_migrating"
SCHEMA_VERSION = 18
OLDEST_CODE = 13  # before it, collection did not know the references of caches
MIGRATION_POLL_S = 0.05
COORDINATION_SCOPE = "coordination"
"""Row of tasuki_scopeepoch whose holder is the coordination of the servers."""
MEMBER_ALIVE_S = 30.0  # a server that beat within this time is taken to be alive

_SCREENS: dict[str, Any] = {
    "ROOT_URLCONF": "tasuki.django.ops.server_urls",
    "MIDDLEWARE": ["tasuki.django.ops.server_backend.with_session"],
    "ALLOWED_HOSTS": ["*"],  # the HTTP door has looked at the Host
    "SECURE_PROXY_SSL_HEADER": ("HTTP_X_FORWARDED_PROTO", "https"),  # cookies are for HTTPS alone; whoever lies loses their own
    "CSRF_COOKIE_NAME": "tasuki_ops_csrf",
    "CSRF_COOKIE_PATH": "/ops/",
    "CSRF_COOKIE_SAMESITE": "Strict",
    "SECRET_KEY": secrets.token_urlsafe(32),  # signs what a page says after a change; sessions end with the process too
}
"""Settings for the operations screens of a server; nothing of it is imported before the first request."""

_lock = threading.Lock()
_numbers = count(1)


def configure(path: Path | None = None) -> None:
    """Set Django up unless a project did; `path` is then the default database. A second call changes nothing."""
    import django
    from django.apps import apps
    from django.conf import settings

    with _lock:
        if not settings.configured:
            settings.configure(
                INSTALLED_APPS=["tasuki.django"],
                DATABASES={"default": sqlite_settings(path)} if path is not None else {},
                USE_TZ=True,
                TIME_ZONE="UTC",
                DEFAULT_AUTO_FIELD="tasuki.django.fields.RowIdField",
                **_SCREENS,
            )
            # The rest of django.setup() is for projects with URLs and mail, and takes longer than everything else.
            apps.populate(settings.INSTALLED_APPS)
        if not apps.ready:
            django.setup()
        if not apps.is_installed("tasuki.django"):
            raise ConfigError('Django is configured without tasuki: add "tasuki.django" to INSTALLED_APPS')


def sqlite_settings(path: Path) -> dict[str, Any]:
    """Return the entry of Django's DATABASES for a file that the store owns."""
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(path),
        "CONN_MAX_AGE": None,
        "OPTIONS": {
            "timeout": BUSY_TIMEOUT_S,
            "cached_statements": CACHED_STATEMENTS,
            "detect_types": 0,  # no column needs a conversion by Python; looking for one costs each execute
        },
    }


def register(path: Path) -> str:
    """Make the file known to Django as a database of its own, and return its alias. Several files may be open in one process."""
    return _add(f"tasuki:{path}", sqlite_settings(path))


def register_postgresql(parameters: Mapping[str, Any]) -> str:
    """Make a PostgreSQL known to Django, and return an alias for this one caller. All parameters go to libpq as they are, so that
    passfile and service work."""
    settings = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parameters.get("dbname", ""),
        "CONN_MAX_AGE": None,
        "OPTIONS": {**parameters, "prepare_threshold": 5},
    }
    return _add(f"tasuki:postgresql:{next(_numbers)}", settings)


def register_copy(alias: str, settings: dict[str, Any]) -> str:
    """Make a database of the project known under a second alias, with other settings; return that alias."""
    return _add(f"tasuki:{alias}", settings)


def _add(alias: str, settings: dict[str, Any]) -> str:
    from django.db import connections

    connections.databases[alias] = connections.configure_settings({"default": {}, alias: settings})[alias]
    return alias


def forget(alias: str) -> None:
    """Undo `register`; the connection was closed by its user."""
    from django.db import connections

    if any(wrapper.alias == alias for wrapper in connections.all(initialized_only=True)):  # this thread's
        del connections[alias]
    connections.databases.pop(alias, None)


def migrate(alias: str = "default") -> list[str]:
    """Bring the tables of one database up to date, and return the names of the migrations that were applied.

    Of several servers that start at once on one PostgreSQL, one migrates and the others wait. ConfigError if the tables are too
    new for this code, or if the new tables would be too new for a server that is alive.
    """
    from django.db import connections

    connection = connections[alias]
    _check_code(connection)
    current = "SELECT 1 FROM tasuki_schema WHERE version >= %s"
    if not _plan(connection)[2] and _select(connection, "tasuki_schema", current, (SCHEMA_VERSION,)):
        return []
    with _alone(connection):
        _check_code(connection)
        executor, targets, plan = _plan(connection)
        if plan and connection.vendor == "postgresql":
            _check_servers(connection)
        if plan:
            # Straight from the executor: 30 ms; the `migrate` command with its signals takes 300.
            executor.migrate(targets, plan)
        _write_version(connection)
        return [migration.name for migration, _backwards in plan]


def check_tables(alias: str) -> None:
    """ConfigError unless the tables are those of this code: in a project its own `migrate` makes them."""
    from django.db import connections

    connection = connections[alias]
    _check_code(connection)
    if _plan(connection)[2]:
        raise ConfigError("tasuki's tables are missing, or older than this code; run: python manage.py migrate")


def write_version(alias: str) -> None:
    """Record the version of the tables after a project's own `migrate`, unless that stopped at an older one."""
    from django.db import connections

    connection = connections[alias]
    if not _plan(connection)[2]:
        _write_version(connection)


def _plan(connection: BaseDatabaseWrapper) -> tuple[MigrationExecutor, list[tuple[str, str]], list[tuple[Migration, bool]]]:
    """Return Django's executor, the last migrations of the app, and the plan to get there."""
    from django.db.migrations.executor import MigrationExecutor

    executor = MigrationExecutor(connection)
    targets = executor.loader.graph.leaf_nodes("tasuki")
    return executor, targets, executor.migration_plan(targets)


@contextmanager
def _alone(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Keep other servers from migrating this database while the block runs: they wait here. SQLite has one owner anyway.

    The lock is on a table of its own, held by a second connection: Django commits between migrations, which would release a lock
    of the first. Not an advisory lock: those do not survive a connection pooler.
    """
    if connection.vendor != "postgresql":
        yield
        return
    import psycopg

    parameters = connection.get_connection_params()
    own: dict[str, Any] = {name: value for name, value in parameters.items() if isinstance(value, str | int)}
    with closing(psycopg.connect(**{**own, "prepare_threshold": None})) as second:
        with suppress(psycopg.errors.UniqueViolation, psycopg.errors.DuplicateTable):  # another server made it at this moment
            second.execute(f"CREATE TABLE IF NOT EXISTS {MIGRATING_TABLE} ()")
        second.commit()
        # Asked for again and again: the snapshot of a statement that waits would keep indexes from being built concurrently.
        while not _has_locked(second):
            time.sleep(MIGRATION_POLL_S)
        yield


def _has_locked(second: psycopg.Connection) -> bool:
    from psycopg.errors import LockNotAvailable

    try:
        second.execute(f"LOCK TABLE {MIGRATING_TABLE} IN EXCLUSIVE MODE NOWAIT")
    except LockNotAvailable:
        second.rollback()
        return False
    return True


def forget_coordination(alias: str) -> None:
    """Let the next server record its coordination, whatever was recorded before (`SqlStore.record_coordination`)."""
    from django.db import connections

    with connections[alias].cursor() as cursor:
        cursor.execute("DELETE FROM tasuki_scopeepoch WHERE scope = %s", [COORDINATION_SCOPE])


# ---------------------------------------------------------------------------------------------------- versions of the schema


def _check_code(connection: BaseDatabaseWrapper) -> None:
    """ConfigError if these tables are too new for this code."""
    found = _select(connection, "tasuki_schema", "SELECT version, oldest_code FROM tasuki_schema WHERE id = 1")
    for version, oldest_code in found:
        if oldest_code > SCHEMA_VERSION:
            raise ConfigError(
                f"these tables were made for a newer tasuki (version {version}, this one is {SCHEMA_VERSION}); upgrade this one"
            )


def _check_servers(connection: BaseDatabaseWrapper) -> None:
    """ConfigError if a live server could not work with the tables after the migration."""
    statement = (
        "SELECT member_id, schema_version FROM tasuki_member WHERE kind = 'server' AND schema_version < %s"
        " AND beat_at > extract(epoch FROM clock_timestamp()) - %s ORDER BY member_id"
    )
    found = _select(connection, "tasuki_member", statement, (OLDEST_CODE, MEMBER_ALIVE_S))
    if found:
        servers = ", ".join(f"{member_id} (version {version})" for member_id, version in found)
        raise ConfigError(
            f"these servers run and could not work with the new tables (version {SCHEMA_VERSION}): {servers}; stop them first"
        )


def _write_version(connection: BaseDatabaseWrapper) -> None:
    """Record that the tables are up to date with this code."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO tasuki_schema (id, version, oldest_code) VALUES (1, %s, %s)"
            " ON CONFLICT (id) DO UPDATE SET version = excluded.version, oldest_code = excluded.oldest_code"
            " WHERE tasuki_schema.version < excluded.version",
            (SCHEMA_VERSION, OLDEST_CODE),
        )


def _select(
    connection: BaseDatabaseWrapper, table: str, statement: str, parameters: tuple[str | float, ...] = ()
) -> list[tuple[Any, ...]]:
    """Return rows of a table that may not exist yet."""
    if table not in connection.introspection.table_names():
        return []
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        found: list[tuple[Any, ...]] = cursor.fetchall()
        return found
