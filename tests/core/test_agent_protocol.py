"""The contract of agents and their clients: the hash of an input, what a repeated id means, the fields of a form."""

from __future__ import annotations

import hashlib

import pytest

from tasuki.core.failover.agent_protocol import (
    AgentOutcome,
    AgentState,
    IdDecision,
    InputRecord,
    check_input_hash,
    default_slots,
    input_hash,
    judge,
    parse_args,
    parse_timeout,
)
from tasuki.errors import InvalidInput

GIB = 1024**3
A, B = InputRecord("a.csv", "1" * 64, 3), InputRecord("b.csv", "2" * 64, 4)


def test_the_input_hash_is_that_of_the_documented_text() -> None:
    text = (
        '{"args":["--seed","7"],"exec":"pricer","files":[{"name":"a.csv","sha256":"' + "1" * 64 + '","size_bytes":3},'
        '{"name":"b.csv","sha256":"' + "2" * 64 + '","size_bytes":4}]}'
    )

    assert input_hash("pricer", ("--seed", "7"), [A, B]) == hashlib.sha256(text.encode()).hexdigest()


def test_everything_that_matters_is_in_the_input_hash() -> None:
    others = [
        input_hash("other", ("x",), [A, B]),
        input_hash("pricer", ("y",), [A, B]),
        input_hash("pricer", (), [A, B]),
        input_hash("pricer", ("x",), [A]),
        input_hash("pricer", ("x",), [A, InputRecord("b.csv", "3" * 64, 4)]),
        input_hash("pricer", ("x",), [A, InputRecord("c.csv", "2" * 64, 4)]),
        input_hash("pricer", ("x",), [B, A]),
    ]

    assert len({input_hash("pricer", ("x",), [A, B]), *others}) == 8


@pytest.mark.parametrize(
    ("state", "recorded", "sent", "verdict"),
    [
        (None, None, None, IdDecision.RUN),
        (None, None, "x", IdDecision.RUN),
        (AgentState.QUEUED, "x", None, IdDecision.RUN),
        (AgentState.QUEUED, "x", "x", IdDecision.RUN),
        (AgentState.QUEUED, "x", "y", IdDecision.CONFLICT),
        (AgentState.RUNNING, None, None, IdDecision.LOCKED),
        (AgentState.RUNNING, None, "x", IdDecision.LOCKED),
        (AgentState.RUNNING, "x", None, IdDecision.LOCKED),
        (AgentState.RUNNING, "x", "x", IdDecision.LOCKED),
        (AgentState.RUNNING, "x", "y", IdDecision.CONFLICT),
        (AgentState.DONE, "x", None, IdDecision.COMPARE),
        (AgentState.DONE, "x", "x", IdDecision.STORED),
        (AgentState.DONE, "x", "y", IdDecision.CONFLICT),
        (AgentState.FAILED, "x", "y", IdDecision.RUN),
        (AgentState.TIMED_OUT, "x", "x", IdDecision.RUN),
        (AgentState.INTERRUPTED, "x", "y", IdDecision.RUN),
    ],
)
def test_what_an_id_that_comes_again_means(state, recorded, sent, verdict) -> None:
    assert judge(state, recorded, sent) is verdict


def test_every_outcome_has_its_state() -> None:
    assert [outcome.state for outcome in AgentOutcome] == [AgentState.DONE, AgentState.FAILED, AgentState.TIMED_OUT]


def test_args_are_a_json_list_of_texts() -> None:
    assert parse_args('["--seed", "7"]') == ("--seed", "7")
    for wrong in ("", "x", "{}", "[1]", '["a', '["\\u0000"]', "[" * 100_000, str(["x"] * 5)):
        with pytest.raises(InvalidInput):
            parse_args(wrong)


def test_a_time_limit_is_above_zero_and_finite() -> None:
    assert [parse_timeout(text) for text in ("0.5", "90", "1e+06", "1e16")] == [0.5, 90.0, 1e6, 1e16]
    for wrong in ("", "x", "0", "-1", "inf", "nan", "3 ", "\uff13", "1_000", "1e999", "+5"):
        with pytest.raises(InvalidInput):
            parse_timeout(wrong)


def test_an_input_hash_is_64_small_hex_digits() -> None:
    assert check_input_hash("a" * 64) == "a" * 64
    for wrong in ("", "a" * 63, "A" * 64, "a" * 64 + "\n", "../" + "a" * 61):
        with pytest.raises(InvalidInput):
            check_input_hash(wrong)


@pytest.mark.parametrize(("cores", "memory_bytes", "slots"), [(8, 64 * GIB, 8), (8, 4 * GIB, 4), (2, GIB // 2, 1)])
def test_slots_suit_the_machine(cores: int, memory_bytes: int, slots: int) -> None:
    assert default_slots(cores, memory_bytes) == slots
