"""The transition table is complete and closed, and budgets and delays are exact."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.core.job import LEASED, READY, TERMINAL, Outcome, State
from tasuki.core.lifecycle import (
    RETRY_DELAY_MAX_S,
    TRANSITIONS,
    JobEvent,
    after,
    after_failure,
    after_loss,
    cancel_is_immediate,
    retry_delay_s,
    sources,
)
from tasuki.errors import InvalidTransition

# The table of `lifecycle.py`, written out on purpose: a change of the table must be made twice to go unnoticed.
EXPECTED = {
    JobEvent.GRANT: {"PENDING": "ASSIGNED", "ORPHANED": "ASSIGNED", "ASSIGNED": "ASSIGNED", "RUNNING": "ASSIGNED"},
    JobEvent.START: {"ASSIGNED": "RUNNING"},
    JobEvent.RELEASE: {"ASSIGNED": "PENDING"},
    JobEvent.SUCCEED: dict.fromkeys(("ASSIGNED", "RUNNING", "ORPHANED"), "SUCCEEDED"),
    JobEvent.RETRY: dict.fromkeys(("ASSIGNED", "RUNNING", "ORPHANED"), "PENDING"),
    JobEvent.FAIL: dict.fromkeys(("ASSIGNED", "RUNNING", "ORPHANED"), "FAILED"),
    JobEvent.TIME_OUT: dict.fromkeys(("ASSIGNED", "RUNNING", "ORPHANED"), "TIMED_OUT"),
    JobEvent.LOSE: dict.fromkeys(("ASSIGNED", "RUNNING"), "PENDING"),
    JobEvent.ORPHAN: dict.fromkeys(("ASSIGNED", "RUNNING"), "ORPHANED"),
    JobEvent.RESUME: {"ORPHANED": "RUNNING"},
    JobEvent.CANCEL: dict.fromkeys(("PENDING", "ASSIGNED", "RUNNING", "ORPHANED"), "CANCELED"),
    JobEvent.SKIP: dict.fromkeys(("PENDING", "ORPHANED"), "SKIPPED"),
    JobEvent.REQUEUE: dict.fromkeys(("SUCCEEDED", "FAILED", "CANCELED", "TIMED_OUT", "SKIPPED"), "PENDING"),
}
LISTED = {(State(state), event): State(to) for event, steps in EXPECTED.items() for state, to in steps.items()}
ALL_PAIRS = list(itertools.product(State, JobEvent))
HELD = [State.ASSIGNED, State.RUNNING, State.ORPHANED]


# ---------------------------------------------------------------------------------------------------- the table


def test_the_table_has_every_step_and_no_other() -> None:
    assert TRANSITIONS == LISTED


@pytest.mark.parametrize(("state", "event"), [pair for pair in ALL_PAIRS if pair in LISTED], ids=str)
def test_a_listed_event_leads_to_its_state(state: State, event: JobEvent) -> None:
    assert after(state, event) is LISTED[state, event]


@pytest.mark.parametrize(("state", "event"), [pair for pair in ALL_PAIRS if pair not in LISTED], ids=str)
def test_any_other_event_is_refused_by_name(state: State, event: JobEvent) -> None:
    with pytest.raises(InvalidTransition, match=f"{state.value}.*{event.value}"):
        after(state, event)


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_a_terminal_state_is_left_by_requeue_only(state: State) -> None:
    assert [event for event in JobEvent if (state, event) in TRANSITIONS] == [JobEvent.REQUEUE]


def test_every_state_is_terminal_or_leased_or_ready() -> None:
    assert set(State) == TERMINAL | LEASED | READY
    assert len(TERMINAL) + len(LEASED) + len(READY) == len(State)
    assert all(state.terminal == (state in TERMINAL) for state in State)


def test_every_state_can_be_reached_from_pending() -> None:
    reached = {State.PENDING}
    while more := {to for (state, _), to in TRANSITIONS.items() if state in reached} - reached:
        reached |= more

    assert reached == set(State)


@pytest.mark.parametrize("event", JobEvent)
def test_sources_are_the_states_in_which_the_event_can_happen(event: JobEvent) -> None:
    assert sources(event) == {State(state) for state in EXPECTED[event]}


def test_only_waiting_jobs_are_canceled_at_once() -> None:
    assert {state for state in State if cancel_is_immediate(state)} == {State.PENDING, State.ORPHANED}


# ---------------------------------------------------------------------------------------------------- delays


def test_delays_double_from_the_backoff_and_stop_at_the_cap() -> None:
    assert [retry_delay_s(10.0, n) for n in range(7)] == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]


@pytest.mark.parametrize("n", [0, 1, 59, 60, 61, 10**6])
def test_no_backoff_is_no_delay_however_often(n: int) -> None:
    assert retry_delay_s(0.0, n) == 0.0


@given(backoff_s=st.floats(0, 1e9), n=st.integers(0, 10**6))
def test_a_delay_is_never_past_the_cap_nor_shorter_than_the_one_before(backoff_s: float, n: int) -> None:
    assert 0 <= retry_delay_s(backoff_s, n) <= retry_delay_s(backoff_s, n + 1) <= RETRY_DELAY_MAX_S


# ---------------------------------------------------------------------------------------------------- failures

FAILED = Outcome(error_code="EXIT_CODE", message="exit code 1")


@pytest.mark.parametrize("state", HELD)
def test_a_failure_with_a_retry_left_goes_back_to_pending(state: State) -> None:
    verdict = after_failure(state, FAILED, cancel_requested=False, failures=1, losses=2, max_retries=2, backoff_s=10.0)

    assert (verdict.event, verdict.state, verdict.delay_s) == (JobEvent.RETRY, State.PENDING, 20.0)
    assert (verdict.failures, verdict.losses) == (2, 2)
    assert verdict.reason == "exit code 1; retry 2 of 2 in 20 s"


@pytest.mark.parametrize("state", HELD)
def test_a_failure_without_a_retry_left_is_final(state: State) -> None:
    verdict = after_failure(state, FAILED, cancel_requested=False, failures=2, losses=0, max_retries=2, backoff_s=10.0)

    assert (verdict.event, verdict.state, verdict.failures) == (JobEvent.FAIL, State.FAILED, 3)
    assert verdict.reason == "exit code 1; no retry left of 2"


def test_a_permanent_failure_uses_no_retry() -> None:
    outcome = Outcome(error_code="EXEC_NOT_ALLOWED", permanent=True)

    verdict = after_failure(State.ASSIGNED, outcome, cancel_requested=False, failures=0, losses=0, max_retries=9, backoff_s=1.0)

    assert verdict.state is State.FAILED
    assert verdict.reason == "EXEC_NOT_ALLOWED; permanent"


@pytest.mark.parametrize(("max_retries", "state"), [(1, State.PENDING), (0, State.TIMED_OUT)])
def test_a_time_out_retries_like_a_failure(max_retries: int, state: State) -> None:
    outcome = Outcome(error_code="TIMED_OUT")

    verdict = after_failure(
        State.RUNNING, outcome, cancel_requested=False, failures=0, losses=0, max_retries=max_retries, backoff_s=1.0
    )

    assert verdict.state is state


@pytest.mark.parametrize("error_code", ["CANCELED", "EXIT_CODE", "TIMED_OUT"])
def test_a_failure_after_a_cancel_request_is_a_cancel(error_code: str) -> None:
    outcome = Outcome(error_code=error_code)

    verdict = after_failure(State.RUNNING, outcome, cancel_requested=True, failures=0, losses=1, max_retries=9, backoff_s=1.0)

    assert (verdict.event, verdict.state, verdict.delay_s) == (JobEvent.CANCEL, State.CANCELED, 0.0)
    assert (verdict.failures, verdict.losses) == (0, 1)


def test_a_worker_that_cancels_unasked_has_failed() -> None:
    outcome = Outcome(error_code="CANCELED")

    verdict = after_failure(State.RUNNING, outcome, cancel_requested=False, failures=0, losses=0, max_retries=0, backoff_s=1.0)

    assert verdict.state is State.FAILED


@given(max_retries=st.integers(0, 20))
def test_a_job_that_always_fails_is_tried_once_and_then_max_retries_times(max_retries: int) -> None:
    failures = attempts = 0
    state = State.PENDING
    while state is State.PENDING:
        attempts += 1
        verdict = after_failure(
            State.RUNNING, FAILED, cancel_requested=False, failures=failures, losses=0, max_retries=max_retries, backoff_s=1.0
        )
        state, failures = verdict.state, verdict.failures

    assert (attempts, state) == (max_retries + 1, State.FAILED)


# ---------------------------------------------------------------------------------------------------- losses


def lost(
    state: State = State.RUNNING, *, cancel_requested: bool = False, keep: bool = False, losses: int = 0, max_losses: int = 3
):
    return after_loss(
        state,
        cancel_requested=cancel_requested,
        keep=keep,
        failures=1,
        losses=losses,
        max_losses=max_losses,
        backoff_s=10.0,
        worker_id="w1",
    )


@pytest.mark.parametrize("state", sorted(LEASED))
def test_the_first_loss_is_tried_again_at_once(state: State) -> None:
    verdict = lost(state)

    assert (verdict.event, verdict.state, verdict.delay_s) == (JobEvent.LOSE, State.PENDING, 0.0)
    assert (verdict.failures, verdict.losses) == (1, 1)
    assert verdict.reason == "worker w1 was lost (loss 1 of 3)"


def test_later_losses_wait_like_retries() -> None:
    assert [lost(losses=losses, max_losses=9).delay_s for losses in range(8)] == [0, 10, 20, 40, 80, 160, 300, 300]


def test_all_losses_of_a_job_that_asks_for_it_wait() -> None:
    verdicts = [
        after_loss(
            State.RUNNING,
            cancel_requested=False,
            keep=False,
            failures=0,
            losses=losses,
            max_losses=9,
            backoff_s=10.0,
            worker_id="w1",
            delay_first=True,
        )
        for losses in range(7)
    ]

    assert [verdict.delay_s for verdict in verdicts] == [10, 20, 40, 80, 160, 300, 300]


def test_a_kept_job_is_orphaned() -> None:
    verdict = lost(keep=True, losses=2)

    assert (verdict.event, verdict.state, verdict.delay_s, verdict.losses) == (JobEvent.ORPHAN, State.ORPHANED, 0.0, 3)


@pytest.mark.parametrize("keep", [False, True])
def test_a_loss_without_budget_is_final(keep: bool) -> None:
    verdict = lost(keep=keep, losses=3)

    assert (verdict.event, verdict.state, verdict.losses) == (JobEvent.FAIL, State.FAILED, 4)
    assert verdict.reason == "worker w1 was lost; no loss left of 3"


@pytest.mark.parametrize("losses", [0, 3])
def test_a_loss_after_a_cancel_request_is_a_cancel(losses: int) -> None:
    verdict = lost(cancel_requested=True, losses=losses)

    assert (verdict.event, verdict.state, verdict.losses) == (JobEvent.CANCEL, State.CANCELED, losses)
