"""`tasuki worker status` tells how a worker is from outside, whatever has become of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tasuki.cli.output import ExitCode
from tasuki.worker.credentials import Credential, CredentialToken
from tasuki.worker.status import RunningJob, StatusFile, status_folder
from tests.cli.inside import Done, Inside, inside
from tests.support.processes import ServerProcess, start_server, start_worker
from tests.support.waiting import until

__all__ = ["inside"]


class Folder:
    """A data folder, and what is said of it."""

    def __init__(self, path: Path, inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self._inside = inside
        monkeypatch.setenv("PATH", str(path))  # no systemd

    def asked(self, *arguments: str) -> Done:
        return self._inside("worker", "status", "--data", str(self.path), *arguments)

    def says(self, *, connected: bool = True, alive: bool = True, jobs: tuple[RunningJob, ...] = ()) -> None:
        """A worker of this process's, or of one that is gone."""
        file = StatusFile(self.path, "w1", "https://control.example", lasting=True)
        said = file._status
        said.running, said.jobs = len(jobs), jobs
        said.born -= 0 if alive else 1
        if connected:
            file.connected("192.0.2.7:443")
        else:
            file.lost("no connection to https://control.example:443: Connection refused")
        status_folder(self.path).mkdir(parents=True, exist_ok=True)
        (status_folder(self.path) / "w1.json").write_bytes(msgspec.json.encode(said))

    def has_results(self, worker_id: str, count: int) -> None:
        folder = self.path / "endings" / worker_id
        folder.mkdir(parents=True)
        for number in range(count):
            (folder / f"{number}.ending").touch()


@pytest.fixture
def folder(tmp_path: Path, inside: Inside, monkeypatch: pytest.MonkeyPatch) -> Folder:
    return Folder(tmp_path, inside, monkeypatch)


def test_a_worker_that_runs_and_is_connected(folder: Folder) -> None:
    folder.says(jobs=(RunningJob(job_id="h2-zpe", attempt=1, subject="job.assign.zpe", since=time.time()),))

    done = folder.asked()

    assert done.returncode == ExitCode.OK
    assert "w1: running, pid" in done.stdout
    assert "connected to 192.0.2.7:443 since" in done.stdout
    assert "h2-zpe" in done.stdout


def test_a_worker_that_has_no_server(folder: Folder) -> None:
    folder.says(connected=False)
    folder.has_results("w1", 2)

    done = folder.asked()

    assert done.returncode == ExitCode.UNAVAILABLE
    assert "w1: not connected" in done.stdout
    assert "Connection refused" in done.stdout
    assert "2 result(s) wait on disk" in done.stdout


def test_a_worker_whose_process_is_gone(folder: Folder) -> None:
    folder.says(alive=False)
    folder.has_results("w1", 3)

    done = folder.asked()

    assert done.returncode == ExitCode.NOT_FOUND
    assert "w1: not running" in done.stdout
    assert "is gone without a word" in done.stdout
    assert "3 result(s) wait on disk; its next start offers them" in done.stdout


def test_results_of_a_worker_that_says_nothing_are_counted_too(folder: Folder) -> None:
    folder.has_results("old", 1)

    done = folder.asked("--json")

    assert [(one["worker_id"], one["state"], one["results_waiting"]) for one in json.loads(done.stdout)["workers"]] == [
        ("old", "not running", 1)
    ]


def test_results_that_were_refused_are_counted(folder: Folder) -> None:
    folder.says()
    for name in ("job-1-2", "job-2-1", ".new-x"):
        (folder.path / "kept-aside" / name).mkdir(parents=True)

    assert "2 result(s) that were refused are kept in" in folder.asked().stdout


@pytest.mark.parametrize(("age_s", "words"), [(0.0, "valid until"), (1000.0, "it has expired")])
def test_the_end_of_its_token_is_told_and_never_its_secret(folder: Folder, age_s: float, words: str) -> None:
    issued_at = time.time() - age_s
    token = CredentialToken(secret="tsk_w_s3cr3t", token_id="a1b2", issued_at=issued_at, expires_at=issued_at + 600.0)
    credential = Credential(server="https://control.example:443", worker_id="w1", token=token)
    (folder.path / "worker").mkdir()
    path = folder.path / "worker" / "control.example-443.json"
    path.write_bytes(msgspec.json.encode(credential))
    path.chmod(0o600)

    done = folder.asked()

    assert f"token a1b2 for https://control.example:443: {words}" in done.stdout
    assert "s3cr3t" not in done.stdout + folder.asked("--json").stdout


def test_nothing_there(folder: Folder) -> None:
    done = folder.asked()

    assert done.returncode == ExitCode.NOT_FOUND
    assert "no worker has run on" in done.stdout


def test_the_services_that_systemd_knows_are_told(folder: Folder) -> None:
    systemctl = folder.path / "systemctl"
    systemctl.write_text("#!/bin/sh\necho 'tasuki-worker.service loaded active running tasuki worker'\n")
    systemctl.chmod(0o755)

    assert "service tasuki-worker.service: active (running)" in folder.asked().stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start_server(tmp_path_factory.mktemp("server")) as made:
        yield made


@pytest.mark.e2e
def test_a_real_worker_while_it_works_and_after_it_was_killed(server: ServerProcess, tmp_path: Path, inside: Inside) -> None:
    data = tmp_path / "worker"

    def asked() -> dict[str, object]:
        workers = json.loads(inside("worker", "status", "--data", str(data), "--json").stdout)["workers"]
        return dict(workers[0]) if workers else {}

    arguments = ("--exec", "sleep=sleep", "--data", str(data), "--worker-id", "w7")
    with start_worker(server, *arguments, command=True) as worker, server.client() as client:
        client.submit(exec="sleep", args=["60"], job_id="long", watch=False)
        until(lambda: asked().get("running") == 1, what="the job is told of")
        assert (asked()["state"], asked()["worker_id"], asked()["pid"]) == ("running", "w7", worker.pid)
        assert inside("worker", "status", "--data", str(data)).returncode == ExitCode.OK
        worker.kill()
        assert asked()["state"] == "not running"
        client.cancel("long")
