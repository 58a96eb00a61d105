"""Trust of a process: in its data folder, files with secrets, and the key of its user, which makes a job the user's own."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from tasuki import Client
from tasuki.config import DataFolder, check_folder, data_folder, find_token, user_key
from tasuki.core.job import InputFile, JobSpec, is_marked, mark
from tasuki.doors.guest import GUEST_PREFIX, LOCK_NAME, private_folder
from tasuki.errors import ConfigError
from tests.cli.commands import DEADLINE_S, TASUKI, User, running
from tests.support.waiting import until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
OWN = f"tasuki-{os.geteuid()}"
KEY = bytes(range(32))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where a user works, who names no data folder."""
    monkeypatch.delenv("TASUKI_DATA", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------------------------------------------- folders


@pytest.mark.timeout(10)
def test_a_pipe_that_another_user_put_among_the_temporary_folders_is_not_waited_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(place))
    planted, left = place / f"{GUEST_PREFIX}planted", place / f"{GUEST_PREFIX}left"
    for folder in (planted, left):
        folder.mkdir(0o700)
    os.mkfifo(planted / LOCK_NAME)
    planted.chmod(0o777)
    (left / LOCK_NAME).touch()

    with private_folder() as made:
        assert mode_of(made) == 0o700

    assert (planted.exists(), left.exists()) == (True, False)


def test_an_own_folder_that_others_can_read_is_closed_to_them(place: Path) -> None:
    root = place / "tasuki-data"
    root.mkdir(mode=0o755)

    assert data_folder().make().root == root
    assert mode_of(root) == 0o700


def test_a_folder_with_files_of_another_kind_keeps_its_mode(place: Path) -> None:
    home = place / "home"
    home.mkdir(mode=0o755)
    (home / "notes").touch()

    assert data_folder(home).make().root == home
    assert mode_of(home) == 0o755


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda root: root.chmod(0o770), "can be changed by others (mode 0770)"),
        (lambda root: root.chmod(0o707), "can be changed by others (mode 0707)"),
        (lambda root: (root / "tasuki.sqlite3").chmod(0o660), "'tasuki.sqlite3' in it of user"),
        (lambda root: (root / "embedded.log").symlink_to("/etc/passwd"), "'embedded.log' in it is a symbolic link"),
        (lambda root: root.rename(root.with_name("real")) and root.symlink_to(root.with_name("real")), "is a symbolic link"),
    ],
)
def test_a_folder_that_others_may_have_changed_is_refused(place: Path, spoil: Callable[[Path], object], reason: str) -> None:
    root = place / "tasuki-data"
    root.mkdir(mode=0o700)
    (root / "tasuki.sqlite3").touch(mode=0o600)
    spoil(root)

    with pytest.raises(ConfigError) as refused:
        data_folder()

    assert str(root) in refused.value.message
    assert reason in refused.value.message
    assert "--data" in refused.value.message


@needs_root
def test_a_file_of_another_user_in_an_own_folder_is_refused(place: Path) -> None:
    root = place / "tasuki-data"
    root.mkdir(mode=0o700)
    (root / "tasuki.sqlite3").touch(mode=0o600)
    os.chown(root / "tasuki.sqlite3", 12345, 12345)

    with pytest.raises(ConfigError, match=r"'tasuki.sqlite3' in it belongs to user 12345 \(mode 0600\)"):
        check_folder(root)


@pytest.mark.parametrize(
    ("owner", "mode"),
    [(None, 0o2775), pytest.param(12345, 0o2777, marks=needs_root), pytest.param(12345, 0o770, marks=needs_root)],
)
def test_a_volume_that_belongs_to_others_has_a_folder_of_our_own(place: Path, owner: int | None, mode: int) -> None:
    volume = place / "volume"
    volume.mkdir()
    if owner is not None:
        os.chown(volume, owner, owner)
    volume.chmod(mode)

    folder = data_folder(volume).make()

    assert folder.root == volume / OWN
    assert mode_of(folder.root) & 0o777 == 0o700
    assert mode_of(volume) == mode
    volume.chmod(0o700)  # whatever becomes of the volume: what is there is not passed over
    assert data_folder(volume) == folder if owner is None else data_folder(volume).root == folder.root


def test_a_volume_that_has_a_store_is_not_passed_over(place: Path) -> None:
    volume = place / "volume"
    volume.mkdir()
    (volume / "tasuki.sqlite3").touch(mode=0o600)
    volume.chmod(0o775)

    with pytest.raises(ConfigError, match="can be changed by others"):
        data_folder(volume)


def test_a_folder_that_is_made_meanwhile_is_looked_at_as_well(place: Path) -> None:
    folder = data_folder()
    folder.root.mkdir(parents=True)
    folder.root.chmod(0o777)

    with pytest.raises(ConfigError, match="can be changed by others"):
        folder.make()


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    user = User(tmp_path)
    command = [*TASUKI, "up", "--no-tcp"]
    process = subprocess.Popen(command, cwd=user.home, env=user.environ, umask=0, stdout=subprocess.DEVNULL)
    try:
        status = user.data / "worker/status"
        until(lambda: status.is_dir() and any(status.glob("[!.]*.json")), DEADLINE_S, "the worker has written its status")
        until((user.data / "listening").exists, DEADLINE_S, "the server listens")
        modes = {path.name: mode_of(path) & 0o077 for path in (user.data, *user.data.iterdir(), *status.glob("[!.]*.json"))}
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
    assert not any(modes.values()), modes


# ---------------------------------------------------------------------------------------------------- secrets


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o602, 0o644])
def test_a_token_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text("tsk_c_1234567890abcdef")
    path.chmod(mode)

    with pytest.raises(ConfigError, match=rf"can be (read|changed) by others \(mode {mode:04o}\); chmod 600 it"):
        find_token(path)


@needs_root
def test_the_group_may_read_a_token_of_root_and_of_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("tsk_c_1234567890abcdef")
    path.chmod(0o440)
    assert find_token(path)

    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        find_token(path)


def test_of_many_processes_that_need_a_key_all_have_the_same(place: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        keys = set(pool.map(lambda _: user_key(), range(64)))

    path = place / "state/tasuki/key"
    assert keys == {path.read_bytes()}
    assert (len(path.read_bytes()), mode_of(path), mode_of(path.parent)) == (32, 0o600, 0o700)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda key: key.chmod(0o604), "read by others"),
        (lambda key: key.write_bytes(b"short"), "5 bytes instead of 32"),
        (lambda key: key.parent.chmod(0o777), "XDG_STATE_HOME"),
    ],
)
def test_a_key_that_others_may_know_is_refused(place: Path, spoil: Callable[[Path], object], reason: str) -> None:
    user_key()
    spoil(place / "state/tasuki/key")

    with pytest.raises(ConfigError, match=reason):
        user_key()


# ---------------------------------------------------------------------------------------------------- the mark of a job

JOB = JobSpec(job_id="one", exec="/bin/sh", args=("-c", "true"), env={"A": "b"}, payload=b"in", headers={"x": "y"})
CHANGES = [
    {"job_id": "two"},
    {"subject": "other"},
    {"exec": "/bin/bash"},
    {"args": ("-c", "false")},
    {"env": {"A": "c"}},
    {"payload": b"other"},
    {"files": (InputFile("a", data=b"1"),)},
    {"timeout_s": 1.0},
    {"priority": 9},
    {"headers": {}},
    {"cwd": "/srv/other"},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_the_mark_is_one_of_the_whole_job(change: dict[str, object]) -> None:
    marked = mark(JOB, "uid:1000", KEY)

    assert is_marked(marked, "uid:1000", KEY)
    assert not is_marked(replace(marked, **change), "uid:1000", KEY)
    assert not is_marked(marked, "uid:1001", KEY)
    assert not is_marked(marked, "uid:1000", bytes(32))
    assert not is_marked(JOB, "uid:1000", b"")


@pytest.mark.e2e
def test_the_mark_outlives_backup_restore_and_retry_and_clients_cannot_bring_their_own(user: User) -> None:
    fails_once = 'test -e "$0" || { touch "$0"; exit 1; }'
    with running(user, "server", "--no-tcp"), Client(f"unix://{user.data}/socket") as client:
        args = ("-c", fails_once, str(user.home / "ran"))
        spec = JobSpec(job_id="own", exec="/bin/sh", args=args, max_retries=0, mac=b"of the client")
        [job] = client.submit_many([spec])
        assert user.run("backup", str(user.home / "backup.tar")).returncode == 0
    restored = User(user.home, user.home / "restored")
    assert restored.run("restore", str(user.home / "backup.tar")).returncode == 0

    with running(restored, "up", "--no-tcp"), Client(f"unix://{restored.data}/socket") as client:
        until(lambda: client.status(job.job_id).state == "FAILED", DEADLINE_S, "the job has failed")
        assert client.status("own").outcome.exit_code == 1
        again = client.submit(job_id="own", exec="/bin/sh", args=args, retries=0, on_failed="rerun")
        again.result(timeout=DEADLINE_S)
        assert client.status("own").state == "SUCCEEDED"
    assert DataFolder(restored.data).database.exists()
