"""The local workers of `tasuki up`: child processes, started again with growing waits if they die, drained at the end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence

from tasuki.cli.serve import Events

RESTART_FIRST_S = 0.5
RESTART_MAX_S = 30.0
SOUND_AFTER_S = 60.0  # a worker that lived this long was not broken by its start: the waits begin anew


class Workforce:
    """Keeps `count` workers alive between `start` and `drain`."""

    def __init__(self, count: int, options: Sequence[str], events: Events) -> None:
        self._command = (sys.executable, "-m", "tasuki", "worker", "--until-stdin-ends", *options)
        self._count = count
        self._events = events
        self._processes: set[asyncio.subprocess.Process] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._ending = asyncio.Event()

    def start(self) -> None:
        self._keepers = [asyncio.create_task(self._keep(number)) for number in range(1, self._count + 1)]

    async def drain(self) -> None:
        """Ask all to end when their jobs have, and wait for it."""
        self._ending.set()
        self._signal_all(signal.SIGTERM)
        await asyncio.gather(*self._keepers)

    def hurry(self) -> None:
        """A worker's second signal makes it stop its jobs; killing it would leave them running without anybody."""
        self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _keep(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        wait_s = RESTART_FIRST_S
        while not self._ending.is_set():
            began = loop.time()
            # The pipe is never written to: it ends when we do, even by SIGKILL, and the child with it. A session of its own
            # keeps a terminal's Ctrl-C for us, who pass it on in order.
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, start_new_session=True
            )
            self._processes.add(process)
            if self._ending.is_set():  # asked to end while this one was being started
                self._signal_all(signal.SIGTERM)
            code = await process.wait()
            self._processes.discard(process)
            if self._ending.is_set():
                return
            if loop.time() - began > SOUND_AFTER_S:
                wait_s = RESTART_FIRST_S
            self._events.tell(
                "worker-ended",
                f"{number} (exit {code}); started again in {wait_s:g} s",
                number=number,
                exit_code=code,
                restart_in_s=wait_s,
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), wait_s)
            wait_s = min(wait_s * 2, RESTART_MAX_S)
