"""Every test of the worker leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.runs import close_runners


@pytest.fixture(autouse=True)
def no_runner_is_left() -> Iterator[None]:
    yield
    close_runners()
