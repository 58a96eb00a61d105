"""Pauses of subjects: the ranges that a walk jumps over, and what a broker does with the requests."""

from __future__ import annotations

import pytest

from tasuki.core.broker.events import Hinted, Publish
from tasuki.core.pauses import PAUSES_MAX, PausedPattern, PauseOrder, pause_of, unpaused
from tasuki.core.protocol import AssignJobs, ErrorMessage, Reply, Request
from tests.core.broker_stage import BrokerStage
from tests.core.test_broker_owner import meet, two_servers

WHOLE = [("", "\U0010ffff")]


# ---------------------------------------------------------------------------------------------------- ranges


@pytest.mark.parametrize(
    ("ranges", "patterns", "left"),
    [
        (WHOLE, [], WHOLE),
        (WHOLE, [">"], []),
        (WHOLE, ["*.x", "a.*"], WHOLE),  # no range: judged one by one
        ([("a.", "a/")], ["a.>"], []),
        ([("a.", "a/")], ["a.b.>"], [("a.", "a.b."), ("a.b/", "a/")]),
        ([("a.", "a/")], ["a.b"], [("a.", "a.b"), ("a.b\x01", "a/")]),
        ([("a.", "a/")], ["b.>"], [("a.", "a/")]),
        ([("a.m", "a/"), ("a.", "a.m")], ["a.b.>", "a.x.>"], [("a.m", "a.x."), ("a.x/", "a/"), ("a.", "a.b."), ("a.b/", "a.m")]),
    ],
)
def test_what_is_paused_is_cut_out_of_the_ranges_of_a_walk(
    ranges: list[tuple[str, str]], patterns: list[str], left: list[tuple[str, str]]
) -> None:
    assert unpaused(ranges, patterns) == left


def test_the_oldest_pause_of_a_subject_is_named() -> None:
    pauses = [PausedPattern("a.>", 2.0, "bob"), PausedPattern("a.b", 1.0, "alice"), PausedPattern("c", 0.0, "eve")]

    assert pause_of(pauses, "a.b") == pauses[1]
    assert pause_of(pauses, "a.c") == pauses[0]
    assert pause_of(pauses, "b") is None


# ---------------------------------------------------------------------------------------------------- the broker


def given(stage: BrokerStage, conn: int) -> list[str]:
    return [grant.job_id for message in stage.all(conn, AssignJobs) for grant in message.grants]


def test_jobs_of_a_paused_subject_wait_and_an_idle_worker_gets_them_when_it_is_resumed() -> None:
    stage = BrokerStage()
    worker, boss = stage.worker("w1", credit=5, patterns=("render.>", "mail.>")), stage.client("admin", "boss")

    stage.ask(boss, Request(9, "pause", {"pattern": "render.>", "reason": "the licence server is down"}))
    stage.submit(stage.client(), "waits", subject="render.x")
    stage.submit(stage.client(), "goes", subject="mail.x")
    assert given(stage, worker) == ["goes"]
    stage.ask(boss, Request(10, "resume", {"pattern": "render.>"}))

    assert given(stage, worker) == ["goes", "waits"]
    assert [reply.body for reply in stage.all(boss, Reply)] == [{"pattern": "render.>", "changed": True}] * 2
    audit = [(row.action, row.target, row.detail) for row in stage.store.audit() if row.action.startswith("subject.")]
    assert audit == [
        ("subject.resume", "render.>", ""),
        ("subject.pause", "render.>", "the licence server is down"),
    ]


def test_a_pause_below_job_submit_is_one_of_the_jobs_below_job_assign() -> None:
    stage = BrokerStage()
    worker, boss = stage.worker("w1", credit=5, patterns=(">",)), stage.client("admin", "boss")

    stage.ask(boss, Request(9, "pause", {"pattern": "job.submit.books.>"}))
    stage.submit(stage.client(), "waits", subject="job.submit.books.close")

    assert given(stage, worker) == []
    stage.ask(boss, Request(10, "resume", {"pattern": "job.assign.books.>"}))
    assert given(stage, worker) == ["waits"]


def test_other_servers_are_told_to_look_everywhere_when_something_is_resumed() -> None:
    first, second = two_servers()
    worker, boss = second.worker("w1", credit=5, patterns=("render.>",)), first.client("admin", "boss")
    meet(first, second)
    first.ask(boss, Request(9, "pause", {"pattern": "render.>"}))
    first.submit(first.client(), "waits", subject="render.x")
    first.others.clear()

    first.ask(boss, Request(10, "resume", {"pattern": "render.>"}))

    [hint] = [command.hint for command in first.others if isinstance(command, Publish)]
    assert hint.everything
    assert given(second, worker) == []
    second.apply(Hinted(hint))
    second.turns()
    assert given(second, worker) == ["waits"]


def test_a_second_pause_changes_nothing_and_too_many_are_refused() -> None:
    stage = BrokerStage()
    boss = stage.client("admin", "boss")
    stage.store.pause([PauseOrder(f"p{number}", "alice") for number in range(PAUSES_MAX)])

    stage.ask(boss, Request(9, "pause", {"pattern": "p0"}))
    stage.ask(boss, Request(10, "pause", {"pattern": "new"}))
    stage.ask(boss, Request(11, "resume", {"pattern": "never"}))

    assert [reply.body["changed"] for reply in stage.all(boss, Reply)] == [False, False]
    assert stage.last(boss, ErrorMessage).message.startswith("100 patterns are paused, which is the limit")


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_only_an_administrator_pauses_and_only_patterns(verb: str) -> None:
    stage = BrokerStage()
    alice, boss = stage.client(), stage.client("admin", "boss")

    stage.ask(alice, Request(9, verb, {"pattern": "a.>"}))
    stage.ask(boss, Request(9, verb, {"pattern": "a..b"}))

    assert stage.last(alice, ErrorMessage).code == "FORBIDDEN"
    assert stage.last(boss, ErrorMessage).code == "INVALID"
    assert stage.store.paused() == []
