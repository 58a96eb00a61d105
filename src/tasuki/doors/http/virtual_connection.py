"""A virtual connection: to the server it is a peer like those of TCP, to the door a conversation of requests and answers.

Lives in the server's event loop, where messages are handed over as objects; nothing is encoded.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any

from tasuki.core.broker.events import BlobArrived
from tasuki.core.job import BlobRef
from tasuki.core.machine import Peer
from tasuki.core.protocol import CHUNK_BYTES, BlobGet, BlobPut, Chunk, ErrorMessage, HelloClient, HelloWorker, Message, Reply
from tasuki.core.store_messages import BlobPlace
from tasuki.errors import TasukiError, Unavailable, from_wire
from tasuki.server.server import Server

ANSWER_TIMEOUT_S = 30.0  # of the server; a store that takes longer is taken to be away
CHUNKS_AHEAD_MAX = 8  # of one download, 256 KiB each

_Answers = asyncio.Queue[Message | TasukiError]


class VirtualConnection:
    """One virtual connection. `hear` gets what is no answer to a question; `on_close` is told once, with why."""

    codec: str | None = None
    full = False

    def __init__(
        self,
        server: Server,
        address: str,
        hear: Callable[[Message], None],
        on_close: Callable[[TasukiError], None] = lambda error: None,
    ) -> None:
        self.peer = Peer("http", None, address)
        self.closed: TasukiError | None = None
        self._server = server
        self._hear = hear
        self._on_close = on_close
        self._msg_ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._several: dict[int, _Answers] = {}
        self._paused: set[object] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._taken = asyncio.Event()
        self._conn = server.opened(self)

    # ------------------------------------------------------------------------------------------------ to the server

    def next_id(self) -> int:
        return next(self._msg_ids)

    def tell(self, message: Message) -> None:
        """Say something that is not answered, or not by its msg_id."""
        if self.closed is None:
            self._server.received(self._conn, message)

    async def flow(self) -> None:
        """Waits while the server takes no more: its store is behind."""
        if not self._flowing.is_set():
            await self._within(self._flowing.wait(), ANSWER_TIMEOUT_S)

    async def ask(self, msg_id: int, message: Message, timeout_s: float = ANSWER_TIMEOUT_S) -> Message:
        """Say it and wait for the answer; an ErrorMessage is raised as the error that it describes."""
        answer = await self.exchange(msg_id, message, timeout_s)
        if isinstance(answer, ErrorMessage):
            raise from_wire(answer.code, answer.message, answer.details)
        return answer

    async def exchange(self, msg_id: int, message: Message, timeout_s: float = ANSWER_TIMEOUT_S) -> Message:
        """Say it and wait for the answer, whatever it is; only the end of the connection is raised."""
        await self.flow()
        if self.closed is not None:
            raise self.closed
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[msg_id] = answer
        try:
            self._server.received(self._conn, message)
            found: Message = await self._within(answer, timeout_s)
            return found
        finally:
            self._asked.pop(msg_id, None)

    async def hello(self, hello: HelloClient | HelloWorker) -> None:
        """Come in, or the error with which the server hung up."""
        await self.ask(hello.msg_id, hello)

    async def _within(self, what: Any, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await what
        except TimeoutError:
            raise Unavailable(f"the server's store has not answered within {timeout_s:g} s; try again") from None

    def leave(self) -> None:
        """This side ends it."""
        if self.closed is None:
            self._ended(Unavailable("the connection was closed"))
            self._server.closed(self._conn, "left")

    # ------------------------------------------------------------------------------------------------ blobs

    async def put_blob(self, data: bytes) -> BlobRef:
        """Have these bytes kept by their hash."""
        sha256 = await asyncio.get_running_loop().run_in_executor(None, _sha256, data)
        await self.put_pieces(BlobRef(sha256, len(data)), _cut(data))
        return BlobRef(sha256, len(data))

    async def put_pieces(self, ref: BlobRef, pieces: AsyncIterator[bytes]) -> None:
        """Have a blob kept whose bytes come piece by piece; they are not asked for if it is there."""
        msg_id = self.next_id()
        async with _Several(self._several, msg_id) as answers:
            if await self._offer(msg_id, ref, answers) is not None:
                await self._send_chunks(msg_id, pieces, answers)
                await self._next(answers)

    async def offer(self, ref: BlobRef) -> int | None:
        """Where to go on with it. None: it is there, and is kept for as long as one that has just come.

        Begins an upload that `leave` must end; one that is under way on this connection is over, and its bytes are written.
        """
        msg_id = self.next_id()
        async with _Several(self._several, msg_id) as answers:
            return await self._offer(msg_id, ref, answers, resume=True)

    async def put_part(self, ref: BlobRef, start: int, pieces: AsyncIterator[bytes], *, last: bool) -> int | None:
        """Go on with a blob at `start`; where to go on next, with all up to there written. None: it is whole and durable.

        If `start` is not where to go on, that is all that is answered, and nothing was asked for.
        """
        msg_id = self.next_id()
        async with _Several(self._several, msg_id) as answers:
            offset = await self._offer(msg_id, ref, answers, resume=True)
            if offset != start:
                return offset
            await self._send_chunks(msg_id, pieces, answers, start, last=last)
            if last or answers.qsize():
                await self._next(answers)
                return None
        return await self.offer(ref)

    async def place_of(self, ref: BlobRef) -> BlobPlace:
        """Where its bytes are, or are to be brought by another way than this. Keeps it as `offer` does."""
        msg_id = self.next_id()
        reply = await self.ask(msg_id, BlobPut(msg_id, ref.sha256, ref.size_bytes, direct=True))
        assert isinstance(reply, Reply)
        return BlobPlace(ref.sha256, ref.size_bytes, reply.body["generation"], reply.body["stored"])

    async def brought(self, place: BlobPlace) -> None:
        """Its bytes are in their place, verified and durable: have that recorded."""
        msg_id = self.next_id()
        async with _Several(self._several, msg_id) as answers:
            self._server.tell(BlobArrived(self._conn, BlobPut(msg_id, place.sha256, place.size_bytes), place))
            await self._next(answers)

    async def _offer(self, msg_id: int, ref: BlobRef, answers: _Answers, *, resume: bool = False) -> int | None:
        self.tell(BlobPut(msg_id, ref.sha256, ref.size_bytes, resume=resume))
        reply = await self._next(answers)
        assert isinstance(reply, Reply)
        return None if reply.body.get("have") else reply.body.get("offset", 0)

    async def _send_chunks(
        self, msg_id: int, pieces: AsyncIterator[bytes], answers: _Answers, offset: int = 0, *, last: bool = True
    ) -> None:
        async for piece in pieces:
            if answers.qsize():  # a refusal: the rest is of no use
                return
            await self.flow()
            self.tell(Chunk(msg_id, offset, piece))
            offset += len(piece)
        if last:
            self.tell(Chunk(msg_id, offset, b"", last=True))

    async def blob(self, sha256: str, job_id: str, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """The bytes of a job's blob, piece by piece. Whoever reads them from the store has compared them with their hash."""
        msg_id = self.next_id()
        async with _Several(self._several, msg_id) as answers:
            self.tell(BlobGet(msg_id, sha256, job_id, offset))
            while True:
                chunk = await self._next(answers)
                self._taken.set()
                assert isinstance(chunk, Chunk)
                if chunk.data:
                    yield chunk.data
                if chunk.last:
                    return

    async def _next(self, answers: _Answers) -> Message:
        if self.closed is not None:
            raise self.closed
        answer = await self._within(answers.get(), ANSWER_TIMEOUT_S)
        if isinstance(answer, ErrorMessage):
            raise from_wire(answer.code, answer.message, answer.details)
        if isinstance(answer, TasukiError):
            raise answer
        message: Message = answer
        return message

    # ------------------------------------------------------------------------------------------------ from the server

    def send(self, message: Message) -> None:
        corr_id = getattr(message, "corr_id", None)
        if corr_id in self._several:
            self._several[corr_id].put_nowait(message)
            return
        answer = self._asked.get(corr_id) if corr_id is not None else None
        if answer is None:
            self._hear(message)
        elif not answer.done():
            answer.set_result(message)

    def send_together(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.send(message)

    def trust(self, max_bytes: int) -> None:
        """Nothing is decoded here that could be too large."""

    def close(self, error: TasukiError | None = None) -> None:
        """The server ends it."""
        if self.closed is None:
            self._ended(error or Unavailable("the server is going down; try again"))

    def _ended(self, error: TasukiError) -> None:
        self.closed = error
        self._flowing.set()
        self._taken.set()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)
        for queue in self._several.values():
            queue.put_nowait(error)
        self._on_close(error)

    def pause_reading(self, why: object = None) -> None:
        self._paused.add(why)
        self._flowing.clear()

    def resume_reading(self, why: object = None) -> None:
        self._paused.discard(why)
        if not self._paused:
            self._flowing.set()

    async def drain(self) -> None:
        """Waits while somebody who reads a blob is behind."""
        while self.closed is None and any(queue.qsize() > CHUNKS_AHEAD_MAX for queue in self._several.values()):
            self._taken.clear()
            await self._taken.wait()
        if self.closed is not None:
            raise Unavailable("the reader left")


class _Several:
    """A question that has more than one answer."""

    def __init__(self, table: dict[int, _Answers], msg_id: int) -> None:
        self._table, self._msg_id = table, msg_id

    async def __aenter__(self) -> _Answers:
        self._table[self._msg_id] = asyncio.Queue()
        return self._table[self._msg_id]

    async def __aexit__(self, *error: object) -> None:
        del self._table[self._msg_id]


async def _cut(data: bytes) -> AsyncIterator[bytes]:
    for offset in range(0, len(data), CHUNK_BYTES):
        yield data[offset : offset + CHUNK_BYTES]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
