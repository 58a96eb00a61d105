"""Jobs on real node agents: processes that are killed, frozen, and asked twice. Linux, as agents are."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasuki.cli.output import ExitCode
from tasuki.client.agents.client import AgentResult, AgentsClient, AsyncAgentsClient
from tasuki.clocks import now
from tasuki.core.failover.nodes import BreakerRules, BreakerState
from tests.client.agent_processes import Agents, start_agents
from tests.support.processes import TASUKI
from tests.support.waiting import until, until_async

DEADLINE_S = 30.0
FAILOVER_S = 0.3
QUICK = BreakerRules(left_out_s=0.5)


@pytest.fixture(scope="module")
def two_agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    with start_agents(tmp_path_factory.mktemp("agents"), 2) as agents:
        yield agents


@pytest.fixture
def agents(two_agents: Agents) -> Iterator[Agents]:
    """Both run; jobs that hold are held."""
    two_agents.hold()
    yield two_agents
    two_agents.let_go()
    for node in two_agents.nodes:
        if not node.running:
            node.start_again()


def tell(story: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await story

    asyncio.run(main())


def stdout_of(ended: AgentResult) -> str:
    assert ended.path is not None
    with zipfile.ZipFile(ended.path) as archive:
        return archive.read("stdout.log").decode()


def test_a_killed_agents_job_runs_at_the_other_within_300_ms(agents: Agents, tmp_path: Path) -> None:
    async def story() -> None:
        async with AsyncAgentsClient(agents.urls, token="") as client:
            running = asyncio.create_task(
                client.run("pricer", ["hold"], files=[agents.book], output=tmp_path / "r.zip", job_id="killed")
            )
            await until_async(lambda: agents.started("killed"), DEADLINE_S, "the program has started")
            (victim,) = agents.started("killed")
            died_at = time.monotonic()
            agents.node(victim).process.kill()
            await until_async(lambda: len(agents.started("killed")) == 2, DEADLINE_S, "the program has started again")
            took_s = time.monotonic() - died_at
            agents.let_go()
            ended = await running

        assert stdout_of(ended) == "priced 100,95\n"
        assert ended.node != agents.node(victim).url
        assert took_s < FAILOVER_S + 1.0  # with the start of a Python program at a busy machine

    tell(story())


def test_a_frozen_agent_is_left_and_comes_back_after_steady_health(agents: Agents, tmp_path: Path) -> None:
    async def story() -> None:
        async with AsyncAgentsClient(agents.urls, token="", rules=QUICK) as client:
            running = asyncio.create_task(
                client.run("pricer", ["hold"], files=[agents.book], output=tmp_path / "r.zip", job_id="frozen", silent_s=2.0)
            )
            await until_async(lambda: agents.started("frozen"), DEADLINE_S, "the program has started")
            frozen = agents.node(agents.started("frozen")[0])
            frozen.signal(signal.SIGSTOP)
            try:
                await until_async(lambda: len(agents.started("frozen")) == 2, DEADLINE_S, "the program starts at the other one")
                breaker = {line.node: line.breaker for line in client.nodes.ranking(now().monotonic)}[frozen.url]
            finally:
                frozen.signal(signal.SIGCONT)
            agents.let_go()
            ended = await running

            # Each look is a health check; they count if they are 0.2 s apart.
            while {line.node: line.breaker for line in await client.ranking()}[frozen.url] is not BreakerState.CLOSED:
                assert frozen.running

        assert (ended.node != frozen.url, breaker) == (True, BreakerState.OPEN)

    tell(story())


def test_two_clients_with_one_id_get_the_same_bytes_of_one_run(agents: Agents, tmp_path: Path) -> None:
    async def one(client: AsyncAgentsClient, name: str) -> AgentResult:
        return await client.run("pricer", ["hold"], files=[agents.book], output=tmp_path / name, job_id="shared")

    async def story() -> None:
        async with AsyncAgentsClient(agents.urls, token="") as first, AsyncAgentsClient(agents.urls, token="") as second:
            earlier = asyncio.create_task(one(first, "a.zip"))
            await until_async(lambda: agents.started("shared"), DEADLINE_S, "the program has started")
            later = asyncio.create_task(one(second, "b.zip"))
            agents.let_go()
            await asyncio.gather(earlier, later)
            again = await one(second, "c.zip")

        assert again.cached
        assert len({(tmp_path / name).read_bytes() for name in ("a.zip", "b.zip", "c.zip")}) == 1
        assert len(agents.started("shared")) == 1

    tell(story())


def run_tasuki(agents: Agents, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TASUKI, *words],
        cwd=agents.folder,
        env={"HOME": str(agents.folder), "TASUKI_URL": f"agents:{','.join(agents.urls)}", "PATH": "/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_the_command_prints_the_jobs_output_and_exits_with_its_code(agents: Agents) -> None:
    told = run_tasuki(agents, "run", "--job-id", "failing", "--file", "book.csv", "-o", "result.zip", "pricer", "7")

    assert (told.stdout, told.returncode) == ("priced 100,95\n", 7)
    assert "result.json" in zipfile.ZipFile(agents.folder / "result.zip").namelist()
    assert len(agents.started("failing")) == 1  # a program's failure is not tried elsewhere


def test_the_command_refuses_what_needs_a_server(agents: Agents) -> None:
    told = run_tasuki(agents, "run", "--env", "A=1", "--file", "book.csv", "pricer", "0")

    assert (told.returncode, told.stderr.startswith("tasuki: INVALID: --env needs a server")) == (ExitCode.COULD_NOT_RUN, True)


def test_the_ranking_is_shown_with_breakers(agents: Agents) -> None:
    told = run_tasuki(agents, "nodes", "--json")

    lines = json.loads(told.stdout)
    assert {line["node"] for line in lines} == set(agents.urls)
    assert all((line["standing"], line["breaker"], line["limit"]) == ("free", "closed", 4) for line in lines)
    assert told.returncode == ExitCode.OK


def test_the_ranking_is_watched_until_somebody_has_seen_enough(agents: Agents) -> None:
    command = [*TASUKI, "nodes", "--to", f"agents:{agents.urls[0]}", "--watch", "--interval", "0.1", "--json"]
    env = {"HOME": str(agents.folder), "PATH": "/usr/bin:/bin"}
    with subprocess.Popen(command, cwd=agents.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        looks = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        code = process.wait(DEADLINE_S)

    assert [line["node"] for look in looks for line in look] == [agents.urls[0]] * 2
    assert code == ExitCode.INTERRUPTED


def test_ctrl_c_cancels_the_job_at_its_node(agents: Agents) -> None:
    command = [*TASUKI, "run", "--json", "--job-id", "stopped", "--file", "book.csv", "pricer", "hold"]
    env = {"HOME": str(agents.folder), "TASUKI_URL": f"agents:{','.join(agents.urls)}", "PATH": "/usr/bin:/bin"}
    with subprocess.Popen(command, cwd=agents.folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        until(lambda: agents.started("stopped"), DEADLINE_S, "the program has started")
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=DEADLINE_S)

    (name,) = agents.started("stopped")
    said = json.loads(told)
    assert process.returncode == ExitCode.INTERRUPTED
    assert (said["job_id"], set(said["canceled"])) == ("stopped", set(agents.urls))
    assert sorted(said["canceled"].values()) == ["not known", "removed"]
    assert not (agents.folder / name / "jobs" / "stopped").exists()


def test_a_killed_client_that_is_started_again_takes_up_its_run_and_then_its_result(agents: Agents, tmp_path: Path) -> None:
    words = ["run", "--job-id", "again", "--file", "book.csv", "pricer", "hold"]
    env = {"HOME": str(agents.folder), "TASUKI_URL": f"agents:{','.join(agents.urls)}", "PATH": "/usr/bin:/bin"}
    options = {"cwd": agents.folder, "env": env, "stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen([*TASUKI, *words], **options) as first:
        until(lambda: agents.started("again"), DEADLINE_S, "the program has started")
        first.kill()

    with subprocess.Popen([*TASUKI, *words], stdout=subprocess.PIPE, **options) as second:
        assert second.stderr is not None
        assert any(b"runs it already" in line for line in second.stderr)
        agents.let_go()
        followed, _ = second.communicate(timeout=DEADLINE_S)
    with AgentsClient(agents.urls, token="") as client:
        stored = client.run("pricer", ["hold"], files=[agents.book], output=tmp_path / "r.zip", job_id="again")

    assert (followed, second.returncode) == (b"priced 100,95\n", 0)
    assert (stdout_of(stored), stored.cached) == ("priced 100,95\n", True)
    assert len(agents.started("again")) == 1


def test_an_agent_stops_what_runs_and_leaves_what_has_ended_if_it_is_asked_to(agents: Agents, tmp_path: Path) -> None:
    with AgentsClient(agents.urls[0], token="") as client:
        client.run("pricer", ["0"], files=[agents.book], output=tmp_path / "r.zip", job_id="ended")
    with httpx.Client(base_url=agents.urls[0]) as http:
        answers = [http.delete("/jobs/ended", params={"state": state}).status_code for state in ("running", "done")]

        assert (answers, http.get("/result/ended").status_code) == ([404, 400], 200)


# What only Unix has is taken away before anything of ours is imported, as far as Python itself can live without it.
ELSEWHERE = """
import asyncio, os, random, signal, subprocess, sys, tempfile, threading, zipfile

for name in ("fcntl", "pwd", "grp", "resource", "termios", "tty", "pty", "syslog", "uvloop", "tasuki.worker", "tasuki.server"):
    sys.modules[name] = None
for name in ("fork", "register_at_fork", "getuid", "geteuid", "getpgid", "killpg", "setsid", "O_NOFOLLOW", "O_DIRECTORY"):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGCHLD", "SIGPIPE", "pthread_sigmask"):
    delattr(signal, name)

def unsupported(*arguments):
    raise NotImplementedError

asyncio.SelectorEventLoop.add_signal_handler = asyncio.SelectorEventLoop.remove_signal_handler = unsupported
import tasuki.cli.agents
from tasuki.cli.main import main
main()
"""


def run_elsewhere(agents: Agents, *words: str, script: str = ELSEWHERE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=agents.folder,
        env={"HOME": str(agents.folder), "PATH": "/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_the_command_runs_without_anything_that_only_unix_has(agents: Agents) -> None:
    told = run_elsewhere(agents, "run", "--to", f"agents:{agents.urls[0]}", "--file", "book.csv", "pricer", "3")

    assert (told.returncode, told.stdout) == (3, "priced 100,95\n"), told.stderr


@pytest.mark.parametrize("word", ["list", "nodes", "status", "result", "logs", "cancel"])
def test_so_do_the_commands_that_look_after_jobs_of_agents(agents: Agents, word: str, tmp_path: Path) -> None:
    with AgentsClient(agents.urls[0], token="") as client:
        client.run("pricer", ["0"], files=[agents.book], output=tmp_path / "r.zip", job_id="ended")

    told = run_elsewhere(agents, word, "--to", f"agents:{agents.urls[0]}", *(["ended"] if word not in ("list", "nodes") else []))

    assert told.returncode == ExitCode.OK, told.stderr
    assert agents.urls[0] in told.stdout if word == "nodes" else "ended" in told.stdout or "priced" in told.stdout


@pytest.mark.parametrize("words", [("agent", "--exec", "x=/bin/true"), ("doctor",)], ids=["at its import", "while it runs"])
def test_a_command_says_that_it_needs_linux(agents: Agents, words: tuple[str, ...]) -> None:
    all_of_ours = ELSEWHERE.replace('"tasuki.worker", "tasuki.server"', "")
    told = run_elsewhere(agents, *words, script=all_of_ours)

    assert told.returncode == ExitCode.USAGE
    assert "this needs Linux; what runs here too: tasuki run, status, list" in told.stderr
    assert "Traceback" not in told.stderr
