"""`tasuki server`, `tasuki up` and `tasuki worker`: start, refusals, order at the end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasuki.cli.connect import own_token, owner_of
from tasuki.cli.process import warn_of_full_disk
from tasuki.cli.up import worker_arguments
from tasuki.config import data_folder
from tasuki.errors import ConfigError
from tests.cli.commands import DEADLINE_S, Running, User, read_fifo, running
from tests.support.processes import alive
from tests.support.waiting import until

pytestmark = pytest.mark.e2e


def test_a_server_says_where_it_listens_and_ends_in_order(user: User) -> None:
    with running(user, "server", "--tcp", "127.0.0.1:0") as server:
        assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d*", server.url)
        assert f"listening unix://{user.data}/socket" in server.lines
        assert server.stop() == 0

    assert not (user.data / "socket").exists()


@pytest.mark.parametrize("words", [("server", "--tcp", "127.0.0.1:0", "--no-unix"), ("up", "--no-tcp", "--workers", "0")])
def test_json_events_for_programs(user: User, words: tuple[str, ...]) -> None:
    with running(user, *words, "--json") as server:
        events = [json.loads(line) for line in server.lines]

    assert [event["event"] for event in events] == ["listening", "ready"]
    assert events[0]["pid"] == server.process.pid


def test_a_second_server_on_the_folder_is_refused_with_the_pid_of_the_first(served: tuple[User, Running]) -> None:
    user, server = served

    second = user.run("server", "--no-tcp")

    assert second.returncode == 5
    assert second.stderr.startswith("tasuki: UNAVAILABLE: ")
    assert f"pid {server.process.pid} " in second.stderr


@pytest.mark.parametrize("word", ["server", "up"])
def test_a_listener_beyond_this_machine_without_tls_is_refused(user: User, word: str) -> None:
    done = user.run(word, "--tcp", "0.0.0.0:0")

    assert done.returncode == 2
    assert "--insecure" in done.stderr
    assert not user.data.exists(), "refused before anything was made"


def test_insecure_opens_it_all_the_same(user: User) -> None:
    with running(user, "server", "--tcp", "0.0.0.0:0", "--insecure") as server:
        assert server.url.startswith("tcp://0.0.0.0:")


def test_a_certificate_without_its_key_is_refused(user: User) -> None:
    assert user.run("server", "--tls-cert", "cert.pem").returncode == 2


def test_a_port_that_is_taken_is_named(user: User, served: tuple[User, Running]) -> None:
    port = served[1].url.rpartition(":")[2]

    other = user.run("server", "--no-unix", "--tcp", f"127.0.0.1:{port}")

    assert other.returncode == 2
    assert f"127.0.0.1:{port}" in other.stderr


def test_a_fault_point_kills_the_server_there(user: User) -> None:
    process = user.start("server", "--no-tcp")
    Running(process).stop()
    user.environ["TASUKI_FAULT"] = "turn.committed"
    process = user.start("server", "--no-tcp")

    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    process.communicate()
    (user.data / "socket").unlink(missing_ok=True)


def test_up_ends_in_order_and_its_jobs_finish_first(user: User, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "started")
    os.mkfifo(tmp_path / "go-on")
    with running(user, "up", "--no-tcp", "--slots", "1") as server:
        user.run("submit", "--job-id", "last", "sh", "-c", f"echo go > {tmp_path}/started; cat {tmp_path}/go-on; exit 0")
        read_fifo(tmp_path / "started")
        server.process.terminate()
        until(lambda: any(line.startswith("stopping") for line in server.lines), DEADLINE_S, "it says that it stops")
        assert server.process.poll() is None
        (tmp_path / "go-on").write_text("done\n")
        assert server.process.wait(DEADLINE_S) == 0

    assert user.json("status", "--json", "last")[0]["state"] == "SUCCEEDED"


def test_a_second_signal_ends_up_and_the_jobs_that_still_run(user: User, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "started")
    with running(user, "up", "--no-tcp", "--slots", "1") as server:
        user.run("submit", "--job-id", "endless", "sh", "-c", f"echo $$ > {tmp_path}/started; exec sleep 600")
        job_pid = int(read_fifo(tmp_path / "started"))
        server.process.send_signal(signal.SIGINT)
        until(lambda: any(line.startswith("stopping") for line in server.lines), DEADLINE_S, "it says that it stops")
        server.process.send_signal(signal.SIGINT)

        assert server.process.wait(DEADLINE_S) == 130
        assert not alive(job_pid)


def test_the_workers_of_up_are_told_what_it_was_told(user: User, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "started")
    caps = ("--log-head", "100", "--log-tail", "50")
    with running(user, "up", "--no-tcp", *caps, "--drain-timeout", "0.5", "--exec", "greet=/bin/echo hello") as server:
        assert user.run("run", "greet", "you").stdout == "hello you\n"

        user.run("run", "--job-id", "long", "seq", "1000")
        assert "[tasuki: 3743 bytes were cut here]" in user.run("logs", "long").stdout

        user.run("submit", "sh", "-c", f"echo $$ > {tmp_path}/started; exec sleep 600")
        job_pid = int(read_fifo(tmp_path / "started"))
        server.process.terminate()
        assert server.process.wait(DEADLINE_S) == 0
        assert not alive(job_pid)


def test_what_its_workers_would_refuse_up_refuses_and_leaves_no_folder(user: User) -> None:
    done = user.run("up", "--no-tcp", "--log-head", "1GiB")

    assert done.returncode == 2
    assert "CONFIG" in done.stderr
    assert not user.data.exists()


SOUND = {"slots": None, "exec_": (), "config": None, "drain_timeout": None, "log_head": "1KB", "log_tail": "1KB"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": 0},
        {"log_tail": "much"},
        {"exec_": ("nothing",)},
        {"config": Path("/no/such/file")},
    ],
)
def test_which_options_of_workers_are_refused(wrong: dict[str, Any]) -> None:
    worker_arguments(**SOUND)

    with pytest.raises(ConfigError):
        worker_arguments(**{**SOUND, **wrong})


def test_a_full_disk_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_full_disk(tmp_path)
    assert not caplog.records
    monkeypatch.setattr("tasuki.cli.process.DISK_FLOOR_BYTES", 10**18)

    warn_of_full_disk(tmp_path)

    assert "new jobs and results will be refused" in caplog.text
    assert "Free space there" in caplog.text


def workers_of(user: User) -> list[str]:
    return [worker["worker_id"] for worker in user.json("stats", "--json")["workers"]]


def test_a_worker_that_dies_is_started_again(user: User) -> None:
    with running(user, "up", "--no-tcp", "--slots", "1"):
        until(lambda: workers_of(user), DEADLINE_S, "the worker is there")
        (first,) = workers_of(user)
        os.kill(int(first.rsplit("-", 2)[1]), signal.SIGKILL)

        until(lambda: set(workers_of(user)) - {first}, DEADLINE_S, "another worker is there")


def test_the_workers_end_with_an_up_that_was_killed(user: User) -> None:
    with running(user, "up", "--no-tcp", "--slots", "1") as server:
        until(lambda: workers_of(user), DEADLINE_S, "the worker is there")
        pid = int(workers_of(user)[0].rsplit("-", 2)[1])
        server.process.kill()
        server.process.wait(DEADLINE_S)

        until(lambda: not Path(f"/proc/{pid}").exists(), DEADLINE_S, "the worker is gone")
    (user.data / "socket").unlink()


def test_over_tcp_the_owner_of_the_folder_needs_no_token(served: tuple[User, Running]) -> None:
    user, server = served

    assert user.json("list", "--json", "--to", server.url) == user.json("list", "--json")


def test_over_tcp_the_token_goes_only_to_the_folders_own_server(user: User, served: tuple[User, Running]) -> None:
    _, strangers_server = served
    with running(user, "server", "--no-tcp"):
        done = user.run("list", "--to", strangers_server.url)

    assert done.returncode == 4
    assert done.stderr.startswith("tasuki: UNAUTHORIZED: a token is needed")


def test_a_worker_over_tcp_runs_what_it_allows_and_nothing_else(user: User) -> None:
    with running(user, "server", "--tcp", "127.0.0.1:0") as server:
        (user.home / "worker.token").touch(mode=0o600)
        (user.home / "worker.token").write_text(user.run("token", "create", "--kind", "worker").stdout)
        flags = ["--token-file", "worker.token", "--subject", "render.*", "--worker-id", "renderer"]
        worker = user.start("worker", "--to", server.url, *flags, "--exec", "say=echo said")
        try:
            allowed = user.run("run", "--subject", "render.1", "say", "this")
            user.run("submit", "--job-id", "other", "--subject", "render.1", "sh", "-c", "true")
            explained = user.run("explain", "other")
        finally:
            worker.terminate()
            assert worker.wait(DEADLINE_S) == 0
            worker.communicate()

    assert allowed.stdout == "said this\n"
    assert "PENDING" in explained.stdout
    assert "do not offer the exec 'sh' to you (renderer: say). No connected worker offers it" in explained.stdout


def test_programs_of_a_list_and_any_program_do_not_fail_each_other(user: User) -> None:
    # given: tasuki up, and beside it a worker with a list, of which one program is nowhere on PATH and one is not there at all
    with running(user, "up", "--slots", "1"):
        worker = user.start("worker", "--exec", "price-it=/bin/true", "--exec", "lost=/nowhere/lost", "--worker-id", "lists")
        try:
            until(lambda: len(user.json("workers", "--json")) == 2, DEADLINE_S, "both workers are connected")
            # when: jobs for both come mixed
            names = [f"{name}-{number}" for number in range(20) for name in ("price-it", "true")]
            for name in names:
                assert user.run("submit", "--job-id", name, name.rpartition("-")[0]).returncode == 0
            ended = [user.run("result", name) for name in names]
            shown = user.run("workers").stdout
        finally:
            worker.terminate()
            said = worker.communicate(timeout=DEADLINE_S)[1]

    # then: all succeed; the table shows who offers what, and the worker warned of what is not there
    assert {done.returncode for done in ended} == {0}
    assert "lost, price-it" in shown
    assert "  *  " in shown
    assert "program '/nowhere/lost' of exec 'lost' was not found" in said


HANDLERS = """
import sys
from tasuki import Worker

worker = Worker(sys.argv[1])

@worker.handler("math.square")
async def square(job):
    return str(int(job.payload) ** 2)

worker.run()
"""


def test_a_handlers_bytes_are_its_output_and_its_result(user: User) -> None:
    with running(user, "server", "--no-tcp"):
        worker = subprocess.Popen([sys.executable, "-c", HANDLERS, f"unix://{user.data}/socket"], env=user.environ)
        try:
            words = ("--subject", "math.square", "--job-id", "square-7", "--payload-file", "-", "-")
            done = user.run("run", *words, input="7")
            saved = user.json("result", "--json", "square-7")
            logs = user.run("logs", "square-7")
        finally:
            worker.terminate()
            assert worker.wait(DEADLINE_S) == 0

    assert (done.stdout, done.returncode) == ("49", 0), done.stderr
    assert (user.home / saved["path"]).read_bytes() == b"49"
    assert (saved["path"], logs.returncode) == ("square-7.bin", 3)


@pytest.mark.parametrize(
    "flags",
    [
        ("--exec", "no-equals-sign"),
        ("--on-disconnect", "maybe"),
        ("--slots", "0"),
        ("--subject", "a..b"),
        ("--config", "none.toml"),
    ],
)
def test_a_worker_with_wrong_settings_does_not_start(user: User, flags: tuple[str, ...]) -> None:
    done = user.run("worker", *flags)

    assert done.returncode == 2
    assert done.stderr.startswith("tasuki: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("word", ["up", "server"])
def test_a_port_that_is_taken_leaves_no_new_folder_behind(user: User, word: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = user.run(word, "--tcp", f"127.0.0.1:{taken.getsockname()[1]}")

    assert done.returncode == 2
    assert "cannot listen on" in done.stderr
    assert not user.data.exists()


def test_a_folder_whose_owner_was_killed_gives_its_token_to_nobody(user: User) -> None:
    with running(user, "server", "--tcp", "127.0.0.1:0") as server:
        url = server.url
        folder = data_folder(user.data)
        assert own_token(folder, url)
        server.process.kill()
        server.process.wait(DEADLINE_S)
        (user.data / "socket").unlink()

    # The number of its process may by now be anybody's, here that of the test.
    owner = user.data / "tasuki.sqlite3.owner"
    owner.write_text(f"pid {os.getpid()} since 1\n")

    assert owner_of(folder).startswith(f"pid {os.getpid()} since ")
    assert own_token(folder, url) == ""
