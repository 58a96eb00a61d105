"""The ranking of nodes."""

import itertools

from tasuki.core.failover.nodes import BreakerState, Capacity, Nodes, NodeState

A, B, C = "http://a:7090", "http://b:7090", "http://c:7090"


def three() -> Nodes:
    return Nodes([A, B, C], itertools.count().__next__)


def order(nodes: Nodes, now: float = 0.0) -> list[str]:
    return [line.node for line in nodes.ranking(now)]


def standings(nodes: Nodes, now: float = 0.0) -> dict[str, NodeState]:
    return {line.node: line.standing for line in nodes.ranking(now)}


def test_the_most_free_places_come_first() -> None:
    nodes = three()
    for name, running in ((A, 3), (B, 0), (C, 1)):
        nodes.seen(name, Capacity(running, 4), 0.0)

    assert order(nodes) == [B, C, A]


def test_equal_ones_stand_in_this_clients_own_order() -> None:
    nodes = Nodes([A, B, C], iter([0.9, 0.1, 0.5]).__next__)
    for name in (A, B, C):
        nodes.seen(name, Capacity(0, 4), 0.0)

    assert order(nodes) == [B, C, A]


def test_who_has_not_answered_stands_behind_those_that_have() -> None:
    nodes = three()
    nodes.seen(C, Capacity(4, 4), 0.0)
    nodes.seen(B, Capacity(1, 4), 0.0)

    assert order(nodes) == [B, C, A]
    assert standings(nodes) == {A: NodeState.UNKNOWN, B: NodeState.FREE, C: NodeState.FULL}


def test_a_failed_node_is_left_out_and_comes_last() -> None:
    nodes = three()
    for name in (A, B, C):
        nodes.seen(name, Capacity(0, 4), 0.0)
    nodes.failed(A, "hung up", 0.0)

    last = nodes.ranking(1.0)[-1]

    assert (last.node, last.standing, last.breaker, last.last_answer) == (A, NodeState.LEFT_OUT, BreakerState.OPEN, "hung up")


def test_a_bad_health_check_leaves_a_node_out_too() -> None:
    nodes = three()
    nodes.unwell(A, "answered 503 DRAINING", 0.0)

    assert standings(nodes)[A] is NodeState.LEFT_OUT


def test_a_full_node_is_not_left_out() -> None:
    nodes = three()
    nodes.seen(A, Capacity(1, 4), 0.0)
    nodes.full(A, "answered 503 FULL", 2.0, 0.0)

    assert (standings(nodes, 1.9)[A], standings(nodes, 2.0)[A]) == (NodeState.FULL, NodeState.FREE)


def test_what_was_sent_counts_until_the_node_says_so_itself() -> None:
    nodes = three()
    nodes.seen(A, Capacity(0, 1), 0.0)
    nodes.taken(A)
    assert standings(nodes)[A] is NodeState.FULL

    nodes.seen(A, Capacity(0, 1), 1.0)

    assert standings(nodes, 1.0)[A] is NodeState.FREE


def test_a_node_that_does_not_tell_its_capacity_can_be_used_after_the_others() -> None:
    nodes = three()
    nodes.seen(A, None, 0.0)
    nodes.seen(B, Capacity(3, 4), 0.0)

    assert order(nodes)[:2] == [B, A]
    assert standings(nodes)[A] is NodeState.FREE


def test_an_old_answer_says_nothing_while_a_new_one_is_waited_for() -> None:
    nodes = three()
    nodes.seen(A, Capacity(0, 4), 0.0)
    assert A in nodes.to_look_at(100.0, 5.0)

    assert standings(nodes, 100.0)[A] is NodeState.UNKNOWN


def test_a_node_is_not_asked_twice_at_once_nor_again_while_its_answer_is_fresh() -> None:
    nodes = three()
    assert nodes.to_look_at(0.0, 1.0) == [A, B, C]
    assert nodes.to_look_at(0.1, 1.0) == []

    nodes.seen(A, Capacity(0, 4), 0.2)

    assert (nodes.to_look_at(1.0, 1.0), nodes.to_look_at(1.3, 1.0)) == ([], [A])


def test_a_node_given_twice_is_one_node() -> None:
    assert Nodes([A, B, A], lambda: 0.0).names == (A, B)


def test_notes_of_another_process_count_for_nodes_that_are_ours() -> None:
    one, other = three(), Nodes([A], lambda: 0.0)
    one.failed(A, "hung up", 0.0)
    one.failed(B, "hung up", 0.0)
    notes = {name: note for name, note in one.notes(10.0).items() if note is not None}

    other.recall(notes, 500.0)

    (line,) = other.ranking(500.0)
    assert (line.standing, line.left_out_s, line.last_answer) == (NodeState.LEFT_OUT, 20.0, "hung up")
