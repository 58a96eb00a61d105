"""A server with an HTTP door in a thread of the test's own process, on a free port: on SQLite, or on Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.doors.http.stage import Stage, Worker


@pytest.fixture(scope="module")
def store_url(request: pytest.FixtureRequest) -> str:
    """An empty store; see `on_each_store`."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return ""
    return str(request.getfixturevalue("redis_service").url())


@pytest.fixture
def own_store_url(request: pytest.FixtureRequest, store_url: str) -> str:
    """Another one of the same kind, for this test alone."""
    return str(request.getfixturevalue("redis_service").url()) if store_url else ""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, store_url: str) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("http"), store=store_url) as stage:
        yield stage


@pytest.fixture
def worker(stage: Stage) -> Worker:
    """A worker of the app `zpe` that has just registered; what other tests left in the queue is gone."""
    stage.clear_queue()
    return stage.register()
