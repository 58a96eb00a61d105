"""`tasuki dispatcher`: what it refuses to start with. How it runs and ends is in tests/e2e/test_dispatcher.py."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tasuki.cli.agent import dispatcher_config
from tasuki.cli.main import root
from tasuki.dispatcher.settings import UPLOAD_MAX_BYTES
from tests.support.processes import TASUKI, ChildProcess

AGENTS = ["--agents", "http://n1:7090,n2"]


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command says where logs go; the tests after these have their own places."""
    handlers = logging.root.handlers[:]
    yield
    logging.root.handlers[:] = handlers


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--agents"),
        (["--agents", "ftp://n1"], "agents:http://n1:7090"),
        ([*AGENTS, "--mode", "302"], "--mode must be proxy or redirect"),
        ([*AGENTS, "--timeout", "0"], "must be more than 0s"),
        ([*AGENTS, "--log-format", "xml"], "--log-format must be pretty or json"),
        ([*AGENTS, "--listen", "0.0.0.0:0"], "give --token-file"),
        ([*AGENTS, "--listen", "0.0.0.0:0", "--no-token"], "give --token-file"),
        ([*AGENTS, "--host-name", "https://x"], "--host-name 'https://x' must be a name without scheme and port"),
        ([*AGENTS, "--tls-cert", "cert.pem"], "belong together"),
        ([*AGENTS, "--max-upload", "much"], "much"),
        ([*AGENTS, "--keep-inputs", "-1"], "is not a duration"),
        ([*AGENTS, "--inputs", "ftp://u:secret@x"], "--inputs 'ftp://x' is not understood; use s3://bucket/prefix, a folder, or"),
        ([*AGENTS, "--results", "s3://b/p"], "--results is for those that share a registry; give --registry URL too"),
        ([*AGENTS, "--listen", "nowhere:xx"], "address 'nowhere:…' is not host:port with a port"),
        ([*AGENTS, "--token-file", "/no/such/file"], "/no/such/file"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TASUKI_TOKEN", raising=False)
    monkeypatch.setenv("TASUKI_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        root(args=["dispatcher", *options], prog_name="tasuki")

    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("given", "means"), [(None, UPLOAD_MAX_BYTES), ("64GB", UPLOAD_MAX_BYTES), ("1GiB", 2**30)])
def test_the_largest_upload_is_64_gb_unless_it_is_said(given: str | None, means: int) -> None:
    config = dispatcher_config("127.0.0.1", "http://n1:7090", "proxy", None, None, True, None, None, given, 7.0, 60.0, None)

    assert config.max_upload_bytes == means


def test_programs_hear_where_inputs_are_kept(tmp_path: Path) -> None:
    inputs = str(tmp_path / "inputs")
    options = ["--agents", "http://127.0.0.1:1", "--listen", "127.0.0.1:0", "--inputs", inputs, "--json", "--data", str(tmp_path)]
    with ChildProcess([*TASUKI, "dispatcher", *options], tmp_path / "log", {}) as dispatcher:
        output = dispatcher.wait_for_output('"event":"ready"')

    (ready,) = (event for event in map(json.loads, output.splitlines()) if event.get("event") == "ready")
    assert ready == {"event": "ready", "mode": "proxy", "agents": ["http://127.0.0.1:1"], "inputs": inputs}


def test_an_agent_and_a_dispatcher_of_one_folder_share_the_token_that_they_made(tmp_path: Path) -> None:
    common = ["--listen", "127.0.0.1:0", "--data", tmp_path / "data"]
    unset = {"TASUKI_TOKEN": ""}
    with ChildProcess([*TASUKI, "agent", "--exec", "x=/bin/true", *common], tmp_path / "agent.log", unset) as agent:
        node = listening_at(agent)
        command = [*TASUKI, "dispatcher", "--agents", node, *common]
        with ChildProcess(command, tmp_path / "dispatcher.log", unset) as dispatcher:
            url = listening_at(dispatcher)
            bearer = {"Authorization": f"Bearer {(tmp_path / 'data' / 'agent-token').read_text().strip()}"}

            assert httpx.get(f"{url}/nodes").status_code == 401
            assert httpx.get(f"{url}/capacity", headers=bearer).json()["limit"] > 0


def listening_at(process: ChildProcess) -> str:
    found: list[str] = re.findall(r"listening (http://\S+)", process.wait_for_output("ready "))
    return found[0]
