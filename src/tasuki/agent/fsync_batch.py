"""Batched fsync: one call in a thread, and one commit of the file system's journal, serve all jobs that wait meanwhile.

    await batch.sync(descriptors)          durable when this is done; OSError, DiskFull

The descriptors are closed here in any case: a caller who stops waiting does not stop the thread.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import TypeAlias

from tasuki.blobs.files import disk_full_or
from tasuki.event_loop import ignore_result

THREADS = 4
"""Threads at once: a file system commits for several waiters together, and the next commit may begin during one."""
Unsynced: TypeAlias = Sequence[int]
"""Open descriptors of files and folders, to be fsynced in this order and closed."""


def sync_now(descriptors: Unsynced) -> None:
    """Sync these descriptors in this thread."""
    problem = _synced([descriptors], None)[0]
    if problem is not None:
        raise problem


class FsyncBatch:
    """Batches of one agent. Made inside the running loop."""

    def __init__(self, place: str, root: int | None = None) -> None:
        """`place` is named when its disk is full. `root` is synced after all others, and stays open."""
        self._place = place
        self._root = root
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[Unsynced, asyncio.Future[None]]] = []
        self._under_way = 0
        self._is_woken = False

    def sync(self, descriptors: Unsynced) -> asyncio.Future[None]:
        """Sync and close descriptors; done when they are durable."""
        synced: asyncio.Future[None] = self._loop.create_future()
        synced.add_done_callback(ignore_result)
        self._waiting.append((descriptors, synced))
        if not self._is_woken and self._under_way < THREADS:
            self._is_woken = True
            self._loop.call_soon(self._next)  # callers that are ready in this turn of the loop join
        return synced

    def _next(self) -> None:
        self._is_woken = False
        batch, self._waiting = self._waiting, []
        self._under_way += 1
        syncing = self._loop.run_in_executor(None, _synced, [descriptors for descriptors, _ in batch], self._root)

        def tell(syncing: asyncio.Future[list[OSError | None]]) -> None:
            self._under_way -= 1
            if self._waiting and not self._is_woken:
                self._next()
            for (_, synced), problem in zip(batch, syncing.result(), strict=True):
                self._tell(synced, problem)

        syncing.add_done_callback(tell)

    def _tell(self, synced: asyncio.Future[None], problem: OSError | None) -> None:
        if synced.done():  # its caller has stopped waiting
            return
        if problem is None:
            synced.set_result(None)
        else:
            synced.set_exception(disk_full_or(problem, self._place))


def _synced(batch: Sequence[Unsynced], root: int | None) -> list[OSError | None]:
    """Return the problem of each. A failed fsync is not repeated: the next one would report success."""
    problems = [_problem_of(descriptors) for descriptors in batch]
    try:
        if root is not None:
            os.fsync(root)
    except OSError as error:
        return [problem or error for problem in problems]
    return problems


def _problem_of(descriptors: Unsynced) -> OSError | None:
    problem = None
    for descriptor in descriptors:
        try:
            if problem is None:
                os.fsync(descriptor)
        except OSError as error:
            problem = error
        try:
            os.close(descriptor)
        except OSError as error:
            problem = problem or error
    return problem
