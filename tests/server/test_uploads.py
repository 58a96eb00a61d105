"""Uploads that are cut off and gone on with: by whom, from where, and who waits for whom."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tasuki.blobs.folder import PARTIAL_GRACE_S, FolderBlobs
from tasuki.core.broker.events import ReceiveBlob
from tasuki.core.protocol import BlobPut, Chunk, ErrorMessage, Reply
from tasuki.core.store_messages import BlobPlace
from tasuki.errors import ProtocolError
from tasuki.server import transfers
from tasuki.server.refusal_log import RefusalLog
from tasuki.server.transfers import BlobTransfers
from tests.server.peers import FakeConnection, shares_of
from tests.support.waiting import until

MIB = 1024 * 1024
DATA = bytes(range(256)) * (3 * MIB // 256)
SHA256 = hashlib.sha256(DATA).hexdigest()
PLACE = BlobPlace(SHA256, len(DATA))
PATIENCE_S = 10.0


class Scene:
    """A server's transfers, and the connections of those who send."""

    def __init__(self, blobs: FolderBlobs) -> None:
        self.blobs = blobs
        self.transfers = BlobTransfers(blobs, self._arrived, RefusalLog(logging.getLogger("test")), shares_of(blobs))
        self.arrived: list[BlobPlace] = []
        self._links: dict[int, FakeConnection] = {}

    def _arrived(self, conn: int, put: BlobPut, place: BlobPlace) -> None:
        self.arrived.append(place)
        self._links[conn].send(Reply(put.msg_id, {"have": True}))

    def offer(self, conn: int, uploader: str = "token:alice", *, place: BlobPlace = PLACE, resume: bool = True) -> FakeConnection:
        """A new connection that offers the blob as its message 5."""
        link = self._links[conn] = FakeConnection()
        self.transfers.begin(link, ReceiveBlob(conn, BlobPut(5, SHA256, len(DATA), resume), place, uploader))
        return link

    def send(self, conn: int, start: int, stop: int, data: bytes = DATA) -> None:
        """In chunks of 256 KiB; the last one is marked at the blob's end."""
        for at in range(start, stop, MIB // 4):
            piece = data[at : min(at + MIB // 4, stop)]
            self.transfers.piece(conn, self._links[conn], Chunk(5, at, piece, last=at + len(piece) == len(DATA)))

    async def cut(self, conn: int) -> None:
        """The connection is lost, and the server has dealt with it."""
        self.transfers.forget(conn)
        await self.settled()

    async def settled(self) -> None:
        await asyncio.gather(*self.transfers._tasks, return_exceptions=True)


@pytest.fixture
def blobs(tmp_path: Path) -> FolderBlobs:
    return FolderBlobs(tmp_path, max_blob_bytes=2**30, floor_free_bytes=0)


def run(blobs: FolderBlobs, work: Callable[[Scene], Awaitable[None]]) -> Scene:
    async def main() -> Scene:
        scene = Scene(blobs)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await work(scene)
        finally:
            scene.transfers.close()
        return scene

    return asyncio.run(main())


def told(link: FakeConnection) -> list[Any]:
    return [message.body if isinstance(message, Reply) else getattr(message, "code", "") for message in link.said]


def left_behind(blobs: FolderBlobs) -> list[str]:
    return [path.name for path in (blobs.root / "tmp").iterdir()]


def kept_bytes(blobs: FolderBlobs) -> int:
    return sum(path.stat().st_size for path in (blobs.root / "tmp").iterdir())


# ---------------------------------------------------------------------------------------------------- cut off


def test_an_upload_goes_on_where_its_connection_was_lost(blobs: FolderBlobs) -> None:
    async def work(scene: Scene) -> None:
        first = scene.offer(1)
        await first.wait_for(Reply)
        scene.send(1, 0, MIB)
        await scene.cut(1)
        second = scene.offer(2)
        await second.wait_for(Reply)
        scene.send(2, MIB, len(DATA))
        await second.wait_for(Reply, 2)
        assert told(second) == [{"go": True, "offset": MIB}, {"have": True}]

    assert run(blobs, work).arrived == [PLACE]
    assert blobs.read_bytes(SHA256, len(DATA)) == DATA
    assert left_behind(blobs) == []


def test_all_that_had_come_is_written_though_the_connection_is_lost_at_once(blobs: FolderBlobs) -> None:
    async def work(scene: Scene) -> None:
        await scene.offer(1).wait_for(Reply)
        scene.send(1, 0, 2 * MIB)
        scene.transfers.forget(1)
        second = scene.offer(2)  # it does not wait until the first is done with
        await second.wait_for(Reply)
        assert told(second) == [{"go": True, "offset": 2 * MIB}]

    run(blobs, work)


def test_it_goes_on_in_another_server_after_this_one_has_closed(blobs: FolderBlobs) -> None:
    async def first(scene: Scene) -> None:
        await scene.offer(1).wait_for(Reply)
        scene.send(1, 0, MIB)
        await scene.cut(1)

    async def second(scene: Scene) -> None:
        link = scene.offer(1)
        await link.wait_for(Reply)
        assert told(link) == [{"go": True, "offset": MIB}]

    run(blobs, first)
    run(FolderBlobs(blobs.root, max_blob_bytes=2**30, floor_free_bytes=0), second)


def test_a_server_that_closes_in_mid_upload_keeps_what_came(blobs: FolderBlobs) -> None:
    async def work(scene: Scene) -> None:
        await scene.offer(1).wait_for(Reply)
        scene.send(1, 0, MIB)
        await asyncio.to_thread(until, lambda: kept_bytes(blobs) == MIB, what="it is written")

    run(blobs, work).transfers._upload_threads.shutdown()
    with blobs.begin(SHA256, len(DATA), resume_key="token:alice") as writer:
        assert writer.size_bytes == MIB


def test_nobody_goes_on_with_what_another_has_sent(blobs: FolderBlobs) -> None:
    async def work(scene: Scene) -> None:
        await scene.offer(1).wait_for(Reply)
        scene.send(1, 0, MIB, b"x" * MIB)
        await scene.cut(1)
        bob = scene.offer(2, "token:bob")
        await bob.wait_for(Reply)
        assert told(bob) == [{"go": True, "offset": 0}]

    run(blobs, work)


def test_a_peer_that_does_not_ask_for_it_begins_at_0_and_leaves_nothing(blobs: FolderBlobs) -> None:
    async def work(scene: Scene) -> None:
        old = scene.offer(1, resume=False)
        await old.wait_for(Reply)
        scene.send(1, 0, MIB)
        await scene.cut(1)
        assert told(old) == [{"go": True}]
        again = scene.offer(2)
        await again.wait_for(Reply)
        assert told(again) == [{"go": True, "offset": 0}]

    run(blobs, work)


def test_an_upload_of_which_all_had_come_is_done_when_it_is_offered_again(blobs: FolderBlobs) -> None:
    writer = blobs.begin(SHA256, len(DATA), resume_key="token:alice")
    writer.write(DATA)
    writer.suspend()

    async def work(scene: Scene) -> None:
        link = scene.offer(1)
        await link.wait_for(Reply)
        assert told(link) == [{"have": True}]

    assert run(blobs, work).arrived == [PLACE]
    assert left_behind(blobs) == []


def test_if_that_is_not_what_it_should_be_it_begins_at_0(blobs: FolderBlobs) -> None:
    writer = blobs.begin(SHA256, len(DATA), resume_key="token:alice")
    writer.write(b"x" * len(DATA))
    writer.suspend()

    async def work(scene: Scene) -> None:
        link = scene.offer(1)
        await link.wait_for(Reply)
        assert told(link) == [{"go": True, "offset": 0}]

    run(blobs, work)


# ---------------------------------------------------------------------------------------------------- wrong


def test_wrong_bytes_are_refused_at_the_end_and_the_next_try_begins_at_0(blobs: FolderBlobs) -> None:
    async def work(scene: Scene) -> None:
        link = scene.offer(1)
        await link.wait_for(Reply)
        scene.send(1, 0, len(DATA), b"x" * len(DATA))
        await link.wait_for(ErrorMessage)
        again = scene.offer(2)
        await again.wait_for(Reply)
        assert (told(link)[-1], told(again)) == ("CORRUPT", [{"go": True, "offset": 0}])

    run(blobs, work)
    assert left_behind(blobs) == []


@pytest.mark.parametrize("at", [0, 2 * MIB])
def test_a_chunk_that_is_not_where_the_server_is_ends_the_connection_and_keeps_what_came(blobs: FolderBlobs, at: int) -> None:
    async def work(scene: Scene) -> None:
        link = scene.offer(1)
        await link.wait_for(Reply)
        scene.send(1, 0, MIB)
        scene.transfers.piece(1, link, Chunk(5, at, b"x"))
        assert isinstance(link.closed, ProtocolError)
        await scene.cut(1)
        again = scene.offer(2)
        await again.wait_for(Reply)
        assert told(again) == [{"go": True, "offset": MIB}]

    run(blobs, work)


def test_a_chunk_before_the_offset_was_told_ends_the_connection(blobs: FolderBlobs) -> None:
    async def work(scene: Scene) -> None:
        link = scene.offer(1)
        scene.send(1, 0, MIB)
        assert isinstance(link.closed, ProtocolError)

    run(blobs, work)


# ---------------------------------------------------------------------------------------------------- two at once


def test_a_second_one_waits_and_need_not_send_what_the_first_has_brought(blobs: FolderBlobs) -> None:
    async def work(scene: Scene) -> None:
        first = scene.offer(1)
        await first.wait_for(Reply)
        scene.send(1, 0, MIB)
        second = scene.offer(2)
        scene.send(1, MIB, len(DATA))
        await second.wait_for(Reply)
        assert (told(first)[-1], told(second)) == ({"have": True}, [{"have": True}])

    assert run(blobs, work).arrived == [PLACE, PLACE]


def test_one_that_has_fallen_silent_makes_way(blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "SILENT_S", 0.05)

    async def work(scene: Scene) -> None:
        first = scene.offer(1)
        await first.wait_for(Reply)
        scene.send(1, 0, MIB)
        second = scene.offer(2)
        await second.wait_for(Reply)
        scene.send(1, MIB, 2 * MIB)  # too late
        scene.send(2, MIB, len(DATA))
        await second.wait_for(Reply, 2)
        assert told(first) == [{"go": True, "offset": 0}, "UNAVAILABLE"]
        assert told(second) == [{"go": True, "offset": MIB}, {"have": True}]

    assert run(blobs, work).arrived == [PLACE]


def test_one_that_waits_too_long_is_told_to_come_again(blobs: FolderBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "TURN_S", 0.05)

    async def work(scene: Scene) -> None:
        first = scene.offer(1)
        await first.wait_for(Reply)
        second = scene.offer(2)
        await second.wait_for(ErrorMessage)
        assert told(second) == ["UNAVAILABLE"]
        scene.send(1, 0, len(DATA))
        await first.wait_for(Reply, 2)

    assert run(blobs, work).arrived == [PLACE]


def test_a_second_offer_on_the_same_connection_tells_how_much_of_the_first_is_written(blobs: FolderBlobs) -> None:
    async def work(scene: Scene) -> None:
        link = scene.offer(1)
        await link.wait_for(Reply)
        scene.send(1, 0, MIB)
        scene.transfers.begin(link, ReceiveBlob(1, BlobPut(6, SHA256, len(DATA), resume=True), PLACE, "token:alice"))
        await link.wait_for(Reply, 2)
        assert link.all(Reply)[-1] == Reply(6, {"go": True, "offset": MIB})

    run(blobs, work)


def test_one_that_is_lost_while_it_waits_does_not_end_the_one_before(blobs: FolderBlobs) -> None:
    async def work(scene: Scene) -> None:
        first = scene.offer(1)
        await first.wait_for(Reply)
        scene.offer(2)
        scene.transfers.forget(2)
        scene.send(1, 0, len(DATA))
        await first.wait_for(Reply, 2)
        await scene.settled()
        assert told(first)[-1] == {"have": True}

    assert run(blobs, work).arrived == [PLACE]
    assert left_behind(blobs) == []


def test_what_nobody_came_back_for_is_swept(blobs: FolderBlobs) -> None:
    async def work(scene: Scene) -> None:
        await scene.offer(1).wait_for(Reply)
        scene.send(1, 0, MIB)
        await scene.cut(1)
        [partial] = (blobs.root / "tmp").iterdir()
        os.utime(partial, (time.time() - PARTIAL_GRACE_S - 60,) * 2)
        scene.transfers.sweep()
        await asyncio.to_thread(until, lambda: left_behind(blobs) == [], what="it is gone")

    run(blobs, work)
