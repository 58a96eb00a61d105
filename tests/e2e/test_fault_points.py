"""The server is killed at each step of submit, lease, finish and fail, one by one, and started again on its folder.

Neither the worker nor the client is restarted. What must hold at every point: the client gets the result, the job ran once for
each of its attempts, and there is no attempt that the job itself did not ask for. A point before the commit loses what nobody
was told; a point after it loses only words that are said again: the client repeats its submit, the server its assignment, the
worker its report. So a server's death alone never costs an attempt.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL
from typing import NamedTuple

import pytest

from tasuki import Client
from tests.e2e.stage import LEAD_TTL_S, SOON_S, Ledger, assert_one_finish_each, in_background, jobs_worker, story
from tests.support.processes import ServerProcess, WorkerProcess, start_server

pytestmark = pytest.mark.e2e

STEPS = (",turn.before_commit", ",turn.committed", ",turn.answered")
"""After the verb was written: before the commit, after it, and when the peers were told. tests/soak has those in between too."""


class Scene(NamedTuple):
    server: ServerProcess
    worker: WorkerProcess
    client: Client
    ledger: Ledger


@contextlib.contextmanager
def armed(folder: Path, store_url: str, fault: str) -> Iterator[Scene]:
    """A server that will die at `fault`. Its leases are longer than any restart, so that no lost lease can hide a lost word.

    It leads for short times only: after its restart it waits for the end of its own leadership, which nobody gave back.
    """
    ledger = Ledger(folder / "ledger")
    with (
        start_server(folder, "--lead-ttl", str(LEAD_TTL_S), store=store_url, env={"TASUKI_FAULT": fault}) as server,
        jobs_worker(server, ledger) as worker,
        server.client() as client,
    ):
        yield Scene(server, worker, client, ledger)
        assert worker.running


def survive(scene: Scene, **fields: object) -> bytes:
    """Submit the job that makes the server die; the result that comes after its restart."""
    with in_background(lambda: scene.client.submit(subject="fault.1", job_id="job", **fields).result(2 * SOON_S)) as result:
        assert scene.server.wait(SOON_S) == -SIGKILL
        scene.server.restart(env={})
        return result.result(2 * SOON_S)


def assert_one_run_each(scene: Scene, attempts: int, failures: int) -> None:
    """The job was run once for each of its attempts, and finished once; the counters are kept by the finishes themselves."""
    assert scene.ledger.attempts("job") == list(range(1, attempts + 1))
    status = scene.client.status("job")
    assert (status.state, status.attempt, status.losses, status.failures) == ("SUCCEEDED", attempts, 0, failures)
    assert story(scene.client, "job") == ["failed"] * failures
    assert_one_finish_each(scene.client, ["job"], "fault")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("store_url", "verb"),
    [
        ("sqlite", "submit"),
        ("sqlite", "finish"),
        ("postgresql", "finish"),
        pytest.param("postgresql", "submit", marks=pytest.mark.soak),
    ],
    indirect=["store_url"],
)
def test_a_job_survives_the_death_of_the_server(tmp_path: Path, store_url: str, verb: str, step: str) -> None:
    with armed(tmp_path, store_url, f"{verb}.written{step}") as scene:
        assert survive(scene) == b"1"
        assert_one_run_each(scene, attempts=1, failures=0)


@pytest.mark.parametrize("step", STEPS)
def test_a_job_survives_the_death_of_the_server_while_it_is_leased(tmp_path: Path, store_url: str, step: str) -> None:
    # given: a job that becomes ready later, so that it is leased in a turn of its own
    with armed(tmp_path, store_url, f"submit.written,turn.answered,lease.written{step}") as scene:
        assert survive(scene, not_before=time.time() + 0.3) == b"1"
        assert_one_run_each(scene, attempts=1, failures=0)


@pytest.mark.parametrize("step", STEPS)
def test_a_failed_attempt_is_counted_once_when_the_server_dies(tmp_path: Path, store_url: str, step: str) -> None:
    with armed(tmp_path, store_url, f"fail.written{step}") as scene:
        assert survive(scene, payload=b"stumble", retries=1, backoff_s=0.05) == b"2"
        assert_one_run_each(scene, attempts=2, failures=1)
