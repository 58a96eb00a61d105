"""The server is killed at each step of submit, lease, finish and fail, one by one, and started again on its folder.

Neither the worker nor the client is restarted, from the first case to the last. What must hold at every point: the client gets
the result, the job ran once for each of its attempts, and there is no attempt that the job itself did not ask for. A point
before the commit loses what nobody was told; a point after it loses only words that are said again: the client repeats its
submit, the server its assignment, the worker its report.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from signal import SIGKILL
from typing import NamedTuple

import pytest

from tasuki import Client
from tests.e2e.stage import SOON_S, Ledger, in_background, jobs_worker, story
from tests.processes import ServerProcess, WorkerProcess, start_server, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("fault_points")]

STEPS = (",turn.before_commit", ",turn.committed", ",turn.answered")
"""After the verb was written: before the commit, after it, and when the peers were told. tests/soak has those in between too."""


class Scene(NamedTuple):
    server: ServerProcess
    worker: WorkerProcess
    client: Client
    ledger: Ledger


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A server with leases longer than any restart takes, so that a lost lease cannot hide a lost word."""
    folder = tmp_path_factory.mktemp("faults")
    ledger = Ledger(folder / "ledger")
    with start_server(folder) as server, jobs_worker(server, ledger) as worker, server.client() as client:
        yield Scene(server, worker, client, ledger)


def survive(scene: Scene, fault: str, job_id: str, **fields: object) -> bytes:
    """Submit a job to a server that dies at `fault`; the result that comes after its restart."""
    scene.server.restart(env={"TASUKI_FAULT": fault})
    wait_until(lambda: len(scene.client.workers()) == 1, SOON_S, "the worker is back")
    with in_background(lambda: scene.client.submit(subject="fault.1", job_id=job_id, **fields).result(2 * SOON_S)) as result:
        assert scene.server.wait(SOON_S) == -SIGKILL, f"the server was to die at {fault}"
        scene.server.restart(env={})
        return result.result(2 * SOON_S)


def assert_one_untroubled_run(scene: Scene, job_id: str) -> None:
    assert scene.ledger.attempts(job_id) == [1]
    status = scene.client.status(job_id)
    assert (status["state"], status["attempt"], status["losses"], status["failures"]) == ("SUCCEEDED", 1, 0, 0)
    assert story(scene.client, job_id) == []


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("verb", ["submit", "finish"])
def test_a_job_survives_the_death_of_the_server(scene: Scene, verb: str, step: str) -> None:
    job_id = f"{verb}{step}".replace(",", "-")

    result = survive(scene, f"{verb}.written{step}", job_id=job_id)

    assert result == b"1"
    assert_one_untroubled_run(scene, job_id)


@pytest.mark.parametrize("step", STEPS)
def test_a_job_survives_the_death_of_the_server_while_it_is_leased(scene: Scene, step: str) -> None:
    # given: a job that becomes ready later, so that it is leased in a turn of its own
    job_id = f"lease{step}".replace(",", "-")

    result = survive(scene, f"submit.written,turn.answered,lease.written{step}", job_id=job_id, not_before=time.time() + 0.3)

    assert result == b"1"
    assert_one_untroubled_run(scene, job_id)


@pytest.mark.parametrize("step", STEPS)
def test_a_failed_attempt_is_counted_once_when_the_server_dies(scene: Scene, step: str) -> None:
    job_id = f"fail{step}".replace(",", "-")

    result = survive(scene, f"fail.written{step}", job_id=job_id, payload=b"stumble", max_retries=1, backoff_s=0.05)

    assert result == b"2"
    assert scene.ledger.attempts(job_id) == [1, 2]
    status = scene.client.status(job_id)
    assert (status["state"], status["attempt"], status["losses"], status["failures"]) == ("SUCCEEDED", 2, 0, 1)
    assert story(scene.client, job_id) == ["failed"]


def test_every_job_was_finished_exactly_once(scene: Scene) -> None:
    """The last one of this file: the counters, kept by the finishes themselves, agree with what was submitted."""
    jobs = scene.client.find(limit=100, subject="fault.>")["jobs"]

    counts = scene.client.counts().get("fault", {})

    assert counts.get("succeeded", 0) == len(jobs)
    assert sum(counts.values()) == len(jobs)
    assert scene.worker.running
