"""A connection that is not one: what the server sends is kept, and a test waits for it by name."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

from tasuki.blobs.blob import BlobStore
from tasuki.core.machine import Peer
from tasuki.core.protocol import HelloClient, HelloWorker, Message, Welcome
from tasuki.errors import TasukiError
from tasuki.server.server import Server
from tasuki.server.upload_shares import UploadShares
from tests.support.waiting import Watched

PATIENCE_S = 10.0


def shares_of(blobs: BlobStore) -> UploadShares:
    """Return shares of uploaders whose blobs no job refers to."""

    async def referenced(sha256s: Sequence[str]) -> set[str]:
        return set()

    return UploadShares(blobs, referenced, grace_s=3600.0)


M = TypeVar("M", bound=Message)


class FakeConnection(Watched):
    """A connection as doors give it to the server. While `writable` is not set it takes nothing more."""

    def __init__(self) -> None:
        super().__init__()
        self.peer = Peer("unix", os.getuid(), "unix socket")
        self.codec: str | None = None
        self.said: list[Message] = []
        self.writes: list[list[Message]] = []
        self.max_bytes = 0
        self.closed: TasukiError | str | None = ""
        self.paused: set[object] = set()
        self.writable = asyncio.Event()
        self.writable.set()

    @property
    def full(self) -> bool:
        return not self.writable.is_set()

    unread_bytes = 0

    # -- the server's side ----------------------------------------------------------------------------------------
    def send(self, message: Message) -> None:
        self.send_together([message])

    def send_together(self, messages: Iterable[Message]) -> None:
        self.writes.append(list(messages))
        self.said += self.writes[-1]
        self.changed()

    def trust(self, max_bytes: int, owner: str) -> None:
        self.max_bytes = max_bytes

    def close(self, error: TasukiError | None = None) -> None:
        self.closed = error
        self.changed()

    def abort(self, reason: str) -> None:
        self.closed = reason
        self.changed()

    def pause_reading(self, why: object = None) -> None:
        self.paused.add(why)
        self.changed()

    def resume_reading(self, why: object = None) -> None:
        self.paused.discard(why)

    async def drain(self) -> None:
        await self.writable.wait()

    # -- the test's side ------------------------------------------------------------------------------------------
    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.said if isinstance(message, kind)]

    async def wait_for(self, kind: type[M], count: int = 1) -> M:
        """The count-th message of this kind; fails when it does not come."""
        await self.until(lambda: len(self.all(kind)) >= count)
        return self.all(kind)[count - 1]


async def client(server: Server, token: str = "") -> tuple[int, FakeConnection]:
    link = FakeConnection()
    conn = server.opened(link)
    server.received(conn, HelloClient(msg_id=1, client_id="c1", token=token))
    await link.wait_for(Welcome)
    return conn, link


async def worker(server: Server, worker_id: str = "w1") -> tuple[int, FakeConnection]:
    link = FakeConnection()
    conn = server.opened(link)
    server.received(conn, HelloWorker(msg_id=1, worker_id=worker_id, incarnation="one", patterns=(">",)))
    await link.wait_for(Welcome)
    return conn, link
