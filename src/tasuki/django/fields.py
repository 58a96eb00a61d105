"""Field types, migrations that keep nobody waiting, and storage parameters of PostgreSQL's tables: what plain Django does not
express. Imports nothing of tasuki.

A job's row is written three times in its short life (submitted, leased, finished), each time as a new version, and ready jobs
are found at the front of an index whose dead entries lie in the way. So vacuum comes by the number of dead rows, not by a share
of a table that has millions of finished jobs; and pages keep room for the next versions of their rows.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import migrations, models
from django.utils import timezone

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.base.schema import BaseDatabaseSchemaEditor


class RowIdField(models.BigAutoField):
    """A primary key that on SQLite is the plain rowid.

    Django writes `AUTOINCREMENT`, which costs one more written row (in sqlite_sequence) per insert. Its benefit, that the id of
    a deleted newest row is never used again, is not needed: lease ids are random, clients know jobs by `job_id`.
    """

    def db_type_suffix(self, connection: BaseDatabaseWrapper) -> str | None:
        return None if connection.vendor == "sqlite" else super().db_type_suffix(connection)


class UnixTimeField(models.DateTimeField):
    """A point in time. The column has seconds since 1970 as a double: no parsing and no time zones on the way to the hot
    statements. In Python it is an aware datetime; a number of seconds may be assigned and compared, too.

    Times are ordered and compared as such. Transforms of the database (`__date`, `__year`) do not exist.
    """

    def get_internal_type(self) -> str:
        return "FloatField"

    def get_transform(self, lookup_name: str) -> None:
        return None

    def from_db_value(self, value: float | None, _expression: object, _connection: object) -> datetime | None:
        return None if value is None else _aware(value)

    def to_python(self, value: Any) -> Any:
        return _aware(value) if isinstance(value, int | float) else super().to_python(value)

    def get_default(self) -> Any:
        found = super().get_default()
        return _aware(found) if isinstance(found, int | float) else found

    def get_prep_value(self, value: Any) -> Any:
        if value is None or isinstance(value, int | float) or hasattr(value, "resolve_expression"):
            return value
        moment = self.to_python(value)
        return (moment if timezone.is_aware(moment) else timezone.make_aware(moment)).timestamp()

    def get_db_prep_value(self, value: Any, connection: BaseDatabaseWrapper, prepared: bool = False) -> Any:
        return value if prepared else self.get_prep_value(value)


def _aware(at: float) -> datetime:
    try:
        return datetime.fromtimestamp(at, UTC)
    except (OverflowError, ValueError):  # nothing of tasuki writes such a time
        return datetime.max.replace(tzinfo=UTC)


def database_time(connection: BaseDatabaseWrapper) -> datetime:
    """Return the time on the clock of a database; SQLite has the machine's."""
    if connection.vendor != "postgresql":
        return timezone.now()
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        return cursor.fetchone()[0]


def project_time_zone() -> str:
    """Return the time zone of a project's dates, where a definition names no other."""
    return settings.TIME_ZONE


class NameField(models.CharField):
    """A text that is compared and sorted by its bytes, everywhere. On PostgreSQL that is the collation "C", and no limit.

    Leasing walks the index of ready rows in this order, with ranges that Python made: in the order of a natural language they
    would hold other names. Lengths are checked before a text comes here; a limit in the database would fail a whole turn for one
    text that slipped through. "C" also serves LIKE 'x%', so Django's second index on unique texts, made for that, would only
    cost: Django omits it where the type is spelled neither "varchar" nor "text".
    """

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        return "character varying" if connection.vendor == "postgresql" else super().db_type(connection)

    def db_parameters(self, connection: BaseDatabaseWrapper) -> dict[str, str | None]:
        parameters = super().db_parameters(connection)
        return {**parameters, "collation": "C"} if connection.vendor == "postgresql" else parameters


class AddIndexConcurrently(migrations.AddIndex):
    """Add an index while others write to the table, in a migration with `atomic = False`. Django's own is for PostgreSQL only.

    An index that an interrupted migration left behind, which may be unusable, is made anew.
    """

    atomic = False

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if schema_editor.connection.vendor != "postgresql":
            super().database_forwards(app_label, schema_editor, from_state, to_state)
            return
        model = to_state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            schema_editor.remove_index(model, self.index, concurrently=True)  # if it exists
            schema_editor.add_index(model, self.index, concurrently=True)


class RemoveIndexConcurrently(migrations.RemoveIndex):
    """Remove an index while others use the table: see `AddIndexConcurrently`."""

    atomic = False

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if schema_editor.connection.vendor != "postgresql":
            super().database_forwards(app_label, schema_editor, from_state, to_state)
            return
        model = from_state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            index = from_state.models[app_label, self.model_name_lower].get_index_by_name(self.name)
            schema_editor.remove_index(model, index, concurrently=True)


STORAGE: dict[str, dict[str, Any]] = {
    "tasuki_jobrun": {
        "fillfactor": 70,
        "autovacuum_vacuum_scale_factor": 0,
        "autovacuum_vacuum_threshold": 20_000,
        "autovacuum_vacuum_insert_scale_factor": 0.2,
        "autovacuum_analyze_scale_factor": 0,
        "autovacuum_analyze_threshold": 50_000,
        "autovacuum_vacuum_cost_delay": 0,  # a slow vacuum leaves the front of the queue full of dead entries
    },
    # A handful of rows that every turn writes to: they are cleaned page by page, if the pages have room.
    "tasuki_counter": {"fillfactor": 25, "autovacuum_vacuum_scale_factor": 0, "autovacuum_vacuum_threshold": 1_000},
    "tasuki_turnmark": {"fillfactor": 25, "autovacuum_vacuum_scale_factor": 0, "autovacuum_vacuum_threshold": 1_000},
    "tasuki_member": {"fillfactor": 25, "autovacuum_vacuum_scale_factor": 0, "autovacuum_vacuum_threshold": 1_000},
    "tasuki_scopelease": {"fillfactor": 25, "autovacuum_vacuum_scale_factor": 0, "autovacuum_vacuum_threshold": 1_000},
}


def set_storage(_apps: object, editor: BaseDatabaseSchemaEditor) -> None:
    """Set the storage parameters of tables that are written to all the time. Does nothing on SQLite."""
    if editor.connection.vendor == "postgresql":
        for table, parameters in STORAGE.items():
            settings = ", ".join(f"{name} = {value}" for name, value in parameters.items())
            editor.execute(f"ALTER TABLE {table} SET ({settings})")


def tuned() -> migrations.RunPython:
    """Return the last operation of 0001; written there by hand after `makemigrations`."""
    return migrations.RunPython(set_storage, migrations.RunPython.noop)
