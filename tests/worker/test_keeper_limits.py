"""Limits of an exec: the job that passes one is ended or refused more, the worker goes on, and the outcome says why."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tasuki.core.job import Outcome
from tasuki.worker.attempt import ended_outcome
from tasuki.worker.keeper.protocol import EndReason, Limits, TreeEnded
from tests.conftest import Require
from tests.support.processes import alive
from tests.worker.runs import attempt_of, exec_of, opened, run, runner_in, text_of

# Not so fast that it meets the hard limit of one process before the keeper has looked.
EATS_MEMORY = """
import time
held = []
while True:
    held.append(bytearray(2 << 20))
    time.sleep(0.01)
"""
BOMB_MARK = b"bomb %d" % os.getpid()
FORK_BOMB = f"""
# {BOMB_MARK.decode()}
import os, time
os.setsid() if os.fork() == 0 else None
while True:
    os.fork()
    time.sleep(0.01)
"""


def outcome_of(tmp_path: Path, script: str, **limits: int) -> Outcome:
    tool = exec_of(sys.executable, "-I", "-S", "-c", script, limits=Limits(**limits))
    runner = runner_in(tmp_path, tool)
    outcome = run(runner, attempt_of(exec="tool")).outcome
    again = run(runner, attempt_of(job_id="job-2", exec="sh", args=("-c", "exit 0"))).outcome
    assert again.exit_code == 0, "the worker is as good as before"
    return outcome


def test_a_job_that_eats_memory_is_killed_and_the_outcome_says_so(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, EATS_MEMORY, memory_mb=64)

    assert (outcome.error_code, outcome.exit_code) == ("OOM", 128 + signal.SIGKILL)
    assert "its limit is 64 MB" in outcome.message
    assert not outcome.permanent


def test_one_process_cannot_have_more_than_twice_the_memory_between_two_looks(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, "try: bytearray(1 << 30)\nexcept MemoryError: raise SystemExit(9)", memory_mb=64)

    assert (outcome.error_code, outcome.exit_code) == ("EXIT_CODE", 9)


def test_the_memory_of_all_processes_counts_together(tmp_path: Path) -> None:
    script = "import os, time\nfor _ in range(4): os.fork()\nheld = bytearray(16 << 20)\ntime.sleep(30)"

    assert outcome_of(tmp_path, script, memory_mb=100).error_code == "OOM"


def test_a_fork_bomb_is_killed_to_the_last_process(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, FORK_BOMB, processes=20)

    assert outcome.error_code == "PROCESS_LIMIT"
    assert "its limit is 20" in outcome.message
    left = [path for path in Path("/proc").glob("[0-9]*") if alive(int(path.name)) and BOMB_MARK in _command_line(path)]
    assert left == []


def _command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_processor_time_is_limited(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, "while True: pass", cpu_seconds=1)

    assert (outcome.error_code, outcome.meta["signal"]) == ("CPU_LIMIT", "SIGXCPU")
    assert "1 s of processor time" in outcome.message


def test_a_file_cannot_grow_past_its_limit(tmp_path: Path) -> None:
    tool = exec_of("/bin/sh", "-c", "exec cat /dev/zero > out/large", limits=Limits(file_size_mb=2))
    runner = runner_in(tmp_path, tool)
    attempt = attempt_of(exec="tool")

    outcome = run(runner, attempt).outcome

    assert (outcome.error_code, outcome.meta["signal"]) == ("FILE_SIZE_LIMIT", "SIGXFSZ")
    assert "2 MB" in outcome.message
    assert (runner.folders.at(attempt).path / "out/large").stat().st_size == 2 << 20


def test_a_job_that_fills_the_disk_fails_with_the_reason_and_the_worker_goes_on(tmp_path: Path, require: Require) -> None:
    require("a small file system", os.geteuid() == 0, "mounting one needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], check=True)
    try:
        tool = exec_of("/bin/sh", "-c", "cat /dev/zero > out/large; exit 3")
        runner = runner_in(tmp_path, tool)
        attempt = attempt_of(exec="tool")

        outcome = run(runner, attempt).outcome

        assert (outcome.error_code, outcome.exit_code) == ("EXIT_CODE", 3)
        assert "bytes free" in outcome.message
        asyncio.run(runner.cleanup(attempt))
        assert run(runner, attempt_of(job_id="job-2", exec="true")).outcome.exit_code == 0
    finally:
        while opened:
            opened.pop().close()
        subprocess.run(["umount", tmp_path], check=True)


def test_open_files_and_nice_are_as_the_exec_says_from_the_first_instruction_on(tmp_path: Path) -> None:
    tool = exec_of("/bin/sh", "-c", "ulimit -n; ulimit -Hn; nice", limits=Limits(open_files=40, nice=7))

    numbers = text_of(run(runner_in(tmp_path, tool), attempt_of(exec="tool"))).split()

    assert numbers == ["40", "40", str(os.nice(0) + 7)]


def test_no_limits_are_left_with_the_next_job(tmp_path: Path) -> None:
    limited = exec_of("/bin/sh", "-c", "ulimit -n; ulimit -f", name="limited", limits=Limits(open_files=40, file_size_mb=1))
    free = exec_of("/bin/sh", "-c", "ulimit -n; ulimit -f", name="free")
    runner = runner_in(tmp_path, limited, free)
    run(runner, attempt_of(exec="limited"))

    files, file_size = text_of(run(runner, attempt_of(job_id="job-2", exec="free"))).split()

    assert int(files) > 40
    assert file_size == "unlimited"


def test_the_grace_of_a_stop_is_the_execs_own(tmp_path: Path) -> None:
    tool = exec_of("/bin/sh", "-c", "trap 'sleep 0.6; echo bye; exit 0' TERM; sleep 60 & wait", timeout_s=0.3, stop_grace_s=8.0)

    result = run(runner_in(tmp_path, tool), attempt_of(exec="tool"))

    assert result.outcome.error_code == "TIMED_OUT"
    assert text_of(result) == "bye\n"


def test_in_a_namespace_of_its_own_a_job_sees_only_itself(tmp_path: Path, require: Require) -> None:
    require("PID namespaces", os.geteuid() == 0, "they need root here")
    tool = exec_of("/bin/sh", "-c", "echo $$; setsid sleep 60 & sleep 0.1; ls /proc | grep -c '^[0-9]'", pid_namespace=True)

    result = run(runner_in(tmp_path, tool), attempt_of(exec="tool"))

    own, count = text_of(result).split()
    assert own == "1"
    assert int(count) < 8
    assert result.outcome.exit_code == 0


@pytest.mark.parametrize(
    ("ended", "limits", "error_code", "says"),
    [
        (TreeEnded(1, -9, EndReason.OOM, "it had 70 MB, its limit is 64 MB"), Limits(memory_mb=64), "OOM", "ran out of memory"),
        (TreeEnded(1, 1, None, "its limit of 5 processes was reached"), Limits(processes=5), "EXIT_CODE", "; its limit of 5"),
        (TreeEnded(1, -9), Limits(), "SIGNAL", "SIGKILL"),
        (TreeEnded(1, -signal.SIGXCPU), Limits(), "SIGNAL", "SIGXCPU"),
        (TreeEnded(1, 0, EndReason.TIMED_OUT), Limits(), "TIMED_OUT", "3s"),
        (TreeEnded(1, 0, EndReason.LEASE_LOST), Limits(), "LEASE_LOST", "lease"),
    ],
)
def test_the_outcome_names_the_reason(ended: TreeEnded, limits: Limits, error_code: str, says: str) -> None:
    outcome = ended_outcome(ended, "exec 'tool'", 3.0, limits)

    assert outcome.error_code == error_code
    assert says in outcome.message


def test_a_program_that_ends_well_although_a_limit_was_reached_has_succeeded() -> None:
    outcome = ended_outcome(
        TreeEnded(1, 0, None, "its limit of 5 processes was reached"), "exec 'tool'", None, Limits(processes=5)
    )

    assert (outcome.exit_code, outcome.error_code) == (0, None)
