"""Fixtures of the stores' tests."""

from collections.abc import Iterator

import pytest

from tests.support.redis_app import Zpe


@pytest.fixture
def zpe(redis_url: str) -> Iterator[Zpe]:
    app = Zpe(redis_url)
    yield app
    app.close()
