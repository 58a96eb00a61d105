"""The texts of all statements of both SQL stores, and the partial index that each statement must use."""

from __future__ import annotations

from tasuki.stores.sql.database import load_statements
from tasuki.stores.sql.postgres_session import Statement, find_statement, statements

_SQLITE = load_statements("sqlite")
SQLITE = {**_SQLITE.one, **{name: sizes[4] for name, sizes in _SQLITE.many.items()}}

_FIND = [name for name, text in load_statements("postgresql").one.items() if "{and}" in text]
POSTGRES_STATEMENTS: dict[str, Statement] = {**statements(), **{name: find_statement(name, "") for name in _FIND}}
POSTGRESQL = {name: statement.text for name, statement in POSTGRES_STATEMENTS.items()}

INDEX_OF = {
    "band": "tasuki_job_ready",
    "groups": "tasuki_job_ready",
    "subjects": "tasuki_job_ready",
    "queues": "tasuki_job_ready",
    "execs": "tasuki_job_ready",
    "ahead": "tasuki_job_ready",
    "leases_over": "tasuki_job_leased",
    "renew_all": "tasuki_job_leased",
    "not_renewed": "tasuki_job_leased",
    "held": "tasuki_job_leased",
    "fetch": "tasuki_job_leased",
    "runs_ahead": "tasuki_job_leased",
    "leases_of": "tasuki_job_leased",
    "next_lease_over": "tasuki_job_leased",
    "find_leased": "tasuki_job_leased",
    "delayed_due": "tasuki_job_delayed",
    "next_delayed": "tasuki_job_delayed",
    "late": "tasuki_job_late",
    "find_failed": "tasuki_job_failed",
    "find_by_array": "tasuki_job_array",
}
"""Of the statements that both have; each vendor's own look at the ready index is in the test of its plans."""
