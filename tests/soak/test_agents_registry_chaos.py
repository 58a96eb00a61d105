"""Three node agents that share a registry, 200 jobs, each asked for by several of 8 clients, while agents are killed, frozen for
longer than their leases, stopped, and started again: every call has the right result, and no job is ever run twice at once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.soak.counting_gate import Dispatchers
from tests.soak.registry_scene import Plan, RegistryScene

pytestmark = [pytest.mark.soak, pytest.mark.e2e]


def test_on_redis_no_job_has_two_live_runs_and_every_call_is_right(tmp_path: Path, redis_url: str) -> None:
    with RegistryScene(Plan(seed=random.randrange(10**9)), tmp_path, redis_url) as scene:
        calls = scene.storm(scene.urls)
        print(scene.check(calls))


def test_on_postgresql_no_job_has_two_live_runs_and_every_call_is_right(tmp_path: Path, postgres_url: str) -> None:
    """With a place for large results, which a registry of SQL does not hold either."""
    results = tmp_path / "large-results"
    with RegistryScene(Plan(seed=random.randrange(10**9)), tmp_path, postgres_url, "--results", str(results)) as scene:
        calls = scene.storm(scene.urls)
        print(scene.check(calls))


def test_through_dispatchers_that_are_killed_no_stored_input_is_sent_again(tmp_path: Path, redis_url: str) -> None:
    plan = Plan(seed=random.randrange(10**9), callers=1, at_once=1, padding_bytes=300_000, gap_s=(3.0, 8.0))
    with RegistryScene(plan, tmp_path, redis_url) as scene, Dispatchers(scene) as dispatchers:
        calls = scene.storm(dispatchers.urls, also=[dispatchers.trouble])
        told = dispatchers.check()
        dispatchers.end()
        print(scene.check(calls), told, sep="; ")
