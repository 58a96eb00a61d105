"""Workers that are cut off or detached while they run: they go on if somebody confirms it, or nothing of the run is left before
another one starts it. Real processes, whose network the tests cut."""

from __future__ import annotations

import fcntl
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.django.test_roles import DEFINE
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


NOTE_QUESTIONS = """
CREATE TABLE questions (state text, deadline float8, lease_until float8);
CREATE FUNCTION note_question() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF NEW.continuation_state <> OLD.continuation_state THEN
        INSERT INTO questions VALUES (NEW.continuation_state, NEW.continuation_check_deadline_at, NEW.lease_expires_at); END IF;
    RETURN NEW; END $$;
CREATE TRIGGER note_question AFTER UPDATE ON tasuki_jobrun FOR EACH ROW EXECUTE FUNCTION note_question()
"""


@pytest.fixture(params=["redis", pytest.param("database", marks=pytest.mark.soak)])
def rig(request: pytest.FixtureRequest, postgres: PostgresService, tmp_path: Path) -> Iterator[NodeRig]:
    redis_url = request.getfixturevalue("redis_url") if request.param == "redis" else ""
    with NodeRig(tmp_path, postgres, redis_url) as rig:
        rig.settings(**QUICK)
        rig.rows(NOTE_QUESTIONS)
        yield rig


def states(rig: NodeRig) -> list[str]:
    """Return the continuation states that runs had, in order, and check that each lease lasted beyond the answer."""
    found = rig.rows("SELECT state, deadline, lease_until FROM questions")
    assert all(lease_until > deadline for state, deadline, lease_until in found if state == "CONFIRMING")
    return [state for state, *_ in found]


def begun(rig: NodeRig) -> str:
    """Enqueue a command that holds a lock with a child in a session of its own, and wait until it runs; return the job id."""
    job_id = rig.enqueue("alone", str(rig.folder))
    until(lambda: (rig.folder / f"began-{job_id}").exists(), SLOW_S, "the run began")
    return job_id


def is_gone(rig: NodeRig) -> bool:
    """Return whether nothing of the command `alone` is left."""
    with (rig.folder / "lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def runs_again(rig: NodeRig, job_id: str) -> None:
    """Wait for the second attempt of a run, after one loss, and check that nothing of the first one was left."""
    until(lambda: rig.run_state(job_id)[:2] == ("RUNNING", 2), SLOW_S, "the next attempt")
    assert not (rig.folder / "overlap").exists()
    assert rig.rows("SELECT count(*) FROM tasuki_incident WHERE kind = 'lost'") == [(1,)]


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
    worker.process.wait_for_output(" confirmed it", SLOW_S)
    [(renewed_to,)] = rig.rows("SELECT lease_expires_at FROM tasuki_jobrun")
    assert renewed_to > over_at, "the leader has renewed the lease"
    assert rig.run_state(job_id) == ("RUNNING", 1, worker.worker_id)
    rig.network.heal()

    # Then the same attempt ends well
    assert ended(rig, job_id) == ("SUCCEEDED", 1, worker.worker_id)


@pytest.mark.soak
def test_a_cancel_reaches_a_worker_that_is_cut_off_from_the_database(rig: NodeRig) -> None:
    rig.start("leads", "n1", "--queue", "nothing")
    rig.leader()
    worker = rig.start("works", "n2")
    job_id = begun(rig)

    # When the run is canceled while its worker can only be called
    rig.cut(worker, "sql")
    rig.site.manage("tasuki_runs", "cancel", job_id)

    # Then the run is stopped, and ends as canceled, although the worker could not say so
    worker.process.wait_for_output(f"job {job_id} is stopped", SLOW_S)
    until(lambda: is_gone(rig), SLOW_S, "nothing of the run is left")
    until(lambda: rig.run_state(job_id)[:2] == ("CANCELED", 1), SLOW_S, "its lease is over")
    assert "confirmed it" not in worker.process.output()


def test_a_detached_worker_goes_on_if_it_may_and_comes_back_under_another_id(rig: NodeRig) -> None:
    rig.start("leads", "n1", "--queue", "nothing")
    rig.leader()
    worker = rig.start("works", "n2")
    first, job_id = worker.worker_id, running(rig, worker)

    # When its heartbeats and the calls to it are cut, it is detached; when both are back, it asks, and goes on
    rig.cut_heartbeats(worker)
    rig.network.cut(rig.nodes["leads"].pid, "works")
    until(lambda: f"worker {first} of node n2 is detached" in rig.nodes["leads"].process.output(), SLOW_S)
    rig.network.heal()
    worker.process.wait_for_output(" confirmed it", SLOW_S)
    assert states(rig) == ["CONFIRMING", "NONE"]
    assert ended(rig, job_id) == ("SUCCEEDED", 1, first)

    # Then it comes back under another id, as the same process, and works
    until(lambda: worker.worker_id != first, SLOW_S, "it has another id")
    second = running(rig, worker)
    assert ended(rig, second) == ("SUCCEEDED", 1, worker.worker_id)

    # And ends when it is told to while it comes back once more
    rig.detach(worker.worker_id)
    worker.process.wait_for_output(f"worker {worker.worker_id} was detached; it starts again", SLOW_S)
    worker.process.signal(signal.SIGTERM)
    assert worker.process.wait(SLOW_S) in (0, -signal.SIGTERM)


def test_a_node_that_is_told_to_end_ends_soon_although_nothing_answers_it(rig: NodeRig) -> None:
    rig.start("leads", "n1", "--queue", "nothing")
    leader = rig.leader()
    worker = rig.start("works", "n2")
    until(lambda: worker.is_sub_leader, SLOW_S, "it watches")
    rig.cut(worker, "all")
    worker.process.wait_for_output("is not the sub-leader of", SLOW_S)

    worker.process.signal(signal.SIGTERM)

    seen = rig.led_at()
    assert worker.process.wait(SLOW_S) == 0
    assert rig.led_at() < seen + 20.0, "by what the leader did meanwhile"
    assert leader.leads


def test_nothing_of_a_run_is_left_that_nobody_confirmed_before_another_worker_starts_it(rig: NodeRig) -> None:
    rig.start("leads", "n1", "--queue", "nothing")
    rig.leader()
    worker = rig.start("works", "n2")
    first, job_id = worker.worker_id, begun(rig)
    rig.start("helps", "n3")

    # When it is detached, and can ask nobody
    rig.cut(worker, "leads", "helps")
    rig.detach(first)
    worker.process.wait_for_output("is stopped: no leader confirmed", SLOW_S)

    # Then another one runs it, as the next attempt, after a loss
    runs_again(rig, job_id)
    assert states(rig) == ["CONFIRMING", "NONE"], "cleared by the grant"
    [(reason,)] = rig.rows("SELECT reason FROM tasuki_incident WHERE kind = 'lost'")
    assert reason.endswith("its worker was detached")
    rig.network.heal()
    until(lambda: worker.worker_id != first, SLOW_S, "it has another id")


@pytest.mark.soak
def test_with_redis_no_run_is_lost_while_the_database_is_away_for_longer_than_a_lease(
    postgres: PostgresService, redis_url: str, tmp_path: Path
) -> None:
    with NodeRig(tmp_path, postgres, redis_url) as rig:
        rig.settings(**QUICK)
        outlast(rig)


def outlast(rig: NodeRig) -> None:
    """Check that an outage of the database costs no run."""
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
        lambda: all(node.process.output().count(" confirmed it") >= 4 for node in rig.nodes.values()),
        SLOW_S,
        "both were confirmed four times",
    )
    rig.network.heal()

    # Then both go on as the same attempts
    for node, job_id in jobs.items():
        assert ended(rig, job_id) == ("SUCCEEDED", 1, node.worker_id)


@pytest.mark.soak
def test_without_redis_runs_are_gone_before_their_leases_while_the_database_is_away_and_run_once_more(
    postgres: PostgresService, tmp_path: Path
) -> None:
    with NodeRig(tmp_path, postgres) as rig:
        rig.settings(**QUICK)
        rig.start("leads", "n1", "--queue", "nothing")
        rig.leader()
        rig.start("works", "n2")
        job_id = begun(rig)

        for node in rig.nodes.values():
            rig.cut(node, "sql")
        [(over_at,)] = rig.rows("SELECT lease_expires_at FROM tasuki_jobrun")
        until(lambda: is_gone(rig), SLOW_S, "nothing of the run is left")
        [(now,)] = rig.rows("SELECT extract(epoch FROM clock_timestamp())::float8")
        assert now < over_at
        until(lambda: rig.rows("SELECT extract(epoch FROM clock_timestamp())::float8")[0][0] > over_at + 15.0, SLOW_S, "30 s")
        assert rig.run_state(job_id)[:2] == ("RUNNING", 1), "nobody could end the lease"
        rig.network.heal()

        runs_again(rig, job_id)


@pytest.mark.soak
@pytest.mark.parametrize("places", [("heartbeats",), ("calls",)], ids="".join)
def test_a_worker_that_only_misses_heartbeats_or_calls_is_not_detached(rig: NodeRig, places: tuple[str]) -> None:
    rig.start("leads", "n1", "--queue", "nothing")
    rig.leader()
    worker = rig.start("works", "n2")
    job_id = running(rig, worker)

    if places == ("heartbeats",):
        rig.cut_heartbeats(worker)
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
@pytest.mark.parametrize("frozen_s", [20.0, 60.0])
def test_frozen_workers_are_detached_and_their_runs_go_to_others(rig: NodeRig, frozen_s: float) -> None:
    rig.start("leads", "n1", "--queue", "nothing")
    rig.leader()
    worker = rig.start("works", "n2")
    first, job_id = worker.worker_id, begun(rig)
    helper = rig.start("helps", "n3")

    worker.process.signal(signal.SIGSTOP)
    seen = rig.led_at()
    until(lambda: f"worker {first} of node n2 is detached" in rig.nodes["leads"].process.output(), SLOW_S)
    assert rig.run_state(job_id) == ("RUNNING", 1, first)
    until(lambda: rig.led_at() > seen + frozen_s, frozen_s + SLOW_S, "the leader has worked for so long")
    worker.process.signal(signal.SIGCONT)

    runs_again(rig, job_id)
    assert rig.run_state(job_id)[2] == helper.worker_id
    until(lambda: worker.worker_id != first, SLOW_S, "it has another id")
    assert rig.run_state(job_id)[:2] == ("RUNNING", 2)


@pytest.mark.soak
@pytest.mark.parametrize("keeper", ["lives", "is killed"])
def test_a_node_that_is_killed_costs_one_loss_and_leaves_nothing_of_its_run(rig: NodeRig, keeper: str) -> None:
    rig.start("leads", "n1", "--queue", "nothing")
    rig.leader()
    worker = rig.start("works", "n2")
    job_id = begun(rig)
    rig.start("helps", "n3")
    found = re.search(r"keeper (\d+): level", worker.process.output())
    assert found is not None

    if keeper == "is killed":
        os.kill(int(found[1]), signal.SIGKILL)
    worker.process.kill()
    if keeper == "is killed":  # whoever starts next with the node's folder ends what is left
        rig.start_again(worker)
    until(lambda: is_gone(rig), SLOW_S, "nothing of the run is left")

    assert rig.run_state(job_id)[1] == 1, "the lease is not over yet"
    runs_again(rig, job_id)


@pytest.mark.soak
def test_a_worker_that_is_cut_off_from_everything_is_detached_and_its_run_goes_to_another(rig: NodeRig) -> None:
    rig.start("leads", "n1", "--queue", "nothing")
    rig.leader()
    worker = rig.start("works", "n2")
    first, job_id = worker.worker_id, begun(rig)
    helper = rig.start("helps", "n3")

    rig.cut(worker, "all")
    until(lambda: f"worker {first} of node n2 is detached" in rig.nodes["leads"].process.output(), SLOW_S)
    runs_again(rig, job_id)
    assert rig.run_state(job_id)[2] == helper.worker_id
    rig.network.heal()

    until(lambda: worker.worker_id != first, SLOW_S, "it has another id")
    assert rig.run_state(job_id)[:2] == ("RUNNING", 2)


@pytest.mark.soak
@pytest.mark.parametrize("coordination", ["redis", "database"])
def test_a_run_whose_worker_cannot_be_told_to_start_it_goes_to_whoever_is_free(
    request: pytest.FixtureRequest, postgres: PostgresService, tmp_path: Path, coordination: str
) -> None:
    redis_url = request.getfixturevalue("redis_url") if coordination == "redis" else ""
    with NodeRig(tmp_path, postgres, redis_url, SITE_SECONDS="1") as rig:
        # Given a worker whose heartbeats arrive, and that the leader cannot call
        rig.settings(**QUICK, assign_ahead_seconds=3, reassign_after_seconds=2)
        rig.start("leads", "n1", "--queue", "nothing")
        leader = rig.leader()
        worker = rig.start("works", "n2")
        rig.network.cut(leader.pid, "works")
        rig.site.run(DEFINE)

        # When runs are assigned to it, then they are orphaned, and it takes them itself, as the next attempt
        late = "SELECT scheduled_for, started_at FROM tasuki_jobrun WHERE attempt = 2 AND state = 'SUCCEEDED'"
        until(lambda: len(rig.rows(late)) >= 3, SLOW_S, "three runs were assigned again")
        assert all(started_at >= at + 2.0 for at, started_at in rig.rows(late))
        assert "is detached" not in leader.process.output()
        assert {name for (name,) in rig.rows("SELECT DISTINCT assigned_worker_id FROM tasuki_jobrun")} <= {worker.worker_id, None}


@pytest.mark.parametrize(("tls", "times"), [("shared", 1), pytest.param("own", 3, marks=pytest.mark.soak)])
def test_certificates_are_rotated_under_load_and_no_run_is_dropped(
    postgres: PostgresService, redis_url: str, tmp_path: Path, tls: str, times: int
) -> None:
    with NodeRig(tmp_path, postgres, redis_url, slots=16, tls=tls, SITE_SECONDS="1") as rig:
        # Given runs that are assigned ahead, started by order, and one that goes on
        rig.settings(**QUICK, assign_ahead_seconds=2)
        nodes = [rig.start(name) for name in ("n1", "n2", "n3")]
        rig.settled()
        long_run = running(rig, nodes[0])
        rig.site.run(DEFINE)
        done = "SELECT count(*) FROM tasuki_jobrun WHERE state = 'SUCCEEDED'"

        # When all certificates are replaced
        for count in range(1, times + 1):
            before = rig.rows(done)[0][0]
            rig.rotate()
            for node in nodes:
                until(lambda one=node, least=count: one.process.output().count("was loaded again") >= least, SLOW_S)  # type: ignore[misc]
            until(lambda least=before + 4: rig.rows(done)[0][0] >= least, SLOW_S, "runs go on")  # type: ignore[misc]

        # Then each run was one attempt, and no call was refused
        assert ended(rig, long_run)[:2] == ("SUCCEEDED", 1)
        assert rig.rows("SELECT DISTINCT attempt FROM tasuki_jobrun WHERE started_at IS NOT NULL") == [(1,)]
        assert rig.rows("SELECT count(*) FROM tasuki_incident") == [(0,)]
        assert not [line for node in nodes for line in node.process.output().splitlines() if " refused " in line]
        assert not [node.name for node in nodes if "did not get the order to start" in node.process.output()]
