"""Stage of the tests of the keeper: orders for it, and a look at what it holds."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasuki.clocks import boot_time
from tasuki.worker.keeper.client import Keeper, KeptAttempt
from tests.support.processes import alive
from tests.support.waiting import until_async
from tests.worker.runs import DEADLINE_S

ESCAPE = Path(__file__).with_name("escape.py")


class Stage:
    """A keeper, a folder for its jobs, and the numbers that those wrote down."""

    def __init__(self, tmp_path: Path, keeper: Keeper) -> None:
        self.folder = tmp_path / "job"
        self.pids = tmp_path / "pids"
        self.keeper = keeper
        self.folder.mkdir(exist_ok=True)
        self.pids.touch()

    def spawn(self, program: str, *arguments: str, **fields: Any) -> KeptAttempt:
        for name in ("stdout", "stderr"):
            (self.folder / name).touch()
        given = {
            "program": os.fsencode(program),
            "argv": (os.fsencode(program), *map(os.fsencode, arguments)),
            "env": {b"PATH": b"/usr/bin:/bin", b"TASUKI_MARK": b"incarnation/lease"},
            "cwd": os.fsencode(self.folder),
            "folder": os.fsencode(self.folder),
            "mark": b"incarnation/lease",
            "stdin": b"/dev/null",
            "stdout": os.fsencode(self.folder / "stdout"),
            "stderr": os.fsencode(self.folder / "stderr"),
            "grace_s": 0.2,
        }
        return self.keeper.spawn(**{**given, **fields})

    def shell(self, script: str, **fields: Any) -> KeptAttempt:
        return self.spawn("/bin/sh", "-c", script, **fields)

    def python(self, script: str, *arguments: str, **fields: Any) -> KeptAttempt:
        return self.spawn(sys.executable, "-I", "-S", "-c", script, *arguments, **fields)

    async def escape(self, *words: str, **fields: Any) -> tuple[KeptAttempt, list[int]]:
        """A job that hides, once it is hidden, and its two process numbers."""
        kept = self.spawn(sys.executable, "-I", "-S", str(ESCAPE), str(self.pids), *words, **fields)
        await until_async(lambda: len(self.numbers()) == 2, what="the job has hidden its second process")
        return kept, self.numbers()

    def numbers(self) -> list[int]:
        return [int(line) for line in self.pids.read_text().split()]

    def output(self) -> str:
        return (self.folder / "stdout").read_text()

    def living(self) -> list[int]:
        return [pid for pid in self.numbers() if alive(pid)]


@contextmanager
def keeper_for(incarnation: str, *, cgroup: bool) -> Iterator[Keeper]:
    keeper = Keeper.start(incarnation, cgroup=cgroup)
    try:
        yield keeper
    finally:
        keeper.close()


def play(scenario: Callable[[], Awaitable[Any]]) -> Any:
    """Run it in a loop of its own; a keeper that forgets to answer fails the test."""

    async def limited() -> Any:
        return await asyncio.wait_for(scenario(), DEADLINE_S)

    return asyncio.run(limited())


def in_s(seconds: float) -> float:
    return boot_time() + seconds
