"""Delays between tries: doubled up to a bound, exact or shortened by chance."""

from __future__ import annotations

from tasuki.core.backoff import Backoff


def test_delays_double_up_to_the_bound() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_after_a_reset_delays_begin_again() -> None:
    backoff = Backoff(0.5, 3.0)
    backoff.next_s()
    backoff.next_s()
    backoff.reset()
    assert backoff.next_s() == 0.5


def test_jitter_takes_up_to_half_of_a_delay() -> None:
    assert Backoff(1.0, jitter=lambda: 0.0).delay_s(2) == 2.0
    assert Backoff(1.0, jitter=lambda: 1.0).delay_s(2) == 4.0


def test_the_thousandth_delay_is_bounded() -> None:
    assert Backoff(1.0, 5.0).delay_s(1000) == 5.0
