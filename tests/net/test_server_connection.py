"""A line: the one connection of a client or worker, and what its machine hears of it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from tasuki.core.address import Address
from tasuki.core.machine import Closed, Opened, Received
from tasuki.core.protocol import Heartbeat, Message, Welcome
from tasuki.core.reconnect import Connect
from tasuki.errors import Unavailable
from tasuki.net.server_connection import ServerConnection
from tasuki.net.tcp_link import TcpLink

DEADLINE_S = 25.0
WELCOME = Welcome(corr_id=1, version=2, server_id="s", identity="i", kind="client", codecs=("gzip",))


class Ears:
    """The messages that a machine was told."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self.line = ServerConnection(self.events.put_nowait, None)

    async def next(self) -> Any:
        return await asyncio.wait_for(self.events.get(), DEADLINE_S)


class Door:
    """A server that greets whoever connects."""

    def __init__(self) -> None:
        self.links: list[TcpLink] = []

    async def __aenter__(self) -> Door:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: TcpLink(self._message, lambda *_: None, self._opened), "127.0.0.1", 0)
        self.address = Address("tcp", "127.0.0.1", self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for link in self.links:
            link.abort("the test is over")

    def _opened(self, link: TcpLink) -> None:
        self.links.append(link)
        link.send(WELCOME)

    def _message(self, link: TcpLink, message: Message) -> None:
        link.send(message)


def run(test: Callable[[Ears], Awaitable[None]]) -> None:
    async def main() -> None:
        ears = Ears()
        async with asyncio.timeout(2 * DEADLINE_S):
            await test(ears)
            await ears.line.close()

    asyncio.run(main())


def test_a_dial_is_told_with_what_is_said_and_how_it_ends() -> None:
    async def test(ears: Ears) -> None:
        async with Door() as door:
            ears.line.dial(Connect(door.address))
            opened = await ears.next()
            assert isinstance(opened, Opened)
            assert await ears.next() == Received(opened.conn, WELCOME)
            assert ears.line.link is not None
            assert ears.line.link.codec == "gzip"
            ears.line.link.send(Heartbeat(1))
            assert await ears.next() == Received(opened.conn, Heartbeat(1))
            ears.line.hang_up(Unavailable("it does not answer"))
            assert await ears.next() == Closed(opened.conn, "it does not answer")
            assert ears.line.link is None

    run(test)


def test_an_address_where_nobody_listens_is_told_with_the_reason() -> None:
    async def test(ears: Ears) -> None:
        async with Door() as door:
            gone = door.address
        ears.line.dial(Connect(gone))
        closed = await ears.next()
        assert isinstance(closed, Closed)
        assert closed.conn == 0
        assert "refused" in closed.reason

    run(test)


def test_a_host_that_does_not_answer_is_given_up_after_the_dials_own_time() -> None:
    async def test(ears: Ears) -> None:
        # given: a listener whose queue is full, so that the kernel leaves further connects without an answer
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            address = Address("tcp", "127.0.0.1", listener.getsockname()[1])
            fillers = [socket.socket() for _ in range(4)]
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", address.port))
            started = asyncio.get_running_loop().time()
            ears.line.dial(Connect(address, timeout_s=0.3))
            closed = await ears.next()
            for filler in fillers:
                filler.close()
        assert isinstance(closed, Closed)
        assert "did not answer within 0.3 s" in closed.reason
        assert asyncio.get_running_loop().time() - started < DEADLINE_S / 2

    run(test)


def test_a_closed_line_tells_nothing_any_more() -> None:
    async def test(ears: Ears) -> None:
        async with Door() as door:
            ears.line.dial(Connect(door.address))
            await ears.next()
            await ears.next()
            await ears.line.close()
            ears.line.dial(Connect(door.address))
            assert ears.line._dialing is not None
            await ears.line._dialing
            assert len(door.links) == 2
        assert ears.events.empty()

    run(test)
