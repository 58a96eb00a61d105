"""The machines when messages are lost or doubled, links half-open, the store away and reports impossible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tasuki.core.job import BlobRef, Outcome, State
from tasuki.core.lifecycle import LEASE_MARGIN_S, LEASE_TTL_S
from tasuki.core.protocol import AssignJobs, JobsFinished
from tasuki.core.store_messages import Turn
from tasuki.errors import DiskFull, TasukiError, Unavailable
from tasuki.wire.messages import FrameDecoder, decode
from tests.support.harness import Harness

LOST_AFTER_S = LEASE_TTL_S + LEASE_MARGIN_S
PATIENCE_S = 1.0  # duties and reconnects are due within this


def messages(pieces: list[bytes]) -> list[object]:
    """The messages in bytes on their way."""
    decoder = FrameDecoder(2**20)
    return [decode(frame, 2**20) for piece in pieces for frame in decoder.feed(piece)]


def nested(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(levels):
        inner = {"in": inner}
    return inner


# ---------------------------------------------------------------------------------------------------- lost and doubled messages


def test_a_submit_whose_ack_was_lost_makes_one_job(world: Harness) -> None:
    client, worker = world.client(), world.worker()
    ticket = client.submit_ids("a")
    assert client.link is not None
    client.link.hold_to_node = True
    world.settle()
    assert client.answers == {}
    world.cut(client)
    world.run_for(PATIENCE_S)
    [existed] = client.answers[ticket].answer.exceptions
    assert (existed.job_id, existed.state) == ("a", "RUNNING")
    worker.finish("a")
    world.settle()
    assert client.result("a").state is State.SUCCEEDED
    assert worker.runs == [("a", 1)]


def test_a_result_that_was_lost_on_the_way_comes_after_a_reconnect(world: Harness) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    assert client.link is not None
    client.link.hold_to_node = True
    worker.finish("a", b"lost and found")
    world.settle()
    world.cut(client)
    world.run_for(PATIENCE_S)
    assert client.result("a").outcome.result == b"lost and found"


def test_a_doubled_assignment_runs_once(world: Harness) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    assert worker.link is not None
    worker.link.hold_to_node = True
    world.settle()
    assert any(isinstance(message, AssignJobs) for message in messages(list(worker.link.to_node)))
    worker.link.to_node.extend(list(worker.link.to_node))
    worker.link.hold_to_node = False
    world.settle()
    assert worker.runs == [("a", 1)]
    worker.finish("a")
    world.settle()
    assert client.result("a").state is State.SUCCEEDED


def test_a_doubled_finish_is_recorded_once(world: Harness) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    worker.finish("a", b"one")
    worker.flush()
    assert worker.link is not None
    said = [piece for piece in worker.link.to_server if isinstance(messages([piece])[0], JobsFinished)]
    worker.link.to_server.extend(said)
    world.settle()
    assert client.result("a").outcome.result == b"one"
    assert worker.machine.held == {}


def test_an_assignment_of_which_no_sign_comes_is_sent_again_with_growing_waits(world: Harness) -> None:
    client, worker = world.client(), world.worker()
    assert worker.link is not None
    started, lost = world.clock.lease(), []

    def lose(message: object) -> bool:
        if isinstance(message, AssignJobs):
            lost.append(round(world.clock.lease() - started))
        return isinstance(message, AssignJobs)

    worker.link.loses = lose
    client.submit_ids("a")
    world.run_for(3.0)
    assert lost == [0, 2]
    worker.link.loses = lambda message: False
    world.run_for(2.5)
    assert worker.runs == []
    world.run_for(1.0)
    assert worker.runs == [("a", 1)]
    assert world.job("a").losses == 0


def test_a_half_open_link_is_left_before_the_lease_is_over(world: Harness) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    assert worker.link is not None
    worker.link.mute = True
    world.run_for(2 * LOST_AFTER_S)
    assert worker.stopped == []
    assert worker.dials == 2
    assert world.job("a").attempt == 1


def test_a_peer_whose_hello_is_never_answered_dials_again(world: Harness) -> None:
    client, worker = world.client(), world.worker()
    for node in (client, worker):
        world.cut(node)
    world.tick()
    for node in (client, worker):
        assert node.link is not None
        node.link.mute = True
        node.link.to_server.clear()
    world.run_for(30.0)
    assert client.machine.online
    assert worker.machine.online


# ---------------------------------------------------------------------------------------------------- a store in trouble


def failing(times: int, error: TasukiError, hits: list[Turn], wanted: str = "submit") -> Callable[[Turn], TasukiError | None]:
    """Lets the first turns that carry `wanted` fail."""

    def fail(turn: Turn) -> TasukiError | None:
        if len(hits) < times and getattr(turn, wanted):
            hits.append(turn)
            return error
        return None

    return fail


def test_a_submit_that_the_store_refused_is_tried_again_by_the_client(world: Harness) -> None:
    client = world.client()
    hits: list[Turn] = []
    world.refuse = failing(1, Unavailable("busy"), hits)
    ticket = client.submit_ids("a")
    world.run_for(2.0)
    assert len(hits) == 1
    assert client.answers[ticket].error is None
    assert world.job("a").state is State.PENDING


def test_a_submit_on_a_full_disk_is_told_so_and_nothing_was_stored(world: Harness) -> None:
    client = world.client()
    world.refuse = failing(1, DiskFull("no room"), [])
    ticket = client.submit_ids("a")
    world.run_for(2.0)
    assert isinstance(client.answers[ticket].error, DiskFull)
    assert world.store.get(["a"]) == [None]


@pytest.mark.parametrize("error", [Unavailable("busy"), DiskFull("no room")])
def test_an_ending_that_the_store_refused_is_recorded_once_when_it_can(world: Harness, error: TasukiError) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    hits: list[Turn] = []
    world.refuse = failing(5, error, hits, "finish")
    lease_id = worker.finish("a", b"kept").lease_id
    world.run_for(3.0)
    assert len(hits) == 5
    assert client.result("a").outcome.result == b"kept"
    assert worker.forgotten == [(lease_id, "")]


def test_an_ending_whose_commit_is_not_known_is_recorded_once(world: Harness) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    hits: list[Turn] = []
    world.lose_answer = failing(1, Unavailable("the answer was lost"), hits, "finish")
    worker.finish("a", b"kept")
    world.run_for(2.0)
    assert len(hits) == 1
    assert client.result("a").outcome.result == b"kept"
    assert worker.machine.held == {}


def test_grants_whose_commit_is_not_known_are_read_back_and_delivered(world: Harness) -> None:
    client, worker = world.client(), world.worker()
    hits: list[Turn] = []
    world.lose_answer = failing(1, Unavailable("the answer was lost"), hits, "lease")
    ticket = client.submit_ids("a", "b")
    world.run_for(3.0)
    assert client.answers[ticket].error is None
    assert len(worker.jobs) == 1
    worker.finish(worker.jobs[0])
    world.run_for(3.0)
    worker.finish(worker.jobs[0])
    world.run_for(1.0)
    assert sorted(worker.runs) == [("a", 1), ("b", 1)]


def test_a_watch_that_the_store_could_not_serve_is_asked_again(world: Harness) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    other = world.client("other")
    world.refuse = failing(1, Unavailable("busy"), [], "get")
    other.watch("a")
    worker.finish("a")
    world.run_for(2.0)
    assert other.refused == {}
    assert other.result("a").state is State.SUCCEEDED


def test_the_leases_of_workers_survive_a_store_that_is_away_for_less_than_a_ttl(world: Harness) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    away = world.clock.lease() + LEASE_TTL_S / 2
    world.refuse = lambda turn: Unavailable("busy") if world.clock.lease() < away else None
    world.run_for(LEASE_TTL_S)
    assert worker.stopped == []
    assert worker.jobs == ["a"]


@pytest.mark.parametrize(
    "outcome",
    [
        {"exit_code": 2**63},
        {"result": b"x" * (64 * 1024 + 1)},
        {"meta": nested(40)},
        {"result_ref": BlobRef("a" * 64, 2**64 - 1)},
        {"message": "x" * 2**17},
    ],
)
def test_a_report_that_no_store_can_hold_fails_its_own_job_and_nothing_else(world: Harness, outcome: dict[str, Any]) -> None:
    client, bad, good = world.client(), world.worker("bad", patterns=("bad.*",)), world.worker("good", patterns=("good.*",))
    client.submit_ids("one", subject="bad.1")
    client.submit_ids("two", subject="good.1")
    world.settle()
    bad.end("one", Outcome(**outcome))
    good.finish("two")
    world.run_for(2.0)
    assert bad.exited is None
    assert client.result("one").state is State.FAILED
    assert client.result("one").outcome.error_code == "BAD_OUTCOME"
    assert client.result("two").state is State.SUCCEEDED
