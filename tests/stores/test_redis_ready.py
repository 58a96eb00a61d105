"""Leasing from Redis costs what is granted, however many other subjects wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tasuki.core.job import JobSpec, body_hash
from tasuki.core.store_messages import LeaseRequest, Submission
from tasuki.stores.redis import scripts
from tests.support.redis_app import PAYLOAD, Zpe

MANY = 3_000
LOOKED_MAX = MANY // 2
COUNTING = """
local counted_redis = redis
local redis = setmetatable({
  call = function(...)
    local found = counted_redis.call(...)
    counted_redis.call('INCRBY', 'test:work', 1 + (type(found) == 'table' and #found or 0))
    return found
  end,
}, { __index = counted_redis })
"""
"""Beginning of a script that counts its calls of Redis and the elements that these return."""


@pytest.fixture
def zpe(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Zpe]:
    """The app; its scripts count their work."""
    plain = scripts.script
    monkeypatch.setattr("tasuki.stores.redis.store.script", lambda *given: COUNTING + plain(*given))
    app = Zpe(redis_url)
    yield app
    app.close()


@pytest.fixture
def crowded(zpe: Zpe) -> Zpe:
    """The app, with a job of each of many subjects that nobody takes."""
    for begin in range(0, MANY, 500):
        add(zpe, *(f"render.{number}.gpu" for number in range(begin, begin + 500)))
    return zpe


def add(zpe: Zpe, *subjects: str) -> None:
    specs = [JobSpec(job_id=subject, subject=subject, payload=PAYLOAD) for subject in subjects]
    zpe.store.submit([Submission(spec, "alice", body_hash(spec)) for spec in specs])


def looked_at(zpe: Zpe, work: Callable[[], Any]) -> int:
    """Do some work, and return how many calls of Redis and elements of their answers it took."""
    zpe.raw.delete("test:work")
    work()
    return int(zpe.raw.get("test:work"))


@pytest.mark.parametrize("pattern", ["zoo.7", "zoo.*", "zoo.>"])
def test_a_job_of_another_group_comes_and_goes_at_once(crowded: Zpe, pattern: str) -> None:
    def submit_and_lease() -> None:
        crowded.stage.add("job", subject="zoo.7")
        assert [grant.job_id for grant in crowded.stage.lease(patterns=(pattern,))] == ["job"]

    assert looked_at(crowded, submit_and_lease) < MANY / 20


def test_an_idle_worker_whose_pattern_matches_nothing_does_not_walk_over_all_of_them(crowded: Zpe) -> None:
    assert looked_at(crowded, lambda: crowded.stage.lease(patterns=("render.*.cpu",))) < LOOKED_MAX


def test_a_worker_that_matches_few_of_them_asks_for_a_bounded_number_at_a_time(crowded: Zpe) -> None:
    few = [f"render.{number}.few" for number in range(0, MANY, MANY // 4)]
    add(crowded, *few)
    found: list[str] = []
    looked: list[int] = []

    while len(found) < len(few):
        looked.append(
            looked_at(crowded, lambda: found.extend(grant.job_id for grant in crowded.stage.lease(patterns=("render.*.few",))))
        )
        assert len(looked) <= 2 * MANY // LOOKED_MAX + len(few)

    assert sorted(found) == sorted(few)
    assert max(looked) < LOOKED_MAX


def test_a_subject_that_a_worker_names_is_found_with_a_few_looks(crowded: Zpe) -> None:
    add(crowded, "render.7.few")

    assert looked_at(crowded, lambda: crowded.stage.lease(patterns=("render.7.few",))) < MANY / 20


def test_many_workers_that_find_nothing_cost_no_more_than_one(crowded: Zpe) -> None:
    requests = [
        LeaseRequest(worker_id=f"w{number}", incarnation="1", patterns=(f"render.*.{number}", "*.cpu")) for number in range(20)
    ]

    assert looked_at(crowded, lambda: crowded.store.lease(requests)) < LOOKED_MAX
    assert crowded.store.notes().cut[-1] == 19


def test_a_page_of_queues_costs_its_length_and_always_has_the_list(crowded: Zpe) -> None:
    crowded.push("outsider")

    page = crowded.store.ready_queues(limit=10)

    assert len(page.queues) == 11
    assert page.queues[-1].subject == "job.assign.zpe"
    assert looked_at(crowded, lambda: crowded.store.ready_queues(page.place, limit=10)) < MANY / 20


def test_entries_that_are_none_are_met_a_bounded_number_at_a_time(zpe: Zpe) -> None:
    zpe.raw.lpush("zpe:queue", *(f"mol:{number}" for number in range(1_500)))
    zpe.push("good")

    rounds = 0
    while not zpe.lease():
        rounds += 1
        assert zpe.store.notes().cut == (0,)

    assert rounds == 2
    assert zpe.raw.llen("zpe:dlq") == 1_500


def test_a_queue_that_got_empty_is_in_no_index(zpe: Zpe) -> None:
    add(zpe, "zoo.7")

    zpe.stage.take("zoo.7")

    assert not zpe.raw.exists("zpe:queues:5")
    assert zpe.store.ready_queues().queues == []


def test_patterns_that_name_what_is_not_there_cost_a_look_each(zpe: Zpe) -> None:
    add(zpe, "zoo.7")
    requests = [
        LeaseRequest(worker_id=f"w{worker}", incarnation="1", patterns=tuple(f"w{worker}-{number}.a" for number in range(200)))
        for worker in range(4)
    ]

    assert looked_at(zpe, lambda: zpe.store.lease(requests)) <= 3 * 4 * 200


def test_patterns_that_begin_with_a_wildcard_cost_about_the_same_however_many_they_are(zpe: Zpe) -> None:
    for begin in range(0, MANY, 500):
        add(zpe, *(f"g{number % 50}.x{number}" for number in range(begin, begin + 500)))

    def look(count: int) -> int:
        request = LeaseRequest(worker_id="w", incarnation="1", patterns=tuple(f"*.q{number}" for number in range(count)))
        return looked_at(zpe, lambda: zpe.store.lease([request]))

    few, many = look(2), look(200)
    add(zpe, "a.q150", "a.q200", "a.b.q7")

    assert many < 2 * few  # each by itself: 80 times
    assert [grant.job_id for grant in zpe.stage.lease(limit=4, patterns=tuple(f"*.q{number}" for number in range(200)))] == [
        "a.q150"
    ]


@pytest.mark.parametrize("pattern", ["zoo.7", "zoo.*", "*.7"])
def test_a_lease_names_only_workers_that_its_own_subjects_may_name(zpe: Zpe, pattern: str) -> None:
    live = {f"w{worker}": tuple(f"group-{worker}.{number}.>" for number in range(200)) for worker in range(50)}
    live["9"] = ("zoo.>",)
    add(zpe, "zoo.9", "zoo.7")
    received = zpe.raw.info("stats")["total_net_input_bytes"]

    assert [grant.job_id for grant in zpe.stage.lease(limit=2, patterns=(pattern,), live_workers=live)] == ["zoo.7"]

    assert zpe.raw.info("stats")["total_net_input_bytes"] - received < 2_000


def test_the_list_of_the_app_has_its_share_beside_other_groups(zpe: Zpe) -> None:
    add(zpe, "a.1", "a.2", "b.1")
    zpe.push("listed")

    assert "listed" in [grant.job_id for grant in zpe.stage.lease(limit=3)]
