"""Delivery to subscribers that read at different speeds: fast ones get everything, slow ones a count of what they lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tasuki.core.broker.events import Deliver
from tasuki.core.protocol import DeliverMessages, PublishedMessage
from tasuki.server import message_delivery
from tasuki.server.message_delivery import OWNER_MAX_BYTES, SUBSCRIBER_MAX_BYTES, WAITING_MAX_BYTES, MessageDelivery
from tasuki.server.statistics import Statistics
from tests.support.waiting import until_async

MIB = 1024 * 1024


class Link:
    """A connection whose peer reads when it is told to."""

    def __init__(self, *, reads: bool = True) -> None:
        self.reads = reads
        self.got: list[DeliverMessages] = []
        self.unread_bytes = 0
        self.paused = False

    def deliver(self, message: DeliverMessages) -> None:
        self.got.append(message)
        if not self.reads:
            self.unread_bytes += sum(len(item.payload) for item in message.items)

    send = deliver

    def pause_reading(self, why: object = None) -> None:
        self.paused = True

    def resume_reading(self, why: object = None) -> None:
        self.paused = False

    @property
    def undelivered_bytes(self) -> int:
        return self.unread_bytes

    @property
    def dropped(self) -> int:
        return sum(message.dropped for message in self.got)

    @property
    def payloads(self) -> list[bytes]:
        return [item.payload for message in self.got for item in message.items]


def message(payload: bytes) -> DeliverMessages:
    return DeliverMessages([PublishedMessage("a", payload)])


def made(links: dict[int, Link], owner_of: Callable[[int], str] = str, statistics: Statistics | None = None) -> MessageDelivery:
    return MessageDelivery(links, owner_of, statistics or Statistics())  # type: ignore[arg-type]


def test_one_that_does_not_read_loses_messages_and_is_told_how_many_when_it_reads_again() -> None:
    async def main() -> None:
        links = {1: Link(), 2: Link(reads=False)}
        statistics = Statistics()
        delivery = made(links, statistics=statistics)
        sent = [bytes([number]) * (MIB // 4) for number in range(60)]
        for payload in sent:
            delivery.add(Deliver((1, 2), message(payload)))
        await until_async(lambda: len(links[1].got) == len(sent))

        assert links[1].payloads == sent
        lost = len(sent) - len(links[2].payloads)
        assert links[2].unread_bytes <= SUBSCRIBER_MAX_BYTES + MIB // 4
        counted = statistics.totals()["a"]
        assert (counted.deliveries, counted.dropped, links[2].dropped) == (2 * len(sent), lost, 0)

        links[2].unread_bytes = SUBSCRIBER_MAX_BYTES - 1  # a little: the next messages would be lost again
        delivery.tick()
        assert links[2].dropped == 0
        links[2].unread_bytes = 0
        delivery.tick()
        assert links[2].dropped == lost
        delivery.add(Deliver((2,), message(b"next")))
        assert links[2].payloads[-1] == b"next"
        assert links[2].dropped == lost

    asyncio.run(main())


def test_the_count_comes_before_the_message_that_follows_the_loss() -> None:
    async def main() -> None:
        links = {1: Link(reads=False)}
        delivery = made(links)
        links[1].unread_bytes = SUBSCRIBER_MAX_BYTES + 1
        for payload in (b"first", b"lost", b"lost too"):
            delivery.add(Deliver((1,), message(payload)))
        links[1].unread_bytes = SUBSCRIBER_MAX_BYTES // 4
        delivery.add(Deliver((1,), message(b"next")))

        assert links[1].got == [message(b"first"), DeliverMessages([], dropped=2), message(b"next")]

    asyncio.run(main())


def test_slow_subscribers_of_one_token_share_a_limit_and_others_are_served() -> None:
    async def main() -> None:
        links = {number: Link(reads=False) for number in range(100)}
        delivery = made(links, lambda conn: "greedy" if conn else "other")
        for _ in range(8):
            delivery.add(Deliver(tuple(links), message(bytes(MIB // 2))))
        await until_async(lambda: not delivery._waiting)

        greedy = sum(link.unread_bytes for conn, link in links.items() if conn)
        assert OWNER_MAX_BYTES <= greedy < OWNER_MAX_BYTES + MIB
        assert links[0].unread_bytes == 4 * MIB

        for conn in links:
            delivery.forget(conn)
        assert not delivery._unread

    asyncio.run(main())


def test_the_loop_goes_on_with_other_things_while_many_subscribers_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(message_delivery, "SLICE_S", 0.0)
        links = {number: Link() for number in range(1000)}
        delivery = made(links)
        delivery.add(Deliver(tuple(links), message(b"1")))
        turns = 0
        while not links[999].got:
            turns += 1
            await asyncio.sleep(0)
        assert turns >= 1000 // message_delivery.SENDS_PER_LOOK - 1
        assert all(link.payloads == [b"1"] for link in links.values())

    asyncio.run(main())


def test_a_publisher_waits_while_too_much_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(message_delivery, "SLICE_S", 0.0)
        links = {number: Link() for number in range(200)}
        publisher = links[1000] = Link()
        delivery = made(links)
        receivers = tuple(range(200))
        for _ in range(2 * WAITING_MAX_BYTES // (MIB // 2)):
            delivery.add(Deliver(receivers, message(bytes(MIB // 2))))
            delivery.published(1000)
        assert publisher.paused

        await until_async(lambda: not delivery._waiting)
        assert not publisher.paused

    asyncio.run(main())
