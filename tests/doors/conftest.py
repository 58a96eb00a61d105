"""One server and one worker for all tests of a file here, and a well-behaved client that must be served all the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tasuki import Client
from tests.support.processes import ServerProcess, start_server, start_worker

SERVED_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a worker for tests/support/handlers.py."""
    with start_server(tmp_path_factory.mktemp("door")) as server, start_worker(server):
        yield server
        assert server.running, server.output()


@pytest.fixture(scope="module")
def good_client(server: ServerProcess) -> Iterator[Client]:
    """A well-behaved client, connected before the attack."""
    with server.client(token=server.create_token("client")) as client:
        yield client


@pytest.fixture
def others_are_served(server: ServerProcess, good_client: Client) -> Callable[[], None]:
    """Call it while the attack is on: the good client gets a result and a status, and a new one gets in."""

    def check() -> None:
        job = good_client.submit(subject="math.square", payload=b"12")
        assert job.result(timeout=SERVED_WITHIN_S) == b"144"
        status = good_client.wait(_within(good_client.aio.status(job.job_id)))
        assert status.state == "SUCCEEDED"
        with server.client(connect_timeout_s=SERVED_WITHIN_S) as newcomer:
            assert newcomer.job(job.job_id).result(timeout=SERVED_WITHIN_S) == b"144"

    return check


async def _within(work):
    import asyncio

    async with asyncio.timeout(SERVED_WITHIN_S):
        return await work
