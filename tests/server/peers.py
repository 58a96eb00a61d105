"""A connection that is not one: what the server sends is kept, and a test waits for it by name."""

from __future__ import annotations

import asyncio
import os
from typing import TypeVar

from tasuki.core.machine import Peer
from tasuki.core.protocol import HelloClient, HelloWorker, Message, Welcome
from tasuki.errors import TasukiError
from tasuki.server.app import Server

PATIENCE_S = 10.0
M = TypeVar("M", bound=Message)


class FakeConnection:
    """What doors give to the server. `slow`: it never takes what is sent to it."""

    def __init__(self) -> None:
        self.peer = Peer("unix", os.getuid(), "unix socket")
        self.codec: str | None = None
        self.said: list[Message] = []
        self.max_bytes = 0
        self.closed: TasukiError | None | str = ""
        self.paused: set[object] = set()
        self.pauses = 0
        self.writable = asyncio.Event()
        self.writable.set()
        self._heard = asyncio.Condition()

    # -- the server's side ----------------------------------------------------------------------------------------
    def send(self, message: Message) -> None:
        self.said.append(message)

    def trust(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes

    def close(self, error: TasukiError | None = None) -> None:
        self.closed = error

    def pause_reading(self, why: object = None) -> None:
        self.pauses += 1
        self.paused.add(why)

    def resume_reading(self, why: object = None) -> None:
        self.paused.discard(why)

    async def drain(self) -> None:
        await self.writable.wait()

    # -- the test's side ------------------------------------------------------------------------------------------
    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.said if isinstance(message, kind)]

    async def wait_for(self, kind: type[M], count: int = 1) -> M:
        """The count-th message of this kind; fails when it does not come."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.all(kind)) < count:
                await asyncio.sleep(0)
        return self.all(kind)[count - 1]


async def client(server: Server) -> tuple[int, FakeConnection]:
    link = FakeConnection()
    conn = server.opened(link)
    server.received(conn, HelloClient(msg_id=1, client_id="c1"))
    await link.wait_for(Welcome)
    return conn, link


async def worker(server: Server, worker_id: str = "w1") -> tuple[int, FakeConnection]:
    link = FakeConnection()
    conn = server.opened(link)
    server.received(conn, HelloWorker(msg_id=1, worker_id=worker_id, incarnation="one", patterns=(">",)))
    await link.wait_for(Welcome)
    return conn, link
