"""Shares per owner: counts with one limit, and a clear error for the owner whose share is used up."""

import pytest

from tasuki.core.shares import Shares
from tasuki.errors import Overloaded, TooManyRequests


def test_an_owner_may_have_as_many_as_the_limit_says() -> None:
    shares = Shares(3, "workers")
    shares.take("token:a", 2)
    shares.take("token:a")
    with pytest.raises(Overloaded, match="token:a has 3 workers and may have 3: 1 more would be too many; wait"):
        shares.take("token:a")
    assert shares.taken("token:a") == 3


def test_one_owner_does_not_use_up_the_share_of_another() -> None:
    shares = Shares(1, "workers")
    shares.take("token:a")
    shares.take("token:b")
    assert shares.taken("token:b") == 1


def test_a_refused_request_counts_for_nothing() -> None:
    shares = Shares(10, "bytes")
    shares.take("token:a", 4)
    with pytest.raises(Overloaded):
        shares.take("token:a", 7)
    shares.take("token:a", 6)


def test_what_is_given_back_can_be_taken_again_and_leaves_nothing_behind() -> None:
    shares = Shares(1, "requests", TooManyRequests)
    for number in range(1000):
        shares.take(f"token:{number}")
        shares.give_back(f"token:{number}")
    assert len(shares) == 0
    shares.take("token:1")
    with pytest.raises(TooManyRequests):
        shares.take("token:1")


def test_nobody_gives_back_more_than_they_have() -> None:
    shares = Shares(5, "requests")
    shares.take("token:a", 2)
    with pytest.raises(ValueError, match="gives back 3 requests and has 2"):
        shares.give_back("token:a", 3)
    assert shares.taken("token:a") == 2


def test_nothing_is_taken_and_given_back() -> None:
    shares = Shares(0, "requests")
    shares.take("token:a", 0)
    shares.give_back("token:a", 0)
    assert len(shares) == 0
