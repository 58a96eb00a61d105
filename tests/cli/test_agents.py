"""Commands for node agents: `tasuki … --to agents:…`."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from tasuki.cli import agents
from tasuki.cli.output import ExitCode, Output
from tests.agent.stage import AgentStage
from tests.cli.commands import DEADLINE_S, TASUKI, Done, User, environment
from tests.support.waiting import until


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentStage]:
    with AgentStage(tmp_path_factory.mktemp("agent")) as stage:
        yield stage


def tasuki(agent: AgentStage, user: User, command: str, *words: str) -> Done:
    return user.run(command, "--to", f"agents:{agent.url}", *words)


def run(agent: AgentStage, user: User, script: str, *words: str) -> Done:
    (user.home / "job.sh").write_text(script)
    return tasuki(agent, user, "run", "--file", "job.sh", *words, "sh")


# ---------------------------------------------------------------------------------------------------- outputs that are not there


def test_a_run_without_all_its_outputs_says_so_and_does_not_exit_with_0(agent: AgentStage, user: User) -> None:
    done = run(agent, user, "echo made; echo x > out/x; ln -s x out/one; ln -s x out/two")

    assert (done.stdout, done.returncode) == ("made\n", ExitCode.COULD_NOT_RUN)
    assert "2 outputs are not in the result" in done.stderr


def test_programs_hear_how_many_outputs_were_left_out(agent: AgentStage, user: User) -> None:
    done = run(agent, user, "ln -s x out/link", "--json")

    facts = json.loads(done.stdout)
    assert (facts["state"], facts["left_out"], facts["exit"]) == ("SUCCEEDED", 1, ExitCode.COULD_NOT_RUN)


def test_a_failed_programs_own_exit_code_stays(agent: AgentStage, user: User) -> None:
    done = run(agent, user, "ln -s x out/link; exit 7")

    assert done.returncode == 7
    assert "1 output is not in the result" in done.stderr


# ---------------------------------------------------------------------------------------------------- jobs that there are


def test_jobs_of_agents_are_shown_and_listed(agent: AgentStage, user: User) -> None:
    agent.run("seen-done", "echo done")
    agent.run("seen-failed", "exit 3")

    status = json.loads(tasuki(agent, user, "status", "--json", "seen-done", "seen-failed").stdout)
    listed = json.loads(tasuki(agent, user, "list", "--json", "--state", "FAILED").stdout)["jobs"]

    assert [(view["job_id"], view["state"], view["node"]) for view in status] == [
        ("seen-done", "SUCCEEDED", "n1"), ("seen-failed", "FAILED", "n1"),
    ]  # fmt: skip
    assert "seen-failed" in [job["job_id"] for job in listed]
    assert {job["state"] for job in listed} == {"FAILED"}
    assert "seen-failed  FAILED\n  sh\n" in tasuki(agent, user, "status", "seen-failed").stdout
    assert "seen-done" in tasuki(agent, user, "list").stdout
    assert tasuki(agent, user, "status", "nobody-knows").returncode == ExitCode.NOT_FOUND
    assert "need a server" in tasuki(agent, user, "list", "--subject", "x").stderr


def test_a_result_of_an_agent_is_waited_for_and_saved_and_what_it_lacks_is_told(agent: AgentStage, user: User) -> None:
    running = agent.begin("kept", f"while [ ! -e {user.home}/go ]; do sleep 0.02; done; echo kept > out/kept; ln -s x out/link")
    until(lambda: agent.state("kept") == "running")
    (user.home / "go").touch()

    done = tasuki(agent, user, "result", "kept", "--extract", str(user.home / "unpacked"))

    assert (done.returncode, (user.home / "unpacked" / "out" / "kept").read_text()) == (125, "kept\n")
    assert "job kept: 1 output is not in the result" in done.stderr
    assert running.answer().status_code == 200


def test_the_output_of_an_agents_job_is_followed_while_it_runs(agent: AgentStage, user: User) -> None:
    running = agent.begin("told", f"echo first; while [ ! -e {user.home}/go ]; do sleep 0.02; done; echo second; echo end >&2")
    until(lambda: agent.state("told") == "running")

    so_far = until(lambda: tasuki(agent, user, "logs", "told").stdout, what="the first line")
    with ThreadPoolExecutor(1) as pool:
        all_of_it = pool.submit(tasuki, agent, user, "logs", "-f", "told")
        until(lambda: agent.agent.jobs._log_reads, what="the log is followed")
        (user.home / "go").touch()

        assert (so_far, all_of_it.result().stdout) == ("first\n", "first\nsecond\n")
    assert all_of_it.result().stderr == "end\n"
    assert running.answer().status_code == 200
    assert tasuki(agent, user, "logs", "--stream", "stdout", "told").stdout == "first\nsecond\n"


def test_a_job_that_runs_is_canceled_and_one_that_has_ended_stays(agent: AgentStage, user: User) -> None:
    agent.run("ended", "true")
    running = agent.begin("stopped", "sleep 60")
    until(lambda: agent.state("stopped") == "running")

    done = json.loads(tasuki(agent, user, "cancel", "--json", "stopped", "ended").stdout)

    assert {job_id: what["state"] for job_id, what in done.items()} == {"stopped": "CANCELED", "ended": "SUCCEEDED"}
    assert (running.answer().status_code, agent.state("stopped"), agent.state("ended")) == (409, None, "done")


def test_an_interrupted_job_has_a_state_and_no_result(tmp_path: Path, user: User) -> None:
    with AgentStage(tmp_path) as before:
        running = before.begin("cut", "echo lost; sleep 60")
        until(lambda: before.http.get("/jobs/cut/logs/stdout").text == "lost\n", what="it has written")
        before.call(before.agent.jobs.stop_all)
        assert running.answer().status_code == 503

    with AgentStage(tmp_path) as agent:
        status, result = tasuki(agent, user, "status", "cut"), tasuki(agent, user, "result", "cut")
        logs, canceled = tasuki(agent, user, "logs", "-f", "cut"), tasuki(agent, user, "cancel", "cut")

    assert ("cut  INTERRUPTED\n" in status.stdout, "send it again" in status.stdout) == (True, True)
    assert (result.returncode, "it left no result" in result.stdout) == (ExitCode.FAILED, True)
    assert (logs.returncode, logs.stdout) == (0, "")
    assert "INTERRUPTED" in canceled.stdout


def test_what_needs_a_server_says_so(agent: AgentStage, user: User) -> None:
    assert "agents" in tasuki(agent, user, "retry", "x").stderr


def test_the_doctor_looks_at_node_agents(agent: AgentStage, user: User) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"

    done = user.run("doctor", "--json", "--to", f"agents:{agent.url},{nobody}")

    found = {check["check"]: check for check in json.loads(done.stdout)}
    assert (found[agent.url]["state"], found[agent.url]["message"]) == ("ok", "0 of 4 running")
    assert (found[nobody]["state"], found["server"]["state"]) == ("fail", "ok")
    assert "Connection refused" in found[nobody]["message"]
    assert done.returncode == ExitCode.FAILED


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(("options", "file"), [((), "agent-token"), (("--no-token",), "agent.lock")])
def test_an_agent_on_a_full_disk_names_in_a_line_what_it_could_not_write(
    tmp_path: Path, options: tuple[str, ...], file: str
) -> None:
    data = tmp_path / "data"
    words = (*TASUKI, "agent", "--listen", "127.0.0.1:0", "--exec", "x=/bin/true", "--data", str(data), *options)

    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 0 && exec "$@"', "sh", *words],
        env=environment(tmp_path), capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip

    assert done.returncode == ExitCode.UNAVAILABLE
    assert done.stderr.splitlines()[-1].startswith(f"tasuki: DISK_FULL: cannot write '{data / file}': ")
    assert [path.name for path in data.iterdir() if path.name != "agent.lock"] == []


def test_a_canceled_run_may_go_on_only_at_nodes_that_may_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    client = AsyncMock()
    client.cancel.return_value = dict.fromkeys(("http://n1:7090", "http://n2:7090"), "no connection")

    asyncio.run(agents._cancel(client, "7f3c", {"http://n1:7090"}, Output()))

    assert "the job may still run at http://n1:7090: no connection\n" in capsys.readouterr().err
