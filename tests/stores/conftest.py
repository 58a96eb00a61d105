"""Fixtures of the stores' tests."""

from collections.abc import Iterator

import pytest

from tasuki.stores.sql import postgres_ready
from tests.support.postgres_service import PostgresService
from tests.support.redis_app import Zpe


@pytest.fixture
def zpe(redis_url: str) -> Iterator[Zpe]:
    app = Zpe(redis_url)
    yield app
    app.close()


@pytest.fixture
def postgres_url(postgres_url: str) -> str:
    """The same with more time to connect than a store takes by itself: on a machine with much other work 2 s may not do."""
    return f"{postgres_url}?connect_timeout=20"


@pytest.fixture
def vacuumed_url(postgres: PostgresService, postgres_url: str) -> str:
    """The same without dead entries of earlier tests in its indexes, for tests that count what is read."""
    postgres.execute("VACUUM tasuki_jobrun", url=postgres_url)
    return postgres_url


@pytest.fixture
def floors_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On PostgreSQL every queue has a floor, which follows at once what is taken, and walks go around it."""
    monkeypatch.setattr(postgres_ready, "SLOW_WALK_S", -1.0)
    monkeypatch.setattr(postgres_ready, "SLOW_WALKS", 1)
    monkeypatch.setattr(postgres_ready, "FLOOR_JOBS_MIN", 1)
    monkeypatch.setattr(postgres_ready, "RAISE_DELAY_S", 0.0)
