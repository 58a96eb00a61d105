"""SQLite files that have tasuki's tables already, for tests that are not about how a file gets them.

Django takes 40 ms to make the tables in a new file. Here it does so once in each process of pytest; every other file is a copy.
How tables are made and migrated is tested in tests/django, and by all tests that open or serve a folder that is not there yet.
"""

from __future__ import annotations

import functools
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import disk_usage

MEMORY_MIN_BYTES = 4 * 1024**3  # all processes of `make test` use less than half of it


def memory_folder() -> Path | None:
    """Return a folder in memory where there is one with enough room: tests that cut no power need not wait for a disk."""
    shared_memory = Path("/dev/shm")
    return shared_memory if shared_memory.is_dir() and disk_usage(shared_memory).free >= MEMORY_MIN_BYTES else None


def with_tables(path: Path) -> Path:
    """Make the file with tables and no rows, if it is not there yet, with its owner's rights; return the path."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_bytes(_migrated())
    return path


@functools.cache
def _migrated() -> bytes:
    # In a thread of its own: where the caller has a running loop, Django refuses to touch a database.
    with tempfile.TemporaryDirectory(prefix="tasuki-tables-") as folder, ThreadPoolExecutor(1) as thread:
        path = Path(folder) / "tasuki.sqlite3"
        thread.submit(_make, path).result()
        return path.read_bytes()


def _make(path: Path) -> None:
    from tasuki.stores.sql.store import SqlStore

    SqlStore.open_sqlite(path).close()
