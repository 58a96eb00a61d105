"""Jobs that compute for much longer than their lease lasts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.stage import SOON_S, Ledger, command_worker, jobs_worker, stdout_of, story
from tests.support.processes import start_server

pytestmark = pytest.mark.e2e

TTL_S = 1


@pytest.mark.slow
@pytest.mark.parametrize("leases", [5, pytest.param(20, marks=pytest.mark.soak)])
def test_a_cpu_bound_job_many_times_longer_than_its_lease_runs_once(
    tmp_path: Path, store_url: str, ledger: Ledger, leases: int
) -> None:
    # given: a plain function and a command that compute for several leases, on as many processors as they can get
    long_s = leases * TTL_S
    with (
        start_server(tmp_path, "--lease-ttl", str(TTL_S), store=store_url) as server,
        jobs_worker(server, ledger, "--subject", "plain.>", "--plain", "--slots", "1"),
        command_worker(server, ledger, "--slots", "1"),
        server.client() as client,
    ):
        # when
        function = client.submit(subject="plain.1", payload=f"spin {long_s}".encode(), job_id="function")
        command = client.submit(exec="step", args=["spin", str(long_s)], job_id="command")

        # then: each was run once, in one attempt, and nothing unusual befell it
        assert function.result(long_s + SOON_S) == b"1"
        assert stdout_of(command.result(SOON_S)) == "attempt 1\n"
        for job_id in ("function", "command"):
            assert ledger.attempts(job_id) == [1]
            assert story(client, job_id) == []
            status = client.status(job_id)
            assert status.finished_at - status.started_at > long_s - 1.5
