"""The charts of the overview: a week is added up in parts, so that no look takes long, and is whole afterwards."""

from __future__ import annotations

from pathlib import Path

from tests.support.django_site import DjangoSite

WEEK = """
from tasuki.core.statistics import GroupStatistics, Rollup
from tasuki.django.enqueueing import project_store
from tasuki.django.ops import charts
from tasuki.django.ops.backend import ProjectBackend

def looks(step_s=7200, length_s=7 * 86_400):
    until = int(time.time()) // step_s * step_s + step_s
    store, asked = project_store(), []
    minutes = range(until - length_s, int(time.time()) // 60 * 60, 3600)
    with store.turn():
        store.add_rollups([Rollup(minute, "s", {"g": GroupStatistics(submitted=1, succeeded=1)}) for minute in minutes])

    class Backend:
        def statistics(self, since, until, step_s, groups):
            asked.append(until - since)
            return ProjectBackend(None).statistics(since, until, step_s, groups)

    found = [charts._periods(Backend(), until - length_s, until, step_s) for _ in range(16)]
    sums = [sum(one["groups"]["g"]["finished"] for one in periods.values()) for periods in found]
    return len(minutes), sums, asked
"""


def test_a_week_is_read_half_a_day_at_a_time_and_then_is_whole(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.migrate()

    hours, sums, asked = site.ask(WEEK + "print(json.dumps(looks()))")

    assert sums[0] < hours
    assert sums == sorted(sums)
    assert sums[-3:] == [hours] * 3
    assert max(asked) <= 43_200
    assert len(asked) == 1 + 2 * 13, "the newest half day; then each time what is new, and the half day before"
