"""An event loop in a thread of its own, for callers that block. Knows nothing of what runs in it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent import futures
from typing import Any, TypeVar

from tasuki.errors import Unavailable

T = TypeVar("T")
CLOSE_TIMEOUT_S = 5.0


class LoopThread:
    """Made together with what opens the client; if that fails, the thread is gone again. Safe to share between threads."""

    def __init__(self, name: str, opening: Coroutine[Any, Any, object]) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._closing = False
        self._waits: set[futures.Future[Any]] = set()
        self._lock = threading.Lock()
        self.thread.start()
        try:
            self.wait(opening)
        except BaseException:
            self._stop()
            raise

    @property
    def closed(self) -> bool:
        return self._closing or self.loop.is_closed()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it there and wait for it; Ctrl-C ends the wait and the work."""
        if self.closed:
            work.close()
            raise Unavailable("this client was closed")
        return self._wait(work)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self.loop.is_closed():
                work.close()
                raise Unavailable("this client was closed")
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
            self._waits.add(future)
        try:
            return future.result()
        except futures.CancelledError:
            if self._closing:
                raise Unavailable("this client was closed") from None
            raise
        except BaseException:
            future.cancel()
            raise
        finally:
            self._waits.discard(future)

    def close(self, leaving: Coroutine[Any, Any, None], *, cancel: bool = False) -> None:
        """`leaving` ends what the client has. With `cancel` other threads do not get their answers first. Once is enough."""
        if self.closed:
            leaving.close()
            return
        self._closing = True
        if cancel:
            for future in list(self._waits):
                future.cancel()
        try:
            self._wait(self._leave(leaving))
        finally:  # also after Ctrl-C: the thread and its loop must not stay
            self._stop()

    async def _leave(self, leaving: Coroutine[Any, Any, None]) -> None:
        await leaving
        # What others wait for has its answer now; it must get out of the loop before the loop ends.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, late = await asyncio.wait(others, timeout=CLOSE_TIMEOUT_S)
            for task in late:
                task.cancel()

    def _stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        with self._lock:  # who came after the loop had ended would wait for ever
            for future in list(self._waits):
                future.cancel()
            self.loop.close()
