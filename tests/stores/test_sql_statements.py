"""The statements of both SQL stores agree with each other and with the transition table."""

from __future__ import annotations

import re

import pytest

from tasuki.core.lifecycle import JobEvent, sources
from tests.stores.sql_statements import POSTGRESQL, SQLITE


@pytest.mark.parametrize("statements", [SQLITE, POSTGRESQL], ids=["sqlite", "postgresql"])
@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("finish_plain", JobEvent.LOSE),
        ("finish_full", JobEvent.LOSE),
        ("start", JobEvent.START),
        ("release", JobEvent.RELEASE),
        ("resume", JobEvent.RESUME),
        ("requeue", JobEvent.REQUEUE),
    ],
)
def test_predicates_name_the_states_of_the_transition_table(statements: dict[str, str], name: str, event: JobEvent) -> None:
    # finish takes the leased ones in its batch, which are those that can be lost; ORPHANED is judged singly.
    condition = statements[name].rpartition("WHERE")[2]
    named = re.search(r"state (?:IN \(([^)]*)\)|= ('[A-Z]+'))", condition)
    assert named is not None

    assert {state.strip("' ") for state in (named[1] or named[2]).split(",")} == {state.value for state in sources(event)}


def test_both_vendors_have_the_same_statements_but_for_what_their_sessions_do_as_a_whole() -> None:
    assert set(SQLITE) - set(POSTGRESQL) == {"oldest_of_queue", "oldest_of_queues", "leased_groups", "succeeded_of"}
    floors = {"band_above", "groups_above", "subjects_above", "ready_below"}
    claims = {"claim_of_queue", "claim_of_rows", "next_of_queues"}
    enqueues = {"enqueue", "enqueue_alike", "enqueue_one", "has_enqueue_function"}
    assert set(POSTGRESQL) - set(SQLITE) == {*floors, *claims, *enqueues, "mark", "last_mark", "forget_mark"}
