"""An agent killed at every step of a job's life: the same id later is a clean run or the stored result, never half a ZIP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tasuki.agent.folders import FAULT_POINTS
from tests.agent.stage import TIMEOUT_S, members, report
from tests.support.processes import alive
from tests.support.waiting import until
from tests.support.zips import check_zip

RUN_POINTS = FAULT_POINTS[:6]
FAILED_POINTS = ("agent.failed.written", "agent.failed.marked")
DONE_AFTER = {"agent.done.marked", "agent.ended"}
"""From here on the job is done, whatever happens to the agent."""


class Nursery:
    """See nursery.py."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("nursery.py")
        self._process = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, data: Path, fault: str = "") -> KilledAgent:
        data.mkdir(parents=True, exist_ok=True)
        (data / "port").unlink(missing_ok=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"data": str(data), "fault": fault}) + "\n")
        self._process.stdin.flush()
        return KilledAgent(data, int(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(TIMEOUT_S) == 0


class KilledAgent:
    """A real process. Leaving the `with` block kills it."""

    def __init__(self, data: Path, pid: int) -> None:
        self.data, self.pid = data, pid

    @property
    def alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def open(self) -> httpx.Client:
        until(lambda: (self.data / "port").exists() or not self.alive, what="the agent is open")
        assert self.alive, "the agent died before it was open"
        port = json.loads((self.data / "port").read_text())["port"]
        return httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        until(lambda: not self.alive, what=f"agent {self.pid} is gone")

    def __enter__(self) -> KilledAgent:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def post(http: httpx.Client, job_id: str, script: str) -> httpx.Response:
    return http.post(f"/run/{job_id}", files={"file": ("job.sh", script.encode())})


def post_and_die(agent: KilledAgent, job_id: str, script: str) -> None:
    with agent.open() as http, pytest.raises(httpx.TransportError):
        post(http, job_id, script)
    agent.wait()


def check_archive(archive: bytes, tmp_path: Path) -> None:
    path = tmp_path / "checked.zip"
    path.write_bytes(archive)
    with path.open("rb") as file:
        check_zip(file)


class AfterKills:
    """A data folder on which an agent was killed once at each point, each time in the life of another job; and the next agent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.http: httpx.Client

    def ran(self, point: str) -> int:
        path = self.folder / f"{point}.ran"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def script(self, point: str) -> str:
        return f"echo x >> {self.folder}/{point}.ran; echo result > out/made.txt; exit {3 * ('failed' in point)}"

    def state(self, point: str) -> str | None:
        answer = self.http.get(f"/jobs/{point}")
        return answer.json()["state"] if answer.status_code == 200 else None


@pytest.fixture(scope="module")
def after(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AfterKills]:
    after = AfterKills(tmp_path_factory.mktemp("after"))
    for point in (*RUN_POINTS, *FAILED_POINTS):
        with nursery.start(after.data, point) as agent:
            post_and_die(agent, point, after.script(point))
    with nursery.start(after.data) as agent, agent.open() as after.http:
        yield after


@pytest.mark.parametrize("point", RUN_POINTS)
def test_after_a_kill_the_same_id_is_a_clean_run_or_the_stored_result(after: AfterKills, point: str, tmp_path: Path) -> None:
    found, ran_before = after.state(point), after.ran(point)

    answer = post(after.http, point, after.script(point))

    assert found == ("done" if point in DONE_AFTER else None if point == "agent.received" else "interrupted")
    assert answer.status_code == 200
    check_archive(answer.content, tmp_path)
    assert members(answer.content)["out/made.txt"] == b"result\n"
    assert answer.headers["tasuki-cache"] == ("hit" if found == "done" else "miss")
    assert after.ran(point) == ran_before + (found != "done")
    assert report(answer.content)["attempt"] == (2 if found == "interrupted" else 1)
    assert after.http.get(f"/result/{point}").content == answer.content
    assert sorted(path.name for path in (after.data / "jobs" / point).iterdir()) == [".done", "result.zip"]


@pytest.mark.parametrize("point", FAILED_POINTS)
def test_a_failure_is_kept_or_the_job_is_interrupted(after: AfterKills, point: str) -> None:
    state = after.state(point)

    assert state == ("failed" if point == "agent.failed.marked" else "interrupted")
    assert after.http.get(f"/result/{point}").status_code == (200 if state == "failed" else 404)
    assert post(after.http, point, "echo another input").status_code == 200


def test_nothing_of_the_killed_uploads_is_left(after: AfterKills) -> None:
    assert not list((after.data / "incoming").iterdir())
    until(lambda: not list((after.data / "trash").iterdir()), what="the trash is empty")


@pytest.mark.parametrize("point", ["agent.interrupted.written", "agent.interrupted.marked"])
def test_a_start_that_is_killed_while_it_recovers_is_made_good_by_the_next(nursery: Nursery, point: str, tmp_path: Path) -> None:
    with nursery.start(tmp_path / "data", "agent.running") as agent:
        post_and_die(agent, "job", "true")
    with nursery.start(tmp_path / "data", point) as agent:
        agent.wait()
    assert not (tmp_path / "data/port").exists()

    with nursery.start(tmp_path / "data") as agent, agent.open() as http:
        assert http.get("/jobs/job").json()["state"] == "interrupted"
        assert post(http, "job", "true").status_code == 200


def test_a_kill_ends_what_ran_and_the_job_is_interrupted_before_the_port_opens(nursery: Nursery, tmp_path: Path) -> None:
    data, pid_file = tmp_path / "data", tmp_path / "pid"
    script = f"echo $$ > {pid_file}; exec sleep 60"
    with nursery.start(data) as agent, agent.open() as http:
        body = {"file": ("job.sh", script.encode())}
        with contextlib.suppress(httpx.ReadTimeout):
            http.post("/run/job", files=body, timeout=0.5)
        pid = until(lambda: pid_file.exists() and pid_file.read_text().strip())
        agent.kill()

        with nursery.start(data) as second, second.open() as again:
            assert not alive(pid)
            assert again.get("/jobs/job").json()["state"] == "interrupted"
            assert again.get("/capacity").json()["running"] == 0
            assert post(again, "job", "echo now").status_code == 200


def test_torn_markers_count_for_nothing(nursery: Nursery, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with nursery.start(data) as agent, agent.open() as http:
        for job_id in ("torn", "no-result", "short-result"):
            post(http, job_id, "true")
    (data / "jobs/torn/.done").write_bytes(b'{"job_id": "torn"')
    (data / "jobs/no-result/result.zip").unlink()
    (data / "jobs/short-result/result.zip").write_bytes(b"PK")

    with nursery.start(data) as agent, agent.open() as http:
        for job_id in ("torn", "no-result", "short-result"):
            assert http.get(f"/jobs/{job_id}").status_code == 404
            assert post(http, job_id, "echo another input is taken").status_code == 200


def test_a_second_agent_on_the_folder_is_refused(nursery: Nursery, tmp_path: Path) -> None:
    from tasuki.agent.folders import JobFolders
    from tasuki.errors import ConfigError

    with nursery.start(tmp_path / "data") as agent:
        agent.open().close()

        with pytest.raises(ConfigError, match=f"pid {agent.pid}"):
            JobFolders(tmp_path / "data")


def test_a_file_that_a_killed_agent_threw_away_is_gone_before_its_name_is_given_again(tmp_path: Path) -> None:
    from tasuki.agent.folders import JobFolders

    JobFolders(tmp_path).close()
    (tmp_path / "trash/1").write_text("a marker of a job that had ended")
    (tmp_path / "jobs/torn").mkdir()

    folders = JobFolders(tmp_path)
    folders.recover()
    folders.close()

    assert not list((tmp_path / "trash").iterdir())
    assert not list((tmp_path / "jobs").iterdir())
