"""What every blob store must do, whatever it keeps its blobs in."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tasuki.blobs.blob import CHUNK_BYTES, BlobRef, BlobStore
from tasuki.blobs.folder import FolderBlobs
from tasuki.errors import Corrupt, InvalidInput, NotFound, TooLarge

MAX_BLOB_BYTES = 4 * CHUNK_BYTES


@pytest.fixture(params=["folder"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    assert request.param == "folder"
    return FolderBlobs(tmp_path / "blobs", max_blob_bytes=MAX_BLOB_BYTES, floor_free_bytes=0)


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("size_bytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_bytes_come_back_as_they_were_put(blobs: BlobStore, size_bytes: int) -> None:
    data = bytes(index % 251 for index in range(size_bytes))
    ref = blobs.put_bytes(data)
    assert ref == BlobRef(sha256_of(data), size_bytes)
    assert blobs.read_bytes(ref.sha256, size_bytes) == data
    assert blobs.size(ref.sha256) == size_bytes


def test_a_streamed_blob_is_read_in_chunks_of_bounded_size(blobs: BlobStore) -> None:
    with blobs.begin() as writer:
        written = [writer.write(b"a" * 100_000) for _ in range(7)]
        ref = writer.commit()
    with blobs.open(ref) as reader:
        chunks = list(reader)
        assert reader.size_bytes == 700_000
    assert written == [100_000] * 7
    assert b"".join(chunks) == b"a" * 700_000
    assert max(map(len, chunks)) == CHUNK_BYTES


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_every_kind_of_buffer_can_be_written(blobs: BlobStore, kind: type) -> None:
    with blobs.begin() as writer:
        writer.write(kind(b"buffer"))
        assert writer.commit().sha256 == sha256_of(b"buffer")


def test_announced_hash_and_size_that_hold_are_accepted(blobs: BlobStore) -> None:
    with blobs.begin(sha256_of(b"abc"), 3) as writer:
        writer.write(b"abc")
        assert writer.commit() == BlobRef(sha256_of(b"abc"), 3)


def test_a_wrong_announced_hash_is_corrupt_and_names_both(blobs: BlobStore) -> None:
    with blobs.begin(sha256_of(b"abc"), 3) as writer:
        writer.write(b"abd")
        with pytest.raises(Corrupt) as caught:
            writer.commit()
    assert sha256_of(b"abc") in str(caught.value)
    assert sha256_of(b"abd") in str(caught.value)
    assert not blobs.has(sha256_of(b"abc"))
    assert not blobs.has(sha256_of(b"abd"))


def test_fewer_bytes_than_announced_are_corrupt_and_both_sizes_named(blobs: BlobStore) -> None:
    with blobs.begin(size_bytes=17) as writer:
        writer.write(b"abc")
        with pytest.raises(Corrupt, match=r"17 bytes has 3\b"):
            writer.commit()
    assert not blobs.has(sha256_of(b"abc"))


def test_more_bytes_than_announced_are_refused_at_once(blobs: BlobStore) -> None:
    with blobs.begin(size_bytes=4) as writer:
        writer.write(b"abc")
        with pytest.raises(Corrupt, match="4 bytes has 6"):
            writer.write(b"def")


def test_an_announced_size_past_the_limit_is_refused_before_any_byte(blobs: BlobStore) -> None:
    with pytest.raises(TooLarge, match=str(MAX_BLOB_BYTES)):
        blobs.begin(size_bytes=MAX_BLOB_BYTES + 1)


def test_a_blob_of_exactly_the_limit_is_kept_and_one_byte_more_is_not(blobs: BlobStore) -> None:
    with blobs.begin() as writer:
        writer.write(b"x" * MAX_BLOB_BYTES)
        assert writer.commit().size_bytes == MAX_BLOB_BYTES
    with blobs.begin() as writer:
        writer.write(b"x" * MAX_BLOB_BYTES)
        with pytest.raises(TooLarge, match=str(MAX_BLOB_BYTES)):
            writer.write(b"x")


def test_nothing_is_visible_before_commit(blobs: BlobStore) -> None:
    with blobs.begin() as writer:
        writer.write(b"half")
        assert not blobs.has(sha256_of(b"half"))
        writer.commit()
        assert blobs.has(sha256_of(b"half"))


def test_leaving_the_block_without_commit_keeps_nothing(blobs: BlobStore) -> None:
    with blobs.begin() as writer:
        writer.write(b"dropped")
    assert not blobs.has(sha256_of(b"dropped"))


def test_abort_after_commit_takes_nothing_back(blobs: BlobStore) -> None:
    writer = blobs.begin()
    writer.write(b"kept")
    writer.commit()
    writer.abort()
    assert blobs.read_bytes(sha256_of(b"kept"), 4) == b"kept"


@pytest.mark.parametrize("ending", ["commit", "abort"])
def test_an_ended_writer_takes_nothing_more(blobs: BlobStore, ending: str) -> None:
    writer = blobs.begin()
    getattr(writer, ending)()
    with pytest.raises(ValueError, match="begin a new one"):
        writer.write(b"late")
    with pytest.raises(ValueError, match="begin a new one"):
        writer.commit()


def test_a_read_from_an_offset_gives_the_rest(blobs: BlobStore) -> None:
    ref = blobs.put_bytes(b"0123456789")
    with blobs.open(ref, offset=7) as reader:
        assert b"".join(reader) == b"789"
        assert reader.size_bytes == 10
    with blobs.open(ref.sha256, offset=10) as reader:
        assert list(reader) == []


@pytest.mark.parametrize("offset", [-1, 11])
def test_an_offset_outside_the_blob_is_invalid(blobs: BlobStore, offset: int) -> None:
    ref = blobs.put_bytes(b"0123456789")
    with pytest.raises(InvalidInput, match=f"offset {offset}"):
        blobs.open(ref, offset=offset)


def test_a_reference_with_another_size_is_corrupt(blobs: BlobStore) -> None:
    ref = blobs.put_bytes(b"0123456789")
    with pytest.raises(Corrupt, match=r"10 bytes.* 11"):
        blobs.open(BlobRef(ref.sha256, 11))


def test_more_than_max_bytes_is_not_read_into_memory(blobs: BlobStore) -> None:
    ref = blobs.put_bytes(b"0123456789")
    with pytest.raises(TooLarge, match="max_bytes = 9"):
        blobs.read_bytes(ref.sha256, 9)


def test_an_unknown_blob_is_not_found_by_every_verb(blobs: BlobStore) -> None:
    unknown = sha256_of(b"never put")
    for verb in (blobs.open, blobs.size, blobs.local_path, lambda sha256: blobs.read_bytes(sha256, 1)):
        with pytest.raises(NotFound, match=unknown):
            verb(unknown)
    assert not blobs.has(unknown)
    assert not blobs.delete(unknown)


def test_a_deleted_blob_is_gone_and_can_be_put_again(blobs: BlobStore) -> None:
    ref = blobs.put_bytes(b"again")
    assert blobs.delete(ref.sha256)
    assert not blobs.has(ref.sha256)
    assert not blobs.delete(ref.sha256)
    blobs.put_bytes(b"again")
    assert blobs.read_bytes(ref.sha256, 5) == b"again"


def test_a_reader_goes_on_after_its_blob_is_deleted(blobs: BlobStore) -> None:
    ref = blobs.put_bytes(b"x" * (2 * CHUNK_BYTES))
    with blobs.open(ref) as reader:
        chunks = iter(reader)
        first = next(chunks)
        blobs.delete(ref.sha256)
        assert len(first) + sum(map(len, chunks)) == ref.size_bytes


@pytest.mark.parametrize(
    "sha256",
    ["", "../../../etc/passwd", "a" * 63, "a" * 65, "A" * 64, "g" * 64, "a" * 63 + "\n", "a" * 64 + "\n", "..", "a/" * 32],
)
def test_what_is_no_sha256_is_refused_by_every_verb(blobs: BlobStore, sha256: str) -> None:
    verbs = (
        blobs.begin,
        blobs.open,
        blobs.size,
        blobs.has,
        blobs.delete,
        blobs.local_path,
        lambda text: blobs.open(BlobRef(text, 1)),
        lambda text: blobs.read_bytes(text, 1),
    )
    for verb in verbs:
        with pytest.raises(InvalidInput, match="64 lower-case hex digits"):
            verb(sha256)


def test_a_negative_size_is_invalid(blobs: BlobStore) -> None:
    with pytest.raises(InvalidInput, match="-1 bytes"):
        blobs.begin(size_bytes=-1)
