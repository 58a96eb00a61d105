"""Large things between a worker and its server: inputs that are fetched, results that are brought before they are reported."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from tasuki.core.job import BlobRef, Outcome
from tasuki.errors import TasukiError, Unavailable
from tasuki.net.blobs import BlobLine
from tasuki.worker.attempt import StopReason, first_of, stopped_outcome

UPLOAD_RETRY_S = 2.0  # while the server has no room for a result

logger = logging.getLogger("tasuki.worker")


class Transfers:
    """On whatever connection the worker has at the moment; without one they wait."""

    def __init__(self, blobs: BlobLine) -> None:
        self._blobs = blobs

    async def fetch(self, job_id: str, sha256: str, size_bytes: int, target: Path) -> None:
        """An input of a job that we hold."""
        file = await asyncio.to_thread(target.open, "wb")
        with file:
            await self._blobs.get(BlobRef(sha256, size_bytes), job_id, file.write)

    async def bring(self, path: Path, ref: BlobRef, stop: asyncio.Future[StopReason]) -> None:
        """A command's result. It waits for a server, and for room there; Unavailable if it is told to stop before."""
        file = await asyncio.to_thread(path.open, "rb")
        with file:
            await self._put(file, ref, stop)

    async def as_blob(
        self, outcome: Outcome, stop: asyncio.Future[StopReason] | None, stopped: Callable[[], StopReason | None]
    ) -> Outcome:
        """A handler's large result becomes a blob, durable before the outcome is sent. It waits as a command's does.

        An attempt that is stopped meanwhile (by `stop`, or by a cancel with `stopped()` saying why) has ended all the same: a job
        whose end nobody tells would be renewed for ever.
        """
        assert outcome.result is not None
        assert outcome.result_sha256 is not None
        ref = BlobRef(outcome.result_sha256, len(outcome.result))
        try:
            with io.BytesIO(outcome.result) as file:
                await self._put(file, ref, stop or asyncio.get_running_loop().create_future())
            return msgspec.structs.replace(outcome, result=None, result_ref=ref)
        except asyncio.CancelledError:
            if (reason := stopped()) is None:
                raise
        except TasukiError as error:
            if (reason := stopped()) is None:
                return Outcome(error_code=error.code, message=f"the result could not be kept: {error.message}")
        return stopped_outcome(reason)

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
