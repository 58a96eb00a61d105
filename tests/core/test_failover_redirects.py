"""Dispatchers among the nodes of a plan: they are asked again, and not blamed, for those that they lead to."""

from __future__ import annotations

import pytest

from tasuki.core.failover.events import Drop, Fetch, JobStatusMissing, Post, Redirected, Remove, Uploaded
from tasuki.core.failover.nodes import Capacity, NodeState
from tasuki.core.failover.plan import LED_PAUSE_S, TRIES_MAX
from tasuki.errors import Unauthorized, Unavailable
from tests.core.failover_table import A, B, Table

NODE = "http://n1:7090"


def led(*names: str) -> Table:
    """The first of these is a dispatcher, and has led to a node."""
    table = Table(names or (A,))
    table.capacity[A] = Capacity(0, 9)
    table.begin()
    return table.hear(Redirected(table.last.ticket, NODE))


def standing(table: Table, node: str) -> NodeState:
    return next(line.standing for line in table.nodes.ranking(table.now) if line.node == node)


@pytest.mark.parametrize("how", ["lost", "refused", "silent"])
def test_a_dispatcher_is_asked_again_at_once_and_its_breaker_stays_closed(how: str) -> None:
    table = led()
    match how:
        case "lost":
            table.lost()
        case "refused":
            table.refused(503, "DRAINING")
        case "silent":
            table.later(10.0)
            assert table.all(Drop)

    assert (table.posted, standing(table, A)) == ([A, A], NodeState.FREE)


def test_the_pause_grows_until_the_dispatcher_has_found_out() -> None:
    table = led().lost()
    table.hear(Redirected(table.last.ticket, NODE)).lost()
    assert table.posted == [A, A]

    table.later(LED_PAUSE_S - 0.1)
    assert table.posted == [A, A]
    table.later(0.1)

    assert table.posted == [A, A, A]


def test_while_one_dispatcher_pauses_another_is_asked() -> None:
    table = led(A, B).lost()
    assert table.posted == [A, A]

    table.hear(Redirected(table.last.ticket, NODE)).lost()

    assert table.posted == [A, A, B]


def test_a_dispatcher_that_leads_to_nobody_who_answers_is_given_up_in_the_end() -> None:
    table = led().lost(f"no connection to {NODE}")
    for _ in range(TRIES_MAX):
        table.later(5.0)
        if not table.plan.over:
            table.hear(Redirected(table.last.ticket, NODE)).lost(f"no connection to {NODE}")

    assert isinstance(table.error, Unavailable)
    assert f"no connection to {NODE}" in str(table.error)
    assert (len(table.posted), standing(table, A)) == (TRIES_MAX, NodeState.FREE)


def test_a_full_node_is_not_a_full_dispatcher() -> None:
    table = led().refused(503, "FULL", retry_after_s=2.0)
    assert standing(table, A) is NodeState.FREE

    table.later(LED_PAUSE_S)

    assert table.posted == [A, A]


def test_a_final_refusal_is_the_word_of_the_node() -> None:
    table = led().refused(401, "UNAUTHORIZED")

    assert isinstance(table.error, Unauthorized)
    assert NODE in str(table.error)


def test_a_result_that_was_lost_on_its_way_from_that_node_is_no_failure_of_the_dispatcher() -> None:
    table = Table([A], known=True).begin().told(A, "done")
    assert isinstance(table.last, Fetch)

    table.hear(Redirected(table.last.ticket, NODE)).lost()

    assert isinstance(table.last, Post)
    assert standing(table, A) is NodeState.FREE


def test_a_run_that_was_left_there_is_stopped_through_the_dispatcher() -> None:
    table = led(A, B).lost().lost().saved()

    assert (table.posted, table.finish.node) == ([A, A, B], B)
    assert table.all(Remove) == [Remove(A)]


# ---------------------------------------------------------------------------------------------------- signs of life


def asked_in_vain(table: Table, *, alive: bool, seconds: float) -> Table:
    """Ask a node every second, which never says how the job stands."""
    table.hear(Uploaded(table.last.ticket))
    for _ in range(int(seconds)):
        table.later(1.0)
        table.hear(JobStatusMissing(table.last.ticket, "answered 503 UNAVAILABLE", alive=alive))
    return table


def test_a_dispatcher_that_cannot_say_how_the_job_stands_is_alive() -> None:
    table = asked_in_vain(Table([A, B]).begin(), alive=True, seconds=30)

    assert (table.posted, standing(table, A)) == ([A], NodeState.FREE)


def test_one_that_does_not_answer_is_not() -> None:
    table = asked_in_vain(Table([A, B]).begin(), alive=False, seconds=11)

    assert table.posted == [A, B]


def test_a_dispatchers_word_is_no_sign_of_life_of_the_node_that_it_led_to() -> None:
    table = asked_in_vain(led(), alive=True, seconds=11)

    assert (table.posted, standing(table, A)) == ([A, A], NodeState.FREE)


def test_what_a_node_keeps_is_known_from_its_last_answer() -> None:
    table = Table([A, B])
    table.capacity[A] = Capacity(0, 4, inputs=True)
    table.begin()

    assert [(table.nodes.capacity(node) or Capacity(0, 0)).inputs for node in (A, B)] == [True, False]
