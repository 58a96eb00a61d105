"""Subscriptions of a client's link: for each pattern and queue group a stream of server-sent events.

A stream that is cut off is opened again; what was published in between is lost, as the promise of messages says. If it cannot be
opened, or is cut off at once, the link ends, and its owner turns to the next server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import httpx
import msgspec

from tasuki.core.protocol import MESSAGES_PATH, ErrorMessage, Message, PublishedMessage, Reply, Request
from tasuki.errors import Forbidden, InvalidInput, Overloaded, ResponseLost, TasukiError
from tasuki.event_loop import BackgroundTasks
from tasuki.net.http.base_link import POLL_WAIT_MIN_S
from tasuki.net.http.transport import HttpTransport
from tasuki.net.messages import StreamedMessages

SILENT_S = 30.0  # without a byte: the server sends a comment every 15 s
EVENT_MAX_BYTES = 8 * 1024 * 1024  # of a payload of 1 MiB, JSON may escape each byte with six
VERBS = frozenset({"subscribe", "unsubscribe"})
_SUBSCRIBED = b": subscribed"
_LOST = b"event: dropped\n"


class _Event(msgspec.Struct):
    """The data of an event `message` or `dropped`."""

    subject: str = ""
    payload: str | None = None
    payload_base64: bytes = b""
    headers: dict[str, str] = {}
    reply_to: str = ""
    dropped: int = 0


_decode = msgspec.json.Decoder(_Event).decode


class EventStreams:
    """The streams of one link. `hear` gets messages for the owner, `fail` an error that ends the link."""

    def __init__(
        self,
        transport: HttpTransport,
        tasks: BackgroundTasks,
        hear: Callable[[Message], None],
        fail: Callable[[TasukiError], None],
    ) -> None:
        self._transport, self._tasks, self._hear, self._fail = transport, tasks, hear, fail
        self._streams: dict[tuple[str, str], asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def ask(self, request: Request) -> None:
        """Open the stream that a `subscribe` is about, or end that of an `unsubscribe`."""
        key = pattern, queue = request.params["pattern"], request.params["queue"]
        if (before := self._streams.pop(key, None)) is not None:
            before.cancel()
        if request.verb == "subscribe":
            self._streams[key] = self._tasks.spawn(self._follow(request.msg_id, pattern, queue))
        else:
            asyncio.get_running_loop().call_soon(self._hear, Reply(request.msg_id))

    async def _follow(self, msg_id: int, pattern: str, queue: str) -> None:
        """Pass on the messages of a stream, and open it again each time that it is cut off."""
        loop = asyncio.get_running_loop()
        is_subscribed = False
        while True:
            began = loop.time()
            cut = ResponseLost(f"{self._transport.address} has ended the stream of messages of {pattern!r}")
            try:
                async with aclosing(self._read(pattern, queue)) as deliveries:
                    async for delivery in deliveries:
                        if delivery is not None:
                            self._hear(delivery)
                        elif not is_subscribed:
                            is_subscribed = True
                            self._hear(Reply(msg_id))
            except ResponseLost as error:
                cut = error
            except (InvalidInput, Forbidden, Overloaded) as error:  # of this subscription; others may continue
                self._hear(ErrorMessage(msg_id, error.code, error.message, error.details()))
                return
            except TasukiError as error:
                self._fail(error)
                return
            if not is_subscribed or loop.time() - began < POLL_WAIT_MIN_S:
                self._fail(cut)
                return

    async def _read(self, pattern: str, queue: str) -> AsyncGenerator[StreamedMessages | None, None]:
        """Yield what comes on one stream; None when the server says that the subscription stands."""
        params = {"pattern": pattern, "queue": queue}
        async with (
            self._transport.exchange("GET", MESSAGES_PATH, params=params, answer_s=SILENT_S) as response,
            aclosing(_texts(response)) as pieces,
        ):
            async for texts in pieces:
                if _SUBSCRIBED in texts:
                    yield None
                events = [(text.startswith(_LOST), _event(text)) for text in texts if not text.startswith(b":")]
                items = [_message(event) for is_loss, event in events if not is_loss]
                dropped = sum(event.dropped for is_loss, event in events if is_loss)
                if events:
                    yield StreamedMessages(items, queue, dropped, pattern)


async def _texts(response: httpx.Response) -> AsyncGenerator[list[bytes], None]:
    """Yield the texts of the events of a stream, those that come together as one list."""
    unread = bytearray()
    async for piece in response.aiter_bytes():
        unread += piece
        *texts, rest = unread.split(b"\n\n")
        unread = rest
        if texts:
            yield [bytes(text) for text in texts]
        if len(unread) > EVENT_MAX_BYTES:
            raise ResponseLost(f"an event of the stream is longer than {EVENT_MAX_BYTES} bytes")


def _event(text: bytes) -> _Event:
    try:
        return _decode(text.partition(b"\ndata: ")[2])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ResponseLost(f"an event of the stream cannot be read: {error}") from None


def _message(event: _Event) -> PublishedMessage:
    payload = event.payload_base64 if event.payload is None else event.payload.encode()
    return PublishedMessage(event.subject, payload, event.reply_to, event.headers)
