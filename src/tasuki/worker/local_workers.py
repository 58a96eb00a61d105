"""Worker processes of one parent, on its machine: kept alive by it, drained by it, and gone when it is gone.

For `tasuki up` and `manage.py tasuki_worker --workers N`. The parent has `LocalWorkers`; the worker calls `end_with_stdin`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tasuki.core.backoff import Backoff

RESTART_FIRST_S = 0.5
RESTART_MAX_S = 30.0
SOUND_AFTER_S = 60.0  # a worker that lived this long did not fail at its start: the pauses begin anew
ORPHAN_GRACE_S = 30.0  # without a server
ORPHAN_POLL_S = 1.0


class LocalWorkers:
    """Worker processes that are kept alive between `start` and `drain`."""

    def __init__(
        self, count: int, command: Sequence[str], on_end: Callable[[int, int, float], None], **streams_and_env: Any
    ) -> None:
        """`on_end` is told the number of a worker that ended by itself, its exit code, and in how many seconds it is started
        again. Output of workers to stdout is dropped unless the last arguments, those of `Popen`, say otherwise."""
        self._count = count
        self._command = command
        self._on_end = on_end
        self._options = {"stdout": asyncio.subprocess.DEVNULL, **streams_and_env}
        self._processes: set[asyncio.subprocess.Process] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = asyncio.Event()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(number)) for number in range(1, self._count + 1)]

    async def drain(self) -> None:
        """Let all workers finish their jobs and end, and wait for that."""
        self._ending.set()
        self.hurry()
        await asyncio.gather(*self._tasks)

    def hurry(self) -> None:
        """Send SIGTERM: the second makes a worker stop its jobs; a killed worker would leave them running."""
        for child in self._processes:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)

    async def _keep(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(RESTART_FIRST_S, RESTART_MAX_S)
        while not self._ending.is_set():
            began = loop.time()
            # The pipe is never written to: it ends when this process does, even by SIGKILL, and the child with it. In a session
            # of its own the child does not get a terminal's Ctrl-C, which is passed on in order.
            child = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, start_new_session=True, **self._options
            )
            self._processes.add(child)
            if self._ending.is_set():  # asked to end while this one was being started
                self.hurry()
            code = await child.wait()
            self._processes.discard(child)
            if self._ending.is_set():
                return
            if loop.time() - began > SOUND_AFTER_S:
                backoff.reset()
            wait_s = backoff.next_s()
            self._on_end(number, code, wait_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), wait_s)


def end_with_stdin(is_connected: Callable[[], bool], grace_s: float = ORPHAN_GRACE_S) -> None:
    """Have a thread drain this worker when stdin ends: the parent holds the other end, and is gone then, however it died.

    Running jobs continue while a server answers (a new parent in the same folder, say); after `grace_s` without one they are
    stopped.
    """

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):  # not sys.stdin.read: its lock, held by this thread, would break the exit
            pass
        os.kill(os.getpid(), signal.SIGTERM)  # drain
        alone_s = 0.0
        while alone_s < grace_s:
            time.sleep(ORPHAN_POLL_S)
            alone_s = 0.0 if is_connected() else alone_s + ORPHAN_POLL_S
        while True:  # stop; again and again, since signals count as one if the process has not heard the first of them yet
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(ORPHAN_POLL_S)

    threading.Thread(target=watch, name="tasuki-stdin", daemon=True).start()
