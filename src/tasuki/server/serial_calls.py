"""Blocking calls of transfers, each on a thread: in order, and with nothing left open when somebody leaves in the middle."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tasuki.errors import TasukiError, Unavailable

logger = logging.getLogger("tasuki.blobs")


class SerialCalls:
    """The blocking calls of one transfer: never two at once, and the last one after all others, though nobody waits for those."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._running: Future[Any] | None = None

    def start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Begin it; `asyncio.wrap_future` waits for it, before the next call is made."""
        self._running = self._threads.submit(function, *args)
        return self._running

    async def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.wrap_future(self.start(function, *args))

    async def opened(self, give_back: Callable[[Any], None], function: Callable[..., Any], *args: Any) -> Any:
        """Call for something that must be given back, also if it comes when nobody waits for it any more."""
        running = self.start(function, *args)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            running.add_done_callback(lambda done: None if _came_to_nothing(done) else self._run(give_back, done.result()))
            raise

    def at_last(self, function: Callable[..., None], *args: Any) -> None:
        """Once the call that is under way has ended: a file must not be closed under the thread that writes to it."""
        if self._running is None:
            self._run(function, *args)
        else:
            self._running.add_done_callback(lambda _: self._run(function, *args))

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self._threads.submit(_logged, function, *args)
        except RuntimeError:  # the threads are being closed, and with them the store: this will not take long
            _logged(function, *args)


def _came_to_nothing(done: Future[Any]) -> bool:
    return done.cancelled() or done.exception() is not None


def _logged(function: Callable[..., None], *args: Any) -> None:
    try:
        function(*args)
    except OSError as error:
        logger.warning("what was left of a transfer could not be removed: %s", error)


def told(error: TasukiError | OSError, what: str) -> TasukiError:
    """What the peer hears: our own words as they are, the system's inside some of ours."""
    return error if isinstance(error, TasukiError) else Unavailable(f"{what}: {error.strerror or error}")
