"""A worker whose line to the server is cut: what it stops, what it keeps, and what it saves for its next process."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki import Client
from tests.e2e.stage import (
    HERE,
    LOST_WITHIN_S,
    SOON_S,
    Ledger,
    command_worker,
    jobs_worker,
    stdout_of,
    story,
)
from tests.support.processes import ChildProcess, ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

ENOUGH_BYTES = 300_000  # a result that is no longer inline


class Wire(ChildProcess):
    """A line to the server that can be cut and mended: nothing arrives, and every connection stays open."""

    url = ""
    token = ""

    def cut(self) -> None:
        self.signal(signal.SIGSTOP)

    def mend(self) -> None:
        self.signal(signal.SIGCONT)


@pytest.fixture
def wire(server: ServerProcess, tmp_path: Path) -> Iterator[Wire]:
    command = [sys.executable, HERE / "relay.py", "127.0.0.1", str(server.port)]
    with Wire(command, tmp_path / "relay.log", {}) as wire:
        wire.url = f"tcp://127.0.0.1:{wire.wait_for_output(chr(10)).split()[1]}"
        wire.token = server.create_token("worker")
        yield wire


def wait_for_state(client: Client, job_id: str, state: str) -> None:
    until(lambda: client.status(job_id).state == state, 2 * LOST_WITHIN_S, f"{job_id} is {state}")


def test_stop_ends_the_job_and_another_worker_runs_it(
    server: ServerProcess, client: Client, ledger: Ledger, wire: Wire, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with jobs_worker(wire.url, ledger, token=wire.token, log=tmp_path / "w.log") as cut:
        job = client.submit(subject="hold.1", payload=f"hold {gate}".encode(), job_id="stopped")
        assert ledger.wait_for("stopped").pid == cut.pid
        wire.cut()
        with jobs_worker(server, ledger) as other:
            # then: its second attempt is there; the worker that does not answer is given nothing meanwhile
            assert ledger.wait_for("stopped", 2, 2 * LOST_WITHIN_S).pid == other.pid
            gate.touch()
            assert job.result(SOON_S) == b"2"
        # and: the first one has let it go, and says nothing of it when it is back
        wire.mend()
        cut.wait_for_output("connected ")
        until(lambda: [one.running for one in client.workers()] == [0], SOON_S, "it is back with nothing to do")
    assert story(client, "stopped") == ["lost"]


def test_keep_goes_on_and_its_finish_counts_while_nobody_took_the_job(
    client: Client, ledger: Ledger, wire: Wire, tmp_path: Path
) -> None:
    # given: a handler and a command at workers that keep their jobs, cut off until their leases and grace are over
    gate = tmp_path / "gate"
    keep = ("--on-disconnect", "keep", "--reconnect-grace", "1")
    with (
        jobs_worker(wire.url, ledger, *keep, "--subject", "hold.>", token=wire.token, log=tmp_path / "h.log"),
        command_worker(
            wire.url,
            ledger,
            *keep,
            "--subject",
            "step.>",
            "--data",
            f"{tmp_path / 'w'}",
            token=wire.token,
            log=tmp_path / "c.log",
        ),
    ):
        handled = client.submit(subject="hold.1", payload=f"hold {gate}".encode(), job_id="handled")
        command = client.submit(subject="step.1", exec="step", args=["hold", str(gate)], job_id="command")
        for job in (handled, command):
            ledger.wait_for(job.job_id)
        wire.cut()
        for job in (handled, command):
            wait_for_state(client, job.job_id, "ORPHANED")
        # when: they end while cut off, and the line is back
        gate.touch()
        wire.mend()
        # then: their finishes are recorded, from their only runs
        assert handled.result(2 * SOON_S) == b"1"
        assert stdout_of(command.result(2 * SOON_S)) == "attempt 1\n"
        assert (ledger.attempts("handled"), ledger.attempts("command")) == ([1], [1])


def test_keep_loses_to_who_took_the_job_and_says_so(
    server: ServerProcess, client: Client, ledger: Ledger, wire: Wire, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    keep = ("--on-disconnect", "keep", "--reconnect-grace", "0")
    with jobs_worker(wire.url, ledger, *keep, token=wire.token, log=tmp_path / "w.log") as cut:
        job = client.submit(subject="hold.1", payload=f"hold {gate}".encode(), job_id="taken")
        ledger.wait_for("taken")
        wire.cut()
        wait_for_state(client, "taken", "ORPHANED")
        with jobs_worker(server, ledger):
            ledger.wait_for("taken", 2, 2 * LOST_WITHIN_S)
            gate.touch()
            assert job.result(SOON_S) == b"2"
        wire.mend()
        cut.wait_for_output("job taken attempt 1: refused, its result is dropped: ")
    assert client.status("taken").attempt == 2


@contextlib.contextmanager
def saving_worker(url: str, ledger: Ledger, folder: Path, token: str, log: Path) -> Iterator[ChildProcess]:
    """A worker that the next process can be: the same id, the same folder."""
    step = f"/bin/sh {HERE / 'step.sh'} {ledger.path}"
    big = f"big=/bin/sh -c 'head -c {ENOUGH_BYTES} /dev/urandom > out/bytes; {step} hold $0' {{args}}"
    arguments = ("--worker-id", "same", "--data", str(folder), "--on-disconnect", "keep", "--subject", "step.>", "--exec", big)
    with command_worker(url, ledger, *arguments, token=token, log=log) as worker:
        yield worker


def endings(folder: Path) -> list[str]:
    return sorted(path.suffix for path in (folder / "endings" / "same").glob("*"))


def test_an_ending_that_no_server_took_outlives_the_worker_that_is_killed(
    server: ServerProcess, client: Client, ledger: Ledger, wire: Wire, tmp_path: Path
) -> None:
    # given: a command that ended while its worker was cut off
    gate, folder = tmp_path / "gate", tmp_path / "w"
    with saving_worker(wire.url, ledger, folder, wire.token, tmp_path / "one.log") as worker:
        job = client.submit(subject="step.1", exec="step", args=["hold", str(gate)], job_id="saved")
        ledger.wait_for("saved")
        wire.cut()
        worker.wait_for_output("connection lost")
        gate.touch()
        until(lambda: endings(folder) == [".ending"], SOON_S, "the ending is saved")
        worker.kill()
    # when: the same worker is started again, with a line to the server
    with saving_worker(server.url, ledger, folder, wire.token, tmp_path / "two.log"):
        # then: the result is that of the run that nobody heard of, and nothing is left on disk
        assert stdout_of(job.result(SOON_S)) == "attempt 1\n"
        until(lambda: endings(folder) == [], SOON_S, "the file is removed")
    assert ledger.attempts("saved") == [1]


def test_a_large_result_that_was_not_uploaded_outlives_the_worker_that_is_stopped(
    server: ServerProcess, client: Client, ledger: Ledger, wire: Wire, tmp_path: Path
) -> None:
    gate, folder = tmp_path / "gate", tmp_path / "w"
    with saving_worker(wire.url, ledger, folder, wire.token, tmp_path / "one.log") as worker:
        job = client.submit(subject="step.1", exec="big", args=[str(gate)], job_id="large")
        run = ledger.wait_for("large")
        wire.cut()
        worker.wait_for_output("connection lost")
        gate.touch()
        until(lambda: not Path(f"/proc/{run.pid}").exists(), SOON_S, "the command has ended")
        # when: it is told to stop, and cannot report
        worker.signal(signal.SIGTERM)
        worker.wait_for_output("draining")
        worker.signal(signal.SIGTERM)
        assert worker.wait(SOON_S) == 0
    assert endings(folder) == [".ending", ".result"]
    with saving_worker(server.url, ledger, folder, wire.token, tmp_path / "two.log"):
        assert len(job.result(SOON_S)) > ENOUGH_BYTES
        until(lambda: endings(folder) == [], SOON_S, "the files are removed")
    assert ledger.attempts("large") == [1]
