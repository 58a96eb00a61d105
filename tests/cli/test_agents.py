"""Commands for node agents: `tasuki … --to agents:…`."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from tasuki.cli import agents
from tasuki.cli.output import ExitCode, Output
from tests.agent.stage import AgentStage
from tests.cli.commands import Done, User
from tests.cli.inside import Inside, inside

__all__ = ["inside"]


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


# ---------------------------------------------------------------------------------------------------- errors


def test_an_agent_on_a_full_disk_says_so_in_a_line(inside: Inside, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tasuki.config._make_key", full)

    done = inside("agent", "--exec", "x=/bin/true", "--data", str(tmp_path / "data"))

    assert (done.returncode, done.stderr.startswith("tasuki: DISK_FULL: ")) == (ExitCode.UNAVAILABLE, True)


def test_a_canceled_run_may_go_on_only_at_nodes_that_may_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    client = AsyncMock()
    client.cancel.return_value = dict.fromkeys(("http://n1:7090", "http://n2:7090"), "no connection")

    asyncio.run(agents._cancel(client, "7f3c", {"http://n1:7090"}, Output()))

    assert "the job may go on at http://n1:7090: no connection\n" in capsys.readouterr().err
