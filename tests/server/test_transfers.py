"""Blobs through a server: chunk by chunk, verified, bounded, and only for those who may read them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest

from tasuki.blobs.blob import BlobStore
from tasuki.blobs.folder import FolderBlobs, FolderReader, FolderWriter
from tasuki.blobs.s3.store import S3Blobs
from tasuki.core.access import Identity, PeerKind
from tasuki.core.broker.events import ReceiveBlob, SendBlob
from tasuki.core.job import BlobRef, InputFile, Job, JobSpec, Lease, Outcome, State
from tasuki.core.protocol import CHUNK_BYTES, BlobGet, BlobPut, Chunk, ErrorMessage, Message, Reply
from tasuki.core.store_messages import BlobPlace, CachedFile
from tasuki.errors import BlobUnavailable, ConfigError, Corrupt, InvalidInput, NotFound, ProtocolError, Unavailable
from tasuki.server.refusal_log import RefusalLog
from tasuki.server.transfers import FAN_OUT_BATCHES, READ_CHUNKS, UPLOADS_PER_CONNECTION_MAX, BlobTransfers, may_read
from tasuki.stores.store import Reader
from tests.server.peers import FakeConnection, shares_of
from tests.support.s3_service import S3Service
from tests.support.waiting import until

DATA = b"0123456789" * 1000
SHA256 = hashlib.sha256(DATA).hexdigest()
PLACE = BlobPlace(SHA256, len(DATA))
STORED = BlobPlace(SHA256, len(DATA), stored=True)
ALICE = Identity(PeerKind.CLIENT, "token:alice", (), "alice")
BOB = Identity(PeerKind.CLIENT, "token:bob", (), "bob")
WORKER = Identity(PeerKind.WORKER, "token:w", (), "w")
IMPOSTOR = Identity(PeerKind.WORKER, "token:other", (), "other")


@pytest.fixture
def blobs(tmp_path: Path) -> FolderBlobs:
    return FolderBlobs(tmp_path / "blobs", max_blob_bytes=10**6, floor_free_bytes=0)


def run(blobs: BlobStore, work: Callable[[BlobTransfers, FakeConnection], Awaitable[None]]) -> FakeConnection:
    """Run `work`; arrived blobs are recorded at once, as a broker's store would."""

    async def main() -> FakeConnection:
        link = FakeConnection()

        def arrived(conn: int, put: BlobPut, place: BlobPlace) -> None:
            link.send(Reply(put.msg_id, {"arrived": conn, "place": place}))

        transfers = BlobTransfers(blobs, arrived, RefusalLog(logging.getLogger("test")), shares_of(blobs))
        try:
            await work(transfers, link)
        finally:
            transfers.close()
        return link

    return asyncio.run(main())


async def upload(transfers: BlobTransfers, link: FakeConnection, put: BlobPut, place: BlobPlace, data: bytes = DATA) -> None:
    """All of it, and until it has arrived or was refused."""
    transfers.begin(link, ReceiveBlob(1, put, place, ""))
    await link.wait_for(Reply)
    for start in range(0, len(data), 4096):
        piece = data[start : start + 4096]
        transfers.piece(1, link, Chunk(put.msg_id, start, piece, last=start + 4096 >= len(data)))
    await link.until(lambda: len(link.said) >= 2)


def replies(link: FakeConnection) -> list[object]:
    return [message.body if isinstance(message, Reply) else getattr(message, "code", message) for message in link.said]


@pytest.mark.parametrize("generation", [0, 7])
def test_a_blob_comes_in_by_chunks_and_is_at_its_place_before_it_has_arrived(blobs: FolderBlobs, generation: int) -> None:
    place = BlobPlace(SHA256, len(DATA), generation)
    link = run(blobs, lambda transfers, link: upload(transfers, link, BlobPut(5, SHA256, len(DATA)), place))
    assert replies(link) == [{"go": True}, {"arrived": 1, "place": place}]
    assert blobs.read_bytes(SHA256, 10**6, generation) == DATA
    assert not blobs.has(SHA256, generation + 1)
    assert link.paused == set()


def test_what_arrived_has_the_size_that_came_whatever_was_claimed_before(blobs: FolderBlobs) -> None:
    link = run(blobs, lambda transfers, link: upload(transfers, link, BlobPut(5, SHA256, len(DATA)), BlobPlace(SHA256, 1)))
    assert replies(link)[1] == {"arrived": 1, "place": PLACE}


def test_a_blob_that_is_stored_is_not_sent_again(blobs: FolderBlobs) -> None:
    blobs.put_bytes(DATA)

    async def work(transfers: BlobTransfers, link: FakeConnection) -> None:
        transfers.begin(link, ReceiveBlob(1, BlobPut(5, SHA256, len(DATA)), STORED, ""))
        await link.wait_for(Reply)

    assert replies(run(blobs, work)) == [{"have": True}]


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_stored_blob_that_is_offered_with_another_size_is_corrupt(blobs: FolderBlobs, is_direct: bool) -> None:
    blobs.put_bytes(DATA)

    async def work(transfers: BlobTransfers, link: FakeConnection) -> None:
        transfers.begin(link, ReceiveBlob(1, BlobPut(5, SHA256, len(DATA) + 1, direct=is_direct), STORED, ""))
        await link.until(lambda: bool(link.said))

    assert replies(run(blobs, work)) == ["CORRUPT"]


def test_bytes_that_are_there_but_not_recorded_are_taken_again(blobs: FolderBlobs) -> None:
    blobs.put_bytes(DATA)
    link = run(blobs, lambda transfers, link: upload(transfers, link, BlobPut(5, SHA256, len(DATA)), PLACE))
    assert replies(link) == [{"go": True}, {"arrived": 1, "place": PLACE}]


def test_bytes_that_are_recorded_but_gone_are_taken_again(blobs: FolderBlobs) -> None:
    link = run(blobs, lambda transfers, link: upload(transfers, link, BlobPut(5, SHA256, len(DATA)), STORED))
    assert replies(link) == [{"go": True}, {"arrived": 1, "place": STORED}]
    assert blobs.read_bytes(SHA256, 10**6) == DATA


def test_bytes_that_are_not_the_announced_ones_are_refused(blobs: FolderBlobs) -> None:
    async def work(transfers: BlobTransfers, link: FakeConnection) -> None:
        transfers.begin(link, ReceiveBlob(1, BlobPut(5, SHA256, 4), PLACE, ""))
        await link.wait_for(Reply)
        transfers.piece(1, link, Chunk(5, 0, b"evil", last=True))
        await link.wait_for(ErrorMessage)

    assert replies(run(blobs, work)) == [{"go": True}, "CORRUPT"]
    assert not blobs.has(SHA256)


@pytest.mark.parametrize("put", [BlobPut(5, "../../etc/passwd", 1), BlobPut(5, SHA256, -1)])
def test_a_blob_that_cannot_be_is_refused_at_once(blobs: FolderBlobs, put: BlobPut) -> None:
    async def work(transfers: BlobTransfers, link: FakeConnection) -> None:
        transfers.begin(link, ReceiveBlob(1, put, PLACE, ""))

    assert replies(run(blobs, work)) == [InvalidInput.code]


def test_a_chunk_out_of_order_ends_the_connection(blobs: FolderBlobs) -> None:
    async def work(transfers: BlobTransfers, link: FakeConnection) -> None:
        transfers.begin(link, ReceiveBlob(1, BlobPut(5, SHA256, len(DATA)), PLACE, ""))
        await link.wait_for(Reply)
        transfers.piece(1, link, Chunk(5, 100, b"x"))

    assert isinstance(run(blobs, work).closed, ProtocolError)


def test_chunks_of_an_upload_that_failed_are_dropped(blobs: FolderBlobs) -> None:
    async def work(transfers: BlobTransfers, link: FakeConnection) -> None:
        transfers.piece(1, link, Chunk(77, 0, b"late"))

    link = run(blobs, work)
    assert link.said == []
    assert link.closed == ""


def test_uploads_of_one_connection_are_bounded(blobs: FolderBlobs) -> None:
    async def work(transfers: BlobTransfers, link: FakeConnection) -> None:
        for number in range(UPLOADS_PER_CONNECTION_MAX + 1):
            sha256 = hashlib.sha256(bytes([number])).hexdigest()
            transfers.begin(link, ReceiveBlob(1, BlobPut(number + 1, sha256, 1), BlobPlace(sha256, 1), ""))
        await link.wait_for(Reply, UPLOADS_PER_CONNECTION_MAX)
        other = FakeConnection()
        transfers.begin(other, ReceiveBlob(2, BlobPut(1, SHA256, len(DATA)), PLACE, ""))
        await other.wait_for(Reply)

    assert replies(run(blobs, work)).count("OVERLOADED") == 1


def test_a_peer_that_sends_faster_than_the_disk_takes_is_not_read_from(blobs: FolderBlobs) -> None:
    async def work(transfers: BlobTransfers, link: FakeConnection) -> None:
        big = bytes(3 * 1024 * 1024)
        transfers.begin(link, ReceiveBlob(1, BlobPut(5, SHA256, 10**6), PLACE, ""))
        await link.wait_for(Reply)
        for number in range(3):
            transfers.piece(1, link, Chunk(5, number * len(big), big))
        assert link.paused != set()
        await link.wait_for(ErrorMessage)

    assert run(blobs, work).paused == set()


def test_a_half_sent_blob_is_dropped_with_its_connection(blobs: FolderBlobs, tmp_path: Path) -> None:
    async def work(transfers: BlobTransfers, link: FakeConnection) -> None:
        transfers.begin(link, ReceiveBlob(1, BlobPut(5, SHA256, len(DATA)), PLACE, ""))
        await link.wait_for(Reply)
        transfers.piece(1, link, Chunk(5, 0, DATA[:10]))
        [task] = transfers._tasks
        transfers.forget(1)
        await asyncio.gather(task, return_exceptions=True)

    run(blobs, work)
    assert not blobs.has(SHA256)
    until(lambda: [path for path in tmp_path.rglob("*") if path.is_file()] == [], what="the half of it is removed")


# ---------------------------------------------------------------------------------------------------- out


def job(*, result: bool = False, holder: str = "w1") -> Job:
    spec = JobSpec(job_id="a", files=() if result else (InputFile("in", sha256=SHA256, size_bytes=len(DATA)),))
    outcome = Outcome(result_ref=BlobRef(SHA256, len(DATA))) if result else None
    lease = Lease("lease", holder, f"{holder}-1", 1, 100.0, owner="token:w")
    state = State.SUCCEEDED if result else State.RUNNING
    return Job(spec=spec, state=state, submitter="token:alice", created_at=0.0, lease=lease, outcome=outcome)


def wanted(identity: Identity, *, worker_id: str = "", incarnation: str = "", offset: int = 0) -> SendBlob:
    return SendBlob(1, BlobGet(9, SHA256, "a", offset), identity, worker_id, incarnation)


@pytest.mark.parametrize("offset", [0, 9_000])
def test_a_blob_goes_out_in_order_from_an_offset_with_an_end(blobs: FolderBlobs, offset: int) -> None:
    blobs.put_bytes(DATA)
    link = run(blobs, lambda transfers, link: transfers.send(link, True, wanted(ALICE, offset=offset), STORED))
    chunks = link.all(Chunk)
    assert b"".join(chunk.data for chunk in chunks) == DATA[offset:]
    assert chunks[0].offset == offset
    assert [chunk.last for chunk in chunks][-1] is True
    assert {chunk.corr_id for chunk in chunks} == {9}


class JobReader:
    """A store with one job, or none, and the cached file c:a, which Alice put."""

    def __init__(self, job: Job | None) -> None:
        self._job = job

    def get(self, job_ids: list[str]) -> list[Job | None]:
        return [self._job for _ in job_ids]

    def cached_files(self, names: list[tuple[str, str]]) -> list[CachedFile | None]:
        file = CachedFile("a", SHA256, len(DATA), "render.>", ALICE.name, 0.0)
        return [file if name == ("c", "a") else None for name in names]


@pytest.mark.parametrize(
    ("command", "given"),
    [
        (wanted(BOB), job(result=True)),
        (wanted(ALICE), None),
        (wanted(ALICE), job(holder="w1")),
        (wanted(WORKER, worker_id="w1", incarnation="w1-1"), job(holder="w2")),
        (wanted(WORKER, worker_id="w1", incarnation="w1-0"), job(holder="w1")),
        (wanted(WORKER, worker_id="w1", incarnation="w1-1"), job(result=True)),
        (wanted(IMPOSTOR, worker_id="w1", incarnation="w1-1"), job(holder="w1")),
    ],
    ids=["another client", "no such job", "may", "another worker", "its dead self", "a worker and a result", "another token"],
)
def test_who_may_read_which_blob(
    blobs: FolderBlobs, request: pytest.FixtureRequest, command: SendBlob, given: Job | None
) -> None:
    blobs.put_bytes(DATA)
    allowed = may_read(cast(Reader, JobReader(given)), command)
    if "may" in request.node.callspec.id.split("-"):
        assert run(blobs, lambda transfers, link: transfers.send(link, allowed, command, STORED)).all(Chunk)
        return
    with pytest.raises(NotFound):
        run(blobs, lambda transfers, link: transfers.send(link, allowed, command, STORED))


@pytest.mark.parametrize(
    ("identity", "name", "sha256", "allowed"),
    [
        (ALICE, "a", SHA256, True),
        (BOB, "a", SHA256, False),
        (WORKER, "a", SHA256, True),
        (ALICE, "a", "0" * 64, False),
        (ALICE, "b", SHA256, False),
    ],
    ids=["who put it", "another client", "a worker", "another blob", "another name"],
)
def test_who_may_read_a_file_of_a_cache(identity: Identity, name: str, sha256: str, allowed: bool) -> None:
    command = SendBlob(1, BlobGet(9, sha256, f"cache:c/{name}"), identity)
    assert may_read(cast(Reader, JobReader(None)), command) is allowed


def test_the_worker_that_holds_the_job_reads_its_inputs(blobs: FolderBlobs) -> None:
    blobs.put_bytes(DATA)
    command = wanted(WORKER, worker_id="w1", incarnation="w1-1")
    assert may_read(cast(Reader, JobReader(job(holder="w1"))), command)
    assert run(blobs, lambda transfers, link: transfers.send(link, True, command, STORED)).all(Chunk)


def test_a_blob_is_read_at_its_place(blobs: FolderBlobs) -> None:
    blobs.put_bytes(DATA, generation=7)
    place = BlobPlace(SHA256, len(DATA), 7, stored=True)
    link = run(blobs, lambda transfers, link: transfers.send(link, True, wanted(ALICE), place))
    assert b"".join(chunk.data for chunk in link.all(Chunk)) == DATA
    with pytest.raises(BlobUnavailable, match=SHA256):
        run(blobs, lambda transfers, link: transfers.send(link, True, wanted(ALICE), STORED))


def test_a_blob_that_was_collected_is_not_found(blobs: FolderBlobs) -> None:
    with pytest.raises(NotFound, match="not stored any more"):
        run(blobs, lambda transfers, link: transfers.send(link, True, wanted(ALICE), None))


def test_a_blob_that_was_damaged_never_comes_to_its_end(blobs: FolderBlobs) -> None:
    path = blobs.local_path(blobs.put_bytes(DATA).sha256)
    assert path is not None
    path.write_bytes(b"x" + DATA[1:])
    links: list[FakeConnection] = []

    async def work(transfers: BlobTransfers, link: FakeConnection) -> None:
        links.append(link)
        await transfers.send(link, True, wanted(ALICE), STORED)

    with pytest.raises(Corrupt):
        run(blobs, work)
    assert sum(len(chunk.data) for chunk in links[0].all(Chunk)) < len(DATA)
    assert not any(chunk.last for chunk in links[0].all(Chunk))


# ---------------------------------------------------------------------------------------------------- to several workers


BATCH_BYTES = READ_CHUNKS * CHUNK_BYTES
LARGE_BATCHES = 3 * FAN_OUT_BATCHES


class CountingBlobs(FolderBlobs):
    """A folder that counts its readers."""

    opened = 0

    def _open(self, sha256: str, offset: int, generation: int) -> FolderReader:
        self.opened += 1
        return super()._open(sha256, offset, generation)


class Receiver(FakeConnection):
    """A worker's connection, which hashes what comes instead of keeping it, and can stand still at `stop_at` bytes."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.digest, self.size_bytes, self.ended = hashlib.sha256(), 0, False
        self._stop_at = stop_at

    def send(self, message: Message) -> None:
        assert isinstance(message, Chunk)
        assert message.offset == self.size_bytes
        self.digest.update(message.data)
        self.size_bytes += len(message.data)
        self.ended = message.last
        if self._stop_at is not None and self.size_bytes >= self._stop_at:
            self.writable.clear()
            self._stop_at = None
        self.changed()


@pytest.fixture
def large(tmp_path: Path) -> tuple[CountingBlobs, BlobRef]:
    """A store with a file of several times what is kept for workers that are behind."""
    blobs = CountingBlobs(tmp_path / "large", max_blob_bytes=10**9, floor_free_bytes=0)
    return blobs, blobs.put_bytes(os.urandom(LARGE_BATCHES * BATCH_BYTES - 1))


def put_to_workers(
    blobs: BlobStore, ref: BlobRef, work: Callable[[Callable[[Receiver], asyncio.Task[None]]], Awaitable[None]]
) -> None:
    """Run `work` with a function that begins to send the file of a cache to a worker."""

    async def main(transfers: BlobTransfers, _: FakeConnection) -> None:
        command = SendBlob(1, BlobGet(9, ref.sha256, "cache:c/a"), WORKER, "w", "w-1")
        place = BlobPlace(ref.sha256, ref.size_bytes, stored=True)
        await work(lambda link: asyncio.create_task(transfers.send(link, True, command, place)))

    run(blobs, main)


def test_workers_that_get_a_file_of_a_cache_at_once_share_one_read(large: tuple[CountingBlobs, BlobRef]) -> None:
    blobs, ref = large
    links = [Receiver() for _ in range(3)]

    async def work(begin: Callable[[Receiver], asyncio.Task[None]]) -> None:
        await asyncio.gather(*map(begin, links))

    put_to_workers(blobs, ref, work)
    assert [(link.digest.hexdigest(), link.ended) for link in links] == [(ref.sha256, True)] * 3
    assert blobs.opened == 1


def test_a_worker_that_stands_still_holds_up_nobody_and_goes_on_by_itself(large: tuple[CountingBlobs, BlobRef]) -> None:
    blobs, ref = large
    others, frozen = [Receiver(), Receiver()], Receiver(stop_at=BATCH_BYTES)

    async def work(begin: Callable[[Receiver], asyncio.Task[None]]) -> None:
        tracemalloc.start()
        try:
            stuck = begin(frozen)
            await asyncio.gather(*map(begin, others))
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < (FAN_OUT_BATCHES + 4) * BATCH_BYTES
        assert BATCH_BYTES <= frozen.size_bytes < 2 * BATCH_BYTES
        assert blobs.opened == 1
        frozen.writable.set()
        await stuck

    put_to_workers(blobs, ref, work)
    assert [(link.digest.hexdigest(), link.ended) for link in (*others, frozen)] == [(ref.sha256, True)] * 3
    assert blobs.opened == 2


def test_of_a_damaged_file_one_read_names_the_store_and_another_at_the_same_time_is_left_to_its_worker(
    large: tuple[CountingBlobs, BlobRef],
) -> None:
    blobs, ref = large
    path = blobs.local_path(ref.sha256)
    assert path is not None
    with path.open("r+b") as file:
        file.write(b"damaged")
    first, late, again = Receiver(stop_at=2 * FAN_OUT_BATCHES * BATCH_BYTES), Receiver(), Receiver()

    async def work(begin: Callable[[Receiver], asyncio.Task[None]]) -> None:
        sending = begin(first)
        await first.until(lambda: not first.writable.is_set())
        await begin(late)
        first.writable.set()
        with pytest.raises(Corrupt, match=str(blobs.root)):
            await sending
        with pytest.raises(Corrupt, match=str(blobs.root)):
            await begin(again)

    put_to_workers(blobs, ref, work)
    assert (first.ended, late.ended, again.ended) == (False, True, False)


def test_a_file_that_has_just_come_is_not_hashed_again_until_a_worker_asks_a_second_time(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path / "blobs", max_blob_bytes=10**6, floor_free_bytes=0)
    command = SendBlob(1, BlobGet(9, SHA256, "cache:c/a"), WORKER, "w", "w-1")
    first, second = Receiver(), Receiver()

    async def work(transfers: BlobTransfers, link: FakeConnection) -> None:
        await upload(transfers, link, BlobPut(5, SHA256, len(DATA)), PLACE)
        path = blobs.local_path(SHA256)
        assert path is not None
        path.write_bytes(b"x" + DATA[1:])
        await transfers.send(first, True, command, STORED)
        with pytest.raises(Corrupt, match=str(blobs.root)):
            await transfers.send(second, True, command, STORED)

    run(blobs, work)
    assert (first.ended, second.ended) == (True, False)


# ---------------------------------------------------------------------------------------------------- away


def test_deleted_bytes_are_gone_and_those_of_other_places_are_not(blobs: FolderBlobs) -> None:
    blobs.put_bytes(DATA)
    blobs.put_bytes(DATA, generation=7)
    gone: list[BlobPlace] = []

    async def work(transfers: BlobTransfers, link: FakeConnection) -> None:
        gone.extend(await transfers.delete([STORED, BlobPlace("a" * 64, 1)]))

    run(blobs, work)
    assert gone == [STORED, BlobPlace("a" * 64, 1)]
    assert (blobs.has(SHA256), blobs.has(SHA256, 7)) == (False, True)


class StubbornBlobs(FolderBlobs):
    """A folder in which some calls fail, or stand until they may go on."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, max_blob_bytes=10**6, floor_free_bytes=0)
        self.errors: dict[str, Exception] = {}
        self.go_on = threading.Event()
        self.held = threading.Semaphore(0)

    def delete(self, sha256: str, generation: int = 0) -> bool:
        if sha256 in self.errors:
            raise self.errors[sha256]
        return super().delete(sha256, generation)

    def begin(
        self, sha256: str | None = None, size_bytes: int | None = None, generation: int = 0, resume_key: str = ""
    ) -> FolderWriter:
        self.held.release()
        if not self.go_on.wait(20):
            raise AssertionError("nobody let the writer go on")
        return super().begin(sha256, size_bytes, generation, resume_key)

    def close(self) -> None:
        self.go_on.set()


@pytest.fixture
def stubborn(tmp_path: Path) -> StubbornBlobs:
    return StubbornBlobs(tmp_path / "blobs")


def test_what_could_not_be_deleted_is_left_for_another_time(stubborn: StubbornBlobs, caplog: pytest.LogCaptureFixture) -> None:
    places = [BlobPlace(letter * 64, 1) for letter in "abcd"]
    stubborn.errors = {"b" * 64: ConfigError("no right to delete"), "c" * 64: Unavailable("it does not answer")}
    gone: list[BlobPlace] = []

    async def work(transfers: BlobTransfers, link: FakeConnection) -> None:
        gone.extend(await transfers.delete(places))

    run(stubborn, work)
    assert gone == places[:1]  # after one that does not answer, the rest would wait as long
    assert "no right to delete" in caplog.text
    assert "it does not answer" in caplog.text


def test_uploads_that_stand_still_keep_nobody_from_reading(stubborn: StubbornBlobs) -> None:
    (stubborn.root / SHA256[:2]).mkdir()
    (stubborn.root / SHA256[:2] / SHA256[2:]).write_bytes(DATA)

    async def work(transfers: BlobTransfers, link: FakeConnection) -> None:
        for number in range(UPLOADS_PER_CONNECTION_MAX):
            transfers.begin(FakeConnection(), ReceiveBlob(2, BlobPut(number, "a" * 64, 1), BlobPlace("a" * 64, 1), ""))
        for _ in range(stubborn.threads):
            await asyncio.to_thread(stubborn.held.acquire, timeout=10)
        await asyncio.wait_for(transfers.send(link, True, wanted(ALICE), STORED), 10)
        assert await asyncio.wait_for(transfers.delete([BlobPlace("c" * 64, 1)]), 10) != []

    assert run(stubborn, work).all(Chunk)[-1].last


def test_a_writer_that_comes_when_its_peer_is_gone_is_given_back(stubborn: StubbornBlobs) -> None:
    async def work(transfers: BlobTransfers, link: FakeConnection) -> None:
        transfers.begin(link, ReceiveBlob(1, BlobPut(5, SHA256, len(DATA)), PLACE, ""))
        await asyncio.to_thread(stubborn.held.acquire, timeout=10)
        transfers.forget(1)
        await asyncio.sleep(0)
        stubborn.go_on.set()
        await asyncio.to_thread(until, lambda: list((stubborn.root / "tmp").iterdir()) == [], what="nothing of it is left")

    assert run(stubborn, work).said == []


@pytest.mark.slow
def test_an_s3_server_that_is_away_in_mid_upload_is_waited_for(s3: S3Service, s3_url: str) -> None:
    data = DATA * 2000  # 20 MB: two parts and a half
    sha256 = hashlib.sha256(data).hexdigest()
    place = BlobPlace(sha256, len(data))
    blobs = S3Blobs(s3_url, max_blob_bytes=10**9)

    async def work(transfers: BlobTransfers, link: FakeConnection) -> None:
        transfers.begin(link, ReceiveBlob(1, BlobPut(5, sha256, len(data)), place, ""))
        await link.wait_for(Reply)
        for start in range(0, len(data), 10**6):
            if start == 10**7:
                s3.kill()
            last = start + 10**6 >= len(data)
            transfers.piece(1, link, Chunk(5, start, data[start : start + 10**6], last=last))
        assert link.paused != set()
        s3.start()
        await link.until(lambda: len(link.said) >= 2)

    try:
        assert replies(run(blobs, work)) == [{"go": True}, {"arrived": 1, "place": place}]
    finally:
        if not s3.running:
            s3.start()
    assert S3Blobs(s3_url, max_blob_bytes=10**9).read_bytes(sha256, len(data)) == data
