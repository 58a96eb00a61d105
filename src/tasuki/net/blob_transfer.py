"""Blobs, both ways: what clients and workers share. The server's side is `server/transfers.py`.

Over TCP they travel in chunks between the other messages; a link that has another way for them brings its own `BlobTransport`. A
transfer in chunks is a conversation: one request and its several answers, known by the request's msg_id. It is entered in the
line's table for exactly as long as somebody listens (`with _Conversation`); what comes later is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any, BinaryIO, Protocol, Self

from tasuki.core.backoff import Backoff
from tasuki.core.job import BlobRef
from tasuki.core.protocol import CHUNK_BYTES, BlobGet, BlobPut, Chunk, ErrorMessage, Message, Reply
from tasuki.errors import Corrupt, DiskFull, Overloaded, ProtocolError, TasukiError, Unavailable, from_wire
from tasuki.net.streams import FileSink, FileSource
from tasuki.net.tcp_link import TcpLink

FIRST_MSG_ID = 1 << 40  # above what a machine's own counter reaches, so that the two never meet
RETRY_FIRST_S = 0.05
RETRY_MAX_S = 2.0
WAITING_CHUNKS_MAX = 32  # of one download (8 MiB); past this the link is not read from until half of them are taken


class BlobTransport(Protocol):
    """A way for blobs that needs no conversation. Unavailable: it may be tried again."""

    async def put(self, source: FileSource, ref: BlobRef, progress: Callable[[int], None] | None) -> None: ...

    def pieces(self, ref: BlobRef, job_id: str, offset: int) -> AsyncGenerator[bytes, None]: ...


class BlobClient:
    """Transfers on whatever link is there at the moment; begun again, or gone on with, after a lost connection."""

    def __init__(self) -> None:
        self._carrier: BlobTransport | None = None
        self._msg_id = FIRST_MSG_ID
        self._conversations: dict[int, _Conversation] = {}
        self._changed = asyncio.Event()
        """There is a link, or never will be again."""
        self._ended = asyncio.Event()
        self._error: TasukiError | None = None

    def connected(self, link: TcpLink) -> None:
        self.carried_by(_Chunks(self, link))

    def carried_by(self, carrier: BlobTransport) -> None:
        """There is a link, and it has a way of its own for blobs."""
        self._carrier = carrier
        self._changed.set()

    def lost(self) -> None:
        """The link is gone: every transfer under way hears of it."""
        self._carrier = None
        if self._error is None:
            self._changed.clear()
        self._tell_all(Unavailable("the connection was lost during a transfer"))

    def close(self, error: TasukiError | None = None) -> None:
        """There will be no link any more, because of `error`: every transfer ends with it, also those that come later."""
        if self._error is None:
            self._error = error or Unavailable("there is no connection for the transfer any more")
        self._carrier = None
        self._changed.set()
        self._ended.set()
        self._tell_all(self._error)

    def _tell_all(self, error: TasukiError) -> None:
        for conversation in self._conversations.values():
            conversation.hear(error)

    def take(self, message: Message) -> bool:
        """Is this message part of a transfer? Then it is taken."""
        corr_id = getattr(message, "corr_id", 0)
        if corr_id < FIRST_MSG_ID:
            return False
        conversation = self._conversations.get(corr_id)
        if conversation is not None:
            conversation.hear(message)
        return True

    async def put(self, file: BinaryIO, ref: BlobRef, progress: Callable[[int], None] | None = None) -> None:
        """Make sure that the server has this blob; nothing is sent if it does. Goes on where it was after a lost connection."""
        async with FileSource(file) as source:
            await self._persist(lambda carrier: carrier.put(source, ref, progress))

    async def get(self, ref: BlobRef, job_id: str, write: Callable[[bytes], Any], *, offset: int = 0, digest: Any = None) -> None:
        """Receive a blob of a job, verified; goes on where it was after a lost connection.

        Somebody who has its first `offset` bytes already gives the sha256 `digest` over them, as hashlib makes it.
        """
        digest = hashlib.sha256() if digest is None else digest
        received = offset

        async def once(carrier: BlobTransport) -> None:
            nonlocal received
            if 0 < ref.size_bytes <= received:
                return
            async with contextlib.aclosing(carrier.pieces(ref, job_id, received)) as pieces:
                async for piece in pieces:
                    await sink.add(piece)
                    received += len(piece)

        async with FileSink(write, digest) as sink:
            await self._persist(once)
            await sink.flush()
        if digest.hexdigest() != ref.sha256:
            raise Corrupt(f"blob {ref.sha256} of job {job_id!r} arrived with sha256 {digest.hexdigest()}; try again")

    async def _persist(self, once: Callable[[BlobTransport], Awaitable[None]]) -> None:
        backoff = Backoff(RETRY_FIRST_S, RETRY_MAX_S)
        while True:
            carrier = await self._wait_for_carrier()
            try:
                await once(carrier)
                return
            except Unavailable as error:
                if self._error is not None:
                    raise self._error from None
                if isinstance(error, DiskFull | Overloaded):  # the caller's to decide
                    raise
            if self._carrier is carrier:  # the server said "not now"; a lost connection is made again in its own time
                await self._pause(backoff.next_s())
            else:
                backoff.reset()

    async def _wait_for_carrier(self) -> BlobTransport:
        while self._carrier is None:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        return self._carrier

    async def _pause(self, seconds: float) -> None:
        """Shorter if the line is closed meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()


class _Chunks:
    """The carrier of a link that has no other: chunks between the messages."""

    def __init__(self, line: BlobClient, link: TcpLink) -> None:
        self._line = line
        self._link = link

    async def put(self, source: FileSource, ref: BlobRef, progress: Callable[[int], None] | None) -> None:
        started_at = 0
        try:
            with self._offer(ref) as conversation:
                reply = await conversation.reply()
                if reply.get("go"):
                    started_at = int(reply.get("offset", 0))
                    await self._send(conversation, source, ref, started_at, progress)
        except Corrupt:
            if not started_at:
                raise
            # What the server had of it was not what we would have sent. It has none of it now.
            await self.put(source, ref, progress)

    def _offer(self, ref: BlobRef) -> _Conversation:
        return _Conversation(self._line, self._link, lambda msg_id: BlobPut(msg_id, ref.sha256, ref.size_bytes, resume=True))

    async def _send(
        self, conversation: _Conversation, source: FileSource, ref: BlobRef, offset: int, progress: Callable[[int], None] | None
    ) -> None:
        async with contextlib.aclosing(source.pieces(offset, ref.size_bytes)) as pieces:
            async for piece in pieces:
                for data in _chunks_of(piece):
                    self._link.send(Chunk(conversation.msg_id, offset, data))
                    offset += len(data)
                    await self._link.drain()
                    if progress is not None:
                        progress(offset)
                    if conversation.waiting:  # an answer before the last chunk is a refusal: the rest is of no use
                        await conversation.reply()
                        return
        self._link.send(Chunk(conversation.msg_id, offset, b"", last=True))
        await conversation.reply()

    async def pieces(self, ref: BlobRef, job_id: str, offset: int) -> AsyncGenerator[bytes, None]:
        with _Conversation(self._line, self._link, lambda msg_id: BlobGet(msg_id, ref.sha256, job_id, offset)) as conversation:
            last = False
            while not last:
                chunk = await conversation.chunk()
                yield chunk.data
                last = chunk.last


def _chunks_of(piece: bytes) -> Iterator[bytes]:
    return (piece[start : start + CHUNK_BYTES] for start in range(0, len(piece), CHUNK_BYTES))


class _Conversation:
    """One request and its several answers. Listens inside its `with` only."""

    def __init__(self, line: BlobClient, link: TcpLink, make: Callable[[int], Message]) -> None:
        self._line = line
        self._link = link
        self._make = make
        self._answers: asyncio.Queue[Message | TasukiError] = asyncio.Queue()
        line._msg_id += 1
        self.msg_id = line._msg_id

    def __enter__(self) -> Self:
        if self._link.closed:
            raise Unavailable("there is no connection")
        self._link.send(self._make(self.msg_id))
        self._line._conversations[self.msg_id] = self
        return self

    def __exit__(self, *error: object) -> None:
        self._line._conversations.pop(self.msg_id, None)
        self._link.resume_reading(self)

    @property
    def waiting(self) -> int:
        """How many answers came that nobody has taken yet."""
        return self._answers.qsize()

    def hear(self, message: Message | TasukiError) -> None:
        self._answers.put_nowait(message)
        if self.waiting >= WAITING_CHUNKS_MAX:
            self._link.pause_reading(self)

    async def answer(self) -> Message:
        message = await self._answers.get()
        if self.waiting <= WAITING_CHUNKS_MAX // 2:
            self._link.resume_reading(self)
        if isinstance(message, TasukiError):
            raise message
        if isinstance(message, ErrorMessage):
            raise from_wire(message.code, message.message, message.details)
        return message

    async def chunk(self) -> Chunk:
        message = await self.answer()
        if not isinstance(message, Chunk):
            raise ProtocolError(f"the server answered a download with a {type(message).__name__}")
        return message

    async def reply(self) -> dict[str, Any]:
        message = await self.answer()
        return message.body if isinstance(message, Reply) and isinstance(message.body, dict) else {}
