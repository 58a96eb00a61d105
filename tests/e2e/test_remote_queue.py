"""Workers and clients that go straight to Redis or PostgreSQL, without a server between: the same jobs, leases and results."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from tasuki.cli import connect
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tests.cli.commands import TASUKI, User, environment
from tests.cli.inside import Inside, inside
from tests.support.processes import opened
from tests.support.waiting import until

__all__ = ["inside"]
pytestmark = pytest.mark.e2e

PAYLOAD = '{"molecule": "H2"}'
TTL_S = 1.0
STORY = """
import json, os, pathlib, sys
payload = json.load(sys.stdin)
out = pathlib.Path(os.environ["TASUKI_OUT"])
(out / "result.json").write_text(json.dumps({"of": payload["molecule"], "zpe_ev": 0.27}))
(out / "summary.txt").write_text("ZPE 0.27 eV")
(out / "freqs.csv").write_text("mode,cm-1\\n1,4401\\n")
"""
FAILURE = """
import json, os, pathlib, sys
text = json.dumps({"error_code": "QE_RUNTIME_ERROR", "error_message": "pw.x exited with code 1", "permanent": True})
(pathlib.Path(os.environ["TASUKI_OUT"]) / "error.json").write_text(text)
sys.exit(70)
"""


class Outsider:
    """Somebody who knows the keys of `zpe`, and nothing of tasuki."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.raw: Any = redis.Redis(port=parts.port or 0, db=int(parts.path.strip("/")), decode_responses=True)

    def push(self, job_id: str) -> None:
        self.raw.set(f"zpe:payload:{job_id}", PAYLOAD)
        self.raw.lpush("zpe:queue", job_id)

    def status(self, job_id: str) -> str | None:
        status: str | None = self.raw.hget(f"zpe:status:{job_id}", "status")
        return status

    def wait_for(self, job_id: str, status: str) -> None:
        until(lambda: self.status(job_id) == status, 20.0, f"{job_id} is {status}, not {self.status(job_id)}")


@pytest.fixture
def outsider(redis_url: str) -> Iterator[Outsider]:
    made = Outsider(redis_url)
    yield made
    made.raw.close()


@contextmanager
def worker(folder: Path, url: str, program: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    """`tasuki worker` for the app, on a data folder of its own. What it has in the folder for temporary files, no guest of
    another test cleans up."""
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(program)
    command = [*TASUKI, "worker", "--to", url, "--app", "zpe", "--exec", f"zpe=python3 {folder / 'program.py'}", "--slots", "1"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, *more],
            env=environment(folder, TASUKI_DATA=str(folder / "data"), TMPDIR=str(folder.parent)),
            stdin=subprocess.DEVNULL,
            stderr=log,
            text=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(10)


def test_a_job_of_raw_commands_is_run_and_its_result_stands_under_the_apps_keys(
    tmp_path: Path, redis_url: str, outsider: Outsider
) -> None:
    outsider.push("j1")

    with worker(tmp_path / "w", redis_url, STORY) as process:
        outsider.wait_for("j1", "finished")
        process.terminate()

        assert process.wait(15) == 0, (tmp_path / "w" / "log").read_text()

    raw = outsider.raw
    assert json.loads(raw.get("zpe:result:j1")) == {"of": "H2", "zpe_ev": 0.27}
    assert (raw.get("zpe:summary:j1"), raw.get("zpe:freqs:j1")) == ("ZPE 0.27 eV", "mode,cm-1\n1,4401\n")
    assert (raw.exists("zpe:lease:j1"), raw.zcard("zpe:lease:index"), raw.llen("zpe:queue")) == (0, 0, 0)


def test_a_failure_that_the_program_names_is_the_jobs(tmp_path: Path, redis_url: str, outsider: Outsider) -> None:
    outsider.push("j1")

    with worker(tmp_path / "w", redis_url, FAILURE):
        outsider.wait_for("j1", "failed")

    assert outsider.raw.hget("zpe:status:j1", "detail") == "pw.x exited with code 1; permanent"
    assert outsider.raw.lrange("zpe:dlq", 0, -1) == ["j1"]


def private_folder(pid: int) -> Path:
    """The folder of the worker's own socket, where it holds a lock."""
    [lock] = [path for path in opened(pid) if path.parent.name.startswith("tasuki-guest-")]
    return lock.parent


def test_after_a_worker_was_killed_another_one_runs_its_job(
    tmp_path: Path, redis_url: str, outsider: Outsider, inside: Inside
) -> None:
    outsider.push("j1")
    with worker(tmp_path / "first", redis_url, "import time; time.sleep(600)", "--lease-ttl", str(TTL_S)) as first:
        outsider.wait_for("j1", "running")
        folder = private_folder(first.pid)
        os.kill(first.pid, signal.SIGKILL)
        first.wait(10)

    def duties() -> Any:
        return inside("duties", "--once", "--store", redis_url, "--app", "zpe", "--json").json

    # Nobody leads here: runs of the duties do it, as cron would. The first one waits for the silent worker once more.
    began = time.monotonic()
    until(lambda: duties()["reaped"], 30.0, "its lease is over")
    assert time.monotonic() - began >= TTL_S + LEASE_MARGIN_S / 2
    assert outsider.raw.get("zpe:retry_count:j1") == "1"
    assert outsider.raw.zscore("zpe:delay", "j1") > time.time()
    outsider.raw.zadd("zpe:delay", {"j1": 0.0})  # rather than wait for ten seconds
    assert duties()["promoted"] == 1
    assert (folder / "socket").exists()
    with worker(tmp_path / "second", redis_url, STORY):
        outsider.wait_for("j1", "finished")
    assert not folder.exists(), "the next one cleans up after it"


def test_a_store_that_nobody_leads_is_warned_of_once(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connect, "LEADER_WAIT_S", 0.05)

    async def take_part() -> None:
        async with connect.guest(connect.StoreAddress(redis_url, "zpe")):
            await asyncio.to_thread(until, lambda: "no server leads" in caplog.text)

    with caplog.at_level("WARNING", logger="tasuki.direct"):
        asyncio.run(take_part())

    assert "tasuki duties --once" in caplog.text
    assert caplog.text.count("no server leads") == 1


def test_commands_ask_the_store_itself(
    redis_url: str, outsider: Outsider, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASUKI_URL", redis_url)
    monkeypatch.setenv("TASUKI_APP", "zpe")

    done = inside("submit", "--job-id", "mine", "--subject", "job.assign.zpe", "--quiet", "-")
    view = inside("status", "mine", "--json").json[0]

    assert (done.stdout, view["state"]) == ("mine\n", "PENDING")
    assert outsider.raw.lrange("zpe:queue", 0, -1) == ["mine"]
    assert outsider.raw.keys("zpe:token:*") == [], "nobody needs a token here, so none is made"


def test_postgresql_is_leased_from_alike(tmp_path: Path, postgres_url: str) -> None:
    user = User(tmp_path)
    user.environ |= {"TASUKI_URL": postgres_url}

    with worker(tmp_path / "w", postgres_url, "print('hello')"):
        done = user.run("run", "--subject", "job.assign.zpe", "zpe")

    assert done.stdout == "hello\n", done.stderr
