"""Helpers of every asyncio program here: the choice of the event loop, and tasks that run in the background."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory for `asyncio.Runner` where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def break_connections_after(wait_s: float) -> None:
    """Break all connections to other processes so long from now, and those that are made later, until this process ends: for one
    that is ending, whose threads may wait for a database which will never answer, and could not be joined."""

    def break_all() -> None:
        time.sleep(wait_s)
        while True:
            for number in [int(one.name) for one in Path("/dev/fd").iterdir()]:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
                    if one.getpeername():  # a pair of sockets has no names
                        one.shutdown(socket.SHUT_RDWR)
            time.sleep(1.0)

    threading.Thread(target=break_all, name="tasuki-break-connections", daemon=True).start()


def ignore_result(future: asyncio.Future[Any]) -> None:
    """Mark an error as seen, for futures that perhaps nobody awaits. To be used as a done callback."""
    if not future.cancelled():
        future.exception()


async def on_thread(function: Callable[..., T], *args: Any, release: Callable[[T], object] | None = None) -> T:
    """Call a blocking function on a thread. A cancellation waits for its end: what the function uses may be closed then.

    `release` gets the result that a canceled caller does not get.
    """
    running = asyncio.get_running_loop().run_in_executor(None, lambda: function(*args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if running.exception() is None and release is not None:
            release(running.result())
        raise


class BackgroundTasks:
    """Tasks that nobody needs to await, kept here until they end: an event loop holds its tasks weakly.

    asyncio reports the error of a task that nobody awaited. `on_end` is called with each task that has ended.
    """

    def __init__(self, on_end: Callable[[asyncio.Task[Any]], None] | None = None) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_end = on_end

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if self._on_end is not None:
            self._on_end(task)

    def cancel(self) -> None:
        """Cancel all tasks but the one that calls this."""
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    async def wait(self) -> None:
        """Wait until every task that runs now has ended. Errors are not raised."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        self.cancel()
        await self.wait()

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(tuple(self._tasks))
