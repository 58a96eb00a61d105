"""A disk that fills up under a server: submits are refused, nothing acknowledged is lost, work resumes when space returns."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki import Client
from tasuki.errors import DiskFull
from tests.conftest import Require
from tests.support.disks import small_disk
from tests.support.processes import SOURCE, TASUKI, ServerProcess, start_server, start_worker
from tests.support.waiting import until

pytestmark = pytest.mark.e2e
MIB = 1 << 20
DISK_BYTES = 120 * MIB  # the floor below which a server takes no work is 64 MiB


@pytest.fixture
def disk(tmp_path: Path, require: Require) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_BYTES, require) as disk:
        yield disk


class Filler:
    """A file that takes the room away."""

    def __init__(self, disk: Path) -> None:
        self._path = disk / "filler"

    def leave(self, free_bytes: int) -> None:
        stat = os.statvfs(self._path.parent)
        with self._path.open("ab") as file:
            os.posix_fallocate(file.fileno(), file.tell(), stat.f_bavail * stat.f_frsize - free_bytes)

    def take_all(self) -> None:
        """Not one page is left."""
        with self._path.open("ab", buffering=0) as file:
            for size in (MIB, 4096, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

    def remove(self) -> None:
        self._path.unlink()


@contextlib.contextmanager
def serving(disk: Path, elsewhere: Path) -> Iterator[tuple[ServerProcess, Client]]:
    """A server on the small disk; its log, its worker and the tests' own files are on another."""
    with (
        start_server(disk, log=elsewhere / "server.log") as server,
        start_worker(server, log=elsewhere / "worker.log"),
        server.client() as client,
    ):
        yield server, client


def refused(client: Client, acknowledged: list[str]) -> DiskFull | None:
    """One submit: its id is noted if it was taken, its error returned if not."""
    try:
        acknowledged.append(client.submit(subject="math.square", payload=b"11", watch=False).job_id)
    except DiskFull as error:
        return error
    return None


def accepted(client: Client, acknowledged: list[str]) -> bool:
    return refused(client, acknowledged) is None


def all_succeed(client: Client, acknowledged: list[str]) -> None:
    for job_id in acknowledged:
        assert client.job(job_id).result(timeout=30) == b"121"


def start_waiting(client: Client, gate: Path) -> str:
    job_id = client.submit(subject="wait", payload=str(gate).encode(), watch=False).job_id
    until(gate.with_name(gate.name + ".runs").exists, what="the job runs")
    return job_id


def runs(gate: Path) -> int:
    return len(gate.with_name(gate.name + ".runs").read_text().splitlines())


def test_below_the_floor_submits_are_refused_and_running_jobs_are_recorded(disk: Path, tmp_path: Path) -> None:
    gate, filler, acknowledged = tmp_path / "gate", Filler(disk), []
    with serving(disk, tmp_path) as (server, client):
        # Given a job that runs
        running = start_waiting(client, gate)
        assert accepted(client, acknowledged)
        all_succeed(client, acknowledged)
        done = list(acknowledged)
        # When the disk has less than the floor
        filler.leave(20 * MIB)
        error = until(lambda: refused(client, acknowledged), what="submits are refused")
        # Then the refusal names the folder and the way out, and large files are refused as well
        assert error.code == "DISK_FULL"
        assert error.retryable
        assert str(server.data) in error.message
        large = tmp_path / "large.bin"
        large.write_bytes(bytes(MIB))
        with pytest.raises(DiskFull):
            client.wait(client.aio.put_file(large))
        # And what runs is finished and recorded, and what was stored can be read
        gate.touch()
        assert client.job(running).result(timeout=30) == b"the gate is open"
        all_succeed(client, done)
        # And when there is room again, work resumes by itself, that which was taken just before the floor too
        filler.remove()
        until(lambda: accepted(client, acknowledged), what="submits are taken again")
        all_succeed(client, acknowledged)
    assert runs(gate) == 1


def fill_while_running(disk: Path, server: ServerProcess, client: Client, gate: Path, acknowledged: list[str]) -> Filler:
    """A running job whose end comes when nothing can be written any more."""
    filler = Filler(disk)
    start_waiting(client, gate)
    for _ in range(20):
        assert accepted(client, acknowledged)
    filler.take_all()
    gate.touch()
    until(lambda: refused(client, acknowledged), what="submits are refused")
    return filler


def test_not_a_byte_left_and_space_returns(disk: Path, tmp_path: Path) -> None:
    gate, acknowledged = tmp_path / "gate", []
    with serving(disk, tmp_path) as (server, client):
        filler = fill_while_running(disk, server, client, gate, acknowledged)
        # Given a disk without a byte left; when space returns
        filler.remove()
        # Then everything that was acknowledged ends, once, and new jobs are taken
        until(lambda: accepted(client, acknowledged), what="submits are taken again")
        all_succeed(client, acknowledged)
        found = client.list_jobs(subject="wait").jobs
        assert client.job(found[0].job_id).result(timeout=30) == b"the gate is open"
        assert server.running
    assert runs(gate) == 1


def test_server_killed_on_a_full_disk_loses_nothing(disk: Path, tmp_path: Path) -> None:
    gate, acknowledged = tmp_path / "gate", []
    with serving(disk, tmp_path) as (server, client):
        filler = fill_while_running(disk, server, client, gate, acknowledged)
        # When the server is killed with the disk full, and comes back when there is room
        server.kill()
        filler.remove()
        server.restart()
        # Then all acknowledged jobs are there and end
        all_succeed(client, acknowledged)
        until(lambda: accepted(client, acknowledged), what="submits are taken again")
    assert runs(gate) == 1


def test_server_ends_in_order_on_a_full_disk(disk: Path, tmp_path: Path) -> None:
    gate, acknowledged = tmp_path / "gate", []
    with serving(disk, tmp_path) as (server, client):
        filler = fill_while_running(disk, server, client, gate, acknowledged)
        # When it is asked to end, with a report that it cannot record
        server.stop(timeout=9)
        assert "Traceback" not in server.output()
        # Then it ended by itself, and with room it serves again
        filler.remove()
        server.restart()
        all_succeed(client, acknowledged)


def test_start_on_a_full_disk_is_refused_with_the_reason(disk: Path) -> None:
    Filler(disk).take_all()
    ended = subprocess.run(
        [*TASUKI, "server", "--data", disk / "data", "--tcp", "127.0.0.1:0"],
        capture_output=True, text=True, timeout=20, check=False, env={**os.environ, "PYTHONPATH": os.fspath(SOURCE)},
    )  # fmt: skip
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    assert "space" in ended.stderr or "full" in ended.stderr, ended.stderr
