"""One server and one worker for all tests of a file here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tasuki import Client
from tests.support.processes import ServerProcess, start_server, start_worker


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a worker for tests/support/handlers.py."""
    with start_server(tmp_path_factory.mktemp("client"), "--http", "127.0.0.1:0") as server, start_worker(server):
        yield server
        assert server.running, server.output()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        yield client
