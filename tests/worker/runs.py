"""Stage of the tests of the worker: attempts, runners and a look into result archives."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import zipfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from tasuki.core.job import JobSpec
from tasuki.worker.attempt import Attempt, RunResult, StopReason
from tasuki.worker.execs import Exec
from tasuki.worker.runner import CommandRunner

DEADLINE_S = 25.0
OWNER = "uid:owner"
_incarnations = itertools.count(1)
opened: list[CommandRunner] = []
"""Closed after the test that made them (conftest.py): each has a keeper, which is a process."""


def attempt_of(**fields: Any) -> Attempt:
    submitter = fields.pop("submitter", OWNER)
    return Attempt(spec=JobSpec(**{"job_id": "job-1", **fields}), lease_id="lease-1", attempt=3, submitter=submitter)


def shell(script: str, **fields: Any) -> Attempt:
    """A job of the owner that runs a shell script."""
    return attempt_of(exec="sh", args=("-c", script), **fields)


async def no_fetch(job_id: str, sha256: str, size_bytes: int, target: Path) -> None:
    raise AssertionError(f"nothing was to be fetched, but {sha256} of {job_id} was")


def runner_in(data: Path, *execs: Exec, any_program_for: str | None = OWNER, **options: Any) -> CommandRunner:
    options.setdefault("fetch", no_fetch)
    options.setdefault("grace_s", 0.3)
    options.setdefault("floor_free_bytes", 0)
    options.setdefault("incarnation", f"incarnation-{os.getpid()}-{next(_incarnations)}")
    runner = CommandRunner(
        data, {found.name: found for found in execs}, may_run_any=lambda attempt: attempt.submitter == any_program_for, **options
    )
    opened.append(runner)
    return runner


def close_runners() -> None:
    """All that were made."""
    while opened:
        opened.pop().close()


Meanwhile = Callable[[CommandRunner, "asyncio.Future[StopReason]"], Awaitable[None]]


async def run_async(runner: CommandRunner, attempt: Attempt, meanwhile: Meanwhile | None = None) -> RunResult:
    stop: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
    running = asyncio.ensure_future(runner.run(attempt, stop))
    if meanwhile is not None:
        await meanwhile(runner, stop)
    return await asyncio.wait_for(running, DEADLINE_S)


def run(runner: CommandRunner, attempt: Attempt, meanwhile: Meanwhile | None = None) -> RunResult:
    return asyncio.run(run_async(runner, attempt, meanwhile))


def archive_of(result: RunResult) -> zipfile.ZipFile:
    if result.result_file is not None:
        return zipfile.ZipFile(result.result_file)
    assert result.outcome.result is not None, result.outcome
    return zipfile.ZipFile(io.BytesIO(result.outcome.result))


def text_of(result: RunResult, name: str = "stdout.log") -> str:
    return archive_of(result).read(name).decode()


def report_of(result: RunResult) -> dict[str, Any]:
    return json.loads(text_of(result, "result.json"))


def exec_of(*argv: str, name: str = "tool", **fields: Any) -> Exec:
    return Exec(name=name, argv=argv, **fields)


def names_of(result: RunResult) -> Sequence[str]:
    return sorted(archive_of(result).namelist())
