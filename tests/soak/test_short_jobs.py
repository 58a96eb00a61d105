"""200 slots busy with short jobs for a minute: no leaked process, descriptor or folder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tasuki.core.job import JobSpec
from tests.e2e.stage import SOON_S
from tests.e2e.test_whole_tree import keeper_of
from tests.support.processes import open_files, rss_bytes, start_server, start_worker
from tests.support.waiting import until

pytestmark = pytest.mark.soak

BUSY_S = 60.0
ROUND = 500
GROWTH_MAX_BYTES = 16 * 1024 * 1024


def test_a_minute_of_short_jobs_on_200_slots_leaves_nothing(tmp_path: Path) -> None:
    options = ["--exec", "true=/bin/true", "--slots", "200", "--data", str(tmp_path / "worker")]
    with start_server(tmp_path) as server, start_worker(server, *options, command=True) as worker, server.client() as client:
        keeper = keeper_of(worker)

        def left() -> tuple[int, int, str]:
            return open_files(worker.pid), open_files(keeper), Path(f"/proc/{keeper}/task/{keeper}/children").read_text()

        def one_round(number: int) -> None:
            jobs = client.submit_many([JobSpec(job_id=f"{number}-{n}", exec="true") for n in range(ROUND)])
            assert {job.outcome(6 * SOON_S).state for job in jobs} == {"SUCCEEDED"}

        def folders() -> list[Path]:
            return list((tmp_path / "worker/runs").glob("*/[!.]*"))

        def all_removed() -> None:
            until(lambda: not folders(), SOON_S, "every run folder is removed")

        one_round(0)
        all_removed()
        before, rss = left(), [rss_bytes(worker.pid), rss_bytes(keeper)]
        deadline = time.monotonic() + BUSY_S
        rounds = 0
        while time.monotonic() < deadline:
            rounds += 1
            one_round(rounds)
        all_removed()
        assert left() == before
        grown = [after - first for first, after in zip(rss, [rss_bytes(worker.pid), rss_bytes(keeper)], strict=True)]
        assert max(grown) < GROWTH_MAX_BYTES, f"memory of worker and keeper grew by {grown} bytes in {rounds} rounds"
