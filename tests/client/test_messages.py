"""Publish/subscribe from Python: async and blocking clients, requests, refusals, and subscribers that are too slow."""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tasuki import AsyncClient, Client
from tasuki.core.protocol import DeliverMessages, PublishedMessage
from tasuki.errors import DeadlineExceeded, Forbidden, InvalidInput, NotFound, Unavailable, WrongType
from tasuki.net import messages as net_messages
from tasuki.net.messages import AsyncMessageSubscription
from tests.support.processes import ServerProcess
from tests.support.waiting import until_async

Story = Callable[[AsyncClient, AsyncClient], Coroutine[Any, Any, None]]


@pytest.fixture(params=["tcp", "http"])
def door(request: pytest.FixtureRequest, server: ServerProcess) -> ServerProcess:
    """The server, with the address of the door as its url."""
    door = copy.copy(server)
    door.url = server.url if request.param == "tcp" else server.http_url
    return door


def tell(server: ServerProcess, story: Story, other: ServerProcess | None = None) -> None:
    async def main() -> None:
        two_url = (other or server).url
        async with AsyncClient(server.url, token=server.token) as one, AsyncClient(two_url, token=server.token) as two:
            async with asyncio.timeout(30):
                await story(one, two)

    asyncio.run(main())


async def echo(client: AsyncClient, messages: AsyncMessageSubscription) -> None:
    async for message in messages:
        await client.publish(message.reply_to, message.payload.upper(), headers=message.headers)


def test_messages_come_in_order_with_their_headers(door: ServerProcess, server: ServerProcess) -> None:
    async def story(one: AsyncClient, two: AsyncClient) -> None:
        async with one.subscribe("order.>") as all_of_them, one.subscribe("order.a") as some:
            for number in range(3000):  # several frames
                await two.publish(f"order.{'ab'[number % 2]}", b"%d" % number, headers={"n": str(number)}, reply_to="x")
            got = [await anext(all_of_them) for _ in range(3000)]
            assert got == [
                PublishedMessage(f"order.{'ab'[number % 2]}", b"%d" % number, "x", {"n": str(number)}) for number in range(3000)
            ]
            assert [await anext(some) for _ in range(1500)] == got[::2]

    tell(door, story, server)


def test_contents_of_any_kind_and_size_come_as_they_were(door: ServerProcess) -> None:
    contents = [b"", b"\xff\x00", "two\n\nlines \u2028 \x85 é".encode(), b"\x01" * 1024 * 1024, bytes(range(256))]

    async def story(one: AsyncClient, two: AsyncClient) -> None:
        async with one.subscribe("kinds.>") as messages:
            for payload in contents:
                await two.publish("kinds.a", payload, headers={"é": "\x00\u2029"})
            assert [await anext(messages) for _ in contents] == [
                PublishedMessage("kinds.a", payload, "", {"é": "\x00\u2029"}) for payload in contents
            ]

    tell(door, story)


def test_a_subscription_without_a_with_begins_with_its_loop(server: ServerProcess) -> None:
    async def story(one: AsyncClient, two: AsyncClient) -> None:
        async def first() -> bytes:
            async for message in one.subscribe("late"):
                return message.payload
            raise AssertionError("no message came")

        waiting = asyncio.ensure_future(first())
        while not waiting.done():
            await two.publish("late", b"now")
            await asyncio.sleep(0.01)
        assert waiting.result() == b"now"

    tell(server, story)


def test_of_a_queue_group_one_gets_it_also_inside_one_client(door: ServerProcess) -> None:
    async def story(one: AsyncClient, two: AsyncClient) -> None:
        async with (
            one.subscribe("q.*", queue="g") as a,
            one.subscribe("q.*", queue="g") as b,
            two.subscribe("q.>", queue="g") as c,
            two.subscribe("q.1") as plain,
        ):
            for number in range(40):
                await one.publish("q.1", b"%d" % number)
            await one.flush()
            got = [await anext(plain) for _ in range(40)]
            await until_async(lambda: sum(len(member._messages) for member in (a, b, c)) == 40)
            members = [[message.payload for message in member._messages] for member in (a, b, c)]
        assert sorted(itertools.chain(*members)) == sorted(message.payload for message in got)
        assert [len(member) for member in members] == [10, 10, 20]

    tell(door, story)


def test_a_request_is_answered(door: ServerProcess) -> None:
    async def story(one: AsyncClient, two: AsyncClient) -> None:
        async with one.subscribe("echo.*", queue="echo") as messages:
            serving = asyncio.ensure_future(echo(one, messages))
            answers = await asyncio.gather(*(two.request("echo.a", b"hi %d" % n, headers={"n": str(n)}) for n in range(50)))
            serving.cancel()
        assert [answer.payload for answer in answers] == [b"HI %d" % n for n in range(50)]
        assert [answer.headers for answer in answers] == [{"n": str(n)} for n in range(50)]
        with pytest.raises(NotFound, match=r"there is no subscriber for 'echo.a'"):
            await two.request("echo.a", timeout=20)
        async with one.subscribe("silent"):
            with pytest.raises(DeadlineExceeded, match=r"there was no answer on 'silent' within 0.05s"):
                await two.request("silent", timeout=0.05)

    tell(door, story)


def test_the_blocking_client_has_the_same(door: ServerProcess) -> None:
    with door.client() as publisher, door.client() as subscriber:
        with subscriber.subscribe("sync.>") as messages:
            for number in range(5):
                publisher.publish("sync.a", b"%d" % number)
            got = [next(messages).payload for _ in range(5)]
            assert got == [b"0", b"1", b"2", b"3", b"4"]
        with subscriber.subscribe("sync.echo") as messages:
            answering = threading.Thread(target=lambda: subscriber.publish(next(messages).reply_to, b"yes"))
            answering.start()
            assert publisher.request("sync.echo").payload == b"yes"
            answering.join()
            waiting = threading.Thread(target=lambda: ended.extend(messages))
            ended: list[PublishedMessage] = []
            waiting.start()
        waiting.join(20)
        assert not waiting.is_alive()


def test_a_token_without_the_scope_neither_publishes_nor_subscribes(door: ServerProcess) -> None:
    with Client(door.url, token=door.create_token("client", scope=["publish:a.>", "subscribe:b.>"])) as client:
        client.publish("a.x", b"1")
        client.flush()
        with pytest.raises(Forbidden, match=r"may not publish to 'b.x'; its scope is publish:a.>, subscribe:b.>"):  # noqa: PT012
            client.publish("b.x", b"1")  # over HTTP the answer is waited for
            client.flush()
        with pytest.raises(Forbidden, match=r"may not publish to 'b.x'"):
            client.request("b.x", timeout=3600)  # told at once
        with pytest.raises(Forbidden, match=r"may not subscribe to messages of 'a.x'"):
            next(client.subscribe("a.x"))
        with client.subscribe("b.x"):
            pass
        with pytest.raises(Forbidden, match="may not submit"):
            client.submit(subject="a.x")
        client.flush()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda client: client.publish("a", "text"), WrongType, "payload must be bytes, got str"),
        (lambda client: client.publish("a", b"", headers={"n": 1}), WrongType, "values of headers must be str, got int"),
        (lambda client: client.publish("a.*", b""), InvalidInput, "wildcard"),
        (lambda client: client.publish("a", bytes(1024 * 1024 + 1)), InvalidInput, "the limit is 1048576"),
        (lambda client: client.subscribe("a..b"), InvalidInput, "empty token"),
        (lambda client: client.subscribe("a", queue=5), WrongType, "must be str"),
        (lambda client: client.subscribe("a", queue="x" * 65).__enter__(), InvalidInput, "queue group"),
        (lambda client: client.request("a", "text"), WrongType, "payload must be bytes"),
    ],
)
def test_a_mistake_is_told_at_once(client: Client, call: Callable[[Client], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(client)


def test_a_subscription_ends_when_its_client_is_closed(door: ServerProcess) -> None:
    async def main() -> None:
        client = AsyncClient(door.url, token=door.token)
        await client.open()
        waiting = asyncio.ensure_future(anext(client.subscribe("never")))
        await client.flush()
        await client.close()
        with pytest.raises(Unavailable, match="closed"):
            await waiting
        with pytest.raises(Unavailable, match="closed"):
            await client.publish("never")

    asyncio.run(main())


def test_a_reader_that_is_too_slow_counts_what_it_lost(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net_messages, "QUEUE_MAX", 10)

    async def story(one: AsyncClient, two: AsyncClient) -> None:
        async with one.subscribe("fast") as slow, one.subscribe("end") as end:
            for number in range(25):
                await two.publish("fast", b"%d" % number)
            await two.publish("end")
            await anext(end)
            assert [(await anext(slow)).payload for _ in range(10)] == [b"%d" % number for number in range(10)]
            assert slow.dropped == 15
            one._messages.arrived(DeliverMessages([], dropped=7))  # as the server tells it
            assert (slow.dropped, end.dropped) == (22, 7)

    tell(server, story)
