"""Blobs over a link, both ways, in chunks: what clients and workers share. The server's side is `server/transfers.py`."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any, BinaryIO

from tasuki.core.job import BlobRef
from tasuki.core.protocol import CHUNK_BYTES, BlobGet, BlobPut, Chunk, ErrorMessage, Message, Reply
from tasuki.errors import Corrupt, TasukiError, Unavailable, from_wire
from tasuki.net.link import Link

FIRST_MSG_ID = 1 << 40  # above what a machine's own counter reaches, so that the two never meet
RECONNECT_POLL_S = 0.05


class BlobLine:
    """Transfers on whatever link is there at the moment; begun again, or gone on with, after a lost connection."""

    def __init__(self) -> None:
        self._link: Link | None = None
        self._msg_id = FIRST_MSG_ID
        self._answers: dict[int, asyncio.Queue[Message | TasukiError]] = {}
        self._closed = False

    def connected(self, link: Link) -> None:
        self._link = link

    def lost(self) -> None:
        """The link is gone: every transfer under way hears of it."""
        self._link = None
        gone = Unavailable("the connection was lost during a transfer")
        for queue in self._answers.values():
            queue.put_nowait(gone)

    def close(self) -> None:
        self._closed = True
        self.lost()

    def take(self, message: Message) -> bool:
        """Is this message part of a transfer? Then it is taken."""
        corr_id = getattr(message, "corr_id", 0)
        if corr_id < FIRST_MSG_ID:
            return False
        queue = self._answers.get(corr_id)
        if queue is not None:
            queue.put_nowait(message)
        return True

    async def put(self, file: BinaryIO, ref: BlobRef, progress: Callable[[int], None] | None = None) -> None:
        """Make sure that the server has this blob; nothing is sent if it does."""
        await self._persist(lambda: self._put_once(file, ref, progress))

    async def get(self, ref: BlobRef, job_id: str, write: Callable[[bytes], Any]) -> None:
        """Receive a blob of a job, verified; goes on where it was after a lost connection."""
        digest = hashlib.sha256()
        received = 0

        async def once() -> None:
            nonlocal received
            offset = received
            async for chunk in _Chunks(self, lambda msg_id: BlobGet(msg_id, ref.sha256, job_id, offset)):
                digest.update(chunk.data)
                write(chunk.data)
                received += len(chunk.data)

        await self._persist(once)
        if digest.hexdigest() != ref.sha256:
            raise Corrupt(f"blob {ref.sha256} of job {job_id!r} arrived with sha256 {digest.hexdigest()}; try again")

    async def _persist(self, once: Callable[[], Any]) -> None:
        while True:
            while self._link is None or self._link.closed:
                if self._closed:
                    raise Unavailable("there is no connection for the transfer any more")
                await asyncio.sleep(RECONNECT_POLL_S)
            try:
                await once()
                return
            except Unavailable as error:
                if type(error) is not Unavailable or self._closed:  # disk full, overloaded: the caller's to decide
                    raise

    async def _put_once(self, file: BinaryIO, ref: BlobRef, progress: Callable[[int], None] | None) -> None:
        conversation = _Conversation(self, lambda msg_id: BlobPut(msg_id, ref.sha256, ref.size_bytes))
        with conversation:
            if not (await conversation.reply()).get("go"):
                return
            file.seek(0)
            offset = 0
            loop = asyncio.get_running_loop()
            while True:
                data = await loop.run_in_executor(None, file.read, CHUNK_BYTES)
                last = offset + len(data) >= ref.size_bytes or not data
                conversation.link.send(Chunk(conversation.msg_id, offset, data, last))
                offset += len(data)
                await conversation.link.drain()
                if progress is not None:
                    progress(offset)
                if last:
                    break
            await conversation.reply()


class _Conversation:
    """One request and its several answers."""

    def __init__(self, line: BlobLine, make: Callable[[int], Message]) -> None:
        if line._link is None:
            raise Unavailable("there is no connection")
        self._line = line
        self.link = line._link
        line._msg_id += 1
        self.msg_id = line._msg_id
        self._queue = line._answers[self.msg_id] = asyncio.Queue[Message | TasukiError]()
        self.link.send(make(self.msg_id))

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        self._line._answers.pop(self.msg_id, None)

    async def answer(self) -> Message:
        message = await self._queue.get()
        if isinstance(message, TasukiError):
            raise message
        if isinstance(message, ErrorMessage):
            raise from_wire(message.code, message.message, message.details)
        return message

    async def reply(self) -> dict[str, Any]:
        message = await self.answer()
        return message.body if isinstance(message, Reply) and isinstance(message.body, dict) else {}


class _Chunks:
    """The chunks of one download, until the last."""

    def __init__(self, line: BlobLine, make: Callable[[int], Message]) -> None:
        self._conversation = _Conversation(line, make)
        self._done = False

    def __aiter__(self) -> _Chunks:
        return self

    async def __anext__(self) -> Chunk:
        if self._done:
            self._conversation.__exit__()
            raise StopAsyncIteration
        message = await self._conversation.answer()
        assert isinstance(message, Chunk)
        self._done = message.last
        return message
