"""A link between two ends of a socket pair: pauses, limits, and how it says what went wrong."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tasuki.core.address import Address
from tasuki.core.protocol import FRAME_MAX_BYTES, ErrorMessage, Heartbeat, Message, Reply
from tasuki.errors import Unavailable
from tasuki.event_loop import loop_factory
from tasuki.net.tcp_link import TcpLink, connect
from tasuki.wire.messages import encode_frame

DEADLINE_S = 25.0


class End:
    """One end: a link, what came, and how it ended."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.link = TcpLink(lambda link, message: self.messages.put_nowait(message), self._ended, max_bytes=FRAME_MAX_BYTES)

    def _ended(self, link: TcpLink, reason: str) -> None:
        self.closed.set_result(reason)

    async def next(self) -> Message:
        return await asyncio.wait_for(self.messages.get(), DEADLINE_S)


async def two_ends() -> tuple[End, End]:
    ends = (End(), End())
    for end, sock in zip(ends, socket.socketpair(), strict=True):
        await asyncio.get_running_loop().create_connection(lambda end=end: end.link, sock=sock)
    return ends


def run(test: Callable[[End, End], Any], loop: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
    async def main() -> None:
        here, there = await two_ends()
        try:
            await asyncio.wait_for(test(here, there), 2 * DEADLINE_S)
        finally:
            here.link.abort("the test is over")
            there.link.abort("the test is over")

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def test_a_frame_type_of_a_newer_peer_is_skipped_and_its_request_answered() -> None:
    async def test(here: End, there: End) -> None:
        # When frames of a type that nobody knows come, without and with a msg_id, and a known one after them
        here.link.send_bytes(encode_frame(200, msgspec.msgpack.encode({"news": 1}), b"anything"))
        here.link.send_bytes(encode_frame(201, msgspec.msgpack.encode({"msg_id": 7}), b""))
        here.link.send(Heartbeat(8))
        # Then the request is answered, and the link goes on
        answer = await here.next()
        assert isinstance(answer, ErrorMessage)
        assert (answer.corr_id, answer.code) == (7, "UNKNOWN_FRAME")
        assert await there.next() == Heartbeat(8)
        assert not there.link.closed

    run(test)


def test_a_stranger_that_begins_with_an_unknown_frame_type_is_hung_up_on() -> None:
    async def test(here: End, there: End) -> None:
        there.link._trusted = False
        here.link.send_bytes(encode_frame(200, msgspec.msgpack.encode({"msg_id": 7}), b""))
        answer = await here.next()
        assert isinstance(answer, ErrorMessage)
        assert (answer.corr_id, answer.code) == (0, "UNKNOWN_FRAME")
        assert "frame type 200" in await there.closed

    run(test)


def test_messages_that_are_sent_together_leave_in_one_write() -> None:
    async def test(here: End, there: End) -> None:
        # Given a link whose writes are counted
        assert here.link.transport is not None
        writes: list[bytes] = []
        write = here.link.transport.write
        here.link.transport.write = lambda data: (writes.append(bytes(data)), write(data))[1]  # type: ignore[method-assign,func-returns-value]
        # When several messages are sent together, and nothing in another case
        here.link.send_together([])
        here.link.send_together([Heartbeat(1), Heartbeat(2)])
        # Then they were written as one before anything else could happen, and arrive as they are
        assert len(writes) == 1
        assert [await there.next(), await there.next()] == [Heartbeat(1), Heartbeat(2)]

    run(test)


def test_input_is_taken_again_only_when_every_reason_for_a_pause_is_over() -> None:
    async def test(here: End, there: End) -> None:
        # Given a link that is paused for two reasons
        there.link.pause_reading("uploads")
        there.link.pause_reading("questions")
        here.link.send(Heartbeat(1))
        # When one of them is over, twice even
        there.link.resume_reading("uploads")
        there.link.resume_reading("uploads")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(there.messages.get(), 0.1)
        # Then the other still counts
        there.link.resume_reading("questions")
        assert await there.next() == Heartbeat(1)

    run(test)


def test_nothing_is_read_while_messages_wait_that_came_before_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[int] = []
    take = TcpLink.data_received

    def data_received(link: TcpLink, data: bytes) -> None:
        waiting.append(len(link._undecoded))
        take(link, data)

    monkeypatch.setattr(TcpLink, "data_received", data_received)

    async def test(here: End, there: End) -> None:
        # Given a link that pauses after each message
        def pause(message: Message) -> None:
            there.link.pause_reading()
            there.messages.put_nowait(message)

        there.link.on_message = pause
        # When far more come than one read takes
        for number in range(1, 50_001):
            here.link.send(Heartbeat(number))
        for number in range(1, 21):
            assert await there.next() == Heartbeat(number)
            there.link.resume_reading()
        # Then they wait at their sender
        assert set(waiting) == {0}

    run(test, loop_factory())  # asyncio's own loop reads at other moments than the product's


def test_reply_that_no_peer_would_take_becomes_an_error_for_that_question() -> None:
    async def test(here: End, there: End) -> None:
        here.link.send(Reply(7, "x" * (FRAME_MAX_BYTES + 1)))
        error = await there.next()
        assert isinstance(error, ErrorMessage)
        assert (error.corr_id, error.code) == (7, "TOO_LARGE")
        # And the link goes on
        here.link.send(Heartbeat(2))
        assert await there.next() == Heartbeat(2)

    run(test)


def test_closing_sends_what_was_queued_before() -> None:
    async def test(here: End, there: End) -> None:
        here.link.send(Heartbeat(1))
        here.link.close(Unavailable("going down"))
        assert await there.next() == Heartbeat(1)
        error = await there.next()
        assert isinstance(error, ErrorMessage)
        assert error.message == "going down"
        assert await there.closed

    run(test)


def test_drain_of_a_link_that_ends_says_so() -> None:
    async def test(here: End, there: End) -> None:
        # Given a link whose peer does not read
        there.link.pause_reading()
        while here.link._writable.is_set():
            here.link.send(Reply(1, bytes(1_000_000)))
            await asyncio.sleep(0)
        draining = asyncio.ensure_future(here.link.drain())
        await asyncio.sleep(0)
        assert not draining.done()
        # When it is cut
        here.link.abort("the peer does not read")
        # Then who waited for it hears of it
        with pytest.raises(Unavailable):
            await draining
        assert await here.closed == "the peer does not read"

    run(test)


def test_nobody_listens_says_where_and_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    async def main() -> None:
        await connect(Address("tcp", "127.0.0.1", port), lambda link, message: None, lambda link, reason: None)

    with pytest.raises(Unavailable, match=rf"tcp://127\.0\.0\.1:{port}: Connection refused"):
        asyncio.run(main())
