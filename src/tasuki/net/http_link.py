"""A link over HTTP: to its owner a connection that speaks messages, to the network plain requests, each of which stands alone.

Theory of operation. What the owner says in one turn of the loop leaves in one request (`/v1/frames`), several of which may be
under way; what may wait long for its answer (a log that is followed) has one for itself. The token of the Hello goes into a
header, not into the frame. The link is closed by whatever would break a connection: no answer, half an answer, a server that is
not there. Its owner then dials again and says again what is safe to say twice, as over TCP. A request that was refused as a whole
is an error to each message in it, and the link goes on.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, NamedTuple

import httpx
from msgspec.structs import replace

from tasuki.core.address import Address
from tasuki.core.machine import Peer
from tasuki.core.protocol import (
    FRAME_MAX_BYTES,
    Accepted,
    ErrorMessage,
    Heartbeat,
    HeartbeatAnswer,
    HelloClient,
    HelloWorker,
    Message,
    Request,
    SubmitJobs,
    Welcome,
)
from tasuki.errors import Forbidden, InvalidInput, NotFound, TasukiError, TooLarge, Unauthorized, UnknownFrame
from tasuki.net.http_blobs import HttpBlobs
from tasuki.net.http_names import FRAMES_MAX, FRAMES_PATH, FRAMES_TYPE
from tasuki.net.http_transport import ANSWER_S, CutOff, HttpTransport, NoConnection, NotTasuki
from tasuki.net.http_watches import Watches, names_jobs
from tasuki.wire.frames import FrameDecoder
from tasuki.wire.messages import decode, encode

REQUESTS_AT_ONCE = 8
WAITS_AT_ONCE = 32
REQUEST_MAX_BYTES = 1024 * 1024  # of several frames together; what proxies let through unless told otherwise
TOKEN_MAX_CHARS = 512
WAITING_VERBS = frozenset({"logs"})  # whose answers may take long


class _Said(NamedTuple):
    msg_id: int
    frame: bytes


class HttpLink:
    """One address, for as long as it answers. `on_message` gets every message, `on_closed` the end, once."""

    def __init__(
        self,
        address: Address,
        on_message: Callable[[HttpLink, Message], None],
        on_closed: Callable[[HttpLink, str], None],
        *,
        tls: ssl.SSLContext | None,
        timeout_s: float,
    ) -> None:
        self.codec: str | None = None
        self.tag: Any = None
        self.peer = Peer("http", None, f"{address.host}:{address.port}")
        self._address = address
        self._on_message, self._on_closed = on_message, on_closed
        self._transport = HttpTransport(address, tls, timeout_s)
        self.blobs = HttpBlobs(self._transport)
        self._watches = Watches(self._post, self._hear, self._broken)
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_Said] = deque()
        self._flushing = False
        self._request_max_bytes = REQUEST_MAX_BYTES
        self._quick = 0
        """Requests under way, but for those that may wait long."""
        self._waits = asyncio.Semaphore(WAITS_AT_ONCE)
        self._submits: dict[int, list[str]] = {}
        """By msg_id: the jobs whose ends are to be heard of, once they are accepted."""
        self._unanswered: set[int] = set()
        self._greeted = False
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------------------------ out

    def send(self, message: Message) -> None:
        """It leaves at the end of this turn of the loop."""
        self.say(message)

    def send_together(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.say(message)

    def say(self, message: Message) -> None:
        """Send it, or InvalidInput if no frame can hold it."""
        if self._closed:
            return
        match message:
            case HelloClient():
                self._greet(message)
            case HelloWorker():
                words = f"a worker cannot connect to {self._address}; give it an address of TCP: tcp://host:7000, tls://host:7000"
                self._loop.call_soon(self._broken, InvalidInput(words))
            case Heartbeat() if not self._unanswered:
                # Whether the server is there shows at the next request; until then nobody needs to know.
                self._loop.call_soon(self._hear, HeartbeatAnswer(message.msg_id))
            case Request(verb="watch") if names_jobs(message.params):
                self._watches.ask(message)
            case _:
                self._queue_up(message)

    def _greet(self, hello: HelloClient) -> None:
        token = hello.token
        if len(token) > TOKEN_MAX_CHARS or not token.isascii() or not token.isprintable():
            raise InvalidInput("the token cannot be sent: it is longer than a token, or has characters that no token has")
        self._transport.token = token
        said = self._said(hello.msg_id, encode(replace(hello, token="")))
        self._spawn(self._bundle([said]))

    def _queue_up(self, message: Message) -> None:
        said = self._said(getattr(message, "msg_id", 0), encode(message, self.codec, max_bytes=FRAME_MAX_BYTES))
        if isinstance(message, SubmitJobs) and message.watch:
            self._submits[said.msg_id] = [spec.job_id for spec in message.specs]
        if isinstance(message, Request) and message.verb in WAITING_VERBS and message.params.get("wait_s"):
            self._spawn(self._alone(said))
            return
        self._queue.append(said)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _said(self, msg_id: int, frame: bytes) -> _Said:
        self._unanswered.add(msg_id)
        return _Said(msg_id, frame)

    def _flush(self) -> None:
        self._flushing = False
        while self._queue and self._quick < REQUESTS_AT_ONCE and not self._closed:
            self._quick += 1
            self._spawn(self._next(self._next_bundle()))

    def _next_bundle(self) -> list[_Said]:
        bundle = [self._queue.popleft()]
        size = len(bundle[0].frame)
        while self._queue and len(bundle) < FRAMES_MAX and size + len(self._queue[0].frame) <= self._request_max_bytes:
            bundle.append(self._queue.popleft())
            size += len(bundle[-1].frame)
        return bundle

    async def _next(self, bundle: list[_Said]) -> None:
        try:
            await self._bundle(bundle)
        finally:
            self._quick -= 1
            self._flush()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # a defect, or the owner's: like one in a callback of a transport
            self._loop.call_exception_handler({"message": "an answer could not be taken", "exception": error, "task": task})
            self.abort(f"an answer could not be taken: {error}")

    # ------------------------------------------------------------------------------------------------ one request

    async def _alone(self, said: _Said) -> None:
        async with self._waits:
            await self._bundle([said])

    async def _bundle(self, bundle: list[_Said]) -> None:
        unanswered = {said.msg_id for said in bundle if said.msg_id}
        try:
            async with self._post([said.frame for said in bundle], {}, ANSWER_S) as messages:
                async for message in messages:
                    unanswered.discard(getattr(message, "corr_id", 0))
                    self._hear(message)
        except (NoConnection, CutOff, NotTasuki, Unauthorized, Forbidden) as error:
            self._broken(error)
        except TasukiError as error:
            if isinstance(error, NotFound) or not self._greeted:
                self._broken(error)
            elif isinstance(error, InvalidInput) and len(bundle) > 1:
                await self._apart(bundle, error)
            else:
                self._refuse(bundle, error)
        else:
            for msg_id in unanswered:
                self._hear(ErrorMessage(msg_id, "UNAVAILABLE", f"{self._address} has answered without a word to this"))

    async def _apart(self, bundle: list[_Said], error: InvalidInput) -> None:
        """Nothing of it was done. Together they were too large for something on the way, or one was bad: which shows apart."""
        if isinstance(error, TooLarge):
            self._request_max_bytes = sum(len(said.frame) for said in bundle) // 2
        for said in bundle:
            await self._bundle([said])

    def _refuse(self, bundle: list[_Said], error: TasukiError) -> None:
        for said in bundle:
            self._hear(ErrorMessage(said.msg_id, error.code, error.message, error.details()))

    @asynccontextmanager
    async def _post(
        self, frames: Sequence[bytes], params: Mapping[str, str], answer_s: float
    ) -> AsyncIterator[AsyncIterator[Message]]:
        wanted = {**params, "codec": self.codec} if self.codec is not None else params
        headers = {"Content-Type": FRAMES_TYPE, "Accept": FRAMES_TYPE}
        async with self._transport.exchange(
            "POST", FRAMES_PATH, params=wanted, headers=headers, content=b"".join(frames), answer_s=answer_s
        ) as response:
            kind = response.headers.get("content-type", "")
            if kind.partition(";")[0].strip() != FRAMES_TYPE:
                raise NotTasuki(f"{self._address} answered with {kind[:80] or 'nothing'!r}: is this a tasuki server with --http?")
            async with aclosing(_messages_of(response)) as messages:
                yield messages

    # ------------------------------------------------------------------------------------------------ in

    def _hear(self, message: Message) -> None:
        if self._closed:
            return
        self._unanswered.discard(getattr(message, "corr_id", 0))
        match message:
            case Welcome():
                self._greeted = True
            case ErrorMessage() if not message.corr_id:
                self._on_message(self, message)
                self.abort(message.message)
                return
            case ErrorMessage():
                self._submits.pop(message.corr_id, None)
            case Accepted():
                self._on_message(self, message)
                self._watch(message)
                return
        self._on_message(self, message)

    def _watch(self, accepted: Accepted) -> None:
        job_ids = self._submits.pop(accepted.corr_id, None)
        if job_ids:
            refused = {item.index for item in accepted.exceptions if item.code}
            self._watches.add(job_id for place, job_id in enumerate(job_ids) if place not in refused)

    def forget(self, job_ids: Iterable[str]) -> None:
        """Nobody waits for the ends of these any more."""
        self._watches.forget(job_ids)

    # ------------------------------------------------------------------------------------------------ end

    @property
    def closed(self) -> bool:
        return self._closed

    def _broken(self, error: TasukiError) -> None:
        """The link is of no use any more."""
        if self._closed:
            return
        if isinstance(error, NotFound):
            error = NotTasuki(f"{self._address} has no {FRAMES_PATH}: its path is another one, or it is older than this client")
        elif isinstance(error, Unauthorized) and not self._transport.token:
            error = Unauthorized(
                "a token is needed: --token-file FILE or TASUKI_TOKEN (the server's own user finds it in the data folder)"
            )
        if not isinstance(error, NoConnection | CutOff | NotTasuki):  # final, if it was the Hello that was refused
            self._on_message(self, ErrorMessage(0, error.code, error.message, error.details()))
        wants_tls = not self._greeted and isinstance(error, CutOff) and self._address.scheme == "http"
        self.abort(error.message + ("; does it want https://?" if wants_tls and "disconnected" in error.message else ""))

    def close(self, error: TasukiError | None = None) -> None:
        """There is nothing to say at the end: the server keeps nothing for us."""
        self.abort(error.message if error is not None else "closed")

    def abort(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        self._queue.clear()
        ending = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in ending:
            task.cancel()
        self._ending = [*ending, *self._watches.close()]
        self._on_closed(self, reason)

    async def wait_closed(self) -> None:
        """After `close` or `abort`: until nothing of it is left."""
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._transport.close()


async def _messages_of(response: httpx.Response) -> AsyncGenerator[Message, None]:
    decoder = FrameDecoder(FRAME_MAX_BYTES)
    async for piece in response.aiter_bytes():
        for message in _decoded(decoder, piece):
            yield message
    if decoder.partial:
        raise CutOff("an answer ended in the middle of a frame")


def _decoded(decoder: FrameDecoder, piece: bytes) -> list[Message]:
    messages: list[Message] = []
    try:
        for frame in decoder.feed(piece):
            with suppress(UnknownFrame):  # of a newer server, to a newer client
                messages.append(decode(frame, FRAME_MAX_BYTES))
    except InvalidInput as error:
        raise CutOff(f"an answer cannot be read: {error.message}") from None
    return messages
