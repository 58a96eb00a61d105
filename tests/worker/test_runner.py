"""Commands run as real processes: what they get, how they end, and that nothing of them stays."""

import asyncio
import errno
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import uvloop

from tasuki.core.job import RESULT_INLINE_MAX_BYTES, InputFile, body_hash
from tasuki.errors import DiskFull, Unavailable
from tasuki.worker.attempt import Attempt, StopReason
from tasuki.worker.keeper.client import Keeper, KeptAttempt
from tasuki.worker.keeper.linux import sweep
from tasuki.worker.logs import LogCaps
from tasuki.worker.results import OutputRules
from tasuki.worker.runner import CommandRunner
from tests.support.processes import alive
from tests.support.waiting import until_async
from tests.worker.runs import OWNER, attempt_of, exec_of, names_of, no_fetch, report_of, run, run_async, runner_in, shell, text_of

Stop = asyncio.Future[StopReason]


def pids_in(path: Path) -> list[int]:
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


# ---------------------------------------------------------------------------------------------------- success


def test_a_command_succeeds_with_its_logs_report_and_outputs(tmp_path: Path) -> None:
    attempt = shell("echo hello; echo oops >&2; echo data > out/a.txt; mkdir out/deep; echo more > out/deep/b.txt")

    result = run(runner_in(tmp_path), attempt)

    assert (result.outcome.exit_code, result.outcome.error_code) == (0, None)
    assert names_of(result) == ["out/a.txt", "out/deep/b.txt", "result.json", "stderr.log", "stdout.log"]
    assert (text_of(result), text_of(result, "stderr.log")) == ("hello\n", "oops\n")
    assert text_of(result, "out/deep/b.txt") == "more\n"
    report = report_of(result)
    assert (report["job_id"], report["attempt"], report["exit_code"]) == ("job-1", 3, 0)
    assert report["input_hash"] == body_hash(attempt.spec).hex()
    assert [(output["name"], output["size_bytes"]) for output in report["outputs"]] == [("out/a.txt", 5), ("out/deep/b.txt", 5)]
    assert report["started_at"] <= report["finished_at"]
    assert report["host"]
    assert report["cut_logs"] == {}


def test_a_command_runs_on_uvloop_too(tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        result = loop.run(run_async(runner_in(tmp_path), shell("echo hello; sleep 0.05")))

    assert text_of(result) == "hello\n"


def test_the_payload_is_the_standard_input(tmp_path: Path) -> None:
    assert text_of(run(runner_in(tmp_path), attempt_of(exec="cat", payload=b"what was sent"))) == "what was sent"


def test_without_a_payload_the_standard_input_is_empty(tmp_path: Path) -> None:
    assert text_of(run(runner_in(tmp_path), attempt_of(exec="cat"))) == ""


def test_the_start_is_told_once_the_process_runs_and_never_for_a_refusal(tmp_path: Path) -> None:
    async def starts(*attempts: Attempt) -> list[str]:
        told: list[str] = []
        runner = runner_in(tmp_path, exec_of("true"))
        for attempt in attempts:
            stop: Stop = asyncio.get_running_loop().create_future()
            await runner.run(attempt, stop, lambda job_id=attempt.spec.job_id: told.append(job_id))
        return told

    runs, refused = attempt_of(job_id="runs", exec="tool"), attempt_of(job_id="refused", exec="tool", args=("x",))

    assert asyncio.run(starts(runs, refused)) == ["runs"]


def test_the_folder_goes_when_the_result_is_recorded(tmp_path: Path) -> None:
    runner = runner_in(tmp_path)
    attempt = shell("mkdir -p out/locked; touch out/locked/file; chmod 0 out/locked")
    run(runner, attempt)
    assert runner.folders.at(attempt).path.exists()

    asyncio.run(runner.cleanup(attempt))

    assert not runner.folders.at(attempt).path.exists()


def test_a_folder_that_was_left_as_it_was_serves_the_next_job_and_shows_nothing_of_the_last(tmp_path: Path) -> None:
    runner = runner_in(tmp_path)
    first, second = shell("echo secret; echo secret >&2", job_id="first"), shell("ls -A . in out tmp", job_id="second")
    run(runner, first)
    assert runner.folders.recycle(first)
    assert runner.folders.is_quick(second)

    result = run(runner, second)

    assert text_of(result).split() == [".:", "in", "log", "out", "tmp", "in:", "out:", "tmp:"]
    assert text_of(result, "stderr.log") == ""


@pytest.mark.parametrize(
    "trace",
    [
        "echo x > extra",
        "echo x > out/file",
        "touch tmp/.hidden",
        "chmod 755 in",
        "rmdir in; ln -s /etc in",
        "ln log/stdout log/other",
        "ln log/stdout ../kept",
        "rm log/stderr; ln -s /etc/passwd log/stderr",
        "chmod 644 log/stdout",
        "head -c 1000000 /dev/zero",
        "mv in in2; mkdir in; chmod 700 in in2",
    ],
)
def test_a_folder_that_a_job_has_changed_is_not_used_again(tmp_path: Path, trace: str) -> None:
    runner = runner_in(tmp_path)
    attempt = shell(trace)
    assert run(runner, attempt).outcome.exit_code == 0

    assert not runner.folders.recycle(attempt)
    asyncio.run(runner.cleanup(attempt))

    assert not runner.folders.is_quick(attempt)
    assert not runner.folders.at(attempt).path.exists()


def test_spare_folders_go_with_their_worker(tmp_path: Path) -> None:
    async def scenario() -> None:
        runner = CommandRunner(
            tmp_path, {}, incarnation="short", fetch=no_fetch, may_run_any=lambda attempt: attempt.submitter == OWNER
        )
        for job_id in ("a", "b"):
            await run_async(runner, shell("true", job_id=job_id))
            assert runner.folders.recycle(shell("true", job_id=job_id))
        runner.close()

    asyncio.run(scenario())

    assert list((tmp_path / "runs").iterdir()) == []


# ---------------------------------------------------------------------------------------------------- environment


def test_a_job_sees_nothing_of_the_workers_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASUKI_TOKEN", "a secret")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    tool = exec_of("env", "-0", env={"THREADS": "4"}, allow_env=("SEED",))

    result = run(runner_in(tmp_path, tool), attempt_of(exec="tool", env={"SEED": "7"}))

    seen = dict(entry.split("=", 1) for entry in text_of(result).split("\0") if entry)
    assert set(seen) <= {
        *("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "THREADS", "SEED"),
        *("TASUKI_JOB_ID", "TASUKI_ATTEMPT", "TASUKI_IN", "TASUKI_OUT", "TASUKI_MARK", "TASUKI_PROGRESS_FD"),
    }
    assert (seen["THREADS"], seen["SEED"]) == ("4", "7")
    assert (seen["TASUKI_JOB_ID"], seen["TASUKI_ATTEMPT"]) == ("job-1", "3")
    assert seen["TASUKI_MARK"].endswith("/lease-1")


def test_a_job_has_a_folder_of_its_own_to_work_in(tmp_path: Path) -> None:
    result = run(
        runner_in(tmp_path), shell('cd "$TASUKI_OUT/.." && pwd -P; ls; test -d "$TMPDIR"; test "$TASUKI_IN" = "$PWD/in"')
    )

    folder, *names = text_of(result).split()
    assert Path(folder).is_relative_to(tmp_path)
    assert {"in", "out", "tmp"} <= set(names)
    assert result.outcome.exit_code == 0


def test_a_job_of_the_own_user_runs_in_that_users_folder_and_an_exec_where_its_operator_says(tmp_path: Path) -> None:
    runner = runner_in(tmp_path / "data", exec_of("pwd"))
    (study := tmp_path / "study").mkdir()

    own = run(runner, shell('pwd; echo kept > "$TASUKI_OUT/kept"', cwd=str(study)))
    listed = run(runner, attempt_of(job_id="job-2", exec="tool", cwd=str(study)))

    assert text_of(own) == f"{study}\n"
    assert text_of(own, "out/kept") == "kept\n"
    assert Path(text_of(listed).strip()).is_relative_to(tmp_path / "data")


def test_no_descriptor_of_the_worker_is_passed_on(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as opened:
        os.set_inheritable(opened.fileno(), True)
        result = run(runner_in(tmp_path), attempt_of(exec="ls", args=("/proc/self/fd",)))

    assert len(text_of(result).split()) == 5  # 0, 1, 2, that for progress, and the one ls itself reads the folder with


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "error_code", "says"),
    [
        ({"exec": "other"}, "EXEC_NOT_ALLOWED", "allowed: tool"),
        ({"exec": "tool", "args": ("-x",)}, "ARGS_NOT_ALLOWED", "takes no arguments"),
        ({"exec": "tool", "env": {"LD_PRELOAD": "/evil.so"}}, "ENV_NOT_ALLOWED", "LD_PRELOAD"),
        ({"exec": "tool", "env": {"TASUKI_ATTEMPT": "9"}}, "ENV_NOT_ALLOWED", "TASUKI_ATTEMPT"),
        ({"exec": "tool", "files": (InputFile("../evil", data=b""),)}, "BAD_INPUT", "../evil"),
        ({"exec": "tool", "files": (InputFile("a", cache_id="c"),)}, "BAD_INPUT", "no bytes"),
    ],
)
def test_what_is_not_allowed_is_refused_for_good(tmp_path: Path, fields: dict, error_code: str, says: str) -> None:
    proof = tmp_path / "proof"
    tool = exec_of("touch", str(proof))

    outcome = run(runner_in(tmp_path, tool, any_program_for=None), attempt_of(**fields)).outcome

    assert (outcome.error_code, outcome.permanent) == (error_code, True)
    assert says in outcome.message
    assert not proof.exists()


def test_any_program_is_only_for_the_one_who_may(tmp_path: Path) -> None:
    outcome = run(runner_in(tmp_path), shell("true", submitter="uid:other")).outcome

    assert outcome.error_code == "EXEC_NOT_ALLOWED"


def test_any_program_may_have_any_environment_but_not_ours(tmp_path: Path) -> None:
    runner = runner_in(tmp_path)

    assert text_of(run(runner, shell("echo $ANY", env={"ANY": "thing"}))) == "thing\n"
    refused = run(runner, shell("true", job_id="job-2", env={"TASUKI_JOB_ID": "x"})).outcome
    assert refused.error_code == "ENV_NOT_ALLOWED"


@pytest.mark.parametrize("program", ["no-such-program", "/no/such/program"])
def test_a_missing_program_fails_for_good_and_is_named(tmp_path: Path, program: str) -> None:
    outcome = run(runner_in(tmp_path, exec_of(program)), attempt_of(exec="tool")).outcome

    assert (outcome.error_code, outcome.permanent) == ("PROGRAM_NOT_FOUND", True)
    assert repr(program) in outcome.message


def test_a_working_folder_that_only_this_machine_lacks_is_not_the_sender_s_mistake(tmp_path: Path) -> None:
    outcome = run(runner_in(tmp_path, exec_of("true", cwd="/no/such/folder")), attempt_of(exec="tool")).outcome

    assert (outcome.error_code, outcome.permanent) == ("PROGRAM_NOT_STARTED", True)
    assert "'/no/such/folder'" in outcome.message


def test_a_missing_interpreter_fails_for_good_and_the_program_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)

    outcome = run(runner_in(tmp_path, exec_of(str(script))), attempt_of(exec="tool")).outcome

    assert (outcome.error_code, outcome.permanent) == ("PROGRAM_NOT_FOUND", True)
    assert str(script) in outcome.message


def test_below_the_disk_floor_nothing_starts_and_the_lease_can_be_given_back(tmp_path: Path) -> None:
    runner = runner_in(tmp_path, floor_free_bytes=1 << 60)

    with pytest.raises(DiskFull, match="must stay free"):
        run(runner, shell("true"))


# ---------------------------------------------------------------------------------------------------- inputs


def blob(name: str, data: bytes) -> InputFile:
    return InputFile(name, sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))


def test_inputs_inline_and_fetched_lie_in_the_folder(tmp_path: Path) -> None:
    async def fetch(job_id: str, sha256: str, size_bytes: int, target: Path) -> None:
        target.write_bytes(b"fetched")

    files = (InputFile("a", data=b"inline "), blob("sub/b", b"fetched"))

    result = run(runner_in(tmp_path, fetch=fetch), shell("cat in/a in/sub/b", files=files))

    assert text_of(result) == "inline fetched"


@pytest.mark.parametrize("arrived", [b"fetcheD", b"fetched and more", b""])
def test_an_input_that_is_not_what_was_announced_is_corrupt_and_nothing_runs(tmp_path: Path, arrived: bytes) -> None:
    async def fetch(job_id: str, sha256: str, size_bytes: int, target: Path) -> None:
        target.write_bytes(arrived)

    proof = tmp_path / "proof"
    attempt = shell(f"touch {proof}", files=(blob("b", b"fetched"),))

    outcome = run(runner_in(tmp_path, fetch=fetch), attempt).outcome

    assert (outcome.error_code, outcome.permanent) == ("CORRUPT", False)
    assert "'b'" in outcome.message
    assert not proof.exists()


def test_a_fetch_without_connection_is_not_the_jobs_fault(tmp_path: Path) -> None:
    async def fetch(job_id: str, sha256: str, size_bytes: int, target: Path) -> None:
        raise Unavailable("connection lost")

    with pytest.raises(Unavailable, match="connection lost"):
        run(runner_in(tmp_path, fetch=fetch), shell("true", files=(blob("b", b"x"),)))


def test_a_stop_ends_a_fetch_that_hangs(tmp_path: Path) -> None:
    fetching = asyncio.Event()

    async def fetch(job_id: str, sha256: str, size_bytes: int, target: Path) -> None:
        fetching.set()
        await asyncio.Event().wait()

    async def cancel(_: CommandRunner, stop: Stop) -> None:
        await fetching.wait()
        stop.set_result(StopReason.CANCELED)

    outcome = run(runner_in(tmp_path, fetch=fetch), shell("true", files=(blob("b", b"x"),)), cancel).outcome

    assert outcome.error_code == "CANCELED"


def test_a_job_that_was_not_started_when_its_worker_ends_is_given_back(tmp_path: Path) -> None:
    fetching = asyncio.Event()

    async def fetch(job_id: str, sha256: str, size_bytes: int, target: Path) -> None:
        fetching.set()
        await asyncio.Event().wait()

    async def end(_: CommandRunner, stop: Stop) -> None:
        await fetching.wait()
        stop.set_result(StopReason.SHUTDOWN)

    with pytest.raises(Unavailable, match="shutting down"):
        run(runner_in(tmp_path, fetch=fetch), shell("true", files=(blob("b", b"x"),)), end)


# ---------------------------------------------------------------------------------------------------- ends


def test_an_exit_code_is_a_failure_that_keeps_its_logs(tmp_path: Path) -> None:
    result = run(runner_in(tmp_path), shell("echo why; exit 7"))

    assert (result.outcome.error_code, result.outcome.exit_code) == ("EXIT_CODE", 7)
    assert not result.outcome.permanent
    assert text_of(result) == "why\n"
    assert report_of(result)["exit_code"] == 7


def test_a_signal_is_named(tmp_path: Path) -> None:
    result = run(runner_in(tmp_path), shell("kill -SEGV $$"))

    assert (result.outcome.error_code, result.outcome.exit_code) == ("SIGNAL", 128 + signal.SIGSEGV)
    assert "SIGSEGV" in result.outcome.message
    assert report_of(result)["signal"] == "SIGSEGV"


def test_what_a_job_leaves_running_in_its_group_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    result = run(runner_in(tmp_path), shell(f"sleep 1000 & echo $! > {pids}"))

    assert result.outcome.exit_code == 0
    assert not alive(*pids_in(pids))


def test_a_time_limit_kills_a_group_that_ignores_term(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    deaf = f"trap '' TERM; echo $$ >> {pids}; (sleep 1000) & echo $! >> {pids}; echo ready; while :; do sleep 0.1; done"

    before = time.monotonic()
    result = run(runner_in(tmp_path), shell(deaf, timeout_s=0.5))

    assert result.outcome.error_code == "TIMED_OUT"
    assert "0.5s" in result.outcome.message
    assert time.monotonic() - before >= 0.5 + 0.3
    assert len(pids_in(pids)) == 2
    assert not [pid for pid in pids_in(pids) if alive(pid)]
    assert text_of(result) == "ready\n"


def test_the_execs_own_time_limit_holds_for_jobs_without_one(tmp_path: Path) -> None:
    runner = runner_in(tmp_path, exec_of("sleep", "1000", timeout_s=0.1))

    assert run(runner, attempt_of(exec="tool")).outcome.error_code == "TIMED_OUT"


def test_a_canceled_job_hears_term_and_may_end_in_order(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    # The child is what handles TERM here: it has the grace although its parent dies at once.
    script = f"sh -c 'trap \"echo bye; exit 0\" TERM; touch {ready}; while :; do sleep 0.02; done' & wait"

    async def cancel(_: CommandRunner, stop: Stop) -> None:
        await until_async(ready.exists, what="the job is ready")
        stop.set_result(StopReason.CANCELED)

    result = run(runner_in(tmp_path, grace_s=5), shell(script), cancel)

    assert result.outcome.error_code == "CANCELED"
    assert text_of(result) == "bye\n"


def test_what_else_runs_in_the_folder_of_a_job_survives_its_cancel_and_every_sweep(tmp_path: Path) -> None:
    (study := tmp_path / "study").mkdir()
    pids = tmp_path / "pids"
    # A process that only works in the folder and writes there, with no terminal: somebody's script, or an editor.
    with (study / "notes").open("w") as notes:
        bystander = subprocess.Popen(["sleep", "600"], cwd=study, stdout=notes, start_new_session=True)
    runner = runner_in(tmp_path / "data")

    async def cancel(_: CommandRunner, stop: Stop) -> None:
        await until_async(lambda: pids_in(pids), what="the job has started")
        stop.set_result(StopReason.CANCELED)

    hidden = f"setsid sleep 600 & echo $! > {pids}; wait"
    try:
        result = run(runner, shell(hidden, cwd=str(study)), cancel)
        killed = sweep(runner.folders.root.name, runner.folders.root)

        assert (result.outcome.error_code, killed) == ("CANCELED", [])
        assert not alive(*pids_in(pids))
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_stopped_process_can_be_canceled(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def cancel(_: CommandRunner, stop: Stop) -> None:
        await until_async(lambda: pids_in(pids), what="the job has started")
        os.kill(pids_in(pids)[0], signal.SIGSTOP)
        stop.set_result(StopReason.CANCELED)

    before = time.monotonic()
    outcome = run(runner_in(tmp_path, grace_s=8), shell(f"echo $$ > {pids}; exec sleep 1000"), cancel).outcome

    assert outcome.error_code == "CANCELED"
    assert time.monotonic() - before < 8


@pytest.mark.parametrize("reason", [StopReason.LEASE_LOST, StopReason.SHUTDOWN])
def test_the_reason_of_a_stop_is_the_outcomes_error_code(tmp_path: Path, reason: StopReason) -> None:
    pids = tmp_path / "pids"

    async def end(_: CommandRunner, stop: Stop) -> None:
        await until_async(lambda: pids_in(pids), what="the job has started")
        stop.set_result(reason)

    outcome = run(runner_in(tmp_path), shell(f"echo $$ > {pids}; exec sleep 1000"), end).outcome

    assert outcome.error_code == reason.value
    assert not alive(*pids_in(pids))
    assert (outcome.result is None) == (reason is StopReason.LEASE_LOST)


def test_a_job_that_is_stopped_before_it_starts_never_runs(tmp_path: Path) -> None:
    proof = tmp_path / "proof"

    async def scenario() -> str | None:
        stop: Stop = asyncio.get_running_loop().create_future()
        stop.set_result(StopReason.CANCELED)
        return (await runner_in(tmp_path).run(shell(f"touch {proof}"), stop)).outcome.error_code

    assert asyncio.run(scenario()) == "CANCELED"
    assert not proof.exists()


def test_a_canceled_task_leaves_no_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def scenario() -> None:
        running = asyncio.ensure_future(run_async(runner_in(tmp_path), shell(f"echo $$ > {pids}; exec sleep 1000")))
        await until_async(lambda: pids_in(pids), what="the job has started")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())
    assert not alive(*pids_in(pids))


def test_kill_all_ends_every_job_at_once(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def kill(runner: CommandRunner, _: Stop) -> None:
        await until_async(lambda: pids_in(pids), what="the job has started")
        runner.kill_all()

    outcome = run(runner_in(tmp_path), shell(f"echo $$ > {pids}; exec sleep 1000"), kill).outcome

    assert (outcome.error_code, outcome.exit_code) == ("SHUTDOWN", 128 + signal.SIGKILL)
    assert not alive(*pids_in(pids))


def test_many_jobs_at_once_need_no_thread_each(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    async def scenario() -> tuple[int, list[int | None]]:
        runner = runner_in(tmp_path)
        script = f"touch {tmp_path}/started-$TASUKI_JOB_ID; until [ -e {gate} ]; do sleep 0.1; done"
        running = [asyncio.ensure_future(run_async(runner, shell(script, job_id=f"job-{n}"))) for n in range(40)]
        await until_async(lambda: len(list(tmp_path.glob("started-*"))) == 40, what="all jobs run")
        threads = threading.active_count()
        gate.touch()
        return threads, [result.outcome.exit_code for result in await asyncio.gather(*running)]

    threads, codes = asyncio.run(scenario())

    assert codes == [0] * 40
    assert threads < 40


# ---------------------------------------------------------------------------------------------------- logs and results


def test_endless_output_is_cut_and_the_cut_is_marked(tmp_path: Path) -> None:
    caps = LogCaps(head_bytes=48 * 1024, tail_bytes=16 * 1024)

    def is_cut(log: Path) -> bool:
        size = log.stat()
        return size.st_blocks * 512 < size.st_size

    async def watch(runner: CommandRunner, stop: Stop) -> None:
        log = runner.folders.at(attempt).path / "log/stdout"
        await until_async(log.exists, what="the log is there")
        await until_async(lambda: is_cut(log), what="the log is cut while the job writes on")
        stop.set_result(StopReason.CANCELED)

    attempt = shell("echo first; while :; do echo and on and on and on; done")
    result = run(runner_in(tmp_path, log_caps=caps), attempt, watch)

    text = text_of(result)
    cut_bytes = report_of(result)["cut_logs"]["stdout"]["cut_bytes"]
    assert text.startswith("first\n")
    assert text.endswith("and on\n")
    assert f"[tasuki: {cut_bytes} bytes were cut here]" in text
    assert cut_bytes > 0
    assert len(text) <= caps.cap_bytes + 100


@pytest.mark.parametrize("extra_bytes", [0, 1])
def test_a_result_is_inline_up_to_the_limit_and_a_file_above(tmp_path: Path, extra_bytes: int) -> None:
    noise = tmp_path / "noise"
    noise.write_bytes(os.urandom(RESULT_INLINE_MAX_BYTES + 1024))
    runner = runner_in(tmp_path)

    result = run(runner, attempt_of(exec="head", args=("-c", str(RESULT_INLINE_MAX_BYTES * extra_bytes + 1000), str(noise))))

    outcome = result.outcome
    if extra_bytes:
        assert result.result_file is not None
        data = result.result_file.read_bytes()
        assert outcome.result is None
        assert outcome.result_ref is not None
        assert (outcome.result_ref.sha256, outcome.result_ref.size_bytes) == (outcome.result_sha256, len(data))
    else:
        assert (result.result_file, outcome.result_ref) == (None, None)
        assert outcome.result is not None
        data = outcome.result
    assert hashlib.sha256(data).hexdigest() == outcome.result_sha256


def test_only_what_the_globs_of_the_exec_name_is_taken(tmp_path: Path) -> None:
    tool = exec_of(
        "sh", "-c", "touch out/a.csv out/b.tmp; mkdir out/d; touch out/d/c.csv", outputs=OutputRules(globs=("out/*.csv",))
    )

    result = run(runner_in(tmp_path, tool), attempt_of(exec="tool"))

    assert names_of(result) == ["out/a.csv", "result.json", "stderr.log", "stdout.log"]


def test_a_job_that_removes_its_own_folder_still_has_a_result(tmp_path: Path) -> None:
    result = run(runner_in(tmp_path), shell('echo hello; rm -rf "$TASUKI_OUT/.."'))

    assert text_of(result) == "hello\n"


# ---------------------------------------------------------------------------------------------------- sweeping

DOOMED_WORKER = """
import asyncio, sys
from pathlib import Path
from tests.worker.runs import run, runner_in, shell
run(runner_in(Path(sys.argv[1]), incarnation="doomed"), shell("echo $$ > " + sys.argv[2] + "; exec sleep 1000"))
"""


def test_a_start_kills_and_removes_what_a_dead_worker_left_but_not_what_a_live_one_uses(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    live = runner_in(tmp_path)
    kept = live.folders.create(shell("true"))
    worker = subprocess.Popen([sys.executable, "-c", DOOMED_WORKER, str(tmp_path), str(pids)], cwd=Path(__file__).parents[2])
    asyncio.run(until_async(lambda: pids_in(pids), what="the job has started"))
    worker.kill()
    worker.wait()

    swept = asyncio.run(runner_in(tmp_path).sweep())

    assert [path.name for path in swept] == ["doomed"]
    assert not swept[0].exists()
    asyncio.run(until_async(lambda: not alive(*pids_in(pids)), what="the survivor is dead"))
    assert kept.path.exists()


def test_a_run_folder_that_cannot_be_used_is_the_attempts_end_and_not_the_workers(tmp_path: Path) -> None:
    runner = runner_in(tmp_path)
    attempt = shell("true")
    runner.folders.create(attempt)

    outcome = run(runner, attempt).outcome

    assert (outcome.error_code, outcome.permanent) == ("RUN_FOLDER", False)
    assert "exists" in outcome.message
    assert str(tmp_path) not in outcome.message  # it goes to the client


def test_a_machine_without_room_for_another_process_gives_the_job_back(tmp_path: Path) -> None:
    runner = runner_in(tmp_path, keeper=RefusingKeeper(errno.EAGAIN))

    with pytest.raises(Unavailable, match="try again"):
        run(runner, shell("true"))


class RefusingKeeper(Keeper):
    """One whose every start fails with the same error number."""

    def __init__(self, number: int) -> None:
        super().__init__(socket.socket(), os.getpid())
        self._number = number

    def close(self) -> None:
        """There is no process to end."""
        self._control.close()

    def spawn(self, **_: object) -> KeptAttempt:
        kept = KeptAttempt(1, asyncio.get_running_loop())
        kept.fail(OSError(self._number, os.strerror(self._number)))
        return kept


def test_the_report_is_json_that_anyone_can_read(tmp_path: Path) -> None:
    result = run(runner_in(tmp_path), shell("touch 'out/b\\a'"))

    report = json.loads(text_of(result, "result.json"))
    assert [entry["name"] for entry in report["left_out"]] == ["out/b\\a"]
    assert result.outcome.meta["left_out"] == 1
