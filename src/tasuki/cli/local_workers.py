"""The local workers of `tasuki up`: child processes, started again with growing waits if they die, drained at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tasuki.cli.server_process import Events
from tasuki.cli.worker import allowed_execs, check_drain_timeout, log_caps
from tasuki.core.backoff import Backoff

RESTART_FIRST_S = 0.5
RESTART_MAX_S = 30.0
SOUND_AFTER_S = 60.0  # a worker that lived this long was not broken by its start: the waits begin anew


def worker_options(
    slots: int | None, execs: Sequence[str], config: Path | None, drain_timeout: float | None, log_head: str, log_tail: str
) -> tuple[str, ...]:
    """What each worker is told of what `up` was told; ConfigError for what a worker would refuse: it would be started again and
    again."""
    from tasuki.worker.commands import check_secrets
    from tasuki.worker.worker import check_slots

    check_slots(slots)
    check_drain_timeout(drain_timeout)
    log_caps(log_head, log_tail)
    check_secrets(allowed_execs(config, list(execs)).values())
    return (
        *("--slots", str(slots or os.cpu_count() or 1)),
        *("--log-head", log_head, "--log-tail", log_tail),
        *(() if drain_timeout is None else ("--drain-timeout", str(drain_timeout))),
        *(() if config is None else ("--config", str(config))),
        *(word for exec_ in execs for word in ("--exec", exec_)),
    )


class LocalWorkers:
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
        backoff = Backoff(RESTART_FIRST_S, RESTART_MAX_S)
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
                backoff.reset()
            wait_s = backoff.next_s()
            self._events.tell(
                "worker-ended",
                f"{number} (exit {code}); started again in {wait_s:g} s",
                number=number,
                exit_code=code,
                restart_in_s=wait_s,
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), wait_s)
