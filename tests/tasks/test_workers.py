"""Typed tasks at real workers: results, retries, failures, cancels, large arguments, reloading, embedded servers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasuki import DeadlineExceeded, JobFailed, Progress, Tasks, as_completed, gather
from tasuki.client import types
from tasuki.tasks.tasks import load_tasks
from tests.support.processes import TASUKI, ChildProcess, ServerProcess, start_server
from tests.support.waiting import until

pytestmark = pytest.mark.e2e
HERE = Path(__file__).parent
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with HTTP, and a worker for program.py."""
    folder = tmp_path_factory.mktemp("tasks")
    command = [*TASUKI, "worker", "--tasks", "program:tasks", "--slots", "8"]
    with start_server(folder, "--http", "127.0.0.1:0") as server:
        env = {"TASUKI_URL": server.url, "TASUKI_TOKEN": server.create_token("worker")}
        with ChildProcess(command, folder / "worker.log", env, cwd=HERE) as worker:
            worker.wait_for_output("connected to")
            server.worker = worker  # type: ignore[attr-defined]
            yield server
            assert worker.running, worker.output()


@pytest.fixture
def program(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module program.py, whose tasks are submitted to the server."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("TASUKI_URL", server.url)
    monkeypatch.setenv("TASUKI_TOKEN", server.token)
    monkeypatch.chdir(HERE)
    with load_tasks("program:tasks"):
        yield sys.modules["program"]


def test_tasks_run_at_a_worker_and_their_results_have_their_types(program: Any) -> None:
    job = program.resize.submit("a.png", width=400)
    result = job.result(timeout=PATIENCE_S)
    assert (result["width"], result["letters"]) == (400, 5)
    assert result["pid"] != os.getpid()
    assert program.add.submit(1, b=5).result(timeout=PATIENCE_S) == 6
    assert gather(program.add.map(range(50)), timeout=PATIENCE_S) == list(range(1, 51))
    ended = as_completed(program.resize.starmap([("a", 1), ("b", 2)]), timeout=PATIENCE_S)
    assert {one.result()["width"] for one in ended} == {1, 2}


def test_tasks_can_be_submitted_and_awaited_in_any_event_loop(program: Any) -> None:
    async def main() -> list[int]:
        job = await program.add.submit_async(1)
        ended = [one.result() async for one in as_completed(await program.add.map_async([2, 3]), timeout=PATIENCE_S)]
        return [await job, *await asyncio.gather(*await program.add.starmap_async([(4,)])), *sorted(ended)]

    for _ in range(2):  # two loops, one client
        assert asyncio.run(main()) == [2, 5, 3, 4]


def test_the_same_job_id_is_the_same_job_in_every_process(program: Any) -> None:
    once = program.resize.options(job_id="resize-once", priority=7)
    first, second = once.submit("a.png"), once.submit("a.png")
    assert first.result(timeout=PATIENCE_S) == second.result(timeout=PATIENCE_S)
    assert second.existed
    assert program.resize.job("resize-once").result(timeout=PATIENCE_S) == first.result()
    array = program.add.options(job_id="adds").map([1, 2])
    assert [job.job_id for job in array] == ["adds-0", "adds-1"]
    assert gather(array, timeout=PATIENCE_S) == [2, 3]
    assert {one.job_id for one in program.tasks.client.list_jobs(array_id="adds")} == {"adds-0", "adds-1"}


def test_arguments_of_any_size_arrive(program: Any) -> None:
    assert program.size.submit("x" * 1_000_000).result(timeout=PATIENCE_S) == 1_000_000


def test_a_task_that_asks_for_another_attempt_gets_it(program: Any, tmp_path: Path) -> None:
    note = tmp_path / "attempts"
    assert program.third_time.submit(str(note)).result(timeout=PATIENCE_S) == 3
    assert note.read_text().split() == ["1", "2", "3"]


def test_a_failure_has_the_traceback_of_the_worker_and_its_log_too(program: Any, server: ServerProcess) -> None:
    job = program.fails.submit("no such thing")
    with pytest.raises(JobFailed, match=r"after attempt 1: ValueError: no such thing \(not tried again: give_up_on\)") as failed:
        job.result(timeout=PATIENCE_S)
    assert "raise ValueError(message)\nValueError: no such thing" in "".join(failed.value.__notes__)
    output = server.worker.output()  # type: ignore[attr-defined]
    assert f"job {job.job_id} (tasks.fails) failed in " in output
    assert "    raise ValueError(message)\nValueError: no such thing\n" in output


def test_a_worker_refuses_arguments_that_do_not_fit(program: Any) -> None:
    job = program.tasks.client.submit(subject="tasks.resize", payload=b'{"path": 7}')
    ended = job.outcome(timeout=PATIENCE_S)
    assert (ended.state, ended.attempt, ended.outcome.error_code) == ("FAILED", 1, "BAD_ARGUMENTS")
    assert ended.outcome.message == "argument path: expected str, got int (task 'resize')"
    assert program.tasks.client.submit(subject="tasks.resize", payload=b'{"path": "a"}').result(timeout=PATIENCE_S)


def test_a_function_that_looks_for_a_cancel_can_clean_up(program: Any, tmp_path: Path) -> None:
    note = tmp_path / "note"
    job = program.until_canceled.submit(str(note))
    until(Path(f"{note}.started").exists, what="the task runs")
    assert job.cancel("enough").requested
    assert job.outcome(timeout=PATIENCE_S).state == "CANCELED"
    assert note.read_text() == "cleaned up"


@pytest.mark.parametrize("task", ["steps", "plain_steps"])
@pytest.mark.parametrize("over", ["tcp", "http"])
def test_progress_is_followed_as_it_comes(program: Any, server: ServerProcess, tmp_path: Path, task: str, over: str) -> None:
    gate = tmp_path / "gate"
    job = getattr(program, task).submit(str(gate))
    with server.client(server.http_url if over == "http" else server.url) as client:
        reports = client.progress(job.job_id)
        for step in (1, 2, 3):  # each report arrives before the next one is made
            Path(f"{gate}.{step}").touch()
            assert next(reports) == Progress(step / 4, f"step {step}")
        assert list(reports) == []  # to the end of the job
        assert list(client.progress(job.job_id)) == [Progress(0.75, "step 3")]
    assert job.result(timeout=PATIENCE_S) == "done"


def test_progress_can_be_followed_in_an_event_loop_and_by_any_program_over_http(
    program: Any, server: ServerProcess, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    Path(f"{gate}.1").touch()
    job = program.steps.submit(str(gate))

    async def follow() -> list[Progress]:
        return [told async for told in program.tasks.client.aio.job(job.job_id).progress()]

    url = f"{server.http_url}/v1/jobs/{job.job_id}/logs?stream=progress&wait=20"
    until(lambda: job.status().state == "RUNNING", PATIENCE_S, "it runs")
    answer = httpx.get(url, headers={"Authorization": f"Bearer {server.token}"}, timeout=30).json()
    assert answer["text"] == '{"fraction":0.25,"text":"step 1"}\n'
    following = program.tasks.client.begin(follow())
    for step in (2, 3):
        Path(f"{gate}.{step}").touch()
    followed = [told.text for told in following.result(PATIENCE_S)]
    assert (followed[-1], followed) == ("step 3", sorted(set(followed)))  # those before it may have come too early


# ---------------------------------------------------------------------------------------------------- in a folder of one's own

APP = """
from tasuki import Tasks

tasks = Tasks(data="own")


@tasks.task
def greet(name: str) -> str:
    return f"{greeting()}, {name}"


def greeting() -> str:
    return "Hello"


if __name__ == "__main__":
    print(greet.submit("world").result(timeout=30))
"""


def clean(**more: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if not name.startswith("TASUKI_")}, **more}


def run_app(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "app.py"], cwd=folder, env=clean(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_server_a_worker_starts_one_that_lives_as_long_and_reloads_changed_code(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    worker = ChildProcess([*TASUKI, "worker", "--tasks", "app:tasks", "--reload"], tmp_path / "worker.log", {}, cwd=tmp_path)
    with worker:
        worker.wait_for_output("connected to")
        assert list(tmp_path.glob("own/socket"))
        assert run_app(tmp_path) == "Hello, world\n"
        # when the code is broken, it waits for the next change; when it is repaired, the new code runs
        (tmp_path / "app.py").write_text("import nothing_there\n")
        worker.wait_for_output("No module named 'nothing_there'")
        (tmp_path / "app.py").write_text(APP.replace("Hello", "Good morning"))
        until(lambda: worker.output().count("connected to") == 2, PATIENCE_S, "the worker is back")
        assert run_app(tmp_path) == "Good morning, world\n"
        # and Ctrl-C ends it, and the embedded server with it
        worker.signal(signal.SIGINT)
        assert worker.wait(PATIENCE_S) == 0
        until(lambda: not list(tmp_path.glob("own/socket")), PATIENCE_S, "the embedded server is gone")


def test_no_worker_is_left_behind_by_a_reloading_process_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    worker = ChildProcess([*TASUKI, "worker", "--tasks", "app:tasks", "--reload"], tmp_path / "worker.log", {}, cwd=tmp_path)
    with worker:
        worker.wait_for_output("connected to")
        worker.signal(signal.SIGKILL)
        until(lambda: not list(tmp_path.glob("own/socket")), PATIENCE_S, "the worker is gone, and its server after it")


def test_reload_needs_tasks(tmp_path: Path) -> None:
    command = [*TASUKI, "worker", "--reload", "--any-program"]
    done = subprocess.run(command, cwd=tmp_path, env=clean(), capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, "--reload is for --tasks MODULE:NAME" in done.stderr) == (2, True)


def test_nobody_is_there_to_run_a_task_and_the_wait_says_so(program: Any) -> None:
    own = Tasks(program.tasks.client.aio._url)

    @own.task(subject="of.nobody")
    def lonely() -> None: ...

    with own, pytest.raises(DeadlineExceeded, match=r"No connected worker subscribes to 'of\.nobody'"):
        lonely.submit().result(timeout=0.2)


def test_a_wait_without_an_end_says_once_that_nobody_is_there(
    program: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(types, "HINT_AFTER_S", 0.1)
    client = program.tasks.client
    jobs = [client.submit(subject="of.nobody"), client.submit(subject="of.nobody")]
    waits = [job.begin_outcome() for job in jobs]
    until(lambda: caplog.messages, PATIENCE_S, "the warning")
    client.cancel(*(job.job_id for job in jobs))
    assert [one.result(PATIENCE_S).state for one in waits] == ["CANCELED"] * 2
    assert len(caplog.messages) == 1
    assert "still waits: No connected worker subscribes to 'of.nobody'" in caplog.text


def test_a_wait_that_is_over_shows_the_last_failure_with_its_traceback(program: Any) -> None:
    job = program.fails_for_now.submit("not yet")
    until(lambda: job.status().failures == 1, PATIENCE_S, "the first attempt has failed")
    with pytest.raises(DeadlineExceeded, match=r"retry 1 of 3 after RuntimeError: not yet") as late:
        job.result(timeout=0.1)
    assert "raise RuntimeError(message)\nRuntimeError: not yet" in "".join(late.value.__notes__)
    job.cancel()


def test_status_explain_and_dead_letters_show_the_traceback_of_the_last_failure(program: Any, server: ServerProcess) -> None:
    waiting, dead = program.fails_for_now.submit("not yet"), program.fails.submit("never")
    until(lambda: waiting.status().failures == 1, PATIENCE_S, "the first attempt has failed")
    assert dead.outcome(timeout=PATIENCE_S).state == "FAILED"

    for command, told in (
        (["status", waiting.job_id], "RuntimeError: not yet"),
        (["explain", waiting.job_id], "RuntimeError: not yet"),
        (["status", dead.job_id], "ValueError: never"),
        (["explain", dead.job_id], "ValueError: never"),
        (["dead", "show", dead.job_id], "ValueError: never"),
    ):
        shown = server.tasuki(*command).stdout
        assert shown.count("Traceback (most recent call last):") == 1, command
        assert f"        raise {told.split(':')[0]}(message)\n    {told}\n" in shown, command
    waiting.cancel()
