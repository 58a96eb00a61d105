"""Delivery of published messages to the connections of a server: in slices, and never faster than a subscriber reads.

Messages are worth less than jobs. So the loop gives them SLICE_S of each of its turns while more wait, and a publisher
faster than that is not read from. A subscriber that reads too slowly loses messages: past SUBSCRIBER_MAX_BYTES unread they are
dropped and counted, and the count is told with the next message, or when the subscriber has caught up.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

import msgspec

from tasuki.core.broker.events import Deliver
from tasuki.core.protocol import ITEM_BYTES, DeliverMessages, published_bytes
from tasuki.server.queries import Connection
from tasuki.server.statistics import Statistics

SLICE_S = 0.001
SENDS_PER_LOOK = 16  # at the clock
SLOW_BYTES = 64 * 1024  # unread, from which on a subscriber is counted as slow
SUBSCRIBER_MAX_BYTES = 4 * 1024 * 1024
OWNER_MAX_BYTES = 64 * 1024 * 1024  # unread by all slow subscribers of one token
WAITING_MAX_BYTES = 4 * 1024 * 1024  # that have not been sent to anybody: publishers wait


class SlowSubscriber(msgspec.Struct):
    """A subscriber with much unread."""

    owner: str
    unread_bytes: int = 0
    dropped: int = 0
    """Messages that were dropped and not told of yet."""
    dropping: bool = False
    """True: the subscriber gets nothing until it has read half of what it may leave unread."""


class MessageDelivery:
    """Sends messages to the connections of `links`; `owner_of` returns the owner of a connection."""

    def __init__(self, links: Mapping[int, Connection], owner_of: Callable[[int], str], statistics: Statistics) -> None:
        self._links = links
        self._statistics = statistics
        self._owner_of = owner_of
        self._waiting: deque[Deliver] = deque()
        self._place = 0
        """Number of receivers of the first one that were served."""
        self._waiting_bytes = 0
        self._slow: dict[int, SlowSubscriber] = {}
        self._unread: Counter[str] = Counter()
        """Bytes that slow subscribers have not read, by owner."""
        self._full_owners: set[str] = set()
        self._publishers: set[int] = set()
        """Connections that are not read from until less waits."""

    def add(self, command: Deliver) -> None:
        """Deliver messages, at once if no others wait."""
        self._statistics.deliveries(command.message.items, len(command.conns))
        self._waiting.append(command)
        self._waiting_bytes += _size(command.message)
        if len(self._waiting) == 1:
            self._deliver_some()

    def published(self, conn: int) -> None:
        """Stop reading from a connection that has published, if too much waits."""
        if self._waiting_bytes > WAITING_MAX_BYTES and conn not in self._publishers and conn in self._links:
            self._publishers.add(conn)
            self._links[conn].pause_reading(self)

    def forget(self, conn: int) -> None:
        """Drop the state of a connection that is gone."""
        self._publishers.discard(conn)
        if (slow := self._slow.pop(conn, None)) is not None:
            self._unread[slow.owner] -= slow.unread_bytes
            if self._unread[slow.owner] <= OWNER_MAX_BYTES:
                self._full_owners.discard(slow.owner)
            if not self._unread[slow.owner]:
                del self._unread[slow.owner]

    def tick(self) -> None:
        """Look at slow subscribers, and tell those that have caught up what they lost."""
        for conn, slow in list(self._slow.items()):
            self._look(conn, slow)
            if not slow.dropping:
                self._tell(conn, slow)
            if slow.unread_bytes < SLOW_BYTES:
                self.forget(conn)

    def _deliver_some(self) -> None:
        """Deliver for SLICE_S, and let the loop look after other things before going on."""
        sent, until = 0, time.perf_counter() + SLICE_S
        while self._waiting:
            command = self._waiting[0]
            message, conns = command.message, command.conns
            while self._place < len(conns):
                conn = conns[self._place]
                self._place += 1
                self._deliver(conn, message)
                sent += 1
                if sent % SENDS_PER_LOOK == 0 and time.perf_counter() > until:
                    asyncio.get_running_loop().call_soon(self._deliver_some)
                    return
            self._waiting.popleft()
            self._waiting_bytes -= _size(message)
            self._place = 0
            if self._publishers and self._waiting_bytes < WAITING_MAX_BYTES // 2:
                self._resume()

    def _resume(self) -> None:
        publishers, self._publishers = self._publishers, set()
        for conn in publishers:
            if (link := self._links.get(conn)) is not None:
                link.resume_reading(self)

    def _deliver(self, conn: int, message: DeliverMessages) -> None:
        link = self._links.get(conn)
        if link is None:
            return
        slow = self._slow.get(conn)
        if slow is None and self._full_owners and (owner := self._owner_of(conn)) in self._full_owners:
            slow = self._slow[conn] = SlowSubscriber(owner)
        if slow is not None:
            self._look(conn, slow, _size(message))
            if slow.dropping:
                slow.dropped += len(message.items)
                self._statistics.dropped(message.items)
                return
            self._tell(conn, slow)
        link.deliver(message)
        if slow is not None or link.undelivered_bytes >= SLOW_BYTES:
            self._look(conn, self._slow.setdefault(conn, SlowSubscriber(self._owner_of(conn))))

    def _look(self, conn: int, slow: SlowSubscriber, more_bytes: int = 0) -> None:
        """Count what the subscriber has not read, and decide whether it gets more: messages of this size."""
        unread, owner = self._links[conn].undelivered_bytes, slow.owner
        self._unread[owner] += unread - slow.unread_bytes
        slow.unread_bytes = unread
        limit = SUBSCRIBER_MAX_BYTES // 2 if slow.dropping else SUBSCRIBER_MAX_BYTES
        is_full = self._unread[owner] > OWNER_MAX_BYTES
        slow.dropping = unread > limit or (is_full and unread + more_bytes >= SLOW_BYTES)
        if is_full:
            self._full_owners.add(owner)
        else:
            self._full_owners.discard(owner)

    def _tell(self, conn: int, slow: SlowSubscriber) -> None:
        if slow.dropped:
            self._links[conn].send(DeliverMessages([], dropped=slow.dropped))
            slow.dropped = 0


def _size(message: DeliverMessages) -> int:
    return sum(map(published_bytes, message.items)) + ITEM_BYTES * len(message.items)
