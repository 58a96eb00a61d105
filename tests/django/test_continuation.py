"""Workers that are cut off or detached while they run: they go on if somebody confirms it, or nothing of the run is left before
another one starts it. Real processes, whose network the tests cut."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.django_nodes import NodeRig, RigNode
from tests.support.postgres_service import PostgresService
from tests.support.waiting import until

pytestmark = pytest.mark.e2e
SLOW_S = 60.0
QUICK = {
    "heartbeat_interval_seconds": 0.4,
    "heartbeat_ttl_seconds": 2,
    "worker_detach_grace_seconds": 0,
    "leader_tick_seconds": 0.5,
    "leader_stale_seconds": 2,
    "leader_lock_ttl_seconds": 2,
    "subleader_check_seconds": 0.3,
}


@pytest.fixture
def rig(postgres: PostgresService, redis_url: str, tmp_path: Path) -> Iterator[NodeRig]:
    with NodeRig(tmp_path, postgres, redis_url) as rig:
        rig.settings(**QUICK)
        yield rig


def running(rig: NodeRig, node: RigNode) -> str:
    """Have the node run a command that goes on until it is told; return the job id."""
    (rig.folder / "go").unlink(missing_ok=True)
    job_id = rig.enqueue("hold", str(rig.folder))
    until(lambda: rig.run_state(job_id)[0] == "RUNNING", SLOW_S, "the run runs")
    return job_id


def ended(rig: NodeRig, job_id: str) -> tuple[str, int, str]:
    (rig.folder / "go").touch()
    until(lambda: rig.run_state(job_id)[0] == "SUCCEEDED", SLOW_S, "the run ends")
    return rig.run_state(job_id)


def test_a_worker_that_is_cut_off_from_the_database_goes_on_by_the_word_of_the_leader(rig: NodeRig) -> None:
    # Given a leader, and a worker that has the only queue
    rig.start("leads", "n1", "--queue", "nothing")
    rig.leader()
    worker = rig.start("works", "n2")
    job_id = running(rig, worker)

    # When the worker is cut off from the database until its deadline nears
    rig.cut(worker, "sql")
    [(over_at,)] = rig.rows("SELECT lease_expires_at FROM tasuki_jobrun")
    worker.process.wait_for_output("goes on, by the word of", SLOW_S)
    [(renewed_to,)] = rig.rows("SELECT lease_expires_at FROM tasuki_jobrun")
    assert renewed_to > over_at, "the leader has renewed the lease"
    assert rig.run_state(job_id) == ("RUNNING", 1, worker.worker_id)
    rig.network.heal()

    # Then the same attempt ends well
    assert ended(rig, job_id) == ("SUCCEEDED", 1, worker.worker_id)


def test_a_detached_worker_goes_on_if_it_may_and_comes_back_under_another_id(rig: NodeRig) -> None:
    rig.start("leads", "n1", "--queue", "nothing")
    rig.leader()
    worker = rig.start("works", "n2")
    first, job_id = worker.worker_id, running(rig, worker)

    # When its heartbeats and the calls to it are cut, it is detached; when both are back, it asks, and goes on
    rig.cut(worker, "redis")
    rig.network.cut(rig.nodes["leads"].pid, "works")
    until(lambda: f"worker {first} of node n2 is detached" in rig.nodes["leads"].process.output(), SLOW_S)
    rig.network.heal()
    worker.process.wait_for_output("goes on, by the word of", SLOW_S)
    assert rig.rows("SELECT continuation_state FROM tasuki_jobrun") == [("NONE",)]
    assert ended(rig, job_id) == ("SUCCEEDED", 1, first)

    # Then it comes back under another id, as the same process, and works
    until(lambda: worker.worker_id != first, SLOW_S, "it has another id")
    second = running(rig, worker)
    assert ended(rig, second) == ("SUCCEEDED", 1, worker.worker_id)


def test_nothing_of_a_run_is_left_that_nobody_confirmed_before_another_worker_starts_it(rig: NodeRig) -> None:
    rig.start("leads", "n1", "--queue", "nothing")
    rig.leader()
    worker = rig.start("works", "n2")
    first, job_id = worker.worker_id, rig.enqueue("alone", str(rig.folder))
    until(lambda: (rig.folder / f"began-{job_id}").exists(), SLOW_S, "the run began")
    rig.start("helps", "n3")

    # When it is detached, and can ask nobody
    rig.cut(worker, "leads", "helps")
    rig.site.run(f"""
from contextlib import closing
from tasuki.server.assembly import open_scheduler_coordination
from tasuki.coords.coordination import LEADER
with closing(open_scheduler_coordination({rig.coordination!r})) as shared:
    shared.set_detached({first!r}, True, actor=LEADER)
""")
    worker.process.wait_for_output("is stopped: nobody confirmed", SLOW_S)

    # Then another one runs it, as the next attempt, after a loss
    until(lambda: rig.run_state(job_id)[:2] == ("RUNNING", 2), SLOW_S, "the next attempt")
    assert not (rig.folder / "overlap").exists()
    [(reason,)] = rig.rows("SELECT reason FROM tasuki_incident WHERE kind = 'lost'")
    assert reason.endswith("its worker was detached")
    rig.network.heal()
    until(lambda: worker.worker_id != first, SLOW_S, "it has another id")


@pytest.mark.soak
def test_no_run_is_lost_while_the_database_is_away_for_longer_than_a_lease(rig: NodeRig) -> None:
    # Given runs of the leader's own worker and of another one
    rig.start("leads", "n1", "--queue", "leads")
    leader = rig.leader()
    worker = rig.start("works", "n2", "--queue", "works")
    rig.settled()
    code = "from tasuki.django import enqueue_command\nprint(enqueue_command('probe', 'hold', FOLDER, queue=QUEUE))"
    jobs = {}
    for node in (leader, worker):
        jobs[node] = rig.site.run(f"FOLDER, QUEUE = {str(rig.folder)!r}, {node.name!r}\n{code}").strip()
        until(lambda one=jobs[node]: rig.run_state(one)[0] == "RUNNING", SLOW_S, "the run runs")  # type: ignore[misc]

    expires = "SELECT lease_expires_at FROM tasuki_jobrun ORDER BY 1"
    first = rig.rows(expires)
    until(lambda: rig.rows(expires)[0] > first[-1], SLOW_S, "both leases were renewed since the leader took over")

    # When the database is away for 30 s
    for node in rig.nodes.values():
        rig.cut(node, "sql")
    until(
        lambda: all(node.process.output().count("goes on, by the word of") >= 4 for node in rig.nodes.values()),
        SLOW_S,
        "both were confirmed four times",
    )
    rig.network.heal()

    # Then both go on as the same attempts
    for node, job_id in jobs.items():
        assert ended(rig, job_id) == ("SUCCEEDED", 1, node.worker_id)


@pytest.mark.soak
@pytest.mark.parametrize("places", [("redis",), ("calls",)], ids="".join)
def test_a_worker_that_only_misses_heartbeats_or_calls_is_not_detached(rig: NodeRig, places: tuple[str]) -> None:
    rig.start("leads", "n1", "--queue", "nothing")
    rig.leader()
    worker = rig.start("works", "n2")
    job_id = running(rig, worker)

    if places == ("redis",):
        rig.cut(worker, "redis")
    else:
        rig.network.cut(rig.nodes["leads"].pid, "works")
    seen = rig.led_at()
    until(lambda: rig.led_at() > seen + 12.0, SLOW_S, "the leader has judged for long")

    assert "is detached" not in rig.nodes["leads"].process.output()
    assert ended(rig, job_id) == ("SUCCEEDED", 1, worker.worker_id)


@pytest.mark.soak
def test_a_worker_that_is_frozen_for_five_seconds_goes_on_with_its_run(rig: NodeRig) -> None:
    rig.settings(worker_detach_grace_seconds=10)
    rig.start("leads", "n1", "--queue", "nothing")
    rig.leader()
    worker = rig.start("works", "n2")
    first, job_id = worker.worker_id, running(rig, worker)
    renewed = "SELECT lease_expires_at FROM tasuki_jobrun"
    before = rig.rows(renewed)
    until(lambda: rig.rows(renewed) != before, SLOW_S, "its lease was just renewed")

    worker.process.signal(signal.SIGSTOP)
    seen = rig.led_at()
    until(lambda: rig.led_at() > seen + 5.0, SLOW_S, "the leader has worked for five seconds")
    worker.process.signal(signal.SIGCONT)

    assert ended(rig, job_id) == ("SUCCEEDED", 1, first)


@pytest.mark.soak
def test_frozen_workers_are_detached_and_their_runs_go_to_others(rig: NodeRig) -> None:
    rig.start("leads", "n1", "--queue", "nothing")
    rig.leader()
    worker = rig.start("works", "n2")
    first, job_id = worker.worker_id, running(rig, worker)

    worker.process.signal(signal.SIGSTOP)
    until(lambda: f"worker {first} of node n2 is detached" in rig.nodes["leads"].process.output(), SLOW_S)
    assert rig.run_state(job_id) == ("RUNNING", 1, first)
    helper = rig.start("helps", "n3")
    until(lambda: rig.run_state(job_id)[1] == 2, SLOW_S, "the run has gone to another worker")
    worker.process.signal(signal.SIGCONT)

    assert ended(rig, job_id) == ("SUCCEEDED", 2, helper.worker_id)
    until(lambda: worker.worker_id != first, SLOW_S, "it has another id")
