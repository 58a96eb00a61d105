"""Execs of kind python: jobs in a fork of a warm interpreter, and what happens when that is killed, hangs or cannot import."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tasuki.errors import Unavailable
from tasuki.worker.attempt import Attempt, RunResult, StopReason
from tasuki.worker.execs import parse_execs
from tasuki.worker.keeper import keeper as keeper_module
from tasuki.worker.keeper import preforked
from tasuki.worker.keeper.plain import PlainSystem
from tasuki.worker.linux_calls import look
from tasuki.worker.runner import CommandRunner
from tests.support.processes import alive, open_files, open_sockets
from tests.support.waiting import until, until_async
from tests.worker.keeper_stage import ESCAPE, in_s
from tests.worker.runs import attempt_of, run, run_async, runner_in, text_of

HERE = Path(__file__).parent


def runner_for(data: Path, function: str, options: dict[str, Any] | None = None, **settings: Any) -> CommandRunner:
    """A runner whose exec `job` calls a function of preforked_jobs.py, or `module:function`."""
    call = function if ":" in function else f"preforked_jobs:{function}"
    table = {"kind": "python", "call": call, "args": "any", "env": {"PYTHONPATH": str(HERE)}, **settings}
    return runner_in(data, *parse_execs({"job": table}).values(), **(options or {}))


def attempt_for(*arguments: str, **fields: Any) -> Attempt:
    attempt = attempt_of(exec="job", args=arguments, **fields)
    return msgspec.structs.replace(attempt, lease_id=f"lease-of-{attempt.spec.job_id}")


async def freeze(runner: CommandRunner) -> list[int]:
    """Stop the interpreter and what it has parked."""

    def found() -> list[int]:
        return [pid for pid in below(keeper_of(runner)) if alive(pid)]

    await until_async(lambda: len(found()) == 2, what="a process is parked")
    frozen = found()
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    return frozen


async def job_async(runner: CommandRunner, *arguments: str, meanwhile: Any = None, **fields: Any) -> RunResult:
    attempt = attempt_for(*arguments, **fields)
    try:
        return await run_async(runner, attempt, meanwhile)
    finally:
        await runner.cleanup(attempt)


def job(runner: CommandRunner, *arguments: str, **fields: Any) -> RunResult:
    return run(runner, attempt_for(*arguments, **fields))


def jobs(runner: CommandRunner, arguments: list[str]) -> list[RunResult]:
    """The results of one job for each argument, which run at the same time."""

    async def all_of_them() -> list[RunResult]:
        each = [job_async(runner, argument, job_id=f"job-{number}") for number, argument in enumerate(arguments)]
        return await asyncio.gather(*each)

    return asyncio.run(all_of_them())


def below(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def keeper_of(runner: CommandRunner) -> int:
    assert runner._keeper is not None
    return runner._keeper.pid


def interpreter_of(runner: CommandRunner) -> int:
    """Return the interpreter, which is older than the processes that it has parked."""
    return min((pid for pid in below(keeper_of(runner)) if _serves(pid)), key=lambda pid: (_born(pid), pid))


def _born(pid: int) -> int:
    seen = look(pid)
    assert seen is not None
    return seen.born


def _serves(pid: int) -> bool:
    """A forked job has the same command line; only the interpreter has a socket of the keeper's."""
    return open_sockets(pid) > 0


@pytest.fixture(params=["warm", "cold"])
def anyhow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways that there are: a function must not see a difference."""
    if request.param == "cold":
        monkeypatch.setattr(keeper_module, "system_for", lambda *_, **__: PlainSystem())
    return request.param


# ---------------------------------------------------------------------------------------------------- a function's end


RETURNED = [
    ("None", 0, ""),
    ("0", 0, ""),
    ("3", 3, ""),
    ("True", 1, ""),
    ("-1", 255, ""),
    ("256", 1, ""),  # not 0, as its lowest byte is
    ("1 << 70", 1, ""),
    ("'a word'", 1, "a word"),
    ("b'bytes'", 1, "bytes"),
    ("Unspeakable()", 1, "RuntimeError"),
    ("Odd(7)", 7, ""),
]


def test_what_a_function_returns_is_its_exit_code(tmp_path: Path) -> None:
    results = jobs(runner_for(tmp_path, "give"), [value for value, _, _ in RETURNED])

    for (value, exit_code, says), result in zip(RETURNED, results, strict=True):
        assert result.outcome.exit_code == exit_code, value
        assert says in text_of(result, "stderr.log"), value


ENDS = [
    ("sys.exit()", 0, None, ""),
    ("sys.exit(4)", 4, "EXIT_CODE", ""),
    ("sys.exit('a word')", 1, "EXIT_CODE", "a word"),
    ("raise ValueError('why')", 1, "EXIT_CODE", "ValueError: why"),
    ("raise KeyboardInterrupt", 130, "EXIT_CODE", "KeyboardInterrupt"),
    ("raise GeneratorExit", 1, "EXIT_CODE", "GeneratorExit"),
    ("sys.stdout.flush(); os._exit(9)", 9, "EXIT_CODE", ""),
    ("sys.stdout.flush(); os.abort()", 134, "SIGNAL", ""),
    ("sys.stdout.close()", 0, None, ""),
    ("os.close(1)", 120, "EXIT_CODE", ""),
]


def test_however_a_function_ends_its_outcome_says_so(tmp_path: Path, anyhow: str) -> None:
    results = jobs(runner_for(tmp_path, "leave"), [end for end, _, _, _ in ENDS])

    for (end, exit_code, error_code, says), result in zip(ENDS, results, strict=True):
        assert (result.outcome.exit_code, result.outcome.error_code) == (exit_code, error_code), end
        errors = text_of(result, "stderr.log")
        assert errors.startswith("on stderr\n"), end
        assert says in errors, end
        assert Path(preforked.__file__).name not in errors, end
        assert text_of(result) == ("" if end == "os.close(1)" else "before the end\n"), end


def test_threads_and_exit_handlers_come_to_their_end(tmp_path: Path, anyhow: str) -> None:
    result = job(runner_for(tmp_path, "last_words"))

    assert text_of(result) == "from the function\nfrom a thread\nat exit\n"
    assert result.outcome.exit_code == 3


# ---------------------------------------------------------------------------------------------------- what is a job's own


def test_a_function_has_the_jobs_arguments_folder_environment_and_standard_input(tmp_path: Path, anyhow: str) -> None:
    runner = runner_for(tmp_path, "show", allow_env=["SEED"], argv=["--fast", "{args}"], nice=3)

    shown = json.loads(text_of(job(runner, "two words", "$HOME", "ü", env={"SEED": "7"}, payload=b"given")))

    assert shown["arguments"] == shown["argv"][1:] == ["--fast", "two words", "$HOME", "ü"]
    assert shown["argv"][0] == "preforked_jobs:show"
    folder = runner.folders.at(attempt_of()).path
    assert (shown["cwd"], shown["tempdir"]) == (str(folder), str(folder / "tmp"))
    assert shown["stdin"] == "given"
    assert shown["env"]["SEED"] == "7"
    assert (shown["env"]["TASUKI_JOB_ID"], shown["env"]["TASUKI_ATTEMPT"]) == ("job-1", "3")
    assert shown["env"]["TASUKI_MARK"].endswith("/lease-of-job-1")
    assert shown["descriptors"] == [3, 4]  # for its progress, and the folder that it lists just now
    assert (shown["session"], shown["nice"]) == (True, os.nice(0) + 3)


def test_a_forked_function_is_the_keepers_own_child_and_hooks_have_run(tmp_path: Path) -> None:
    runner = runner_for(tmp_path, "show")

    shown = json.loads(text_of(job(runner)))

    assert shown["parent"] == keeper_of(runner)
    assert shown["forked"]


def test_what_a_job_changes_is_gone_with_it(tmp_path: Path) -> None:
    async def scenario() -> list[dict[str, Any]]:
        runner = runner_for(tmp_path, "show")
        return [json.loads(text_of(await job_async(runner))) for _ in range(2)]

    first, second = asyncio.run(scenario())

    assert (first["jobs"], second["jobs"]) == (1, 1)
    assert "LEFT_BEHIND" not in second["env"]
    assert first["random"] != second["random"]


def test_an_argument_with_a_nul_is_refused_and_the_next_job_runs(tmp_path: Path) -> None:
    async def scenario() -> list[RunResult]:
        runner = runner_for(tmp_path, "nothing")
        return [await job_async(runner, argument) for argument in ("a\0b", "b")]

    refused, fine = asyncio.run(scenario())

    assert refused.outcome.error_code == "PROGRAM_NOT_STARTED"
    assert fine.outcome.exit_code == 0


def test_a_very_long_argument_arrives_whole(tmp_path: Path) -> None:
    result = job(runner_for(tmp_path, "show"), "x" * 1_000_000)

    assert len(json.loads(text_of(result))["arguments"][0]) == 1_000_000


# ---------------------------------------------------------------------------------------------------- ends from outside


@pytest.mark.parametrize("how", ["canceled", "time limit", "lease", "its own end"])
def test_nothing_is_left_of_a_function_that_hides(tmp_path: Path, how: str) -> None:
    pids = tmp_path / "pids"
    pids.touch()
    words = ("leave",) if how == "its own end" else ()
    deadline: float | None = None

    def numbers() -> list[int]:
        return [int(line) for line in pids.read_text().split()]

    async def meanwhile(runner: CommandRunner, stop: asyncio.Future[StopReason]) -> None:
        nonlocal deadline
        await until_async(lambda: len(numbers()) == 2, what="the job has hidden its second process")
        if how == "canceled":
            stop.set_result(StopReason.CANCELED)
        elif how == "lease":
            deadline = in_s(0.1)
            runner.renewed()

    runner = runner_for(tmp_path / "data", "hide", {"lease_deadline": lambda lease_id: deadline})
    fields = {"timeout_s": 3.0} if how == "time limit" else {}
    result = run(runner, attempt_for(str(ESCAPE), str(pids), *words, **fields), meanwhile)

    codes = {"canceled": "CANCELED", "time limit": "TIMED_OUT", "lease": "LEASE_LOST", "its own end": None}
    assert result.outcome.error_code == codes[how]
    assert [pid for pid in numbers() if alive(pid)] == []


def test_the_end_of_one_job_leaves_another_of_the_same_interpreter_alone(tmp_path: Path) -> None:
    started, end = tmp_path / "started", tmp_path / "end"

    async def scenario() -> tuple[RunResult, RunResult]:
        runner = runner_for(tmp_path / "data", "wait_for")
        long = asyncio.ensure_future(job_async(runner, str(started), str(end)))
        await until_async(started.exists, what="the long job runs")
        stop: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
        other = attempt_for(str(tmp_path / "other"), str(tmp_path / "never"), job_id="other")
        short = asyncio.ensure_future(runner.run(other, stop))
        await until_async((tmp_path / "other").exists, what="the other job runs")
        stop.set_result(StopReason.CANCELED)
        canceled = await short
        end.touch()
        return canceled, await long

    canceled, finished = asyncio.run(scenario())

    assert canceled.outcome.error_code == "CANCELED"
    assert finished.outcome.error_code in (None, "EXIT_CODE")


def test_the_memory_limit_holds(tmp_path: Path) -> None:
    outcome = job(runner_for(tmp_path, "eat", memory_mb=100)).outcome

    assert outcome.error_code == "OOM"
    assert "100 MB" in outcome.message


def test_a_limit_below_what_is_imported_is_the_jobs_failure(tmp_path: Path) -> None:
    outcome = job(runner_for(tmp_path, "give", memory_mb=1), "'x' * (1 << 22)").outcome

    assert outcome.error_code in ("OOM", "EXIT_CODE")


def test_sixty_jobs_leave_no_process_and_no_descriptor(tmp_path: Path) -> None:
    async def left(runner: CommandRunner) -> tuple[int, int]:
        interpreter = interpreter_of(runner)
        await until_async(
            lambda: len(below(keeper_of(runner))) == 2, what="only the interpreter and its parked children are left"
        )
        await until_async(lambda: below(interpreter) == [], what="the interpreter is at rest")
        return open_files(keeper_of(runner)), open_files(interpreter)

    async def scenario() -> tuple[set[str | None], Any, Any]:
        runner = runner_for(tmp_path, "nothing")
        await job_async(runner)
        before = await left(runner)
        codes = set()
        for turn in range(3):
            results = [job_async(runner, job_id=f"job-{turn}-{number}") for number in range(20)]
            codes |= {result.outcome.error_code for result in await asyncio.gather(*results)}
        return codes, before, await left(runner)

    codes, before, after = asyncio.run(scenario())

    assert codes == {None}
    assert before == after


# ---------------------------------------------------------------------------------------------------- the interpreter's life


def test_a_job_goes_on_when_its_interpreter_is_killed_and_the_next_one_has_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preforked, "STEADY_S", 0.0)
    started, end = tmp_path / "started", tmp_path / "end"

    async def scenario() -> tuple[int, int | None, int, int]:
        runner = runner_for(tmp_path / "data", "wait_for")
        long = asyncio.ensure_future(job_async(runner, str(started), str(end)))
        await until_async(started.exists, what="the job runs")
        first = interpreter_of(runner)
        os.kill(first, signal.SIGKILL)
        await until_async(lambda: not alive(first), what="the interpreter is gone")
        end.touch()
        result = await long
        after = await job_async(runner, str(started), str(end))
        assert after.outcome.exit_code == keeper_of(runner) % 256
        return first, result.outcome.exit_code, keeper_of(runner) % 256, interpreter_of(runner)

    first, exit_code, expected, second = asyncio.run(scenario())

    assert exit_code == expected
    assert first != second


def test_an_interpreter_that_ends_as_soon_as_it_is_ready_is_not_started_over_and_over(tmp_path: Path) -> None:
    async def scenario() -> RunResult:
        runner = runner_for(tmp_path, "nothing")
        await job_async(runner)
        os.kill(interpreter_of(runner), signal.SIGKILL)
        await until_async(lambda: below(keeper_of(runner)) == [], what="the interpreter is gone")
        return await job_async(runner)

    outcome = asyncio.run(scenario()).outcome

    assert outcome.error_code == "PRELOAD_FAILED"
    assert "as soon as it was ready" in outcome.message


def test_an_import_that_fails_is_told_to_every_job_and_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(preforked, "RETRY_S", 0.3)

    async def scenario() -> tuple[RunResult, RunResult, RunResult]:
        runner = runner_for(tmp_path / "data", "missing_yet:main", env={"PYTHONPATH": str(tmp_path)})
        first = await job_async(runner)
        at_once = await job_async(runner)
        (tmp_path / "missing_yet.py").write_text("def main(arguments): return 5\n")
        later = at_once
        deadline = asyncio.get_running_loop().time() + 10
        while later.outcome.error_code == "PRELOAD_FAILED" and asyncio.get_running_loop().time() < deadline:
            later = await job_async(runner)
        return first, at_once, later

    first, at_once, later = asyncio.run(scenario())

    assert (first.outcome.error_code, first.outcome.permanent) == ("PRELOAD_FAILED", False)
    assert "ModuleNotFoundError: No module named 'missing_yet'" in first.outcome.message
    assert at_once.outcome == first.outcome
    assert later.outcome.exit_code == 5
    assert "exec 'job': its jobs are refused, the import failed: ModuleNotFoundError" in caplog.text


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='pump', daemon=True).start()", "'pump'"),
        ("import subprocess\nsubprocess.Popen(['sleep', '60'])", "started processes"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os\nos._exit(7)", "exit code 7"),
        ("import os\nos.abort()", "signal 6"),
        ("main = 3", "is not a function"),
        ("import os, socket\nos.write(32, b'garbage\\n')", "protocol"),
        ("this is no Python", "SyntaxError"),
    ],
    ids=["thread", "process", "SystemExit", "exit", "abort", "no function", "garbage", "syntax"],
)
def test_a_module_that_is_not_fit_to_be_forked_is_refused_in_words(tmp_path: Path, code: str, says: str) -> None:
    (tmp_path / "unfit.py").write_text(f"def main(arguments): pass\n{code}\n")
    runner = runner_for(tmp_path / "data", "unfit:main", env={"PYTHONPATH": str(tmp_path)})

    outcome = job(runner).outcome

    assert outcome.error_code == "PRELOAD_FAILED"
    assert says in outcome.message
    until(lambda: below(keeper_of(runner)) == [], what="nothing of the interpreter is left")


def test_a_thread_that_a_fork_hook_starts_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "hooked.py").write_text(
        "import os, threading, time\n"
        "def start(): threading.Thread(target=time.sleep, args=(60,), name='from a hook', daemon=True).start()\n"
        "os.register_at_fork(after_in_parent=start)\n"
        "def main(arguments): pass\n"
    )

    async def scenario() -> RunResult:
        runner = runner_for(tmp_path / "data", "hooked:main", env={"PYTHONPATH": str(tmp_path)})
        while True:  # what was parked before may take a job, and what was asked meanwhile is given back
            with contextlib.suppress(Unavailable):
                result = await job_async(runner)
                if result.outcome.error_code is not None:
                    return result

    outcome = asyncio.run(scenario()).outcome

    assert outcome.error_code == "PRELOAD_FAILED"
    assert "'from a hook'" in outcome.message


@pytest.mark.parametrize(
    ("interpreter", "says"), [("/no/such/python", "No such file"), ("/bin/false", "exit code 1")], ids=["missing", "no Python"]
)
def test_an_interpreter_that_is_none_is_refused_in_words(tmp_path: Path, interpreter: str, says: str) -> None:
    outcome = job(runner_for(tmp_path, "nothing", interpreter=interpreter)).outcome

    assert outcome.error_code in ("PRELOAD_FAILED", "PROGRAM_NOT_FOUND")
    assert interpreter in outcome.message or says in outcome.message


def test_modules_to_preload_are_there_before_the_first_job(tmp_path: Path) -> None:
    (tmp_path / "lookup.py").write_text("import sys\ndef main(arguments): return 'colorsys' in sys.modules\n")
    found = [
        job(runner_for(tmp_path / f"data{number}", "lookup:main", env={"PYTHONPATH": str(tmp_path)}, preload=preload)).outcome
        for number, preload in enumerate([[], ["colorsys"]])
    ]

    assert [outcome.exit_code for outcome in found] == [0, 1]


REHEARSING = """
import os
from pathlib import Path

HERE = Path(__file__).parent


def main(arguments):
    print(os.getpid())


main.rehearse = lambda: HERE.joinpath("rehearsed", str(os.getpid())).touch()
"""


def test_a_process_that_waits_for_a_job_rehearses_it(tmp_path: Path) -> None:
    (tmp_path / "play.py").write_text(REHEARSING)
    rehearsed = tmp_path / "rehearsed"
    rehearsed.mkdir()

    async def scenario() -> str:
        runner = runner_for(tmp_path / "data", "play:main", env={"PYTHONPATH": str(tmp_path)})
        first = text_of(await job_async(runner)).strip()
        await until_async(lambda: any(path.name != first for path in rehearsed.iterdir()), what="the next one has rehearsed")
        return text_of(await job_async(runner)).strip()

    assert asyncio.run(scenario()) in {path.name for path in rehearsed.iterdir()}


def test_a_job_that_is_canceled_while_its_interpreter_imports_never_runs(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\ndef main(arguments): pass\n")

    async def meanwhile(runner: CommandRunner, stop: asyncio.Future[StopReason]) -> None:
        await until_async(lambda: runner._running, what="the job waits")
        await until_async(lambda: below(keeper_of(runner)), what="the interpreter imports")
        stop.set_result(StopReason.CANCELED)

    runner = runner_for(tmp_path / "data", "slow:main", env={"PYTHONPATH": str(tmp_path)})
    result = run(runner, attempt_for(), meanwhile)

    assert result.outcome.error_code == "CANCELED"
    assert result.outcome.exit_code is None


def test_a_lease_that_ends_while_the_interpreter_imports_is_given_back(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\ndef main(arguments): pass\n")
    options = {"lease_deadline": lambda lease_id: in_s(0.2)}

    with pytest.raises(Unavailable):
        job(runner_for(tmp_path / "data", "slow:main", options, env={"PYTHONPATH": str(tmp_path)}))


def test_an_import_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preforked, "PRELOAD_S", 0.2)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\ndef main(arguments): pass\n")

    outcome = job(runner_for(tmp_path / "data", "slow:main", env={"PYTHONPATH": str(tmp_path)})).outcome

    assert outcome.error_code == "PRELOAD_FAILED"
    assert "was not done after 0.2 s" in outcome.message


def test_an_interpreter_that_hangs_is_killed_and_its_job_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preforked, "FORK_S", 0.2)
    monkeypatch.setattr(preforked, "STEADY_S", 0.0)

    async def scenario() -> RunResult:
        runner = runner_for(tmp_path, "nothing")
        await job_async(runner)
        await freeze(runner)
        with pytest.raises(Unavailable):
            await job_async(runner)
        return await job_async(runner)

    assert asyncio.run(scenario()).outcome.exit_code == 0


def test_a_job_that_its_interpreter_never_lives_to_fork_is_given_back_only_so_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preforked, "STEADY_S", 0.0)
    monkeypatch.setattr(preforked, "UNANSWERED_MAX", 2)

    async def scenario() -> tuple[RunResult, RunResult]:
        runner = runner_for(tmp_path, "nothing")

        async def killed_before_it_forks() -> RunResult:
            frozen = await freeze(runner)

            async def kill(*_: object) -> None:
                await until_async(lambda: runner._running, what="the job waits for its fork")
                assert runner._keeper is not None
                await until_async(
                    lambda: not runner._keeper._orders and not runner._keeper._socket._unsent, what="the keeper was asked"
                )
                for pid in frozen:
                    os.kill(pid, signal.SIGKILL)
                await until_async(lambda: not any(map(alive, frozen)), what="they are gone")

            return await job_async(runner, meanwhile=kill)

        await job_async(runner)
        with pytest.raises(Unavailable):
            await killed_before_it_forks()
        assert (await job_async(runner)).outcome.exit_code == 0, "one that forks counts from the start again"
        with pytest.raises(Unavailable):
            await killed_before_it_forks()
        return await killed_before_it_forks(), await job_async(runner)

    second, following = asyncio.run(scenario())

    for result in (second, following):
        assert result.outcome.error_code == "PRELOAD_FAILED"
        assert "ended 2 times with jobs" in result.outcome.message
        assert not result.outcome.permanent


@pytest.mark.parametrize("goes_on", [True, False], ids=["and goes on", "for ever"])
def test_a_stop_that_comes_while_the_interpreter_hangs_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    monkeypatch.setattr(preforked, "FORK_S", 60.0 if goes_on else 0.2)
    proof = tmp_path / "proof"

    async def scenario() -> RunResult:
        runner = runner_for(tmp_path / "data", "wait_for")
        (tmp_path / "end").touch()
        await job_async(runner, str(tmp_path / "first"), str(tmp_path / "end"))
        frozen = await freeze(runner)

        async def meanwhile(_: CommandRunner, stop: asyncio.Future[StopReason]) -> None:
            await until_async(lambda: runner._running, what="the job waits for its fork")
            assert runner._keeper is not None
            await until_async(
                lambda: not runner._keeper._orders and not runner._keeper._socket._unsent, what="the keeper was asked"
            )
            stop.set_result(StopReason.CANCELED)
            await asyncio.sleep(0)
            for pid in frozen if goes_on else ():
                os.kill(pid, signal.SIGCONT)

        return await job_async(runner, str(proof), str(tmp_path / "never"), meanwhile=meanwhile)

    assert asyncio.run(scenario()).outcome.error_code == "CANCELED"


def test_when_the_keeper_is_killed_the_interpreter_goes_and_the_job_is_swept(tmp_path: Path) -> None:
    started, never = tmp_path / "started", tmp_path / "never"

    async def scenario() -> tuple[RunResult, list[int]]:
        runner = runner_for(tmp_path / "data", "wait_for")
        running = asyncio.ensure_future(job_async(runner, str(started), str(never)))
        await until_async(lambda: started.exists() and started.read_text(), what="the job runs")
        pids = [int(started.read_text()), interpreter_of(runner)]
        os.kill(keeper_of(runner), signal.SIGKILL)
        return await running, pids

    result, pids = asyncio.run(scenario())

    assert result.outcome.error_code == "SHUTDOWN"
    until(lambda: not any(alive(pid) for pid in pids), what="job and interpreter are gone")


def test_where_none_can_be_kept_warm_the_worker_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper_module, "system_for", lambda *_, **__: PlainSystem())

    result = job(runner_for(tmp_path, "give"), "0")

    assert result.outcome.exit_code == 0
    assert "exec 'job': each job starts an interpreter of its own (this is not Linux)" in caplog.text


def test_the_program_of_the_interpreter_needs_nothing_but_the_standard_library() -> None:
    names = {name.partition(".")[0] for name in _imports(Path(preforked.PROGRAM).read_text())}

    assert names <= sys.stdlib_module_names


def _imports(source: str) -> set[str]:
    words = [line.split() for line in source.splitlines() if line.startswith(("import ", "from "))]
    return {line[1] for line in words}
