"""Large inputs on their way in: `incoming/<sha256>.part` in the data folder, until they are whole and verified.

What was fetched before a connection was lost, an attempt was given up or the worker was killed is not fetched again: the next
attempt that needs the same blob goes on behind it. The file is locked (flock) while somebody fetches into it, in this process or
another one on the same data folder; whoever finds it locked fetches for himself, straight to where he needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tasuki.blobs.blob import check_sha256
from tasuki.blobs.files import disk_full_as_error
from tasuki.core.job import BlobRef
from tasuki.errors import Corrupt
from tasuki.net.blob_transfer import BlobLine
from tasuki.worker.settings import INCOMING_MAX_AGE_S, INCOMING_MAX_BYTES

FOLDER = "incoming"
_READ_BYTES = 1024 * 1024

logger = logging.getLogger("tasuki.worker")


class InputDownloads:
    """The folder. It is not there before it is needed."""

    def __init__(self, data: Path, *, max_bytes: int = INCOMING_MAX_BYTES, max_age_s: float = INCOMING_MAX_AGE_S) -> None:
        self.folder = data / FOLDER
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s

    async def fetch(self, blobs: BlobLine, ref: BlobRef, job_id: str, target: Path) -> None:
        """The whole blob at `target`, verified. Both must be on one file system."""
        part = self.folder / f"{check_sha256(ref.sha256)}.part"
        with disk_full_as_error(target):
            file = await asyncio.to_thread(self._open, part)
            if file is None:
                with await asyncio.to_thread(target.open, "wb") as own:
                    await blobs.get(ref, job_id, own.write)
                return
            with file:
                await self._fill(file, blobs, ref, job_id, part)
                await asyncio.to_thread(_hand_over, file, part, target)

    async def _fill(self, file: BinaryIO, blobs: BlobLine, ref: BlobRef, job_id: str, part: Path) -> None:
        offset, digest = await asyncio.to_thread(_what_is_there, file, ref.size_bytes)
        if offset:
            logger.info("job %s: goes on with an input of %d bytes at %d", job_id, ref.size_bytes, offset)
        try:
            try:
                await blobs.get(ref, job_id, file.write, offset=offset, digest=digest)
            except Corrupt:
                if not offset:
                    raise
                logger.warning("job %s: what was there of input %s was damaged; it is fetched from its start", job_id, ref.sha256)
                await asyncio.to_thread(_empty, file)
                await blobs.get(ref, job_id, file.write)
        except (Corrupt, OSError):  # half a file is no help on a full disk
            part.unlink(missing_ok=True)
            raise

    def _open(self, part: Path) -> BinaryIO | None:
        """Open and locked; None if somebody else has it."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            file = part.open("a+b")
            with _closed_on_error(file):
                if not _lock(file):
                    file.close()
                    return None
                with contextlib.suppress(FileNotFoundError):
                    if part.stat().st_ino == os.fstat(file.fileno()).st_ino:
                        return file
            file.close()  # somebody was done with it between our opening and our locking it

    def sweep(self) -> None:
        """At start: what nobody came back for goes, and the oldest of what is too much together."""
        found = []
        for part in self.folder.glob("*.part"):
            with contextlib.suppress(FileNotFoundError):
                status = part.stat()
                found.append((status.st_mtime, status.st_size, part))
        total_bytes = 0
        oldest_at = time.time() - self._max_age_s
        for at, size_bytes, part in sorted(found, reverse=True):
            total_bytes += size_bytes
            if at < oldest_at or total_bytes > self._max_bytes:
                _remove_unless_used(part)


@contextlib.contextmanager
def _closed_on_error(file: BinaryIO) -> Iterator[None]:
    try:
        yield
    except BaseException:
        file.close()
        raise


def _lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _what_is_there(file: BinaryIO, size_bytes: int) -> tuple[int, Any]:
    """How many bytes, and the sha256 over them so far. More than there can be is nothing."""
    digest = hashlib.sha256()
    if os.fstat(file.fileno()).st_size > size_bytes:
        _empty(file)
    file.seek(0)
    offset = 0
    while piece := file.read(_READ_BYTES):
        digest.update(piece)
        offset += len(piece)
    return offset, digest


def _empty(file: BinaryIO) -> None:
    file.seek(0)
    file.truncate()


def _hand_over(file: BinaryIO, part: Path, target: Path) -> None:
    file.flush()
    part.replace(target)


def _remove_unless_used(part: Path) -> None:
    with contextlib.suppress(FileNotFoundError), part.open("rb") as file:
        if _lock(file):
            part.unlink()
