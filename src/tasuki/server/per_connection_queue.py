"""Work that connections ask for and that takes its time (reads, downloads), a few pieces at once for each connection.

Who asks a lot waits for itself, and others do not wait for it: each connection has its own line, and the next piece of it
is begun only when the peer has taken the answers before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from tasuki.errors import Unavailable

WAITING_MAX = 256  # pieces of one connection; past this it is not read from

T = TypeVar("T")


class QueueConnection(Protocol):
    """What a lane needs of a connection."""

    def pause_reading(self, why: object = None) -> None: ...
    def resume_reading(self, why: object = None) -> None: ...
    async def drain(self) -> None: ...


class PerConnectionQueue(Generic[T]):
    """One kind of work; `at_once` pieces of it run at the same time for one connection."""

    def __init__(
        self,
        work: Callable[[T], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        *,
        at_once: int,
    ) -> None:
        self._work, self._spawn, self._at_once = work, spawn, at_once
        self._waiting: dict[int, deque[T]] = {}
        self._running: dict[int, int] = {}

    def add(self, conn: int, link: QueueConnection, piece: T) -> None:
        """Do this for the connection when it is its turn."""
        waiting = self._waiting.setdefault(conn, deque())
        waiting.append(piece)
        running = self._running.get(conn, 0)
        if running < self._at_once:
            self._running[conn] = running + 1
            self._spawn(self._run(conn, link))
        elif len(waiting) > WAITING_MAX:
            link.pause_reading(self)

    def forget(self, conn: int) -> None:
        """The connection is gone: what waits is dropped, what runs ends by itself."""
        self._waiting.pop(conn, None)

    async def _run(self, conn: int, link: QueueConnection) -> None:
        try:
            while waiting := self._waiting.get(conn):
                piece = waiting.popleft()
                if len(waiting) <= WAITING_MAX // 2:
                    link.resume_reading(self)
                await self._work(piece)
                await link.drain()
        except Unavailable:
            self.forget(conn)  # the peer left; there is nobody to tell
        finally:
            self._running[conn] -= 1
            if not self._running[conn]:
                del self._running[conn]
                if not self._waiting.get(conn):
                    self.forget(conn)
