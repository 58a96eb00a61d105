"""`tasuki agent` as a real process: what it says, how it drains, how it is stopped, what it refuses to start with; and TLS."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tasuki.agent.settings import choose_default, read_tokens
from tasuki.client.agents.client import AgentsClient
from tasuki.config import DataFolder, ensure_agent_token, own_agent_token
from tasuki.core.address import parse_agents
from tasuki.errors import ConfigError
from tests.agent.stage import DOTNET_KIND, DOTNET_NAMES, AgentStage, Started, code_of, dotnet_form, members
from tests.support.certificates import TestAuthority
from tests.support.processes import TASUKI, ChildProcess, alive
from tests.support.waiting import until

HOLD = 'while [ ! -e "{gate}" ]; do sleep 0.02; done; echo held'


class AgentProcess(ChildProcess):
    """`tasuki agent` with a token."""

    def __init__(self, folder: Path) -> None:
        (folder / "tokens").touch(mode=0o600)
        (folder / "tokens").write_text("# of the test\nsecret-one-0123456789\n\nsecret-two-0123456789\n")
        command = (
            *TASUKI,
            "agent",
            "--listen",
            "127.0.0.1:0",
            "--exec",
            "sh=/bin/sh {file}",
            "--slots",
            "2",
            "--node",
            "n1",
            "--data",
            folder / "data",
        )
        words = [*command, "--token-file", folder / "tokens", "--log-format", "json"]
        super().__init__(words, folder / "log", {}, fresh=True)
        output = self.wait_for_output("ready ")
        url = next(line.split()[1] for line in output.splitlines() if line.startswith("listening "))
        self.http = httpx.Client(base_url=url, headers={"Authorization": "Bearer secret-two-0123456789"}, timeout=20.0)

    def post(self, job_id: str, script: str) -> httpx.Response:
        return self.http.post(f"/run/{job_id}", files={"file": ("job.sh", script.encode())})

    def state(self, job_id: str) -> str | None:
        answer = self.http.get(f"/jobs/{job_id}")
        return answer.json()["state"] if answer.status_code == 200 else None


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path) as agent:
        yield agent
        agent.http.close()


def test_the_first_signal_drains(agent: AgentProcess, tmp_path: Path) -> None:
    running = Started(lambda: agent.post("one", HOLD.format(gate=tmp_path / "gate")))
    until(lambda: agent.state("one") == "running")

    agent.signal(signal.SIGTERM)

    agent.wait_for_output("stopping")
    assert code_of(agent.http.get("/health")) == (503, "DRAINING")
    assert code_of(agent.post("two", "true")) == (503, "DRAINING")
    assert agent.http.get("/capacity").json() == {"running": 1, "limit": 2}
    (tmp_path / "gate").touch()
    assert members(running.answer().content)["stdout.log"] == b"held\n"
    assert agent.wait() == 0
    lines = [json.loads(line) for line in agent.output().splitlines() if line.startswith("{")]
    assert next(line["message"] for line in lines if line.get("job_id") == "one") == "job one: starts sh, attempt 1"
    assert {line.get("node") for line in lines} == {"n1"}
    assert "secret" not in agent.output()


def test_the_second_signal_stops_what_runs(agent: AgentProcess, tmp_path: Path) -> None:
    running = Started(lambda: agent.post("one", f"echo $$ > {tmp_path}/pid; exec sleep 60"))
    pid = until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())

    agent.signal(signal.SIGTERM)
    agent.wait_for_output("stopping")
    agent.signal(signal.SIGTERM)

    assert code_of(running.answer()) == (503, "DRAINING")
    assert "job one was stopped, because this agent is going down" in agent.output()
    assert agent.wait() == 128 + signal.SIGTERM
    assert not alive(pid)
    assert (tmp_path / "data/jobs/one/.interrupted").exists()


def test_who_kills_an_agent_by_its_command_line_leaves_the_keeper_which_ends_its_programs(
    agent: AgentProcess, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(1) as pool:
        posted = pool.submit(agent.post, "one", f"echo $PPID $$ > {tmp_path}/pids; sleep 60")
        keeper, program = until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().split())

        pids = [str(agent.pid), keeper, program]
        matching = [pid for pid in pids if b"tasuki\0agent" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        for pid in matching:
            os.kill(int(pid), signal.SIGKILL)

        assert matching == [str(agent.pid)]
        until(lambda: not Path(f"/proc/{program}").exists(), what="the program is gone")
        assert isinstance(posted.exception(), httpx.HTTPError)
    agent.wait()


def test_without_its_keeper_an_idle_agent_ends_too_and_speaks_of_no_processes(agent: AgentProcess) -> None:
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    (keeper,) = (pid for pid in children if Path(f"/proc/{pid}/comm").read_text().startswith("tasuki-keeper"))

    os.kill(int(keeper), signal.SIGKILL)

    assert agent.wait() == 1
    assert "killed 0 processes" not in agent.output()


def test_without_its_keeper_an_agent_ends(agent: AgentProcess, tmp_path: Path) -> None:
    running = Started(lambda: agent.post("one", f"echo $PPID > {tmp_path}/keeper; exec sleep 60"))
    keeper = until(lambda: (tmp_path / "keeper").exists() and (tmp_path / "keeper").read_text().strip())

    os.kill(int(keeper), signal.SIGKILL)

    assert running.answer().status_code == 503
    assert agent.wait() == 1
    assert (tmp_path / "data/jobs/one/.interrupted").exists()


def test_without_a_token_file_an_agent_makes_a_token_which_the_same_users_clients_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    monkeypatch.setenv("TASUKI_DATA", str(data))
    monkeypatch.delenv("TASUKI_TOKEN", raising=False)
    options = ["--listen", "127.0.0.1:0", "--exec", "sh=/bin/sh {file}", "--data", data]
    with ChildProcess([*TASUKI, "agent", *options], tmp_path / "log", {"TASUKI_TOKEN": ""}) as agent:
        url = re.findall(r"listening (http://\S+)", agent.wait_for_output("ready "))[0]
        path = data / "agent-token"
        bearer = {"Authorization": f"Bearer {path.read_text().strip()}"}
        (tmp_path / "job.sh").write_text("echo found")

        refused = httpx.post(f"{url}/run/one", files={"file": ("job.sh", b"true")})
        admitted = httpx.get(f"{url}/capacity", headers=bearer)
        command = [*TASUKI, "run", "--to", f"agents:{url}", "--data", data, "--file", tmp_path / "job.sh", "sh"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
        with AgentsClient(url) as client:
            ended = client.run("sh", files=[tmp_path / "job.sh"], output=tmp_path / "result.zip")

        assert (refused.status_code, admitted.status_code) == (401, 200)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (ran.returncode, ran.stdout, ended.exit_code) == (0, "found\n", 0), ran.stderr
        assert path.read_text().strip() not in agent.output()


def test_the_token_of_a_folder_is_made_once_by_whoever_is_first(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "data")

    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(lambda _: ensure_agent_token(folder), range(8)))

    assert len(made) == 1
    assert [left.name for left in folder.root.iterdir()] == ["agent-token"]


def test_the_token_of_a_folder_is_not_sent_to_a_listener_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = ensure_agent_token(DataFolder(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert own_agent_token(parse_agents(f"{url}"), tmp_path) == token
        assert own_agent_token(parse_agents(f"{url},http://n2:7090"), tmp_path) == ""
        assert own_agent_token(parse_agents(f"{url}/prefix"), tmp_path) == ""

        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert own_agent_token(parse_agents(f"{url}"), tmp_path) == ""


def test_without_any_token_an_agent_says_so_at_its_start_and_serves_clients_that_send_none(tmp_path: Path) -> None:
    options = ["--listen", "127.0.0.1:0", "--exec", "sh=/bin/sh {file}", "--data", tmp_path / "data", "--no-token"]
    options += ["--host-name", "Jobs.Example"]
    form = dotnet_form(b"echo served", DOTNET_NAMES["book.csv"])
    with ChildProcess([*TASUKI, "agent", *options], tmp_path / "log", {"TASUKI_TOKEN": "unused"}) as agent:
        output = agent.wait_for_output("ready ")
        url = re.findall(r"listening (http://\S+)", output)[0]

        assert httpx.get(f"{url}/capacity").status_code == 200
        assert httpx.get(f"{url}/capacity", headers={"Host": "jobs.example"}).status_code == 200
        assert httpx.get(f"{url}/capacity", headers={"Host": "other.example"}).status_code == 403
        answer = httpx.post(f"{url}/run/7f3c", content=form, headers={"Content-Type": DOTNET_KIND})
        assert members(answer.content)["stdout.log"] == b"served\n"
        assert "there is no token (--no-token): every user" in output
        assert not (tmp_path / "data" / "agent-token").exists()


def test_programs_hear_which_execs_there_are(tmp_path: Path) -> None:
    options = ["--listen", "127.0.0.1:0", "--exec", "b=/bin/true", "--exec", "a=/bin/true", "--slots", "2", "--json"]
    with ChildProcess([*TASUKI, "agent", *options, "--data", tmp_path / "data"], tmp_path / "log", {}) as agent:
        output = agent.wait_for_output('"event":"ready"')

    (ready,) = (event for event in map(json.loads, output.splitlines()) if event.get("event") == "ready")
    assert ready == {"event": "ready", "slots": 2, "execs": ["a", "b"], "data": str(tmp_path / "data")}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--listen", "0.0.0.0:0", "--exec", "x=/bin/true"], "--token-file"),
        (["--listen", "0.0.0.0:0", "--exec", "x=/bin/true", "--no-token"], "--token-file"),
        (["--exec", "x=/bin/true", "--slots", "0"], "--slots must be 1 or more"),
        (["--exec", "x=/bin/true", "--timeout", "0"], "--timeout"),
        (["--exec", "x=/bin/true", "--default-exec", "y"], "must be one of the execs"),
        (["--exec", "x=/bin/true", "--tls-cert", "c"], "belong together"),
        (["--exec", "x=/bin/true", "--node", "n1\nready"], "without control characters"),
        (["--exec", "x=/bin/true", "--advertise", "http://n1:7090"], "--advertise is for those that share a registry"),
        (["--exec", "x=/bin/true", "--listen", "unix:///run/x"], "address 'unix:///run/x' is not one for HTTP"),
        ([], "needs a program"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(options: list[str], words: str, tmp_path: Path, capsys, monkeypatch) -> None:
    from tasuki.cli.main import root

    monkeypatch.delenv("TASUKI_TOKEN", raising=False)
    with pytest.raises(SystemExit) as ended:
        root(args=["agent", "--data", str(tmp_path / "data"), *options], prog_name="tasuki")

    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_beyond_this_machine_a_token_is_not_enough_without_tls(tmp_path: Path, capsys, monkeypatch) -> None:
    from tasuki.cli.main import root

    monkeypatch.setenv("TASUKI_TOKEN", "0123456789abcdef")
    words = ["agent", "--listen", "0.0.0.0:0", "--exec", "x=/bin/true", "--data", str(tmp_path / "data")]
    with pytest.raises(SystemExit):
        root(args=words, prog_name="tasuki")

    assert "--tls-cert" in capsys.readouterr().err


def test_token_files_have_a_token_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.touch(mode=0o600)
    one, two = "one" * 6, "x" * 16
    path.write_text(f"\n# comment\n {one} \n{two}\n")
    assert read_tokens(str(path)) == (one, two)
    for wrong in ("", "# only\n", "two words of a token\n", "\x01" * 16, "é" * 16, "x" * 513, "x" * 15):
        path.write_text(wrong)
        with pytest.raises(ConfigError):
            read_tokens(str(path))
    with pytest.raises(ConfigError, match="without spaces, of 16 to 512 characters; it has 15"):  # the last of them
        read_tokens(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tokens(str(tmp_path / "missing"))


def test_the_default_exec_is_the_only_one_or_the_one_that_was_named() -> None:
    from tasuki.worker.execs import parse_exec_flag

    one, two = parse_exec_flag("one=/bin/true"), parse_exec_flag("two=/bin/true")

    assert choose_default({"one": one}, None) == "one"
    assert choose_default({"one": one, "two": two}, None) is None
    assert choose_default({"one": one, "two": two}, "two") == "two"


def test_over_tls(make_stage: Callable[..., AgentStage], tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)

    with make_stage(tls=authority.serving(), verify=authority.trusted()) as stage:
        assert stage.url.startswith("https://")
        assert stage.run("job", "echo over TLS").status_code == 200
