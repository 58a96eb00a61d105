"""A data folder with a store in it, for the tests of backup and restore: jobs in every state, blobs of two generations."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from tasuki.blobs.folder import FolderBlobs
from tasuki.config import DataFolder
from tasuki.core.store_messages import Grant
from tasuki.stores.sql.store import SqlStore
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_stage import Stage
from tests.support.sqlite_files import with_tables

LARGE = b"a result that is a blob\n" * 10_000
AGAIN = b"an input whose first generation was deleted\n" * 100


class Made(NamedTuple):
    """A closed store, and the leases of its workers."""

    folder: DataFolder
    running: Grant
    epoch: int


def opened(path: Path, clock: FakeClock | None = None) -> Stage:
    """Open the store as a server does, and lead it."""
    clock = clock or FakeClock()
    return Stage(SqlStore.open_sqlite(with_tables(path), clock=clock), clock)


def make_store(root: Path) -> Made:
    """Make a store with one job that succeeded with a blob, one that runs, one that waits."""
    folder = DataFolder(root)
    stage = opened(folder.database)
    stage.ended("done", "SUCCEEDED")
    running = stage.running("runs")
    stage.add("waits")
    stage.store.close()
    add_blob(folder, LARGE, "done", "result")
    add_blob(folder, AGAIN, "waits", "in", generation=2)
    return Made(folder, running, stage.epoch)


def add_blob(folder: DataFolder, data: bytes, job_id: str, role: str, *, generation: int = 0, **columns: Any) -> str:
    """Store a blob, its row, and a job's reference to it; return the sha256."""
    blobs = FolderBlobs(folder.blobs, max_blob_bytes=2**30, floor_free_bytes=0)
    with blobs.begin(size_bytes=len(data), generation=generation) as writer:
        writer.write(data)
        ref = writer.commit()
    row = {
        "sha256": ref.sha256,
        "generation": generation,
        "size_bytes": len(data),
        "stored": 1,
        "condemned": 0,
        "touched_at": 0.0,
    }
    row |= columns
    names = ", ".join(row)
    with closing(sqlite3.connect(folder.database)) as connection, connection:
        connection.execute(f"INSERT INTO tasuki_blob ({names}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))
        if job_id:
            connection.execute(
                "INSERT INTO tasuki_jobblob (job_id, sha256, role) SELECT id, ?, ? FROM tasuki_jobrun WHERE idempotency_key = ?",
                (ref.sha256, role, job_id),
            )
    return ref.sha256


def rows(path: Path, statement: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement).fetchall()
