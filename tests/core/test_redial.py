"""Reconnecting: at once, then with growing waits, round the addresses, and never in a hot loop."""

from __future__ import annotations

from tasuki.core.redial import BACKOFF_FIRST_S, BACKOFF_MAX_S, STEADY_S, Redial


def lost(redial: Redial, now: float) -> float:
    """Dial, fail; how long to wait then."""
    redial.dialed()
    redial.lost(now)
    assert redial.due_at is not None
    return redial.due_at - now


def test_the_first_dial_is_due_and_a_second_not_while_it_is_under_way() -> None:
    redial = Redial(1, lambda: 1.0)
    assert redial.due_at == 0.0
    assert redial.dialed() == 0
    assert redial.due_at is None


def test_waits_grow_up_to_a_bound() -> None:
    redial = Redial(1, lambda: 1.0)
    waits = [lost(redial, 0.0) for _ in range(9)]
    assert waits[:4] == [0.0, BACKOFF_FIRST_S, 2 * BACKOFF_FIRST_S, 4 * BACKOFF_FIRST_S]
    assert waits[-1] == BACKOFF_MAX_S


def test_jitter_takes_up_to_half_of_a_wait() -> None:
    lucky, unlucky = Redial(1, lambda: 0.0), Redial(1, lambda: 1.0)
    for redial in (lucky, unlucky):
        lost(redial, 0.0)
    assert lost(lucky, 0.0) == lost(unlucky, 0.0) / 2


def test_a_connection_that_lasted_makes_the_next_dial_immediate() -> None:
    redial = Redial(1, lambda: 1.0)
    for _ in range(5):
        lost(redial, 1000.0)
    redial.connected(1000.0)
    assert lost(redial, 1000.0 + STEADY_S) == 0.0


def test_connections_that_end_at_once_are_not_dialed_in_a_hot_loop() -> None:
    redial = Redial(1, lambda: 1.0)
    now, dials = 1000.0, 0
    while now < 1060.0:
        redial.connected(now)
        now += 0.001 + lost(redial, now + 0.001)
        dials += 1
    assert dials < 25


def test_addresses_are_tried_round_after_the_first_has_failed_twice() -> None:
    redial = Redial(3, lambda: 1.0)
    tried = []
    for _ in range(6):
        tried.append(redial.dialed())
        redial.lost(0.0)
    assert tried == [0, 0, 1, 2, 0, 1]
