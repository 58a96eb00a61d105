"""The end of a worker that was asked for: what runs is finished, nothing new is begun, and no job pays for it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasuki import Client
from tasuki.core.job import JobSpec
from tests.e2e.stage import (
    LOST_WITHIN_S,
    SOON_S,
    Ledger,
    assert_one_finish_each,
    command_worker,
    jobs_worker,
    sqlite_only,
    stdout_of,
    story,
)
from tests.support.processes import ServerProcess, WorkerProcess, alive
from tests.support.waiting import until

pytestmark = pytest.mark.e2e


def worker_and_work(kind: str, gate: Path) -> tuple[Callable[..., WorkerProcess], dict[str, Any]]:
    """The start of a worker of this kind, and a job for it that lasts until the gate is there."""
    if kind == "handler":
        return jobs_worker, {"payload": f"hold {gate}".encode()}
    return command_worker, {"exec": "step", "args": ["hold", str(gate)]}


def test_sigterm_lets_running_jobs_end_and_takes_no_new_ones(
    server: ServerProcess, client: Client, ledger: Ledger, tmp_path: Path
) -> None:
    # given: a handler and a command that run at two workers with room for more
    gate = tmp_path / "gate"
    with (
        jobs_worker(server, ledger, "--subject", "hold.>") as handlers,
        command_worker(server, ledger, "--slots", "4") as commands,
    ):
        running = client.submit(subject="hold.1", payload=f"hold {gate}".encode(), job_id="running")
        command = client.submit(exec="step", args=["hold", str(gate)], job_id="command")
        for job in (running, command):
            ledger.wait_for(job.job_id)

        # when: both are asked to end, and more work comes
        for worker in (handlers, commands):
            worker.signal(signal.SIGTERM)
            worker.wait_for_output("draining")
        until(lambda: not any(worker.patterns for worker in client.workers()), SOON_S, "the server knows of the drain")
        client.submit(subject="hold.2", job_id="next", watch=False)
        client.submit(exec="step", job_id="next-command", watch=False)

        # then: they end what they had, and leave
        gate.touch()
        assert running.result(SOON_S) == b"1"
        assert stdout_of(command.result(SOON_S)) == "attempt 1\n"
        assert (handlers.wait(), commands.wait()) == (0, 0)
        assert [client.status(job_id).attempt for job_id in ("next", "next-command")] == [0, 0]
        assert {run.job_id for run in ledger.runs()} == {"running", "command"}


def test_a_drain_under_load_costs_no_job_a_retry_or_a_loss(server: ServerProcess, client: Client, ledger: Ledger) -> None:
    # given: two workers in the middle of many short jobs
    specs = [JobSpec(job_id=f"short-{n}", subject="load.1", payload=b"rest 0.02", max_losses=0) for n in range(900)]
    with jobs_worker(server, ledger, "--slots", "8") as leaving, jobs_worker(server, ledger, "--slots", "8"):
        jobs = client.submit_many(specs)
        until(lambda: len(ledger.runs()) > 200, SOON_S, "the workers are at work")

        # when: one of them is asked to end
        assert leaving.stop() == 0

        # then: the other does the rest, and every job is in its first run
        assert {job.result(3 * SOON_S) for job in jobs} <= {b"1", b"2"}
        assert len(ledger.runs()) == len(specs)
        views = client.statuses(*(spec.job_id for spec in specs))
        assert {(view.losses, view.failures) for view in views} == {(0, 0)}
        assert_one_finish_each(client, [spec.job_id for spec in specs], "load")


@pytest.mark.parametrize("kind", ["handler", "command"])
def test_cancel_still_works_while_a_worker_drains(
    server: ServerProcess, client: Client, ledger: Ledger, tmp_path: Path, kind: str
) -> None:
    start, work = worker_and_work(kind, tmp_path / "never")
    with start(server, ledger) as worker:
        job = client.submit(**work, job_id="canceled")
        ledger.wait_for("canceled")
        worker.signal(signal.SIGTERM)
        worker.wait_for_output("draining")

        client.cancel("canceled")

        assert job.outcome(SOON_S).state == "CANCELED"
        assert worker.wait() == 0


@sqlite_only
def test_a_drain_that_takes_longer_than_its_timeout_stops_the_jobs_and_costs_them_no_retry(
    server: ServerProcess, client: Client, ledger: Ledger, tmp_path: Path
) -> None:
    _, work = worker_and_work("command", tmp_path / "never")
    with command_worker(server, ledger, "--drain-timeout", "0.5") as worker:
        client.submit(**work, job_id="held", watch=False)
        run = ledger.wait_for("held")

        worker.signal(signal.SIGTERM)

        assert worker.wait() == 0
        assert not alive(run.pid)
        view = client.status("held")
        assert (view.state in ("ASSIGNED", "RUNNING"), view.failures, view.outcome) == (True, 0, None)


@pytest.mark.parametrize("kind", ["handler", "command"])
def test_a_second_signal_stops_the_jobs_which_then_run_elsewhere(
    server: ServerProcess, client: Client, ledger: Ledger, tmp_path: Path, kind: str
) -> None:
    # given: a job without any retry, at a worker that drains
    gate = tmp_path / "gate"
    start, work = worker_and_work(kind, gate)
    with start(server, ledger) as worker:
        job = client.submit(**work, job_id="stopped", retries=0)
        ledger.wait_for("stopped")
        worker.signal(signal.SIGTERM)
        worker.wait_for_output("draining")

        # when: it is told a second time
        worker.signal(signal.SIGTERM)
        worker.wait()

        # then: the job goes on at another worker: that its machine was wanted back is no failure of its own
        with start(server, ledger):
            ledger.wait_for("stopped", 2, LOST_WITHIN_S)
            gate.touch()
            assert job.outcome(SOON_S).state == "SUCCEEDED"
    assert ledger.attempts("stopped") == [1, 2]
    assert "failed" not in story(client, "stopped")
