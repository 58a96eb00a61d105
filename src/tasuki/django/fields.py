"""Field types of the schema. Knows Django, and nothing of tasuki."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import models

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


class RowIdField(models.BigAutoField):
    """A primary key that on SQLite is the plain rowid.

    Django writes `AUTOINCREMENT`, which costs one more written row (in sqlite_sequence) per insert. What it buys, that the id
    of a deleted newest row is never used again, nobody here relies on: lease ids are random, outsiders know jobs by `job_id`.
    """

    def db_type_suffix(self, connection: BaseDatabaseWrapper) -> str | None:
        return None if connection.vendor == "sqlite" else super().db_type_suffix(connection)


class UnixTimeField(models.FloatField):
    """Seconds since 1970 as a float, as everywhere in tasuki: no parsing and no time zones on the way to the hot statements."""


class NameField(models.CharField):
    """A text that machines compare and sort: by its bytes, everywhere. On PostgreSQL that is the collation "C", and no limit.

    Leasing walks the index of ready rows in this order, with ranges that Python made: in the order of a natural language they
    would hold other names. Lengths are checked before a text comes here; a limit in the database would fail the whole turn of one
    that slipped through. "C" also serves LIKE 'x%', so Django's second index on unique texts, made for that, would only cost:
    Django leaves it away where the type is spelled neither "varchar" nor "text".
    """

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        return "character varying" if connection.vendor == "postgresql" else super().db_type(connection)

    def db_parameters(self, connection: BaseDatabaseWrapper) -> dict[str, str | None]:
        parameters = super().db_parameters(connection)
        return {**parameters, "collation": "C"} if connection.vendor == "postgresql" else parameters
