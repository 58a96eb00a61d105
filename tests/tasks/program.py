"""The tasks that tests run at real workers: `tasuki worker --tasks program:tasks` in this folder."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from tasuki import Retry, Tasks, current_job

tasks = Tasks()


@tasks.task(timeout_s=60)
def resize(path: str, width: int = 200) -> dict[str, int]:
    """Run in a child process."""
    return {"width": width, "letters": len(path), "pid": os.getpid()}


@tasks.task(subject="numbers.add")
async def add(a: int, *, b: int = 1) -> int:
    """Run in the worker's loop."""
    return a + b


@tasks.task
def size(data: str) -> int:
    return len(data)


@tasks.task(retries=3)
def third_time(note: str) -> int:
    """Succeed at the third attempt."""
    attempt = current_job().attempt
    with Path(note).open("a") as file:
        file.write(f"{attempt}\n")
    if attempt < 3:
        raise Retry(f"attempt {attempt}", in_s=0)
    return attempt


@tasks.task(give_up_on=ValueError)
def fails(message: str) -> None:
    raise ValueError(message)


@tasks.task(backoff_s=60)
def fails_for_now(message: str) -> None:
    raise RuntimeError(message)


@tasks.task
async def steps(gate: str) -> str:
    """Report progress step by step; each waits for its file."""
    job = current_job()
    for step in (1, 2, 3):
        while not Path(f"{gate}.{step}").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
        job.progress(step / 4, f"step {step}")
    return "done"


@tasks.task
def plain_steps(gate: str) -> str:
    """Do the same in a child process."""
    job = current_job()
    for step in (1, 2, 3):
        while not Path(f"{gate}.{step}").exists():
            time.sleep(0.01)
        job.progress(step / 4, f"step {step}")
    return "done"


@tasks.task
def until_canceled(note: str) -> None:
    """Run until the job is canceled, and clean up."""
    job = current_job()
    Path(f"{note}.started").touch()
    while not job.canceled:
        time.sleep(0.01)
    Path(note).write_text("cleaned up")
