"""Publish/subscribe as a part of the machines of clients and workers: their subscriptions, and the refusals of messages. Pure.

Subscriptions are asked for again on every new connection. A message is sent once, or not at all: it is neither kept while there
is no connection nor repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec

from tasuki.core import protocol
from tasuki.errors import TasukiError, from_wire

FIRST_MSG_ID = 1 << 39  # of messages: above the counters of machines, below those of blob transfers


class AddSubscription(msgspec.Struct, frozen=True):
    """Wish for the messages of a pattern, until it is removed."""

    pattern: str
    queue: str = ""


class RemoveSubscription(msgspec.Struct, frozen=True):
    """End of that wish."""

    pattern: str
    queue: str = ""


class PublishNow(msgspec.Struct, frozen=True):
    """Messages to be sent, if there is a connection."""

    items: list[protocol.PublishedMessage]


class MessagesArrived(msgspec.Struct, frozen=True):
    """Messages of subscriptions."""

    delivery: protocol.DeliverMessages


class SubscriptionAnswered(msgspec.Struct, frozen=True):
    """The server sends the messages of a pattern from now on, or will never do so. Comes again after each reconnect."""

    pattern: str
    queue: str
    error: TasukiError | None = None


class PublishRefused(msgspec.Struct, frozen=True):
    """The server did not send a message on its way."""

    error: TasukiError


MessageEvent = AddSubscription | RemoveSubscription | PublishNow
MessageCommand = MessagesArrived | SubscriptionAnswered | PublishRefused


class MessageRequests:
    """The requests of one machine about messages. `next_id` returns a new msg_id of the machine."""

    def __init__(self, next_id: Callable[[], int]) -> None:
        self._next_id = next_id
        self._publish_ids = itertools.count(FIRST_MSG_ID)
        self._wanted: dict[tuple[str, str], None] = {}
        self._asked: dict[int, tuple[str, str]] = {}

    def take(self, event: MessageEvent, *, online: bool) -> list[protocol.Message]:
        """Return what is to be sent."""
        if isinstance(event, PublishNow):
            return [protocol.PublishMessages(next(self._publish_ids), event.items)] if online else []
        key = (event.pattern, event.queue)
        if isinstance(event, AddSubscription):
            self._wanted[key] = None
            return [self._subscribe(key)] if online else []
        self._wanted.pop(key, None)
        # An answer to it is none to the next subscription with this pattern.
        self._asked = {msg_id: asked for msg_id, asked in self._asked.items() if asked != key}
        params = {"pattern": event.pattern, "queue": event.queue}
        return [protocol.Request(self._next_id(), "unsubscribe", params)] if online else []

    def _subscribe(self, key: tuple[str, str]) -> protocol.Message:
        msg_id = self._next_id()
        self._asked[msg_id] = key
        return protocol.Request(msg_id, "subscribe", {"pattern": key[0], "queue": key[1]})

    def welcomed(self) -> list[protocol.Message]:
        """Return the requests for a new connection."""
        self._asked.clear()
        return [self._subscribe(key) for key in self._wanted]

    def answered(self, message: protocol.Reply | protocol.ErrorMessage) -> list[MessageCommand] | None:
        """Return what follows from an answer; None: it is not about messages."""
        key = self._asked.pop(message.corr_id, None)
        if isinstance(message, protocol.Reply):
            return None if key is None else [SubscriptionAnswered(*key)]
        error = from_wire(message.code, message.message, message.details)
        if key is not None:
            return self.refused(key, error)
        return [PublishRefused(error)] if message.corr_id >= FIRST_MSG_ID else None

    def refused(self, key: tuple[str, str], error: TasukiError) -> list[MessageCommand]:
        """Give up a subscription."""
        self._wanted.pop(key, None)
        return [SubscriptionAnswered(*key, error)]

    def unsendable(self, msg_id: int, error: TasukiError) -> list[MessageCommand] | None:
        """Return what follows from a message that could not be encoded; None: it was another one."""
        if msg_id >= FIRST_MSG_ID:
            return [PublishRefused(error)]
        key = self._asked.pop(msg_id, None)
        return None if key is None else self.refused(key, error)

    def fail(self, error: TasukiError) -> list[MessageCommand]:
        """Give up all subscriptions: the server will never accept this peer."""
        return [command for key in list(self._wanted) for command in self.refused(key, error)]
