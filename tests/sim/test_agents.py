"""Clients of node agents in the simulator: whatever happens to the nodes, no client spins, and every job comes to an end."""

from __future__ import annotations

from tasuki.testing.sim.agents import REQUESTS_PER_S_MAX, check_agents

SEEDS = 100


def test_no_client_sends_more_than_a_bounded_number_of_requests_in_any_state() -> None:
    outcomes = [check_agents(seed) for seed in range(SEEDS)]

    assert not [outcome.text() for outcome in outcomes if not outcome.good]
    assert 1 < max(outcome.effects["busiest"] for outcome in outcomes) <= REQUESTS_PER_S_MAX


def test_a_seed_gives_the_same_run_again() -> None:
    assert check_agents(7).trace_hash == check_agents(7).trace_hash
