"""Jobs that compute for much longer than their lease lasts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.stage import SOON_S, Ledger, command_worker, jobs_worker, postgresql_in_soak, stdout_of, story
from tests.support.processes import start_server

pytestmark = pytest.mark.e2e

TTL_S = 2
LONG_S = 10 * TTL_S


@pytest.mark.slow
@postgresql_in_soak
def test_a_cpu_bound_job_ten_times_longer_than_its_lease_runs_once(tmp_path: Path, store_url: str, ledger: Ledger) -> None:
    # given: a plain function and a command that compute for ten leases, on as many processors as they can get
    with (
        start_server(tmp_path, "--lease-ttl", str(TTL_S), store=store_url) as server,
        jobs_worker(server, ledger, "--subject", "plain.>", "--plain", "--slots", "1"),
        command_worker(server, ledger, "--slots", "1"),
        server.client() as client,
    ):
        # when
        function = client.submit(subject="plain.1", payload=f"spin {LONG_S}".encode(), job_id="function")
        command = client.submit(exec="step", args=["spin", str(LONG_S)], job_id="command")

        # then: each was run once, in one attempt, and nothing unusual befell it
        assert function.result(LONG_S + SOON_S) == b"1"
        assert stdout_of(command.result(SOON_S)) == "attempt 1\n"
        for job_id in ("function", "command"):
            assert ledger.attempts(job_id) == [1]
            assert story(client, job_id) == []
            status = client.status(job_id)
            assert status["finished_at"] - status["started_at"] > LONG_S - 1.5
