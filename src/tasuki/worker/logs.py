"""A job's stdout and stderr: files that the job appends to and that we cut, so that nothing can block it or fill the disk.

A pipe would block the job when the worker hangs, and RLIMIT_FSIZE would hit its outputs too. So the job writes to a file
opened with O_APPEND, whose size is looked at every LOOK_S: past the cap, the end is remembered and the file is cut back.
Because of O_APPEND the job goes on at the new end. Kept are the head and the last TAIL_BYTES, where errors stand.
Between two looks a job can write what the disk takes in that time, some hundred MB at worst.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

CAP_BYTES = 16 * 1024 * 1024
TAIL_BYTES = 64 * 1024
LOOK_S = 0.25


class CappedLog:
    """One such file. Held by its descriptor: a job may remove or replace the name."""

    def __init__(self, path: Path, cap_bytes: int = CAP_BYTES) -> None:
        self._cap_bytes = cap_bytes
        self._tail_bytes = min(TAIL_BYTES, cap_bytes // 2)
        self._head_bytes = cap_bytes - self._tail_bytes
        self._tail = b""
        self._dropped_bytes = 0
        self.cut_bytes = 0
        """How much of what the job wrote is missing; final after `contents`."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_APPEND | os.O_CLOEXEC
        self.descriptor = os.open(path, flags, 0o600)

    def over(self) -> bool:
        return os.fstat(self.descriptor).st_size > self._cap_bytes

    def trim(self) -> None:
        """Cut the file back if it has passed the cap."""
        size_bytes = os.fstat(self.descriptor).st_size
        if size_bytes > self._cap_bytes:
            self._tail = os.pread(self.descriptor, self._tail_bytes, size_bytes - self._tail_bytes)
            os.ftruncate(self.descriptor, self._head_bytes)
            self._dropped_bytes += size_bytes - self._head_bytes

    def size_bytes(self) -> int:
        """What is in the file now."""
        return os.fstat(self.descriptor).st_size

    def contents(self) -> bytes:
        """All that is kept, with a line where something is missing."""
        self.trim()
        data = os.pread(self.descriptor, self._cap_bytes, 0)
        if not self._dropped_bytes:
            return data
        head, after = data[: self._head_bytes], data[self._head_bytes :]
        tail = (self._tail + after)[-self._tail_bytes :]
        self.cut_bytes = self._dropped_bytes + len(after) - len(tail)
        return b"%s\n[tasuki: %d bytes were cut here]\n%s" % (head, self.cut_bytes, tail)

    def close(self) -> None:
        os.close(self.descriptor)


class LogWatch:
    """Looks at the logs of one job as long as its `with` block lasts."""

    def __init__(self, logs: Sequence[CappedLog], look_s: float = LOOK_S) -> None:
        self._logs = logs
        self._look_s = look_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._trimming: asyncio.Future[None] | None = None

    async def __aenter__(self) -> LogWatch:
        self._timer = self._loop.call_later(self._look_s, self._look)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._trimming is not None:
            await self._trimming

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._look_s, self._look)
        if (self._trimming is None or self._trimming.done()) and any(log.over() for log in self._logs):
            self._trimming = self._loop.run_in_executor(None, self._trim)

    def _trim(self) -> None:
        for log in self._logs:
            log.trim()
