"""Leasing from PostgreSQL costs what is granted, however many other subjects wait."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tasuki.core.store_messages import LeaseRequest
from tasuki.stores.sql.lease import IN_VAIN_MAX
from tasuki.stores.sql.store import SqlStore
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_stage import Stage
from tests.stores.test_postgres_snapshot import index_entries_read

MANY = 8 * IN_VAIN_MAX
LOOKED_MAX = MANY // 2


@pytest.fixture
def crowded(vacuumed_url: str) -> Iterator[Stage]:
    """A store with a job of each of many subjects that nobody takes."""
    clock = FakeClock()
    stage = Stage(SqlStore.open_postgresql(vacuumed_url, clock=clock), clock)
    for begin in range(0, MANY, IN_VAIN_MAX):
        add(stage, *(f"render.{number:05}.gpu" for number in range(begin, begin + IN_VAIN_MAX)))
    yield stage
    stage.store.close()


def add(stage: Stage, *subjects: str) -> None:
    stage.store.submit([stage.submission(subject, subject=subject) for subject in subjects])


@pytest.mark.parametrize("pattern", ["zoo.7", "zoo.*", "zoo.>"])
def test_a_job_of_another_group_comes_and_goes_at_once(crowded: Stage, pattern: str) -> None:
    def submit_and_lease() -> None:
        add(crowded, "zoo.7")
        assert [grant.job_id for grant in crowded.lease(patterns=(pattern,))] == ["zoo.7"]

    assert index_entries_read(crowded, submit_and_lease) < MANY / 20


def test_an_idle_worker_whose_pattern_matches_nothing_does_not_walk_over_all_of_them(crowded: Stage) -> None:
    assert index_entries_read(crowded, lambda: crowded.lease(patterns=("render.*.cpu",))) < LOOKED_MAX
    assert crowded.store.notes().cut == (0,)


def test_many_workers_that_find_nothing_cost_no_more_than_one(crowded: Stage) -> None:
    requests = [
        LeaseRequest(worker_id=f"w{number}", incarnation="1", patterns=(f"render.*.{number}", "*.cpu")) for number in range(20)
    ]

    assert index_entries_read(crowded, lambda: crowded.store.lease(requests)) < LOOKED_MAX
    assert crowded.store.notes().cut[-1] == 19


def test_a_worker_that_matches_few_of_them_asks_for_a_bounded_number_at_a_time(crowded: Stage) -> None:
    few = [f"render.{number:05}.few" for number in range(0, MANY, MANY // 4)]
    add(crowded, *few)
    found: list[str] = []
    looked: list[int] = []

    while len(found) < len(few):
        read = index_entries_read(crowded, lambda: found.extend(one.job_id for one in crowded.lease(patterns=("render.*.few",))))
        looked.append(read)
        assert len(looked) <= 2 * MANY // IN_VAIN_MAX + len(few)

    assert sorted(found) == few
    assert max(looked) < LOOKED_MAX


def test_a_subject_that_a_worker_names_is_found_with_a_few_looks(crowded: Stage) -> None:
    add(crowded, "render.00007.few")

    assert index_entries_read(crowded, lambda: crowded.lease(patterns=("render.00007.few",))) < MANY / 20


def test_a_page_of_queues_costs_its_length(crowded: Stage) -> None:
    page = crowded.store.ready_queues(limit=10)

    assert len(page.queues) == 10
    # In the session of the writer, which reads pages as a reader does
    assert index_entries_read(crowded, lambda: crowded.store.ready_queues(page.place, limit=10)) < MANY / 20
