"""`tasuki cache put`, `list`, `show` and `rm`, with two workers of which one can be stopped."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tasuki.cli.output import ExitCode
from tasuki.client import caches
from tests.cli.commands import DEADLINE_S, User
from tests.support.processes import ServerProcess, WorkerProcess, start_server, start_worker
from tests.support.waiting import until

pytestmark = pytest.mark.e2e


class Served(NamedTuple):
    """A user, and what runs for them."""

    user: User
    server: ServerProcess
    steady: WorkerProcess
    other: WorkerProcess

    def run(self, *arguments: str) -> tuple[int, str, str]:
        done = self.user.run("cache", *arguments)
        return done.returncode, done.stdout, done.stderr

    def put(self, *arguments: str) -> tuple[int, dict[str, str], bool]:
        code, stdout, _ = self.run("put", "--json", *arguments)
        told = json.loads(stdout)
        return code, {one["worker_id"]: one["status"] for one in told["workers"]}, told["satisfied"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("cache")
    with start_server(folder, "--lease-ttl", "60") as server:

        def worker(name: str) -> WorkerProcess:
            options = ("--worker-id", name, "--subject", "render.>", "--exec", "true=/bin/true", "--data", str(folder / name))
            return start_worker(server, *options, command=True)

        with worker("other") as other, worker("steady") as steady:
            user = User(folder)
            user.environ |= {"TASUKI_URL": server.url, "TASUKI_TOKEN": server.token}
            (folder / "assets" / "deep").mkdir(parents=True)
            (folder / "assets" / "a").write_text("one")
            (folder / "assets" / "deep" / "b").write_text("two")
            yield Served(user, server, steady, other)


@pytest.fixture
def stopped(served: Served) -> Iterator[Served]:
    """With one worker that is connected, and answers nothing."""
    os.kill(served.other.pid, signal.SIGSTOP)
    try:
        yield served
    finally:
        os.kill(served.other.pid, signal.SIGCONT)


TARGET = ("--target", "render.>")


def new_file(served: Served, name: str) -> str:
    path = served.user.home / name
    path.write_bytes(os.urandom(1000))
    return str(path)


def test_what_is_put_is_told_by_worker_listed_shown_and_removed(served: Served) -> None:
    code, stdout, stderr = served.run("put", "one", "assets", *TARGET)
    assert (code, stderr) == (0, "")
    summary, *rows = stdout.splitlines()
    assert summary == "one  2 files, 6B; 2 of 2 workers have them"
    assert [row.split()[:2] for row in rows] == [["WORKER", "STATUS"], ["other", "OK"], ["steady", "OK"]]
    assert served.put("one", "assets", *TARGET) == (0, {"other": "SKIPPED", "steady": "SKIPPED"}, True)
    assert served.run("put", "one", "assets", *TARGET, "--quiet")[1] == "other SKIPPED\nsteady SKIPPED\n"

    assert served.run("list", "--quiet")[1] == "one\n"
    assert [line.split()[:4] for line in served.run("list")[1].splitlines()[1:]] == [["one", "2", "6B", "render.>"]]
    shown: dict[str, Any] = served.user.json("cache", "show", "one", "--json")
    assert (shown["target"], [one["name"] for one in shown["files"]]) == ("render.>", ["assets/a", "assets/deep/b"])
    assert served.run("show", "one", "--quiet")[1] == "assets/a\nassets/deep/b\n"
    assert served.run("rm", "one") == (0, "removed one (2 files)\n", "")
    for command in ("show", "rm"):
        code, stdout, stderr = served.run(command, "one")
        assert (code, stdout) == (ExitCode.NOT_FOUND, "")
        assert stderr.startswith("tasuki: NOT_FOUND: there is no cache 'one'")


def test_other_bytes_another_target_and_names_that_exclude_each_other_fail_whatever_is_required(served: Served) -> None:
    folder = served.user.home / "names"
    folder.mkdir()
    (folder / "a").write_text("one")
    assert served.put("names", str(folder / "a"), *TARGET)[0] == 0
    (folder / "a").write_text("two")
    (folder / "A").write_text("one")
    (folder / "below" / "a").mkdir(parents=True)
    (folder / "below" / "a" / "b").touch()
    for path in ("a", "A", "below/a"):
        code, stdout, _ = served.run("put", "names", str(folder / path), *TARGET, "--require", "0")
        assert code == ExitCode.FAILED
        assert stdout.count("FAILED  CACHE_CONFLICT: cache 'names' has ") == 2
    code, _, stderr = served.run("put", "names", str(folder / "A"), "--target", "nobody.>")
    assert code == ExitCode.CONFLICT
    assert "use that target, or another cache_id" in stderr
    assert served.run("show", "names", "--quiet")[1] == "a\n"


def test_too_few_workers_are_said_and_decide_the_exit_code(served: Served) -> None:
    path = new_file(served, "few")
    code, stdout, stderr = served.run("put", "few", path, "--target", "nobody.>")
    assert code == ExitCode.FAILED
    assert stdout == "few  1 files, 1.00kB; 0 of 0 workers have them\n"
    assert stderr.startswith("no connected worker takes nobody.>; the files are at the server, ")
    assert stderr.endswith("0 of 0 workers have the files, and --require all asks for 1\n")
    assert served.put("few", path, "--target", "nobody.>", "--require", "0") == (0, {}, True)
    code, _, stderr = served.run("put", "three", path, *TARGET, "--require", "3")
    assert code == ExitCode.FAILED
    assert "of 2 workers have the files, and --require 3 asks for 3\n" in stderr
    assert served.run("put", "three", path, "--require", "101%")[0] == ExitCode.USAGE
    assert served.run("put", "three", path + "-not-there")[0] == ExitCode.USAGE


def test_a_worker_that_does_not_answer_is_waited_for_only_if_it_is_required(
    stopped: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "ASK_WAIT_S", 0.05)
    path = new_file(stopped, "lags")
    code, stdout, stderr = stopped.run("put", "lags", path, *TARGET, "--require", "50%", "--timeout", "3600")
    assert code == 0
    assert [line.split()[1:2] for line in stdout.splitlines()[2:]] == [["AWAY"], ["OK"]]
    assert stderr == "the others continue by themselves; the same put again shows how far they are\n"


def test_after_ctrl_c_the_same_put_does_what_is_left(stopped: Served) -> None:
    path = new_file(stopped, "broken")
    process = stopped.user.start("cache", "put", "broken", path, *TARGET)
    try:
        kept = stopped.user.home / "steady" / "cache" / "broken" / "broken"
        until(kept.exists, DEADLINE_S, "one worker has it")
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert (process.returncode, stdout, stderr) == (ExitCode.INTERRUPTED, "", "")
    os.kill(stopped.other.pid, signal.SIGCONT)
    code, told, _ = stopped.put("broken", path, *TARGET)
    assert code == 0
    assert told.pop("steady") == "SKIPPED"
    assert told.pop("other") in ("OK", "SKIPPED")  # it may have gone on by itself
