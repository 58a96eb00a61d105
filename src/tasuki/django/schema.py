"""Which version the tables have, which code can work with them, and who is in the way of changing them. Touches one database.

A migration adds 1 to SCHEMA_VERSION. OLDEST_CODE is the lowest version of code that can work with the tables as they are after
it: it stays where it is if a migration only adds what older code does not see, so that the new server migrates while older ones
are still up; it is raised to SCHEMA_VERSION by one that older code would break on, which is refused while such a server lives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasuki.errors import ConfigError

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

SCHEMA_VERSION = 3
OLDEST_CODE = 1
MEMBER_ALIVE_S = 30.0  # a server that beat within this time is taken to be alive


def check_code(connection: BaseDatabaseWrapper) -> None:
    """ConfigError if these tables are too new for this code."""
    found = _select(connection, "tasuki_schema", "SELECT version, oldest_code FROM tasuki_schema WHERE id = 1")
    for version, oldest_code in found:
        if oldest_code > SCHEMA_VERSION:
            raise ConfigError(
                f"these tables were made for a newer tasuki (version {version}, this one is {SCHEMA_VERSION}); upgrade this one"
            )


def check_servers(connection: BaseDatabaseWrapper, oldest_code: int | None = None) -> None:
    """ConfigError if a server is alive that could not work with the tables as they are about to be."""
    oldest_code = OLDEST_CODE if oldest_code is None else oldest_code
    statement = (
        "SELECT member_id, schema_version FROM tasuki_member WHERE kind = 'server' AND schema_version < %s"
        " AND beat_at > extract(epoch FROM clock_timestamp()) - %s ORDER BY member_id"
    )
    found = _select(connection, "tasuki_member", statement, (oldest_code, MEMBER_ALIVE_S))
    if found:
        servers = ", ".join(f"{member_id} (version {version})" for member_id, version in found)
        raise ConfigError(
            f"these servers run and could not work with the new tables (version {SCHEMA_VERSION}): {servers}; stop them first"
        )


def write_version(connection: BaseDatabaseWrapper) -> None:
    """The tables are what this code makes of them."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO tasuki_schema (id, version, oldest_code) VALUES (1, %s, %s)"
            " ON CONFLICT (id) DO UPDATE SET version = excluded.version, oldest_code = excluded.oldest_code"
            " WHERE tasuki_schema.version < excluded.version",
            (SCHEMA_VERSION, OLDEST_CODE),
        )


def has_version(connection: BaseDatabaseWrapper) -> bool:
    return bool(_select(connection, "tasuki_schema", "SELECT 1 FROM tasuki_schema WHERE version >= %s", (SCHEMA_VERSION,)))


def _select(
    connection: BaseDatabaseWrapper, table: str, statement: str, parameters: tuple[str | float, ...] = ()
) -> list[tuple[Any, ...]]:
    """Rows of a table that may not be there yet."""
    if table not in connection.introspection.table_names():
        return []
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        found: list[tuple[Any, ...]] = cursor.fetchall()
        return found
