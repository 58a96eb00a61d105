"""Places are dealt evenly, the group that waited longest first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.stores import common
from tasuki.stores.common import FairTurns


class Waiting:
    """The number of items of each group; `take` hands them out, and notes who was asked for how many."""

    def __init__(self, **items: int) -> None:
        self.left = Counter(items)
        self.asked: list[tuple[str, int]] = []

    def take(self, group: str, limit: int) -> list[str]:
        self.asked.append((group, limit))
        taken = min(limit, self.left[group])
        self.left[group] -= taken
        return [group] * taken

    def fill(self, turns: FairTurns, limit: int) -> Counter[str]:
        return Counter(turns.fill(list(self.left), limit, self.take))


def test_nothing_waits_and_nothing_is_dealt() -> None:
    assert FairTurns().fill([], 5, Waiting().take) == []


@pytest.mark.parametrize("limit", [0, -1])
def test_no_place_and_nobody_is_asked(limit: int) -> None:
    waiting = Waiting(a=1)

    assert waiting.fill(FairTurns(), limit) == Counter()
    assert waiting.asked == []


def test_groups_that_were_never_served_come_by_name() -> None:
    assert FairTurns().order(["b", "c", "a", "b"]) == ["a", "b", "c"]


def test_the_group_served_longest_ago_comes_first() -> None:
    turns = FairTurns()
    waiting = Waiting(a=9, b=9, c=9)
    for group in ("b", "a", "c"):
        turns.fill([group], 1, waiting.take)

    assert turns.order(["a", "b", "c"]) == ["b", "a", "c"]
    assert turns.order(["a", "b", "c", "new"]) == ["new", "b", "a", "c"]


def test_single_places_alternate() -> None:
    turns, waiting = FairTurns(), Waiting(a=9, b=3)

    served = [next(iter(waiting.fill(turns, 1))) for _ in range(8)]

    assert served == ["a", "b", "a", "b", "a", "b", "a", "a"]


def test_a_flood_leaves_the_others_their_share() -> None:
    assert Waiting(flood=100_000, b=2, c=1).fill(FairTurns(), 9) == Counter(flood=6, b=2, c=1)


def test_places_that_a_group_cannot_use_go_to_the_others() -> None:
    assert Waiting(a=1, b=1, c=50).fill(FairTurns(), 30) == Counter(a=1, b=1, c=28)


def test_the_place_left_over_goes_round() -> None:
    turns, waiting = FairTurns(), Waiting(a=50, b=50)

    shares = [waiting.fill(turns, 3) for _ in range(2)]

    assert shares == [Counter(a=2, b=1), Counter(a=1, b=2)]


def test_being_asked_is_not_being_served() -> None:
    turns = FairTurns()
    Waiting(a=0, b=1).fill(turns, 2)

    assert turns.order(["a", "b"]) == ["a", "b"]


def test_a_group_that_has_no_more_is_not_asked_again() -> None:
    waiting = Waiting(a=1, b=50)

    waiting.fill(FairTurns(), 10)

    assert [group for group, _ in waiting.asked].count("a") == 1


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "REMEMBERED_GROUPS_MAX", 2)
    turns, waiting = FairTurns(), Waiting(a=1, b=1, c=1)
    for group in "abc":
        turns.fill([group], 1, waiting.take)

    assert turns.order(["a", "b", "c"]) == ["a", "b", "c"]
    assert turns.order(["b", "c", "z"]) == ["z", "b", "c"]


groups = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 12), max_size=8)


@given(items=groups, limit=st.integers(0, 40))
def test_all_that_fits_is_dealt(items: dict[str, int], limit: int) -> None:
    shares = Waiting(**items).fill(FairTurns(), limit)

    assert shares.total() == min(limit, sum(items.values()))
    assert all(shares[group] <= items[group] for group in items)


@given(items=groups, limit=st.integers(0, 40))
def test_nobody_gets_two_more_than_one_who_still_waits(items: dict[str, int], limit: int) -> None:
    shares = Waiting(**items).fill(FairTurns(), limit)

    still_waiting = [shares[group] for group in items if shares[group] < items[group]]
    assert max(shares.values(), default=0) <= min(still_waiting, default=limit) + 1


@given(items=groups, limits=st.lists(st.integers(1, 3), min_size=30, max_size=30))
def test_every_group_that_waits_is_served_before_another_comes_round_again(items: dict[str, int], limits: list[int]) -> None:
    turns, waiting = FairTurns(), Waiting(**items)
    served: Counter[str] = Counter()
    for limit in limits:
        served += waiting.fill(turns, limit)
        still_waiting = [served[group] for group in items if waiting.left[group]]
        assert max(served.values(), default=0) <= min(still_waiting, default=10**9) + 2
