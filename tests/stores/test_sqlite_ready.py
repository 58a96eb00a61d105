"""Finding what is ready: the ranges that patterns become, and groups with very many subjects."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tasuki.core.job import JobSpec, body_hash
from tasuki.core.store_messages import OWN_PROGRAMS, LeaseRequest, Offer, Submission, Takes
from tasuki.core.subject import group_of, matches
from tasuki.stores.sql.lease import EXECS_AT_ONCE, GROUPS_AT_ONCE, IN_VAIN_MAX, SUBJECTS_AT_ONCE, region_of
from tasuki.stores.sql.store import SqlStore
from tests.support.sqlite_files import memory_folder, with_tables

MANY = 3 * SUBJECTS_AT_ONCE + 7
MANY_GROUPS = 2 * GROUPS_AT_ONCE + 88
STEPS = 1_000

tokens = st.sampled_from(["job", "assign", "submit", "a", "b", "a-b", "ab", "é"])
subjects = st.lists(tokens, min_size=1, max_size=4).map(".".join)
patterns = st.builds(
    lambda head, tail: ".".join([*head, *tail]),
    st.lists(st.one_of(tokens, st.just("*")), min_size=1, max_size=4),
    st.sampled_from([[], [">"]]),
) | st.just(">")


@pytest.fixture
def store() -> Iterator[SqlStore]:
    with tempfile.TemporaryDirectory(prefix="tasuki-ready-", dir=memory_folder()) as folder:
        store = SqlStore.open_sqlite(with_tables(Path(folder) / "tasuki.sqlite3"))
        yield store
        store.close()


def add(store: SqlStore, *subjects: str, prefix: str = "") -> None:
    specs = [JobSpec(job_id=f"{prefix}{subject}", subject=subject) for subject in subjects]
    store.submit([Submission(spec, "alice", body_hash(spec)) for spec in specs])


def lease(store: SqlStore, limit: int, *patterns: str, worker_id: str = "w1", live: Sequence[str] = ()) -> list[str]:
    request = LeaseRequest(
        worker_id=worker_id,
        incarnation=f"{worker_id}/1",
        patterns=patterns or (">",),
        limit=limit,
        live_workers=dict.fromkeys(live, (">",)),
    )
    [grants] = store.lease([request])
    return [grant.job_id for grant in grants]


@contextmanager
def counted_steps(store: SqlStore) -> Iterator[list[None]]:
    """One entry for every STEPS instructions that SQLite did in the block."""
    seen: list[None] = []
    store._database.connection.set_progress_handler(lambda: seen.append(None), STEPS)
    yield seen
    store._database.connection.set_progress_handler(None, 0)


@given(patterns, subjects)
@example("job.assign.>", "job.assign.a.b")
@example("job.*.a", "job.assign.a")
@example("job.assign", "job.assign")
@example("a.>", "a-b.c")
def test_every_subject_that_matches_lies_in_the_patterns_range(pattern: str, subject: str) -> None:
    group, low, high, needs_match = region_of(pattern)
    in_range = low <= subject < high and group in (None, group_of(subject))

    if matches(pattern, subject):
        assert in_range
    elif in_range:
        assert needs_match


def test_all_subjects_are_leased_however_many_there_are(store: SqlStore) -> None:
    names = [f"render.s{number:05}" for number in range(MANY)]
    add(store, *names)

    leased = lease(store, MANY)

    assert sorted(leased) == names


def test_a_subject_far_down_the_alphabet_is_not_starved_by_the_first_ones(store: SqlStore) -> None:
    names = [f"render.s{number:05}" for number in range(MANY)]
    add(store, *names)
    leased: list[str] = []

    for turn in range(MANY):  # the first half of the names always has work: a job that was leased is followed by a new one
        leased += lease(store, 1)
        if leased[-1] == names[-1]:
            break
        subject = leased[-1][leased[-1].index("render") :]
        if subject in names[: MANY // 2]:
            add(store, subject, prefix=f"{turn}-")

    assert leased[-1] == names[-1]


def test_the_only_match_is_found_behind_any_number_of_others(store: SqlStore) -> None:
    add(store, *(f"render.a{number:05}.x" for number in range(MANY)), "render.z.y")

    assert lease(store, 1, "render.*.y") == ["render.z.y"]


def test_a_worker_finds_its_own_subject_behind_those_of_other_live_workers(store: SqlStore) -> None:
    workers = [f"w{number:05}" for number in range(MANY)]
    add(store, *(f"render.{worker}" for worker in workers))

    mine = lease(store, 5, worker_id=workers[-1], live=workers)

    assert mine == [f"render.{workers[-1]}"]


def test_two_patterns_on_one_group_share_one_order_of_age(store: SqlStore) -> None:
    add(store, "render.b.1", "render.a.1", "render.b.2", "render.c.1", "render.a.2")

    assert lease(store, 4, "render.a.*", "render.b.>", "render.b.*") == ["render.b.1", "render.a.1", "render.b.2", "render.a.2"]


def test_a_flood_of_subjects_in_one_group_costs_another_groups_lease_a_bounded_number_of_steps(store: SqlStore) -> None:
    add(store, *(f"flood.s{number:05}" for number in range(20 * SUBJECTS_AT_ONCE)), "calm.x")

    with counted_steps(store) as steps:
        leased = lease(store, 2)

    assert "calm.x" in leased
    assert len(steps) * STEPS < 20 * SUBJECTS_AT_ONCE * 10  # all subjects would take 30 instructions each, and more


def test_all_groups_are_leased_however_many_there_are(store: SqlStore) -> None:
    names = [f"g{number:05}.x" for number in range(MANY_GROUPS)]
    add(store, *names)

    leased = lease(store, MANY_GROUPS)

    assert sorted(leased) == names


def test_more_groups_than_one_request_looks_at_take_turns(store: SqlStore) -> None:
    names = [f"g{number:05}.x" for number in range(MANY_GROUPS)]
    for prefix in ("", "b-", "c-", "d-"):
        add(store, *names, prefix=prefix)

    leased = [job_id for _ in range(MANY_GROUPS // GROUPS_AT_ONCE + 1) for job_id in lease(store, GROUPS_AT_ONCE)]

    assert {job_id.rpartition("-")[2] for job_id in leased} == set(names)


def test_the_only_group_with_a_match_is_found_behind_any_number_of_others(store: SqlStore) -> None:
    add(store, *(f"g{number:05}.x" for number in range(MANY_GROUPS)), "z.y")

    found = [lease(store, 1, "*.y") for _ in range(3)]  # each looks at a bounded number, and the next one goes on

    assert found.count(["z.y"]) == 1


def test_a_lease_costs_a_bounded_number_of_steps_however_many_groups_wait(store: SqlStore) -> None:
    add(store, *(f"g{number:05}.x" for number in range(20 * GROUPS_AT_ONCE)))

    with counted_steps(store) as steps:
        leased = lease(store, 1)

    assert len(leased) == 1
    assert len(steps) * STEPS < 20 * GROUPS_AT_ONCE * 5  # all groups would take 20 instructions each, and more


@pytest.mark.parametrize(
    ("waiting", "pattern", "takes"),
    [("render.{}.gpu", "render.*.cpu", Takes.ANY), ("math.{}", ">", Takes.COMMANDS), ("g{}.x", "*.us", Takes.ANY)],
    ids=["a wildcard before the end", "another kind", "any group"],
)
def test_a_worker_that_matches_nothing_costs_the_same_however_many_subjects_wait(
    store: SqlStore, waiting: str, pattern: str, takes: Takes
) -> None:
    idle = LeaseRequest(worker_id="w1", incarnation="w1/1", patterns=(pattern,), offer=Offer(takes))
    costs: list[int] = []

    for first in (0, 2 * IN_VAIN_MAX):
        add(store, *(waiting.format(number) for number in range(first, 2 * first + 2 * IN_VAIN_MAX)))
        with counted_steps(store) as steps:
            granted = store.lease([idle] * 3)
        assert granted == [[], [], []]
        costs.append(len(steps))

    assert costs[1] < 2 * costs[0]


def test_a_worker_that_matches_few_of_very_many_subjects_asks_for_a_bounded_number_at_a_time(store: SqlStore) -> None:
    few = [f"render.{number:05}.few" for number in range(0, 8 * IN_VAIN_MAX, 2 * IN_VAIN_MAX)]
    costs: list[int] = []
    found: list[str] = []

    add(store, *(f"render.{number:05}.gpu" for number in range(2 * IN_VAIN_MAX)))
    with counted_steps(store) as in_vain:
        assert lease(store, 1, "render.*.few") == []
    add(store, *few, *(f"render.{number:05}.gpu" for number in range(2 * IN_VAIN_MAX, 8 * IN_VAIN_MAX)))
    while len(found) < len(few):
        with counted_steps(store) as steps:
            found += lease(store, 1, "render.*.few")
        costs.append(len(steps))
        assert len(costs) < 4 * 8 + len(few)

    assert sorted(found) == few
    assert max(costs) < 2 * len(in_vain)
    add(store, few[0], prefix="again-")
    with counted_steps(store) as named:
        assert lease(store, 1, few[0]) == [f"again-{few[0]}"]
    assert len(named) < len(in_vain) / 4


def test_patterns_that_begin_with_a_wildcard_cost_the_same_however_many_they_are(store: SqlStore) -> None:
    add(store, *(f"g{number % 50}.x{number}" for number in range(3_000)))
    costs: list[int] = []

    for count in (2, 200):
        with counted_steps(store) as steps:
            assert lease(store, 4, *(f"*.q{number}" for number in range(count))) == []
        costs.append(len(steps))
    add(store, "a.q150", "a.q200", "a.b.q7")

    assert costs[1] < 2 * costs[0]
    assert lease(store, 4, *(f"*.q{number}" for number in range(200))) == ["a.q150"]


def test_a_page_of_queues_costs_the_same_however_many_lie_before_it(store: SqlStore) -> None:
    add(store, *(f"render.s{number:05}" for number in range(4_000)))
    costs: list[int] = []
    place = None

    for _ in range(15):
        with counted_steps(store) as steps:
            place = store.ready_queues(place, limit=256).place
        costs.append(len(steps))

    assert max(costs) <= 2 * costs[0]


def test_programs_that_are_left_to_others_keep_no_other_program_from_its_turn(store: SqlStore) -> None:
    """However they lie in the subjects of a group: a worker that runs every program goes on behind what it has looked at."""
    half = EXECS_AT_ONCE // 2
    places = [("g.a", f"a{number:03}") for number in range(half + 20)] + [("g.b", f"z{number:03}") for number in range(half + 50)]
    specs = [JobSpec(job_id=exec_, subject=subject, exec=exec_) for subject, exec_ in places]
    store.submit([Submission(spec, "uid:1000", body_hash(spec)) for spec in specs])
    own = [exec_ for subject, exec_ in places[half : half + 20]]
    request = LeaseRequest(
        worker_id="w1",
        incarnation="w1/1",
        patterns=("g.>",),
        limit=20,
        offer=Offer(Takes.OWN, (OWN_PROGRAMS,)),
        named_elsewhere={exec_: (">",) for _, exec_ in places if exec_ not in own},
    )

    assert [grant.job_id for _ in range(4) for grants in store.lease([request]) for grant in grants] == own
