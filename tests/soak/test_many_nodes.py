"""Fifty nodes of a Django project with 600 definitions of every minute, one of which is killed every ten seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.django.test_many_nodes import judge, many_nodes

pytestmark = pytest.mark.soak
MINUTES = 10


def test_fifty_nodes_start_600_runs_a_minute_in_time_while_nodes_are_killed(tmp_path: Path) -> None:
    with many_nodes(tmp_path, nodes=50, definitions=600, period_s=60) as many:
        print(judge(many, many.storm(60.0 * MINUTES)))
