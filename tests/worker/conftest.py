"""What every test of the worker leaves behind: nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.runs import opened


@pytest.fixture(autouse=True)
def close_runners() -> Iterator[None]:
    yield
    while opened:
        opened.pop().close()
