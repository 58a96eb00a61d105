"""Unstarted attempts of a silent, busy or idle worker go back to the others, without a retry or a loss."""

from __future__ import annotations

import pytest

from tasuki.core.broker.events import BEGIN_WITHIN_S
from tasuki.core.job import Progress, State
from tasuki.core.lifecycle import LEASE_MARGIN_S, LEASE_TTL_S
from tasuki.core.protocol import Claim, Heartbeat, HeartbeatAnswer, JobsStarted
from tests.core.broker_stage import BrokerStage, claim

BEAT_S = LEASE_TTL_S / 3
LOOK_S = 0.5


@pytest.fixture
def stage() -> BrokerStage:
    return BrokerStage()


def beat(stage: BrokerStage, conn: int, claims: list[Claim], seconds: float, progress: dict[str, Progress] | None = None) -> None:
    """Let the worker renew for so long, as if all were well."""
    msg_id = 1000
    for _ in range(round(seconds / BEAT_S)):
        msg_id += 1
        stage.ask(conn, Heartbeat(msg_id, claims, progress or {}))
        wait(stage, BEAT_S)


def wait(stage: BrokerStage, seconds: float, alive: int | None = None) -> None:
    """Let time pass, while one worker without leases is heard of."""
    for number in range(round(seconds / LOOK_S)):
        if alive is not None:
            stage.tell(alive, Heartbeat(5000 + number))
        stage.pass_time(LOOK_S)


def test_what_was_sent_ahead_to_a_worker_that_hangs_goes_to_another_one_and_costs_nothing(stage: BrokerStage) -> None:
    client = stage.node()
    stage.worker("hung", credit=3, slots=1)
    stage.submit(client, "running", "ahead-1", "ahead-2", max_losses=0)
    other = stage.worker("other", credit=3)

    wait(stage, LEASE_TTL_S + 1, alive=other)

    assert sorted(grant.job_id for grant in stage.grants(other)) == ["ahead-1", "ahead-2"]
    assert [(job.losses, job.failures) for name in ("ahead-1", "ahead-2") if (job := stage.job(name))] == [(0, 0), (0, 0)]


def test_an_attempt_that_had_a_slot_when_its_worker_fell_silent_is_a_loss(stage: BrokerStage) -> None:
    client = stage.node()
    stage.worker("hung", credit=2, slots=1)
    stage.submit(client, "running", "ahead")

    wait(stage, LEASE_TTL_S + LEASE_MARGIN_S + 2)

    losses = {name: job.losses for name in ("running", "ahead") if (job := stage.job(name))}
    assert losses == {"running": 1, "ahead": 0}


def test_slots_of_started_attempts_count_as_taken(stage: BrokerStage) -> None:
    client = stage.node()
    worker = stage.worker("hung", credit=3, slots=2)
    stage.submit(client, "a", "b", "c")
    first, second, _ = stage.grants(worker)
    stage.ask(worker, JobsStarted([claim(second)]))

    wait(stage, LEASE_TTL_S + LEASE_MARGIN_S + 2)

    assert {name: job.losses for name in "abc" if (job := stage.job(name))} == {"a": 1, "b": 1, "c": 0}
    assert first.job_id == "a"


def test_a_worker_that_renews_without_ever_starting_loses_the_job_to_another_one(stage: BrokerStage) -> None:
    client = stage.node()
    worker = stage.worker("idler", credit=1)
    stage.submit(client, "a", max_losses=0)
    [grant] = stage.grants(worker)

    beat(stage, worker, [claim(grant)], BEGIN_WITHIN_S + BEAT_S)
    assert stage.last(worker, HeartbeatAnswer).lost == [grant.lease_id]
    other = stage.worker("other", credit=1)
    assert stage.grants(other) == []
    beat(stage, worker, [claim(grant)], 2 * BEAT_S)

    assert {grant.attempt for grant in stage.grants(other)} == {2}
    job = stage.job("a")
    assert job is not None
    assert (job.attempt, job.losses, job.failures) == (2, 0, 0)


@pytest.mark.parametrize("sign", ["start", "progress"])
def test_an_attempt_with_a_sign_of_life_is_left_alone(stage: BrokerStage, sign: str) -> None:
    client, worker = stage.node(), stage.worker("busy", credit=1)
    stage.submit(client, "a")
    [grant] = stage.grants(worker)
    if sign == "start":
        stage.ask(worker, JobsStarted([claim(grant)]))

    fetching = {grant.lease_id: Progress(0.0, "fetching")} if sign == "progress" else {}
    beat(stage, worker, [claim(grant)], BEGIN_WITHIN_S + LEASE_TTL_S + 4 * BEAT_S, fetching)

    assert not any(answer.lost for answer in stage.all(worker, HeartbeatAnswer))
    job = stage.job("a")
    assert job is not None
    assert (job.attempt, job.state) == (1, State.RUNNING if sign == "start" else State.ASSIGNED)


def test_a_lease_that_was_renewed_through_another_server_is_not_taken_back() -> None:
    first = BrokerStage(server_id="first", shared=True)
    second = BrokerStage(first, server_id="second", shared=True)
    worker = first.worker("w1", credit=2, slots=1)
    first.submit(first.node(), "running", "ahead")
    claims = [claim(grant) for grant in first.grants(worker)]
    wait(first, LEASE_TTL_S - 2)
    moved = second.worker("w1", resumed=True)  # the first server has not heard of it
    second.ask(moved, Heartbeat(1, claims))

    wait(first, 4)

    assert [job.state for job in first.store.get(["running", "ahead"]) if job] == [State.ASSIGNED] * 2


def test_an_attempt_that_its_worker_shows_no_more_is_no_load_of_it_once_its_lease_is_over() -> None:
    stage = BrokerStage(shared=True)  # another server leads, and reaps
    worker = stage.worker("w1", credit=2, slots=1)
    stage.submit(stage.node(), "let-go")
    stage.ask(worker, Heartbeat(1, [claim(grant) for grant in stage.grants(worker)]))
    session = stage.broker.workers["w1"]

    wait(stage, LEASE_TTL_S, alive=worker)
    assert session.account.running == 1
    wait(stage, LEASE_MARGIN_S + 2, alive=worker)

    assert (session.account.running, session.deliveries) == (0, {})
