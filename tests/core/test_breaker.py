"""The circuit breaker of one node: left out after a failure, back only when its time is over and its health is steady."""

from hypothesis import given
from hypothesis import strategies as st

from tasuki.core.failover.nodes import DEFAULT_RULES, Breaker, BreakerNote, BreakerRules, BreakerState

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


def failed_at(when: float, rules: BreakerRules = DEFAULT_RULES) -> Breaker:
    breaker = Breaker(rules)
    breaker.failed(when, "connection refused")
    return breaker


def checked(breaker: Breaker, *times: float) -> Breaker:
    for when in times:
        breaker.checked(when)
    return breaker


def test_a_new_node_is_in_use() -> None:
    assert Breaker().state(0.0) is CLOSED


def test_a_failing_node_is_left_out_for_30_seconds() -> None:
    breaker = failed_at(100.0)

    assert [breaker.state(when) for when in (100.0, 129.9, 130.0)] == [OPEN, OPEN, HALF_OPEN]
    assert breaker.left_out_s(110.0) == 20.0


def test_time_alone_does_not_bring_it_back() -> None:
    assert failed_at(0.0).state(10_000.0) is HALF_OPEN


def test_three_good_checks_after_its_time_bring_it_back() -> None:
    breaker = checked(failed_at(0.0), 31.0, 32.0)
    assert breaker.state(32.0) is HALF_OPEN

    breaker.checked(33.0)

    assert breaker.state(33.0) is CLOSED


def test_good_checks_do_not_shorten_the_time() -> None:
    breaker = checked(failed_at(0.0), 1.0, 2.0, 3.0)

    assert (breaker.state(29.0), breaker.steady, breaker.state(30.0)) == (OPEN, True, CLOSED)


def test_checks_at_the_same_moment_count_once() -> None:
    breaker = checked(failed_at(0.0), 31.0, 31.01, 31.02)

    assert (breaker.good_checks, breaker.state(31.02)) == (1, HALF_OPEN)


def test_a_failure_among_the_checks_starts_all_over() -> None:
    breaker = checked(failed_at(0.0), 31.0, 32.0)
    breaker.failed(33.0, "hung up")
    checked(breaker, 34.0, 35.0, 36.0)

    assert (breaker.state(62.9), breaker.state(63.0), breaker.reason) == (OPEN, CLOSED, "hung up")


def test_fewer_failures_than_the_rules_say_change_nothing() -> None:
    breaker = failed_at(0.0, BreakerRules(failures=2))
    assert breaker.state(0.0) is CLOSED

    breaker.failed(1.0, "again")

    assert breaker.state(1.0) is OPEN


def test_an_answer_makes_failures_in_a_row_start_anew() -> None:
    breaker = failed_at(0.0, BreakerRules(failures=2))
    breaker.answered(1.0)
    breaker.failed(2.0, "once more")

    assert breaker.state(2.0) is CLOSED


def test_an_answer_to_something_older_does_not_take_a_node_back() -> None:
    breaker = failed_at(0.0)
    breaker.answered(1.0)

    assert breaker.state(1.0) is OPEN


def test_a_steady_node_that_did_its_work_is_taken_back_before_its_time() -> None:
    breaker = checked(failed_at(0.0), 1.0, 2.0, 3.0)
    breaker.answered(4.0)

    assert breaker.state(4.0) is CLOSED


def test_a_node_that_came_back_and_fails_is_left_out_again() -> None:
    breaker = checked(failed_at(0.0), 31.0, 32.0, 33.0)
    breaker.failed(100.0, "again")

    assert (breaker.state(100.0), breaker.good_checks) == (OPEN, 0)


def test_a_note_carries_the_state_to_another_clock() -> None:
    note = checked(failed_at(0.0), 5.0).note(10.0)
    assert note is not None

    other = Breaker()
    other.recall(note, 5000.0)

    assert (other.state(5019.9), other.state(5020.0), other.good_checks) == (OPEN, HALF_OPEN, 1)


def test_a_node_in_use_has_nothing_to_note() -> None:
    assert Breaker().note(0.0) is None


def test_a_note_from_a_clock_that_was_wrong_leaves_nobody_out_for_longer_than_the_rules_say() -> None:
    breaker = Breaker()
    breaker.recall(BreakerNote(failures=1, left_out_s=1e9), 0.0)

    assert breaker.state(30.0) is HALF_OPEN


@given(st.lists(st.tuples(st.sampled_from(["failed", "checked", "answered"]), st.floats(0.0, 40.0)), max_size=30))
def test_it_closes_only_with_three_good_checks_since_the_last_failure(steps: list[tuple[str, float]]) -> None:
    breaker, now, good, ever = Breaker(), 0.0, 0, False
    for step, pause_s in steps:
        now += pause_s
        if step == "failed":
            breaker.failed(now, "x")
            good, ever = 0, True
        elif step == "checked":
            breaker.checked(now)
            good += 1
        else:
            breaker.answered(now)
        if ever and good < 3:
            assert breaker.state(now) is not CLOSED
