"""Every file in examples/ runs against a real server and does what it says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import Require
from tests.shape.source import ROOT
from tests.support.processes import ChildProcess, ServerProcess, start_server, start_worker

EXAMPLES = ROOT / "examples"
TESTED = {
    "README.md",
    "execs.sh",
    "execs.toml",
    "http_worker.py",
    "lines.sh",
    "node_client.mjs",
    "prices.py",
    "prices.sh",
    "primes_client.py",
    "primes_worker.py",
    "square_client.py",
    "square_worker.py",
}
TESTED_ELSEWHERE = {
    "csharp": "tests/agent/test_multipart.py::test_what_dotnet_sends_is_understood",
    "django_site": "tests/django/test_project.py::test_sigterm_lets_running_tasks_finish",
    "zpe": "tests/examples/test_zpe.py::test_the_zero_point_energy_of_h2",
}
TIMEOUT_S = 60
SLOW_SQUARES = """
import asyncio, sys
from tasuki import Worker

worker = Worker(sys.argv[1], concurrency=10)


@worker.handler("math.square")
async def square(job):
    await asyncio.sleep(0.005)
    squared = str(int(job.payload) ** 2).encode()
    return squared.rjust(300_000) if int(job.payload) % 100 == 0 else squared  # above 64 KiB a result is a blob


worker.run()
"""

pytestmark = pytest.mark.e2e


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with start_server(tmp_path) as server:
        yield server


def environment(tmp_path: Path, **extra: str) -> dict[str, str]:
    """The environment of a user's shell: `tasuki` on the PATH, and nothing that leads to another server."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    script = bin_folder / "tasuki"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m tasuki "$@"\n')
    script.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TASUKI_")}
    return {**kept, "PYTHONPATH": os.fspath(ROOT / "src"), "PATH": f"{bin_folder}:{os.environ['PATH']}", **extra}


def output_of(command: list[str | Path], env: dict[str, str], cwd: Path) -> str:
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_example_has_a_test() -> None:
    here = {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"}
    assert here == TESTED | set(TESTED_ELSEWHERE)
    for test in TESTED_ELSEWHERE.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test


def test_the_csharp_client_knows_what_node_agents_answer() -> None:
    """The client's form is checked with the bytes that .NET sends (tests/agent), and the fields that it reads in answers here."""
    code = (EXAMPLES / "csharp/RunJob.cs").read_text()
    contract = (ROOT / "docs/operate/agents.md").read_text()
    table = contract.partition("What `POST /run` answers:")[2].partition("\n\n**")[0]

    known = re.findall(r"\((\d{3}), (?:not )?(?:\"(\w+)\"|_)\)", code)
    assert len(known) == 6
    for status, word in known:
        if status != "429":  # of a proxy in front
            row = next(line for line in table.splitlines() if line.startswith(f"| {status} |"))
            assert word in row
    for header in re.findall(r"\"(Tasuki-[\w-]+)\"", code):
        assert f"`{header}: " in table
    assert '"file"' in code
    assert '"exec"' in code
    assert "/run/{" in code


def test_the_square_is_computed_once_and_another_body_is_refused(server: ServerProcess, tmp_path: Path) -> None:
    env = environment(tmp_path, TASUKI_TOKEN=server.create_token("client"))

    with start_worker(server, script=EXAMPLES / "square_worker.py", wait=False, fresh=True):
        told = output_of([sys.executable, EXAMPLES / "square_client.py", server.url], env, tmp_path)

    first, second, third = told.splitlines()
    assert first == "7 squared is 49"
    assert second == "once more: 49 (known before)"
    assert third.startswith("CONFLICT: ")
    assert "payload" in third


def test_a_client_in_another_language_gets_all_results_from_a_server_that_is_killed_meanwhile(
    server: ServerProcess, tmp_path: Path, require: Require
) -> None:
    require("node", shutil.which("node") is not None, "make system-deps, or apt-get install nodejs")
    slow = tmp_path / "slow_worker.py"
    slow.write_text(SLOW_SQUARES)
    client = ChildProcess(
        ["node", EXAMPLES / "node_client.mjs", server.url, "2000"],
        tmp_path / "client.log",
        {"TASUKI_TOKEN": server.create_token("client")},
    )

    with client, start_worker(server, script=slow, wait=False, fresh=True):
        client.wait_for_output("300 of 2000 jobs ended")
        server.kill()
        assert "2000 of 2000" not in client.output()
        server.restart()

        assert client.wait(TIMEOUT_S) == 0, client.output()
    assert client.output().splitlines()[-1] == f"the sum of 2000 squares is {sum(n * n for n in range(1, 2001))}"


def test_a_client_in_another_language_says_that_its_token_is_refused(
    server: ServerProcess, tmp_path: Path, require: Require
) -> None:
    require("node", shutil.which("node") is not None, "make system-deps, or apt-get install nodejs")
    command = ["node", EXAMPLES / "node_client.mjs", server.url, "1"]

    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("UNAUTHORIZED: ")


def test_plain_functions_count_primes(server: ServerProcess, tmp_path: Path) -> None:
    env = environment(tmp_path, TASUKI_TOKEN=server.create_token("client"))

    with start_worker(server, script=EXAMPLES / "primes_worker.py", wait=False, fresh=True):
        told = output_of([sys.executable, EXAMPLES / "primes_client.py", server.url], env, tmp_path)

    assert told.splitlines() == [
        "4 primes below 10",
        "168 primes below 1000",
        "9592 primes below 100000",
        "78498 primes below 1000000",
    ]


def test_one_job_per_line_with_an_embedded_server(tmp_path: Path) -> None:
    env = environment(tmp_path, TASUKI_DATA=os.fspath(tmp_path / "data"))

    told = output_of(["sh", EXAMPLES / "lines.sh"], env, tmp_path).splitlines()

    assert told[0] == told[-1] == "greetings  3 jobs, 3 SUCCEEDED"
    assert told[1] == "Hello, Carol Danvers"
    assert told[2] == "greetings  array of 3 jobs: 3 SUCCEEDED"
    # The data folder tells that no attempt was added by the second submit.
    shown = output_of(["tasuki", "status", "--json", "greetings.1", "greetings.2", "greetings.3"], env, tmp_path)
    assert shown.count('"attempt":1') == 3


def test_a_worker_runs_what_its_file_allows_and_nothing_else(tmp_path: Path) -> None:
    told = output_of(["sh", EXAMPLES / "execs.sh"], environment(tmp_path), tmp_path).splitlines()

    assert told[0].startswith("4 ")
    assert told[1:4] == ["apple", "fig", "pear"]
    assert told[4:7] == ["refused: exit 125", "another", "another  PENDING  (text.any)"]
    assert "do not offer the exec 'rm'" in told[7]
    assert told[-1] == "another  CANCELED"


def test_a_python_function_is_imported_once_and_called_for_each_job(tmp_path: Path) -> None:
    told = output_of(["sh", EXAMPLES / "prices.sh"], environment(tmp_path), tmp_path).splitlines()

    assert told == ["119.00", "11.89", "1375.00", "no rate for 'xx'", "exit 2"]


def test_a_worker_over_http_computes_the_zero_point_energy_of_h2(tmp_path: Path) -> None:
    with start_server(tmp_path, "--http", "127.0.0.1:0", "--app", "zpe") as server:
        url = next(line.split()[1] for line in server.output().splitlines() if line.startswith("listening http"))
        command = [sys.executable, EXAMPLES / "http_worker.py", url, "zpe"]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(server.tasuki("token", "enroll", "--app", "zpe").stdout)
            worker.stdin.flush()
            headers = {"Authorization": f"Bearer {server.token}"}
            with httpx.Client(base_url=f"{url}/calc/zpe", headers=headers, timeout=30.0) as client:
                good, bad = (client.post("/jobs", json=body).json()["job_id"] for body in ({"frequencies_cm1": [4401.2]}, {}))
                result = client.get(f"/jobs/{good}/result?wait=20").json()["result"]
            told = [worker.stdout.readline() for _ in range(3)]
        finally:
            worker.kill()
            worker.communicate()

    assert 0.26 < result["zpe_ev"] < 0.28
    assert told[0].startswith("registered as w-")
    assert set(told[1:]) == {f"{good} finished\n", f"{bad} queued\n"}
