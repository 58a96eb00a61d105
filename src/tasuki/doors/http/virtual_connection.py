"""Virtual connections: to the server a peer like one of TCP, to the HTTP door an object that is asked and answers.

A virtual connection lives in the server's event loop. Messages are handed over as objects; nothing is encoded.

Clients have one for each token in use, kept a while for the next request. A request that waits for the ends of jobs listens for
them there. A job that somebody listened for stays watched until it has ended, so that one long poll after the other costs the
store nothing more. A transfer has a connection of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
from starlette.requests import Request

from tasuki.core import protocol
from tasuki.core.access import Identity, PeerKind
from tasuki.core.broker.authentication import IDLE_TIMEOUT_S
from tasuki.core.broker.events import BlobArrived
from tasuki.core.job import TERMINAL, BlobRef, JobSpec, State
from tasuki.core.machine import Peer
from tasuki.core.store_messages import BlobPlace
from tasuki.doors.http.exchange import disconnected, wait_of
from tasuki.errors import Overloaded, TasukiError, Unavailable, from_wire, unknown_job
from tasuki.server.server import Server

ANSWER_TIMEOUT_S = 30.0  # of the server; a store that takes longer counts as unavailable
CHUNKS_AHEAD_MAX = 8  # of one download, 256 KiB each
KEPT_S = IDLE_TIMEOUT_S / 2  # after the last request
BEAT_S = IDLE_TIMEOUT_S / 3  # while a request waits
CLIENT_ID = "http"
HEARD_MAX_BYTES = 4 * 1024 * 1024  # results of one listener, inline ones of 64 KiB; the rest is read when it polls again

_Answers = asyncio.Queue[protocol.Message | TasukiError]
Hello = protocol.HelloClient | protocol.HelloWorker
ClientRequest = protocol.SubmitJobs | protocol.CancelJobs | protocol.Request | protocol.Heartbeat | protocol.PublishMessages
Question = Hello | ClientRequest | protocol.Put
SubmitAnswer = protocol.Acceptance | TasukiError | None
"""The answer for one job: None if it is new and stored, its acceptance if it was there, or the error."""


class Caller(msgspec.Struct, frozen=True):
    """The peer that sent a request, by its token. `secret` goes nowhere but into the Hello of a virtual connection."""

    identity: Identity
    sha256: str
    secret: str
    address: str

    def __repr__(self) -> str:
        return f"Caller({self.identity.name})"


class VirtualConnection:
    """One virtual connection. `on_message` gets messages that answer no question; `on_close` is called once, with the reason."""

    codec: str | None = None
    full, unread_bytes = False, 0  # the HTTP door counts its answers itself
    undelivered_bytes = 0
    """Size of the published messages that wait for their reader."""

    def __init__(
        self,
        server: Server,
        address: str,
        on_message: Callable[[protocol.Message], None],
        on_close: Callable[[TasukiError], None] = lambda error: None,
    ) -> None:
        self.peer = Peer("http", None, address)
        self.closed: TasukiError | None = None
        self._server = server
        self._on_message, self._on_close = on_message, on_close
        self._msg_ids = itertools.count(1)
        self._questions: dict[int, asyncio.Future[protocol.Message]] = {}
        self._streams: dict[int, _Answers] = {}
        """Questions that have several answers."""
        self._paused: set[object] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._taken = asyncio.Event()
        self._conn = server.opened(self)

    # ------------------------------------------------------------------------------------------------ to the server

    def next_id(self) -> int:
        return next(self._msg_ids)

    def tell(self, message: protocol.Message) -> None:
        """Send a message that has no answer, or none that names its msg_id."""
        if self.closed is None:
            self._server.received(self._conn, message)

    async def flow(self) -> None:
        """Wait while the server takes no more because its store is behind."""
        while not self._flowing.is_set():  # again, if those that woke up first have sent enough
            await self._within(self._flowing.wait())

    async def ask(self, question: Question) -> protocol.Message:
        """Send a question and return the answer; an ErrorMessage is raised as the error that it describes."""
        answer = await self.exchange(question)
        if isinstance(answer, protocol.ErrorMessage):
            raise from_wire(answer.code, answer.message, answer.details)
        return answer

    async def ask_body(self, question: Question) -> Any:
        """Send a question and return the body of its Reply."""
        answer = await self.ask(question)
        if not isinstance(answer, protocol.Reply):
            raise Unavailable(f"the server answered with {type(answer).__name__}; try again")
        return answer.body

    async def exchange(self, question: Question) -> protocol.Message:
        """Send a question and return the answer, ErrorMessage included; the end of the connection is raised."""
        await self.flow()
        if self.closed is not None:
            raise self.closed
        answer: asyncio.Future[protocol.Message] = asyncio.get_running_loop().create_future()
        self._questions[question.msg_id] = answer
        try:
            self._server.received(self._conn, question)
            return await self._within(answer)
        finally:
            self._questions.pop(question.msg_id, None)

    async def _within(self, what: Any) -> Any:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await what
        except TimeoutError:
            raise Unavailable(f"the server's store has not answered within {ANSWER_TIMEOUT_S:g} s; try again") from None

    def leave(self) -> None:
        """End the connection from this side."""
        if self.closed is None:
            self._ended(Unavailable("the connection was closed"))
            self._server.closed(self._conn, "left")

    # ------------------------------------------------------------------------------------------------ blobs

    async def put_blob(self, data: bytes) -> BlobRef:
        digest = await asyncio.to_thread(hashlib.sha256, data)
        ref = BlobRef(digest.hexdigest(), len(data))
        await self.put_pieces(ref, _cut(data))
        return ref

    async def put_pieces(self, ref: BlobRef, pieces: AsyncIterator[bytes]) -> None:
        """Store a blob whose bytes come piece by piece; they are not read if the blob is stored already."""
        msg_id = self.next_id()
        with self._stream(msg_id) as answers:
            if await self._offer(msg_id, ref, answers) is not None:
                await self._send_chunks(msg_id, pieces, answers)
                await self._next(answers)

    async def offer(self, ref: BlobRef) -> int | None:
        """Return the offset at which to continue an upload. None: the blob is stored, and kept as long as a new one.

        Begins an upload that `leave` must end; an upload under way on this connection ends, and its bytes are written.
        """
        msg_id = self.next_id()
        with self._stream(msg_id) as answers:
            return await self._offer(msg_id, ref, answers, resume=True)

    async def put_part(self, ref: BlobRef, start: int, pieces: AsyncIterator[bytes], *, last: bool) -> int | None:
        """Continue an upload at `start`; return the next offset, with everything before it written. None: complete and durable.

        If `start` is not where to continue, that offset is returned and no piece is read.
        """
        msg_id = self.next_id()
        with self._stream(msg_id) as answers:
            offset = await self._offer(msg_id, ref, answers, resume=True)
            if offset != start:
                return offset
            await self._send_chunks(msg_id, pieces, answers, start, last=last)
            if last or answers.qsize():
                await self._next(answers)
                return None
        return await self.offer(ref)

    async def place_of(self, ref: BlobRef) -> BlobPlace:
        """Return where the bytes are, or must be put by a presigned upload. Keeps the blob as `offer` does."""
        place = await self.ask_body(protocol.BlobPut(self.next_id(), ref.sha256, ref.size_bytes, direct=True))
        return BlobPlace(ref.sha256, ref.size_bytes, place["generation"], place["stored"])

    async def record_presigned(self, place: BlobPlace) -> None:
        """Record a blob whose bytes are in their place, verified and durable."""
        msg_id = self.next_id()
        with self._stream(msg_id) as answers:
            self._server.tell(BlobArrived(self._conn, protocol.BlobPut(msg_id, place.sha256, place.size_bytes), place))
            await self._next(answers)

    async def _offer(self, msg_id: int, ref: BlobRef, answers: _Answers, *, resume: bool = False) -> int | None:
        self.tell(protocol.BlobPut(msg_id, ref.sha256, ref.size_bytes, resume=resume))
        reply = await self._next(answers)
        assert isinstance(reply, protocol.Reply)
        return None if reply.body.get("have") else reply.body.get("offset", 0)

    async def _send_chunks(
        self, msg_id: int, pieces: AsyncIterator[bytes], answers: _Answers, offset: int = 0, *, last: bool = True
    ) -> None:
        async for piece in pieces:
            if answers.qsize():  # refused: the rest is of no use
                return
            await self.flow()
            self.tell(protocol.Chunk(msg_id, offset, piece))
            offset += len(piece)
        if last:
            self.tell(protocol.Chunk(msg_id, offset, b"", last=True))

    async def blob(self, sha256: str, job_id: str, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a job's blob, piece by piece; the server has compared them with their hash."""
        msg_id = self.next_id()
        with self._stream(msg_id) as answers:
            self.tell(protocol.BlobGet(msg_id, sha256, job_id, offset))
            while True:
                chunk = await self._next(answers)
                self._taken.set()
                assert isinstance(chunk, protocol.Chunk)
                if chunk.data:
                    yield chunk.data
                if chunk.last:
                    return

    @contextmanager
    def _stream(self, msg_id: int) -> Iterator[_Answers]:
        """Collect the several answers to one question."""
        self._streams[msg_id] = asyncio.Queue()
        try:
            yield self._streams[msg_id]
        finally:
            del self._streams[msg_id]

    async def _next(self, answers: _Answers) -> protocol.Message:
        if self.closed is not None:
            raise self.closed
        answer = await self._within(answers.get())
        if isinstance(answer, protocol.ErrorMessage):
            raise from_wire(answer.code, answer.message, answer.details)
        if isinstance(answer, TasukiError):
            raise answer
        return answer

    # ------------------------------------------------------------------------------------------------ from the server

    def send(self, message: protocol.Message) -> None:
        corr_id = getattr(message, "corr_id", None)
        if corr_id in self._streams:
            self._streams[corr_id].put_nowait(message)
            return
        answer = self._questions.get(corr_id) if corr_id is not None else None
        if answer is None:
            self._on_message(message)
        elif not answer.done():
            answer.set_result(message)

    deliver = send

    def send_together(self, messages: Iterable[protocol.Message]) -> None:
        for message in messages:
            self.send(message)

    def trust(self, max_bytes: int, owner: str) -> None:
        """Do nothing: no message is decoded here that could be too large."""

    def close(self, error: TasukiError | None = None) -> None:
        """End the connection from the server's side."""
        if self.closed is None:
            self._ended(error or Unavailable("the server is going down; try again"))

    def abort(self, reason: str) -> None:
        self.close(Overloaded(reason))

    def _ended(self, error: TasukiError) -> None:
        self.closed = error
        self._flowing.set()
        self._taken.set()
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(error)
        for queue in self._streams.values():
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
        """Wait while the reader of a blob is behind."""
        while self.closed is None and any(queue.qsize() > CHUNKS_AHEAD_MAX for queue in self._streams.values()):
            self._taken.clear()
            await self._taken.wait()
        if self.closed is not None:
            raise Unavailable("the reader left")


async def _cut(data: bytes) -> AsyncIterator[bytes]:
    for offset in range(0, len(data), protocol.CHUNK_BYTES):
        yield data[offset : offset + protocol.CHUNK_BYTES]


# ---------------------------------------------------------------------------------------------------- connections of clients


class Listener:
    """A request that waits for jobs to end. `woken` is done at the first end, or when the connection has ended."""

    def __init__(self) -> None:
        self.items: list[protocol.JobResult] = []
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._size_bytes = 0

    @property
    def full(self) -> bool:
        return self._size_bytes > HEARD_MAX_BYTES

    def hear(self, item: protocol.JobResult) -> None:
        if not self.full:
            self._size_bytes += protocol.outcome_bytes(item.outcome)
            self.items.append(item)
        self.wake()

    def wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


class TokenConnection:
    """The connection of one token, shared by its requests."""

    def __init__(self, server: Server, address: str) -> None:
        self.connection = VirtualConnection(server, address, self._on_message, self._on_close)
        self.users = 0
        self.used_at = 0.0
        self.beat_at = server.now().monotonic
        self.opened: asyncio.Future[protocol.Message] | None = None
        self._listeners: dict[str, list[Listener]] = {}
        self._watched: set[str] = set()
        """Jobs whose ends the server will report."""

    async def request(self, verb: str, **params: Any) -> Any:
        """Send a request and return the body of its Reply."""
        return await self.connection.ask_body(protocol.Request(self.connection.next_id(), verb, params))

    async def cancel(self, job_ids: list[str], reason: str) -> Any:
        """Cancel jobs and return their states."""
        return await self.connection.ask_body(protocol.CancelJobs(self.connection.next_id(), job_ids, reason))

    async def submit(self, specs: list[JobSpec], on_failed: str = "return") -> list[SubmitAnswer]:
        submit = protocol.SubmitJobs(self.connection.next_id(), specs, watch=False, on_failed=on_failed)
        answer = await self.connection.ask(submit)
        if not isinstance(answer, protocol.Accepted):
            raise Unavailable(f"the server answered with {type(answer).__name__}; try again")
        found: list[SubmitAnswer] = [None] * len(specs)
        for one in answer.exceptions:
            found[one.index] = from_wire(one.code, one.message, one.details) if one.code else one
        return found

    @contextmanager
    def listen(self, job_ids: Collection[str]) -> Iterator[Listener]:
        """Yield a listener for the ends of these jobs; `watch` makes the server report them."""
        listener = Listener()
        for job_id in job_ids:
            self._listeners.setdefault(job_id, []).append(listener)
        try:
            yield listener
        finally:
            for job_id in job_ids:
                others = self._listeners[job_id]
                others.remove(listener)
                if not others:
                    del self._listeners[job_id]

    def unwatched(self, job_ids: Collection[str]) -> list[str]:
        """Return the jobs that the server does not watch yet."""
        return [job_id for job_id in job_ids if job_id not in self._watched]

    async def watch(self, job_ids: list[str]) -> dict[str, str]:
        """Return the states of jobs; ends are reported to their listeners, past ones at once."""
        self._watched.update(job_ids)  # before the answer: an end that comes right behind it takes its job out again
        try:
            return (await self.request("watch", job_ids=job_ids))["states"]
        except BaseException:
            self._watched.difference_update(job_ids)
            raise

    async def view(
        self, job_id: str, poll: Request | None = None, *, result: bool = False, subject: str | None = None
    ) -> dict[str, Any]:
        """Return a job; NotFound if it is not of `subject`.

        With `poll`, a request with `?wait=25`: after the job's end, if that comes in time and the peer does not leave.
        """
        wait_s = wait_of(poll) if poll is not None else 0.0
        while True:
            [view] = await self.request("get", job_ids=[job_id], result=result)
            if subject is not None and view["subject"] != subject:
                raise unknown_job(job_id)
            if poll is None or not wait_s or State(view["state"]) in TERMINAL:
                return view
            with self.listen([job_id]) as listener, disconnected(poll) as left:
                await self.request("watch", job_ids=[job_id])
                await asyncio.wait([listener.woken, left], timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                if self.connection.closed is not None:
                    raise self.connection.closed
            wait_s = 0.0

    def _on_message(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.Results):
            for item in message.items:
                self._watched.discard(item.job_id)
                for listener in self._listeners.get(item.job_id, ()):
                    listener.hear(item)

    def _on_close(self, error: TasukiError) -> None:
        for listeners in self._listeners.values():
            for listener in listeners:
                listener.wake()


@asynccontextmanager
async def dedicated_connection(
    server: Server, caller: Caller, worker_id: str, incarnation: str
) -> AsyncIterator[VirtualConnection]:
    """Yield a connection of its own for a client, or for this process of a worker; its end aborts what is under way."""
    connection = VirtualConnection(server, caller.address, lambda message: None)
    beating = asyncio.ensure_future(beat(connection))
    hello: Hello = hello_of(connection, caller)
    if caller.identity.kind is PeerKind.WORKER:
        hello = protocol.HelloWorker(
            msg_id=hello.msg_id, worker_id=worker_id, incarnation=incarnation, token=caller.secret, agent="http", transfers=True
        )
    try:
        await connection.ask(hello)
        yield connection
    finally:
        beating.cancel()
        connection.leave()


def hello_of(connection: VirtualConnection, caller: Caller) -> protocol.HelloClient:
    """Return the Hello of a client with the caller's token."""
    return protocol.HelloClient(msg_id=connection.next_id(), client_id=CLIENT_ID, token=caller.secret, agent="http")


async def beat(connection: VirtualConnection) -> None:
    """Send heartbeats: a long download sends nothing by itself."""
    while connection.closed is None:
        await asyncio.sleep(BEAT_S)
        connection.tell(protocol.Heartbeat(connection.next_id()))


class Clients:
    """The connections of all tokens that were used lately."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._clients: dict[str, TokenConnection] = {}

    @asynccontextmanager
    async def use(self, caller: Caller) -> AsyncIterator[TokenConnection]:
        """Yield the connection of the caller's token, opened if there is none."""
        client = self._clients.get(caller.sha256)
        if client is None or client.connection.closed is not None:
            client = self._clients[caller.sha256] = TokenConnection(self._server, caller.address)
            client.opened = asyncio.ensure_future(client.connection.ask(hello_of(client.connection, caller)))
        assert client.opened is not None
        client.users += 1
        try:
            try:
                await asyncio.shield(client.opened)
            except BaseException:
                if client.opened.done():  # with an error: the next request tries anew
                    client.connection.leave()
                raise
            yield client
        finally:
            client.users -= 1
            client.used_at = self._server.now().monotonic

    def tick(self) -> None:
        """Close connections that were not used lately; send heartbeats for the others."""
        now = self._server.now().monotonic
        for key, client in list(self._clients.items()):
            connection = client.connection
            if connection.closed is not None or (not client.users and now - client.used_at > KEPT_S):
                connection.leave()
                del self._clients[key]
            elif client.users and now - client.beat_at > BEAT_S and client.opened is not None and client.opened.done():
                client.beat_at = now
                connection.tell(protocol.Heartbeat(connection.next_id()))

    def close(self) -> None:
        for client in self._clients.values():
            client.connection.leave()
        self._clients.clear()
