"""What PostgreSQL is told of our tables that Django cannot express: part of the migrations. Touches nothing on SQLite.

A job's row is written three times in its short life (submitted, leased, finished), each time as a new version, and what is ready
is found at the front of an index whose dead entries lie in the way. So vacuum comes by the number of dead rows, not by a share
of a table that has millions of finished jobs; and pages keep room for the next versions of their rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import migrations

if TYPE_CHECKING:
    from django.db.backends.base.schema import BaseDatabaseSchemaEditor

STORAGE: dict[str, dict[str, Any]] = {
    "tasuki_jobrun": {
        "fillfactor": 70,
        "autovacuum_vacuum_scale_factor": 0,
        "autovacuum_vacuum_threshold": 20_000,
        "autovacuum_vacuum_insert_scale_factor": 0.2,
        "autovacuum_analyze_scale_factor": 0,
        "autovacuum_analyze_threshold": 50_000,
        "autovacuum_vacuum_cost_delay": 0,  # a vacuum that dawdles leaves the front of the queue full of dead entries
    },
    # A handful of rows that every turn writes to: small enough to be cleaned page by page, if the pages have room.
    "tasuki_counter": {"fillfactor": 25, "autovacuum_vacuum_scale_factor": 0, "autovacuum_vacuum_threshold": 1_000},
    "tasuki_turnmark": {"fillfactor": 25, "autovacuum_vacuum_scale_factor": 0, "autovacuum_vacuum_threshold": 1_000},
    "tasuki_member": {"fillfactor": 25, "autovacuum_vacuum_scale_factor": 0, "autovacuum_vacuum_threshold": 1_000},
    "tasuki_scopelease": {"fillfactor": 25, "autovacuum_vacuum_scale_factor": 0, "autovacuum_vacuum_threshold": 1_000},
}


def set_storage(_apps: object, editor: BaseDatabaseSchemaEditor) -> None:
    """The storage parameters of tables that are written to all the time."""
    if editor.connection.vendor == "postgresql":
        for table, parameters in STORAGE.items():
            settings = ", ".join(f"{name} = {value}" for name, value in parameters.items())
            editor.execute(f"ALTER TABLE {table} SET ({settings})")


def tuned() -> migrations.RunPython:
    """The last operation of 0001; written there by hand after `makemigrations`."""
    return migrations.RunPython(set_storage, migrations.RunPython.noop)
