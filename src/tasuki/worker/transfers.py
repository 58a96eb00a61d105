"""Transfers between a worker and its server: inputs are downloaded, large results are uploaded before they are reported.

A large input is downloaded to `incoming/<sha256>.part` in the data folder until it is whole and verified. Bytes that arrived
before a connection was lost, an attempt was given up or the worker was killed are not fetched again: the next attempt that
needs the same blob resumes behind them. The file is locked (flock) while a download writes to it, in this process or another
one on the same data folder; an attempt that finds it locked fetches straight to its own target.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import logging
import time
from functools import partial
from pathlib import Path

from tasuki.blobs.files import PartFile, disk_full_as_error
from tasuki.core.job import BlobRef, check_sha256
from tasuki.errors import Corrupt, Unavailable
from tasuki.event_loop import on_thread
from tasuki.net.blob_transfer import BlobClient
from tasuki.worker.attempt import StopReason, first_of, unless_stopped

INCOMING_FOLDER = "incoming"
INCOMING_MAX_BYTES = 64 * 1024**3  # of inputs that were partly fetched, all together
INCOMING_MAX_AGE_S = 7 * 86_400.0
RESUMED_INPUT_MIN_BYTES = 1024 * 1024  # a smaller input is fetched again from its start
UPLOAD_RETRY_S = 2.0  # while the server has no room for a result

logger = logging.getLogger("tasuki.worker")


class WorkerTransfers:
    """Transfers on the worker's current connection; without one they wait. `data` keeps unfinished downloads."""

    def __init__(self, blobs: BlobClient, data: Path | None = None) -> None:
        self._blobs = blobs
        self._incoming = None if data is None else data / INCOMING_FOLDER

    async def fetch(self, job_id: str, sha256: str, size_bytes: int, target: Path) -> None:
        """Write an input of a leased job to `target`, which is on the same file system as the data folder."""
        ref = BlobRef(sha256, size_bytes)
        if self._incoming is None or size_bytes < RESUMED_INPUT_MIN_BYTES:
            await self._fetch_whole(ref, job_id, target)
            return
        path = self._incoming / f"{check_sha256(sha256)}.part"
        with disk_full_as_error(target):
            await asyncio.to_thread(self._incoming.mkdir, mode=0o700, parents=True, exist_ok=True)
            # The file becomes the job's input: it has the mode of that, less what the umask forbids.
            part = await on_thread(partial(PartFile.claim, path, mode=0o666), release=close_part)
            if part is None:
                await self._fetch_whole(ref, job_id, target)
                return
            with part:
                await self.resume(part, ref, job_id)
                await on_thread(part.publish, target)

    async def _fetch_whole(self, ref: BlobRef, job_id: str, target: Path) -> None:
        with await asyncio.to_thread(target.open, "wb") as file:
            await self._blobs.get(ref, job_id, file.write)

    async def resume(self, part: PartFile, ref: BlobRef, job_id: str) -> None:
        """Download the rest of a blob, and verify all of it."""
        digest = hashlib.sha256()
        offset = await on_thread(part.read_into, digest.update, ref.size_bytes)
        if offset:
            logger.info("job %s: resumes an input of %d bytes at %d", job_id, ref.size_bytes, offset)
        try:
            try:
                await self._blobs.get(ref, job_id, part.write, offset=offset, digest=digest)
            except Corrupt:
                if not offset:
                    raise
                logger.warning(
                    "job %s: the stored part of input %s was damaged; it is fetched from its start", job_id, ref.sha256
                )
                await on_thread(part.truncate)
                await self._blobs.get(ref, job_id, part.write)
        except (Corrupt, OSError):  # half a file is no help on a full disk
            part.discard()
            raise

    async def upload(self, result: Path | bytes, ref: BlobRef, stop: asyncio.Future[StopReason]) -> None:
        """Upload a result. Waits for a server, and for room there; Unavailable if `stop` comes first."""
        with io.BytesIO(result) if isinstance(result, bytes) else await asyncio.to_thread(result.open, "rb") as file:
            while True:
                try:
                    if await unless_stopped(self._blobs.put(file, ref), stop):
                        return
                    raise Unavailable("the attempt was stopped before its result had arrived")
                except Unavailable as error:
                    if stop.done():
                        raise
                    logger.warning("a result of %d bytes waits: %s", ref.size_bytes, error.message)
                    await first_of(stop, timeout_s=UPLOAD_RETRY_S)


def close_part(part: PartFile | None) -> None:
    """Leave a file that was claimed, or not, for the next transfer."""
    if part is not None:
        part.close()


def sweep_incoming(data: Path, *, max_bytes: int = INCOMING_MAX_BYTES, max_age_s: float = INCOMING_MAX_AGE_S) -> None:
    """Remove unfinished downloads that are too old, and the oldest of those that are too large together."""
    found = []
    for part in (data / INCOMING_FOLDER).glob("*.part"):
        with contextlib.suppress(FileNotFoundError):
            status = part.stat()
            found.append((status.st_mtime, status.st_size, part))
    total_bytes = 0
    oldest_at = time.time() - max_age_s
    for at, size_bytes, part in sorted(found, reverse=True):
        total_bytes += size_bytes
        if at < oldest_at or total_bytes > max_bytes:
            unused = PartFile.claim(part, create=False)
            if unused is not None:
                unused.discard()
