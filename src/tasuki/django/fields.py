"""Two field types of the schema. Knows Django, and nothing of tasuki."""

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
