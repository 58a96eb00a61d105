"""Suspects, and who asks first."""

from __future__ import annotations

import pytest

from tasuki.core.scheduler.sub_leader import DEFERENCE_S, LeaderCandidate, Suspects, deference_s

ELSEWHERE, SAME_NODE, NO_SUB_LEADER = LeaderCandidate("n2", True), LeaderCandidate("n1", True), LeaderCandidate("n2", False)


@pytest.mark.parametrize(
    ("own", "others", "waits"),
    [
        (ELSEWHERE, [ELSEWHERE, SAME_NODE, NO_SUB_LEADER], 0),
        (SAME_NODE, [ELSEWHERE, ELSEWHERE, NO_SUB_LEADER], 1),
        (NO_SUB_LEADER, [ELSEWHERE, SAME_NODE, NO_SUB_LEADER], 2),
        (NO_SUB_LEADER, [SAME_NODE], 1),
        (SAME_NODE, [NO_SUB_LEADER], 0),
        (NO_SUB_LEADER, [], 0),
    ],
)
def test_a_member_waits_for_each_better_rank_that_somebody_has(
    own: LeaderCandidate, others: list[LeaderCandidate], waits: int
) -> None:
    assert deference_s("n1", own, others) == waits * DEFERENCE_S


def test_a_member_is_dead_after_several_calls_in_a_row_without_an_answer() -> None:
    suspects = Suspects()
    for number in (1, 2, 3):
        assert suspects.to_ask({"a": 9.0, "b": 1.0}, 5.0) == ["a"]
        assert suspects.to_ask({"a": 9.0}, 5.0) == [], "the answer is still out"
        assert suspects.answered("a", False, 3) == (number == 3)


@pytest.mark.parametrize("seen", ["an answer", "a heartbeat"])
def test_a_sign_of_life_begins_the_count_anew(seen: str) -> None:
    suspects = Suspects()
    for _ in range(2):
        suspects.to_ask({"a": 9.0}, 5.0)
        suspects.answered("a", False, 3)

    if seen == "an answer":
        suspects.to_ask({"a": 9.0}, 5.0)
        assert not suspects.answered("a", True, 3)
    else:
        suspects.to_ask({"a": 0.5}, 5.0)

    suspects.to_ask({"a": 9.0}, 5.0)
    assert not suspects.answered("a", False, 3)


def test_who_cannot_tell_does_not_count() -> None:
    suspects = Suspects()
    for _ in range(9):
        suspects.to_ask({"a": 9.0}, 5.0)
        assert not suspects.answered("a", None, 3)
