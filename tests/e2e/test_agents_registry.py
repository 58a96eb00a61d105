"""Agents and dispatchers that share a registry, as real processes that are killed: who takes over, when, and what is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agent.stage import Started, code_of, report
from tests.support.processes import TASUKI, ChildProcess
from tests.support.redis_service import RedisService
from tests.support.s3_service import S3Service
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

LARGE = "head -c 300000 /dev/urandom > out/large"
TTL_S = 1.0
MARGIN_S = 2.0
SLACK_S = 3.0  # of a machine that is busy with other tests
NO_ANSWER = httpx.Response(599)


class AgentProcess(ChildProcess):
    """`tasuki agent` with a registry, and a token that all of them have."""

    http: httpx.Client

    def __init__(self, folder: Path, node: str, environment: dict[str, str], *arguments: str) -> None:
        tokens = folder / "tokens"
        tokens.touch(mode=0o600)
        tokens.write_text("secret-of-all-agents\n")
        command = [*TASUKI, "agent", "--listen", "127.0.0.1:0", "--exec", "sh=/bin/sh {file}", "--node", node]
        command += ["--data", str(folder / node), "--token-file", str(tokens), "--slots", "4", *arguments]
        super().__init__(command, folder / f"{node}.log", environment)

    def wait_until_ready(self) -> None:
        output = self.wait_for_output("ready ")
        url = next(line.split()[1] for line in output.splitlines() if line.startswith("listening "))
        self.http = httpx.Client(base_url=url, headers={"Authorization": "Bearer secret-of-all-agents"}, timeout=20.0)

    def post(self, job_id: str, script: str) -> httpx.Response:
        """NO_ANSWER, if the agent is killed before it has one."""
        try:
            return self.http.post(f"/run/{job_id}", files={"file": ("job.sh", script.encode())})
        except httpx.TransportError:
            return NO_ANSWER


class DispatcherProcess(ChildProcess):
    """`tasuki dispatcher` before one node, with the registry of the environment and inputs of its own."""

    def __init__(self, folder: Path, node: str, environment: dict[str, str]) -> None:
        command = [*TASUKI, "dispatcher", "--listen", "127.0.0.1:0", "--agents", node, "--inputs", str(folder / "inputs")]
        command += ["--no-token"]
        super().__init__(command, folder / "dispatcher.log", environment)

    def wait_until_ready(self) -> str:
        output = self.wait_for_output("ready ")
        return next(line.split()[1] for line in output.splitlines() if line.startswith("listening "))


class Hesitant(BaseHTTPRequestHandler):
    """A node that is sent jobs and begins none."""

    protocol_version = "HTTP/1.1"
    asked = threading.Event()
    over = threading.Event()

    def do_GET(self) -> None:
        body = b'{"running": 0, "limit": 1}' if self.path == "/capacity" else b'"ok"'
        self.send_response(404 if self.path.startswith("/jobs/") else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.asked.set()
        self.over.wait(20.0)

    def log_message(self, format: str, *args: object) -> None:
        """Not into the output of the tests."""


@pytest.fixture
def hesitant_node() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hesitant) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        Hesitant.over.set()
        server.shutdown()


def run_until_gate(folder: Path) -> str:
    """A program that notes its attempt, and runs until there is a file `gate`."""
    return f'echo "$TASUKI_ATTEMPT" >> {folder}/runs; while [ ! -e {folder}/gate ]; do sleep 0.02; done'


def attempts(folder: Path) -> list[str]:
    return (folder / "runs").read_text().split() if (folder / "runs").exists() else []


@pytest.fixture(scope="module")
def agents(
    redis_service: RedisService, s3: S3Service, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[AgentProcess, AgentProcess]]:
    folder = tmp_path_factory.mktemp("agents")
    options = ("--lease-ttl", str(TTL_S), "--results", s3.url())
    environment = {"TASUKI_REGISTRY": redis_service.url(), **s3.environment}
    with (
        AgentProcess(folder, "n1", environment, *options) as one,
        AgentProcess(folder, "n2", environment, *options) as two,
    ):
        one.wait_until_ready()
        two.wait_until_ready()
        yield one, two


def test_one_id_sent_to_both_at_once_is_one_run(agents: tuple[AgentProcess, AgentProcess], tmp_path: Path) -> None:
    script = run_until_gate(tmp_path)
    both = [Started(lambda agent=agent: agent.post("both", script)) for agent in agents]  # type: ignore[misc]
    until(lambda: attempts(tmp_path))
    (tmp_path / "gate").touch()

    answers = [started.answer() for started in both]

    assert {answer.status_code for answer in answers} <= {200, 423}
    assert attempts(tmp_path) == ["1"]
    results = [agent.http.get("/result/both").content for agent in agents]
    assert next(answer.content for answer in answers if answer.status_code == 200) == results[0] == results[1]


def test_a_job_that_waited_at_a_dispatcher_that_was_killed_is_anybodys_at_once(
    agents: tuple[AgentProcess, AgentProcess], hesitant_node: str, tmp_path: Path
) -> None:
    one, two = agents
    form: dict[str, Any] = {"files": {"file": ("job.sh", b"echo once")}, "data": {"exec": "sh"}}
    with DispatcherProcess(tmp_path, hesitant_node, one.env) as dispatcher:
        url = dispatcher.wait_until_ready()
        cut_off = Started(lambda: _posted(f"{url}/run/waits", form))
        assert Hesitant.asked.wait(20.0)
        assert one.http.get("/jobs/waits").json()["state"] == "queued"

        dispatcher.kill()
        taken = two.http.post("/run/waits", **form)

    assert (taken.status_code, report(taken.content)["attempt"]) == (200, 1)
    assert one.http.get("/result/waits").content == taken.content
    assert cut_off.answer() is NO_ANSWER


def _posted(url: str, form: dict[str, Any]) -> httpx.Response:
    try:
        return httpx.post(url, timeout=20.0, **form)
    except httpx.TransportError:
        return NO_ANSWER


def test_another_node_takes_over_from_one_that_was_killed_and_has_its_results(
    agents: tuple[AgentProcess, AgentProcess], tmp_path: Path
) -> None:
    one, two = agents
    done = one.post("large", LARGE)
    assert done.status_code == 200
    script = run_until_gate(tmp_path)
    cut_off = Started(lambda: one.post("running", script))
    until(lambda: attempts(tmp_path) == ["1"])
    assert code_of(two.post("running", script)) == (423, "RUNNING")

    one.kill()
    killed_at = time.monotonic()
    (tmp_path / "gate").touch()
    answer = until(lambda: (found := two.post("running", script)).status_code == 200 and found, what="n2 takes over")

    assert report(answer.content)["attempt"] == 2
    assert attempts(tmp_path) == ["1", "2"]
    assert time.monotonic() - killed_at < TTL_S + MARGIN_S + SLACK_S
    assert two.http.get("/result/large").content == done.content
    assert two.http.get("/result/large", headers={"Range": "bytes=-10"}).content == done.content[-10:]
    assert two.post("large", LARGE).headers["Tasuki-Cache"] == "hit"
    assert cut_off.answer() is NO_ANSWER
