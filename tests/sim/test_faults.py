"""Every kind of fault happens, and does what its name says."""

import pytest

from tasuki.testing.sim import servers
from tasuki.testing.sim.clients import Operation
from tasuki.testing.sim.faults import DRAWN_KINDS, KINDS
from tasuki.testing.sim.history import BeganEvent, DriftedEvent, GoneEvent, ProcessEvent, SettledEvent
from tasuki.testing.sim.run import check_seed, plan_of
from tasuki.testing.sim.world import SimOptions, derived
from tests.sim.worlds import Stage

SHOWS = {"partition": "cut", "one_way": "cut"}
"""Under which name the effects of a kind are counted, where it is not its own."""


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_happens_and_makes_a_difference(kind: str) -> None:
    options = SimOptions(kinds=(kind,), servers=2, jobs=16, chaos_s=8.0, faults=8, latency_s=0.01)

    outcome = check_seed(1, options)

    assert outcome.faults[kind]
    assert outcome.effects[SHOWS.get(kind, kind)]
    assert outcome.good, outcome.text()


def test_faults_are_drawn_from_the_seed_alone_and_none_begins_after_the_chaos() -> None:
    options = derived(7, SimOptions(), DRAWN_KINDS)

    plan = plan_of(7, options)

    assert plan == plan_of(7, options)
    assert len(plan.faults) == options.faults
    assert all(fault.at < options.chaos_s and fault.kind in (options.kinds or ()) for fault in plan.faults)
    assert [fault.number for fault in plan.faults] == list(range(len(plan.faults)))


def test_each_seed_has_a_choice_of_the_kinds() -> None:
    choices = [set(derived(seed, SimOptions(), DRAWN_KINDS).kinds or ()) for seed in range(60)]

    assert set.union(*choices) == set(DRAWN_KINDS)
    assert all(4 <= len(choice) < len(DRAWN_KINDS) for choice in choices)


# ---------------------------------------------------------------------------------------------------- one by one


@pytest.fixture
def stage() -> Stage:
    return Stage(SimOptions(servers=1, workers=1, clients=1, jobs=1, lease_ttl_s=3.0, latency_s=0.001))


def test_without_faults_a_job_runs_and_its_client_hears_of_it(stage: Stage) -> None:
    stage.submit("job-1")

    stage.run_for(1.0)

    assert stage.states("job-1") == ["SUCCEEDED"]
    assert [line.job_id for line in stage.lines_of(BeganEvent)] == ["job-1"]
    assert not stage.client.waiting


def test_a_half_open_connection_delivers_nothing_until_its_peer_gives_up(stage: Stage) -> None:
    link = stage.worker.link
    assert link is not None

    stage.fault("half_open", "worker-1", amount=0.5)
    stage.submit("job-1")
    stage.run_for(0.9)

    assert not stage.lines_of(BeganEvent)
    stage.run_for(6.0)
    assert stage.worker.link is not link
    stage.run_until(lambda: not stage.client.waiting)


def test_what_was_sent_into_a_partition_arrives_when_it_is_over(stage: Stage) -> None:
    stage.fault("partition", "client-1", for_s=2.0)
    stage.submit("job-1")

    stage.run_for(1.9)
    assert not stage.states("job-1")

    stage.run_for(0.5)
    assert stage.states("job-1")


def test_the_keeper_ends_the_attempts_of_a_paused_worker_at_their_deadline(stage: Stage) -> None:
    stage.lasting_attempts(60.0)
    stage.submit("job-1")
    stage.run_for(0.5)
    began = stage.lines_of(BeganEvent)[0].at

    stage.fault("pause", "worker-1", for_s=20.0)
    stage.run_for(6.0)

    [gone] = stage.lines_of(GoneEvent)
    assert gone.how == "stopped"
    assert began + 2.0 < gone.at < began + 3.0 + 1.0
    assert stage.worker.paused


def test_the_attempts_of_a_crashed_worker_are_gone_at_once(stage: Stage) -> None:
    stage.lasting_attempts(60.0)
    stage.submit("job-1")
    stage.run_for(0.5)

    stage.fault("crash", "worker-1", for_s=1.0)

    assert [(line.how, line.at) for line in stage.lines_of(GoneEvent)] == [("killed", stage.world.at)]
    stage.run_for(2.0)
    assert [line.what for line in stage.lines_of(ProcessEvent) if line.name == "worker-1"] == ["started", "crashed", "started"]


def test_an_ending_that_was_saved_is_offered_by_the_next_process(stage: Stage) -> None:
    stage.lasting_attempts(0.5)
    stage.submit("job-1")
    stage.run_for(0.3)

    stage.fault("crash", "server-1", for_s=4.5)
    stage.run_for(4.0)
    assert stage.worker.disk
    stage.fault("crash", "worker-1", for_s=0.1)
    stage.run_until(lambda: not stage.worker.disk)

    assert [line.recorded for line in stage.lines_of(SettledEvent)] == [True]
    assert stage.states("job-1") == ["SUCCEEDED"]


def test_an_answer_that_is_lost_after_the_commit_leaves_what_was_committed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "KNOWN_AFTER_ALL", 0.0)
    stage.fault("store_lost", "store", for_s=0.2, amount=1.0)
    stage.submit("job-1")

    stage.run_for(0.1)
    assert stage.states("job-1")
    assert stage.client.asking

    stage.run_until(lambda: not stage.client.asking and not stage.client.waiting)


def test_a_store_that_restarts_answers_when_it_is_back(stage: Stage) -> None:
    stage.fault("store_restart", "store", for_s=1.0)
    stage.submit("job-1")

    stage.run_for(0.9)
    assert not stage.states("job-1")

    stage.run_until(lambda: not stage.client.waiting and not stage.client.asking)


def test_a_full_disk_refuses_new_jobs_until_there_is_room(stage: Stage) -> None:
    stage.fault("disk_full", "store", for_s=3.0, amount=1.0)
    stage.run_for(1.5)

    stage.submit("job-1")
    stage.run_for(0.5)
    assert not stage.states("job-1")

    stage.run_for(3.0)
    stage.submit("job-1")
    stage.run_until(lambda: bool(stage.states("job-1")))


def test_clocks_differ_and_drift_only_where_they_were_told_to(stage: Stage) -> None:
    worker, store = stage.worker.clock, stage.system.storage.clock
    assert worker.monotonic() != store.monotonic()

    stage.fault("drift_far", "worker-1", for_s=2.0, amount=-0.5)
    before = worker.monotonic(), store.monotonic()
    stage.run_for(2.0)

    assert worker.monotonic() - before[0] == pytest.approx(1.0)
    assert store.monotonic() - before[1] == pytest.approx(2.0)
    assert [line.name for line in stage.lines_of(DriftedEvent)] == ["worker-1"]


def test_a_wall_clock_that_jumps_moves_no_deadline(stage: Stage) -> None:
    clock = stage.worker.clock
    wall, monotonic = clock.wall(), clock.monotonic()

    stage.fault("jump", "worker-1", amount=-5.0)

    assert clock.wall() == pytest.approx(wall - 5.0)
    assert clock.monotonic() == monotonic


def test_a_late_message_of_an_old_connection_comes_after_those_of_the_new_one(stage: Stage) -> None:
    heard = stage.messages_to(stage.system.servers[0])
    old = stage.client.link
    assert old is not None

    stage.fault("late", "client-1", for_s=0.5, amount=1.0)
    stage.client.operate(Operation(number=0, at=0.0, client="client-1", verb="get", job_ids=("job-1",)))
    stage.run_for(3.0)

    new = stage.client.link
    assert new is not None
    assert heard.index(new.conn) < len(heard) - 1 - heard[::-1].index(old.conn)
