"""Every command over HTTP and HTTPS, as a user types it: `--to http://…` is all that is different."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasuki import Client
from tasuki.cli.connect import own_token
from tasuki.config import DataFolder
from tasuki.errors import Unavailable
from tests.cli.commands import DEADLINE_S, User, running
from tests.cli.inside import Inside, inside
from tests.conftest import Require
from tests.support.waiting import until

__all__ = ["inside"]

pytestmark = pytest.mark.e2e
EXECS = ("--exec", "say=/bin/echo {args}", "--exec", "show=/bin/cat {file}", "--exec", "shell=/bin/sh -c {args}")


def served(home: Path, *more: str) -> Iterator[User]:
    """Somebody whose commands go to the HTTP listener of the `tasuki up` of their own data folder."""
    user = User(home)
    with running(user, "up", "--tcp", "127.0.0.1:0", "--http", "127.0.0.1:0", "--slots", "2", *EXECS, *more) as server:
        url = next(line.removeprefix("listening ") for line in server.lines if line.startswith("listening http"))
        user.environ["TASUKI_URL"] = url
        yield user


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    yield from served(tmp_path_factory.mktemp("over-http"))


@pytest.fixture
def tasuki(user: User, inside: Inside, monkeypatch: pytest.MonkeyPatch) -> Inside:
    """The command as that user runs it; the token is found in the data folder."""
    monkeypatch.chdir(user.home)
    for name in ("TASUKI_URL", "TASUKI_DATA"):
        monkeypatch.setenv(name, user.environ[name])
    return inside


def test_run_gives_the_output_and_the_exit_code(tasuki: Inside, user: User) -> None:
    path = user.home / "large.txt"
    path.write_text(os.urandom(150_000).hex())

    shown = tasuki("run", "--file", str(path), "-o", "result.zip", "show")
    failed = tasuki("run", "--retries", "0", "shell", "echo to stderr >&2; exit 7")

    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == path.read_text()
    assert (user.home / "result.zip").stat().st_size > 100_000
    assert failed.returncode == 7
    assert "to stderr" in failed.stderr


def test_a_job_is_submitted_followed_and_its_result_saved(tasuki: Inside, user: User) -> None:
    gate = user.home / "gate"
    job_id = tasuki("submit", "shell", f"echo one; while [ ! -e {gate} ]; do sleep 0.05; done; echo two").stdout.strip()
    following = user.start("logs", "--follow", job_id)
    assert following.stdout is not None
    assert following.stdout.readline() == "one\n"
    gate.touch()

    rest, _ = following.communicate(timeout=20)
    saved = tasuki("result", job_id, "-o", "followed.zip")

    assert (rest, following.returncode) == ("two\n", 0)
    assert saved.returncode == 0, saved.stderr
    assert (user.home / "followed.zip").exists()
    assert "SUCCEEDED" in tasuki("status", job_id).stdout


def test_a_job_is_explained_canceled_and_set_going_again(tasuki: Inside) -> None:
    job_id = tasuki("submit", "--not-before", "+3600", "say", "hello").stdout.strip()

    explained = tasuki("explain", job_id)
    canceled = tasuki("cancel", job_id)
    seen = tasuki("list", "--state", "CANCELED")
    again = tasuki("retry", job_id)

    assert "PENDING" in explained.stdout
    assert (canceled.returncode, again.returncode) == (0, 0), again.stderr
    assert job_id in seen.stdout


def test_an_administrator_sees_the_house_and_makes_tokens(tasuki: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    until(lambda: len(tasuki("workers", "--json").json) == 1, DEADLINE_S, "the worker is seen")
    made = tasuki("token", "create", "--kind", "client", "--json").json
    shown = [tasuki("stats"), tasuki("servers"), tasuki("token", "list")]
    monkeypatch.setenv("TASUKI_TOKEN", made["token"])

    listed, refused = tasuki("list"), tasuki("workers")

    assert [one.returncode for one in shown] == [0, 0, 0]
    assert listed.returncode == 0, listed.stderr
    assert refused.returncode == 4
    assert "FORBIDDEN" in refused.stderr


def test_a_worker_that_is_detached_now_ends_its_program_and_the_job_waits(tasuki: Inside, user: User) -> None:
    pid = user.home / "pid"
    job_id = tasuki("submit", "shell", f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600").stdout.strip()
    until(pid.exists, DEADLINE_S, "the program runs")

    def reported() -> dict[str, Any] | None:
        [job] = tasuki("status", job_id, "--json").json
        return job if job["state"] == "RUNNING" else None

    worker_id = until(reported, DEADLINE_S, "its start is recorded: only then a detached worker is a loss")["assigned_worker_id"]

    detached = tasuki("detach", worker_id, "--now")

    assert detached.stdout == f"worker {worker_id} is detached\n", detached.stderr
    until(lambda: not Path(f"/proc/{pid.read_text().strip()}").exists(), DEADLINE_S, "its program is gone")
    [waiting_job] = tasuki("status", job_id, "--json").json
    tasuki("cancel", job_id)
    assert (waiting_job["state"], waiting_job["losses"]) == ("PENDING", 1)
    assert tasuki("attach", worker_id).returncode == 0


def test_a_token_that_is_not_known_is_refused(tasuki: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASUKI_TOKEN", "tsk_c_nobody")

    refused = tasuki("list")

    assert refused.returncode == 4
    assert "UNAUTHORIZED" in refused.stderr


def test_the_folders_token_goes_to_its_own_listener_only(user: User) -> None:
    folder, url = DataFolder(user.data), user.environ["TASUKI_URL"]
    elsewhere = [f"{url}/through/something", url.replace("http:", "https:"), "http://127.0.0.1:1", f"{url},http://127.0.0.1:1"]

    assert own_token(folder, url).startswith("tsk_a_")
    assert [own_token(folder, other) for other in elsewhere] == [""] * 4


def test_https_with_a_ca_of_ones_own(tmp_path: Path, inside: Inside, require: Require, monkeypatch: pytest.MonkeyPatch) -> None:
    require("openssl", shutil.which("openssl") is not None, "certificates are made with it")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=server", "-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:TRUE",
         "-keyout", key, "-out", cert],
        check=True, capture_output=True, timeout=20,
    )  # fmt: skip
    for user in served(tmp_path, "--tls-cert", cert, "--tls-key", key):
        url = user.environ["TASUKI_URL"]
        done = inside("run", "--to", url, "--data", str(user.data), "--tls-ca", cert, "say", "hello")
        with pytest.raises(Unavailable, match="--tls-ca"):
            Client(url, token="x", connect_timeout_s=1.0)

        assert url.startswith("https://")
        assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr


def test_messages_are_read_asked_for_and_answered(user: User) -> None:
    sub = user.start("sub", "far.>", "--count", "1", "--raw")
    try:
        assert sub.stdout is not None
        assert sub.stderr is not None
        assert sub.stderr.readline() == "subscribed to far.>\n"
        user.run("pub", "far.a", "over http")
        assert sub.stdout.readline() == "over http\n"
        assert sub.wait(DEADLINE_S) == 0
    finally:
        sub.kill()
        sub.communicate()
    with Client(f"unix://{user.data / 'socket'}") as client, client.subscribe("far.echo") as messages:
        answering = threading.Thread(target=lambda: client.publish(next(messages).reply_to, b"yes"))
        answering.start()
        assert user.run("request", "far.echo").stdout == "yes\n"
        answering.join()
    assert user.run("request", "far.echo").returncode == 3
