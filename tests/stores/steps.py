"""Steps that tests of several stores take."""

from __future__ import annotations

from typing import Any

from tasuki.core.job import JobSpec, body_hash
from tasuki.core.store_messages import Submission
from tasuki.stores.sql.postgres import PostgresDatabase
from tasuki.stores.sql.store import SqlStore


def submission(job_id: str, **fields: Any) -> Submission:
    """Return the submission of a job of alice's, by default for render.eu."""
    spec = JobSpec(job_id=job_id, **{"subject": "render.eu", **fields})
    return Submission(spec, "alice", body_hash(spec))


def connection_of(store: SqlStore) -> Any:
    """Return the connection under a store in PostgreSQL."""
    assert isinstance(store._database, PostgresDatabase)
    return store._database.connection
