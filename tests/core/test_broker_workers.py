"""A broker and its workers: credit, leasing, endings, heartbeats, and the turns that carry them to the store."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest

from tasuki.core.broker.broker import READS_PER_TURN, STORE_RETRY_S
from tasuki.core.broker.events import DiskSpace, SendBlob, TurnDone, TurnFailed
from tasuki.core.broker.state import CREDIT_MAX
from tasuki.core.broker.upkeep import DUTY_INTERVAL_S
from tasuki.core.broker.worker_messages import REDELIVER_AFTER_S
from tasuki.core.job import BlobRef, JobSpec, Outcome, State
from tasuki.core.machine import Ticked
from tasuki.core.protocol import (
    AssignJobs,
    BlobGet,
    CancelJobs,
    CancelLeases,
    Claim,
    Ending,
    ErrorMessage,
    GiveCredit,
    Heartbeat,
    HeartbeatAnswer,
    HelloWorker,
    JobsFinished,
    JobsRecorded,
    JobsReleased,
    JobsStarted,
    Reply,
    Request,
    Results,
    SubmitJobs,
    Subscribe,
)
from tasuki.core.store_messages import BlobClaim, Turn
from tasuki.errors import DiskFull, InvalidInput, Unavailable
from tasuki.stores.batching import execute
from tests.core.broker_stage import TCP, UNIX, BrokerStage, claim, ending


@pytest.fixture
def stage() -> BrokerStage:
    return BrokerStage()


def one_turn(stage: BrokerStage) -> Turn:
    """The next turn that is not one of the leader's duties; those are done."""
    while (turn := stage.broker.next_turn(stage.now())) is not None and turn.epoch:
        stage.apply(TurnDone(turn, execute(stage.store, turn)))
    assert turn is not None
    return turn


# ---------------------------------------------------------------------------------------------------- credit and leasing


def test_a_worker_without_credit_gets_nothing(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker()
    stage.submit(client, "a")
    assert stage.grants(worker) == []
    stage.ask(worker, GiveCredit(1))
    assert [grant.job_id for grant in stage.grants(worker)] == ["a"]


def test_never_more_is_granted_than_credit_was_given(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker(credit=2)
    stage.submit(client, *(f"job-{number}" for number in range(5)))
    assert len(stage.grants(worker)) == 2
    stage.ask(worker, GiveCredit(1))
    assert len(stage.grants(worker)) == 3


def test_an_ended_attempt_gives_no_credit_by_itself(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker(credit=1)
    stage.submit(client, "a", "b")
    stage.ask(worker, JobsFinished([ending(stage.grants(worker)[0])]))
    assert len(stage.grants(worker)) == 1


@pytest.mark.parametrize("credit", [-CREDIT_MAX - 1, CREDIT_MAX + 1])
def test_credit_beyond_reason_ends_the_connection(stage: BrokerStage, credit: int) -> None:
    worker = stage.worker()
    stage.tell(worker, GiveCredit(credit))
    assert isinstance(stage.hung_up[worker], InvalidInput)


def test_a_submit_is_stored_leased_and_assigned_in_one_turn(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker(credit=1)
    stage.tell(client, SubmitJobs(1, [JobSpec(job_id="a")]))
    turn = one_turn(stage)
    assert (len(turn.submit), len(turn.lease)) == (1, 1)
    stage.apply(TurnDone(turn, execute(stage.store, turn)))
    assert [grant.job_id for grant in stage.grants(worker)] == ["a"]


def test_new_jobs_go_to_the_least_loaded_worker_first(stage: BrokerStage) -> None:
    client, busy, idle = stage.node(), stage.worker("busy", credit=4), stage.worker("idle")
    stage.submit(client, "one", "two")
    stage.ask(idle, GiveCredit(4))
    stage.submit(client, "three")
    assert [grant.job_id for grant in stage.grants(idle)] == ["three"]
    assert len(stage.grants(busy)) == 2


def test_while_a_lease_request_is_under_way_its_credit_is_not_spent_again(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker(credit=1)
    stage.tell(client, SubmitJobs(1, [JobSpec(job_id="a"), JobSpec(job_id="b")]))
    first = one_turn(stage)
    stage.tell(client, SubmitJobs(2, [JobSpec(job_id="c")]))
    account = stage.broker.workers["w1"].account
    assert (account.available, account.reserved) == (0, 1)
    stage.apply(TurnDone(first, execute(stage.store, first)))
    stage.turns()
    assert len(stage.grants(worker)) == 1


def test_idle_workers_do_not_ask_the_store_again_for_what_is_not_there(stage: BrokerStage) -> None:
    stage.worker(credit=1)
    stage.turns()
    assert stage.broker.next_turn(stage.now()) is None


def test_nothing_is_leased_while_the_disk_is_full_and_all_of_it_afterwards(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker()
    stage.submit(client, "a")
    stage.apply(DiskSpace("full"))
    stage.ask(worker, GiveCredit(1))
    assert stage.grants(worker) == []
    stage.apply(DiskSpace(""))
    stage.turns()
    assert len(stage.grants(worker)) == 1


def test_a_worker_that_takes_no_subjects_gets_nothing_more(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker(credit=2)
    stage.ask(worker, Subscribe(31, ()))
    assert stage.last(worker, Reply).body == {"patterns": []}
    stage.submit(client, "a")
    assert stage.grants(worker) == []
    stage.ask(worker, Subscribe(32, (">",)))
    assert len(stage.grants(worker)) == 1


@pytest.mark.parametrize("scope", [(), ("job.submit.books.>",), ("job.assign.books.>",)])
def test_a_worker_below_job_submit_takes_the_jobs_below_job_assign(stage: BrokerStage, scope: tuple[str, ...]) -> None:
    client, token = stage.node(), stage.token("theirs", "worker", *scope)
    worker = stage.worker(credit=2, peer=TCP, token=token, patterns=("job.submit.books.>",))
    stage.submit(client, "a", subject="job.submit.books.close")
    assert [grant.job_id for grant in stage.grants(worker)] == ["a"]

    stage.ask(worker, Subscribe(31, ("job.submit.books.open",)))
    stage.submit(client, "b", subject="job.assign.books.open")

    assert stage.last(worker, Reply).body == {"patterns": ["job.assign.books.open"]}
    assert [grant.job_id for grant in stage.grants(worker)] == ["a", "b"]


def test_a_worker_that_stops_taking_while_its_lease_is_made_keeps_its_credit_for_later(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker(credit=1)
    stage.tell(client, SubmitJobs(1, [JobSpec(job_id="a")]))
    turn = one_turn(stage)
    stage.tell(worker, Subscribe(31, ()))
    stage.apply(TurnDone(turn, execute(stage.store, turn)))
    stage.turns()
    assert stage.grants(worker) == []
    stage.ask(worker, Subscribe(32, (">",)))
    assert [(grant.job_id, grant.attempt) for grant in stage.grants(worker)] == [("a", 2)]


# ---------------------------------------------------------------------------------------------------- endings


def test_endings_are_recorded_or_fenced_after_the_commit(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker(credit=2)
    stage.submit(client, "a", "b")
    good, other = stage.grants(worker)
    forged = ending(other)
    forged = type(forged)(forged.job_id, "not-the-lease", forged.attempt, forged.outcome)
    stage.tell(worker, JobsFinished([ending(good, result=b"yes"), forged]))
    assert stage.all(worker, JobsRecorded) == []
    stage.turns()
    recorded = stage.last(worker, JobsRecorded)
    assert recorded.recorded == [good.lease_id]
    [(lease_id, reason)] = recorded.fenced
    assert lease_id == "not-the-lease"
    assert "is not held" in reason
    stage.tell(worker, JobsFinished([Ending("no-such-job", "invented", 1, Outcome(exit_code=0))]))
    stage.turns()
    assert stage.last(worker, JobsRecorded).fenced == [("invented", reason)]  # a job that exists looks like one that does not
    [results] = stage.all(client, Results)
    assert [(item.job_id, item.outcome.result) for item in results.items] == [("a", b"yes")]


def test_a_worker_cannot_end_another_workers_attempt(stage: BrokerStage) -> None:
    client, first, second = stage.node(), stage.worker("w1", credit=1), stage.worker("w2")
    stage.submit(client, "a")
    [grant] = stage.grants(first)
    stage.ask(second, JobsFinished([ending(grant)]))
    assert [lease_id for lease_id, _ in stage.last(second, JobsRecorded).fenced] == [grant.lease_id]
    assert stage.job("a").state is State.ASSIGNED  # type: ignore[union-attr]


@pytest.mark.parametrize("told", [math.inf, math.nan, 1e300, -1e15, 0.0])
def test_a_start_is_never_before_the_grant_nor_after_the_report(stage: BrokerStage, told: float) -> None:
    client, worker = stage.node(), stage.worker(credit=1)
    stage.submit(client, "a")
    [grant] = stage.grants(worker)
    granted_at = stage.now().wall
    stage.pass_time(1.0)
    stage.ask(worker, JobsFinished([Ending("a", grant.lease_id, grant.attempt, Outcome(), told)]))
    job = stage.job("a")
    assert job is not None
    assert job.state is State.SUCCEEDED
    assert job.started_at is not None
    assert granted_at <= job.started_at <= stage.now().wall


@pytest.mark.parametrize(
    "outcome",
    [
        {"error_code": "x" * 65},
        {"result_sha256": "x" * 1000},
        {"result_sha256": "A" * 64},
        {"result_ref": BlobRef("a" * 64, 5), "result_sha256": "b" * 64},
        {"result": b"x", "result_sha256": hashlib.sha256(b"y").hexdigest()},
        {"result": b"1", "result_sha256": hashlib.sha256(b"y").hexdigest(), "meta": {"summary_text": "", "freqs_csv": ""}},
        {"meta": {"x": {None: 1}}},
        {"meta": {"x": {1, 2}}},
        {"meta": {"x": [{}] * 2000}},
    ],
    ids=str,
)
def test_an_outcome_that_cannot_be_shown_fails_its_own_attempt(stage: BrokerStage, outcome: dict[str, Any]) -> None:
    client, worker = stage.node(), stage.worker(credit=1)
    stage.submit(client, "a")
    [grant] = stage.grants(worker)
    stage.ask(worker, JobsFinished([ending(grant, **outcome)]))
    job = stage.job("a")
    assert job is not None
    assert job.outcome is not None
    assert (job.state, job.outcome.error_code, job.outcome.meta) == (State.FAILED, "BAD_OUTCOME", {})


def test_an_inline_result_without_its_hash_gets_it(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker(credit=1)
    stage.submit(client, "a")
    stage.ask(worker, JobsFinished([ending(stage.grants(worker)[0], result=b"x")]))
    job = stage.job("a")
    assert job is not None
    assert job.outcome == Outcome(result=b"x", result_sha256=hashlib.sha256(b"x").hexdigest())


def test_an_exact_repeat_is_recorded_again_told_once_and_counted_once(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker(credit=2)
    stage.submit(client, "a", "b")
    grant, _ = stage.grants(worker)
    for _ in range(2):
        stage.ask(worker, JobsFinished([ending(grant, result=b"x")]))
    assert [message.recorded for message in stage.all(worker, JobsRecorded)] == [[grant.lease_id]] * 2
    assert len(stage.all(client, Results)) == 1
    assert stage.broker.workers["w1"].account.running == 1


@pytest.mark.parametrize("stored_bytes", [None, 200_000])
def test_a_result_blob_that_is_not_here_or_has_another_size_is_not_recorded(stage: BrokerStage, stored_bytes: int | None) -> None:
    client, worker = stage.node(), stage.worker(credit=1)
    stage.submit(client, "a")
    [grant] = stage.grants(worker)
    ref = BlobRef("a" * 64, 10**6)
    if stored_bytes is not None:
        stage.store.blobs_stored(stage.store.place_blobs([BlobClaim(ref.sha256, stored_bytes)]))
    stage.ask(worker, JobsFinished([ending(grant, result_ref=ref)]))
    assert worker not in stage.hung_up
    job = stage.job("a")
    assert job is not None
    assert (job.state, job.failures) == (State.PENDING, 1)
    assert job.outcome is not None
    assert job.outcome.error_code == "BAD_OUTCOME"


@pytest.mark.parametrize("verb", [JobsStarted, JobsReleased, lambda claims: Heartbeat(5, claims)])
def test_a_claim_that_no_store_can_hold_is_refused_and_never_reaches_it(stage: BrokerStage, verb: Any) -> None:
    worker = stage.worker()
    stage.tell(worker, verb([Claim("a", "lease", 2**63)]))
    refused = stage.hung_up.get(worker) or stage.last(worker, ErrorMessage)
    assert refused.code == "INVALID"
    assert len(stage.broker.builder) == 0


def test_released_attempts_go_to_whoever_has_credit(stage: BrokerStage) -> None:
    client, first = stage.node(), stage.worker("w1", credit=1)
    stage.submit(client, "a")
    second = stage.worker("w2", credit=1)
    stage.ask(first, JobsReleased([claim(stage.grants(first)[0])], "not now"))
    [again] = stage.grants(second)
    assert (again.job_id, again.attempt) == ("a", 2)
    assert stage.broker.workers["w1"].account.running == 0


# ---------------------------------------------------------------------------------------------------- heartbeats


def test_a_heartbeat_renews_what_it_names_and_tells_cancel_and_lost(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker(credit=2)
    stage.submit(client, "a", "b")
    stage.clock.advance(10.0)
    first, second = stage.grants(worker)
    stage.ask(client, CancelJobs(9, ["b"]))
    stage.ask(worker, Heartbeat(50, [claim(first), claim(second), Claim("a", "old-lease", 1)]))
    stage.pass_time(DUTY_INTERVAL_S)
    answer = stage.last(worker, HeartbeatAnswer)
    assert (answer.corr_id, answer.cancel, answer.lost) == (50, [second.lease_id], ["old-lease"])
    lease = stage.job("a").lease  # type: ignore[union-attr]
    assert lease is not None
    assert lease.expires_at > stage.clock.lease() + 15.0


def test_an_empty_heartbeat_is_answered_with_the_next_duties(stage: BrokerStage) -> None:
    worker = stage.worker()
    stage.ask(worker, Heartbeat(50))
    stage.pass_time(DUTY_INTERVAL_S)
    assert stage.last(worker, HeartbeatAnswer).corr_id == 50


def test_a_start_of_a_lost_lease_is_told_at_once(stage: BrokerStage) -> None:
    worker = stage.worker()
    stage.ask(worker, JobsStarted([Claim("ghost", "lease", 1)]))
    assert stage.last(worker, HeartbeatAnswer).lost == ["lease"]


def test_a_cancel_reaches_the_worker_that_runs_the_job(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker(credit=1)
    stage.submit(client, "a")
    [grant] = stage.grants(worker)
    stage.ask(client, CancelJobs(9, ["a"]))
    assert stage.last(worker, CancelLeases).lease_ids == [grant.lease_id]


def test_a_worker_asks_for_blobs_under_its_own_name_and_start(stage: BrokerStage) -> None:
    worker = stage.worker("w1")
    get = BlobGet(3, "a" * 64, "job")
    stage.tell(worker, get)
    [command] = stage.others
    assert isinstance(command, SendBlob)
    assert (command.get, command.worker_id, command.incarnation) == (get, "w1", "w1-1")


# ---------------------------------------------------------------------------------------------------- coming back


def test_a_worker_that_comes_back_is_given_nothing_before_it_said_what_it_holds(stage: BrokerStage) -> None:
    client, old = stage.node(), stage.worker("w1", credit=1)
    stage.submit(client, "a", "b")
    [grant] = stage.grants(old)
    stage.close(old)
    new = stage.worker("w1", resumed=True)
    stage.ask(new, GiveCredit(1))
    assert stage.grants(new) == []
    stage.ask(new, Heartbeat(5, []))
    assert [found.lease_id for found in stage.grants(new)] == [grant.lease_id]
    assert stage.broker.workers["w1"].account.available == 0


def test_what_a_worker_still_holds_is_not_delivered_again(stage: BrokerStage) -> None:
    client, old = stage.node(), stage.worker("w1", credit=1)
    stage.submit(client, "a", "b")
    [grant] = stage.grants(old)
    stage.close(old)
    new = stage.worker("w1", resumed=True)
    stage.ask(new, GiveCredit(1))
    stage.ask(new, Heartbeat(5, [claim(grant)]))
    assert [found.job_id for found in stage.grants(new)] == ["b"]
    assert stage.broker.workers["w1"].account.running == 2


# ---------------------------------------------------------------------------------------------------- turns


def test_the_next_turn_counts_every_item_for_backpressure(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker(credit=4)
    stage.submit(client, "a", "b")
    first, second = stage.grants(worker)
    assert len(stage.broker.builder) == 0
    stage.tell(client, SubmitJobs(1, [JobSpec(job_id="c"), JobSpec(job_id="d")]))
    stage.tell(client, SubmitJobs(2, [JobSpec(job_id="e")], True, "rerun"))
    stage.tell(worker, JobsStarted([claim(first)]))
    stage.tell(worker, Heartbeat(3, [claim(first), claim(second)]))
    stage.tell(worker, JobsReleased([claim(second)]))
    stage.tell(worker, JobsFinished([ending(first), ending(second, error_code="EXIT_CODE")]))
    stage.tell(client, CancelJobs(4, ["a", "b"]))
    items, questions = 3 + 2 + 1 + 2 + 1 + 2, len(["submit", "rerun", "finish", "fail", "start", "renew", "release", "get"])
    assert len(stage.broker.builder) == items + questions


def test_after_a_failed_turn_the_store_is_left_alone_for_a_moment(stage: BrokerStage) -> None:
    client = stage.node()
    stage.tell(client, SubmitJobs(1, [JobSpec(job_id="a")]))
    stage.apply(TurnFailed(one_turn(stage), Unavailable("busy")))
    stage.tell(client, SubmitJobs(2, [JobSpec(job_id="b")]))
    assert stage.broker.next_turn(stage.now()) is None
    stage.clock.advance(STORE_RETRY_S)
    assert stage.broker.next_turn(stage.now()) is not None


def test_what_a_failed_turn_says_of_the_store_is_for_administrators_only(stage: BrokerStage) -> None:
    admin, client, stranger = stage.node(), stage.client(), stage.open()
    stage.tell(admin, SubmitJobs(31, [JobSpec(job_id="a")]))
    stage.tell(client, SubmitJobs(32, [JobSpec(job_id="b")]))
    stage.tell(stranger, HelloWorker(msg_id=33, worker_id="w9", incarnation="w9-1", token="t", patterns=(">",)))

    stage.apply(TurnFailed(one_turn(stage), Unavailable("redis://10.1.2.3:6379 does not answer")))

    told = [stage.last(admin, ErrorMessage).message, stage.last(client, ErrorMessage).message, str(stage.hung_up[stranger])]
    assert ["10.1.2.3" in text for text in told] == [True, False, False]


def test_a_failed_turn_tells_askers_hangs_up_on_hellos_and_keeps_workers_words(stage: BrokerStage) -> None:
    from tasuki.core.protocol import HelloClient, Request

    client, worker = stage.node(), stage.worker(credit=1)
    stage.submit(client, "a")
    [grant] = stage.grants(worker)
    stranger = stage.open()
    stage.tell(stranger, HelloClient(msg_id=1, client_id="c", token="t"))
    stage.tell(client, SubmitJobs(21, [JobSpec(job_id="b")]))
    stage.tell(client, Request(22, "watch", {"job_ids": ["a"]}))
    stage.tell(client, Request(23, "token.list"))
    stage.tell(worker, JobsFinished([ending(grant)]))
    stage.tell(worker, Heartbeat(24, [claim(grant)]))
    stage.apply(TurnFailed(one_turn(stage), DiskFull("no room")))
    assert {message.corr_id: message.code for message in stage.all(client, ErrorMessage)} == dict.fromkeys(
        (21, 22, 23), "DISK_FULL"
    )
    assert isinstance(stage.hung_up[stranger], DiskFull)
    assert stage.all(worker, JobsRecorded) == []
    stage.pass_time(STORE_RETRY_S)
    assert stage.last(worker, JobsRecorded).recorded == [grant.lease_id]
    assert stage.last(worker, HeartbeatAnswer).corr_id == 24


def test_a_session_of_the_own_user_may_be_worker_and_client_at_once(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker(peer=UNIX, credit=1)
    stage.submit(client, "a")
    assert [message.ttl_s for message in stage.all(worker, AssignJobs)] == [15.0]


def test_an_ending_that_arrives_while_the_store_is_asked_what_to_deliver_again_is_not_undone(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker(credit=1)
    stage.submit(client, "a")
    [grant] = stage.grants(worker)
    stage.clock.advance(REDELIVER_AFTER_S)
    stage.apply(Ticked())
    turn = one_turn(stage)
    assert turn.held
    answers = execute(stage.store, turn)
    stage.tell(worker, JobsFinished([ending(grant)]))
    stage.apply(TurnDone(turn, answers))
    stage.turns()
    account = stage.broker.workers["w1"].account
    assert len(stage.grants(worker)) == 1
    assert (account.running, account.owed) == (0, 0)


def test_many_reads_are_spread_over_turns_and_all_are_answered(stage: BrokerStage) -> None:
    client = stage.node()
    stage.submit(client, *(f"job-{number}" for number in range(600)))
    job_ids = [f"job-{number}" for number in range(600)]
    for start in range(0, 600, 200):
        stage.tell(client, Request(100 + start, "watch", {"job_ids": job_ids[start : start + 200]}))
    reads = []
    while (turn := stage.broker.next_turn(stage.now())) is not None:
        reads.append(len(turn.get))
        stage.apply(TurnDone(turn, execute(stage.store, turn)))
    assert max(reads) <= READS_PER_TURN
    assert sum(reads) == 600
    assert {reply.corr_id: len(reply.body["states"]) for reply in stage.all(client, Reply)} == {100: 200, 300: 200, 500: 200}


def test_a_worker_that_missed_a_heartbeat_is_given_nothing_until_it_speaks(stage: BrokerStage) -> None:
    client, worker = stage.node(), stage.worker(credit=1, ttl_s=15.0)
    stage.clock.advance(11.0)
    stage.submit(client, "a")
    assert stage.grants(worker) == []
    stage.ask(worker, Heartbeat(9))
    stage.pass_time(1.0)
    assert [grant.job_id for grant in stage.grants(worker)] == ["a"]
