"""Reconnecting: at once, then with growing waits, round the addresses that were given and learned, and never in a hot loop."""

from __future__ import annotations

import random

import pytest

from tasuki.core.address import Address, parse_url
from tasuki.core.reconnect import (
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    CONNECT_QUICK_S,
    CONNECT_TIMEOUT_S,
    IN_ROUND_S,
    LEARNED_MAX,
    MISSED_MAX,
    STEADY_S,
    Redial,
)

ONE = parse_url("tcp://10.0.0.1:7000")
THREE = parse_url("tcp://10.0.0.1:7000,10.0.0.2:7000,10.0.0.3:7000")


def lost(redial: Redial, now: float) -> float:
    """Dial, fail; how long to wait then."""
    redial.dialed()
    redial.lost(now)
    assert redial.due_at is not None
    return redial.due_at - now


def learned(redial: Redial, *servers: str) -> set[str]:
    """The addresses known after a Welcome that names these, besides the given ones."""
    given = {str(address) for address in redial.addresses}
    redial.connected(1000.0, servers)
    return {str(address) for address in redial.addresses} - given


# ---------------------------------------------------------------------------------------------------- when


def test_the_first_dial_is_due_and_a_second_not_while_it_is_under_way() -> None:
    redial = Redial(ONE, lambda: 1.0)
    assert redial.due_at == 0.0
    assert redial.dialed().address == ONE[0]
    assert redial.due_at is None


def test_waits_grow_up_to_a_bound() -> None:
    redial = Redial(ONE, lambda: 1.0)
    waits = [lost(redial, 0.0) for _ in range(9)]
    assert waits[:4] == [0.0, BACKOFF_FIRST_S, 2 * BACKOFF_FIRST_S, 4 * BACKOFF_FIRST_S]
    assert waits[-1] == BACKOFF_MAX_S


def test_jitter_takes_up_to_half_of_a_wait() -> None:
    lucky, unlucky = Redial(ONE, lambda: 0.0), Redial(ONE, lambda: 1.0)
    for redial in (lucky, unlucky):
        lost(redial, 0.0)
    assert lost(lucky, 0.0) == lost(unlucky, 0.0) / 2


def test_a_connection_that_lasted_makes_the_next_dial_immediate() -> None:
    redial = Redial(ONE, lambda: 1.0)
    for _ in range(5):
        lost(redial, 1000.0)
    redial.connected(1000.0)
    assert lost(redial, 1000.0 + STEADY_S) == 0.0


@pytest.mark.parametrize("addresses", [ONE, THREE], ids=["one", "three"])
def test_connections_that_end_at_once_are_not_dialed_in_a_hot_loop(addresses: list[Address]) -> None:
    redial = Redial(addresses, lambda: 1.0)
    now, dials = 1000.0, 0
    while now < 1060.0:
        redial.connected(now)
        now += 0.001 + lost(redial, now + 0.001)
        dials += 1
    assert dials < 25 * len(addresses)


def test_a_round_over_all_addresses_goes_through_quickly_and_the_next_one_waits() -> None:
    redial = Redial(THREE, lambda: 1.0)
    waits = [lost(redial, 0.0) for _ in range(8)]
    assert waits == [0.0, IN_ROUND_S, IN_ROUND_S, BACKOFF_FIRST_S, IN_ROUND_S, IN_ROUND_S, 2 * BACKOFF_FIRST_S, IN_ROUND_S]


# ---------------------------------------------------------------------------------------------------- where


def test_the_one_that_was_lost_is_dialed_last() -> None:
    redial = Redial(THREE, random.Random(1).random)
    connected = redial.dialed().address
    redial.connected(1000.0)
    redial.lost(1010.0)
    tried = []
    for _ in range(4):
        tried.append(redial.dialed().address)
        redial.lost(1010.0)
    assert tried[2] == connected
    assert set(tried[:3]) == set(THREE)
    assert tried[3] == tried[0]


def test_peers_begin_at_different_addresses_and_spread_when_one_dies() -> None:
    orders = {tuple(map(str, Redial(THREE, random.Random(seed).random).addresses)) for seed in range(100)}
    assert len(orders) == 6


def test_a_host_that_does_not_answer_is_given_less_time_while_others_were_not_tried() -> None:
    redial = Redial(THREE, lambda: 0.5)
    timeouts = []
    for _ in range(4):
        timeouts.append(redial.dialed().timeout_s)
        redial.lost(0.0)
    assert timeouts == [CONNECT_QUICK_S] * 4
    assert redial.dialed().timeout_s == CONNECT_TIMEOUT_S
    assert Redial(ONE, lambda: 0.5).dialed().timeout_s == CONNECT_TIMEOUT_S


# ---------------------------------------------------------------------------------------------------- learning


def test_servers_that_a_welcome_names_are_dialed_too_and_the_present_one_stays_last() -> None:
    redial = Redial(ONE, random.Random(3).random)
    redial.dialed()
    assert not redial.several
    assert learned(redial, "tcp://10.0.0.2:7000", "tcp://10.0.0.3:7000") == {"tcp://10.0.0.2:7000", "tcp://10.0.0.3:7000"}
    assert redial.several
    redial.lost(1010.0)
    assert redial.dialed().address != ONE[0]
    assert str(redial.addresses[-2]) == "tcp://10.0.0.1:7000"


def test_one_address_by_two_ways_is_one() -> None:
    redial = Redial([*ONE, *ONE], lambda: 0.0)
    assert learned(redial, "tcp://10.0.0.1:7000", "tcp://10.0.0.2", "tcp://10.0.0.2:7000") == {"tcp://10.0.0.2:7000"}
    assert len(redial.addresses) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "http://10.0.0.2:7000",
        "tcp://",
        "tcp://10.0.0.2:seven",
        "tcp://10.0.0.2:\N{SUPERSCRIPT TWO}",
        "tcp://10.0.0.2:70000",
        "tcp://10.0.0.2:0",
        "tcp://0.0.0.0:7000",
        "tcp://[::]:7000",
        "tcp://10.0.0.2:7000,10.0.0.3:7000",
        "tcp://two words:7000",
        "tcp://-x:7000",
        f"tcp://{'a' * 300}:7000",
        "unix:///run/tasuki/socket",
        "tcp://127.0.0.1:7000",
    ],
)
def test_what_is_no_address_of_another_server_is_not_learned(text: str) -> None:
    assert learned(Redial(ONE, lambda: 0.0), text) == set()


def test_a_plain_address_is_not_learned_beside_tls_and_a_tls_one_is() -> None:
    redial = Redial(parse_url("tls://a.example:7000"), lambda: 0.0)
    assert learned(redial, "tcp://b.example:7000", "tls://c.example:7000") == {"tls://c.example:7000"}


def test_a_peer_on_a_unix_socket_learns_nothing() -> None:
    assert learned(Redial(parse_url("unix:///run/s"), lambda: 0.0), "tcp://127.0.0.1:7000", "tls://c.example:7000") == set()


@pytest.mark.parametrize("given", ["http://a.example:7080", "https://a.example"])
def test_a_peer_over_http_learns_nothing(given: str) -> None:
    named = ("tcp://b.example:7000", "tls://b.example:7000", "https://b.example:443")
    assert learned(Redial(parse_url(given), lambda: 0.0), *named) == set()


def test_loopback_is_learned_on_loopback() -> None:
    assert learned(Redial(parse_url("tcp://127.0.0.1:7000"), lambda: 0.0), "tcp://127.0.0.1:7001") == {"tcp://127.0.0.1:7001"}


def test_a_learned_address_that_is_not_named_any_more_is_dropped_in_time_and_a_given_one_never() -> None:
    redial = Redial(THREE, lambda: 0.0)
    learned(redial, "tcp://10.0.0.9:7000")
    for _ in range(MISSED_MAX - 1):
        redial.connected(1000.0, ())
    assert Address("tcp", "10.0.0.9", 7000) in redial.addresses
    redial.connected(1000.0, ())
    assert set(redial.addresses) == set(THREE)


def test_a_server_that_names_the_whole_internet_is_believed_up_to_a_bound() -> None:
    redial = Redial(ONE, lambda: 0.0)
    for third in range(3):
        redial.connected(1000.0, [f"tcp://10.1.{third}.{last}:7000" for last in range(1, 200)])
    assert len(redial.addresses) == 1 + LEARNED_MAX
