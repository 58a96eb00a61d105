"""Publish/subscribe of a client or worker: subscriptions and their messages, requests and their answers.

A message is handed to the link at the end of the loop's turn, together with others of that turn. The server sends each message
once to a client, however many of its subscriptions match; they are told apart here. Over HTTP it comes once for each pattern. A
subscription that is not iterated over fast enough drops what comes beyond its limits, and counts it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Self

from tasuki.core.message_requests import AddSubscription, MessageEvent, PublishNow, RemoveSubscription, SubscriptionAnswered
from tasuki.core.protocol import (
    BATCH_BYTES,
    BATCH_MAX,
    NO_RECEIVERS,
    DeliverMessages,
    Message,
    PublishedMessage,
    PublishMessages,
    batches,
    check_published,
    published_bytes,
)
from tasuki.core.subject import SubjectTrie, check_pattern, matches
from tasuki.core.subscribers import INBOX
from tasuki.core.units import shown_duration
from tasuki.errors import DeadlineExceeded, NotFound, TasukiError, Unavailable, WrongType
from tasuki.event_loop import ignore_result
from tasuki.net.server_connection import ServerConnection
from tasuki.net.tcp_link import TcpLink

MessageFunction = Callable[[PublishedMessage], Awaitable[None]]

QUEUE_MAX = 65_536  # messages of one subscription that were not taken yet
LOSSES_TOLD_S = 10.0  # between two lines of a log about them
QUEUE_MAX_BYTES = 64 * 1024 * 1024


class StreamedMessages(DeliverMessages, frozen=True):
    """Messages for the subscriptions of one pattern, which has a stream of its own over HTTP."""

    pattern: str = ""


class AsyncMessageSubscription:
    """Messages of a pattern, as they come. `AsyncClient.subscribe` makes it.

    async with client.subscribe("prices.>") as messages:      # subscribed, once this line is passed
        async for message in messages:
            print(message.subject, message.payload, message.headers)

    Without `async with`, the subscription begins with the first step of the loop.
    """

    def __init__(self, client: MessageExchange, pattern: str, queue: str) -> None:
        self.pattern = pattern
        self.queue = queue
        self.dropped = 0
        """Number of messages that were lost because they were not taken fast enough, here or by this client as a whole."""
        self._dropped_before = 0
        self._client = client
        self._messages: deque[PublishedMessage] = deque()
        self._bytes = 0
        self._wake: asyncio.Future[None] | None = None
        self._started: asyncio.Future[None] | None = None
        self._end: TasukiError | None = None
        self._closed = False

    def __repr__(self) -> str:
        queue = f" in queue group {self.queue!r}" if self.queue else ""
        return f"<{type(self).__name__} of {self.pattern!r}{queue}>"

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:  # `__aexit__` is not called: who is canceled here would leave a subscription that nobody reads
            self.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PublishedMessage:
        messages = self._messages
        while not messages:
            if not await self._more():
                raise StopAsyncIteration
        message = messages.popleft()
        self._bytes -= len(message.payload)
        return message

    async def take(self) -> list[PublishedMessage]:
        """Wait for messages and return all that have come; none when the subscription is over."""
        while not self._messages and await self._more():
            pass
        taken = list(self._messages)
        self._messages.clear()
        self._bytes = 0
        return taken

    async def start(self) -> None:
        """Subscribe, and return when the server sends the messages."""
        if self._closed:
            raise Unavailable(f"the subscription to {self.pattern!r} was closed")
        if self._started is None:
            self._started = asyncio.get_running_loop().create_future()
            self._started.add_done_callback(ignore_result)
            self._client.add(self)
        await asyncio.shield(self._started)

    def close(self) -> None:
        """End the subscription. Messages that were not taken are dropped."""
        if not self._closed:
            self._client.remove(self)
            self._messages.clear()
            self.end(None)

    @property
    def is_started(self) -> bool:
        """True once the server has said that it sends the messages."""
        return self._started is not None and self._started.done()

    @property
    def is_over(self) -> bool:
        """True once there will be no more messages: it was closed or refused."""
        return self._closed

    async def _more(self) -> bool:
        """Wait for a message; False: there will be none."""
        if self._end is not None:
            raise self._end
        if self._closed:
            return False
        if not self.is_started:
            await self.start()
        elif not self._messages:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        return True

    def answered(self, error: TasukiError | None) -> None:
        """Take the server's answer: subscribed, or refused for good."""
        if error is not None:
            self._client.remove(self)
            self.end(error)
        elif self._started is not None and not self._started.done():
            self._started.set_result(None)

    def newly_dropped(self) -> int:
        """Return the number of messages that were lost since the last call."""
        before, self._dropped_before = self._dropped_before, self.dropped
        return self.dropped - before

    def end(self, error: TasukiError | None) -> None:
        """Let the iteration end, with this error if there is one, after the messages that have come."""
        self._end, self._closed = error, True
        if self._started is not None and not self._started.done():
            self._started.set_exception(error or Unavailable(f"the subscription to {self.pattern!r} was closed"))
        self._notify()

    def put(self, message: PublishedMessage) -> None:
        """Take a message that matches."""
        if len(self._messages) >= QUEUE_MAX or self._bytes > QUEUE_MAX_BYTES:
            self.dropped += 1
            return
        self._messages.append(message)
        self._bytes += len(message.payload)
        if self._wake is not None:
            self._notify()

    def _notify(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None and not wake.done():
            wake.set_result(None)


class MessageSubscription:
    """Messages of a pattern, as they come, for `for`. `Client.subscribe` makes it.

    with client.subscribe("prices.>") as messages:
        for message in messages:
            print(message.subject, message.payload)
    """

    def __init__(self, messages: AsyncMessageSubscription, wait: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._async = messages
        self._wait = wait
        self._taken: deque[PublishedMessage] = deque()
        """Messages that the client's thread has handed over."""

    def __repr__(self) -> str:
        return repr(self._async).replace("Async", "")

    @property
    def dropped(self) -> int:
        """Number of messages that were lost because they were not taken fast enough, here or by this client as a whole."""
        return self._async.dropped

    def __enter__(self) -> Self:
        self._wait(self._async.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PublishedMessage:
        if not self._taken:
            self._taken.extend(self._wait(self._async.take()))
        if not self._taken:
            raise StopIteration
        return self._taken.popleft()

    def close(self) -> None:
        """End the subscription; an iteration in another thread ends."""

        async def close() -> None:
            self._async.close()

        self._wait(close())


class MessageExchange:
    """The messages of one client or worker. `apply` gives its machine an event, `ask` makes a call."""

    def __init__(
        self,
        connection: ServerConnection,
        apply: Callable[[MessageEvent], None],
        ask: Callable[[Callable[[int], Message]], asyncio.Future[Any]],
        wait_s: float,
    ) -> None:
        self._connection, self._apply, self._ask = connection, apply, ask
        self._wait_s = wait_s
        """Longest wait of a message for a connection."""
        self._online = asyncio.Event()
        self._subscriptions: dict[tuple[str, str], list[AsyncMessageSubscription]] = {}
        self._trie: SubjectTrie[AsyncMessageSubscription] = SubjectTrie()
        """The subscriptions without a queue group."""
        self._standing: set[tuple[str, str]] = set()
        """Patterns and queue groups whose messages the server sends on this connection."""
        self._inbox = f"{INBOX}{secrets.token_hex(16)}."
        self._inbox_ready = AsyncMessageSubscription(self, f"{self._inbox}*", "")
        self._numbers = itertools.count(1)
        self._requests: dict[str, asyncio.Future[PublishedMessage]] = {}
        self._pending: list[PublishedMessage] = []
        self._pending_bytes = 0
        self._is_due = self._closed = False
        self._refusal: TasukiError | None = None

    # ------------------------------------------------------------------------------------------------ subscriptions

    def add(self, subscription: AsyncMessageSubscription) -> None:
        if self._closed:
            subscription.end(Unavailable("this client was closed"))
            return
        key = (subscription.pattern, subscription.queue)
        others = self._subscriptions.setdefault(key, [])
        others.append(subscription)
        if not subscription.queue:
            self._trie.add(subscription.pattern, subscription)
        if len(others) == 1:
            self._apply(AddSubscription(*key))
        elif key in self._standing:
            subscription.answered(None)

    def remove(self, subscription: AsyncMessageSubscription) -> None:
        key = (subscription.pattern, subscription.queue)
        others = self._subscriptions.get(key, [])
        if subscription not in others:
            return
        others.remove(subscription)
        if not subscription.queue:
            self._trie.remove(subscription.pattern, subscription)
        if not others:
            del self._subscriptions[key]
            self._standing.discard(key)
            self._apply(RemoveSubscription(*key))

    def answered(self, command: SubscriptionAnswered) -> None:
        """Take the server's answer to a subscription; after a reconnect it is asked and answered again."""
        key = (command.pattern, command.queue)
        if command.error is None:
            self._standing.add(key)
        for subscription in list(self._subscriptions.get(key, ())):
            subscription.answered(command.error)

    def arrived(self, delivery: DeliverMessages) -> None:
        """Hand messages to the subscriptions that they are for."""
        of_stream = None
        if isinstance(delivery, StreamedMessages):
            of_stream = self._subscriptions.get((delivery.pattern, delivery.queue), [])
        if delivery.dropped:
            for subscription in itertools.chain(*self._subscriptions.values()) if of_stream is None else of_stream:
                subscription.dropped += delivery.dropped
        if delivery.queue:
            for item in delivery.items:
                self._put_in_queue(delivery.queue, item)
            return
        match, inbox = self._trie.match, self._inbox
        for item in delivery.items:
            if item.subject.startswith(inbox):
                future = self._requests.pop(item.subject, None)
                if future is not None and not future.done():
                    future.set_result(item)
                continue
            for subscription in match(item.subject) if of_stream is None else of_stream:
                subscription.put(item)

    def _put_in_queue(self, queue: str, item: PublishedMessage) -> None:
        """Hand a message to one subscription of the group; the next one gets the next."""
        for (pattern, of), members in self._subscriptions.items():
            if of == queue and matches(pattern, item.subject):
                members.append(members.pop(0))
                members[-1].put(item)
                return

    async def hand_to(self, function: MessageFunction, pattern: str, queue: str, logger: logging.Logger) -> None:
        """Subscribe, and call a function with one message after the other; failures and lost messages are logged."""
        tell_at = 0.0
        async with AsyncMessageSubscription(self, pattern, queue) as messages:
            async for message in messages:
                try:
                    await function(message)
                except Exception:
                    logger.exception("the function for messages of %s failed on %s", pattern, message.subject)
                if time.monotonic() >= tell_at and (lost := messages.newly_dropped()):
                    tell_at = time.monotonic() + LOSSES_TOLD_S
                    logger.warning("%d messages of %s were dropped: its function is slower than they come", lost, pattern)

    # ------------------------------------------------------------------------------------------------ publishing

    def welcomed(self) -> None:
        self._online.set()

    def lost(self) -> None:
        self._online.clear()
        self._standing.clear()

    async def publish(self, message: PublishedMessage) -> None:
        """Send a message; raises the refusal of an earlier one."""
        _check(message)
        self._raise_refusal()
        if self._closed or not self._online.is_set():
            await self._connected()
        if not isinstance(self._connection.link, TcpLink):  # a request of its own, whose answer is waited for
            await self._confirmed(message)
            return
        self._pending.append(message)
        self._pending_bytes += published_bytes(message)
        if len(self._pending) >= BATCH_MAX or self._pending_bytes >= BATCH_BYTES:
            self.send()
            await asyncio.sleep(0)
            if isinstance(link := self._connection.link, TcpLink) and link.full:
                await link.drain()
        elif not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.send)

    async def _confirmed(self, message: PublishedMessage) -> None:
        """Send a message behind those that wait, and raise its refusal."""
        self.send()
        await self._ask(lambda msg_id: PublishMessages(msg_id, [message], confirm=True))

    async def _connected(self) -> None:
        if self._closed:
            raise Unavailable("this client was closed")
        if self._online.is_set():
            return
        try:
            async with asyncio.timeout(self._wait_s):
                await self._online.wait()
        except TimeoutError:
            raise Unavailable(
                f"no server accepted this client within {shown_duration(self._wait_s)}; the message was not sent"
            ) from None

    def send(self) -> None:
        """Send what was published in this turn of the loop."""
        self._is_due = False
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        for some in batches(pending, published_bytes):
            self._apply(PublishNow(list(some)))

    async def flush(self) -> None:
        """Wait until the server has taken every message; raises the refusal of one of them."""
        self.send()
        await self._ask(lambda msg_id: PublishMessages(msg_id, [], confirm=True))
        self._raise_refusal()

    def refused(self, error: TasukiError) -> None:
        self._refusal = self._refusal or error

    def _raise_refusal(self) -> None:
        if self._refusal is not None:
            error, self._refusal = self._refusal, None
            raise error

    # ------------------------------------------------------------------------------------------------ requests

    async def request(self, subject: str, payload: bytes, headers: Mapping[str, str], timeout_s: float) -> PublishedMessage:
        """Publish a message and wait for the first answer to it; all of it within the timeout."""
        message = PublishedMessage(subject, payload, f"{self._inbox}{next(self._numbers)}", dict(headers))
        _check(message)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._answer_to(message)
        except TimeoutError:
            raise DeadlineExceeded(f"there was no answer on {subject!r} within {shown_duration(timeout_s)}") from None
        if reply.headers == NO_RECEIVERS and not reply.payload:
            raise NotFound(f"there is no subscriber for {subject!r}; start the program that answers there")
        return reply

    async def _answer_to(self, message: PublishedMessage) -> PublishedMessage:
        if self._inbox_ready.is_over:  # it was refused; by now there may be room for it
            self._inbox_ready = AsyncMessageSubscription(self, f"{self._inbox}*", "")
        await self._inbox_ready.start()
        await self._connected()
        answer: asyncio.Future[PublishedMessage] = asyncio.get_running_loop().create_future()
        self._requests[message.reply_to] = answer
        answer.add_done_callback(ignore_result)
        try:
            await self._confirmed(message)
            return await answer
        finally:
            self._requests.pop(message.reply_to, None)

    def close(self) -> None:
        """Send what is left, and end all subscriptions."""
        self._closed = True
        if self._online.is_set():
            self.send()
        closed = Unavailable("this client was closed")
        for subscription in list(itertools.chain(*self._subscriptions.values())):
            subscription.end(closed)
        for answer in self._requests.values():
            if not answer.done():
                answer.set_exception(closed)


def _check(message: PublishedMessage) -> None:
    """Raise WrongType for an argument that the server could not read, InvalidInput for one that it would refuse."""
    if not isinstance(message.payload, bytes):
        raise WrongType(f"payload must be bytes, got {type(message.payload).__name__}; encode it, as in text.encode()")
    texts = (message.subject, message.reply_to, *message.headers, *message.headers.values())
    if wrong := next((text for text in texts if not isinstance(text, str)), None):
        raise WrongType(f"subjects, names and values of headers must be str, got {type(wrong).__name__}")
    check_published(message)


def check_subscription(pattern: str, queue: str) -> None:
    """Refuse a pattern that nobody can subscribe to."""
    if not isinstance(pattern, str) or not isinstance(queue, str):
        raise WrongType(f"pattern and queue must be str, got {type(pattern).__name__} and {type(queue).__name__}")
    check_pattern(pattern)
