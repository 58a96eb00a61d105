"""Blobs that travel through a server, in chunks that never stand in memory whole.

All that may block (a disk, an S3 server that is away for minutes) happens on threads of its own: some for what comes in, as
many for what goes out, one for what is deleted. So uploads that wait for a dead S3 server keep nobody from reading.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from msgspec.structs import replace

from tasuki.blobs.blob import BlobReader, BlobRef, BlobStore, BlobWriter, check_sha256
from tasuki.core.broker import error_message
from tasuki.core.broker_events import SendBlob
from tasuki.core.job import Job
from tasuki.core.protocol import BlobPut, Chunk, Message, Reply
from tasuki.core.verbs import BlobPlace
from tasuki.errors import InvalidInput, NotFound, Overloaded, ProtocolError, TasukiError, Unavailable

logger = logging.getLogger("tasuki.blobs")

UPLOADS_PER_CONNECTION_MAX = 16
QUEUED_MAX_BYTES = 8 * 1024 * 1024  # of one upload; past this the peer is not read from
CHUNK_COST_BYTES = 1024  # what a chunk takes beside its bytes: one of a single byte is not free

Arrived = Callable[[int, BlobPut, BlobPlace], None]


class Connection(Protocol):
    """What a transfer needs of a connection."""

    def send(self, message: Message) -> None: ...
    def close(self, error: TasukiError | None = None) -> None: ...
    def pause_reading(self, why: object = None) -> None: ...
    def resume_reading(self, why: object = None) -> None: ...
    async def drain(self) -> None: ...


class _Calls:
    """The blocking calls of one transfer: never two at once, and the last one after all others, though nobody waits for those."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._running: Future[Any] | None = None

    async def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        self._running = self._threads.submit(function, *args)
        return await asyncio.wrap_future(self._running)

    async def opened(self, give_back: Callable[[Any], None], function: Callable[..., Any], *args: Any) -> Any:
        """Call for something that must be given back, also if it comes when nobody waits for it any more."""
        running = self._running = self._threads.submit(function, *args)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            running.add_done_callback(lambda done: None if _came_to_nothing(done) else self._run(give_back, done.result()))
            raise

    def at_last(self, function: Callable[..., None], *args: Any) -> None:
        """Once the call that is under way has ended: a file must not be closed under the thread that writes to it."""
        if self._running is None:
            self._run(function, *args)
        else:
            self._running.add_done_callback(lambda _: self._run(function, *args))

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self._threads.submit(_logged, function, *args)
        except RuntimeError:  # the threads are being closed, and with them the store: this will not take long
            _logged(function, *args)


def _came_to_nothing(done: Future[Any]) -> bool:
    return done.cancelled() or done.exception() is not None


def _logged(function: Callable[..., None], *args: Any) -> None:
    try:
        function(*args)
    except OSError as error:
        logger.warning("what was left of a transfer could not be removed: %s", error)


class _Upload:
    """One blob on its way in: a queue of chunks and the task that writes them."""

    def __init__(self, put: BlobPut, place: BlobPlace) -> None:
        self.put = put
        self.place = place
        self.received = 0
        self.queued = 0
        self.chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None


class Transfers:
    """All uploads and downloads of one server. `arrived` is told, in the loop, when bytes are durable at their place."""

    def __init__(self, blobs: BlobStore, arrived: Arrived) -> None:
        self._blobs = blobs
        self._arrived = arrived
        self._in = ThreadPoolExecutor(blobs.threads, thread_name_prefix="tasuki-blobs-in")
        self._out = ThreadPoolExecutor(blobs.threads, thread_name_prefix="tasuki-blobs-out")
        self._away = ThreadPoolExecutor(1, thread_name_prefix="tasuki-blobs-away")
        self._uploads: dict[tuple[int, int], _Upload] = {}

    def close(self) -> None:
        """Half-sent blobs are dropped, and nobody waits any longer for a store that does not answer."""
        for upload in self._uploads.values():
            if upload.task is not None:
                upload.task.cancel()
        self._blobs.close()
        for threads in (self._in, self._out, self._away):
            threads.shutdown(wait=False)  # what waits there is to clean up, and does not take long any more

    # ------------------------------------------------------------------------------------------------ in

    def begin(self, conn: int, link: Connection, put: BlobPut, place: BlobPlace) -> None:
        """A peer wants to send a blob, and the store said where it belongs. The peer is told whether it is needed."""
        mine = sum(1 for owner, _ in self._uploads if owner == conn)
        try:
            check_sha256(put.sha256)
            if put.size_bytes < 0:
                raise InvalidInput(f"a blob cannot have {put.size_bytes} bytes")
            if mine >= UPLOADS_PER_CONNECTION_MAX or (conn, put.msg_id) in self._uploads:
                raise Overloaded(f"at most {UPLOADS_PER_CONNECTION_MAX} uploads at once on one connection; wait for one to end")
        except TasukiError as error:
            link.send(error_message(put.msg_id, error))
            return
        upload = self._uploads[conn, put.msg_id] = _Upload(put, place)
        upload.task = asyncio.ensure_future(self._take(conn, link, upload))

    def under_way(self) -> list[BlobPut]:
        """The uploads that have not come to their end."""
        return [upload.put for upload in self._uploads.values()]

    def piece(self, conn: int, link: Connection, chunk: Chunk) -> None:
        """The next chunk of an upload."""
        upload = self._uploads.get((conn, chunk.corr_id))
        if upload is None:  # it failed, and the peer had sent more before it heard of it
            return
        if chunk.offset != upload.received:
            link.close(ProtocolError(f"a chunk starts at {chunk.offset}, expected {upload.received}"))
            return
        upload.received += len(chunk.data)
        upload.queued += len(chunk.data) + CHUNK_COST_BYTES
        upload.chunks.put_nowait(chunk)
        if upload.queued > QUEUED_MAX_BYTES:
            link.pause_reading(upload)

    async def _take(self, conn: int, link: Connection, upload: _Upload) -> None:
        put, place = upload.put, upload.place
        try:
            ref = await self._keep(link, upload)
        except (TasukiError, OSError) as error:
            link.send(error_message(put.msg_id, _told(error, f"blob {put.sha256} could not be kept")))
            return
        finally:
            self._uploads.pop((conn, put.msg_id), None)
            link.resume_reading(upload)
        if ref is None:
            link.send(Reply(put.msg_id, {"have": True}))
        else:
            self._arrived(conn, put, replace(place, size_bytes=ref.size_bytes))

    async def _keep(self, link: Connection, upload: _Upload) -> BlobRef | None:
        """Write what the peer sends to its place; None if it was there."""
        put, generation = upload.put, upload.place.generation
        call = _Calls(self._in)
        # A row can say more than is true: somebody may have deleted the bytes. Then they are taken again.
        if upload.place.stored and await call(self._blobs.has, put.sha256, generation):
            return None
        writer: BlobWriter = await call.opened(_abort, self._blobs.begin, put.sha256, put.size_bytes, generation)
        try:
            link.send(Reply(put.msg_id, {"go": True}))
            await self._write(link, upload, writer, call)
            ref: BlobRef = await call(writer.commit)
            return ref
        finally:
            call.at_last(_abort, writer)  # harmless after the commit

    async def _write(self, link: Connection, upload: _Upload, writer: BlobWriter, call: _Calls) -> None:
        while True:
            chunk = await upload.chunks.get()
            await call(writer.write, chunk.data)
            upload.queued -= len(chunk.data) + CHUNK_COST_BYTES
            if upload.queued <= QUEUED_MAX_BYTES // 2:
                link.resume_reading(upload)
            if chunk.last:
                return

    def forget(self, conn: int) -> None:
        """The connection is gone: half-sent blobs are dropped."""
        for key in [key for key in self._uploads if key[0] == conn]:
            upload = self._uploads.pop(key)
            if upload.task is not None:
                upload.task.cancel()

    # ------------------------------------------------------------------------------------------------ out

    async def send(self, link: Connection, job: Job | None, command: SendBlob, place: BlobPlace | None) -> None:
        """Send a blob of a job, which is at this place, to somebody who may read it."""
        get = command.get
        check_sha256(get.sha256)
        if job is None or not may_read_blob(command, job):
            raise NotFound(f"job {get.job_id[:128]!r} has no blob {get.sha256} that you may read")
        if place is None:
            raise NotFound(f"blob {get.sha256} of job {get.job_id[:128]!r} is not stored any more")
        call = _Calls(self._out)
        try:
            reader: BlobReader = await call.opened(_close, self._blobs.open, get.sha256, get.offset, place.generation)
        except OSError as error:
            raise _told(error, f"blob {get.sha256} could not be read") from error
        try:
            await self._read(link, command, reader, call)
        finally:
            call.at_last(_close, reader)

    async def _read(self, link: Connection, command: SendBlob, reader: BlobReader, call: _Calls) -> None:
        get = command.get
        pieces: Iterator[bytes] = iter(reader)
        offset = get.offset
        while piece := await call(next, pieces, b""):
            try:
                link.send(Chunk(get.msg_id, offset, piece))
                offset += len(piece)
                await link.drain()
            except Unavailable:
                return  # the peer left; there is nobody to tell
        link.send(Chunk(get.msg_id, offset, b"", last=True))

    # ------------------------------------------------------------------------------------------------ away

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


def _abort(writer: BlobWriter) -> None:
    writer.abort()


def _close(reader: BlobReader) -> None:
    reader.close()


def _told(error: TasukiError | OSError, what: str) -> TasukiError:
    """What the peer hears: our own words as they are, the system's inside some of ours."""
    return error if isinstance(error, TasukiError) else Unavailable(f"{what}: {error.strerror or error}")


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
