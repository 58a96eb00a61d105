"""The machines under orders: cancel, routing and fairness, draining, watching."""

from __future__ import annotations

from tasuki.core.job import JobSpec, State
from tasuki.core.lifecycle import LEASE_MARGIN_S, LEASE_TTL_S
from tasuki.core.worker import machine
from tasuki.errors import NotFound
from tests.support.harness import Harness

LOST_AFTER_S = LEASE_TTL_S + LEASE_MARGIN_S
PATIENCE_S = 1.0  # duties and reconnects are due within this


# ---------------------------------------------------------------------------------------------------- cancel


def test_cancel_of_a_waiting_job_ends_it_at_once(world: Harness) -> None:
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


def test_cancel_of_a_job_that_waits_for_its_retry_tells_the_attempt_it_had(world: Harness) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a", backoff_s=30.0)
    world.settle()
    worker.fail("a")
    world.settle()
    client.cancel("a")
    world.settle()
    assert client.result("a").state is State.CANCELED
    assert client.result("a").attempt == world.job("a").attempt == 1


def test_cancel_of_a_running_job_stops_it_at_its_worker(world: Harness) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    ticket = client.cancel("a")
    world.settle()
    assert client.answers[ticket].answer["a"]["requested"] is True
    assert worker.stopped == [("a", "CANCELED")]
    assert client.result("a").state is State.CANCELED


def test_a_cancel_that_a_cut_off_worker_did_not_hear_is_told_by_its_next_heartbeat(world: Harness) -> None:
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


def test_a_finish_committed_before_the_cancel_wins_and_both_learn_it(world: Harness) -> None:
    client, worker, other = world.client(), world.worker(), world.client("other")
    client.submit_ids("a")
    world.settle()
    worker.finish("a", b"first")
    ticket = other.cancel("a")
    world.settle()
    assert other.answers[ticket].answer["a"]["state"] == "SUCCEEDED"
    assert client.result("a").state is State.SUCCEEDED


def test_a_cancel_committed_before_a_failure_wins_over_its_retry(world: Harness) -> None:
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


def test_a_canceled_job_of_a_dead_worker_is_canceled_by_the_reaper_and_its_watcher_told(world: Harness) -> None:
    client, worker = world.client(), world.worker()
    client.submit_ids("a")
    world.settle()
    world.kill(worker)
    client.cancel("a")
    world.run_for(LOST_AFTER_S + PATIENCE_S)
    assert client.result("a").state is State.CANCELED


def test_a_canceled_job_that_its_worker_gives_back_is_canceled_and_its_watcher_told(world: Harness) -> None:
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


def test_workers_see_only_their_subjects(world: Harness) -> None:
    client = world.client()
    worker = world.worker(capacity=10, patterns=("a.*",))
    client.submit_ids("one", subject="b.1")
    client.submit_ids("two", subject="a.1.deep")
    client.submit_ids("three", subject="a")
    client.submit_ids("four", subject="a.1")
    world.run_for(3.0)
    assert worker.runs == [("four", 1)]


def test_each_idle_worker_gets_the_job_of_its_own_subject_in_the_same_turns(world: Harness) -> None:
    workers = [world.worker(f"a{number}", patterns=("a.*",)) for number in range(3)]
    lonely = world.worker("b0", capacity=2, patterns=("b.*",))  # the most loaded, so that the others are asked before it
    client = world.client()
    client.submit_ids("before", subject="b.1")
    world.settle()
    client.submit(JobSpec(job_id="for-a", subject="a.1"), JobSpec(job_id="for-b", subject="b.1"))
    world.settle()
    assert lonely.jobs == ["before", "for-b"]
    assert sum(len(worker.jobs) for worker in workers) == 1


def test_a_job_addressed_to_a_worker_that_left_goes_to_another(world: Harness) -> None:
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


def test_a_job_addressed_to_a_worker_that_drains_goes_to_another(world: Harness) -> None:
    client, named, other = world.client(), world.worker("named", patterns=("x.*",)), world.worker("other", patterns=("x.*",))
    client.submit_ids("busy", subject="x.named")
    client.submit_ids("mine", subject="x.named")
    world.settle()
    assert (named.jobs, other.jobs) == (["busy"], [])
    named.drain()
    world.settle()
    assert (named.jobs, other.jobs) == (["busy"], ["mine"])


def test_a_flood_in_one_group_delays_another_groups_job_by_a_few_jobs(world: Harness) -> None:
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


def test_new_jobs_are_shared_between_idle_workers(world: Harness) -> None:
    client, first, second = world.client(), world.worker("w1", capacity=10), world.worker("w2", capacity=10)
    client.submit_ids(*(f"job-{number}" for number in range(10)))
    world.settle()
    assert (len(first.jobs), len(second.jobs)) == (5, 5)


def test_a_worker_changes_its_subjects_without_leaving(world: Harness) -> None:
    from tasuki.core.worker.events import ChangePatterns

    client, worker = world.client(), world.worker(patterns=("a.*",))
    client.submit_ids("b", subject="b.1")
    world.settle()
    worker.apply(ChangePatterns(("b.*",)))
    world.settle()
    assert worker.jobs == ["b"]


# ---------------------------------------------------------------------------------------------------- leaving


def test_a_draining_worker_ends_its_job_takes_no_other_and_exits(world: Harness) -> None:
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


def test_an_assignment_that_crosses_a_drain_is_given_back_without_a_loss(world: Harness) -> None:
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


def test_a_lease_turn_that_a_drain_overtakes_is_given_back_without_a_loss(world: Harness) -> None:
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


def test_what_a_worker_gives_back_as_it_exits_is_released(world: Harness) -> None:
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


def test_a_worker_that_leaves_while_its_lease_is_made_costs_no_loss(world: Harness) -> None:
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


def test_a_release_that_was_lost_with_the_connection_is_said_again(world: Harness) -> None:
    client, worker = world.client(), world.worker("w1")
    worker.handlers = True
    client.submit_ids("a")
    world.settle()
    assert worker.link is not None
    worker.link.hold_to_server = True
    worker.give_back("a")
    worker.flush()
    world.cut(worker)
    world.run_for(PATIENCE_S + machine.GIVE_BACK_PAUSE_S)
    assert world.job("a").losses == 0
    assert worker.runs == [("a", 1), ("a", 2)]


# ---------------------------------------------------------------------------------------------------- watching


def test_a_watch_of_an_unknown_job_is_an_error_of_its_own_and_does_not_hide_the_others(world: Harness) -> None:
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


def test_the_watcher_of_a_rerun_is_not_given_the_ending_before_it(world: Harness) -> None:
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
    assert [result.generation for result in other.results["a"]] == [1]


def test_a_result_tells_the_generation_it_belongs_to(world: Harness) -> None:
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
