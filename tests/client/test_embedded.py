"""The server that is started because there is none: who owns its folder, what it leaves behind, and when it leaves too soon."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasuki import Client
from tasuki.client import aio, embedded
from tasuki.config import DataFolder, data_folder
from tasuki.server.assembly import own_folder
from tests.support.waiting import until


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataFolder:
    monkeypatch.setenv("TASUKI_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("TASUKI_URL", raising=False)
    folder = data_folder(tmp_path / "data")
    folder.root.mkdir()
    return folder


def owner_file(folder: DataFolder) -> Path:
    return folder.database.with_name(folder.database.name + ".owner")


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_server_whose_store_is_elsewhere_owns_its_folder_as_well(folder: DataFolder) -> None:
    own_folder(folder)

    owner = embedded.read_owner(folder)

    assert owner is not None
    assert owner.pid == os.getpid()


def test_folder_is_owned_while_the_process_in_the_owner_file_lives(folder: DataFolder) -> None:
    assert embedded.read_owner(folder) is None
    owner_file(folder).write_text("")
    assert embedded.read_owner(folder) is None
    owner_file(folder).write_text("not a pid\n")
    assert embedded.read_owner(folder) is None
    owner_file(folder).write_text(f"pid {dead_pid()} since 1\n")
    assert embedded.read_owner(folder) is None
    owner_file(folder).write_text(f"pid {os.getpid()} since 1\n")
    assert embedded.read_owner(folder) is not None


def test_asking_who_owns_the_folder_never_takes_its_lock(folder: DataFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*arguments: object) -> None:
        raise AssertionError("a server that starts at this moment would be refused")

    owner_file(folder).write_text(f"pid {dead_pid()} since 1\n")
    monkeypatch.setattr(fcntl, "flock", locked)
    assert embedded.read_owner(folder) is None


@pytest.mark.e2e
def test_embedded_server_that_has_left_is_no_zombie(folder: DataFolder) -> None:
    with Client():
        pid = int(owner_file(folder).read_text().split()[1])
        assert Path(f"/proc/{pid}").exists()
    until(lambda: not Path(f"/proc/{pid}").exists(), timeout_s=20, what="the process has left and was waited for")


@pytest.mark.e2e
def test_embedded_server_that_leaves_between_probe_and_dial_is_started_again(
    folder: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a probe that found a server which is gone by the time it is dialed
    asked: list[DataFolder] = []

    def ensure(folder: DataFolder) -> str:
        asked.append(folder)
        return f"unix://{folder.socket}" if len(asked) == 1 else embedded.ensure_server(folder)

    monkeypatch.setattr(aio, "ensure_server", ensure)
    # Then another is started, and the client is none the wiser
    with Client(connect_timeout_s=15) as client:
        assert client.counts() is not None
    assert len(asked) == 2
    until(lambda: not owner_file(folder).read_text(), timeout_s=20, what="the embedded server ends in order")
