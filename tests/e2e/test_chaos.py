"""Several servers on one PostgreSQL, everything killed and frozen at random: a small storm. tests/soak has the large one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.chaos.checks import check
from tests.support.chaos.rig import Plan, Scene
from tests.support.postgres_service import PostgresService

pytestmark = pytest.mark.e2e


def test_a_small_storm_over_three_servers_leaves_one_finish_each(
    tmp_path: Path, postgres: PostgresService, postgres_url: str
) -> None:
    plan = Plan(
        seed=random.randrange(1 << 30),
        workers=3,
        clients=2,
        jobs=900,
        faults_min=6,
        faults_max=9,
        gap_s=(0.1, 0.7),
        pause_s=0.2,
        large_every=100,
    )
    print(f"seed {plan.seed}")
    with Scene(plan, tmp_path, postgres, postgres_url) as scene:
        scene.storm()
        scene.calm()
        print(check(scene))
