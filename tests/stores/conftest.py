"""Fixtures of the stores' tests."""

from collections.abc import Iterator

import pytest

from tasuki.stores.sql import postgres_ready
from tests.support.redis_app import Zpe


@pytest.fixture
def zpe(redis_url: str) -> Iterator[Zpe]:
    app = Zpe(redis_url)
    yield app
    app.close()


@pytest.fixture
def floors_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On PostgreSQL every queue has a floor, which follows at once what is taken, and walks go around it."""
    monkeypatch.setattr(postgres_ready, "SLOW_WALK_S", -1.0)
    monkeypatch.setattr(postgres_ready, "SLOW_WALKS", 1)
    monkeypatch.setattr(postgres_ready, "FLOOR_JOBS_MIN", 1)
    monkeypatch.setattr(postgres_ready, "RAISE_DELAY_S", 0.0)
