"""The contract of a blob store: bytes named by their sha256, written once, verified whenever they are read whole.

Theory of operation. A blob has no name but its hash, so writing it twice is harmless and nothing is ever overwritten
with something else. `begin` gives a writer that streams; `commit` is the moment of truth: when it returns, the blob
survives a power cut, and before that nobody can see any part of it.

Bytes lie under (sha256, generation). The tasuki store says which generation counts; to this contract it is part of the
name and no more. Bytes that were deleted and come back get another generation, so a deleter that was frozen for an hour
deletes what nobody uses any more. Who refers to a blob, and which blobs there are, is not known here: both are rows of that
store, and no verb lists anything.

Where no rows tell of blobs, as of a dispatcher's inputs, their age does: `touch` says that one is in use, `remove_untouched`
takes away what nobody has used for long. Never where there are rows.

A writer with a `resume_key` (whose upload it is) can be suspended: the next `begin` with the same key, for the same blob, goes on
where it was. Nobody else's bytes can get into it, and whoever spoils an upload spoils none but their own.

Nothing here assumes a local path. All verbs block on I/O: an event loop calls them in a thread. A store may be used by
many threads at once; one writer or reader belongs to one thread at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from tasuki.core.job import BlobRef
from tasuki.errors import InvalidInput

__all__ = [
    "CHUNK_BYTES",
    "RESUMED_MIN_BYTES",
    "BlobReader",
    "BlobRef",
    "BlobStore",
    "BlobWriter",
    "check_sha256",
    "is_sha256",
    "name_of",
]

CHUNK_BYTES = 256 * 1024  # what a reader yields at once: four default pipes full, and small beside any memory limit
RESUMED_MIN_BYTES = 1024 * 1024 + 1  # what fits into the least request that proxies let through (1 MiB) is sent again as a whole

_SHA256 = re.compile(r"[0-9a-f]{64}")


def is_sha256(text: str) -> bool:
    """64 lower-case hex digits."""
    return _SHA256.fullmatch(text) is not None


def check_sha256(sha256: str) -> str:
    """Return it if it is 64 lower-case hex digits, else raise InvalidInput: it becomes part of paths and keys."""
    if not is_sha256(sha256):
        raise InvalidInput(f"not a sha256: {sha256[:80]!r}; it must be 64 lower-case hex digits")
    return sha256


def name_of(sha256: str, generation: int) -> str:
    """The last part of a path or key: the hash, and the generation unless it is the first."""
    check_sha256(sha256)
    if generation < 0:
        raise InvalidInput(f"a blob has no generation {generation}; they count from 0")
    return f"{sha256}.{generation}" if generation else sha256


class BlobWriter(Protocol):
    """One blob on its way in. Leaving the `with` block without `commit` aborts it."""

    @property
    def size_bytes(self) -> int:
        """How much was written. More than 0 from the start if it goes on where another was suspended."""
        ...

    def write(self, chunk: bytes | bytearray | memoryview) -> int:
        """Add bytes and return how many (all of them).

        TooLarge before the store's limit would be passed, Corrupt once there are more bytes than announced, DiskFull.
        Whatever it raises, the writer is then aborted and nothing of it remains.
        """
        ...

    def commit(self) -> BlobRef:
        """Make the blob durable and visible, in one step, and return its reference.

        Corrupt (naming both values) if sha256 or size are not the announced ones; DiskFull. Whatever it raises, the
        writer is then aborted.
        """
        ...

    def abort(self) -> None:
        """Drop what was written. Harmless after `commit` or another `abort`."""
        ...

    def suspend(self) -> None:
        """Keep what was written for the next `begin` with the same resume_key; without one it is `abort`. Harmless at the end."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class BlobReader(Protocol):
    """One blob on its way out: iterate it once, in chunks of at most CHUNK_BYTES."""

    @property
    def size_bytes(self) -> int:
        """Size of the whole blob, whatever the offset."""
        ...

    def __iter__(self) -> Iterator[bytes]:
        """Yield the chunks. A read from offset 0 raises Corrupt instead of yielding the last chunk if the hash of the
        whole is wrong, so that whoever got all the bytes got the right ones. A read from an offset cannot be verified.
        """
        ...

    def close(self) -> None:
        """Free what the reader holds. Harmless when repeated."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class BlobStore(Protocol):
    """What every place that keeps blobs can do. A sha256 that is not 64 lower-case hex digits is InvalidInput."""

    threads: int
    """How many calls may usefully block at once; whoever calls from an event loop keeps that many threads."""

    def begin(
        self, sha256: str | None = None, size_bytes: int | None = None, generation: int = 0, resume_key: str = ""
    ) -> BlobWriter:
        """Start writing a blob; what is announced here is verified by `commit`.

        TooLarge if the announced size passes the store's limit, DiskFull if there is no room for it. A store that must name
        what it writes beforehand refuses (InvalidInput, in `write`) more than a few MiB whose sha256 was not announced.

        With a `resume_key`, and if what is announced is RESUMED_MIN_BYTES or more, it goes on where the last writer with this
        key, of this blob, was suspended (`size_bytes` says where), or, if the store is on a disk, where its process was killed.
        While such a writer is open, another one with its key begins at 0. How long it can be gone on with is the store's to say.
        """
        ...

    def open(self, blob: BlobRef | str, offset: int = 0, generation: int = 0) -> BlobReader:
        """Start reading at `offset` (at most the size, else InvalidInput).

        NotFound; Corrupt if a reference is given and the stored size is another.
        """
        ...

    def size(self, sha256: str, generation: int = 0) -> int:
        """Size in bytes, or NotFound."""
        ...

    def has(self, sha256: str, generation: int = 0) -> bool:
        """Whether the blob is there. It says nothing about its contents."""
        ...

    def delete(self, sha256: str, generation: int = 0) -> bool:
        """Remove the blob, and what abandoned writers left of it; True if it was there. After a power cut it may be back.

        Who has it open may be cut off: only what nobody refers to is deleted.
        """
        ...

    def sweep(self) -> None:
        """Drop what was suspended and nobody went on with in time. A server calls it now and then."""
        ...

    def touch(self, sha256: str) -> None:
        """It is in use: its age counts from now on, as from `commit`. Harmless if it is not there; Unavailable, at once."""
        ...

    def remove_untouched(self, since: float, in_use: Callable[[str], bool]) -> Iterator[BlobRef]:
        """Remove, one by one as it is iterated, what nobody has put or touched since then (wall clock), and `in_use` says no to.

        Of the first generation: others have rows. Several processes may do it at once; each blob is looked at again just before.
        """
        ...

    def put_bytes(self, data: bytes, generation: int = 0) -> BlobRef:
        """`begin`, `write`, `commit` for bytes that are small enough to stand in memory."""
        ...

    def read_bytes(self, sha256: str, max_bytes: int, generation: int = 0) -> bytes:
        """The whole blob, verified; TooLarge, before anything is read, if it has more than `max_bytes`."""
        ...

    def check_space(self, size_bytes: int = 0) -> None:
        """DiskFull if a blob of that size would be refused now; a server asks before it takes work."""
        ...

    def local_path(self, sha256: str, generation: int = 0) -> Path | None:
        """A file with the blob's bytes to be read, never changed, where the store has one; None where it has not.

        NotFound. The bytes are not verified.
        """
        ...

    def check(self) -> None:
        """Whether this place can be used at all: ConfigError or Unavailable, with the way out. For the start of a server."""
        ...

    def close(self) -> None:
        """Let those that wait for a place that does not answer end soon, with Unavailable. Harmless when repeated."""
        ...
