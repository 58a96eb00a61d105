"""A data folder that somebody else has put where a user works: a shared folder, a clone, an archive. Nothing of it is run."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tasuki import Client
from tasuki.config import DataFolder
from tasuki.core.address import parse_url
from tasuki.core.job import JobSpec, body_hash
from tasuki.core.store_messages import Submission
from tasuki.errors import ConfigError, Unavailable
from tasuki.net.tcp_link import connect
from tasuki.server.backup import prepare_folder
from tasuki.stores.sql.store import SqlStore
from tests.cli.commands import User, environment
from tests.support.sqlite_files import with_tables
from tests.support.waiting import until

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


class Victim(User):
    """A user who names no data folder, and works in the folder `shop`."""

    def __init__(self, home: Path) -> None:
        super().__init__(home / "shop", home / "shop" / "tasuki-data")
        self.environ = environment(home)


@pytest.fixture
def victim(tmp_path: Path) -> Victim:
    made = Victim(tmp_path)
    made.home.mkdir()
    return made


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """The file that exists once the planted program ran."""
    return tmp_path / "proof"


@pytest.fixture
def planted(victim: Victim, proof: Path) -> Path:
    """`./tasuki-data` of the victim's folder: a store of somebody else, whose row says that the victim submitted the job."""
    victim.data.mkdir(mode=0o755)
    database = victim.data / "tasuki.sqlite3"
    with_tables(database)
    spec = JobSpec(job_id="evil1", exec="/bin/sh", args=("-c", f"id > {proof}"))
    store = SqlStore.open_sqlite(database)
    store.submit([Submission(spec, f"uid:{os.getuid()}", body_hash(spec))])
    store.close()
    for path in victim.data.iterdir():
        path.chmod(0o644)
    return victim.data


def test_a_clone_that_the_victim_owns_runs_nothing_that_the_victim_did_not_submit(
    victim: Victim, planted: Path, proof: Path
) -> None:
    done = victim.run_process("run", "echo", "hello")

    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    with Client(f"unix://{planted}/socket") as client:
        until(lambda: client.status("evil1").state in ("SUCCEEDED", "FAILED"), 20, "the planted job ends")
        outcome = client.status("evil1").outcome
    assert not proof.exists()
    assert outcome.error_code == "UNPROVEN"
    assert "submit it again" in outcome.message


def test_modules_of_python_in_a_clone_are_not_imported(victim: Victim, proof: Path) -> None:
    """Python looks for modules in the folder where `python -m` is started, before any other."""
    victim.data.mkdir(mode=0o755)
    for module in ("tasuki", "msgspec", "click"):
        (victim.data / f"{module}.py").write_text(f"open({str(proof)!r}, 'w')\n")

    done = victim.run_process("run", "echo", "hello")

    assert not proof.exists()
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr


@needs_root
@pytest.mark.parametrize("mode", [0o777, 0o755, 0o700])
def test_a_folder_of_another_user_is_refused(victim: Victim, planted: Path, proof: Path, mode: int) -> None:
    for path in (planted, *planted.iterdir()):
        os.chown(path, NOBODY, NOBODY)
    planted.chmod(mode)

    done = victim.run_process("run", "echo", "hello")

    assert done.returncode == 125, done.stderr
    for fact in (str(planted), str(NOBODY), f"{mode:04o}", "--data"):
        assert fact in done.stderr
    assert not proof.exists()


@pytest.mark.parametrize("note", [b"", b"[[1]]", b"\xff", b"{}"])
def test_a_list_of_renames_that_is_none_is_refused_in_words(victim: Victim, note: bytes) -> None:
    (victim.data / "restoring").mkdir(parents=True)
    (victim.data / "restoring" / "decided").write_bytes(note)

    with pytest.raises(ConfigError, match=r"restoring/decided has renames that no restore has written; remove .*restoring"):
        prepare_folder(DataFolder(victim.data))


@pytest.mark.parametrize("target", ["../hook", "/{home}/hook", "replaced-1/../../hook", "blobs/../../hook"])
def test_a_clone_cannot_have_files_moved_out_of_it(victim: Victim, target: str) -> None:
    """A restore that was killed is finished at the next start, by the list of renames that it left in the folder."""
    staging = victim.data / "restoring"
    staging.mkdir(parents=True)
    (staging / "blobs").write_text("#!/bin/sh\n")
    (staging / "decided").write_text(json.dumps([["restoring/blobs", target.format(home=victim.home)]]))

    with pytest.raises(ConfigError, match="restoring/decided has renames that no restore has written"):
        prepare_folder(DataFolder(victim.data))

    assert not (victim.home / "hook").exists()


@pytest.mark.parametrize("link", ["blobs/tmp", "runs/0123456789abcdef"])
def test_a_link_in_a_clone_has_nothing_swept_elsewhere(victim: Victim, link: str) -> None:
    precious = victim.home / "precious"
    precious.mkdir()
    (precious / "file").touch()
    os.utime(precious / "file", (0, 0))
    (victim.data / link).parent.mkdir(parents=True)
    (victim.data / link).symlink_to(precious)
    os.utime(victim.data / link, (0, 0), follow_symlinks=False)

    done = victim.run_process("run", "echo", "hello")

    assert (precious / "file").exists()
    assert (link == "blobs/tmp") == ("blobs/tmp is a symbolic link" in done.stderr)


@needs_root
def test_a_server_of_another_user_on_the_socket_is_told_nothing(victim: Victim) -> None:
    """The folder is the victim's own; a process of another user listens on its socket."""
    victim.data.mkdir(mode=0o700)
    with listening_as(NOBODY, victim.data / "socket") as heard:
        done = victim.run_process("run", "login", "--password", "hunter2")
        with pytest.raises(Unavailable, match=f"a server of user {NOBODY}, not of nosuchuser"):
            asyncio.run(dial(f"unix://nosuchuser@{victim.data}/socket"))
        for trusted in (str(NOBODY), pwd.getpwuid(NOBODY).pw_name):
            asyncio.run(dial(f"unix://{trusted}@{victim.data}/socket"))
    assert done.returncode == 125
    assert f"a server of user {NOBODY}, not of this one (0) or root" in done.stderr
    assert f"unix://{NOBODY}@{victim.data}/socket" in done.stderr
    assert heard() == b"listens "


async def dial(url: str) -> None:
    link = await connect(parse_url(url)[0], lambda link, message: None, lambda link, reason: None)
    link.abort("enough")


@contextmanager
def listening_as(uid: int, path: Path) -> Iterator[Callable[[], bytes]]:
    """Listen on a unix socket as another user; yields a function that returns everything that was sent to it."""
    log = path.with_name("heard")
    with socket.socket(socket.AF_UNIX) as sock, log.open("wb") as out:
        sock.bind(str(path))
        log.chmod(0o600)
        command = [sys.executable, "-c", LISTENER, str(sock.fileno()), str(uid)]
        process = subprocess.Popen(command, pass_fds=[sock.fileno()], stdout=out)
    until(lambda: log.read_bytes(), 30, "it listens")
    try:
        yield log.read_bytes
    finally:
        process.kill()
        process.wait()


LISTENER = """
import os, socket, sys, threading
sock = socket.socket(fileno=int(sys.argv[1]))
os.setuid(int(sys.argv[2]))
sock.listen()
os.write(1, b"listens ")
def copy(peer):
    while data := peer.recv(65536):
        os.write(1, data)
while True:
    threading.Thread(target=copy, args=(sock.accept()[0],), daemon=True).start()
"""
