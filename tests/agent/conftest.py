"""One agent for all tests of a file that change nothing about it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from tests.agent.stage import AgentStage

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentStage]:
    with AgentStage(tmp_path_factory.mktemp("agent")) as stage:
        yield stage


@pytest.fixture
def job_id() -> str:
    """One that no other test has."""
    return f"job-{next(_numbers)}"


@pytest.fixture
def make_stage(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AgentStage]:
    """An agent of the test's own."""
    return lambda **options: AgentStage(tmp_path_factory.mktemp("agent"), **options)
