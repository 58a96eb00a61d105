"""Django for a process that has no Django project: just enough settings for the tables, and nothing else switched on.

Inside a user's project nothing is configured here; the project's own settings stand, and must list `tasuki.django`.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tasuki.errors import ConfigError

BUSY_TIMEOUT_S = 5.0
CACHED_STATEMENTS = 256  # all statements in all their batch sizes; Python's default of 128 would compile some again and again

_lock = threading.Lock()


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
    from django.db import connections

    alias = f"tasuki:{path}"
    connections.databases[alias] = connections.configure_settings({"default": {}, alias: sqlite_settings(path)})[alias]
    return alias


def forget(alias: str) -> None:
    """Take back `register`; the connection was closed by its user."""
    from django.db import connections

    if any(wrapper.alias == alias for wrapper in connections.all(initialized_only=True)):  # this thread's
        del connections[alias]
    connections.databases.pop(alias, None)


def migrate(alias: str = "default") -> list[str]:
    """Bring the tables of one database up to date; the names of the migrations that were applied.

    Only our own app's migrations, straight from the executor: 30 ms, where the `migrate` command with its signals takes 300.
    """
    from django.db import connections
    from django.db.migrations.executor import MigrationExecutor

    executor = MigrationExecutor(connections[alias])
    targets = executor.loader.graph.leaf_nodes("tasuki")
    plan = executor.migration_plan(targets)
    if plan:
        executor.migrate(targets, plan)
    return [migration.name for migration, _backwards in plan]
