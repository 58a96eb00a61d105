"""What a broker does with workers: credit, leasing, endings, heartbeats, and the turns that carry them to the store."""

from __future__ import annotations

from typing import Any

import pytest

from tasuki.core.broker.broker import STORE_RETRY_S
from tasuki.core.broker.events import DiskSpace, SendBlob, TurnDone, TurnFailed
from tasuki.core.broker.state import CREDIT_MAX
from tasuki.core.broker.upkeep import DUTY_INTERVAL_S
from tasuki.core.broker.worker_messages import REDELIVER_AFTER_S
from tasuki.core.job import JobSpec, State
from tasuki.core.machine import Ticked
from tasuki.core.protocol import (
    AssignJobs,
    BlobGet,
    CancelJobs,
    CancelLeases,
    Claim,
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
from tasuki.core.store_messages import Turn
from tasuki.errors import DiskFull, InvalidInput, Unavailable
from tasuki.stores.batching import execute
from tests.core.desk import UNIX, Desk, claim, ending


@pytest.fixture
def desk() -> Desk:
    return Desk()


def one_turn(desk: Desk) -> Turn:
    """The next turn that is not one of the leader's duties; those are done."""
    while (turn := desk.broker.next_turn(desk.now())) is not None and turn.epoch:
        desk.apply(TurnDone(turn, execute(desk.store, turn)))
    assert turn is not None
    return turn


# ---------------------------------------------------------------------------------------------------- credit and leasing


def test_a_worker_without_credit_gets_nothing(desk: Desk) -> None:
    client, worker = desk.node(), desk.worker()
    desk.submit(client, "a")
    assert desk.grants(worker) == []
    desk.ask(worker, GiveCredit(1))
    assert [grant.job_id for grant in desk.grants(worker)] == ["a"]


def test_never_more_is_granted_than_credit_was_given(desk: Desk) -> None:
    client, worker = desk.node(), desk.worker(credit=2)
    desk.submit(client, *(f"job-{number}" for number in range(5)))
    assert len(desk.grants(worker)) == 2
    desk.ask(worker, GiveCredit(1))
    assert len(desk.grants(worker)) == 3


def test_an_ended_attempt_gives_no_credit_by_itself(desk: Desk) -> None:
    client, worker = desk.node(), desk.worker(credit=1)
    desk.submit(client, "a", "b")
    desk.ask(worker, JobsFinished([ending(desk.grants(worker)[0])]))
    assert len(desk.grants(worker)) == 1


@pytest.mark.parametrize("credit", [-CREDIT_MAX - 1, CREDIT_MAX + 1])
def test_credit_beyond_reason_ends_the_connection(desk: Desk, credit: int) -> None:
    worker = desk.worker()
    desk.tell(worker, GiveCredit(credit))
    assert isinstance(desk.hung_up[worker], InvalidInput)


def test_a_submit_is_stored_leased_and_assigned_in_one_turn(desk: Desk) -> None:
    client, worker = desk.node(), desk.worker(credit=1)
    desk.tell(client, SubmitJobs(1, [JobSpec(job_id="a")]))
    turn = one_turn(desk)
    assert (len(turn.submit), len(turn.lease)) == (1, 1)
    desk.apply(TurnDone(turn, execute(desk.store, turn)))
    assert [grant.job_id for grant in desk.grants(worker)] == ["a"]


def test_new_jobs_go_to_the_least_loaded_worker_first(desk: Desk) -> None:
    client, busy, idle = desk.node(), desk.worker("busy", credit=4), desk.worker("idle")
    desk.submit(client, "one", "two")
    desk.ask(idle, GiveCredit(4))
    desk.submit(client, "three")
    assert [grant.job_id for grant in desk.grants(idle)] == ["three"]
    assert len(desk.grants(busy)) == 2


def test_while_a_lease_request_is_under_way_its_credit_is_not_spent_again(desk: Desk) -> None:
    client, worker = desk.node(), desk.worker(credit=1)
    desk.tell(client, SubmitJobs(1, [JobSpec(job_id="a"), JobSpec(job_id="b")]))
    first = one_turn(desk)
    desk.tell(client, SubmitJobs(2, [JobSpec(job_id="c")]))
    account = desk.broker.workers["w1"].account
    assert (account.available, account.reserved) == (0, 1)
    desk.apply(TurnDone(first, execute(desk.store, first)))
    desk.turns()
    assert len(desk.grants(worker)) == 1


def test_idle_workers_do_not_ask_the_store_again_for_what_is_not_there(desk: Desk) -> None:
    desk.worker(credit=1)
    desk.turns()
    assert desk.broker.next_turn(desk.now()) is None


def test_nothing_is_leased_while_the_disk_is_full_and_all_of_it_afterwards(desk: Desk) -> None:
    client, worker = desk.node(), desk.worker()
    desk.submit(client, "a")
    desk.apply(DiskSpace("full"))
    desk.ask(worker, GiveCredit(1))
    assert desk.grants(worker) == []
    desk.apply(DiskSpace(""))
    desk.turns()
    assert len(desk.grants(worker)) == 1


def test_a_worker_that_takes_no_subjects_gets_nothing_more(desk: Desk) -> None:
    client, worker = desk.node(), desk.worker(credit=2)
    desk.ask(worker, Subscribe(31, ()))
    assert desk.last(worker, Reply).body == {"patterns": []}
    desk.submit(client, "a")
    assert desk.grants(worker) == []
    desk.ask(worker, Subscribe(32, (">",)))
    assert len(desk.grants(worker)) == 1


def test_a_worker_that_stops_taking_while_its_lease_is_made_keeps_its_credit_for_later(desk: Desk) -> None:
    client, worker = desk.node(), desk.worker(credit=1)
    desk.tell(client, SubmitJobs(1, [JobSpec(job_id="a")]))
    turn = one_turn(desk)
    desk.tell(worker, Subscribe(31, ()))
    desk.apply(TurnDone(turn, execute(desk.store, turn)))
    desk.turns()
    assert desk.grants(worker) == []
    desk.ask(worker, Subscribe(32, (">",)))
    assert [(grant.job_id, grant.attempt) for grant in desk.grants(worker)] == [("a", 2)]


# ---------------------------------------------------------------------------------------------------- endings


def test_endings_are_recorded_or_fenced_after_the_commit(desk: Desk) -> None:
    client, worker = desk.node(), desk.worker(credit=2)
    desk.submit(client, "a", "b")
    good, other = desk.grants(worker)
    forged = ending(other)
    forged = type(forged)(forged.job_id, "not-the-lease", forged.attempt, forged.outcome)
    desk.tell(worker, JobsFinished([ending(good, result=b"yes"), forged]))
    assert desk.all(worker, JobsRecorded) == []
    desk.turns()
    recorded = desk.last(worker, JobsRecorded)
    assert recorded.recorded == [good.lease_id]
    [(lease_id, reason)] = recorded.fenced
    assert lease_id == "not-the-lease"
    assert "does not hold the lease" in reason
    [results] = desk.all(client, Results)
    assert [(item.job_id, item.outcome.result) for item in results.items] == [("a", b"yes")]


def test_a_worker_cannot_end_another_workers_attempt(desk: Desk) -> None:
    client, first, second = desk.node(), desk.worker("w1", credit=1), desk.worker("w2")
    desk.submit(client, "a")
    [grant] = desk.grants(first)
    desk.ask(second, JobsFinished([ending(grant)]))
    assert [lease_id for lease_id, _ in desk.last(second, JobsRecorded).fenced] == [grant.lease_id]
    assert desk.job("a").state is State.ASSIGNED  # type: ignore[union-attr]


def test_an_exact_repeat_is_recorded_again_told_once_and_counted_once(desk: Desk) -> None:
    client, worker = desk.node(), desk.worker(credit=2)
    desk.submit(client, "a", "b")
    grant, _ = desk.grants(worker)
    for _ in range(2):
        desk.ask(worker, JobsFinished([ending(grant, result=b"x")]))
    assert [message.recorded for message in desk.all(worker, JobsRecorded)] == [[grant.lease_id]] * 2
    assert len(desk.all(client, Results)) == 1
    assert desk.broker.workers["w1"].account.running == 1


def test_a_result_blob_that_is_not_here_is_not_recorded(desk: Desk) -> None:
    from tasuki.core.job import BlobRef

    client, worker = desk.node(), desk.worker(credit=1)
    desk.submit(client, "a")
    [grant] = desk.grants(worker)
    ref = BlobRef("a" * 64, 10**6)
    desk.ask(worker, JobsFinished([ending(grant, result_ref=ref)]))
    assert worker not in desk.hung_up
    job = desk.job("a")
    assert job is not None
    assert (job.state, job.failures) == (State.PENDING, 1)
    assert job.outcome is not None
    assert job.outcome.error_code == "BAD_OUTCOME"


@pytest.mark.parametrize("verb", [JobsStarted, JobsReleased, lambda claims: Heartbeat(5, claims)])
def test_a_claim_that_no_store_can_hold_is_refused_and_never_reaches_it(desk: Desk, verb: Any) -> None:
    worker = desk.worker()
    desk.tell(worker, verb([Claim("a", "lease", 2**63)]))
    refused = desk.hung_up.get(worker) or desk.last(worker, ErrorMessage)
    assert refused.code == "INVALID"
    assert len(desk.broker.builder) == 0


def test_released_attempts_go_to_whoever_has_credit(desk: Desk) -> None:
    client, first = desk.node(), desk.worker("w1", credit=1)
    desk.submit(client, "a")
    second = desk.worker("w2", credit=1)
    desk.ask(first, JobsReleased([claim(desk.grants(first)[0])], "not now"))
    [again] = desk.grants(second)
    assert (again.job_id, again.attempt) == ("a", 2)
    assert desk.broker.workers["w1"].account.running == 0


# ---------------------------------------------------------------------------------------------------- heartbeats


def test_a_heartbeat_renews_what_it_names_and_tells_cancel_and_lost(desk: Desk) -> None:
    client, worker = desk.node(), desk.worker(credit=2)
    desk.submit(client, "a", "b")
    desk.clock.advance(10.0)
    first, second = desk.grants(worker)
    desk.ask(client, CancelJobs(9, ["b"]))
    desk.ask(worker, Heartbeat(50, [claim(first), claim(second), Claim("a", "old-lease", 1)]))
    desk.pass_time(DUTY_INTERVAL_S)
    answer = desk.last(worker, HeartbeatAnswer)
    assert (answer.corr_id, answer.cancel, answer.lost) == (50, [second.lease_id], ["old-lease"])
    lease = desk.job("a").lease  # type: ignore[union-attr]
    assert lease is not None
    assert lease.expires_at > desk.clock.lease() + 15.0


def test_an_empty_heartbeat_is_answered_with_the_next_duties(desk: Desk) -> None:
    worker = desk.worker()
    desk.ask(worker, Heartbeat(50))
    desk.pass_time(DUTY_INTERVAL_S)
    assert desk.last(worker, HeartbeatAnswer).corr_id == 50


def test_a_start_of_a_lost_lease_is_told_at_once(desk: Desk) -> None:
    worker = desk.worker()
    desk.ask(worker, JobsStarted([Claim("ghost", "lease", 1)]))
    assert desk.last(worker, HeartbeatAnswer).lost == ["lease"]


def test_a_cancel_reaches_the_worker_that_runs_the_job(desk: Desk) -> None:
    client, worker = desk.node(), desk.worker(credit=1)
    desk.submit(client, "a")
    [grant] = desk.grants(worker)
    desk.ask(client, CancelJobs(9, ["a"]))
    assert desk.last(worker, CancelLeases).lease_ids == [grant.lease_id]


def test_a_worker_asks_for_blobs_under_its_own_name_and_start(desk: Desk) -> None:
    worker = desk.worker("w1")
    get = BlobGet(3, "a" * 64, "job")
    desk.tell(worker, get)
    [command] = desk.others
    assert isinstance(command, SendBlob)
    assert (command.get, command.worker_id, command.incarnation) == (get, "w1", "w1-1")


# ---------------------------------------------------------------------------------------------------- coming back


def test_a_worker_that_comes_back_is_given_nothing_before_it_said_what_it_holds(desk: Desk) -> None:
    client, old = desk.node(), desk.worker("w1", credit=1)
    desk.submit(client, "a", "b")
    [grant] = desk.grants(old)
    desk.close(old)
    new = desk.worker("w1", resumed=True)
    desk.ask(new, GiveCredit(1))
    assert desk.grants(new) == []
    desk.ask(new, Heartbeat(5, []))
    assert [found.lease_id for found in desk.grants(new)] == [grant.lease_id]
    assert desk.broker.workers["w1"].account.available == 0


def test_what_a_worker_still_holds_is_not_delivered_again(desk: Desk) -> None:
    client, old = desk.node(), desk.worker("w1", credit=1)
    desk.submit(client, "a", "b")
    [grant] = desk.grants(old)
    desk.close(old)
    new = desk.worker("w1", resumed=True)
    desk.ask(new, GiveCredit(1))
    desk.ask(new, Heartbeat(5, [claim(grant)]))
    assert [found.job_id for found in desk.grants(new)] == ["b"]
    assert desk.broker.workers["w1"].account.running == 2


# ---------------------------------------------------------------------------------------------------- turns


def test_the_next_turn_counts_every_item_for_backpressure(desk: Desk) -> None:
    client, worker = desk.node(), desk.worker(credit=4)
    desk.submit(client, "a", "b")
    first, second = desk.grants(worker)
    assert len(desk.broker.builder) == 0
    desk.tell(client, SubmitJobs(1, [JobSpec(job_id="c"), JobSpec(job_id="d")]))
    desk.tell(client, SubmitJobs(2, [JobSpec(job_id="e")], True, "rerun"))
    desk.tell(worker, JobsFinished([ending(first), ending(second, error_code="EXIT_CODE")]))
    desk.tell(worker, JobsStarted([claim(first)]))
    desk.tell(worker, Heartbeat(3, [claim(first), claim(second)]))
    desk.tell(worker, JobsReleased([claim(second)]))
    desk.tell(client, CancelJobs(4, ["a", "b"]))
    items, questions = 3 + 2 + 1 + 2 + 1 + 2, len(["submit", "rerun", "finish", "fail", "start", "renew", "release", "get"])
    assert len(desk.broker.builder) == items + questions


def test_after_a_failed_turn_the_store_is_left_alone_for_a_moment(desk: Desk) -> None:
    client = desk.node()
    desk.tell(client, SubmitJobs(1, [JobSpec(job_id="a")]))
    desk.apply(TurnFailed(one_turn(desk), Unavailable("busy")))
    desk.tell(client, SubmitJobs(2, [JobSpec(job_id="b")]))
    assert desk.broker.next_turn(desk.now()) is None
    desk.clock.advance(STORE_RETRY_S)
    assert desk.broker.next_turn(desk.now()) is not None


def test_what_a_failed_turn_says_of_the_store_is_for_administrators_only(desk: Desk) -> None:
    admin, client, stranger = desk.node(), desk.client(), desk.open()
    desk.tell(admin, SubmitJobs(31, [JobSpec(job_id="a")]))
    desk.tell(client, SubmitJobs(32, [JobSpec(job_id="b")]))
    desk.tell(stranger, HelloWorker(msg_id=33, worker_id="w9", incarnation="w9-1", token="t", patterns=(">",)))

    desk.apply(TurnFailed(one_turn(desk), Unavailable("redis://10.1.2.3:6379 does not answer")))

    told = [desk.last(admin, ErrorMessage).message, desk.last(client, ErrorMessage).message, str(desk.hung_up[stranger])]
    assert ["10.1.2.3" in text for text in told] == [True, False, False]


def test_a_failed_turn_tells_askers_hangs_up_on_hellos_and_keeps_workers_words(desk: Desk) -> None:
    from tasuki.core.protocol import HelloClient, Request

    client, worker = desk.node(), desk.worker(credit=1)
    desk.submit(client, "a")
    [grant] = desk.grants(worker)
    stranger = desk.open()
    desk.tell(stranger, HelloClient(msg_id=1, client_id="c", token="t"))
    desk.tell(client, SubmitJobs(21, [JobSpec(job_id="b")]))
    desk.tell(client, Request(22, "watch", {"job_ids": ["a"]}))
    desk.tell(client, Request(23, "token.list"))
    desk.tell(worker, JobsFinished([ending(grant)]))
    desk.tell(worker, Heartbeat(24, [claim(grant)]))
    desk.apply(TurnFailed(one_turn(desk), DiskFull("no room")))
    assert {message.corr_id: message.code for message in desk.all(client, ErrorMessage)} == dict.fromkeys(
        (21, 22, 23), "DISK_FULL"
    )
    assert isinstance(desk.hung_up[stranger], DiskFull)
    assert desk.all(worker, JobsRecorded) == []
    desk.pass_time(STORE_RETRY_S)
    assert desk.last(worker, JobsRecorded).recorded == [grant.lease_id]
    assert desk.last(worker, HeartbeatAnswer).corr_id == 24


def test_a_session_of_the_own_user_may_be_worker_and_client_at_once(desk: Desk) -> None:
    client, worker = desk.node(), desk.worker(peer=UNIX, credit=1)
    desk.submit(client, "a")
    assert [message.ttl_s for message in desk.all(worker, AssignJobs)] == [15.0]


def test_an_ending_that_arrives_while_the_store_is_asked_what_to_deliver_again_is_not_undone(desk: Desk) -> None:
    client, worker = desk.node(), desk.worker(credit=1)
    desk.submit(client, "a")
    [grant] = desk.grants(worker)
    desk.clock.advance(REDELIVER_AFTER_S)
    desk.apply(Ticked())
    turn = one_turn(desk)
    assert turn.held
    answers = execute(desk.store, turn)
    desk.tell(worker, JobsFinished([ending(grant)]))
    desk.apply(TurnDone(turn, answers))
    desk.turns()
    account = desk.broker.workers["w1"].account
    assert len(desk.grants(worker)) == 1
    assert (account.running, account.owed) == (0, 0)


def test_many_reads_are_spread_over_turns_and_all_are_answered(desk: Desk) -> None:
    client = desk.node()
    desk.submit(client, *(f"job-{number}" for number in range(600)))
    job_ids = [f"job-{number}" for number in range(600)]
    for start in range(0, 600, 200):
        desk.tell(client, Request(100 + start, "watch", {"job_ids": job_ids[start : start + 200]}))
    first = one_turn(desk)
    assert len(first.get) == 400
    desk.apply(TurnDone(first, execute(desk.store, first)))
    desk.turns()
    assert {reply.corr_id: len(reply.body["states"]) for reply in desk.all(client, Reply)} == {100: 200, 300: 200, 500: 200}


def test_a_worker_that_missed_a_heartbeat_is_given_nothing_until_it_speaks(desk: Desk) -> None:
    client, worker = desk.node(), desk.worker(credit=1, ttl_s=15.0)
    desk.clock.advance(11.0)
    desk.submit(client, "a")
    assert desk.grants(worker) == []
    desk.ask(worker, Heartbeat(9))
    desk.pass_time(1.0)
    assert [grant.job_id for grant in desk.grants(worker)] == ["a"]
