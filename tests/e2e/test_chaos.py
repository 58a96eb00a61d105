"""Servers, workers and stores as processes, killed and frozen at random: no acknowledged job is lost, none is finished twice."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.support.chaos.scenarios import SCENARIOS, Scenario

pytestmark = pytest.mark.e2e

SEEDS = [int(seed) for seed in os.environ.get("CHAOS_SEEDS", "").split()] or [0]
"""Seeds to repeat; 0: a random one."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "scenario",
    [pytest.param(one, id=one.name, marks=pytest.mark.soak if one.in_soak else ()) for one in SCENARIOS],
)
def test_after_a_storm_every_promise_holds(
    scenario: Scenario, seed: int, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = seed or random.randrange(1, 1 << 30)
    print(f"seed {seed}")
    with scenario.make(request, tmp_path, seed) as rig:
        figures = rig.run()
    with capsys.disabled():
        print(f"\n{figures}" if scenario.in_soak else "", end="")
