"""The next turn: questions of conversations, and who gets which answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from tasuki.core.broker.turn_builder import REPLY_ORDER, TurnBuilder, TurnEffects, ignore
from tasuki.core.machine import Now
from tasuki.core.store_messages import VERBS, Answers
from tasuki.errors import TasukiError, Unavailable

Heard = list[tuple[str, list[Any]]]


def note(heard: Heard, who: str, answers: Sequence[Any], effects: TurnEffects) -> None:
    heard.append((who, list(answers)))


def effects() -> TurnEffects:
    return TurnEffects(Now(1.0, 1.0))


def test_every_verb_that_conversations_ask_has_its_place_in_the_order_of_replies() -> None:
    ordered = [verb for verbs in REPLY_ORDER for verb in verbs]

    assert sorted(ordered) == sorted(verb.name for verb in VERBS if not verb.leads)


def test_each_question_gets_the_answers_to_its_own_items() -> None:
    heard: Heard = []
    builder = TurnBuilder()
    builder.ask("get", ["a", "b"], partial(note, heard, "first"))
    builder.ask("get", [], partial(note, heard, "empty"))
    builder.ask("get", ["c"], partial(note, heard, "last"))

    turn = builder.turn()
    builder.done(Answers(get=[1, 2, 3]), effects())  # type: ignore[list-item]

    assert turn.get == ["a", "b", "c"]
    assert heard == [("first", [1, 2]), ("empty", []), ("last", [3])]


def test_replies_come_in_the_order_of_verbs_and_inside_a_group_in_that_of_asking() -> None:
    heard: Heard = []
    builder = TurnBuilder()
    for verb in ("get", "rerun", "submit", "finish"):
        builder.ask(verb, [verb], partial(note, heard, verb))

    builder.done(Answers(finish=[0], submit=[0], rerun=[0], get=[0]), effects())  # type: ignore[list-item]

    assert [who for who, _ in heard] == ["finish", "rerun", "submit", "get"]


def test_after_a_failure_a_question_is_told_or_asked_again() -> None:
    heard: Heard = []
    errors: list[TasukiError] = []
    builder, following = TurnBuilder(), TurnBuilder()
    builder.ask("renew", ["x", "y"], partial(note, heard, "worker"))
    builder.ask("submit", ["job"], ignore, lambda error, _: errors.append(error))

    builder.failed(Unavailable("gone"), effects(), following)
    following.done(Answers(renew=[1, 2]), effects())  # type: ignore[list-item]

    assert [error.message for error in errors] == ["gone"]
    assert following.items == {"renew": ["x", "y"]}
    assert heard == [("worker", [1, 2])]


@pytest.mark.parametrize(
    ("reads", "kept"),
    [
        ((2, 2), 2),
        ((5,), 1),  # one read that is larger than the limit is not cut
        ((5, 0), 1),
        ((4, 0, 1), 2),
        ((3, 2, 1), 1),
        ((0, 5), 2),
    ],
)
def test_reads_past_the_limit_are_left_to_the_next_turn(reads: tuple[int, ...], kept: int) -> None:
    heard: Heard = []
    builder = TurnBuilder()
    builder.ask("submit", ["job"], ignore)
    for number, size in enumerate(reads):
        builder.ask("get", [f"{number}-{item}" for item in range(size)], partial(note, heard, str(number)))

    following = builder.split_reads(4)

    for one in (builder, following):
        items = one.turn().get
        one.done(Answers(get=items, submit=["stored"]), effects())  # type: ignore[arg-type, list-item]
    assert [(who, len(items)) for who, items in heard] == [(str(number), size) for number, size in enumerate(reads)]
    assert all(item.startswith(f"{who}-") for who, items in heard for item in items)
    assert len([question for question in builder.questions() if question.verb == "get"]) == kept
