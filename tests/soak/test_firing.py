"""Definitions and events in the numbers that are promised, on PostgreSQL; the tests of every day have fewer."""

from __future__ import annotations

import pytest

from tests.django.test_nodes import Project, emit_while_leaders_are_killed
from tests.django.test_nodes import project as project  # the fixture
from tests.stores.test_fire import Firing, edit_around_its_times, leave_for_three_hours
from tests.stores.test_fire import firing as firing  # the fixture

pytestmark = pytest.mark.soak


def test_ten_thousand_events_of_four_processes_while_five_leaders_are_killed(project: Project) -> None:
    emit_while_leaders_are_killed(project, total=10_000, kills=5)


@pytest.mark.parametrize("firing", ["sqlite", "postgresql"], indirect=True)
def test_three_hours_without_a_leader_and_600_definitions_of_every_minute(firing: Firing) -> None:
    leave_for_three_hours(firing, 600)


@pytest.mark.parametrize("firing", ["sqlite", "postgresql"], indirect=True)
def test_a_thousand_changes_around_the_times_of_a_definition(firing: Firing) -> None:
    edit_around_its_times(firing, 1_000)
