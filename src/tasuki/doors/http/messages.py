"""/v1/messages: publish a message as JSON, and read messages as server-sent events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec

from tasuki.core import protocol
from tasuki.doors.http.context import RequestContext
from tasuki.doors.http.exchange import StreamedResponse
from tasuki.doors.http.virtual_connection import VirtualConnection, beat, hello_of
from tasuki.errors import InvalidInput

QUIET_S = 15.0  # after which a comment is sent: proxies cut connections on which nothing comes
EVENTS_TYPE = "text/event-stream"
_encode = msgspec.json.Encoder().encode


class MessageBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One message; the payload is text, or base64."""

    subject: str
    payload: str | None = None
    payload_base64: bytes | None = None
    headers: dict[str, str] = {}
    reply_to: str = ""


class Published(msgspec.Struct):
    """The message is on its way."""

    subject: str


async def publish(context: RequestContext, body: MessageBody) -> Published:
    """Publish a message to all who are subscribed now."""
    if body.payload is not None and body.payload_base64 is not None:
        raise InvalidInput("a message has payload or payload_base64, not both")
    payload = body.payload_base64 if body.payload_base64 is not None else (body.payload or "").encode("utf-8", "surrogatepass")
    message = protocol.PublishedMessage(body.subject, payload, body.reply_to, body.headers)
    async with context.client() as client:
        await client.connection.ask(protocol.PublishMessages(client.connection.next_id(), [message], confirm=True))
    return Published(body.subject)


class MessageStream(VirtualConnection):
    """The connection of one reader. Messages wait in it; the server drops further ones if too many do."""

    def __init__(self, context: RequestContext) -> None:
        self._waiting: deque[protocol.DeliverMessages] = deque()
        self._arrived = asyncio.Event()
        super().__init__(context.http.server, context.caller.address, self._take, lambda error: self._arrived.set())

    def _take(self, message: protocol.Message) -> None:
        if isinstance(message, protocol.DeliverMessages):
            self._waiting.append(message)
            self.undelivered_bytes += _size(message)
            self._arrived.set()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the text of the events, to the end of the connection."""
        yield b": subscribed\n\n"
        while self.closed is None or self._waiting:
            if not self._waiting:
                self._arrived.clear()
                try:
                    async with asyncio.timeout(QUIET_S):
                        await self._arrived.wait()
                except TimeoutError:
                    yield b":\n\n"
                continue
            delivery = self._waiting.popleft()
            self.undelivered_bytes -= _size(delivery)
            yield b"".join(_event(item, delivery.queue) for item in delivery.items) + _dropped(delivery.dropped)


def _size(delivery: protocol.DeliverMessages) -> int:
    return sum(map(protocol.published_bytes, delivery.items)) + protocol.ITEM_BYTES * len(delivery.items)


def _event(item: protocol.PublishedMessage, queue: str) -> bytes:
    view: dict[str, Any] = {"subject": item.subject, "headers": item.headers, "reply_to": item.reply_to, "queue": queue}
    try:
        view["payload"] = item.payload.decode()
    except UnicodeDecodeError:
        view["payload_base64"] = item.payload
    return b"event: message\ndata: " + _encode(view) + b"\n\n"


def _dropped(count: int) -> bytes:
    return b"event: dropped\ndata: " + _encode({"dropped": count}) + b"\n\n" if count else b""


async def subscribe(context: RequestContext) -> StreamedResponse:
    """Read the messages of the patterns, as server-sent events, until you leave: `message`, and `dropped` if you are too slow."""
    query = context.request.query_params
    patterns, queue = query.getlist("pattern"), query.get("queue", "")
    if not patterns:
        raise InvalidInput("name what to read: ?pattern=prices.>, once or several times")
    async with AsyncExitStack() as stack:
        stream = await stack.enter_async_context(_opened(context))
        for pattern in dict.fromkeys(patterns):
            params = {"pattern": pattern, "queue": queue}
            await stream.ask(protocol.Request(stream.next_id(), "subscribe", params))
        headers = {"X-Accel-Buffering": "no"}  # a proxy that gathers events would keep them from the reader
        return StreamedResponse(stream.events(), stack.pop_all(), 200, headers, EVENTS_TYPE)


@asynccontextmanager
async def _opened(context: RequestContext) -> AsyncGenerator[MessageStream, None]:
    stream = MessageStream(context)
    beating = asyncio.ensure_future(beat(stream))
    try:
        await stream.ask(hello_of(stream, context.caller))
        yield stream
    finally:
        beating.cancel()
        stream.leave()
