"""Blobs that travel through a server, in chunks that never stand in memory whole.

All that may block (a disk, an S3 server that is away for minutes) happens on threads of its own: some for what comes in, as
many for what goes out, one for what is deleted. So uploads that wait for a dead S3 server keep nobody from reading.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from tasuki.blobs.blob import BlobReader, BlobStore, check_sha256
from tasuki.core.broker.events import SendBlob
from tasuki.core.job import Job
from tasuki.core.protocol import BlobPut, Chunk, Reply
from tasuki.core.store_messages import BlobPlace
from tasuki.errors import NotFound, TasukiError, Unavailable
from tasuki.server.serial_calls import SerialCalls, told
from tasuki.server.uploads import Arrived, TransferConnection, Uploads

logger = logging.getLogger("tasuki.blobs")

READ_CHUNKS = 4  # in one call on the thread


class BlobTransfers:
    """All uploads and downloads of one server. `arrived` is told, in the loop, when bytes are durable at their place."""

    def __init__(self, blobs: BlobStore, arrived: Arrived) -> None:
        self._blobs = blobs
        self._in = ThreadPoolExecutor(blobs.threads, thread_name_prefix="tasuki-blobs-in")
        self._out = ThreadPoolExecutor(blobs.threads, thread_name_prefix="tasuki-blobs-out")
        self._away = ThreadPoolExecutor(1, thread_name_prefix="tasuki-blobs-away")
        self._uploads = Uploads(blobs, self._in, arrived)

    def close(self) -> None:
        """Half-sent blobs are put aside or dropped, and nobody waits any longer for a store that does not answer."""
        self._uploads.close()
        self._blobs.close()
        for threads in (self._in, self._out, self._away):
            threads.shutdown(wait=False)  # what waits there is to clean up, and does not take long any more

    # ------------------------------------------------------------------------------------------------ in

    def begin(self, conn: int, link: TransferConnection, put: BlobPut, place: BlobPlace, uploader: str = "") -> None:
        """A peer wants to send a blob, and the store said where it belongs. The peer is told whether it is needed."""
        if put.direct:
            link.send(Reply(put.msg_id, {"stored": place.stored, "generation": place.generation}))
            return
        self._uploads.begin(conn, link, put, place, uploader)

    def under_way(self) -> list[BlobPut]:
        """The uploads that have not come to their end."""
        return self._uploads.under_way()

    def piece(self, conn: int, link: TransferConnection, chunk: Chunk) -> None:
        """The next chunk of an upload."""
        self._uploads.piece(conn, link, chunk)

    def forget(self, conn: int) -> None:
        """The connection is gone."""
        self._uploads.forget(conn)

    # ------------------------------------------------------------------------------------------------ out

    async def send(self, link: TransferConnection, job: Job | None, command: SendBlob, place: BlobPlace | None) -> None:
        """Send a blob of a job, which is at this place, to somebody who may read it."""
        get = command.get
        check_sha256(get.sha256)
        if job is None or not may_read_blob(command, job):
            raise NotFound(f"job {get.job_id[:128]!r} has no blob {get.sha256} that you may read")
        if place is None:
            raise NotFound(f"blob {get.sha256} of job {get.job_id[:128]!r} is not stored any more")
        call = SerialCalls(self._out)
        try:
            reader: BlobReader = await call.opened(_close, self._blobs.open, get.sha256, get.offset, place.generation)
        except OSError as error:
            raise told(error, f"blob {get.sha256} could not be read") from error
        try:
            await self._read(link, command, reader, call)
        finally:
            call.at_last(_close, reader)

    async def _read(self, link: TransferConnection, command: SendBlob, reader: BlobReader, call: SerialCalls) -> None:
        get, offset = command.get, command.get.offset
        pieces: Iterator[bytes] = iter(reader)
        reading = call.start(_some, pieces)
        while some := await asyncio.wrap_future(reading):
            reading = call.start(_some, pieces)  # while the peer gets these
            try:
                for piece in some:
                    link.send(Chunk(get.msg_id, offset, piece))
                    offset += len(piece)
                    await link.drain()
            except Unavailable:
                return  # the peer left; there is nobody to tell
        link.send(Chunk(get.msg_id, offset, b"", last=True))

    # ------------------------------------------------------------------------------------------------ away

    def sweep(self) -> None:
        """Drop what was put aside, and nobody went on with in time."""
        self._away.submit(self._sweep)

    def _sweep(self) -> None:
        try:
            self._blobs.sweep()
        except (TasukiError, OSError) as error:
            logger.warning("what is left of half-sent blobs could not be removed: %s", error)

    async def delete(self, places: Sequence[BlobPlace]) -> list[BlobPlace]:
        """Delete the bytes at these places; those of which nothing is left. The others stay condemned, and come again."""
        loop = asyncio.get_running_loop()
        deleted: list[BlobPlace] = await loop.run_in_executor(self._away, self._delete, places)
        return deleted

    def _delete(self, places: Sequence[BlobPlace]) -> list[BlobPlace]:
        deleted = []
        for place in places:
            try:
                self._blobs.delete(place.sha256, place.generation)
                deleted.append(place)
            except Unavailable as error:  # each of the rest would wait as long
                logger.warning("blobs are deleted later: %s", error)
                break
            except (TasukiError, OSError) as error:
                logger.warning("blob %s (generation %d) cannot be deleted: %s", place.sha256, place.generation, error)
        return deleted


def _some(pieces: Iterator[bytes]) -> list[bytes]:
    """The next ones; none at the end."""
    return list(islice(pieces, READ_CHUNKS))


def _close(reader: BlobReader) -> None:
    reader.close()


def may_read_blob(command: SendBlob, job: Job) -> bool:
    """Inputs and result for those who may see the job; inputs only for the worker that holds it now."""
    sha256 = command.get.sha256
    inputs = {file.sha256 for file in job.spec.files if file.sha256 is not None}
    if command.worker_id:
        holder = (job.lease.worker_id, job.lease.incarnation) if job.lease is not None else None
        return holder == (command.worker_id, command.incarnation) and sha256 in inputs
    if not command.identity.may_see(job.submitter, job.spec.subject):
        return False
    result = job.outcome.result_ref if job.outcome is not None else None
    return sha256 in inputs or (result is not None and result.sha256 == sha256)
