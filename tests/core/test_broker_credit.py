"""The ledger never spends credit twice, and new work is shared by load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.core.broker.state import CREDIT_MAX, Account
from tasuki.core.broker.worker_messages import LEASE_BATCH_MAX, load, shares
from tasuki.errors import InvalidInput


def account(available: int = 0, running: int = 0) -> Account:
    return Account(available=available, running=running)


def test_credit_is_reserved_granted_and_the_rest_given_back() -> None:
    ledger = account(5)
    assert ledger.reserve(3) == 3
    assert (ledger.available, ledger.reserved) == (2, 3)
    ledger.settle(3, 1)
    assert (ledger.available, ledger.reserved, ledger.running) == (4, 0, 1)


def test_no_more_is_reserved_than_there_is() -> None:
    assert account(2).reserve(10) == 2


@pytest.mark.parametrize(("reserved", "granted"), [(3, 4), (4, 1), (2, -1)])
def test_a_settlement_that_cannot_be_is_a_defect(reserved: int, granted: int) -> None:
    ledger = account(3)
    ledger.reserve(3)
    with pytest.raises(ValueError, match="reserved credits"):
        ledger.settle(reserved, granted)


@pytest.mark.parametrize("credit", [-CREDIT_MAX - 1, CREDIT_MAX + 1])
def test_credit_out_of_bounds_is_refused(credit: int) -> None:
    with pytest.raises(InvalidInput):
        account().give(credit)


def test_credit_is_bounded_in_all_with_what_is_reserved() -> None:
    ledger = account(CREDIT_MAX)
    ledger.reserve(10)
    with pytest.raises(InvalidInput):
        ledger.give(1)


def test_an_end_lowers_the_load_and_gives_no_credit() -> None:
    ledger = account(0, running=2)
    ledger.ended()
    assert (ledger.available, ledger.running) == (0, 1)
    ledger.ended(5)
    assert ledger.running == 0


def test_a_delivery_without_a_grant_takes_credit_now_or_from_the_next() -> None:
    ledger = account(1)
    ledger.charge()
    ledger.charge()
    assert (ledger.available, ledger.owed, ledger.running) == (0, 1, 2)
    ledger.give(3)
    assert (ledger.available, ledger.owed) == (2, 0)


@given(st.lists(st.tuples(st.sampled_from(["give", "reserve", "settle", "charge"]), st.integers(0, 5)), max_size=60))
def test_what_was_given_is_what_is_free_reserved_or_spent(steps: list[tuple[str, int]]) -> None:
    ledger, given_, spent, pending = account(), 0, 0, []
    for step, number in steps:
        if step == "give":
            ledger.give(number)
            given_ += number
        elif step == "reserve":
            pending.append(ledger.reserve(number))
        elif step == "charge":
            ledger.charge()
            spent += 1
        elif pending:
            reserved = pending.pop()
            granted = min(number, reserved)
            ledger.settle(reserved, granted)
            spent += granted
        assert ledger.available + ledger.reserved + spent - ledger.owed == given_
        assert min(ledger.available, ledger.reserved, ledger.owed) >= 0


# ---------------------------------------------------------------------------------------------------- shares


def test_new_jobs_are_dealt_evenly_and_the_least_loaded_gets_the_odd_one() -> None:
    plan = shares([("busy", account(5, running=5)), ("idle", account(5))], 3)
    assert plan == [("idle", 2), ("busy", 1)]


def test_with_fewer_jobs_than_workers_only_the_least_loaded_are_asked() -> None:
    plan = shares([("a", account(1, running=3)), ("b", account(1)), ("c", account(1, running=1))], 2)
    assert plan == [("b", 1), ("c", 1)]


def test_of_many_idle_workers_the_first_are_asked_for_one_each() -> None:
    crowd = [("busy", account(9, running=1)), *((f"idle-{number}", account(9)) for number in range(100))]
    assert shares(crowd, 3) == [("idle-0", 1), ("idle-1", 1), ("idle-2", 1)]


def test_with_a_backlog_everybody_fills_up() -> None:
    plan = shares([("a", account(3)), ("b", account(LEASE_BATCH_MAX * 2)), ("none", account(0))], None)
    assert sorted(plan) == [("a", 3), ("b", LEASE_BATCH_MAX)]


def test_nobody_is_asked_for_more_than_its_credit() -> None:
    assert shares([("a", account(1)), ("b", account(100))], 50) == [("a", 1), ("b", 25)]


def test_a_worker_without_places_counts_as_full() -> None:
    assert load(account(0)) == 1.0
    assert load(account(3, running=1)) == 0.25


def test_credit_that_is_taken_back_while_it_is_reserved_is_gone_when_it_comes_back() -> None:
    account = Account()
    account.give(3)
    account.reserve(2)

    account.give(-2)
    account.settle(2, 0)

    assert (account.available, account.reserved, account.withdrawn) == (1, 0, 0)


def test_what_was_granted_before_credit_was_taken_back_stays_granted() -> None:
    account = Account()
    account.give(1)
    account.reserve(1)

    account.give(-1)
    account.settle(1, 1)

    assert (account.available, account.running, account.withdrawn) == (0, 1, 0)


def test_no_more_credit_can_be_taken_back_than_there_is() -> None:
    account = Account()
    account.give(1)

    account.give(-5)
    account.give(1)

    assert (account.available, account.withdrawn) == (1, 0)
