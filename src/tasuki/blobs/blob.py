"""The contract of a blob store: bytes named by their sha256, written once, verified whenever they are read whole.

Theory of operation. A blob has no name but its hash, so writing it twice is harmless and nothing is ever overwritten with
something else. `begin` returns a writer that streams; when its `commit` returns, the blob survives a power cut, and before that
nobody can see any part of it.

Bytes are kept under (sha256, generation). The tasuki store decides which generation counts; to this contract it is part of the
name and no more. Bytes that were deleted and come back get another generation, so a deleter that was frozen for an hour deletes
bytes that nobody uses any more. References to blobs, and the list of all blobs, are rows of the tasuki store: no method here
lists anything.

Where no rows describe the blobs, as with a dispatcher's inputs, their age does: `touch` marks a blob as used, `remove_untouched`
removes blobs that nobody has used for long. Never use it where there are rows.

A writer with a `resume_key` (which names the uploader) can be suspended: the next `begin` with the same key, for the same blob,
continues where it stopped. Bytes of other uploaders never get into it.

Nothing here assumes a local path. All methods block on I/O: an event loop calls them in a thread. A store may be used by many
threads at once; one writer or reader belongs to one thread at a time.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, Self

from tasuki.core.job import BlobRef, check_sha256
from tasuki.errors import Corrupt, InvalidInput, NotFound, TooLarge

BLOB_MAX_BYTES = 64 * 1024**3
CHUNK_BYTES = 256 * 1024  # of one chunk that a reader yields: four default pipes full, and small beside any memory limit
RESUMED_MIN_BYTES = 1024 * 1024 + 1  # a blob that fits into the smallest request that proxies accept (1 MiB) is sent again whole


def name_of(sha256: str, generation: int) -> str:
    """Return the last part of a path or key: the hash, and the generation unless it is the first."""
    check_sha256(sha256)
    if generation < 0:
        raise InvalidInput(f"the generation of a blob must be 0 or more, got {generation}")
    return f"{sha256}.{generation}" if generation else sha256


class StreamCheck:
    """Counts and hashes an incoming stream, and compares it with the announcement and the limit. No I/O."""

    def __init__(self, sha256: str | None, size_bytes: int | None, max_blob_bytes: int) -> None:
        if sha256 is not None:
            check_sha256(sha256)
        if size_bytes is not None and size_bytes < 0:
            raise InvalidInput(f"a blob cannot have {size_bytes} bytes; announce 0 or more")
        self.sha256 = sha256
        self.announced_bytes = size_bytes
        self.size_bytes = 0
        self._max_blob_bytes = max_blob_bytes
        self._hash = hashlib.sha256()
        self._check_size(size_bytes or 0)

    def check_growth(self, more_bytes: int) -> None:
        """Raise TooLarge or Corrupt if that many more bytes would be too many."""
        size_bytes = self.size_bytes + more_bytes
        self._check_size(size_bytes)
        if self.announced_bytes is not None and size_bytes > self.announced_bytes:
            raise Corrupt(f"a blob announced with {self.announced_bytes} bytes has {size_bytes} or more")

    def resume(self, before: StreamCheck) -> None:
        """Continue from the state of an earlier check of the same bytes."""
        self.size_bytes = before.size_bytes
        self._hash = before._hash

    def add(self, piece: bytes | memoryview) -> None:
        """Count and hash the next bytes. A memoryview is of single bytes."""
        self._hash.update(piece)
        self.size_bytes += len(piece)

    def verify(self) -> BlobRef:
        """Return the reference of the bytes that came; Corrupt, naming both values, if something else was announced."""
        ref = BlobRef(self._hash.hexdigest(), self.size_bytes)
        if self.announced_bytes not in (None, ref.size_bytes):
            raise Corrupt(f"a blob announced with {self.announced_bytes} bytes has {ref.size_bytes}")
        if self.sha256 not in (None, ref.sha256):
            raise Corrupt(f"a blob announced with sha256 {self.sha256} has sha256 {ref.sha256}")
        return ref

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._max_blob_bytes:
            raise TooLarge(
                f"a blob of {size_bytes} bytes or more passes the limit of {self._max_blob_bytes}; "
                "split it, or raise max_blob_bytes"
            )


class BlobWriter(ABC):
    """One blob that is being written. Leaving the `with` block without `commit` aborts it."""

    def __init__(self, check: StreamCheck) -> None:
        self._check = check
        self._is_open = True

    @property
    def size_bytes(self) -> int:
        """Number of bytes written so far. More than 0 from the start where an earlier upload is resumed."""
        return self._check.size_bytes

    def write(self, chunk: bytes | bytearray | memoryview) -> int:
        """Add bytes and return how many (all of them).

        TooLarge before the store's limit would be passed, Corrupt once there are more bytes than announced, DiskFull.
        Whatever it raises, the writer is then aborted and nothing of it remains.
        """
        self._check_open()
        view = memoryview(chunk).cast("B")
        try:
            self._check.check_growth(view.nbytes)
            self._add(view)
            self._check.add(view)
        except BaseException:
            self.abort()
            raise
        return view.nbytes

    def commit(self) -> BlobRef:
        """Make the blob durable and visible, in one step, and return its reference.

        Corrupt (naming both values) if sha256 or size are not the announced ones; DiskFull. The writer is
        aborted if this raises anything.
        """
        self._check_open()
        try:
            ref = self._check.verify()
            self._publish(ref)
        except BaseException:
            self.abort()
            raise
        self._is_open = False
        return ref

    @abstractmethod
    def abort(self) -> None:
        """Drop the bytes written so far. Harmless after `commit` or another `abort`."""

    @abstractmethod
    def suspend(self) -> None:
        """Keep the bytes for the next `begin` with the same resume_key; without a key, abort. Harmless at the end."""

    @abstractmethod
    def _add(self, piece: memoryview) -> None:
        """Write bytes that are within the limits; `check` has not counted them yet."""

    @abstractmethod
    def _publish(self, ref: BlobRef) -> None:
        """Make the verified bytes the blob `ref`, and free what the writer holds."""

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError("this blob writer was committed or aborted; begin a new one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.abort()


class BlobReader(ABC):
    """One blob that is being read: iterate it once, in chunks of at most CHUNK_BYTES. `where` names the store in errors."""

    def __init__(self, sha256: str, size_bytes: int, offset: int, where: str) -> None:
        self.size_bytes = size_bytes
        """Size of the whole blob, whatever the offset."""
        self.verify = True
        """False: who gets the bytes verifies them, and the hash is not compared here."""
        self._sha256 = sha256
        self._offset = offset
        self._where = where

    def __iter__(self) -> Iterator[bytes]:
        """Yield the chunks.

        A read from offset 0 raises Corrupt instead of yielding the last chunk if the hash of the whole is wrong, so that a
        reader that got all the bytes got the right ones. A read from an offset cannot be verified.
        """
        position = self._offset
        digest = hashlib.sha256()
        verify = self.verify and position == 0
        while position < self.size_bytes:
            chunk = self._read(position, min(CHUNK_BYTES, self.size_bytes - position))
            position += len(chunk)
            if verify:
                digest.update(chunk)
                if position == self.size_bytes:
                    self._verify(digest.hexdigest())
            yield chunk
        if verify and self.size_bytes == 0:
            self._verify(digest.hexdigest())

    @abstractmethod
    def _read(self, position: int, wanted_bytes: int) -> bytes:
        """Return at least one of the bytes from `position` on, at most so many."""

    def _verify(self, found_sha256: str) -> None:
        if found_sha256 != self._sha256:
            raise Corrupt(
                f"blob {self._sha256} reads as sha256 {found_sha256} from {self._where}: the store changed it; "
                "delete it there and put it again"
            )

    @abstractmethod
    def close(self) -> None:
        """Free the resources of the reader. Harmless when repeated."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class BlobStore(Protocol):
    """A place that keeps blobs. A sha256 that is not 64 lower-case hex digits is InvalidInput."""

    where: str
    """Name of the place in errors."""
    threads: int
    """Number of calls that may usefully block at once: the size of a caller's thread pool."""

    def begin(
        self, sha256: str | None = None, size_bytes: int | None = None, generation: int = 0, resume_key: str = ""
    ) -> BlobWriter:
        """Start writing a blob; the announced values are verified by `commit`.

        TooLarge if the announced size passes the store's limit, DiskFull if there is no room for it. A store that must name
        an object before its bytes come refuses (InvalidInput, in `write`) more than a few MiB without an announced sha256.

        With a `resume_key`, and an announced size of RESUMED_MIN_BYTES or more, writing continues where the last writer with
        this key, of this blob, was suspended (`size_bytes` tells where) or, if the store is on a disk, where its process was
        killed. While such a writer is open, another one with its key begins at 0. The store decides how long a suspended
        upload is kept.
        """

    def open(self, blob: BlobRef | str, offset: int = 0, generation: int = 0) -> BlobReader:
        """Start reading at `offset` (at most the size, else InvalidInput).

        NotFound; Corrupt if a reference is given and the stored size is another.
        """
        sha256 = check_sha256(blob.sha256 if isinstance(blob, BlobRef) else blob)
        reader = self._open(sha256, offset, generation)
        size_bytes = reader.size_bytes
        if isinstance(blob, BlobRef) and blob.size_bytes != size_bytes:
            reader.close()
            raise Corrupt(f"blob {sha256} has {size_bytes} bytes in {self.where}, its reference says {blob.size_bytes}")
        if not 0 <= offset <= size_bytes:
            reader.close()
            raise InvalidInput(f"offset {offset} is outside of blob {sha256}, which has {size_bytes} bytes")
        return reader

    def _open(self, sha256: str, offset: int, generation: int) -> BlobReader:
        """Return a reader, or raise NotFound. The size of the blob, and so the offset, is not checked yet."""

    def size(self, sha256: str, generation: int = 0) -> int:
        """Return the size in bytes, or raise NotFound."""

    def has(self, sha256: str, generation: int = 0) -> bool:
        """Return whether the blob is there. Its contents are not looked at."""
        try:
            self.size(sha256, generation)
        except NotFound:
            return False
        return True

    def delete(self, sha256: str, generation: int = 0) -> bool:
        """Remove the blob and the remains of its abandoned writers; True if it was there. After a power cut it may be back.

        A reader that has it open may be cut off: only blobs without references are deleted.
        """

    def resumable_bytes(self, resume_key: str) -> int:
        """Return the bytes of all unfinished uploads with this key, at least RESUMED_MIN_BYTES each; 0 without a floor."""
        return 0

    def make_space(self, size_bytes: int) -> None:
        """Raise DiskFull like `check_space`, but drop old suspended uploads first."""
        self.check_space(size_bytes)

    def sweep(self) -> None:
        """Drop suspended uploads that nobody resumed in time. A server calls it now and then."""

    def touch(self, sha256: str) -> None:
        """Mark the blob as used: its age counts from now on. Harmless if it is not there; Unavailable, at once."""

    def remove_untouched(self, since: float, in_use: Callable[[str], bool]) -> Iterator[BlobRef]:
        """Remove, one by one as it is iterated, the blobs neither put nor touched since then (wall clock) nor `in_use`.

        Only blobs of the first generation: others have rows. Several processes may do it at once; the age of each blob is
        read again just before it is removed.
        """

    def check_space(self, size_bytes: int = 0) -> None:
        """Raise DiskFull if a blob of that size would be refused now; a server asks before it accepts work."""

    def local_path(self, sha256: str, generation: int = 0) -> Path | None:
        """Return a file with the blob's bytes, to be read and never changed; None if the store has no files. NotFound.

        The bytes are not verified.
        """

    def check(self) -> None:
        """Raise ConfigError or Unavailable, with the remedy, if this place cannot be used. For the start of a server."""

    def close(self) -> None:
        """End calls that wait for a place that does not answer, with Unavailable. Harmless when repeated."""

    def put_bytes(self, data: bytes, generation: int = 0) -> BlobRef:
        """Store bytes that are small enough to be in memory."""
        with self.begin(size_bytes=len(data), generation=generation) as writer:
            writer.write(data)
            return writer.commit()

    def read_bytes(self, sha256: str, max_bytes: int, generation: int = 0) -> bytes:
        """Return the whole blob, verified; TooLarge, before anything is read, if it has more than `max_bytes`."""
        with self.open(sha256, generation=generation) as reader:
            if reader.size_bytes > max_bytes:
                raise TooLarge(
                    f"blob {sha256} has {reader.size_bytes} bytes, more than max_bytes = {max_bytes}; read it in chunks"
                )
            return b"".join(reader)

    def _not_found(self, sha256: str, generation: int) -> NotFound:
        return NotFound(f"no blob {name_of(sha256, generation)} in {self.where}")
