"""Execs of kind python through server and worker: what the worker says at its start, and nothing left when it is killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stage import HERE, LEASE_TTL_S, SOON_S, stdout_of
from tests.support.processes import ServerProcess, WorkerProcess, start_server, start_worker
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

WORKER_TESTS = HERE.parent / "worker"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One for the whole file: no store has a part in any of this."""
    with start_server(tmp_path_factory.mktemp("warm"), "--lease-ttl", str(LEASE_TTL_S)) as server:
        yield server


def python_worker(server: ServerProcess, data: Path, call: str) -> WorkerProcess:
    execs = data.with_suffix(".toml")
    execs.write_text(f"""
    [exec.job]
    kind = "python"
    call = "{call}"
    args = "any"
    env = {{ PYTHONPATH = "{WORKER_TESTS}" }}
    """)
    arguments = ("--config", str(execs), "--data", str(data), "--slots", "1", "--subject", data.name)
    return start_worker(server, *arguments, command=True)


def processes_of(keeper: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()]


def test_a_function_runs_and_the_worker_says_that_its_interpreter_is_warm(server: ServerProcess, tmp_path: Path) -> None:
    with python_worker(server, tmp_path / "fine", "preforked_jobs:show") as worker, server.client() as client:
        handle = client.submit(subject="fine", exec="job", args=("a", "b"))

        shown = stdout_of(handle.result(timeout=SOON_S))

        assert '"arguments": ["a", "b"]' in shown
        assert "exec 'job': its interpreter is warm" in worker.wait_for_output("is warm")


def test_an_import_that_fails_is_said_at_the_workers_start(server: ServerProcess, tmp_path: Path) -> None:
    with python_worker(server, tmp_path / "missing", "no_such_module:main") as worker:
        assert "No module named 'no_such_module'" in worker.wait_for_output("its jobs are refused")


def test_when_the_worker_is_killed_its_interpreters_and_their_jobs_go(server: ServerProcess, tmp_path: Path) -> None:
    started = tmp_path / "started"
    with python_worker(server, tmp_path / "killed", "preforked_jobs:wait_for") as worker, server.client() as client:
        client.submit(subject="killed", exec="job", args=(str(started), str(tmp_path / "never")), max_losses=0)
        until(started.exists, SOON_S, "the job runs")
        found = re.search(r"keeper (\d+): level", worker.wait_for_output("level "))
        assert found is not None
        kept = [*processes_of(int(found[1])), int(found[1])]
        assert len(kept) >= 3  # the interpreter, the job, the keeper; and what is parked

        os.kill(worker.pid, signal.SIGKILL)

        until(lambda: not any(Path(f"/proc/{pid}/cwd").exists() for pid in kept), SOON_S, "all of them are gone")
