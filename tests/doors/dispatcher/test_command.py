"""`tasuki dispatcher`: what it refuses to start with. How it runs and ends is in tests/e2e/test_dispatcher.py."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.cli.main import make

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
        ([*AGENTS, "--timeout", "0"], "--timeout must be above 0"),
        ([*AGENTS, "--log-format", "xml"], "--log-format must be pretty or json"),
        ([*AGENTS, "--listen", "0.0.0.0:0"], "give --token-file"),
        ([*AGENTS, "--tls-cert", "cert.pem"], "belong together"),
        ([*AGENTS, "--max-upload", "much"], "much"),
        ([*AGENTS, "--keep-inputs", "-1"], "--keep-inputs must be 0 (for ever) or more days"),
        ([*AGENTS, "--inputs", "ftp://somewhere"], "s3://bucket/prefix"),
        ([*AGENTS, "--token-file", "/no/such/file"], "/no/such/file"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TASUKI_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        make(["dispatcher"])(args=["dispatcher", *options], prog_name="tasuki")

    assert ended.value.code == 2
    assert words in capsys.readouterr().err
