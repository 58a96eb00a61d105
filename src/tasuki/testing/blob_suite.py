"""The conformance suite of the blob contract. A new blob store subclasses it and gives two fixtures:

    class TestMyBlobs(BlobSuite):
        @pytest.fixture
        def blobs(self):
            return MyBlobs(max_blob_bytes=MAX_BLOB_BYTES)

        @pytest.fixture
        def damage(self):                        # put other bytes where those of a blob lie, behind the store's back
            return lambda sha256, data: ...

Touches only the store that it is given.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tasuki.blobs.blob import CHUNK_BYTES, RESUMED_MIN_BYTES, BlobStore
from tasuki.core.job import BlobRef
from tasuki.errors import Corrupt, InvalidInput, NotFound, TooLarge

__all__ = ["MAX_BLOB_BYTES", "BlobSuite", "Damage"]

MAX_BLOB_BYTES = 36 * CHUNK_BYTES  # 9 MiB: more than one part where blobs go in parts

Damage = Callable[[str, bytes], None]

NO_SHA256 = ["", "../../../etc/passwd", "a" * 63, "a" * 65, "A" * 64, "g" * 64, "a" * 63 + "\n", "a" * 64 + "\n", "..", "a/" * 32]


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def content(size_bytes: int) -> bytes:
    """Return bytes of which no two neighbouring chunks are alike."""
    period = bytes(range(251))
    return (period * (size_bytes // 251 + 1))[:size_bytes]


class BlobSuite:
    """Conformance cases of a blob store. pytest collects a subclass whose name begins with Test."""

    @pytest.fixture
    def blobs(self) -> BlobStore:
        """Override: an empty store with the limit MAX_BLOB_BYTES."""
        raise NotImplementedError("a subclass of BlobSuite gives the fixture blobs")

    @pytest.fixture
    def damage(self) -> Damage:
        """Override: a function that replaces the bytes of a blob's first generation."""
        raise NotImplementedError("a subclass of BlobSuite gives the fixture damage")

    # -- in and out -----------------------------------------------------------------------------------------------
    def test_the_place_can_be_used(self, blobs: BlobStore) -> None:
        blobs.check()
        blobs.check_space(MAX_BLOB_BYTES)
        assert blobs.threads >= 1

    @pytest.mark.parametrize("size_bytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
    def test_bytes_come_back_as_they_were_put(self, blobs: BlobStore, size_bytes: int) -> None:
        data = content(size_bytes)
        ref = blobs.put_bytes(data)
        assert ref == BlobRef(sha256_of(data), size_bytes)
        assert blobs.read_bytes(ref.sha256, size_bytes) == data
        assert blobs.size(ref.sha256) == size_bytes

    def test_a_streamed_blob_is_read_in_chunks_of_bounded_size(self, blobs: BlobStore) -> None:
        with blobs.begin() as writer:
            written = [writer.write(b"a" * 100_000) for _ in range(7)]
            ref = writer.commit()
        with blobs.open(ref) as reader:
            chunks = list(reader)
            assert reader.size_bytes == 700_000
        assert written == [100_000] * 7
        assert b"".join(chunks) == b"a" * 700_000
        assert max(map(len, chunks)) <= CHUNK_BYTES

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_every_kind_of_buffer_can_be_written(self, blobs: BlobStore, kind: type) -> None:
        with blobs.begin() as writer:
            writer.write(kind(b"buffer"))
            assert writer.commit().sha256 == sha256_of(b"buffer")

    def test_a_blob_of_exactly_the_limit_is_kept_and_one_byte_more_is_not(self, blobs: BlobStore) -> None:
        data = content(MAX_BLOB_BYTES)
        with blobs.begin(sha256_of(data)) as writer:
            writer.write(data)
            assert writer.commit().size_bytes == MAX_BLOB_BYTES
        assert blobs.read_bytes(sha256_of(data), MAX_BLOB_BYTES) == data
        with blobs.begin(sha256_of(b"more")) as writer:
            writer.write(data)
            with pytest.raises(TooLarge, match=str(MAX_BLOB_BYTES)):
                writer.write(b"x")

    def test_many_writers_of_one_blob_leave_one_whole_blob(self, blobs: BlobStore) -> None:
        data = content(3 * CHUNK_BYTES)

        def write(_: int) -> BlobRef:
            with blobs.begin(sha256_of(data), len(data)) as writer:
                for start in range(0, len(data), 100_000):
                    writer.write(data[start : start + 100_000])
                return writer.commit()

        with ThreadPoolExecutor(4) as threads:
            refs = list(threads.map(write, range(8)))
        assert set(refs) == {BlobRef(sha256_of(data), len(data))}
        assert blobs.read_bytes(sha256_of(data), len(data)) == data

    # -- what was announced ---------------------------------------------------------------------------------------
    def test_announced_hash_and_size_that_hold_are_accepted(self, blobs: BlobStore) -> None:
        with blobs.begin(sha256_of(b"abc"), 3) as writer:
            writer.write(b"abc")
            assert writer.commit() == BlobRef(sha256_of(b"abc"), 3)

    @pytest.mark.parametrize("size_bytes", [3, MAX_BLOB_BYTES])
    def test_a_wrong_announced_hash_is_corrupt_and_names_both(self, blobs: BlobStore, size_bytes: int) -> None:
        right, wrong = content(size_bytes), b"x" + content(size_bytes)[1:]
        with blobs.begin(sha256_of(right), size_bytes) as writer:
            writer.write(wrong)
            with pytest.raises(Corrupt) as caught:
                writer.commit()
        assert sha256_of(right) in str(caught.value)
        assert sha256_of(wrong) in str(caught.value)
        assert not blobs.has(sha256_of(right))
        assert not blobs.has(sha256_of(wrong))

    def test_fewer_bytes_than_announced_are_corrupt_and_both_sizes_named(self, blobs: BlobStore) -> None:
        with blobs.begin(size_bytes=17) as writer:
            writer.write(b"abc")
            with pytest.raises(Corrupt, match=r"17 bytes has 3\b"):
                writer.commit()
        assert not blobs.has(sha256_of(b"abc"))

    def test_more_bytes_than_announced_are_refused_at_once(self, blobs: BlobStore) -> None:
        with blobs.begin(size_bytes=4) as writer:
            writer.write(b"abc")
            with pytest.raises(Corrupt, match="4 bytes has 6"):
                writer.write(b"def")

    def test_an_announced_size_past_the_limit_is_refused_before_any_byte(self, blobs: BlobStore) -> None:
        with pytest.raises(TooLarge, match=str(MAX_BLOB_BYTES)):
            blobs.begin(size_bytes=MAX_BLOB_BYTES + 1)

    def test_a_negative_size_is_invalid(self, blobs: BlobStore) -> None:
        with pytest.raises(InvalidInput, match="-1 bytes"):
            blobs.begin(size_bytes=-1)

    # -- whole or not at all --------------------------------------------------------------------------------------
    def test_nothing_is_visible_before_commit(self, blobs: BlobStore) -> None:
        data = content(MAX_BLOB_BYTES)
        with blobs.begin(sha256_of(data)) as writer:
            writer.write(data)
            assert not blobs.has(sha256_of(data))
            writer.commit()
            assert blobs.has(sha256_of(data))

    def test_leaving_the_block_without_commit_keeps_nothing(self, blobs: BlobStore) -> None:
        with blobs.begin() as writer:
            writer.write(b"dropped")
        assert not blobs.has(sha256_of(b"dropped"))

    def test_abort_after_commit_takes_nothing_back(self, blobs: BlobStore) -> None:
        writer = blobs.begin()
        writer.write(b"kept")
        writer.commit()
        writer.abort()
        assert blobs.read_bytes(sha256_of(b"kept"), 4) == b"kept"

    @pytest.mark.parametrize("ending", ["commit", "abort"])
    def test_an_ended_writer_takes_nothing_more(self, blobs: BlobStore, ending: str) -> None:
        writer = blobs.begin()
        getattr(writer, ending)()
        with pytest.raises(ValueError, match="begin a new one"):
            writer.write(b"late")
        with pytest.raises(ValueError, match="begin a new one"):
            writer.commit()

    # -- cut off, and gone on with --------------------------------------------------------------------------------
    def half_of(self, blobs: BlobStore, data: bytes, resume_key: str = "alice") -> int:
        """Write the first half and suspend the writer; return the number of bytes written."""
        writer = blobs.begin(sha256_of(data), len(data), resume_key=resume_key)
        writer.write(data[: len(data) // 2])
        writer.suspend()
        return len(data) // 2

    @pytest.mark.parametrize("size_bytes", [RESUMED_MIN_BYTES, MAX_BLOB_BYTES])
    def test_a_suspended_writer_is_gone_on_with_where_it_was(self, blobs: BlobStore, size_bytes: int) -> None:
        data = content(size_bytes)
        half = self.half_of(blobs, data)
        assert not blobs.has(sha256_of(data))
        with blobs.begin(sha256_of(data), size_bytes, resume_key="alice") as writer:
            assert writer.size_bytes == half
            writer.write(data[half:])
            assert writer.commit() == BlobRef(sha256_of(data), size_bytes)
        assert blobs.read_bytes(sha256_of(data), size_bytes) == data

    def test_it_may_be_suspended_many_times(self, blobs: BlobStore) -> None:
        data, step = content(MAX_BLOB_BYTES), MAX_BLOB_BYTES // 6
        for start in range(0, len(data), step):
            writer = blobs.begin(sha256_of(data), len(data), resume_key="alice")
            assert writer.size_bytes == start
            writer.write(data[start : start + step])
            writer.suspend()
        with blobs.begin(sha256_of(data), len(data), resume_key="alice") as writer:
            assert writer.size_bytes == len(data)
            writer.commit()
        assert blobs.read_bytes(sha256_of(data), len(data)) == data

    def test_what_is_suspended_is_only_for_its_key_and_its_blob(self, blobs: BlobStore) -> None:
        data, other = content(RESUMED_MIN_BYTES), b"x" * RESUMED_MIN_BYTES
        half = self.half_of(blobs, data)
        for sha256, resume_key in ((sha256_of(data), "bob"), (sha256_of(data), ""), (sha256_of(other), "alice")):
            with blobs.begin(sha256, RESUMED_MIN_BYTES, resume_key=resume_key) as writer:
                assert writer.size_bytes == 0
        with blobs.begin(sha256_of(data), len(data), resume_key="alice") as writer:
            assert writer.size_bytes == half

    def test_another_writer_of_the_same_key_begins_at_0_while_one_is_open(self, blobs: BlobStore) -> None:
        data = content(RESUMED_MIN_BYTES)
        half = self.half_of(blobs, data)
        with blobs.begin(sha256_of(data), len(data), resume_key="alice") as first:
            with blobs.begin(sha256_of(data), len(data), resume_key="alice") as second:
                assert (first.size_bytes, second.size_bytes) == (half, 0)
                second.write(data)
                second.commit()
            first.write(data[half:])
            first.commit()
        assert blobs.read_bytes(sha256_of(data), len(data)) == data

    @pytest.mark.parametrize("ending", ["abort", "commit", "too much"])
    def test_wrong_bytes_and_an_abort_drop_all_that_was_kept(self, blobs: BlobStore, ending: str) -> None:
        data = content(RESUMED_MIN_BYTES)
        half = self.half_of(blobs, data)
        writer = blobs.begin(sha256_of(data), len(data), resume_key="alice")
        if ending == "abort":
            writer.abort()
        elif ending == "commit":
            writer.write(b"x" * (len(data) - half))
            with pytest.raises(Corrupt, match=sha256_of(data)):
                writer.commit()
        else:
            with pytest.raises(Corrupt, match="announced"):
                writer.write(data)
        writer.suspend()
        with blobs.begin(sha256_of(data), len(data), resume_key="alice") as again:
            assert again.size_bytes == 0

    def test_nothing_is_kept_of_what_is_small_or_has_no_key(self, blobs: BlobStore) -> None:
        for data, resume_key in ((content(RESUMED_MIN_BYTES - 1), "alice"), (content(RESUMED_MIN_BYTES), "")):
            self.half_of(blobs, data, resume_key)
            with blobs.begin(sha256_of(data), len(data), resume_key=resume_key) as writer:
                assert writer.size_bytes == 0

    def test_an_ended_writer_cannot_be_suspended_and_a_suspended_one_has_ended(self, blobs: BlobStore) -> None:
        data = content(RESUMED_MIN_BYTES)
        writer = blobs.begin(sha256_of(data), len(data), resume_key="alice")
        writer.write(data)
        writer.commit()
        writer.suspend()
        assert blobs.read_bytes(sha256_of(data), len(data)) == data
        other = blobs.begin(sha256_of(data), len(data), resume_key="bob")
        other.write(data[:10])
        other.suspend()
        with pytest.raises(ValueError, match="begin a new one"):
            other.write(data[10:])
        other.abort()
        with blobs.begin(sha256_of(data), len(data), resume_key="bob") as again:
            assert again.size_bytes == 10

    def test_sweeping_keeps_what_is_young(self, blobs: BlobStore) -> None:
        data = content(RESUMED_MIN_BYTES)
        half = self.half_of(blobs, data)
        blobs.sweep()
        with blobs.begin(sha256_of(data), len(data), resume_key="alice") as writer:
            assert writer.size_bytes == half

    # -- age ------------------------------------------------------------------------------------------------------
    def test_what_is_old_is_removed_and_what_is_in_use_stays(self, blobs: BlobStore) -> None:
        old, used = (blobs.put_bytes(data) for data in (b"old", b"in use"))
        later_generation = blobs.put_bytes(b"with a row", generation=7)
        in_a_minute = time.time() + 60
        assert list(blobs.remove_untouched(time.time() - 60, lambda sha256: False)) == []
        assert list(blobs.remove_untouched(in_a_minute, lambda sha256: sha256 == used.sha256)) == [old]
        assert (blobs.has(old.sha256), blobs.has(used.sha256), blobs.has(later_generation.sha256, 7)) == (False, True, True)
        assert list(blobs.remove_untouched(in_a_minute, lambda sha256: False)) == [used]

    def test_what_is_touched_is_not_there_for_that(self, blobs: BlobStore) -> None:
        blobs.touch(sha256_of(b"never put"))
        assert not blobs.has(sha256_of(b"never put"))
        assert list(blobs.remove_untouched(time.time() + 60, lambda sha256: False)) == []

    # -- reading --------------------------------------------------------------------------------------------------
    def test_a_read_from_an_offset_gives_the_rest(self, blobs: BlobStore) -> None:
        ref = blobs.put_bytes(b"0123456789")
        with blobs.open(ref, offset=7) as reader:
            assert b"".join(reader) == b"789"
            assert reader.size_bytes == 10
        with blobs.open(ref.sha256, offset=10) as reader:
            assert list(reader) == []

    @pytest.mark.parametrize("offset", [-1, 11])
    def test_an_offset_outside_the_blob_is_invalid(self, blobs: BlobStore, offset: int) -> None:
        ref = blobs.put_bytes(b"0123456789")
        with pytest.raises(InvalidInput, match=f"offset {offset}"):
            blobs.open(ref, offset=offset)

    def test_a_reference_with_another_size_is_corrupt(self, blobs: BlobStore) -> None:
        ref = blobs.put_bytes(b"0123456789")
        with pytest.raises(Corrupt, match=r"10 bytes.* 11"):
            blobs.open(BlobRef(ref.sha256, 11))

    def test_more_than_max_bytes_is_not_read_into_memory(self, blobs: BlobStore) -> None:
        ref = blobs.put_bytes(b"0123456789")
        with pytest.raises(TooLarge, match="max_bytes = 9"):
            blobs.read_bytes(ref.sha256, 9)

    @pytest.mark.parametrize("size_bytes", [1, CHUNK_BYTES, 3 * CHUNK_BYTES + 1])
    def test_changed_bytes_are_never_handed_out_whole(self, blobs: BlobStore, damage: Damage, size_bytes: int) -> None:
        data = content(size_bytes)
        ref = blobs.put_bytes(data)
        damage(ref.sha256, b"x" + data[1:])
        found: list[bytes] = []
        with blobs.open(ref) as reader, pytest.raises(Corrupt, match=ref.sha256):
            found.extend(reader)
        assert sum(map(len, found)) < size_bytes
        with pytest.raises(Corrupt, match=ref.sha256):
            blobs.read_bytes(ref.sha256, size_bytes)

    def test_bytes_where_there_should_be_none_are_corrupt(self, blobs: BlobStore, damage: Damage) -> None:
        ref = blobs.put_bytes(b"abc")
        damage(ref.sha256, b"")
        with pytest.raises(Corrupt):
            blobs.open(ref)
        with pytest.raises(Corrupt, match=ref.sha256):
            blobs.read_bytes(ref.sha256, 3)

    # -- names ----------------------------------------------------------------------------------------------------
    def test_an_unknown_blob_is_not_found_by_every_verb(self, blobs: BlobStore) -> None:
        unknown = sha256_of(b"never put")
        for verb in (blobs.open, blobs.size, blobs.local_path, lambda sha256: blobs.read_bytes(sha256, 1)):
            with pytest.raises(NotFound, match=unknown):
                verb(unknown)
        assert not blobs.has(unknown)
        assert not blobs.delete(unknown)

    def test_a_deleted_blob_is_gone_and_can_be_put_again(self, blobs: BlobStore) -> None:
        ref = blobs.put_bytes(b"again")
        assert blobs.delete(ref.sha256)
        assert not blobs.has(ref.sha256)
        assert not blobs.delete(ref.sha256)
        blobs.put_bytes(b"again")
        assert blobs.read_bytes(ref.sha256, 5) == b"again"

    def test_generations_do_not_know_of_each_other(self, blobs: BlobStore) -> None:
        sha256 = blobs.put_bytes(b"twice").sha256
        with pytest.raises(NotFound, match=rf"{sha256}\.7"):
            blobs.open(sha256, generation=7)
        assert not blobs.has(sha256, 7)
        blobs.put_bytes(b"twice", generation=7)
        assert blobs.delete(sha256)
        assert (blobs.has(sha256), blobs.has(sha256, 7), blobs.has(sha256, 70)) == (False, True, False)
        assert blobs.read_bytes(sha256, 5, generation=7) == b"twice"
        assert blobs.size(sha256, 7) == 5
        assert blobs.delete(sha256, 7)
        assert not blobs.has(sha256, 7)

    def test_a_negative_generation_is_invalid(self, blobs: BlobStore) -> None:
        with pytest.raises(InvalidInput, match="-1"):
            blobs.has(sha256_of(b"abc"), -1)

    @pytest.mark.parametrize("sha256", NO_SHA256)
    def test_what_is_no_sha256_is_refused_by_every_verb(self, blobs: BlobStore, sha256: str) -> None:
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

    def test_closing_twice_is_harmless(self, blobs: BlobStore) -> None:
        blobs.close()
        blobs.close()
