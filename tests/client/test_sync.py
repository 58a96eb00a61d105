"""The thread of a blocking client: it ends with the client, and with one that could not be opened."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Coroutine
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from tasuki.client.agents.client import AgentsClient, BreakerFile
from tasuki.client.sync import LoopThread
from tasuki.errors import Unavailable

NOBODY = "agents:http://127.0.0.1:1"


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


async def nothing() -> None:
    return


def test_a_client_that_cannot_be_opened_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(notes: BreakerFile) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(BreakerFile, "read", broken)

    with pytest.raises(MemoryError):
        AgentsClient(NOBODY, token="", notes=tmp_path)

    assert "tasuki-agents-client" not in threads()


def test_a_client_with_wrong_options_starts_no_thread() -> None:
    with pytest.raises(TypeError):
        AgentsClient(NOBODY, token="", colour="blue")

    assert "tasuki-agents-client" not in threads()


def test_whoever_still_waits_when_the_client_is_closed_hears_it() -> None:
    thread = LoopThread("tasuki-test", nothing(), nothing)
    began, ended = threading.Event(), threading.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: thread.wait(work()))
        assert began.wait(5.0)
        thread.close(cancel=True)
        with pytest.raises(Unavailable, match="closed"):
            waiting.result(30.0)

    assert ended.is_set()
    assert "tasuki-test" not in threads()


def test_a_closed_one_takes_no_more_work_and_can_be_closed_again() -> None:
    thread = LoopThread("tasuki-test", nothing(), nothing)
    thread.close()
    late: Coroutine[Any, Any, None] = nothing()

    with pytest.raises(Unavailable, match="closed"):
        thread.wait(late)

    thread.close()
    assert late.cr_frame is None  # type: ignore[attr-defined]  # nobody is told that it was never awaited


def test_an_error_of_the_work_is_raised_where_it_is_waited_for() -> None:
    thread = LoopThread("tasuki-test", nothing(), nothing)

    async def fail() -> None:
        raise ValueError("odd")

    with pytest.raises(ValueError, match="odd"):
        thread.wait(fail())

    thread.close()
    assert "tasuki-test" not in threads()


def test_a_fork_of_the_process_is_told_instead_of_waiting_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = LoopThread("tasuki-test", nothing(), nothing)
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: thread._pid + 1)
        with pytest.raises(Unavailable, match=f"made by process {thread._pid}, and this is a fork of it"):
            thread.wait(nothing())
        thread.close()
        assert not thread.closed  # the thread is the other process's
    thread.close()


def test_a_client_that_nobody_closed_is_closed_before_the_interpreter_ends() -> None:
    program = f"""
import atexit, threading
# Last in, first out: this one runs after the client's own.
atexit.register(lambda: print(sorted(thread.name for thread in threading.enumerate())))
from tasuki.client.agents.client import AgentsClient
client = AgentsClient({NOBODY!r}, token="")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)

    assert (done.stdout, done.stderr, done.returncode) == ("['MainThread']\n", "", 0)
