"""Clients, broker, workers and a store, driven through submit, loss, restart and races with no socket, thread or real clock."""

from __future__ import annotations

from typing import Any

import pytest

from tasuki.core import worker_machine
from tasuki.core.job import BlobRef, JobSpec, OnDisconnect, Outcome, State
from tasuki.core.lifecycle import LEASE_MARGIN_S, LEASE_TTL_S
from tasuki.core.protocol import AssignJobs, JobsFinished
from tasuki.core.verbs import Turn
from tasuki.errors import DiskFull, InvalidInput, NotFound, TasukiError, Unavailable
from tasuki.testing.harness import World
from tasuki.wire.frames import FrameDecoder
from tasuki.wire.messages import decode
from tests.core.conftest import MakeWorld

LOST_AFTER_S = LEASE_TTL_S + LEASE_MARGIN_S
PATIENCE_S = 1.0  # duties and reconnects are due within this


def messages(pieces: list[bytes]) -> list[object]:
    """What bytes on their way say."""
    decoder = FrameDecoder(2**20)
    return [decode(frame, 2**20) for piece in pieces for frame in decoder.feed(piece)]


def nested(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(levels):
        inner = {"in": inner}
    return inner


# ---------------------------------------------------------------------------------------------------- the ordinary life


def test_a_submitted_job_runs_once_and_its_result_arrives(world: World) -> None:
    client, worker = world.client(), world.worker()
    ticket = client.submit_ids("sq-7", payload=b"7")
    world.settle()
    assert client.answers[ticket].error is None
    worker.finish("sq-7", b"49")
    world.settle()
    assert client.result("sq-7").outcome.result == b"49"
    assert client.result("sq-7").attempt == 1
    assert worker.runs == [("sq-7", 1)]
    assert world.job("sq-7").state is State.SUCCEEDED


def test_a_finished_id_gives_its_result_again_without_a_run(world: World) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    worker.finish("a", b"once")
    world.settle()
    other = world.client("other")
    other.submit_ids("a")
    world.settle()
    assert other.result("a").outcome.result == b"once"
    assert worker.runs == [("a", 1)]


def test_the_same_id_with_another_body_is_refused_and_the_difference_named(world: World) -> None:
    client = world.client()
    client.submit_ids("a", payload=b"1")
    ticket = client.submit(JobSpec(job_id="a", payload=b"2"), JobSpec(job_id="b"))
    world.settle()
    [refusal] = client.answers[ticket].answer.exceptions
    assert (refusal.index, refusal.code, refusal.details["differs"]) == (0, "CONFLICT", ["payload"])
    assert set(client.accepted) == {"a", "b"}
    assert world.job("a").spec.payload == b"1"


def test_many_clients_that_submit_one_id_cause_one_run_and_all_get_its_result(world: World) -> None:
    worker = world.worker(capacity=4)
    clients = [world.client(f"client-{number}") for number in range(20)]
    for client in clients:
        client.submit_ids("one")
    world.settle()
    assert worker.runs == [("one", 1)]
    worker.finish("one", b"same")
    world.settle()
    assert {client.result("one").outcome.result for client in clients} == {b"same"}


def test_a_failed_job_is_tried_again_after_its_backoff_and_not_before(world: World) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a", max_retries=1, backoff_s=10.0)
    world.settle()
    worker.fail("a")
    world.run_for(9.5)
    assert worker.jobs == []
    world.run_for(1.0)
    assert worker.runs == [("a", 1), ("a", 2)]
    worker.fail("a", message="again")
    world.settle()
    assert client.result("a").state is State.FAILED
    assert client.result("a").outcome.message == "again"


def test_a_retry_without_delay_goes_at_once_to_another_worker_that_has_room(world: World) -> None:
    client, first, second = world.client(), world.worker("w1"), world.worker("w2", patterns=("b.>",))
    client.submit_ids("a", backoff_s=0.0, subject="a.1")
    world.settle()
    third = world.worker("w3")
    first.drain()
    first.fail("a")
    world.settle()
    assert third.runs == [("a", 2)]
    assert second.runs == []


def test_heartbeats_keep_a_job_ten_times_longer_than_the_lease(world: World) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("long")
    world.run_for(10 * LEASE_TTL_S, 0.5)
    worker.finish("long")
    world.settle()
    assert client.result("long").attempt == 1
    assert worker.runs == [("long", 1)]
    assert worker.stopped == []
    assert world.job("long").losses == 0


def test_a_handler_that_runs_for_longer_is_reported_as_started(world: World) -> None:
    client, worker = world.client(), world.worker()
    worker.handlers = True
    client.submit_ids("a")
    world.settle()
    assert world.job("a").state is State.ASSIGNED
    world.run_for(0.3)
    assert world.job("a").state is State.RUNNING


# ---------------------------------------------------------------------------------------------------- workers that are lost


def test_the_job_of_a_killed_worker_runs_elsewhere_within_ttl_and_margin(world: World) -> None:
    client, first, second = world.client(), world.worker("w1"), world.worker("w2")
    client.submit_ids("a", "b")
    world.settle()
    [lost] = first.jobs
    world.kill(first)
    second.finish(second.jobs[0])
    world.settle()
    world.run_until(lambda: lost in second.jobs, within_s=LOST_AFTER_S + PATIENCE_S)
    assert (lost, 2) in second.runs
    second.finish(lost)
    world.settle()
    assert client.result(lost).attempt == 2
    assert world.job(lost).losses == 1


def test_the_late_finish_of_a_frozen_worker_is_fenced(world: World) -> None:
    client, first = world.client(), world.worker("w1")
    client.submit_ids("a")
    world.settle()
    first.frozen = True
    second = world.worker("w2")
    world.run_until(lambda: "a" in second.jobs, within_s=LOST_AFTER_S + PATIENCE_S)
    first.frozen = False
    lease_id = first.finish("a", b"too late").lease_id
    world.run_for(PATIENCE_S)
    assert [found for found, reason in first.forgotten if reason] == [lease_id]
    second.finish("a", b"in time")
    world.settle()
    assert client.result("a").outcome.result == b"in time"
    assert [incident.kind for incident in world.store.incidents("a")] == ["lost", "fenced"]


def test_a_worker_that_is_cut_off_stops_its_job_before_the_store_gives_it_away(world: World) -> None:
    client, first, second = world.client(), world.worker("w1"), world.worker("w2", patterns=("none",))
    client.submit_ids("a")
    world.settle()
    assert first.link is not None
    first.link.mute = True
    world.dial = lambda node: None  # type: ignore[method-assign]  # and nobody can connect again
    world.run_until(lambda: bool(first.stopped), within_s=LEASE_TTL_S)
    assert first.stopped == [("a", "LEASE_LOST")]
    assert world.job("a").state is State.RUNNING
    assert second.runs == []


def test_a_job_whose_workers_all_die_is_dead_lettered_with_a_reason(world: World) -> None:
    client = world.client()
    client.submit_ids("poison", max_losses=1, backoff_s=0.0)
    for number in range(2):
        worker = world.worker(f"w{number}")
        world.run_until(lambda worker=worker: "poison" in worker.jobs, within_s=PATIENCE_S)  # type: ignore[misc]
        world.kill(worker)
        world.run_for(LOST_AFTER_S + PATIENCE_S)
    result = client.result("poison")
    assert (result.state, result.outcome.error_code) == (State.FAILED, "LOST")
    assert "w1 was lost" in result.outcome.message


def test_a_kept_job_that_nobody_took_is_finished_by_its_worker_after_the_grace(world: World) -> None:
    client = world.client()
    worker = world.worker("far", on_disconnect=OnDisconnect.KEEP, reconnect_grace_s=60.0)
    client.submit_ids("a")
    world.settle()
    worker.frozen = True
    world.cut(worker)
    world.run_for(LOST_AFTER_S + 60.0 + PATIENCE_S, 0.5)
    assert world.job("a").state is State.ORPHANED
    worker.frozen = False
    worker.finish("a", b"from afar")
    world.run_for(PATIENCE_S)
    assert client.result("a").outcome.result == b"from afar"
    assert worker.stopped == []
    assert worker.runs == [("a", 1)]


def test_a_kept_job_that_somebody_took_is_not_finished_by_its_old_worker(world: World) -> None:
    client = world.client()
    far = world.worker("far", on_disconnect=OnDisconnect.KEEP, reconnect_grace_s=60.0)
    client.submit_ids("a")
    world.settle()
    far.frozen = True
    world.cut(far)
    near = world.worker("near")
    world.run_until(lambda: "a" in near.jobs, within_s=LOST_AFTER_S + 60.0 + PATIENCE_S, step_s=0.5)
    far.frozen = False
    far.finish("a", b"old")
    world.run_for(PATIENCE_S)
    near.finish("a", b"new")
    world.settle()
    assert client.result("a").outcome.result == b"new"


def test_a_restarted_worker_of_the_same_id_does_not_renew_its_dead_self(world: World) -> None:
    client, first = world.client(), world.worker("w1", incarnation="one")
    client.submit_ids("a")
    world.settle()
    world.kill(first)
    second = world.worker("w1", incarnation="two")
    world.run_for(LEASE_TTL_S / 2)
    assert second.jobs == []
    world.run_until(lambda: "a" in second.jobs, within_s=LOST_AFTER_S + PATIENCE_S)
    assert second.runs == [("a", 2)]


def test_of_two_live_workers_with_one_id_the_later_stays_and_the_earlier_is_told(world: World) -> None:
    first = world.worker("w1", incarnation="one")
    second = world.worker("w1", incarnation="two")
    world.run_for(5.0)
    assert first.exited is not None
    assert isinstance(first.exited.error, InvalidInput)
    assert second.exited is None
    assert second.dials == 1


# ---------------------------------------------------------------------------------------------------- server restarts


def test_a_restarted_server_does_not_run_again_what_was_running(world: World) -> None:
    client, worker = world.client(), world.worker(capacity=2)
    client.submit_ids("a", "b", "c")
    world.settle()
    world.kill_server()
    worker.finish("a", b"while it was down")
    world.run_for(3.0)
    world.restart_server()
    world.run_for(10.0)
    for job_id in list(worker.jobs):
        worker.finish(job_id)
    world.run_for(PATIENCE_S)
    assert sorted(worker.runs) == [("a", 1), ("b", 1), ("c", 1)]
    assert client.result("a").outcome.result == b"while it was down"
    assert {job_id: client.result(job_id).attempt for job_id in "abc"} == {"a": 1, "b": 1, "c": 1}


def test_leases_count_as_renewed_when_a_server_takes_over(world: World) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    world.kill_server()
    worker.frozen = True
    world.run_for(LOST_AFTER_S + 5.0)
    world.restart_server()
    world.run_for(LEASE_TTL_S - 1.0)
    assert world.job("a").state is State.RUNNING
    world.run_for(LEASE_MARGIN_S + PATIENCE_S + 1.0)
    assert world.job("a").state is State.PENDING


@pytest.mark.parametrize("moment", ["drafted", "taken", "committed"])
def test_a_submit_survives_a_server_that_dies_before_it_answered(world: World, moment: str) -> None:
    client, worker = world.client(), world.worker()
    ticket = client.submit_ids("a")
    assert client.link is not None
    world.deliver_to_server(client.link)
    if moment != "drafted":
        assert world.take_turn()
    if moment == "committed":
        world.commit_turn()
    world.kill_server()
    world.restart_server()
    world.run_until(lambda: ticket in client.answers, within_s=PATIENCE_S)
    assert client.answers[ticket].error is None
    world.run_until(lambda: "a" in worker.jobs, within_s=LOST_AFTER_S + PATIENCE_S)
    worker.finish("a")
    world.settle()
    assert client.result("a").state is State.SUCCEEDED
    assert len(worker.runs) == 1


@pytest.mark.parametrize("committed", [False, True])
def test_a_finish_survives_a_server_that_dies_before_it_answered(world: World, committed: bool) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    lease_id = worker.finish("a", b"mine").lease_id
    worker.flush()
    assert worker.link is not None
    while worker.link.to_server:
        world.deliver_to_server(worker.link)
    assert world.take_turn()
    if committed:
        world.commit_turn()
    world.kill_server()
    world.restart_server()
    world.run_for(PATIENCE_S)
    assert client.result("a").outcome.result == b"mine"
    assert (lease_id, "") in worker.forgotten
    assert worker.runs == [("a", 1)]


def test_an_assignment_that_died_with_the_server_is_delivered_by_the_next_one(world: World) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    assert client.link is not None
    world.deliver_to_server(client.link)
    assert world.take_turn()
    world.commit_turn()
    assert world.job("a").state is State.ASSIGNED
    world.kill_server()
    world.restart_server()
    world.run_until(lambda: "a" in worker.jobs, within_s=PATIENCE_S)
    assert worker.runs == [("a", 1)]
    assert world.job("a").losses == 0


def test_a_delivery_after_a_restart_takes_the_place_of_credit(world: World) -> None:
    client, worker = world.client(), world.worker(capacity=1)
    client.submit_ids("a", "b")
    assert client.link is not None
    world.deliver_to_server(client.link)
    assert world.take_turn()
    world.commit_turn()
    world.kill_server()
    world.restart_server()
    world.run_for(3.0)
    assert len(worker.jobs) == 1
    for _ in range(2):
        worker.finish(worker.jobs[0])
        world.run_for(PATIENCE_S)
    assert sorted(worker.runs) == [("a", 1), ("b", 1)]


# ---------------------------------------------------------------------------------------------------- lost and doubled messages


def test_a_submit_whose_ack_was_lost_makes_one_job(world: World) -> None:
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


def test_a_result_that_was_lost_on_the_way_comes_after_a_reconnect(world: World) -> None:
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


def test_a_doubled_assignment_runs_once(world: World) -> None:
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


def test_a_doubled_finish_is_recorded_once(world: World) -> None:
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


def test_an_assignment_of_which_no_sign_comes_is_sent_again_with_growing_waits(world: World) -> None:
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


def test_a_half_open_link_is_left_before_the_lease_is_over(world: World) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    assert worker.link is not None
    worker.link.mute = True
    world.run_for(2 * LOST_AFTER_S)
    assert worker.stopped == []
    assert worker.dials == 2
    assert world.job("a").attempt == 1


def test_a_peer_whose_hello_is_never_answered_dials_again(world: World) -> None:
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


# ---------------------------------------------------------------------------------------------------- cancel


def test_cancel_of_a_waiting_job_ends_it_at_once(world: World) -> None:
    client = world.client()
    client.submit_ids("a")
    world.settle()
    ticket = client.cancel("a", reason="not needed")
    world.settle()
    assert client.answers[ticket].answer == {"a": {"state": "CANCELED", "requested": False}}
    assert client.result("a").state is State.CANCELED
    worker = world.worker()
    world.run_for(PATIENCE_S)
    assert worker.runs == []


def test_cancel_of_a_job_that_waits_for_its_retry_tells_the_attempt_it_had(world: World) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a", backoff_s=30.0)
    world.settle()
    worker.fail("a")
    world.settle()
    client.cancel("a")
    world.settle()
    assert client.result("a").state is State.CANCELED
    assert client.result("a").attempt == world.job("a").attempt == 1


def test_cancel_of_a_running_job_stops_it_at_its_worker(world: World) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    ticket = client.cancel("a")
    world.settle()
    assert client.answers[ticket].answer["a"]["requested"] is True
    assert worker.stopped == [("a", "CANCELED")]
    assert client.result("a").state is State.CANCELED


def test_a_cancel_that_a_cut_off_worker_did_not_hear_is_told_by_its_next_heartbeat(world: World) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    world.cut(worker)
    client.cancel("a")
    world.settle()
    assert worker.jobs == ["a"]
    world.run_for(PATIENCE_S)
    assert worker.stopped == [("a", "CANCELED")]
    assert client.result("a").state is State.CANCELED


def test_a_finish_committed_before_the_cancel_wins_and_both_learn_it(world: World) -> None:
    client, worker, other = world.client(), world.worker(), world.client("other")
    client.submit_ids("a")
    world.settle()
    worker.finish("a", b"first")
    ticket = other.cancel("a")
    world.settle()
    assert other.answers[ticket].answer["a"]["state"] == "SUCCEEDED"
    assert client.result("a").state is State.SUCCEEDED


def test_a_cancel_committed_before_a_failure_wins_over_its_retry(world: World) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    assert worker.link is not None
    worker.link.hold_to_node = True
    client.cancel("a")
    world.settle()
    worker.fail("a")
    world.settle()
    worker.link.hold_to_node = False
    world.settle()
    assert client.result("a").state is State.CANCELED
    assert worker.runs == [("a", 1)]


def test_a_canceled_job_of_a_dead_worker_is_canceled_by_the_reaper_and_its_watcher_told(world: World) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    world.kill(worker)
    client.cancel("a")
    world.run_for(LOST_AFTER_S + PATIENCE_S)
    assert client.result("a").state is State.CANCELED


def test_a_canceled_job_that_its_worker_gives_back_is_canceled_and_its_watcher_told(world: World) -> None:
    client, worker = world.client(), world.worker()
    worker.handlers = True
    client.submit_ids("a")
    world.settle()
    assert worker.link is not None
    worker.link.hold_to_node = True
    client.cancel("a")
    world.settle()
    worker.give_back("a")
    world.settle()
    assert world.job("a").state is State.CANCELED
    world.run_for(PATIENCE_S)
    assert client.result("a").state is State.CANCELED


# ---------------------------------------------------------------------------------------------------- who gets what


def test_workers_see_only_their_subjects(world: World) -> None:
    client = world.client()
    worker = world.worker(capacity=10, patterns=("a.*",))
    client.submit_ids("one", subject="b.1")
    client.submit_ids("two", subject="a.1.deep")
    client.submit_ids("three", subject="a")
    client.submit_ids("four", subject="a.1")
    world.run_for(3.0)
    assert worker.runs == [("four", 1)]


def test_each_idle_worker_gets_the_job_of_its_own_subject_in_the_same_turns(world: World) -> None:
    workers = [world.worker(f"a{number}", patterns=("a.*",)) for number in range(3)]
    lonely = world.worker("b0", patterns=("b.*",))
    client = world.client()
    client.submit(JobSpec(job_id="for-a", subject="a.1"), JobSpec(job_id="for-b", subject="b.1"))
    world.settle()
    assert lonely.jobs == ["for-b"]
    assert sum(len(worker.jobs) for worker in workers) == 1


def test_a_job_addressed_to_a_worker_that_left_goes_to_another(world: World) -> None:
    client, named, other = world.client(), world.worker("named", patterns=("x.*",)), world.worker("other", patterns=("x.*",))
    client.submit_ids("busy", subject="x.named")
    world.settle()
    assert named.jobs == ["busy"]
    client.submit_ids("mine", subject="x.named")
    world.run_for(2.0)
    assert other.jobs == []
    assert client.link is not None
    world.kill(named)
    world.settle()
    assert other.jobs == ["mine"]


def test_a_job_addressed_to_a_worker_that_drains_goes_to_another(world: World) -> None:
    client, named, other = world.client(), world.worker("named", patterns=("x.*",)), world.worker("other", patterns=("x.*",))
    client.submit_ids("busy", subject="x.named")
    client.submit_ids("mine", subject="x.named")
    world.settle()
    assert (named.jobs, other.jobs) == (["busy"], [])
    named.drain()
    world.settle()
    assert (named.jobs, other.jobs) == (["busy"], ["mine"])


def test_a_flood_in_one_group_delays_another_groups_job_by_a_few_jobs(world: World) -> None:
    client, worker = world.client(), world.worker(capacity=1)
    client.submit(*(JobSpec(job_id=f"flood-{number}", subject="flood.x") for number in range(200)))
    world.settle()
    client.submit_ids("small", subject="other.x")
    world.settle()
    finished = 0
    while "small" not in worker.jobs:
        worker.finish(worker.jobs[0])
        world.settle()
        finished += 1
        assert finished <= 3
    assert worker.runs[-1] == ("small", 1)


def test_new_jobs_are_shared_between_idle_workers(world: World) -> None:
    client, first, second = world.client(), world.worker("w1", capacity=10), world.worker("w2", capacity=10)
    client.submit_ids(*(f"job-{number}" for number in range(10)))
    world.settle()
    assert (len(first.jobs), len(second.jobs)) == (5, 5)


def test_a_worker_changes_its_subjects_without_leaving(world: World) -> None:
    from tasuki.core.worker_machine import ChangePatterns

    client, worker = world.client(), world.worker(patterns=("a.*",))
    client.submit_ids("b", subject="b.1")
    world.settle()
    worker.apply(ChangePatterns(("b.*",)))
    world.settle()
    assert worker.jobs == ["b"]


# ---------------------------------------------------------------------------------------------------- leaving


def test_a_draining_worker_ends_its_job_takes_no_other_and_exits(world: World) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a", "b")
    world.settle()
    worker.drain()
    world.settle()
    assert worker.exited is None
    worker.finish("a")
    world.settle()
    assert worker.exited is not None
    assert worker.exited.error is None
    assert client.result("a").state is State.SUCCEEDED
    assert worker.runs == [("a", 1)]
    assert world.job("b").attempt == 0


def test_an_assignment_that_crosses_a_drain_is_given_back_without_a_loss(world: World) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    assert worker.link is not None
    worker.link.hold_to_node = True
    world.settle()
    worker.drain()
    worker.link.hold_to_node = False
    world.settle()
    second = world.worker("w2")
    world.settle()
    assert second.runs == [("a", 2)]
    assert worker.runs == []
    assert worker.exited is not None
    assert world.job("a").losses == 0


def test_a_lease_turn_that_a_drain_overtakes_is_given_back_without_a_loss(world: World) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    assert client.link is not None
    assert worker.link is not None
    world.deliver_to_server(client.link)
    assert world.take_turn()
    worker.drain()
    while worker.link.to_server:
        world.deliver_to_server(worker.link)
    while worker.link is not None and worker.link.to_node:
        world.deliver_to_node(worker.link)
    world.settle()
    second = world.worker("w2")
    world.settle()
    assert second.runs == [("a", 2)]
    assert world.job("a").losses == 0


def test_what_a_worker_gives_back_as_it_exits_is_released(world: World) -> None:
    client, worker, second = world.client(), world.worker("w1"), world.worker("w2", patterns=("none",))
    worker.handlers = True
    client.submit_ids("a")
    world.settle()
    worker.drain()
    worker.give_back("a")
    world.settle()
    assert worker.exited is not None
    assert world.job("a").state is State.PENDING
    assert second.runs == []


def test_a_worker_that_leaves_while_its_lease_is_made_costs_no_loss(world: World) -> None:
    client, worker = world.client(), world.worker("w1")
    client.submit_ids("a")
    assert client.link is not None
    world.deliver_to_server(client.link)
    assert world.take_turn()
    world.kill(worker)
    world.commit_turn()
    assert world.job("a").state is State.ASSIGNED
    second = world.worker("w2")
    world.run_for(PATIENCE_S)
    assert second.runs == [("a", 2)]
    assert world.job("a").losses == 0


def test_a_release_that_was_lost_with_the_connection_is_said_again(world: World) -> None:
    client, worker = world.client(), world.worker("w1")
    worker.handlers = True
    client.submit_ids("a")
    world.settle()
    assert worker.link is not None
    worker.link.hold_to_server = True
    worker.give_back("a")
    worker.flush()
    world.cut(worker)
    world.run_for(PATIENCE_S + worker_machine.GIVE_BACK_PAUSE_S)
    assert world.job("a").losses == 0
    assert worker.runs == [("a", 1), ("a", 2)]


# ---------------------------------------------------------------------------------------------------- a store in trouble


def failing(times: int, error: TasukiError, hits: list[Turn], wanted: str = "submit"):  # type: ignore[no-untyped-def]
    def fail(turn: Turn) -> TasukiError | None:
        if len(hits) < times and getattr(turn, wanted):
            hits.append(turn)
            return error
        return None

    return fail


def test_a_submit_that_the_store_refused_is_tried_again_by_the_client(world: World) -> None:
    client = world.client()
    hits: list[Turn] = []
    world.refuse = failing(1, Unavailable("busy"), hits)
    ticket = client.submit_ids("a")
    world.run_for(2.0)
    assert len(hits) == 1
    assert client.answers[ticket].error is None
    assert world.job("a").state is State.PENDING


def test_a_submit_on_a_full_disk_is_told_so_and_nothing_was_stored(world: World) -> None:
    client = world.client()
    world.refuse = failing(1, DiskFull("no room"), [])
    ticket = client.submit_ids("a")
    world.run_for(2.0)
    assert isinstance(client.answers[ticket].error, DiskFull)
    assert world.store.get(["a"]) == [None]


@pytest.mark.parametrize("error", [Unavailable("busy"), DiskFull("no room")])
def test_an_ending_that_the_store_refused_is_recorded_once_when_it_can(world: World, error: TasukiError) -> None:
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


def test_an_ending_whose_commit_is_not_known_is_recorded_once(world: World) -> None:
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


def test_grants_whose_commit_is_not_known_are_read_back_and_delivered(world: World) -> None:
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


def test_a_watch_that_the_store_could_not_serve_is_asked_again(world: World) -> None:
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


def test_the_leases_of_workers_survive_a_store_that_is_away_for_less_than_a_ttl(world: World) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    away = world.clock.lease() + LEASE_TTL_S / 2
    world.refuse = lambda turn: Unavailable("busy") if world.clock.lease() < away else None
    world.run_for(LEASE_TTL_S)
    assert worker.stopped == []
    assert worker.jobs == ["a"]


# ---------------------------------------------------------------------------------------------------- watching


def test_a_watch_of_an_unknown_job_is_an_error_of_its_own_and_does_not_hide_the_others(world: World) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    other = world.client("other")
    other.watch("a", "nobody")
    world.settle()
    assert isinstance(other.refused["nobody"], NotFound)
    worker.finish("a")
    world.settle()
    assert other.result("a").state is State.SUCCEEDED
    assert set(other.refused) == {"nobody"}


def test_the_watcher_of_a_rerun_is_not_given_the_ending_before_it(world: World) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a", max_losses=0)
    world.settle()
    world.kill(worker)
    world.clock.advance(LOST_AFTER_S + 1.0)
    other = world.client("other")
    spec = JobSpec(job_id="a", max_losses=0)
    other.submit(spec, on_failed="rerun")
    world.run_for(PATIENCE_S)
    assert other.results == {}
    second = world.worker("w2")
    world.run_for(PATIENCE_S)
    second.finish("a", b"second life")
    world.settle()
    assert other.result("a").outcome.result == b"second life"


def test_a_result_tells_the_generation_it_belongs_to(world: World) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a", max_retries=0)
    world.settle()
    worker.fail("a")
    world.settle()
    ticket = client.request("requeue", job_ids=["a"])
    world.settle()
    assert client.answers[ticket].answer == {"a": {"state": "PENDING", "done": True}}
    client.watch("a")
    world.settle()
    worker.finish("a")
    world.settle()
    assert [result.generation for result in client.results["a"]] == [0, 1]


def test_small_ttls_do_not_make_a_worker_refuse_everything(make_world: MakeWorld) -> None:
    world = make_world(lease_ttl_s=1.0)
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.run_for(10.0, 0.05)
    assert worker.runs == [("a", 1)]
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
def test_a_report_that_no_store_can_hold_ends_its_worker_and_nobody_else(world: World, outcome: dict[str, Any]) -> None:
    client, bad, good = world.client(), world.worker("bad", patterns=("bad.*",)), world.worker("good", patterns=("good.*",))
    client.submit_ids("one", subject="bad.1")
    client.submit_ids("two", subject="good.1")
    world.settle()
    bad.end("one", Outcome(**outcome))
    good.finish("two")
    world.run_for(2.0)
    assert bad.exited is not None
    assert isinstance(bad.exited.error, InvalidInput)
    assert client.result("two").state is State.SUCCEEDED
