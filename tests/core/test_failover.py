"""One job over several nodes: which comes next, what is final, when it is given up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.core.failover.agent_protocol import TIMEOUT_S
from tasuki.core.failover.events import (
    Ask,
    Drop,
    Fetch,
    Finish,
    GiveUp,
    Notify,
    Post,
    Redirected,
    Refusal,
    Refused,
    Remove,
    RequestLost,
    ResultPieceReceived,
    Uploaded,
    not_trusted,
)
from tasuki.core.failover.nodes import BreakerNote, Capacity, NodeState
from tasuki.core.failover.plan import TRIES_MAX
from tasuki.errors import Conflict, DeadlineExceeded, Forbidden, InvalidInput, JobFailed, TooLarge, Unauthorized, Unavailable
from tests.core.failover_table import INPUT, A, B, C, Table


def standing(table: Table, node: str) -> NodeState:
    return next(line.standing for line in table.nodes.ranking(table.now) if line.node == node)


# ---------------------------------------------------------------------------------------------------- the first node


def test_the_best_node_gets_the_job_and_its_answer_is_the_result() -> None:
    table = Table()
    table.capacity[B] = Capacity(0, 8)

    table.begin().saved()

    assert (table.posted, table.finish.node, table.finish.ended.outcome) == ([B], B, "succeeded")


def test_a_frozen_node_holds_up_nobody() -> None:
    table = Table()
    table.frozen = {A}
    table.begin()
    assert table.posted == []

    table.later(0.3)

    assert table.posted == [B]


def test_a_node_that_is_late_is_used_when_it_is_the_only_one() -> None:
    table = Table([A])
    table.frozen = {A}
    table.begin().later(1.0)
    assert table.posted == []

    table.nodes.seen(A, Capacity(0, 4), table.now)
    table.later(0.0)

    assert table.posted == [A]


def test_an_id_of_our_own_making_is_not_asked_for() -> None:
    assert Table().begin().all(Ask) == []


# ---------------------------------------------------------------------------------------------------- the next node


@pytest.mark.parametrize(
    "refusal",
    [Refusal(500, "INTERNAL"), Refusal(502), Refusal(503, "DRAINING"), Refusal(504), Refusal(404)],
    ids=lambda refusal: f"{refusal.status}{refusal.code}",
)
def test_an_answer_without_an_outcome_goes_to_the_next_node_at_once_and_opens_the_breaker(refusal: Refusal) -> None:
    table = Table().begin()

    table.hear(Refused(table.last.ticket, refusal))

    assert (table.posted, standing(table, A)) == ([A, B], NodeState.LEFT_OUT)


def test_a_lost_connection_goes_to_the_next_node_at_the_same_moment() -> None:
    table = Table().begin().later(5.0)
    before = table.now

    table.lost()

    assert (table.posted, table.now, standing(table, A)) == ([A, B], before, NodeState.LEFT_OUT)


def test_a_full_node_is_passed_over_without_opening_its_breaker() -> None:
    table = Table().begin().refused(503, "FULL", retry_after_s=1.0)

    assert (table.posted, standing(table, A)) == ([A, B], NodeState.FULL)


def test_when_all_are_full_the_job_waits_for_a_place() -> None:
    table = Table([A])
    table.capacity[A] = Capacity(4, 4)
    table.begin().later(60.0)
    assert (table.posted, table.plan.over) == ([], False)

    table.capacity[A] = Capacity(3, 4)
    table.later(1.0)

    assert table.posted == [A]


def test_a_full_node_that_says_otherwise_is_not_asked_in_a_hot_loop() -> None:
    table = Table([A]).begin().refused(503, "FULL", retry_after_s=1.0).later(0.9)
    assert table.posted == [A]

    table.later(0.2)

    assert table.posted == [A, A]


def test_a_time_limit_is_tried_on_another_node_and_is_no_failure_of_the_first() -> None:
    table = Table().begin().refused(504, "TIMED_OUT")

    assert (table.posted, standing(table, A)) == ([A, B], NodeState.FREE)


def test_a_node_that_stops_the_job_at_its_own_limit_is_heard_before_the_client_gives_up() -> None:
    """Both limits are as they are where nobody says otherwise."""
    table = Table(silent_s=2 * TIMEOUT_S).begin().later(TIMEOUT_S + 1.0)

    table.refused(504, "TIMED_OUT")

    assert (table.plan.over, table.posted) == (False, [A, B])


def test_nodes_that_we_do_not_trust_are_not_asked_again_and_are_no_worse_for_it() -> None:
    table = Table([A, B]).begin()

    for node in (A, B):
        table.hear(Refused(table.last.ticket, not_trusted(f"no TLS connection to {node}: why")))

    assert (table.posted, type(table.error)) == ([A, B], Unavailable)
    told = f"no TLS connection to {A}: why; no TLS connection to {B}: why"
    assert table.error.message == f"no node could run job 7f3c: {told}"
    assert [standing(table, node) for node in (A, B)] == [NodeState.FREE, NodeState.FREE]


def test_a_time_limit_on_every_node_is_the_outcome_with_the_last_ones_result() -> None:
    table = Table([A, B]).begin().refused(504, "TIMED_OUT").refused(504, "TIMED_OUT", error_code="TIMED_OUT")
    assert table.last == Fetch(table.last.ticket, B)

    table.saved()

    assert (table.finish.ended.outcome, table.finish.ticket) == ("timed_out", table.last.ticket)


# ---------------------------------------------------------------------------------------------------- final answers


def test_a_programs_failure_is_final_and_its_result_is_fetched() -> None:
    table = Table().begin().refused(500, "PROGRAM_FAILED", exit_code=3, error_code="EXIT_CODE")
    assert table.last == Fetch(table.last.ticket, A)

    table.saved()

    ended = table.finish.ended
    assert (table.posted, ended.outcome, ended.exit_code) == ([A], "failed", 3)
    assert standing(table, A) is NodeState.FREE


def test_a_programs_failure_is_told_although_its_result_is_lost() -> None:
    table = Table().begin().refused(500, "PROGRAM_FAILED", exit_code=3).lost()

    assert (table.finish.ended.exit_code, table.finish.ticket, table.posted) == (3, None, [A])


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "INVALID_PAYLOAD", InvalidInput),
        (409, "CONFLICT", Conflict),
    ],
)
def test_what_no_node_would_answer_otherwise_is_final(status: int, code: str, kind: type[Exception]) -> None:
    table = Table().begin().refused(status, code, message="because")

    assert isinstance(table.error, kind)
    assert (table.posted, standing(table, A)) == ([A], NodeState.FREE)


def test_a_strangers_refusal_is_not_final() -> None:
    assert Table().begin().refused(400).posted == [A, B]


# ---------------------------------------------------------------------------------------------------- not at this node

NOT_HERE = [
    (400, "EXEC_NOT_ALLOWED", InvalidInput),
    (401, "UNAUTHORIZED", Unauthorized),
    (403, "FORBIDDEN", Forbidden),
    (413, "TOO_LARGE", TooLarge),
    (413, "", TooLarge),
    (500, "PROGRAM_NOT_FOUND", Unavailable),
    (503, "DISK_FULL", Unavailable),
]


@pytest.mark.parametrize(("status", "code", "kind"), NOT_HERE)
def test_what_one_node_cannot_do_goes_to_the_next_and_opens_no_breaker(status: int, code: str, kind: type[Exception]) -> None:
    table = Table([A, B]).begin().refused(status, code)

    assert (table.posted, standing(table, A)) == ([A, B], NodeState.FREE)


@pytest.mark.parametrize(("status", "code", "kind"), NOT_HERE)
def test_what_no_node_can_do_ends_at_once_with_the_words_of_each(status: int, code: str, kind: type[Exception]) -> None:
    table = Table([A, B]).begin().refused(status, code, message="of a").refused(status, code, message="of b")

    assert (type(table.error), table.posted) == (kind, [A, B])
    assert f"{A}: answered {status}" in table.error.message
    assert "of a; " in table.error.message
    assert "of b" in table.error.message


def test_a_full_node_is_waited_for_when_the_other_one_refuses_the_token() -> None:
    table = Table([A, B])
    table.capacity[A] = Capacity(4, 4)
    table.begin().refused(401, "UNAUTHORIZED").later(60.0)
    assert (table.posted, table.plan.over) == ([B], False)

    table.capacity[A] = Capacity(3, 4)
    table.later(1.0)

    assert table.posted == [B, A]


def test_nodes_that_all_refused_the_token_when_they_were_looked_at_are_not_sent_anything() -> None:
    table = Table([A, B])
    table.refusing = {A, B}

    table.begin()

    assert (type(table.error), table.posted) == (Unauthorized, [])
    assert f"{B}: answered 401 UNAUTHORIZED" in table.error.message


def test_a_node_that_refuses_the_token_is_named_when_the_other_is_lost_for_good() -> None:
    table = Table([A, B])
    table.refusing, table.dead = {A}, {B}

    table.begin().later(6.0)

    assert isinstance(table.error, Unavailable)
    assert "answered 401 UNAUTHORIZED" in table.error.message
    assert f"{B}: connection refused" in table.error.message


def test_a_redirect_that_leads_back_is_told_with_its_node() -> None:
    table = Table([A]).begin()
    while not table.plan.over:
        table.refused(307, message=f"it leads to {A}/run/7f3c").later(2.0)

    assert f"{A}: answered 307" in table.error.message


# ---------------------------------------------------------------------------------------------------- 423, and ids that are known


def test_a_job_that_runs_there_already_is_followed_to_its_result() -> None:
    table = Table().begin().refused(423, "RUNNING").later(0.2).told(A, "queued").later(0.5).told(A, "running")
    table.later(1.0).told(A, "done")
    assert table.last == Fetch(table.last.ticket, A)

    table.saved()

    assert (table.posted, table.finish.node) == ([A], A)


def test_a_followed_node_that_dies_makes_room_for_the_next() -> None:
    table = Table().begin().refused(423, "RUNNING").later(0.2).untold(A, gone=True)

    assert table.posted == [A, B]


def test_a_followed_job_that_was_interrupted_is_sent_again() -> None:
    table = Table([A]).begin().refused(423, "RUNNING").later(0.2).told(A, "interrupted")

    assert table.posted == [A, A]


def test_a_followed_job_that_failed_is_the_outcome() -> None:
    table = Table().begin().refused(423, "RUNNING").later(0.2).told(A, "failed", exit_code=7).saved()

    assert (table.finish.ended.outcome, table.finish.ended.exit_code) == ("failed", 7)


def test_a_followed_node_that_does_not_answer_at_once_is_not_lost() -> None:
    table = Table().begin().refused(423, "RUNNING").later(0.2).untold(A, gone=False)

    assert table.posted == [A]


def test_running_but_unknown_is_not_sent_in_a_hot_loop() -> None:
    table = Table([A]).begin().refused(423, "RUNNING").later(0.2).told(A, None)
    assert table.posted == [A]

    table.later(1.0)

    assert table.posted == [A, A]


def test_an_id_of_the_callers_is_asked_for_at_all_nodes_and_a_result_is_fetched_without_an_upload() -> None:
    table = Table(known=True).begin()
    assert {ask.node for ask in table.all(Ask)} == {A, B, C}

    table.told(B, "done")

    assert (table.posted, table.last) == ([], Fetch(table.last.ticket, B))


def test_a_run_that_is_under_way_is_taken_up() -> None:
    table = Table(known=True).begin().told(A, None).told(B, "running").told(C, None)
    assert table.posted == []

    table.later(0.2).told(B, "done").saved()

    assert (table.posted, table.finish.node) == ([], B)


def test_who_does_not_say_whether_it_has_the_job_is_waited_for_as_long_as_a_question_may_take() -> None:
    table = Table(known=True).begin().told(A, None).told(B, None).later(1.9)
    assert table.posted == []

    table.later(0.1)

    assert table.posted == [A]


def test_a_run_that_a_slow_node_tells_of_is_taken_up() -> None:
    table = Table(known=True).begin().told(A, None).told(B, None).later(1.5).told(C, "running")
    table.later(0.2).told(C, "done").saved()

    assert (table.posted, table.finish.node) == ([], C)


def test_with_a_run_in_sight_the_others_are_waited_for_only_a_moment() -> None:
    table = Table(known=True).begin().told(A, "running").told(B, None).later(0.4)

    assert [ask.node for ask in table.all(Ask)][3:] == [A]


def test_nobody_waits_for_a_node_that_is_left_out() -> None:
    table = Table(known=True)
    table.nodes.failed(C, "earlier", table.now)

    table.begin().told(A, None).told(B, None).later(0.3)

    assert table.posted == [A]


def test_a_second_run_that_is_told_of_late_is_stopped_in_the_end() -> None:
    table = Table(known=True).begin().told(A, None).told(B, None).later(2.0).told(C, "running").saved()

    assert (table.posted, table.finish.node, table.all(Remove)) == ([A], A, [Remove(C)])


def test_a_result_that_turns_up_late_is_fetched_and_ends_the_run() -> None:
    table = Table(known=True).begin().told(A, None).told(B, None).later(2.0)
    assert table.posted == [A]

    table.told(C, "done").saved()

    assert (table.finish.node, table.all(Remove)) == (C, [Remove(A)])


@pytest.mark.parametrize(("state", "input"), [("running", INPUT), ("done", "2" * 64)])
def test_a_run_or_another_input_that_turns_up_late_changes_nothing(state: str, input: str) -> None:
    table = Table(known=True).begin().told(A, None).told(B, None).later(2.0)
    count = len(table.said)

    table.told(C, state, input)

    assert (table.said[count:], table.plan.over) == ([], False)


@pytest.mark.parametrize("state", ["failed", "timed_out", "interrupted"])
def test_an_id_that_did_not_end_well_is_run_again(state: str) -> None:
    table = Table([A], known=True).begin().told(A, state)

    assert table.posted == [A]


@pytest.mark.parametrize("state", ["done", "running"])
def test_an_id_that_a_node_has_with_another_input_is_a_conflict(state: str) -> None:
    table = Table([A], known=True).begin().told(A, state, input="2" * 64)

    assert isinstance(table.error, Conflict)
    assert table.posted == []


def test_a_canceled_job_is_looked_for_elsewhere_before_it_is_given_up() -> None:
    table = Table([A, B]).begin().refused(409, "CANCELED").told(A, None).told(B, "done")
    assert table.last == Fetch(table.last.ticket, B)

    other = Table([A, B]).begin().refused(409, "CANCELED").told(A, None).told(B, None)
    assert isinstance(other.error, JobFailed)


# ---------------------------------------------------------------------------------------------------- silence


def test_a_node_that_falls_silent_is_left_and_its_breaker_opens() -> None:
    table = Table().begin().later(9.0)
    assert table.posted == [A]

    table.later(1.5)

    assert (table.posted, standing(table, A)) == ([A, B], NodeState.LEFT_OUT)
    assert [drop.ticket for drop in table.all(Drop)] == [table.all(Post)[0].ticket]


@pytest.mark.parametrize("state", ["running", "queued"])
def test_a_node_that_answers_questions_may_take_its_time(state: str) -> None:
    table = Table().begin()
    table.hear(Uploaded(table.last.ticket))
    for _ in range(100):
        table.later(1.0).told(A, state)

    assert (table.posted, table.plan.over) == ([A], False)


def test_a_result_that_keeps_coming_is_not_silence() -> None:
    table = Table().begin()
    for _ in range(30):
        table.later(1.0).hear(ResultPieceReceived(table.last.ticket))

    assert table.posted == [A]


def test_a_request_whose_answer_was_given_long_ago_waits_on_a_dead_connection() -> None:
    table = Table([A]).begin().hear(Uploaded(1))
    for _ in range(3):
        table.later(1.0).told(A, "done")
    assert [drop.ticket for drop in table.all(Drop)] == [1]


# ---------------------------------------------------------------------------------------------------- breakers


def test_a_node_that_is_left_out_is_not_used_while_there_is_another() -> None:
    table = Table([A, B])
    table.nodes.failed(A, "earlier", table.now)

    table.begin().lost()

    assert table.posted == [B]


def test_with_nobody_else_three_good_checks_are_enough() -> None:
    table = Table([A]).begin().lost()
    assert table.posted == [A]

    table.later(0.4)
    assert table.posted == [A]
    table.later(0.6)

    assert table.posted == [A, A]


@pytest.mark.parametrize("run_s", [0.5, 5.1, 7.0, 9.9])
def test_a_node_that_is_lost_in_the_middle_of_a_run_is_looked_at_soon_however_long_ago_the_last_look_was(run_s: float) -> None:
    table = Table([A]).begin().later(run_s)

    table.lost().later(1.5)

    assert table.posted == [A, A]


def test_a_node_that_never_answers_though_it_is_well_is_not_tried_for_ever() -> None:
    table = Table([A]).begin()
    while not table.plan.over:
        table.lost().later(2.0)

    assert (len(table.posted), type(table.error)) == (TRIES_MAX, Unavailable)


# ---------------------------------------------------------------------------------------------------- giving up


def test_if_nobody_can_be_reached_the_error_names_what_each_answered() -> None:
    table = Table([A, B])
    table.dead, table.frozen = {A}, {B}
    table.begin().frozen_looks_time_out().later(6.0)

    assert table.error.message == f"no node could run job 7f3c: {A}: connection refused; {B}: did not answer within 2 s"


def test_a_node_that_comes_up_while_nobody_is_there_gets_the_job() -> None:
    table = Table([A])
    table.dead = {A}
    table.begin().later(3.0)

    table.dead = set()
    table.later(1.5)

    assert table.posted == [A]


def test_the_overall_limit_ends_it_and_says_where_the_job_may_still_run() -> None:
    table = Table(limit_s=30.0).begin()
    while not table.plan.over:
        table.later(1.0)
        if not table.plan.over:
            table.told(A, "running")

    assert isinstance(table.error, DeadlineExceeded)
    assert f"may still run at {A}" in table.error.message
    assert table.all(Remove) == []


def test_nothing_is_said_after_the_end() -> None:
    table = Table().begin().saved()
    count = len(table.said)

    table.lost().later(60.0)

    assert len(table.said) == count


# ---------------------------------------------------------------------------------------------------- hedging


def test_without_an_answer_the_job_also_goes_to_a_second_node_and_the_first_result_wins() -> None:
    table = Table(hedge_s=2.0).begin().later(1.9)
    assert table.posted == [A]
    table.later(0.2)
    first, second = table.all(Post)

    table.saved(second.ticket)

    assert (table.posted, table.finish.node) == ([A, B], B)
    assert (table.all(Drop), table.all(Remove)) == ([Drop(first.ticket)], [Remove(A)])


def test_a_result_that_is_coming_is_not_hedged() -> None:
    table = Table(hedge_s=2.0).begin().later(1.0).hear(ResultPieceReceived(1)).later(5.0)

    assert table.posted == [A]


def test_a_refusal_of_the_second_node_does_not_end_the_first() -> None:
    table = Table([A, B], hedge_s=1.0).begin().later(1.1).refused(409, "CONFLICT")
    assert not table.plan.over

    table.saved(1)

    assert table.finish.node == A


def test_a_refusal_of_the_second_node_counts_once_the_first_is_lost() -> None:
    table = Table([A, B], hedge_s=1.0).begin().later(1.1).refused(409, "CONFLICT").lost(ticket=1)

    assert isinstance(table.error, Conflict)


def test_a_node_that_was_left_is_told_to_stop_when_another_has_the_result() -> None:
    table = Table().begin().lost().saved()

    assert table.all(Remove) == [Remove(A)]


# ---------------------------------------------------------------------------------------------------- at random

ANSWERS = ["saved", "lost", "full", "running", "timed_out", "program_failed", "internal", "silence", "conflict", "led"]


@given(
    answers=st.lists(st.tuples(st.sampled_from(ANSWERS), st.floats(0.0, 20.0)), max_size=40),
    hedge=st.sampled_from([None, 1.0, 5.0]),
    known=st.booleans(),
    dead=st.sets(st.sampled_from([A, B, C])),
)
def test_every_plan_ends_in_time_and_keeps_its_rules(
    answers: list[tuple[str, float]], hedge: float | None, known: bool, dead: set[str]
) -> None:
    table = Table(hedge_s=hedge, known=known, limit_s=300.0)
    table.dead = dead
    began = table.now
    table.begin()
    running: set[int] = set()
    seen = 0

    def look_over() -> None:
        nonlocal seen
        for command in table.said[seen:]:
            match command:
                case Post() | Fetch():
                    running.add(command.ticket)
                case Drop():
                    running.discard(command.ticket)
                case Finish() | GiveUp():
                    running.clear()
        seen = len(table.said)
        assert len(running) <= (1 if hedge is None else 2)

    failed_program = False
    for answer, pause_s in answers:
        look_over()
        if table.plan.over:
            break
        posts = len(table.posted)
        if running:
            ticket = min(running)
            running.discard(ticket)
            match answer:
                case "saved":
                    table.saved(ticket)
                    assert table.finish.ticket == ticket
                case "lost":
                    table.hear(RequestLost(ticket, "x"))
                case "silence":
                    running.add(ticket)
                case "led":
                    running.add(ticket)
                    table.hear(Redirected(ticket, "http://led:7090"))
                case _:
                    status, code = {
                        "full": (503, "FULL"),
                        "running": (423, "RUNNING"),
                        "timed_out": (504, "TIMED_OUT"),
                        "program_failed": (500, "PROGRAM_FAILED"),
                        "internal": (500, "INTERNAL"),
                        "conflict": (409, "CONFLICT"),
                    }[answer]
                    table.hear(Refused(ticket, Refusal(status, code)))
                    if answer == "program_failed" and hedge is None:
                        failed_program = True
        assert not failed_program or len(table.posted) == posts, "a failed program was sent to another node"
        look_over()
        table.later(pause_s)
    while not table.plan.over:
        table.later(5.0)
        look_over()

    assert table.now - began <= 300.0 + 25.0
    assert len(table.all(Finish)) + len(table.all(GiveUp)) == 1


# ---------------------------------------------------------------------------------------------------- the bound on requests


def left_out_but_steady(**job: Any) -> Table:
    table = Table([A], **job)
    table.nodes.recall({A: BreakerNote(failures=1, good_checks=3, left_out_s=25.0, reason="no connection")}, table.now)
    return table


def posts_in(table: Table, seconds: float, answer: Callable[[], object]) -> int:
    """Return how often the job is posted, if each post is answered like this at once."""
    before, end = len(table.posted), table.now + seconds
    while table.now < end:
        if table.plan._runs:
            answer()
        else:
            table.later(0.05)
    return len(table.posted) - before


def test_a_full_node_is_waited_for_also_while_its_breaker_is_open() -> None:
    table = left_out_but_steady()
    table.capacity[A] = Capacity(1, 1)

    table.begin().later(20.0)

    assert table.posted == []
    assert [note.text for note in table.all(Notify)] == ["all nodes are full; waiting for a free slot"]
    table.capacity[A] = Capacity(0, 1)
    assert table.later(1.0).posted == [A]


def test_a_node_that_is_full_whatever_it_reports_is_asked_with_growing_pauses() -> None:
    for table in (Table([A]), left_out_but_steady()):
        table.begin()
        full = partial(table.refused, 503, "FULL", message="all slots are taken", retry_after_s=1.0)

        first, later = posts_in(table, 10.0, full), posts_in(table, 40.0, full)

        assert (first <= 5, later <= 10) == (True, True)
        notes = [note.text for note in table.all(Notify)]
        assert f"{A}: answered 503 FULL: all slots are taken" in notes
        assert len(notes) <= 2


def test_a_node_that_contradicts_itself_is_not_sent_upload_after_upload() -> None:
    table = Table([A]).begin()

    def contradict() -> None:
        if table.all(Post)[-1].ticket in table.plan._runs:
            table.refused(423, "RUNNING")
        else:
            table.later(0.15).told(A, "interrupted")

    assert posts_in(table, 20.0, contradict) <= 10


def test_nodes_that_say_the_same_are_named_together() -> None:
    table = Table()
    table.refusing = {A, B, C}

    table.begin().later(6.0)

    assert str(table.error).count("UNAUTHORIZED") == 1
    assert f"{A}, {B}, {C}: answered 401" in str(table.error)
