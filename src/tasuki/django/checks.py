"""System checks of a project that uses tasuki: `manage.py check`, and before each command that needs it.

tasuki.E001   a key or value of TASUKI that cannot work
tasuki.E002   PostgreSQL without the driver psycopg 3
tasuki.W001   SQLite whose transactions begin as readers, so that an enqueue can fail at once with "database is locked"
tasuki.W002   SQLite where DEBUG is off
tasuki.W003   USE_TZ is off
tasuki.W004   a pooler before PostgreSQL, and no direct address for workers
tasuki.W005   a folder for large results that every process would take for another one
tasuki.W006   names of commands in TASUKI that no app has
tasuki.W007   threads that the project starts when it is imported
tasuki.W010   TASUKI["grpc"] without the package grpcio
tasuki.W011   TASUKI["grpc"] with TLS files that are missing or cannot be read
tasuki.W012   tables in another database than the default one, and no router that says so

With `manage.py check --database default`, and in `manage.py tasuki_doctor`:

tasuki.W008   tables that are missing, or older than the code
tasuki.W009   a definition that cannot be run
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.management import get_commands
from django.db import connections, router

from tasuki.core.scheduler.firing import problem_of
from tasuki.django import standalone
from tasuki.django.conf import GrpcSettings, ProjectSettings, project_settings
from tasuki.django.models import JobDefinition
from tasuki.errors import ConfigError, InvalidInput


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
    return [*problems, *_project_problems(found)]


def _project_problems(found: ProjectSettings) -> Iterator[CheckMessage]:
    if found.blobs and "://" not in found.blobs and not Path(found.blobs).is_absolute():
        yield Warning(
            f'TASUKI["blobs"] is {found.blobs!r}, which depends on the folder in which a process was started.',
            hint="Give the whole path of a folder that workers and web processes share, or s3://bucket/prefix.",
            id="tasuki.W005",
        )
    if (seen := router.db_for_read(JobDefinition)) != found.database:
        yield Warning(
            f'TASUKI["database"] is {found.database!r}, but the models of tasuki are read from {seen!r}: JobRun.objects and '
            "JobDefinition.objects see other tables than the workers.",
            hint='Set DATABASE_ROUTERS = ["tasuki.django.TasukiRouter"].',
            id="tasuki.W012",
        )
    if unknown := sorted(set(found.commands) - set(get_commands())):
        yield Warning(
            f'TASUKI["commands"] has {", ".join(unknown)}: no installed app has such a management command.',
            hint="manage.py help lists those that there are.",
            id="tasuki.W006",
        )
    yield from _grpc_problems(found.grpc)
    own = threading.main_thread()
    # In another thread, as below runserver's reloader, threads say nothing about the import.
    if threading.current_thread() is own and (others := [one.name for one in threading.enumerate() if one is not own]):
        yield Warning(
            f"The project has started threads ({', '.join(others)}), which no fork has: each command that runs as a job starts "
            "an interpreter of its own, which takes as long as manage.py does.",
            hint="Start them on first use, not in settings, apps.ready() or at import.",
            id="tasuki.W007",
        )


def _grpc_problems(grpc: GrpcSettings) -> Iterator[CheckMessage]:
    if grpc == GrpcSettings():
        return
    if find_spec("grpc") is None:
        yield Warning(
            'TASUKI["grpc"] is set, and grpcio is not installed: tasuki_worker --grpc cannot start.',
            hint="Install it with: pip install 'tasuki[django]'",
            id="tasuki.W010",
        )
    if grpc.authentication != "mtls" and grpc.tls_cert == GrpcSettings().tls_cert and not Path(grpc.tls_cert).exists():
        return  # no certificates, and none are asked for
    problems = []
    for name in ("tls_cert", "tls_key", "tls_ca"):
        try:
            Path(getattr(grpc, name)).read_bytes()
        except OSError as error:
            problems.append(f"{name} {getattr(grpc, name)}: {error.strerror}")
    if problems:
        yield Warning(
            f'TASUKI["grpc"] names TLS files that cannot be read here: {"; ".join(problems)}.',
            hint="tasuki_worker --grpc needs them, readable by its user; a process that starts no such worker does not.",
            id="tasuki.W011",
        )


@register(Tags.database)
def check_database(databases: Sequence[str] | None = None, **_options: Any) -> list[CheckMessage]:
    """Check what the database has: tables of this version, definitions that can be run."""
    try:
        alias = project_settings().database
    except ConfigError:
        return []
    if alias not in (databases or ()) or sys.argv[1:2] == ["migrate"]:  # which makes the tables, after these checks
        return []
    try:
        standalone.check_tables(alias)
    except ConfigError as error:
        return [Warning(error.message, id="tasuki.W008")]
    rows = JobDefinition.objects.using(alias).filter(enabled=True).order_by("name")
    return [Warning(f"definition {row.name!r}: {text}", id="tasuki.W009") for row in rows if (text := _reason_against(row))]


def _reason_against(row: JobDefinition) -> str:
    from tasuki.django.commands import check_command  # imports the store, which sets Django up

    if (problem := problem_of(row.definition())) is not None:
        return problem[1]
    try:
        check_command(row.command_name)
    except InvalidInput as error:
        return error.message
    return ""


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
