"""The questions of a worker that was cut off or detached."""

from __future__ import annotations

from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.core.scheduler.continuation import RENEWED_SLACK_S, AskLeaders, Command, Confirming, Continuation, Deny, may_promise
from tasuki.core.scheduler.thresholds import QUESTIONS_SLACK_S

ASKS_S = 3 * 0.3 + 0.3
FAR = 1_000.0


def looks(machine: Continuation, deadline: float, *, detached: bool, until: float) -> list[tuple[float, Command]]:
    """Look every 0.1 s from 0 on; return the commands with their times."""
    return [
        (step / 10, command)
        for step in range(int(until * 10))
        for command in machine.look({"a": deadline}, detached=detached, now=step / 10)
    ]


def test_a_worker_whose_leases_are_renewed_asks_nothing() -> None:
    assert looks(Continuation(), FAR, detached=False, until=5) == []


def test_a_worker_that_is_cut_off_asks_three_times_before_its_deadline_and_stops_nothing_itself() -> None:
    found = looks(Continuation(), 8.0, detached=False, until=9)

    assert [command for _, command in found] == [AskLeaders("a")] * 3
    assert 8.0 - ASKS_S - QUESTIONS_SLACK_S <= found[0][0] < found[-1][0] < 8.0 - 0.3


def test_a_worker_that_is_cut_off_asks_again_when_the_confirmed_deadline_nears() -> None:
    machine = Continuation()
    assert machine.look({"a": 1.0}, detached=False, now=0.0) == [AskLeaders("a")]
    assert machine.answered("a", True) == []

    assert machine.look({"a": 8.0}, detached=False, now=0.1) == []
    assert machine.look({"a": 8.0}, detached=False, now=7.0) == [AskLeaders("a")]


def test_a_detached_worker_is_confirming_before_it_asks_and_stops_what_nobody_confirms() -> None:
    machine = Continuation()
    assert looks(machine, FAR, detached=True, until=9) == [(0.0, Confirming("a", ASKS_S + LEASE_MARGIN_S))]

    assert machine.marked("a") == []
    found = looks(machine, FAR, detached=True, until=9)
    assert [command for _, command in found] == [*[AskLeaders("a")] * 3, Deny("a")]
    assert found[-1][0] <= ASKS_S + QUESTIONS_SLACK_S


def test_a_mark_that_is_late_holds_no_question_up_beyond_the_time_that_they_need_and_is_taken_away() -> None:
    machine = Continuation()
    found = looks(machine, 8.0, detached=True, until=9)
    assert [command for _, command in found[1:]] == [*[AskLeaders("a")] * 3, Deny("a")]
    assert 8.0 - ASKS_S - QUESTIONS_SLACK_S <= found[1][0] < found[-1][0] <= 8.0 - QUESTIONS_SLACK_S + 0.1

    assert machine.marked("a") == [], "it is being stopped"
    machine.answered("a", True)
    assert machine.marked("a") == [Confirming("a", 0.0)]


def test_a_worker_that_is_attached_again_before_it_was_answered_is_not_confirming_any_more() -> None:
    machine = Continuation()
    machine.look({"a": FAR}, detached=True, now=0.0)

    assert machine.look({"a": FAR}, detached=False, now=0.1) == [Confirming("a", 0.0)]
    assert machine.look({"a": FAR}, detached=False, now=0.2) == []


def test_a_detached_worker_goes_on_with_what_was_confirmed_and_asks_once() -> None:
    machine = Continuation()
    machine.look({"a": FAR}, detached=True, now=0.0)
    machine.marked("a")
    assert machine.look({"a": FAR}, detached=True, now=0.1) == [AskLeaders("a")]
    assert machine.answered("a", True) == []

    assert machine.look({"a": FAR}, detached=True, now=5.0) == []


def test_an_answer_that_another_attempt_is_the_current_one_stops_the_run_at_once() -> None:
    machine = Continuation()
    machine.look({"a": 1.0}, detached=False, now=0.0)

    assert machine.answered("a", False) == [Deny("a")]
    assert machine.answered("a", True) == [], "a late answer of another node changes nothing"


def test_a_leader_without_the_store_promises_only_leases_that_were_renewed_since_it_leads() -> None:
    since, now = 100.0, 106.0
    on_its_way = now - since - RENEWED_SLACK_S

    assert may_promise(7, since, renewed_ago_s=on_its_way - 0.1, now=now)
    assert not may_promise(7, since, renewed_ago_s=on_its_way, now=now), "perhaps before it led"
    assert not may_promise(0, since, renewed_ago_s=0.0, now=now), "it does not lead"
