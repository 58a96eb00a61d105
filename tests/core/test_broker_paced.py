"""Reports of workers on leases that their sessions were not given: judged by the store, some in each turn."""

from __future__ import annotations

import pytest

from tasuki.core.broker.broker import STORE_RETRY_S
from tasuki.core.broker.events import TurnDone, TurnFailed
from tasuki.core.broker.turn_builder import PACED_ITEM_BYTES, PACED_MAX_BYTES, PACED_PER_TURN, REPORTED_PER_TURN
from tasuki.core.job import JobSpec, Outcome, State
from tasuki.core.protocol import (
    Accepted,
    Claim,
    Ending,
    GiveCredit,
    Heartbeat,
    HeartbeatAnswer,
    JobsFinished,
    JobsRecorded,
    JobsReleased,
    JobsStarted,
    Message,
    SubmitJobs,
)
from tasuki.core.store_messages import Turn
from tasuki.errors import Unavailable
from tasuki.stores.batching import execute
from tests.core.broker_stage import TCP, BrokerStage, claim, ending

FOREIGN = [Claim(f"job-{n}", f"lease-{n}", 1) for n in range(1024)]
ENDINGS = [Ending(one.job_id, one.lease_id, one.attempt, Outcome()) for one in FOREIGN]
FAILURES = [Ending(one.job_id, one.lease_id, one.attempt, Outcome(error_code="EXIT_CODE")) for one in FOREIGN]
WORKERS_VERBS = ("finish", "fail", "start", "renew", "release")


@pytest.fixture
def stage() -> BrokerStage:
    return BrokerStage()


def run_turn(stage: BrokerStage) -> Turn:
    """Let the store do the next turn, and return it; without items if there is none."""
    turn = stage.broker.next_turn(stage.now())
    if turn is None:
        return Turn()
    stage.apply(TurnDone(turn, execute(stage.store, turn)))
    return run_turn(stage) if turn.epoch else turn


def items_of(turn: Turn) -> int:
    return sum(len(getattr(turn, verb)) for verb in WORKERS_VERBS)


def stranger(stage: BrokerStage, token_id: str = "stranger") -> int:
    return stage.worker(token_id, peer=TCP, token=stage.token(token_id, "worker", "a.>"), patterns=("a.>",))


@pytest.mark.parametrize(
    "message",
    [JobsFinished(ENDINGS), JobsFinished(FAILURES), JobsStarted(FOREIGN), Heartbeat(9, FOREIGN), JobsReleased(FOREIGN)],
    ids=["finish", "fail", "start", "renew", "release"],
)
def test_a_flood_of_reports_on_leases_of_others_leaves_each_turn_short(stage: BrokerStage, message: Message) -> None:
    # Given a worker that reports a thousand attempts of others, again and again
    client, worker = stage.node(), stranger(stage)
    for _ in range(3):
        stage.tell(worker, message)
    # When somebody submits a job
    stage.tell(client, SubmitJobs(7, [JobSpec(job_id="mine")]))
    turn = run_turn(stage)
    # Then the next turn stores it, beside a few of the reports
    assert stage.last(client, Accepted).corr_id == 7
    assert items_of(turn) <= PACED_PER_TURN


def test_all_of_them_are_fenced_in_the_end_and_leave_nothing_in_the_story_of_the_job(stage: BrokerStage) -> None:
    owner = stage.worker(credit=1)
    stage.submit(stage.node(), "job-0")
    worker = stranger(stage)

    stage.ask(worker, JobsFinished(ENDINGS))

    fenced = [lease_id for message in stage.all(worker, JobsRecorded) for lease_id, _ in message.fenced]
    assert fenced == [one.lease_id for one in FOREIGN]
    assert stage.store.incidents("job-0") == []
    stage.ask(owner, JobsFinished([ending(stage.grants(owner)[0])]))
    assert stage.job("job-0").state is State.SUCCEEDED


def test_a_heartbeat_is_answered_once_when_all_its_leases_were_judged(stage: BrokerStage) -> None:
    worker = stranger(stage)
    stage.tell(worker, Heartbeat(9, FOREIGN))
    run_turn(stage)
    assert stage.all(worker, HeartbeatAnswer) == []

    stage.turns()

    [answer] = stage.all(worker, HeartbeatAnswer)
    assert answer == HeartbeatAnswer(9, lost=[one.lease_id for one in FOREIGN])


def test_the_own_lease_is_reported_at_once_while_others_wait(stage: BrokerStage) -> None:
    worker = stage.worker(credit=1)
    stage.submit(stage.node(), "own")
    stage.tell(worker, JobsFinished(ENDINGS))
    stage.tell(worker, JobsFinished([ending(stage.grants(worker)[0])]))

    run_turn(stage)

    assert stage.job("own").state is State.SUCCEEDED


def test_one_workers_flood_delays_no_outbox_of_another(stage: BrokerStage) -> None:
    old = stage.worker(credit=1)
    stage.submit(stage.node(), "kept")
    kept = ending(stage.grants(old)[0])
    stage.close(old)
    attacker, new = stranger(stage), stage.worker(incarnation="w1-2")
    stage.tell(attacker, JobsFinished(ENDINGS))
    stage.tell(new, JobsFinished([kept]))

    run_turn(stage)

    assert stage.job("kept").state is State.SUCCEEDED


def test_a_large_outbox_of_an_earlier_process_is_recorded_whole_through_a_failed_turn(stage: BrokerStage) -> None:
    # Given a worker that ended many attempts, and was started again before it could report them
    job_ids = [f"job-{n}" for n in range(2 * PACED_PER_TURN + 10)]
    old = stage.worker(credit=len(job_ids))
    client = stage.node()
    stage.submit(client, *job_ids)
    while len(stage.grants(old)) < len(job_ids):
        stage.pass_time(1.0)
    outbox = [ending(grant, exit_code=n) for n, grant in enumerate(stage.grants(old))]
    stage.close(old)
    new = stage.worker(incarnation="w1-2")
    # When it reports them, and the turn with the first of them fails
    stage.tell(new, JobsFinished(outbox))
    turn = stage.broker.next_turn(stage.now())
    while turn is not None and turn.epoch:
        stage.apply(TurnDone(turn, execute(stage.store, turn)))
        turn = stage.broker.next_turn(stage.now())
    assert turn is not None
    stage.apply(TurnFailed(turn, Unavailable("busy")))
    stage.pass_time(STORE_RETRY_S)
    # Then all are recorded, each with its own outcome
    assert [job.outcome.exit_code for job in stage.store.get(job_ids)] == list(range(len(job_ids)))
    assert stage.last(new, JobsRecorded).recorded == [one.lease_id for one in outbox]


def test_a_resumed_worker_gets_nothing_new_before_its_leases_are_renewed(stage: BrokerStage) -> None:
    # Given a worker that comes back with a lease, behind a long outbox
    old = stage.worker(credit=1)
    client = stage.node()
    stage.submit(client, "a")
    held = claim(stage.grants(old)[0])
    stage.close(old)
    new = stage.worker(resumed=True)
    stage.tell(new, JobsFinished(ENDINGS))
    stage.tell(new, Heartbeat(5, [held]))
    stage.tell(new, GiveCredit(1))
    stage.tell(client, SubmitJobs(8, [JobSpec(job_id="b")]))
    # When turns pass
    while not stage.all(new, HeartbeatAnswer):
        assert stage.grants(new) == []
        run_turn(stage)
    stage.turns()
    # Then the new job follows the renewal
    assert [grant.job_id for grant in stage.grants(new)] == ["b"]
    assert stage.last(new, HeartbeatAnswer) == HeartbeatAnswer(5)


def test_a_worker_of_which_too_much_waits_is_behind_until_it_was_asked(stage: BrokerStage) -> None:
    worker, other = stranger(stage), stranger(stage, "other")
    for _ in range(PACED_MAX_BYTES // PACED_ITEM_BYTES // len(ENDINGS)):
        stage.tell(worker, JobsFinished(ENDINGS))
        assert not stage.broker.is_behind(worker)

    stage.tell(worker, JobsFinished(ENDINGS))

    assert stage.broker.is_behind(worker)
    assert not stage.broker.is_behind(other)
    stage.turns()
    assert not stage.broker.is_behind(worker)


def test_a_worker_that_names_its_own_lease_without_end_leaves_each_turn_short(stage: BrokerStage) -> None:
    worker = stage.worker(credit=1)
    client = stage.node()
    stage.submit(client, "own")
    own = claim(stage.grants(worker)[0])
    for number in range(5, 10):
        stage.tell(worker, Heartbeat(number, [own] * 1024))

    assert items_of(run_turn(stage)) <= REPORTED_PER_TURN + PACED_PER_TURN

    stage.turns()
    assert [answer.corr_id for answer in stage.all(worker, HeartbeatAnswer)] == [5, 6, 7, 8, 9]
    assert stage.last(worker, HeartbeatAnswer).lost == []


def test_leases_that_a_resumed_worker_names_without_holding_them_leave_each_turn_short(stage: BrokerStage) -> None:
    worker = stage.worker("stranger", peer=TCP, token=stage.token("stranger", "worker", "a.>"), patterns=("a.>",), resumed=True)
    for number in range(5, 10):  # the first says that it holds them, and the others come before the store was asked
        stage.tell(worker, Heartbeat(number, FOREIGN))

    assert items_of(run_turn(stage)) <= REPORTED_PER_TURN + PACED_PER_TURN

    stage.turns()
    assert {len(answer.lost) for answer in stage.all(worker, HeartbeatAnswer)} == {len(FOREIGN)}
