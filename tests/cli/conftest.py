"""A user with a fresh folder, and one shared server with a worker for what only looks and asks."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import DEADLINE_S, Running, User, running
from tests.support.waiting import until


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    """Nothing runs; an embedded server that a test has started is gone afterwards."""
    made = User(tmp_path)
    yield made
    until(lambda: not (made.data / "socket").exists(), DEADLINE_S, "the embedded server leaves")


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[User, Running]]:
    """A user whose `tasuki up` runs, with TCP and HTTP."""
    made = User(tmp_path_factory.mktemp("up"))
    with running(made, "up", "--tcp", "127.0.0.1:0", "--http", "127.0.0.1:0", "--slots", "2") as server:
        until(lambda: json.loads(made.run("workers", "--json").stdout), what="its worker is connected")
        yield made, server
