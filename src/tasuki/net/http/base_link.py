"""Base of the links over HTTP: one address, its background tasks, its end; and frames in the bodies of requests and responses."""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import httpx

from tasuki.config import is_sendable_token
from tasuki.core.address import Address
from tasuki.core.machine import Peer
from tasuki.core.protocol import FRAME_MAX_BYTES, FRAMES_MAX, FRAMES_TYPE, Message
from tasuki.errors import InvalidInput, NotTasuki, ResponseLost, TasukiError, UnknownFrame
from tasuki.event_loop import BackgroundTasks
from tasuki.net.http.blobs import HttpBlobs
from tasuki.net.http.transport import HttpTransport
from tasuki.wire.messages import Frame, FrameDecoder, decode

REQUEST_MAX_BYTES = 1024 * 1024  # of several frames together: the usual limit of proxies
POLL_WAIT_S = 25.0  # below the idle timeouts of proxies
POLL_WAIT_MIN_S = 5.0

T = TypeVar("T")
OnMessage = Callable[[Any, Message], None]
OnClosed = Callable[[Any, str], None]


def check_token(token: str) -> str:
    """Return the token, or raise InvalidInput if a header cannot carry it."""
    if token and not is_sendable_token(token):
        raise InvalidInput("the token cannot be sent: it is longer than a token, or has characters that no token has")
    return token


def shorter_wait_s(wait_s: float, lasted_s: float) -> float:
    """Return the wait of the next poll after one that was cut off: a proxy has a shorter timeout."""
    return max(POLL_WAIT_MIN_S, min(wait_s, lasted_s * 0.7))


def next_bundle(queue: deque[T], max_bytes: int, size_of: Callable[[T], int]) -> list[T]:
    """Take as many frames from the queue as one request may carry: at least one."""
    bundle = [queue.popleft()]
    size_bytes = size_of(bundle[0])
    while queue and len(bundle) < FRAMES_MAX and size_bytes + size_of(queue[0]) <= max_bytes:
        bundle.append(queue.popleft())
        size_bytes += size_of(bundle[-1])
    return bundle


class FrameStream(NamedTuple):
    """The frames of a response, as they come. A frame of an unknown type is None."""

    messages: AsyncIterator[Message | None]
    headers: Mapping[str, str]


@asynccontextmanager
async def post(
    transport: HttpTransport, path: str, frames: Sequence[bytes], params: Mapping[str, str], answer_s: float
) -> AsyncIterator[FrameStream]:
    """Send frames, and yield the response, which is read inside the block."""
    headers = {"Content-Type": FRAMES_TYPE, "Accept": FRAMES_TYPE}
    async with transport.exchange(
        "POST", path, params=params, headers=headers, content=b"".join(frames), answer_s=answer_s
    ) as response:
        kind = response.headers.get("content-type", "")
        if kind.partition(";")[0].strip() != FRAMES_TYPE:
            raise NotTasuki(f"{transport.address} answered with {kind[:80] or 'nothing'!r}: is this a tasuki server with --http?")
        async with aclosing(_messages_of(response)) as messages:
            yield FrameStream(messages, response.headers)


async def _messages_of(response: httpx.Response) -> AsyncGenerator[Message | None, None]:
    decoder = FrameDecoder(FRAME_MAX_BYTES)
    async for piece in response.aiter_bytes():
        try:
            frames = decoder.feed(piece)
        except InvalidInput as error:
            raise ResponseLost(f"an answer cannot be read: {error.message}") from None
        for frame in frames:
            yield _decoded(frame)
    if decoder.partial:
        raise ResponseLost("an answer ended in the middle of a frame")


def _decoded(frame: Frame) -> Message | None:
    try:
        return decode(frame, FRAME_MAX_BYTES)
    except UnknownFrame:  # from a newer server, for newer peers
        return None
    except InvalidInput as error:
        raise ResponseLost(f"an answer cannot be read: {error.message}") from None


class BaseHttpLink(ABC):
    """A `Link` to one address, until it stops answering. `on_message` gets every message, `on_closed` the end, once."""

    def __init__(
        self, address: Address, on_message: OnMessage, on_closed: OnClosed, tls: ssl.SSLContext | None, timeout_s: float
    ) -> None:
        self.codec: str | None = None
        self.tag: Any = None
        self.peer = Peer("http", None, f"{address.host}:{address.port}")
        self._address = address
        self._on_message, self._on_closed = on_message, on_closed
        self._transport = HttpTransport(address, tls, timeout_s)
        self.blobs = HttpBlobs(self._transport)
        self._loop = asyncio.get_running_loop()
        self._request_max_bytes = REQUEST_MAX_BYTES
        self._closed = False
        self._tasks = BackgroundTasks(self._ended)

    def send(self, message: Message) -> None:
        """Send a message at the end of this turn of the loop."""
        self.say(message)

    def send_together(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.say(message)

    @abstractmethod
    def say(self, message: Message) -> None: ...

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self, error: TasukiError | None = None) -> None:
        """Close the link. By default nothing is sent at the end."""
        self.abort(error.message if error is not None else "closed")

    def abort(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        self._stop()
        self._tasks.cancel()
        self._on_closed(self, reason)

    @abstractmethod
    def _stop(self) -> None:
        """Drop everything that waits to be sent."""

    async def wait_closed(self) -> None:
        await self._tasks.wait()
        await self._transport.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:  # a defect here or in a callback of the owner
            self._loop.call_exception_handler({"message": "a response could not be handled", "exception": error, "task": task})
            self.abort(f"a response could not be handled: {error}")
