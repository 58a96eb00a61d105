"""The credential that an enrolled worker keeps on disk: for its user only, whole or not there, and for one process at a time."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tasuki.core.address import Address, parse_url
from tasuki.errors import ConfigError, Unavailable
from tasuki.worker.credentials import Credential, CredentialFile, CredentialToken, file_name, read_credential
from tests.support.processes import SOURCE

SERVER = parse_url("https://control.example")[0]
TOKEN = CredentialToken(secret="tsk_w_secret", token_id="t1", issued_at=1000.0, expires_at=1700.0)
CREDENTIAL = Credential(server=str(SERVER), worker_id="w-1", scope=("job.assign.zpe",), token=TOKEN)


def saved(data: Path, credential: Credential = CREDENTIAL) -> Path:
    """The file of a worker that is enrolled, and does not run."""
    with CredentialFile(data, SERVER) as seat:
        seat.save(credential)
        return seat.path


def test_what_was_saved_is_found_by_the_next_process(tmp_path: Path) -> None:
    with CredentialFile(tmp_path, SERVER) as seat:
        assert seat.load() is None
    saved(tmp_path)

    with CredentialFile(tmp_path, SERVER) as seat:
        assert seat.load() == CREDENTIAL
        assert seat.credential == CREDENTIAL


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        path = saved(tmp_path / "new")
    finally:
        os.umask(old)

    modes = [stat.S_IMODE(place.stat().st_mode) for place in (path, path.parent, path.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]


def test_a_folder_that_was_open_to_others_is_closed(tmp_path: Path) -> None:
    (tmp_path / "worker").mkdir()
    (tmp_path / "worker").chmod(0o777)

    path = saved(tmp_path)

    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_credential_that_others_can_read_is_not_used(tmp_path: Path, mode: int) -> None:
    path = saved(tmp_path)
    path.chmod(mode)

    with CredentialFile(tmp_path, SERVER) as seat, pytest.raises(ConfigError, match=f"mode {mode:o}.*chmod 600") as refused:
        seat.load()

    assert TOKEN.secret not in refused.value.message


def test_a_credential_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    with pytest.raises(ConfigError, match=rf"belongs to uid {os.getuid()}.*--data"):
        read_credential(path)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)

    with CredentialFile(tmp_path, SERVER) as seat, pytest.raises(ConfigError, match="cannot be read"):
        seat.load()


@pytest.mark.parametrize("kept", [0, 1, 40, -2])
def test_a_torn_credential_is_an_error_that_shows_the_way_out(tmp_path: Path, kept: int) -> None:
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:kept])

    with (
        CredentialFile(tmp_path, SERVER) as seat,
        pytest.raises(ConfigError, match=r"not a whole credential; remove it.*token enroll") as torn,
    ):
        seat.load()

    assert TOKEN.secret not in torn.value.message


def test_a_credential_for_another_server_is_not_shown_to_this_one(tmp_path: Path) -> None:
    path = saved(tmp_path)
    other = parse_url("https://other.example")[0]
    path.rename(path.with_name(f"{file_name(other)}.json"))

    with (
        CredentialFile(tmp_path, other) as seat,
        pytest.raises(ConfigError, match=r"for https://control\.example:443, not for https://other"),
    ):
        seat.load()


def test_a_token_that_came_over_tls_is_not_shown_without_it(tmp_path: Path) -> None:
    saved(tmp_path)

    with (
        CredentialFile(tmp_path, parse_url("http://control.example:443")[0]) as seat,
        pytest.raises(ConfigError, match="not for http://"),
    ):
        seat.load()


def test_each_server_has_a_file_of_its_own() -> None:
    urls = (
        "https://a",
        "https://a/x",
        "https://a/y",
        "https://a/x_y",
        "https://a/x/y",
        "https://b",
        "https://a:8443",
        "http://[::1]:1",
    )

    names = [file_name(parse_url(url)[0]) for url in urls]

    assert len(set(names)) == len(urls)
    assert names[0] == "a-443"
    assert not [name for name in names if "/" in name or len(name) > 120]


def test_a_long_address_makes_a_name_that_a_disk_can_hold() -> None:
    assert len(file_name(Address("https", "h" * 253, 443, "/" + "p" * 3000))) < 150


def test_the_second_process_is_told_who_has_it(tmp_path: Path) -> None:
    with CredentialFile(tmp_path, SERVER), pytest.raises(Unavailable, match=rf"pid {os.getpid()}\) is the worker.*--data"):
        CredentialFile(tmp_path, SERVER)

    CredentialFile(tmp_path, SERVER).close()


def test_the_worker_of_another_server_may_share_the_folder(tmp_path: Path) -> None:
    with CredentialFile(tmp_path, SERVER), CredentialFile(tmp_path, parse_url("https://other.example")[0]):
        pass


def test_what_a_killed_process_had_is_free(tmp_path: Path) -> None:
    program = f"""
        import os, signal
        from pathlib import Path
        from tasuki.core.address import parse_url
        from tasuki.worker.credentials import CredentialFile
        seat = CredentialFile(Path({str(tmp_path)!r}), parse_url("https://control.example")[0])
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env={**os.environ, "PYTHONPATH": str(SOURCE)}, timeout=20, check=False
    )
    assert ended.returncode == -9

    CredentialFile(tmp_path, SERVER).close()


@pytest.mark.parametrize("point", ["fsync", "replace"])
def test_a_save_that_is_cut_short_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    saved(tmp_path)

    def cut(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with CredentialFile(tmp_path, SERVER) as seat:
        with monkeypatch.context() as patch:
            patch.setattr(os if point == "fsync" else Path, point, cut)
            with pytest.raises(OSError, match="No space"):
                seat.save(Credential(server=str(SERVER), worker_id="w-2", token=TOKEN))

        assert seat.load() == CREDENTIAL
        seat.save(Credential(server=str(SERVER), worker_id="w-3", token=TOKEN))
        assert [path.name for path in seat.path.parent.iterdir() if path.suffix == ".new"] == []


def test_a_worker_without_a_credential_has_the_same_id_at_every_start(tmp_path: Path) -> None:
    with CredentialFile(tmp_path, SERVER) as seat:
        first = seat.worker_id("lab3")
    with CredentialFile(tmp_path, SERVER) as seat:
        again = seat.worker_id("renamed")
    with CredentialFile(tmp_path / "other", SERVER) as seat:
        other = seat.worker_id("lab3")

    assert first.startswith("lab3-")
    assert again == first
    assert other != first


def test_an_id_that_cannot_be_one_is_an_error(tmp_path: Path) -> None:
    with CredentialFile(tmp_path, SERVER) as seat:
        seat.worker_id("lab3")
        [path] = seat.path.parent.glob("*.id")
        path.write_text("../../etc")

        with pytest.raises(ConfigError, match="--worker-id"):
            seat.worker_id("lab3")


def test_neither_a_token_nor_a_credential_shows_its_secret() -> None:
    shown = f"{TOKEN!r} {TOKEN} {CREDENTIAL!r} {CREDENTIAL}"

    assert TOKEN.secret not in shown
    assert "t1" in shown


def test_a_token_is_as_old_as_this_machine_says() -> None:
    assert TOKEN.ttl_s == 700.0
    assert TOKEN.left_s(1100.0) == 600.0
    assert TOKEN.left_s(1800.0) < 0
    assert TOKEN.left_s(10.0) == 0.0, "the clock was set back: nobody knows how old it is"
