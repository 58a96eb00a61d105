"""A flood in one group does not stand in the way of another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki import Client
from tasuki.core.job import JobSpec
from tests.e2e.stage import SOON_S, Ledger, jobs_worker
from tests.support.processes import ServerProcess

pytestmark = pytest.mark.e2e

FLOOD = 100_000
A_FEW_JOBS = 5


def test_a_flood_of_one_group_delays_another_group_by_a_few_jobs(
    server: ServerProcess, client: Client, ledger: Ledger, tmp_path: Path
) -> None:
    # given: thousands of jobs of one group, and a worker with one slot that works on them
    ids = client.aio.new_ids(FLOOD)
    client.submit_many([JobSpec(job_id=job_id, subject="flood.1") for job_id in ids], watch=False)
    with jobs_worker(server, ledger, "--slots", "1"):
        for n in range(5):
            # when: another group submits one job
            before = len(ledger.runs())
            client.submit(subject="calm.1", job_id=f"calm-{n}").result(SOON_S)

            # then: by the order of execution, only a few jobs of the flood came before it
            order = [run.job_id for run in ledger.runs()]
            # between the look at the ledger and the server's acceptance the flood went on: those came first by right
            accepted_at = client.status(f"calm-{n}").created_at
            ahead = [run for run in ledger.runs()[before : order.index(f"calm-{n}")] if run.at > accepted_at]
            assert len(ahead) <= A_FEW_JOBS, f"{len(ahead)} jobs of the flood went before it"
    assert client.counts()["flood"].pending > 0, "the flood was over too soon to show anything"
