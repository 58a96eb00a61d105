"""Large things between a worker and its server: inputs that are fetched, results that are brought before they are reported."""

from __future__ import annotations

import asyncio
import io
import logging
from pathlib import Path
from typing import BinaryIO

from tasuki.core.job import BlobRef
from tasuki.errors import Unavailable
from tasuki.net.blob_transfer import BlobLine
from tasuki.worker.attempt import StopReason, first_of
from tasuki.worker.input_downloads import InputDownloads
from tasuki.worker.settings import RESUMED_INPUT_MIN_BYTES

UPLOAD_RETRY_S = 2.0  # while the server has no room for a result

logger = logging.getLogger("tasuki.worker")


class WorkerTransfers:
    """On whatever connection the worker has at the moment; without one they wait. `incoming` keeps what was partly fetched."""

    def __init__(self, blobs: BlobLine, incoming: InputDownloads | None = None) -> None:
        self._blobs = blobs
        self._incoming = incoming

    async def fetch(self, job_id: str, sha256: str, size_bytes: int, target: Path) -> None:
        """An input of a job that we hold."""
        ref = BlobRef(sha256, size_bytes)
        if self._incoming is not None and size_bytes >= RESUMED_INPUT_MIN_BYTES:
            await self._incoming.fetch(self._blobs, ref, job_id, target)
            return
        file = await asyncio.to_thread(target.open, "wb")
        with file:
            await self._blobs.get(ref, job_id, file.write)

    async def bring(self, result: Path | bytes, ref: BlobRef, stop: asyncio.Future[StopReason]) -> None:
        """A result. It waits for a server, and for room there; Unavailable if it is told to stop before."""
        file = io.BytesIO(result) if isinstance(result, bytes) else await asyncio.to_thread(result.open, "rb")
        with file:
            await self._put(file, ref, stop)

    async def _put(self, file: BinaryIO, ref: BlobRef, stop: asyncio.Future[StopReason]) -> None:
        while True:
            try:
                return await self._put_until(stop, file, ref)
            except Unavailable as error:
                if stop.done():
                    raise
                logger.warning("a result of %d bytes waits: %s", ref.size_bytes, error.message)
                await first_of(stop, timeout_s=UPLOAD_RETRY_S)

    async def _put_until(self, stop: asyncio.Future[StopReason], file: BinaryIO, ref: BlobRef) -> None:
        putting = asyncio.ensure_future(self._blobs.put(file, ref))
        try:
            await first_of(putting, stop)
            if not putting.done():
                raise Unavailable("the worker was told to stop before its result had arrived")
            putting.result()
        finally:
            putting.cancel()
            await asyncio.gather(putting, return_exceptions=True)  # it reads the file, which is closed next
