"""A client over HTTP that waits for more jobs than anybody should."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.core.job import JobSpec
from tests.support.processes import start_server, start_worker

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("count", [10_000, 40_000])
def test_all_results_are_heard(tmp_path: Path, count: int) -> None:
    """The second number is beyond what all long polls together name at once."""
    specs = [JobSpec(job_id=f"crowd-{number}", subject="noop") for number in range(count)]
    with (
        start_server(tmp_path, "--http", "127.0.0.1:0") as server,
        start_worker(server),
        server.client(server.http_url) as client,
    ):
        for handle in client.submit_many(specs):
            assert handle.result(timeout=100) == b""
