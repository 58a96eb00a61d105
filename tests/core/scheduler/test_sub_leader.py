"""Suspects, and who stands first."""

from __future__ import annotations

import pytest

from tasuki.core.scheduler.sub_leader import DEFERENCE_S, SAME_NODE_DEFERENCE_S, Suspects, deference_s


@pytest.mark.parametrize(
    ("sub_leads", "node_id", "waits_s"),
    [(True, "n2", 0.0), (True, "n1", SAME_NODE_DEFERENCE_S), (False, "n1", DEFERENCE_S), (False, "n2", DEFERENCE_S)],
)
def test_the_sub_leader_of_another_node_stands_first(sub_leads: bool, node_id: str, waits_s: float) -> None:
    assert deference_s(sub_leads=sub_leads, node_id=node_id, leader_node="n1") == waits_s


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
