"""Messages of a client, without a network: which subscriptions stand, and how long a request waits."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tasuki.core.message_requests import AddSubscription, MessageEvent, MessageRequests, RemoveSubscription, SubscriptionAnswered
from tasuki.core.protocol import DeliverMessages, Message, PublishedMessage, PublishMessages, Reply
from tasuki.errors import DeadlineExceeded, Overloaded, Unavailable
from tasuki.net.messages import AsyncMessageSubscription, MessageExchange

NEVER_S = 3600.0


class Stage:
    """An exchange with a connection, and what it wishes. A message that is published is taken at once."""

    def __init__(self) -> None:
        self.wishes: list[MessageEvent] = []
        self.published: list[PublishedMessage] = []
        connection: Any = SimpleNamespace(link=None)
        self.exchange = MessageExchange(connection, self.wishes.append, self._ask, NEVER_S)
        self.exchange.welcomed()

    def _ask(self, make: Callable[[int], Message]) -> asyncio.Future[Any]:
        message = make(1)
        assert isinstance(message, PublishMessages)
        self.published += message.items
        taken = asyncio.get_running_loop().create_future()
        taken.set_result(None)
        return taken

    def subscription(self, pattern: str = "a.>", queue: str = "") -> AsyncMessageSubscription:
        return AsyncMessageSubscription(self.exchange, pattern, queue)

    def answer(self, error: Overloaded | None = None) -> None:
        """Answer the latest wish for a subscription."""
        wish = next(wish for wish in reversed(self.wishes) if isinstance(wish, AddSubscription))
        self.exchange.answered(SubscriptionAnswered(wish.pattern, wish.queue, error))

    def request(self, timeout_s: float = NEVER_S) -> asyncio.Task[PublishedMessage]:
        return asyncio.ensure_future(self.exchange.request("a.b", b"", {}, timeout_s))


def run(story: Callable[[Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await story(Stage())

    asyncio.run(main())


async def turns() -> None:
    """Let all that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_request_ends_at_its_timeout_though_its_inbox_was_not_answered() -> None:
    async def story(stage: Stage) -> None:
        with pytest.raises(DeadlineExceeded, match=r"there was no answer on 'a.b' within 0.01s"):
            await stage.request(0.01)
        assert stage.published == []

    run(story)


def test_an_inbox_that_was_refused_is_asked_for_again_by_the_next_request() -> None:
    async def story(stage: Stage) -> None:
        refused = stage.request()
        await turns()
        stage.answer(Overloaded("256 subscriptions"))
        with pytest.raises(Overloaded, match="256 subscriptions"):
            await refused
        again = stage.request()
        await turns()
        stage.answer()
        await turns()
        [asked] = stage.published
        stage.exchange.arrived(DeliverMessages([PublishedMessage(asked.reply_to, b"yes")]))
        assert (await again).payload == b"yes"

    run(story)


def test_of_two_subscriptions_to_one_pattern_either_may_end_before_the_other() -> None:
    async def story(stage: Stage) -> None:
        first, second = stage.subscription(), stage.subscription()
        starting = asyncio.gather(first.start(), second.start())
        await turns()
        stage.answer()
        await starting
        third = stage.subscription()
        await third.start()  # the server sends its messages already
        first.close()
        stage.exchange.arrived(DeliverMessages([PublishedMessage("a.b", b"1")]))
        assert [(await anext(each)).payload for each in (second, third)] == [b"1", b"1"]
        second.close()
        assert stage.wishes == [AddSubscription("a.>")]
        third.close()
        assert stage.wishes == [AddSubscription("a.>"), RemoveSubscription("a.>")]

    run(story)


def test_a_second_subscription_to_a_pattern_waits_for_the_new_server_as_the_first_one_does() -> None:
    async def story(stage: Stage) -> None:
        first = asyncio.ensure_future(stage.subscription().start())
        await turns()
        stage.answer()
        await first
        stage.exchange.lost()
        second = asyncio.ensure_future(stage.subscription().start())
        await turns()
        stage.exchange.welcomed()
        await turns()
        assert not second.done()
        stage.answer()
        await second

    run(story)


def test_a_subscription_whose_start_is_canceled_is_given_up() -> None:
    async def story(stage: Stage) -> None:
        async def enter() -> None:
            async with stage.subscription():
                pass

        entering = asyncio.ensure_future(enter())
        await turns()
        entering.cancel()
        await asyncio.wait([entering])
        assert stage.wishes == [AddSubscription("a.>"), RemoveSubscription("a.>")]

    run(story)


def test_nothing_is_waited_for_after_the_client_was_closed() -> None:
    async def story(stage: Stage) -> None:
        stage.exchange.close()
        with pytest.raises(Unavailable, match="closed"):
            await stage.subscription().start()
        with pytest.raises(Unavailable, match="closed"):
            await stage.request()

    run(story)


def test_an_answer_to_a_subscription_that_has_ended_is_none_to_the_next_one_with_its_pattern() -> None:
    requests = MessageRequests(itertools.count(1).__next__)
    for event in (AddSubscription("a.>"), RemoveSubscription("a.>"), AddSubscription("a.>")):
        requests.take(event, online=True)

    assert requests.answered(Reply(1)) is None
    assert requests.answered(Reply(2)) is None
    assert requests.answered(Reply(3)) == [SubscriptionAnswered("a.>", "")]
