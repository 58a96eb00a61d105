"""A server, a ledger and a client for one test; every process is killed when the test ends, however it ends.

One server promises the same on every store: `store_url` is SQLite in the data folder, and in `make soak` PostgreSQL too. In
`make test` PostgreSQL has the conformance suite (tests/stores), the fault points of a finish, the small chaos run, and all tests
of several servers. A test in which no store has a part is `sqlite_only` (stage.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki import Client
from tests.e2e.stage import LEAD_TTL_S, LEASE_TTL_S, STORES, Ledger, wait_until_met
from tests.support.processes import ServerProcess, start_server, start_servers


@pytest.fixture(params=STORES)
def store_url(request: pytest.FixtureRequest) -> str:
    """The URL for `start_server(store=…)`: empty for SQLite, or a fresh database."""
    return "" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
def server(tmp_path: Path, store_url: str) -> Iterator[ServerProcess]:
    """A server with short leases."""
    with start_server(tmp_path, "--lease-ttl", str(LEASE_TTL_S), store=store_url) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


@pytest.fixture
def pair(tmp_path: Path, postgres_url: str) -> Iterator[list[ServerProcess]]:
    """Two servers on one database, with short leases and short leadership, that know each other."""
    ttls = ("--lease-ttl", str(LEASE_TTL_S), "--lead-ttl", str(LEAD_TTL_S))
    with start_servers(tmp_path, 2, *ttls, store=postgres_url) as servers:
        wait_until_met(servers)
        yield servers


@pytest.fixture(scope="module", params=STORES)
def shared_store_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """`store_url` for all tests of a file."""
    if request.param == "sqlite":
        yield ""
        return
    postgres = request.getfixturevalue("postgres")
    url = postgres.database()
    yield url
    postgres.drop(url)


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory, shared_store_url: str) -> Iterator[ServerProcess]:
    """One server for all tests of a file that do no harm to it."""
    with start_server(tmp_path_factory.mktemp("shared"), store=shared_store_url) as server:
        yield server
        assert server.running, server.output()


@pytest.fixture
def shared_client(shared_server: ServerProcess) -> Iterator[Client]:
    with shared_server.client() as client:
        yield client
