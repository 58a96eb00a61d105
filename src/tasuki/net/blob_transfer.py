"""Blob transfers of clients and workers, both ways. The server's side is `server/transfers.py`.

Over TCP blobs travel in chunks between the other messages; a link that carries them otherwise has its own `BlobTransport`. A
transfer in chunks is a conversation: one request and its several answers, found by the request's msg_id. It is in the table of
conversations for exactly as long as somebody listens (`_ChunkTransport._ask`); later messages are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any, BinaryIO, Protocol

from tasuki.core.backoff import Backoff
from tasuki.core.job import BlobRef
from tasuki.core.protocol import CHUNK_BYTES, BlobGet, BlobPut, Chunk, ErrorMessage, Message, Reply
from tasuki.errors import Corrupt, DiskFull, Overloaded, ProtocolError, TasukiError, Unavailable, from_wire
from tasuki.net.streams import FileSink, FileSource, OnProgress
from tasuki.net.tcp_link import TcpLink

FIRST_MSG_ID = 1 << 40  # above what a machine's own counter reaches, so that the two never meet
RETRY_FIRST_S = 0.05
RETRY_MAX_S = 2.0
WAITING_CHUNKS_MAX = 32  # of one download (8 MiB); past this the link is not read from until half of them are consumed


class BlobTransport(Protocol):
    """Carries blobs to and from one server. After Unavailable a transfer may be tried again."""

    async def put(self, source: FileSource, ref: BlobRef, progress: OnProgress) -> None: ...

    def pieces(self, ref: BlobRef, job_id: str, offset: int) -> AsyncGenerator[bytes, None]: ...


class BlobClient:
    """Transfers over the current link; resumed, or begun again, after a lost connection."""

    def __init__(self) -> None:
        self._transport: BlobTransport | None = None
        self._msg_ids = itertools.count(FIRST_MSG_ID + 1)
        self._conversations: dict[int, _Conversation] = {}
        self._changed = asyncio.Event()
        """Set while there is a link, and when there will never be one again."""
        self._ended = asyncio.Event()
        self._error: TasukiError | None = None

    def connected(self, link: TcpLink) -> None:
        self.carried_by(_ChunkTransport(self, link))

    def carried_by(self, transport: BlobTransport) -> None:
        """Use a new link, which has a transport of its own for blobs."""
        self._transport = transport
        self._changed.set()

    def lost(self) -> None:
        """Interrupt every transfer under way: the link is gone."""
        self._transport = None
        if self._error is None:
            self._changed.clear()
        self._tell_all(Unavailable("the connection was lost during a transfer"))

    def close(self, error: TasukiError | None = None) -> None:
        """End every transfer with `error`, also later ones: there will be no link any more."""
        if self._error is None:
            self._error = error or Unavailable("there is no connection for the transfer any more")
        self._transport = None
        self._changed.set()
        self._ended.set()
        self._tell_all(self._error)

    def _tell_all(self, error: TasukiError) -> None:
        for conversation in self._conversations.values():
            conversation.hear(error)

    def received(self, message: Message) -> None:
        """Pass a message to its transfer: its `corr_id` is FIRST_MSG_ID or above."""
        conversation = self._conversations.get(getattr(message, "corr_id", 0))
        if conversation is not None:
            conversation.hear(message)

    async def put(self, file: BinaryIO, ref: BlobRef, progress: OnProgress = None) -> None:
        """Make sure that the server has this blob; only missing bytes are sent. Resumed after a lost connection."""
        async with FileSource(file) as source:
            await self._retry(lambda transport: transport.put(source, ref, progress))

    async def get(self, ref: BlobRef, job_id: str, write: Callable[[bytes], Any], *, offset: int = 0, digest: Any = None) -> None:
        """Receive a blob of a job, verified; resumed after a lost connection.

        A caller that has the first `offset` bytes already gives their sha256 `digest`, a hashlib object.
        """
        digest = hashlib.sha256() if digest is None else digest
        received = offset

        async def once(transport: BlobTransport) -> None:
            nonlocal received
            if 0 < ref.size_bytes <= received:
                return
            async with contextlib.aclosing(transport.pieces(ref, job_id, received)) as pieces:
                async for piece in pieces:
                    await sink.add(piece)
                    received += len(piece)

        async with FileSink(write, digest) as sink:
            await self._retry(once)
            await sink.flush()
        if digest.hexdigest() != ref.sha256:
            raise Corrupt(f"blob {ref.sha256} of job {job_id!r} arrived with sha256 {digest.hexdigest()}; try again")

    async def _retry(self, once: Callable[[BlobTransport], Awaitable[None]]) -> None:
        backoff = Backoff(RETRY_FIRST_S, RETRY_MAX_S)
        while True:
            transport = await self._wait_for_transport()
            try:
                await once(transport)
                return
            except Unavailable as error:
                if self._error is not None:
                    raise self._error from None
                if isinstance(error, DiskFull | Overloaded):  # for the caller to decide
                    raise
            if self._transport is transport:  # the server refused for now; a lost connection is made again by its owner
                await self._pause(backoff.next_s())
            else:
                backoff.reset()

    async def _wait_for_transport(self) -> BlobTransport:
        while self._transport is None:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        return self._transport

    async def _pause(self, seconds: float) -> None:
        """Sleep, shorter if the client is closed meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()


class _ChunkTransport:
    """The transport of a link without its own: chunks between the other messages."""

    def __init__(self, client: BlobClient, link: TcpLink) -> None:
        self._client = client
        self._link = link

    async def put(self, source: FileSource, ref: BlobRef, progress: OnProgress) -> None:
        started_at = 0
        try:
            with self._ask(lambda msg_id: BlobPut(msg_id, ref.sha256, ref.size_bytes, resume=True)) as conversation:
                reply = await conversation.reply()
                if reply.get("go"):
                    started_at = int(reply.get("offset", 0))
                    await self._send(conversation, source, ref, started_at, progress)
        except Corrupt:
            if not started_at:
                raise
            # The part that the server had was of other bytes. The server has dropped it now.
            await self.put(source, ref, progress)

    @contextlib.contextmanager
    def _ask(self, make: Callable[[int], Message]) -> Iterator[_Conversation]:
        """Send a request, and receive its answers inside the block only."""
        if self._link.closed:
            raise Unavailable("there is no connection")
        msg_id = next(self._client._msg_ids)
        conversation = _Conversation(self._link, msg_id)
        self._link.send(make(msg_id))
        self._client._conversations[msg_id] = conversation
        try:
            yield conversation
        finally:
            self._client._conversations.pop(msg_id, None)
            self._link.resume_reading(conversation)

    async def _send(
        self, conversation: _Conversation, source: FileSource, ref: BlobRef, offset: int, progress: OnProgress
    ) -> None:
        async with contextlib.aclosing(source.pieces(offset, ref.size_bytes)) as pieces:
            async for piece in pieces:
                whole = memoryview(piece)  # a slice of it is no copy
                for start in range(0, len(piece), CHUNK_BYTES):
                    data = whole[start : start + CHUNK_BYTES]
                    self._link.send(Chunk(conversation.msg_id, offset, data))  # type: ignore[arg-type]  # encoded at once
                    offset += len(data)
                    await self._link.drain()
                    if progress is not None:
                        progress(offset)
                    if conversation.waiting:  # an answer before the last chunk is a refusal
                        await conversation.reply()
                        return
        self._link.send(Chunk(conversation.msg_id, offset, b"", last=True))
        await conversation.reply()

    async def pieces(self, ref: BlobRef, job_id: str, offset: int) -> AsyncGenerator[bytes, None]:
        with self._ask(lambda msg_id: BlobGet(msg_id, ref.sha256, job_id, offset)) as conversation:
            last = False
            while not last:
                chunk = await conversation.answer()
                if not isinstance(chunk, Chunk):
                    raise ProtocolError(f"the server answered a download with a {type(chunk).__name__}")
                yield chunk.data
                last = chunk.last


class _Conversation:
    """The answers to one request."""

    def __init__(self, link: TcpLink, msg_id: int) -> None:
        self.msg_id = msg_id
        self._link = link
        self._answers: asyncio.Queue[Message | TasukiError] = asyncio.Queue()

    @property
    def waiting(self) -> int:
        """Number of answers that have come and are not consumed yet."""
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

    async def reply(self) -> dict[str, Any]:
        message = await self.answer()
        return message.body if isinstance(message, Reply) and isinstance(message.body, dict) else {}
