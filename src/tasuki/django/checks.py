"""System checks of a project that uses tasuki: `manage.py check`, and before each command that needs it.

tasuki.E001   a key or value of TASUKI that cannot work
tasuki.E002   PostgreSQL without the driver psycopg 3
tasuki.W001   SQLite whose transactions begin as readers, so that an enqueue can fail at once with "database is locked"
tasuki.W002   SQLite where DEBUG is off
tasuki.W003   USE_TZ is off
tasuki.W004   a pooler before PostgreSQL, and no direct address for workers
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.db import connections

from tasuki.django.conf import project_settings
from tasuki.errors import ConfigError


@register
def check_settings(**_options: Any) -> list[CheckMessage]:
    """Check everything that needs no connection."""
    try:
        found = project_settings()
    except ConfigError as error:
        return [Error(error.message, id="tasuki.E001")]
    connection = connections[found.database]
    problems: list[CheckMessage] = _sqlite_problems(connection) if connection.vendor == "sqlite" else _postgresql_problems(found)
    if not settings.USE_TZ:
        hint = "Set USE_TZ = True: times of jobs are points in time, and naive ones are ambiguous when clocks change."
        problems.append(Warning("USE_TZ is off.", hint=hint, id="tasuki.W003"))
    return problems


def _sqlite_problems(connection: Any) -> list[CheckMessage]:
    if connection.is_in_memory_db():  # of a test
        return []
    problems: list[CheckMessage] = []
    if connection.settings_dict.get("OPTIONS", {}).get("transaction_mode", "").upper() not in ("IMMEDIATE", "EXCLUSIVE"):
        problems.append(
            Warning(
                f"Transactions on the SQLite database {connection.alias!r} begin as readers: one that reads and then enqueues "
                "fails at once with 'database is locked' if another process wrote meanwhile.",
                hint=f'Set DATABASES["{connection.alias}"]["OPTIONS"] = {{"transaction_mode": "IMMEDIATE"}}.',
                id="tasuki.W001",
            )
        )
    if not settings.DEBUG:
        problems.append(
            Warning(
                f"tasuki's tables are in SQLite ({connection.alias!r}), and DEBUG is off.",
                hint="SQLite serves one machine and one worker process, for development; use PostgreSQL in production.",
                id="tasuki.W002",
            )
        )
    return problems


def _postgresql_problems(found: Any) -> list[CheckMessage]:
    from django.db.backends.postgresql.psycopg_any import is_psycopg3

    if not is_psycopg3:
        return [Error("tasuki needs psycopg 3.", hint="Install it with: pip install 'psycopg[binary]'", id="tasuki.E002")]
    # What Django's documentation asks of those who use a pooler in transaction mode.
    pooled = connections[found.database].settings_dict.get("DISABLE_SERVER_SIDE_CURSORS")
    if pooled and not found.worker_database:
        return [
            Warning(
                f"The database {found.database!r} seems to be reached through a pooler, which loses the hints that wake workers.",
                hint='Add a second entry to DATABASES with the direct address, and name it as TASUKI["worker_database"].',
                id="tasuki.W004",
            )
        ]
    return []
