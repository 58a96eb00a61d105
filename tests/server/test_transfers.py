"""Blobs through a server: chunk by chunk, verified, bounded, and only for those who may read them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tasuki.blobs.folder import FolderBlobs
from tasuki.core.access import Identity, Kind
from tasuki.core.broker_events import SendBlob
from tasuki.core.job import BlobRef, InputFile, Job, JobSpec, Lease, Outcome, State
from tasuki.core.protocol import BlobGet, BlobPut, Chunk, ErrorMessage, Reply
from tasuki.errors import InvalidInput, NotFound, ProtocolError
from tasuki.server.transfers import UPLOADS_PER_CONNECTION_MAX, Transfers
from tests.server.peers import FakeConnection

DATA = b"0123456789" * 1000
SHA256 = hashlib.sha256(DATA).hexdigest()
ALICE = Identity(Kind.CLIENT, "token:alice", (), "alice")
BOB = Identity(Kind.CLIENT, "token:bob", (), "bob")
WORKER = Identity(Kind.WORKER, "token:w", (), "w")


@pytest.fixture
def blobs(tmp_path: Path) -> FolderBlobs:
    return FolderBlobs(tmp_path / "blobs", max_blob_bytes=10**6, floor_free_bytes=0)


def run(blobs: FolderBlobs, work: Callable[[Transfers, FakeConnection], Awaitable[None]]) -> FakeConnection:
    async def main() -> FakeConnection:
        transfers, link = Transfers(blobs), FakeConnection()
        try:
            await work(transfers, link)
        finally:
            transfers.close()
        return link

    return asyncio.run(main())


def replies(link: FakeConnection) -> list[object]:
    return [message.body if isinstance(message, Reply) else getattr(message, "code", message) for message in link.said]


def test_a_blob_comes_in_by_chunks_and_is_there_before_the_answer(blobs: FolderBlobs) -> None:
    async def work(transfers: Transfers, link: FakeConnection) -> None:
        transfers.begin(1, link, BlobPut(5, SHA256, len(DATA)))
        await link.wait_for(Reply)
        for start in range(0, len(DATA), 4096):
            piece = DATA[start : start + 4096]
            transfers.piece(1, link, Chunk(5, start, piece, last=start + 4096 >= len(DATA)))
        await link.wait_for(Reply, 2)

    link = run(blobs, work)
    assert replies(link) == [{"go": True}, {"have": True}]
    assert blobs.read_bytes(SHA256, 10**6) == DATA
    assert link.paused == set()


def test_a_blob_that_is_there_is_not_sent_again(blobs: FolderBlobs) -> None:
    blobs.put_bytes(DATA)

    async def work(transfers: Transfers, link: FakeConnection) -> None:
        transfers.begin(1, link, BlobPut(5, SHA256, len(DATA)))
        await link.wait_for(Reply)

    assert replies(run(blobs, work)) == [{"have": True}]


def test_bytes_that_are_not_the_announced_ones_are_refused(blobs: FolderBlobs) -> None:
    async def work(transfers: Transfers, link: FakeConnection) -> None:
        transfers.begin(1, link, BlobPut(5, SHA256, 4))
        await link.wait_for(Reply)
        transfers.piece(1, link, Chunk(5, 0, b"evil", last=True))
        await link.wait_for(ErrorMessage)

    assert replies(run(blobs, work)) == [{"go": True}, "CORRUPT"]
    assert not blobs.has(SHA256)


@pytest.mark.parametrize("put", [BlobPut(5, "../../etc/passwd", 1), BlobPut(5, SHA256, -1)])
def test_a_blob_that_cannot_be_is_refused_at_once(blobs: FolderBlobs, put: BlobPut) -> None:
    async def work(transfers: Transfers, link: FakeConnection) -> None:
        transfers.begin(1, link, put)

    assert replies(run(blobs, work)) == [InvalidInput.code]


def test_a_chunk_out_of_order_ends_the_connection(blobs: FolderBlobs) -> None:
    async def work(transfers: Transfers, link: FakeConnection) -> None:
        transfers.begin(1, link, BlobPut(5, SHA256, len(DATA)))
        await link.wait_for(Reply)
        transfers.piece(1, link, Chunk(5, 100, b"x"))

    assert isinstance(run(blobs, work).closed, ProtocolError)


def test_chunks_of_an_upload_that_failed_are_dropped(blobs: FolderBlobs) -> None:
    async def work(transfers: Transfers, link: FakeConnection) -> None:
        transfers.piece(1, link, Chunk(77, 0, b"late"))

    link = run(blobs, work)
    assert link.said == []
    assert link.closed == ""


def test_uploads_of_one_connection_are_bounded(blobs: FolderBlobs) -> None:
    async def work(transfers: Transfers, link: FakeConnection) -> None:
        for number in range(UPLOADS_PER_CONNECTION_MAX + 1):
            transfers.begin(1, link, BlobPut(number + 1, hashlib.sha256(bytes([number])).hexdigest(), 1))
        await link.wait_for(Reply, UPLOADS_PER_CONNECTION_MAX)
        other = FakeConnection()
        transfers.begin(2, other, BlobPut(1, SHA256, len(DATA)))
        await other.wait_for(Reply)

    assert replies(run(blobs, work)).count("OVERLOADED") == 1


def test_a_peer_that_sends_faster_than_the_disk_takes_is_not_read_from(blobs: FolderBlobs) -> None:
    async def work(transfers: Transfers, link: FakeConnection) -> None:
        big = bytes(3 * 1024 * 1024)
        transfers.begin(1, link, BlobPut(5, SHA256, 10**6))
        await link.wait_for(Reply)
        for number in range(3):
            transfers.piece(1, link, Chunk(5, number * len(big), big))
        assert link.paused != set()
        await link.wait_for(ErrorMessage)

    assert run(blobs, work).paused == set()


def test_a_half_sent_blob_is_dropped_with_its_connection(blobs: FolderBlobs, tmp_path: Path) -> None:
    async def work(transfers: Transfers, link: FakeConnection) -> None:
        transfers.begin(1, link, BlobPut(5, SHA256, len(DATA)))
        await link.wait_for(Reply)
        transfers.piece(1, link, Chunk(5, 0, DATA[:10]))
        [upload] = transfers._uploads.values()
        transfers.forget(1)
        assert upload.task is not None
        await asyncio.gather(upload.task, return_exceptions=True)

    run(blobs, work)
    assert not blobs.has(SHA256)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


# ---------------------------------------------------------------------------------------------------- out


def job(*, result: bool = False, holder: str = "w1") -> Job:
    spec = JobSpec(job_id="a", files=() if result else (InputFile("in", sha256=SHA256, size_bytes=len(DATA)),))
    outcome = Outcome(result_ref=BlobRef(SHA256, len(DATA))) if result else None
    lease = Lease("lease", holder, f"{holder}-1", 1, 100.0)
    state = State.SUCCEEDED if result else State.RUNNING
    return Job(spec=spec, state=state, submitter="token:alice", created_at=0.0, lease=lease, outcome=outcome)


def wanted(identity: Identity, *, worker_id: str = "", incarnation: str = "", offset: int = 0) -> SendBlob:
    return SendBlob(1, BlobGet(9, SHA256, "a", offset), identity, worker_id, incarnation)


@pytest.mark.parametrize("offset", [0, 9_000])
def test_a_blob_goes_out_in_order_from_an_offset_with_an_end(blobs: FolderBlobs, offset: int) -> None:
    blobs.put_bytes(DATA)
    link = run(blobs, lambda transfers, link: transfers.send(link, job(result=True), wanted(ALICE, offset=offset)))
    chunks = link.all(Chunk)
    assert b"".join(chunk.data for chunk in chunks) == DATA[offset:]
    assert chunks[0].offset == offset
    assert [chunk.last for chunk in chunks][-1] is True
    assert {chunk.corr_id for chunk in chunks} == {9}


@pytest.mark.parametrize(
    ("command", "given"),
    [
        (wanted(BOB), job(result=True)),
        (wanted(ALICE), None),
        (wanted(ALICE), job(holder="w1")),
        (wanted(WORKER, worker_id="w1", incarnation="w1-1"), job(holder="w2")),
        (wanted(WORKER, worker_id="w1", incarnation="w1-0"), job(holder="w1")),
        (wanted(WORKER, worker_id="w1", incarnation="w1-1"), job(result=True)),
    ],
    ids=["another client", "no such job", "may", "another worker", "its dead self", "a worker and a result"],
)
def test_who_may_read_which_blob(
    blobs: FolderBlobs, request: pytest.FixtureRequest, command: SendBlob, given: Job | None
) -> None:
    blobs.put_bytes(DATA)
    if "may" in request.node.callspec.id.split("-"):
        assert run(blobs, lambda transfers, link: transfers.send(link, given, command)).all(Chunk)
        return
    with pytest.raises(NotFound):
        run(blobs, lambda transfers, link: transfers.send(link, given, command))


def test_the_worker_that_holds_the_job_reads_its_inputs(blobs: FolderBlobs) -> None:
    blobs.put_bytes(DATA)
    command = wanted(WORKER, worker_id="w1", incarnation="w1-1")
    assert run(blobs, lambda transfers, link: transfers.send(link, job(holder="w1"), command)).all(Chunk)


def test_blobs_that_are_not_here_are_named(blobs: FolderBlobs) -> None:
    blobs.put_bytes(DATA)

    async def work(transfers: Transfers, link: FakeConnection) -> None:
        assert transfers.missing([SHA256, "a" * 64]) == {"a" * 64}

    run(blobs, work)
