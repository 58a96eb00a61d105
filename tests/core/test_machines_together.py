"""Clients, broker, workers and a store, driven through submit, loss and restart with no socket, thread or real clock."""

from __future__ import annotations

import pytest

from tasuki.core.job import JobSpec, OnDisconnect, State
from tasuki.core.lifecycle import LEASE_MARGIN_S, LEASE_TTL_S
from tasuki.errors import InvalidInput
from tests.core.conftest import MakeWorld
from tests.support.harness import Harness

LOST_AFTER_S = LEASE_TTL_S + LEASE_MARGIN_S
PATIENCE_S = 1.0  # duties and reconnects are due within this


# ---------------------------------------------------------------------------------------------------- the ordinary life


def test_a_submitted_job_runs_once_and_its_result_arrives(world: Harness) -> None:
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


def test_a_finished_id_gives_its_result_again_without_a_run(world: Harness) -> None:
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


def test_the_same_id_with_another_body_is_refused_and_the_difference_named(world: Harness) -> None:
    client = world.client()
    client.submit_ids("a", payload=b"1")
    ticket = client.submit(JobSpec(job_id="a", payload=b"2"), JobSpec(job_id="b"))
    world.settle()
    [refusal] = client.answers[ticket].answer.exceptions
    assert (refusal.index, refusal.code, refusal.details["differs"]) == (0, "CONFLICT", ["payload"])
    assert set(client.accepted) == {"a", "b"}
    assert world.job("a").spec.payload == b"1"


def test_many_clients_that_submit_one_id_cause_one_run_and_all_get_its_result(world: Harness) -> None:
    worker = world.worker(capacity=4)
    clients = [world.client(f"client-{number}") for number in range(20)]
    for client in clients:
        client.submit_ids("one")
    world.settle()
    assert worker.runs == [("one", 1)]
    worker.finish("one", b"same")
    world.settle()
    assert {client.result("one").outcome.result for client in clients} == {b"same"}


def test_a_failed_job_is_tried_again_after_its_backoff_and_not_before(world: Harness) -> None:
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


def test_a_retry_without_delay_goes_at_once_to_another_worker_that_has_room(world: Harness) -> None:
    client, first, second = world.client(), world.worker("w1"), world.worker("w2", patterns=("b.>",))
    client.submit_ids("a", backoff_s=0.0, subject="a.1")
    world.settle()
    third = world.worker("w3")
    first.drain()
    first.fail("a")
    world.settle()
    assert third.runs == [("a", 2)]
    assert second.runs == []


def test_heartbeats_keep_a_job_ten_times_longer_than_the_lease(world: Harness) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("long")
    world.run_for(10 * LEASE_TTL_S, 0.5)
    worker.finish("long")
    world.settle()
    assert client.result("long").attempt == 1
    assert worker.runs == [("long", 1)]
    assert worker.stopped == []
    assert world.job("long").losses == 0


def test_a_handler_that_runs_for_longer_is_reported_as_started(world: Harness) -> None:
    client, worker = world.client(), world.worker()
    worker.handlers = True
    client.submit_ids("a")
    world.settle()
    assert world.job("a").state is State.ASSIGNED
    world.run_for(0.3)
    assert world.job("a").state is State.RUNNING


def test_small_ttls_do_not_make_a_worker_refuse_everything(make_world: MakeWorld) -> None:
    world = make_world(lease_ttl_s=1.0)
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.run_for(10.0, 0.05)
    assert worker.runs == [("a", 1)]
    assert worker.jobs == ["a"]


# ---------------------------------------------------------------------------------------------------- workers that are lost


def test_the_job_of_a_killed_worker_runs_elsewhere_within_ttl_and_margin(world: Harness) -> None:
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


def test_the_late_finish_of_a_frozen_worker_is_fenced(world: Harness) -> None:
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


def test_a_worker_that_is_cut_off_stops_its_job_before_the_store_gives_it_away(world: Harness) -> None:
    client, first, second = world.client(), world.worker("w1"), world.worker("w2", patterns=("none",))
    client.submit_ids("a")
    world.settle()
    assert first.link is not None
    first.link.mute = True
    world.dial = lambda node, address: None  # type: ignore[method-assign]  # and nobody can connect again
    world.run_until(lambda: bool(first.stopped), within_s=LEASE_TTL_S)
    assert first.stopped == [("a", "LEASE_LOST")]
    assert world.job("a").state is State.RUNNING
    assert second.runs == []


def test_a_job_whose_workers_all_die_is_dead_lettered_with_a_reason(world: Harness) -> None:
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


def test_a_kept_job_that_nobody_took_is_finished_by_its_worker_after_the_grace(world: Harness) -> None:
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


def test_a_kept_job_that_somebody_took_is_not_finished_by_its_old_worker(world: Harness) -> None:
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


def test_a_restarted_worker_of_the_same_id_does_not_renew_its_dead_self(world: Harness) -> None:
    client, first = world.client(), world.worker("w1", incarnation="one")
    client.submit_ids("a")
    world.settle()
    world.kill(first)
    second = world.worker("w1", incarnation="two")
    world.run_for(LEASE_TTL_S / 2)
    assert second.jobs == []
    world.run_until(lambda: "a" in second.jobs, within_s=LOST_AFTER_S + PATIENCE_S)
    assert second.runs == [("a", 2)]


def test_of_two_live_workers_with_one_id_the_later_stays_and_the_earlier_is_told(world: Harness) -> None:
    first = world.worker("w1", incarnation="one")
    second = world.worker("w1", incarnation="two")
    world.run_for(5.0)
    assert first.exited is not None
    assert isinstance(first.exited.error, InvalidInput)
    assert second.exited is None
    assert second.dials == 1


# ---------------------------------------------------------------------------------------------------- server restarts


def test_a_restarted_server_does_not_run_again_what_was_running(world: Harness) -> None:
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


def test_leases_count_as_renewed_when_a_server_takes_over(world: Harness) -> None:
    client, worker = world.client(), world.worker()
    world.run_for(1.0)  # what is granted in the moment of a takeover counts as renewed by that one
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
def test_a_submit_survives_a_server_that_dies_before_it_answered(world: Harness, moment: str) -> None:
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
def test_a_finish_survives_a_server_that_dies_before_it_answered(world: Harness, committed: bool) -> None:
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


def test_an_assignment_that_died_with_the_server_is_delivered_by_the_next_one(world: Harness) -> None:
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


def test_a_delivery_after_a_restart_takes_the_place_of_credit(world: Harness) -> None:
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
