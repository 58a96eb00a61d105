"""Programs run as the worker's own user: they find its token neither in an environment nor in the memory of worker and keeper."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SECRETS = {"TASUKI_TOKEN": "tsk_w_secret-of-the-worker", "TASUKI_ENROLL": "tsk_e_secret-of-the-worker"}
NOBODY = 65534
IS_ROOT = os.geteuid() == 0
# Root may read everything, so the attack is tried as somebody else. After setuid Linux makes a process undumpable by itself:
# that is taken back, as if it had been started as that user.
WORKER = f"""
import ctypes, os, sys
from tasuki.worker.keeper.client import Keeper
from tasuki.config import forget_tokens
from tasuki.worker.linux_calls import is_dumpable, wipe_variables
if {IS_ROOT}:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
assert is_dumpable()
wipe_variables(*forget_tokens())
keeper = Keeper.start("incarnation")
print(keeper.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def worker() -> Iterator[tuple[int, int]]:
    """A worker's process and its keeper, as somebody who is not root: their pids."""
    environment = {**os.environ, "FIRST": "1", **SECRETS, "LAST": "2"}
    with subprocess.Popen(
        [sys.executable, "-c", WORKER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        words = process.stdout.readline().split()
        try:
            assert words, "the process could not start"
            yield process.pid, int(words[0])
        finally:
            process.stdin.close()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_environment_of_worker_and_keeper_has_no_token_any_more(worker: tuple[int, int]) -> None:
    for pid in worker:
        if IS_ROOT:  # others cannot read it at all
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert b"FIRST=1" in variables
            assert b"LAST=2" in variables
            assert not [variable for variable in variables if b"secret-of-the-worker" in variable]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("file", ["environ", "mem", "maps", "fd"])
def test_a_program_of_the_same_user_can_read_nothing_of_worker_and_keeper(worker: tuple[int, int], file: str) -> None:
    somebody: dict[str, int] = {"user": NOBODY, "group": NOBODY} if IS_ROOT else {}
    for pid in worker:
        command = ["ls", "-l", f"/proc/{pid}/{file}/"] if file == "fd" else ["head", "-c1", f"/proc/{pid}/{file}"]
        program = subprocess.run(command, capture_output=True, text=True, check=False, **somebody)
        assert program.returncode != 0
        assert "Permission denied" in program.stderr
