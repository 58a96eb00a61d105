"""A server with an HTTP door in a thread of the test's own process, on SQLite and a free port."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.doors.http.stage import Stage, Worker


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("http")) as stage:
        yield stage


@pytest.fixture
def worker(stage: Stage) -> Worker:
    """A worker of the app `zpe` that has just registered; what other tests left in the queue is gone."""
    stage.clear_queue()
    return stage.register()
