"""Decisions of a dispatcher: order of nodes, whose word counts, how often to look."""

from __future__ import annotations

import pytest

from tasuki.core.failover.events import NodeJobStatus
from tasuki.core.failover.nodes import (
    LOOK_BUSY_S,
    LOOK_IDLE_S,
    BreakerState,
    Capacity,
    InputRef,
    Nodes,
    NodeState,
    Ranked,
    authoritative_node,
    candidates,
    look_every_s,
    parse_input,
    rendezvous,
    well,
)
from tasuki.errors import InvalidInput

NODES = ["http://n1:7090", "http://n2:7090", "http://n3:7090"]
SHA256 = "ab" * 32


def line(node: str, standing: NodeState = NodeState.FREE, free: int | None = 4, *, steady: bool = False) -> Ranked:
    return Ranked(node, standing, 0, 4, BreakerState.CLOSED, 0, 0.0, steady, "ok", free)


def names(lines: list[Ranked]) -> list[str]:
    return [found.node for found in lines]


def test_a_job_has_one_order_of_nodes_wherever_it_is_computed() -> None:
    assert rendezvous("a", NODES) == rendezvous("a", reversed(NODES))
    assert sorted(rendezvous("a", NODES)) == NODES


def test_jobs_spread_over_equal_nodes() -> None:
    first = [rendezvous(str(job), NODES)[0] for job in range(300)]

    assert all(60 < first.count(node) < 140 for node in NODES)


def test_a_node_that_is_gone_moves_only_its_own_jobs() -> None:
    moved = [job for job in map(str, range(100)) if rendezvous(job, NODES)[0] != rendezvous(job, NODES[:2])[0]]

    assert moved == [job for job in map(str, range(100)) if rendezvous(job, NODES)[0] == NODES[2]]


def test_free_nodes_come_before_full_and_unknown_ones_and_more_room_before_less() -> None:
    ranking = [line(NODES[0], NodeState.FULL, 0), line(NODES[1], free=1), line(NODES[2], free=3)]

    assert names(candidates(ranking, "a")) == [NODES[2], NODES[1], NODES[0]]


def test_among_equals_the_jobs_own_order_decides() -> None:
    ranking = [line(node) for node in NODES]

    for job in map(str, range(20)):
        assert names(candidates(ranking, job)) == rendezvous(job, NODES)


def test_nodes_that_are_left_out_are_used_only_without_others_and_if_they_are_steady() -> None:
    left_out = [line(NODES[0], NodeState.LEFT_OUT, steady=True), line(NODES[1], NodeState.LEFT_OUT)]

    assert names(candidates(left_out, "a")) == [NODES[0]]
    assert names(candidates([*left_out, line(NODES[2], NodeState.FULL, 0)], "a")) == [NODES[2]]


def test_the_places_that_count_are_those_that_would_be_used() -> None:
    steady = line(NODES[0], NodeState.LEFT_OUT, steady=True)

    assert well([steady, line(NODES[1], NodeState.LEFT_OUT)]) == [steady]
    assert well([steady, full := line(NODES[1], NodeState.FULL, 0), line(NODES[2], NodeState.UNKNOWN, None)]) == [full]


def test_a_node_that_is_asked_again_after_a_pause_counts_until_it_does_not_answer() -> None:
    nodes = Nodes(NODES[:1], lambda: 0.0)
    never_asked = well(nodes.ranking(0.0))
    nodes.seen(NODES[0], Capacity(1, 4), 0.0)
    nodes.to_look_at(5.0, 1.0)

    (asked_again,) = well(nodes.ranking(5.0))
    nodes.failed(NODES[0], "no answer", 6.0)

    assert never_asked == well(nodes.ranking(6.0)) == []
    assert (asked_again.standing, asked_again.free) == (NodeState.UNKNOWN, 3)


def test_of_several_words_about_a_job_a_result_counts_most() -> None:
    said = {NODES[0]: NodeJobStatus("running"), NODES[1]: NodeJobStatus("done"), NODES[2]: NodeJobStatus("interrupted")}

    assert authoritative_node("a", said) == NODES[1]
    assert (
        authoritative_node("a", {NODES[0]: NodeJobStatus("of another version"), NODES[2]: NodeJobStatus("interrupted")})
        == NODES[2]
    )
    assert authoritative_node("a", {node: NodeJobStatus("done") for node in NODES}) == rendezvous("a", NODES)[0]
    assert authoritative_node("a", {NODES[0]: NodeJobStatus("queued"), NODES[1]: NodeJobStatus("running")}) == NODES[1]
    assert authoritative_node("a", {NODES[0]: NodeJobStatus("queued"), NODES[1]: NodeJobStatus("failed")}) == NODES[0]
    assert authoritative_node("a", {}) is None


def test_nodes_are_looked_at_less_often_the_longer_nobody_asks() -> None:
    assert look_every_s(0.0) == LOOK_BUSY_S
    assert LOOK_BUSY_S < look_every_s(4.0) < LOOK_IDLE_S
    assert look_every_s(3600.0) == LOOK_IDLE_S
    assert look_every_s(3600.0, well=False) == LOOK_BUSY_S


def test_a_place_that_is_given_back_is_free_again_but_never_more_than_there_are() -> None:
    nodes = Nodes(NODES[:1], lambda: 0.0)
    nodes.seen(NODES[0], Capacity(1, 2), 0.0)

    nodes.taken(NODES[0])
    assert nodes.ranking(0.0)[0].free == 0
    for free in (1, 2, 2):
        nodes.given_back(NODES[0])
        assert nodes.ranking(0.0)[0].free == free


def test_an_input_is_a_hash_and_a_name() -> None:
    assert parse_input(f"{SHA256}:a/b:c.csv") == InputRef(SHA256, "a/b:c.csv")
    assert str(InputRef(SHA256, "book.csv")) == f"{SHA256}:book.csv"


@pytest.mark.parametrize("text", ["", "book.csv", f"{SHA256}:", f"{SHA256[:-1]}:a", f"{SHA256.upper()}:a", f"{SHA256}:../a"])
def test_what_is_no_input_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_input(text)
