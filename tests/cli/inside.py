"""The `tasuki` command inside the test's own process, for tests in which a process of its own is not the point."""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import pytest

from tasuki.cli.main import main


class Done(NamedTuple):
    """The end of a command."""

    stdout: str
    stderr: str
    returncode: int

    @property
    def json(self) -> Any:
        assert self.returncode == 0, self.stderr
        return json.loads(self.stdout)


class Inside:
    """Somebody at a terminal; nothing of the developer's own settings is seen."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch
        # Commands set up the log of their process, which is the tests'.
        monkeypatch.setattr("tasuki.cli.process.configure_log", lambda level, *, json: None)
        for name in ("URL", "DATA", "STORE", "APP", "BLOBS", "COORDINATION", "TOKEN"):
            monkeypatch.delenv(f"TASUKI_{name}", raising=False)

    def __call__(self, *arguments: str) -> Done:
        self._monkeypatch.setattr(sys, "argv", ["tasuki", *arguments])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        told = self._capsys.readouterr()
        return Done(told.out, told.err, int(ended.value.code or 0))


@pytest.fixture
def inside(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Inside:
    return Inside(capsys, monkeypatch)
