"""Transfers of blobs: who listens, for how long, and what a refusal or a lost link does to them. The test is the server."""

from __future__ import annotations

import asyncio
import hashlib
import io
import threading
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from tasuki.core.job import BlobRef
from tasuki.core.protocol import CHUNK_BYTES, BlobGet, BlobPut, Chunk, ErrorMessage, Message, Reply
from tasuki.errors import Corrupt, InvalidInput, TasukiError, Unauthorized, Unavailable
from tasuki.net import blob_transfer
from tasuki.net.blob_transfer import WAITING_CHUNKS_MAX, BlobClient
from tasuki.net.tcp_link import TcpLink

DEADLINE_S = 25.0


class FakeLink:
    """A link that keeps what is sent, and says whether it is read from."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.closed = False
        self.pauses: set[object] = set()
        self._something = asyncio.Event()

    def send(self, message: Message) -> None:
        self.sent.append(message)
        self._something.set()

    def pause_reading(self, why: object) -> None:
        self.pauses.add(why)

    def resume_reading(self, why: object) -> None:
        self.pauses.discard(why)

    async def drain(self) -> None:
        await asyncio.sleep(0)

    async def asked(self, kind: type[Any], count: int = 1) -> Any:
        """The latest message of a kind, when there are so many of them."""
        while len(found := [message for message in self.sent if isinstance(message, kind)]) < count:
            self._something.clear()
            await self._something.wait()
        return found[-1]


class Bench:
    """A line and its first link."""

    def __init__(self) -> None:
        self.line = BlobClient()
        self.written: list[bytes] = []
        self.link = self.connect()

    def connect(self) -> FakeLink:
        link = FakeLink()
        self.line.connected(cast("TcpLink", link))
        return link

    def get(self, data: bytes, write: Callable[[bytes], Any] | None = None) -> asyncio.Task[None]:
        ref = BlobRef(hashlib.sha256(data).hexdigest(), len(data))
        return asyncio.ensure_future(self.line.get(ref, "job", write or self.written.append))


def run(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(test(Bench()), DEADLINE_S)

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------- who listens


def test_download_whose_file_cannot_be_written_listens_no_more() -> None:
    async def test(bench: Bench) -> None:
        def full(data: bytes) -> None:
            raise OSError(28, "No space left on device")

        getting = bench.get(b"xy", full)
        msg_id = (await bench.link.asked(BlobGet)).msg_id
        bench.line.received(Chunk(msg_id, 0, b"x"))
        with pytest.raises(OSError, match="No space left"):
            await getting
        # The rest of the blob is dropped as it comes.
        bench.line.received(Chunk(msg_id, 1, b"y"))
        assert bench.line._conversations == {}

    run(test)


def test_download_that_is_canceled_listens_no_more() -> None:
    async def test(bench: Bench) -> None:
        getting = bench.get(b"xy")
        await bench.link.asked(BlobGet)
        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting
        assert bench.line._conversations == {}

    run(test)


def test_request_that_cannot_be_sent_listens_no_more() -> None:
    async def test(bench: Bench) -> None:
        def refuse(message: Message) -> None:
            raise InvalidInput("surrogates not allowed")

        bench.link.send = refuse  # type: ignore[method-assign]
        with pytest.raises(InvalidInput):
            await bench.get(b"x")
        assert bench.line._conversations == {}

    run(test)


def test_download_goes_on_where_it_was_on_the_next_link_and_listens_no_more_on_the_first() -> None:
    async def test(bench: Bench) -> None:
        # Given a download of which a part has come
        getting = bench.get(b"xy")
        first = await bench.link.asked(BlobGet)
        bench.line.received(Chunk(first.msg_id, 0, b"x"))
        # When the link is lost, and another comes
        bench.line.lost()
        link = bench.connect()
        second = await link.asked(BlobGet)
        # Then the rest is asked for, and nothing else is heard
        assert second.offset == 1
        assert list(bench.line._conversations) == [second.msg_id]
        bench.line.received(Chunk(second.msg_id, 1, b"y", last=True))
        await getting
        assert b"".join(bench.written) == b"xy"
        assert bench.line._conversations == {}

    run(test)


# ---------------------------------------------------------------------------------------------------- limits


def test_link_is_not_read_from_while_many_chunks_wait() -> None:
    async def test(bench: Bench) -> None:
        all_taken = asyncio.Event()

        def write(data: bytes) -> None:
            bench.written.append(data)
            if len(bench.written) == WAITING_CHUNKS_MAX:
                all_taken.set()

        getting = bench.get(bytes(WAITING_CHUNKS_MAX), write)
        msg_id = (await bench.link.asked(BlobGet)).msg_id
        # When more chunks come than are taken
        for offset in range(WAITING_CHUNKS_MAX - 1):
            bench.line.received(Chunk(msg_id, offset, b"\0"))
        assert not bench.link.pauses
        bench.line.received(Chunk(msg_id, WAITING_CHUNKS_MAX - 1, b"\0"))
        # Then the link is paused until they are
        assert bench.link.pauses
        await all_taken.wait()
        assert not bench.link.pauses
        bench.line.received(Chunk(msg_id, WAITING_CHUNKS_MAX, b"", last=True))
        await getting

    run(test)


def test_link_is_read_from_again_when_a_paused_download_is_given_up() -> None:
    async def test(bench: Bench) -> None:
        getting = bench.get(b"x")
        msg_id = (await bench.link.asked(BlobGet)).msg_id
        for offset in range(WAITING_CHUNKS_MAX):
            bench.line.received(Chunk(msg_id, offset, b"\0"))
        assert bench.link.pauses
        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting
        assert not bench.link.pauses

    run(test)


def test_upload_that_is_refused_halfway_is_not_sent_to_its_end() -> None:
    async def test(bench: Bench) -> None:
        putting = asyncio.ensure_future(bench.line.put(io.BytesIO(bytes(8 * CHUNK_BYTES)), BlobRef("0" * 64, 8 * CHUNK_BYTES)))
        msg_id = (await bench.link.asked(BlobPut)).msg_id
        bench.line.received(Reply(msg_id, {"go": True}))
        await bench.link.asked(Chunk)
        bench.line.received(ErrorMessage(msg_id, "DISK_FULL", "no space"))
        with pytest.raises(Unavailable, match="no space"):
            await putting
        assert sum(isinstance(message, Chunk) for message in bench.link.sent) < 8

    run(test)


# ---------------------------------------------------------------------------------------------------- not now, and never


def test_server_that_says_not_now_is_asked_again_after_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def pause(self: BlobClient, seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(BlobClient, "_pause", pause)

    async def test(bench: Bench) -> None:
        getting = bench.get(b"x")
        for count in range(1, 9):
            msg_id = (await bench.link.asked(BlobGet, count)).msg_id
            bench.line.received(ErrorMessage(msg_id, "UNAVAILABLE", "not now"))
        msg_id = (await bench.link.asked(BlobGet, 9)).msg_id
        bench.line.received(Chunk(msg_id, 0, b"x", last=True))
        await getting
        assert pauses == sorted(pauses)
        assert (pauses[0], pauses[-1]) == (blob_transfer.RETRY_FIRST_S, blob_transfer.RETRY_MAX_S)
        assert len(pauses) == 8

    run(test)


@pytest.mark.parametrize("error", [Unauthorized("the token was revoked"), Unavailable("this client was closed")])
def test_line_that_is_closed_ends_transfers_with_the_reason(error: TasukiError) -> None:
    async def test(bench: Bench) -> None:
        # Given one that listens, one that pauses after "not now", and one that waits for a link
        refused = bench.get(b"x")
        bench.line.received(ErrorMessage((await bench.link.asked(BlobGet)).msg_id, "UNAVAILABLE", "not now"))
        listening = bench.get(b"x")
        await bench.link.asked(BlobGet, 2)
        # When the server will never take us again
        bench.line.lost()
        waiting = bench.get(b"x")
        await asyncio.sleep(0)
        bench.line.close(error)
        # Then all of them end with that, and so does whatever comes later
        for getting in (refused, listening, waiting, bench.get(b"x")):
            with pytest.raises(type(error), match=error.message):
                await getting
        # And a second end does not change the reason
        bench.line.close()
        with pytest.raises(type(error), match=error.message):
            await bench.get(b"x")

    run(test)


# ---------------------------------------------------------------------------------------------------- uploads that go on


DATA = bytes(range(256)) * (5 * CHUNK_BYTES // 256)
REF = BlobRef(hashlib.sha256(DATA).hexdigest(), len(DATA))


def put_data(bench: Bench) -> asyncio.Task[None]:
    return asyncio.ensure_future(bench.line.put(io.BytesIO(DATA), REF))


async def sent_by(link: FakeLink, start: int) -> bytes:
    """All that was sent on this link, in order from there."""
    while not (chunks := [message for message in link.sent if isinstance(message, Chunk)]) or not chunks[-1].last:
        await link.asked(Chunk, len(chunks) + 1)
    for chunk in chunks:
        assert chunk.offset == start
        start += len(chunk.data)
    return b"".join(chunk.data for chunk in chunks)


@pytest.mark.parametrize("offset", [0, 1, 3 * CHUNK_BYTES, len(DATA) - 1])
def test_upload_begins_where_the_server_says(offset: int) -> None:
    async def test(bench: Bench) -> None:
        putting = put_data(bench)
        put = await bench.link.asked(BlobPut)
        assert put.resume
        bench.line.received(Reply(put.msg_id, {"go": True, "offset": offset}))
        assert await sent_by(bench.link, offset) == DATA[offset:]
        bench.line.received(Reply(put.msg_id, {"have": True}))
        await putting

    run(test)


def test_upload_to_a_server_that_says_no_offset_begins_at_0() -> None:
    async def test(bench: Bench) -> None:
        putting = put_data(bench)
        msg_id = (await bench.link.asked(BlobPut)).msg_id
        bench.line.received(Reply(msg_id, {"go": True}))
        assert await sent_by(bench.link, 0) == DATA
        bench.line.received(Reply(msg_id, {"have": True}))
        await putting

    run(test)


def test_upload_goes_on_on_the_next_link_where_the_server_is() -> None:
    async def test(bench: Bench) -> None:
        putting = put_data(bench)
        bench.line.received(Reply((await bench.link.asked(BlobPut)).msg_id, {"go": True, "offset": 0}))
        await bench.link.asked(Chunk, 2)
        bench.line.lost()
        link = bench.connect()
        msg_id = (await link.asked(BlobPut)).msg_id
        bench.line.received(Reply(msg_id, {"go": True, "offset": CHUNK_BYTES}))
        assert await sent_by(link, CHUNK_BYTES) == DATA[CHUNK_BYTES:]
        bench.line.received(Reply(msg_id, {"have": True}))
        await putting

    run(test)


def test_upload_whose_beginning_was_wrong_is_sent_again_from_0_and_only_once() -> None:
    async def test(bench: Bench) -> None:
        putting = put_data(bench)
        first = (await bench.link.asked(BlobPut)).msg_id
        bench.line.received(Reply(first, {"go": True, "offset": CHUNK_BYTES}))
        await sent_by(bench.link, CHUNK_BYTES)
        bench.link.sent.clear()
        bench.line.received(ErrorMessage(first, "CORRUPT", "other bytes"))
        second = (await bench.link.asked(BlobPut)).msg_id
        bench.line.received(Reply(second, {"go": True, "offset": 0}))
        assert await sent_by(bench.link, 0) == DATA
        bench.line.received(ErrorMessage(second, "CORRUPT", "other bytes again"))
        with pytest.raises(Corrupt, match="again"):
            await putting

    run(test)


# ---------------------------------------------------------------------------------------------------- threads


def test_large_pieces_are_written_in_order_and_off_the_loop() -> None:
    async def test(bench: Bench) -> None:
        threads: set[int] = set()

        def write(data: bytes) -> None:
            threads.add(threading.get_ident())
            bench.written.append(data)

        getting = bench.get(DATA, write)
        msg_id = (await bench.link.asked(BlobGet)).msg_id
        for start in range(0, len(DATA), CHUNK_BYTES):
            bench.line.received(Chunk(msg_id, start, DATA[start : start + CHUNK_BYTES]))
        bench.line.received(Chunk(msg_id, len(DATA), b"", last=True))
        await getting
        assert b"".join(bench.written) == DATA
        assert threading.get_ident() not in threads

    run(test)


def test_download_that_is_given_up_waits_for_the_thread_that_writes() -> None:
    async def test(bench: Bench) -> None:
        writing, go_on, done = asyncio.Event(), threading.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def write(data: bytes) -> None:
            loop.call_soon_threadsafe(writing.set)
            assert go_on.wait(DEADLINE_S)
            done.set()

        getting = bench.get(DATA, write)
        msg_id = (await bench.link.asked(BlobGet)).msg_id
        for start in range(0, 4 * CHUNK_BYTES, CHUNK_BYTES):
            bench.line.received(Chunk(msg_id, start, DATA[start : start + CHUNK_BYTES]))
        await writing.wait()
        getting.cancel()
        await asyncio.sleep(0)
        assert not getting.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await getting
        assert done.is_set()

    run(test)
