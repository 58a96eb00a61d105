"""The share of the disk that one uploader may fill, and what a worker hears of blobs that others have stored."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from tasuki.blobs.folder import FolderBlobs
from tasuki.core.access import PeerKind
from tasuki.core.broker.events import ReceiveBlob
from tasuki.core.protocol import BlobPut, Chunk, ErrorMessage, Reply
from tasuki.core.store_messages import BlobPlace
from tasuki.errors import DiskFull
from tasuki.server.refusal_log import RefusalLog
from tasuki.server.transfers import BlobTransfers
from tasuki.server.upload_shares import UploadShares
from tests.server.peers import PATIENCE_S, FakeConnection

MIB = 1024 * 1024
SIZE_BYTES = 2 * MIB
ROOM_BYTES = 32 * MIB


class SmallDisk(FolderBlobs):
    """A folder on a disk that has room for ROOM_BYTES above its floor."""

    def check_space(self, size_bytes: int = 0) -> None:
        used_bytes = sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())
        if used_bytes + size_bytes > ROOM_BYTES:
            raise DiskFull(f"{ROOM_BYTES - used_bytes} bytes are free, {size_bytes} are needed")


class Scene:
    """The transfers of a server with a small disk, and the blobs to which its jobs refer."""

    def __init__(self, folder: Path) -> None:
        blobs = SmallDisk(folder, max_blob_bytes=2**30, floor_free_bytes=0)
        shares = UploadShares(blobs, self._referenced, grace_s=3600.0)
        self.transfers = BlobTransfers(blobs, self._arrived, RefusalLog(logging.getLogger("test")), shares)
        self.used: set[str] = set()
        self._stored: set[str] = set()
        self._links: dict[int, FakeConnection] = {}

    async def _referenced(self, sha256s: Sequence[str]) -> set[str]:
        return self.used & set(sha256s)

    def _arrived(self, conn: int, put: BlobPut, place: BlobPlace) -> None:
        self._stored.add(place.sha256)
        self._links[conn].send(Reply(put.msg_id, {"have": True}))

    async def upload(
        self, number: int, uploader: str, *, sent_bytes: int = SIZE_BYTES, kind: PeerKind = PeerKind.CLIENT
    ) -> list[object]:
        """Offer blob `number`, send so many of its bytes if it is wanted, and hang up; return all answers."""
        conn = len(self._links) + 1
        link = self._links[conn] = FakeConnection()
        data = number.to_bytes(4, "big") * (SIZE_BYTES // 4)
        sha256 = sha256_of(number)
        place = BlobPlace(sha256, SIZE_BYTES, stored=sha256 in self._stored)
        self.transfers.begin(link, ReceiveBlob(conn, BlobPut(5, sha256, SIZE_BYTES, resume=True), place, uploader, kind))
        await link.until(lambda: bool(link.said))
        if isinstance(first := link.said[0], Reply) and "go" in first.body:
            offset = first.body["offset"]
            last = sent_bytes == SIZE_BYTES
            self.transfers.piece(conn, link, Chunk(5, offset, data[offset:sent_bytes], last))
            if last:
                await link.until(lambda: len(link.said) == 2)
        self.transfers.forget(conn)
        await asyncio.gather(*self.transfers._tasks, return_exceptions=True)
        return [said.code if isinstance(said, ErrorMessage) else said.body for said in link.said]


def sha256_of(number: int) -> str:
    return hashlib.sha256(number.to_bytes(4, "big") * (SIZE_BYTES // 4)).hexdigest()


def run(folder: Path, work: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        scene = Scene(folder)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await work(scene)
        finally:
            scene.transfers.close()

    asyncio.run(main())


async def fill(scene: Scene, uploader: str, sent_bytes: int = SIZE_BYTES) -> int:
    """Upload invented blobs until they are refused; return how many were taken."""
    for number in range(ROOM_BYTES // MIB):
        if (await scene.upload(number, uploader, sent_bytes=sent_bytes))[-1] == "DISK_FULL":
            return number
    raise AssertionError("no blob was refused")


@pytest.mark.parametrize("sent_bytes", [SIZE_BYTES, SIZE_BYTES - MIB // 2], ids=["whole", "half-sent"])
def test_who_fills_the_disk_with_blobs_leaves_room_for_those_of_others(tmp_path: Path, sent_bytes: int) -> None:
    async def work(scene: Scene) -> None:
        taken = await fill(scene, "worker:evil", sent_bytes)
        assert taken * sent_bytes <= ROOM_BYTES // 2

        assert (await scene.upload(100, "token:bob"))[-1] == {"have": True}

    run(tmp_path, work)


def test_half_sent_blobs_of_a_few_bytes_are_limited_too(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        assert await fill(scene, "worker:evil", 1) <= ROOM_BYTES // MIB

    run(tmp_path, work)


def test_blobs_to_which_jobs_refer_do_not_count(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        taken = await fill(scene, "token:alice")
        scene.used = {sha256_of(number) for number in range(taken)}
        assert (await scene.upload(100, "token:alice"))[-1] == {"have": True}

    run(tmp_path, work)


def test_an_upload_that_was_begun_within_its_share_can_go_on(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        taken = await fill(scene, "token:alice", SIZE_BYTES - MIB // 2)
        assert (await scene.upload(taken - 1, "token:alice"))[-1] == {"have": True}

    run(tmp_path, work)


def test_the_servers_own_user_may_use_all_of_its_disk(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        for number in range(ROOM_BYTES // SIZE_BYTES):
            assert (await scene.upload(number, "uid:1000", kind=PeerKind.NODE))[-1] == {"have": True}

    run(tmp_path, work)


def test_a_worker_hears_of_stored_blobs_only_if_it_brought_them(tmp_path: Path) -> None:
    async def work(scene: Scene) -> None:
        await scene.upload(1, "token:alice")
        assert await scene.upload(1, "token:bob") == [{"have": True}]

        first = await scene.upload(1, "worker:w1", kind=PeerKind.WORKER)
        again = await scene.upload(1, "worker:w1", kind=PeerKind.WORKER)

        assert first == [{"go": True, "offset": 0}, {"have": True}]
        assert again == [{"have": True}]

    run(tmp_path, work)
