"""Uploads and downloads that are not what they say: refused one by one, bounded, nothing of them is kept."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable

import pytest

from tasuki.core.protocol import (
    BlobGet,
    BlobPut,
    Chunk,
    ErrorMessage,
    Message,
    Reply,
)
from tasuki.wire.messages import encode
from tests.doors.raw import RawPeer
from tests.support.processes import ServerProcess, rss_bytes
from tests.support.waiting import until

pytestmark = pytest.mark.e2e
MIB = 1 << 20
Served = Callable[[], None]


def put(peer: RawPeer, data: bytes, *, sha256: str | None = None, size_bytes: int | None = None) -> tuple[int, Message]:
    msg_id = peer.next_id()
    sha256 = hashlib.sha256(data).hexdigest() if sha256 is None else sha256
    peer.send(BlobPut(msg_id, sha256, len(data) if size_bytes is None else size_bytes))
    return msg_id, peer.answer(msg_id)


def test_upload_in_chunks_is_stored_and_not_asked_for_again(server: ServerProcess) -> None:
    data = os.urandom(700_000)
    with RawPeer(server.url) as peer:
        peer.as_client(server.token)
        msg_id, go = put(peer, data)
        assert isinstance(go, Reply)
        assert go.body == {"go": True}
        peer.send(Chunk(msg_id, 0, data[:300_000]), Chunk(msg_id, 300_000, data[300_000:], True))
        done = peer.answer(msg_id)
        assert isinstance(done, Reply)
        assert done.body == {"have": True}
        _, again = put(peer, data)
        assert isinstance(again, Reply)
        assert again.body == {"have": True}


@pytest.mark.parametrize(
    "sha256",
    ["", "..", "../../etc/passwd", "A" * 64, "g" * 64, "a" * 63, "a" * 65, "a" * 64 + "\n", "../" + "a" * 61, "\0" * 64],
)
def test_blob_name_that_is_not_a_sha256_is_refused(server: ServerProcess, sha256: str) -> None:
    with RawPeer(server.url) as peer:
        peer.as_client(server.token)
        _, answer = put(peer, b"data", sha256=sha256)
        assert isinstance(answer, ErrorMessage)
        assert answer.code == "INVALID"
        msg_id = peer.next_id()
        peer.send(BlobGet(msg_id, sha256, "some-job"))
        answer = peer.answer(msg_id)
        assert isinstance(answer, ErrorMessage)
        assert answer.code == "INVALID"
        assert peer.alive()


@pytest.mark.parametrize(
    ("announced", "sent", "code"),
    [
        ({"sha256": "0" * 64}, b"data", "CORRUPT"),
        ({"size_bytes": 3}, b"data", "CORRUPT"),
        ({"size_bytes": 5}, b"data", "CORRUPT"),
        ({"size_bytes": 0}, b"data", "CORRUPT"),
    ],
    ids=["other-bytes", "too-many", "too-few", "announced-empty"],
)
def test_upload_that_is_not_what_was_announced_is_refused_and_not_kept(
    server: ServerProcess, others_are_served: Served, announced: dict[str, object], sent: bytes, code: str
) -> None:
    data = os.urandom(16) + sent
    if "size_bytes" in announced:
        announced = {"size_bytes": announced["size_bytes"] + 16 if announced["size_bytes"] else 0}
    with RawPeer(server.url) as peer:
        peer.as_client(server.token)
        msg_id, go = put(peer, data, **announced)
        assert isinstance(go, Reply), go
        peer.send(Chunk(msg_id, 0, data, True))
        answer = peer.answer(msg_id)
        assert isinstance(answer, ErrorMessage)
        assert answer.code == code
        # The right one can still be sent on the same connection.
        msg_id, go = put(peer, data)
        assert isinstance(go, Reply)
        assert go.body == {"go": True}
        peer.send(Chunk(msg_id, 0, data, True))
        assert isinstance(peer.answer(msg_id), Reply)
    others_are_served()


@pytest.mark.parametrize("number", [-1, 1 << 63, (1 << 64) - 1])
def test_size_or_offset_that_is_no_number_of_bytes_is_refused(
    server: ServerProcess, others_are_served: Served, number: int
) -> None:
    with RawPeer(server.url) as peer:
        peer.as_client(server.token)
        for message in (BlobPut(7, "1" * 64, number), BlobGet(8, "1" * 64, "no-such-job", number)):
            peer.send(message)
            answer = peer.answer(message.msg_id)
            assert isinstance(answer, ErrorMessage)
            assert (answer.corr_id, answer.code) == (message.msg_id, "INVALID")
        assert peer.alive()
    others_are_served()


@pytest.mark.parametrize("size_bytes", [(1 << 40), (1 << 63) - 1])
def test_upload_of_an_impossible_size_is_refused_at_once(server: ServerProcess, size_bytes: int) -> None:
    with RawPeer(server.url) as peer:
        peer.as_client(server.token)
        _, answer = put(peer, b"", sha256="1" * 64, size_bytes=size_bytes)
        assert isinstance(answer, ErrorMessage)
        assert answer.code in {"INVALID", "TOO_LARGE", "DISK_FULL"}
        assert peer.alive()


def test_chunk_at_a_wrong_offset_ends_the_connection(server: ServerProcess, others_are_served: Served) -> None:
    with RawPeer(server.url) as peer:
        peer.as_client(server.token)
        msg_id, _ = put(peer, os.urandom(100))
        peer.send(Chunk(msg_id, 50, b"x"))
        error = peer.farewell()
    assert error.code == "PROTOCOL"
    assert "50" in error.message
    others_are_served()


def test_chunk_of_no_upload_is_ignored(server: ServerProcess) -> None:
    with RawPeer(server.url) as peer:
        peer.as_client(server.token).send(Chunk(12345, 0, b"x", True))
        assert peer.alive()


def test_too_many_uploads_at_once_are_refused_but_the_others_go_on(server: ServerProcess, others_are_served: Served) -> None:
    with RawPeer(server.url) as peer:
        peer.as_client(server.token)
        blobs = [os.urandom(32) for _ in range(17)]
        begun = [put(peer, data) for data in blobs]
        assert all(isinstance(answer, Reply) for _, answer in begun[:16])
        refused = begun[16][1]
        assert isinstance(refused, ErrorMessage)
        assert refused.code == "OVERLOADED"
        peer.send(Chunk(begun[0][0], 0, blobs[0], True))
        assert isinstance(peer.answer(begun[0][0]), Reply)
        others_are_served()


def test_half_sent_upload_leaves_no_file_behind(server: ServerProcess) -> None:
    temporary = server.folder.blobs / "tmp"
    with RawPeer(server.url) as peer:
        peer.as_client(server.token)
        msg_id, _ = put(peer, os.urandom(MIB))
        peer.send(Chunk(msg_id, 0, bytes(1000)))
        assert peer.alive()
        assert any(path.stat().st_size == 1000 for path in server.folder.blobs.rglob("*") if path.is_file())
    until(
        lambda: not any(path.stat().st_size == 1000 for path in server.folder.blobs.rglob("*") if path.is_file()),
        what=f"the half blob below {temporary} is removed",
    )


def test_upload_in_empty_chunks_is_bounded_in_memory(server: ServerProcess, others_are_served: Served) -> None:
    # Given an upload, and chunks whose own cost is all that there is of them
    before = highest = rss_bytes(server.pid)
    with RawPeer(server.url) as peer:
        peer.as_client(server.token)
        msg_id, _ = put(peer, b"", sha256="2" * 64, size_bytes=50 * MIB)
        nothing = encode(Chunk(msg_id, 0, b"")) * 10_000
        deadline = time.monotonic() + 3
        # When they come as fast as they can
        while time.monotonic() < deadline:
            peer.send_bytes(nothing)
            highest = max(highest, rss_bytes(server.pid))
        others_are_served()
    # Then the server reads no faster than it writes
    assert highest - before < 12 * MIB


@pytest.mark.parametrize("offset", [5, 1 << 62])
def test_download_from_an_impossible_offset_is_an_error(server: ServerProcess, offset: int, tmp_path) -> None:
    # Given a job with a blob of 100,000 bytes
    path = tmp_path / "input.bin"
    path.write_bytes(b"abc" * 40_000)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    with server.client() as client:
        client.submit(job_id="offsets", subject="nobody.takes", files=[path], watch=False)
    with RawPeer(server.url) as peer:
        peer.as_client(server.token)
        msg_id = peer.next_id()
        peer.send(BlobGet(msg_id, sha256, "offsets", offset))
        answer = peer.answer(msg_id)
        if offset == 5:
            assert isinstance(answer, Chunk)
            assert answer.data[:3] == b"cab"
        else:
            assert isinstance(answer, ErrorMessage), answer
            assert answer.code == "INVALID"
        assert peer.alive()
