"""A server, a ledger and a client for one test; every process is killed when the test ends, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki import Client
from tests.e2e.stage import LEASE_TTL_S, Ledger
from tests.processes import ServerProcess, start_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server with short leases."""
    with start_server(tmp_path, "--lease-ttl", str(LEASE_TTL_S)) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One for all tests of a file that do no harm to it."""
    with start_server(tmp_path_factory.mktemp("shared")) as server:
        yield server
        assert server.running, server.output()


@pytest.fixture
def shared_client(shared_server: ServerProcess) -> Iterator[Client]:
    with shared_server.client() as client:
        yield client
