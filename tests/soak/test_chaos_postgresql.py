"""The large storm: three servers on one PostgreSQL, six workers, four clients, twenty thousand jobs."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.support.chaos.checks import check
from tests.support.chaos.rig import Plan, Scene
from tests.support.postgres_service import PostgresService

pytestmark = pytest.mark.soak

SEEDS = [int(seed) for seed in os.environ.get("CHAOS_SEEDS", "").split()] or [random.randrange(1 << 30)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_storm_over_three_servers_leaves_one_finish_each(
    tmp_path: Path, postgres: PostgresService, postgres_url: str, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(
        seed=seed,
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
    print(f"seed {seed}")
    with Scene(plan, tmp_path, postgres, postgres_url) as scene:
        scene.storm()
        scene.calm()
        figures = check(scene)
    with capsys.disabled():
        print(f"\n{figures}")
