"""Routing policies by themselves: which worker is chosen, and what moves when workers come and go."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.core.job import InputFile, JobSpec
from tasuki.core.routing import Candidate, Policy, Ring, choose, facts_of, hash_prefix, parse_route, route_of, why
from tasuki.errors import InvalidInput

KEYS = [f"key-{number}" for number in range(1000)]
FIVE = [f"w{number}" for number in range(5)]
WORKERS = st.lists(st.text("abcdefgh0123456789-", min_size=1, max_size=12), min_size=2, max_size=12, unique=True)


def owners(workers: list[str], keys: list[str] = KEYS) -> dict[str, str]:
    ring = Ring(workers)
    return {key: next(ring.order(key)) for key in keys}


def facts(key: str = "", **cached: int) -> object:
    files = tuple(InputFile(name, sha256=name * 64, size_bytes=size, cache=("c", name)) for name, size in cached.items())
    return facts_of(JobSpec(job_id="j", subject="render.x", route_key=key, files=files))


# ---------------------------------------------------------------------------------------------------- the ring


def test_a_worker_that_leaves_moves_only_its_own_keys() -> None:
    before, after = owners(FIVE), owners(FIVE[:4])

    moved = {key for key in KEYS if before[key] != after[key]}

    assert moved == {key for key in KEYS if before[key] == "w4"}
    assert len({after[key] for key in moved}) > 1, "all of its keys went to one other worker"


def test_a_worker_that_joins_gets_about_its_share_and_nothing_else_moves() -> None:
    before, after = owners(FIVE), owners([*FIVE, "w5"])

    moved = {key for key in KEYS if before[key] != after[key]}

    assert {after[key] for key in moved} == {"w5"}
    assert len(KEYS) / 6 * 0.5 < len(moved) < len(KEYS) / 6 * 1.7


def test_the_shares_of_five_workers_are_about_even() -> None:
    shares = Counter(owners(FIVE).values())

    assert len(shares) == 5
    assert max(shares.values()) < 1.6 * len(KEYS) / 5


@given(WORKERS, st.lists(st.text(max_size=20), max_size=50, unique=True))
def test_of_any_workers_only_the_keys_of_the_one_that_left_move(workers: list[str], keys: list[str]) -> None:
    gone, *rest = workers
    before, after = owners(workers, keys), owners(rest, keys)

    assert all(before[key] == gone for key in keys if before[key] != after[key])
    assert all(list(Ring(rest).order(key)) == [one for one in Ring(workers).order(key) if one != gone] for key in keys)


@given(WORKERS)
def test_the_order_behind_a_key_has_every_worker_once_and_does_not_depend_on_theirs(workers: list[str]) -> None:
    order = list(Ring(workers).order("k"))

    assert sorted(order) == sorted(workers)
    assert order == list(Ring(workers[::-1]).order("k"))


# ---------------------------------------------------------------------------------------------------- choices


def test_least_load_looks_at_places_and_cpu() -> None:
    calm, busy = Candidate("calm", credit=2, running=1), Candidate("busy", credit=1, running=2)
    assert choose(Policy.LEAST_LOAD, facts(), [busy, calm], waited=False) is calm
    calm.cpu = 0.9
    assert choose(Policy.LEAST_LOAD, facts(), [busy, calm], waited=False) is busy
    busy.credit = 0
    assert choose(Policy.LEAST_LOAD, facts(), [busy, calm], waited=False) is calm


def test_round_robin_takes_who_had_no_turn_for_longest_and_skips_the_full() -> None:
    workers = [Candidate("a", credit=1, turn=5), Candidate("b", credit=0, turn=1), Candidate("c", credit=1, turn=3)]

    chosen = choose(Policy.ROUND_ROBIN, facts(), workers, waited=False)

    assert chosen is not None
    assert chosen.worker_id == "c"


def test_sticky_waits_for_its_worker_then_takes_the_next_on_the_ring() -> None:
    workers = {name: Candidate(name, credit=1) for name in FIVE}
    first, second, *_ = Ring(FIVE).order("user-7")
    everyone = list(workers.values())
    assert choose(Policy.STICKY, facts("user-7"), everyone, waited=False) is workers[first]
    workers[first].credit = 0

    assert choose(Policy.STICKY, facts("user-7"), everyone, waited=False) is None
    assert choose(Policy.STICKY, facts("user-7"), everyone, waited=True) is workers[second]


def test_a_job_without_a_key_sticks_by_its_subject() -> None:
    assert facts_of(JobSpec(job_id="j", subject="session.7")).key == "session.7"


def test_cache_affinity_takes_who_holds_most_and_waits_for_it() -> None:
    job = facts(a=100, b=50)
    most = Candidate("most", credit=1, running=3, held=hash_prefix("a" * 64))
    less = Candidate("less", credit=5, held=hash_prefix("b" * 64) + hash_prefix("c" * 64))
    assert choose(Policy.CACHE_AFFINITY, job, [less, most], waited=False) is most
    most.credit = 0

    assert choose(Policy.CACHE_AFFINITY, job, [less, most], waited=False) is None
    assert choose(Policy.CACHE_AFFINITY, job, [less, most], waited=True) is less
    assert "holds 50 of 150 bytes" in why(Policy.CACHE_AFFINITY, job, "less", [less, most])


def test_without_a_holder_cache_affinity_is_least_load() -> None:
    calm, busy = Candidate("calm", credit=2), Candidate("busy", credit=1, running=2)

    assert choose(Policy.CACHE_AFFINITY, facts(a=100), [busy, calm], waited=False) is calm


# ---------------------------------------------------------------------------------------------------- routes


def test_a_route_is_a_pattern_and_a_policy_and_the_first_that_matches_holds() -> None:
    routes = [parse_route("render.>=cache-affinity"), parse_route(">=sticky")]
    assert parse_route("job.submit.books.>=sticky").pattern == "job.assign.books.>"

    assert route_of(routes, "render.eu") == routes[0]
    assert route_of(routes, "session.7") == routes[1]
    assert route_of(routes[:1], "session.7") is None


@pytest.mark.parametrize("text", ["render.>", "render.>=fast", "=sticky", "a b=sticky", "render.>.x=sticky"])
def test_other_routes_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_route(text)
