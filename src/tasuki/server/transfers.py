"""Blobs between peers and the server's blob store: in chunks that are never in memory whole, or by presigned URLs.

Theory of operation. All calls that may block (a disk, an S3 server that is away for minutes) run on threads of their own: some
for uploads, as many for downloads, one for deletions. So uploads that wait for a dead S3 server keep nobody from reading.

Each upload is a task that takes chunks from a queue, which is bounded: past QUEUED_MAX_BYTES the peer is not read from. An upload
that can be resumed (`BlobPut.resume`) is not dropped with its connection: the chunks that have come are written, and the blob
store keeps them for the uploader's next try. So of one uploader and one blob there is never more than one upload at a time: the
next one waits until the one before it has ended, and continues behind it. An upload that has fallen silent is ended for the next
one, because its connection may be dead without anybody having noticed.

A file of a cache is read once for all workers that get it at about the same place. A worker that is too far behind, because it
came later or has stood still, reads by itself from there on. One read verifies the file for all of them, and names a damaged
store; workers verify what they get in any case, so further reads at the same time do without, and so does the first read after
an upload, which was verified as it came.

With presigned URLs the bytes travel between the peer and the bucket. The server signs the URLs, and moves a verified upload to
its place. Verification takes as long as reading the blob; so it continues by itself, and the peer asks again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from operator import methodcaller
from typing import Any, TypeVar

from msgspec.structs import replace

from tasuki.blobs.blob import RESUMED_MIN_BYTES, BlobStore, BlobWriter
from tasuki.blobs.s3.presign import S3Presign, UploadPlan
from tasuki.core.access import PeerKind
from tasuki.core.broker.events import ReceiveBlob, SendBlob
from tasuki.core.job import BlobRef, Job, check_sha256
from tasuki.core.presigned import BlobLink
from tasuki.core.protocol import BlobPut, Chunk, Reply, error_message, parse_cache_source
from tasuki.core.store_messages import BlobPlace
from tasuki.errors import (
    BlobUnavailable,
    Corrupt,
    InvalidInput,
    NotFound,
    Overloaded,
    ProtocolError,
    TasukiError,
    Unavailable,
    UploadCutOff,
)
from tasuki.event_loop import BackgroundTasks, ignore_result
from tasuki.server.queries import Connection
from tasuki.server.refusal_log import RefusalLog
from tasuki.server.upload_shares import UploadShares
from tasuki.stores.store import Reader

logger = logging.getLogger("tasuki.blobs")

UPLOADS_PER_CONNECTION_MAX = 16
QUEUED_MAX_BYTES = 8 * 1024 * 1024  # of one upload; past this the peer is not read from
CHUNK_COST_BYTES = 1024  # what a chunk takes beside its bytes: one of a single byte is not free
WRITE_MAX_BYTES = 2 * 1024 * 1024  # in one call on the thread, which costs as much as hashing some 100 KiB
JUST_WRITTEN_MAX = 1024  # blobs that are remembered
READ_CHUNKS = 4  # a batch: read in one call on the thread
FAN_OUT_BATCHES = 4  # kept of a file that several workers get, for those behind the first: 4 MiB
SILENT_S = 5.0  # without a byte; then the uploader's next upload takes its place
TURN_S = 15.0  # how long an upload waits for one before it that is not silent; less than a door waits for an answer
PRESIGN_THREADS = 4
VERIFY_THREADS = 4  # each reads a blob and hashes it

T = TypeVar("T")
Arrived = Callable[[int, BlobPut, BlobPlace], None]
_PresignedUpload = tuple[str, int, str]
"""sha256, generation and owner of an upload that is being verified."""


# ---------------------------------------------------------------------------------------------------- threads


class SerialCalls:
    """The blocking calls of one transfer: one after the other, with nothing left open when the transfer is canceled."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._running: Future[Any] | None = None

    def start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Begin a call; `asyncio.wrap_future` waits for it, before the next call is made."""
        self._running = self._threads.submit(function, *args)
        return self._running

    async def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.wrap_future(self.start(function, *args))

    async def acquire(self, release: Callable[[Any], None], function: Callable[..., Any], *args: Any) -> Any:
        """Call a function whose result must be released, also if this call is canceled before the result comes."""
        running = self.start(function, *args)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            running.add_done_callback(lambda done: None if _has_no_result(done) else self._run(release, done.result()))
            raise

    def finally_(self, function: Callable[..., None], *args: Any) -> None:
        """Run a function once the current call has ended: a file must not be closed while a thread writes to it."""
        if self._running is None:
            self._run(function, *args)
        else:
            self._running.add_done_callback(lambda _: self._run(function, *args))

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self._threads.submit(_logged, function, *args)
        except RuntimeError:  # the threads are closed, and with them the store: this does not take long
            _logged(function, *args)


def _has_no_result(done: Future[Any]) -> bool:
    return done.cancelled() or done.exception() is not None


def _logged(function: Callable[..., None], *args: Any) -> None:
    try:
        function(*args)
    except OSError as error:
        logger.warning("the remains of a transfer could not be removed: %s", error)


def _for_peer(error: TasukiError | OSError, problem: str) -> TasukiError:
    """Return the error that the peer gets: an error of the system becomes Unavailable."""
    return error if isinstance(error, TasukiError) else Unavailable(f"{problem}: {error.strerror or error}")


# ---------------------------------------------------------------------------------------------------- uploads


class _IncomingBlob:
    """One upload: a queue of chunks and the task that writes them."""

    def __init__(self, link: Connection, command: ReceiveBlob, place: BlobPlace) -> None:
        put, uploader = command.put, command.uploader
        self.conn, self.link = command.conn, link
        self.put, self.place = put, place
        self.uploader = uploader
        self.has_share = bool(uploader) and command.kind is not PeerKind.NODE  # who is the server's own user fills its own disk
        resumes = put.resume and put.size_bytes >= RESUMED_MIN_BYTES
        self.key = (uploader, put.sha256) if resumes and uploader else None
        """Key of an upload that can be resumed. None: the upload is dropped when it is cut off."""
        self.received = -1 if put.resume else 0
        """Offset of the next chunk; -1 until the peer has been told it."""
        self.came_bytes = 0
        self.queued = 0
        self.chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self.heard_at = asyncio.get_running_loop().time()
        self.over = False
        self.kept: BlobPlace | None = None
        """Place at which the blob is durable, brought by this upload or by the one before it."""
        self.task: asyncio.Task[None] | None = None

    def end(self) -> None:
        """Accept no more chunks; those that have come are still written."""
        if not self.over:
            self.over = True
            self.chunks.put_nowait(None)

    @property
    def to_come_bytes(self) -> int:
        """Number of bytes that are not on the disk yet, or are there under no uploader's name."""
        return self.put.size_bytes - (max(0, self.received) if self.key is not None else 0)

    @property
    def silent_at(self) -> float:
        """Time at which the upload counts as silent. Not while chunks wait to be written."""
        now = asyncio.get_running_loop().time()
        return (now if self.queued else self.heard_at) + SILENT_S


# ---------------------------------------------------------------------------------------------------- downloads


class _BlobRead:
    """One read of a blob for all peers that get it at about the same place, in batches that are numbered from 0.

    The next batch is read while the first of the peers is sent its own, and up to `keep` are kept for those behind it.
    """

    def __init__(self, chunks: Generator[bytes, None, None], threads: ThreadPoolExecutor, keep: int = 1) -> None:
        self._chunks, self._call, self._keep = chunks, SerialCalls(threads), keep
        self._kept: deque[list[bytes]] = deque()
        self._begun, self._end = 0, 0
        """Numbers of batches: whose read was begun, and that were read."""
        self._places: dict[object, int] = {}
        """By peer: the number of the batch that it is sent."""
        self._start()

    def _start(self) -> None:
        self._begun += 1
        self._reading = asyncio.get_running_loop().create_task(self._read())
        self._reading.add_done_callback(ignore_result)

    async def _read(self) -> None:
        self._kept.append(await self._call(_some, self._chunks))
        self._end += 1
        if self._end > self._keep:  # nobody can begin here any more
            oldest = max(self._end - self._keep, min(self._places.values(), default=0))
            while self._end - len(self._kept) < oldest:
                self._kept.popleft()

    async def batch(self, peer: object, number: int) -> list[bytes] | None:
        """Return some chunks, none at the end of the blob; None if the peer is too far behind, and has to read by itself."""
        self._places[peer] = number
        while number >= self._end:
            await asyncio.shield(self._reading)
        if number < self._end - len(self._kept):
            return None
        batch = self._kept[number - self._end]
        if batch and number == self._begun - 1:  # the first peer that gets it
            self._start()
        return batch

    def leave(self, peer: object) -> bool:
        """Do without a peer; return whether it was the last one, with which the read ends."""
        if self._places.pop(peer, None) is None or self._places:
            return False
        self._reading.cancel()
        self._call.finally_(self._chunks.close)
        return True


def _some(chunks: Iterator[bytes]) -> list[bytes]:
    """Return the next chunks; none at the end."""
    return list(islice(chunks, READ_CHUNKS))


# ---------------------------------------------------------------------------------------------------- transfers


class BlobTransfers:
    """All uploads, downloads and deletions of one server. `arrived` is called, in the loop, when bytes are durable."""

    def __init__(self, blobs: BlobStore, arrived: Arrived, refusals: RefusalLog, shares: UploadShares) -> None:
        self._blobs = blobs
        self._arrived = arrived
        self._refusals = refusals
        self._shares = shares
        self._upload_threads = ThreadPoolExecutor(blobs.threads, thread_name_prefix="tasuki-blobs-in")
        self._download_threads = ThreadPoolExecutor(blobs.threads, thread_name_prefix="tasuki-blobs-out")
        self._delete_thread = ThreadPoolExecutor(1, thread_name_prefix="tasuki-blobs-away")
        self._uploads: dict[tuple[int, int], _IncomingBlob] = {}
        self._latest: dict[tuple[str, str], _IncomingBlob] = {}
        """By key: the upload that the next one has to wait for."""
        self._just_written: deque[tuple[str, int]] = deque(maxlen=JUST_WRITTEN_MAX)
        """By sha256 and generation: blobs that were hashed when they came, and that no worker has read since."""
        self._fan_outs: dict[tuple[str, int], _BlobRead] = {}
        """By sha256 and generation: the read of a cache's file that further workers may join."""
        self._tasks = BackgroundTasks()

    def close(self) -> None:
        """Suspend or drop all uploads, and end calls that wait for a store that does not answer."""
        self._tasks.cancel()
        self._blobs.close()
        for threads in (self._upload_threads, self._download_threads, self._delete_thread):
            threads.shutdown(wait=False)  # only cleaning up still waits there, which does not take long now

    # ------------------------------------------------------------------------------------------------ uploads

    def begin(self, link: Connection, command: ReceiveBlob) -> None:
        """Begin the upload of a blob to the place that the store chose, and tell the peer whether its bytes are needed.

        What others have stored is no business of a worker: it sends its blob all the same, and the double is dropped.
        """
        conn, put, place = command.conn, command.put, command.place
        brought = self._shares.has_brought(command.uploader, put.sha256)
        if command.kind is PeerKind.WORKER and not brought:
            place = replace(place, stored=False)
        if place.stored and place.size_bytes != put.size_bytes:
            self._refuse(link, put, Corrupt(f"blob {put.sha256} has {place.size_bytes} bytes, not {put.size_bytes}"))
            return
        if put.direct:
            link.send(Reply(put.msg_id, {"stored": place.stored, "generation": place.generation}))
            return
        mine = sum(1 for owner, _ in self._uploads if owner == conn)
        try:
            check_sha256(put.sha256)
            if put.size_bytes < 0:
                raise InvalidInput(f"a blob cannot have {put.size_bytes} bytes")
            if mine >= UPLOADS_PER_CONNECTION_MAX or (conn, put.msg_id) in self._uploads:
                raise Overloaded(f"at most {UPLOADS_PER_CONNECTION_MAX} uploads at once on one connection; wait for one to end")
        except TasukiError as error:
            self._refuse(link, put, error)
            return
        upload = self._uploads[conn, put.msg_id] = _IncomingBlob(link, command, place)
        before = None
        if upload.key is not None:
            before = self._latest.get(upload.key)
            self._latest[upload.key] = upload
        upload.task = self._tasks.spawn(self._take(upload, before))

    def under_way(self) -> list[BlobPut]:
        return [upload.put for upload in self._uploads.values()]

    def piece(self, conn: int, link: Connection, chunk: Chunk) -> None:
        upload = self._uploads.get((conn, chunk.corr_id))
        if upload is None or upload.over:  # it failed, and the peer sent more before it heard of that
            return
        if chunk.offset != upload.received:
            expected = "after the Reply with the offset" if upload.received < 0 else upload.received
            link.close(ProtocolError(f"a chunk starts at {chunk.offset}, expected {expected}"))
            return
        upload.received += len(chunk.data)
        upload.came_bytes += len(chunk.data)
        upload.queued += len(chunk.data) + CHUNK_COST_BYTES
        upload.heard_at = asyncio.get_running_loop().time()
        upload.chunks.put_nowait(chunk)
        if upload.queued > QUEUED_MAX_BYTES:
            link.pause_reading(upload)

    def forget(self, conn: int) -> None:
        """Suspend or drop the uploads of a connection that is gone."""
        for at in [at for at in self._uploads if at[0] == conn]:
            upload = self._uploads.pop(at)
            if upload.came_bytes:
                text = f"the upload of blob {upload.put.sha256} was cut at {upload.received} of {upload.put.size_bytes} bytes"
                self._refusals.write(upload.link.peer.address, "UPLOAD_CUT", text)
            if upload.key is not None:
                upload.end()
            elif upload.task is not None:
                upload.task.cancel()

    def _refuse(self, link: Connection, put: BlobPut, error: TasukiError) -> None:
        if link.peer.transport != "http":  # that door logs what it answers
            self._refusals.error(link.peer.address, error)
        link.send(error_message(put.msg_id, error))

    # ------------------------------------------------------------------------------------------------ one upload

    async def _take(self, upload: _IncomingBlob, before: _IncomingBlob | None) -> None:
        put, link = upload.put, upload.link
        try:
            if before is not None:
                await _turn(upload, before)
                upload.kept = before.kept
            ref = await self._keep(upload)
        except (TasukiError, OSError) as error:
            self._refuse(link, put, _for_peer(error, f"blob {put.sha256} could not be kept"))
            return
        finally:
            self._uploads.pop((upload.conn, put.msg_id), None)
            if upload.key is not None and self._latest.get(upload.key) is upload:
                del self._latest[upload.key]
            link.resume_reading(upload)
        upload.kept = upload.place
        if ref is None:
            link.send(Reply(put.msg_id, {"have": True}))
        else:
            self._just_written.append((ref.sha256, upload.place.generation))
            self._shares.add(upload.uploader, ref)
            self._arrived(upload.conn, put, replace(upload.place, size_bytes=ref.size_bytes))

    async def _keep(self, upload: _IncomingBlob) -> BlobRef | None:
        """Write the bytes that the peer sends to their place; None if they were there."""
        put, generation = upload.put, upload.place.generation
        call = SerialCalls(self._upload_threads)
        # The row may be wrong: somebody may have deleted the bytes. Then they are accepted again.
        if (upload.place.stored or upload.kept == upload.place) and await call(self._blobs.has, put.sha256, generation):
            return None if upload.place.stored else BlobRef(put.sha256, put.size_bytes)
        resume_key = upload.key[0] if upload.key is not None else ""
        while True:
            announced = (put.sha256, put.size_bytes, generation, resume_key)
            writer: BlobWriter = await call.acquire(methodcaller("suspend"), self._blobs.begin, *announced)
            try:
                if upload.has_share:
                    mine = [one for one in self._uploads.values() if one.uploader == upload.uploader and one is not upload]
                    to_come_bytes = put.size_bytes - writer.size_bytes + sum(one.to_come_bytes for one in mine)
                    await self._shares.check(upload.uploader, to_come_bytes, call)
                if not 0 < put.size_bytes == writer.size_bytes:
                    return await self._receive(upload, writer, call)
                # All bytes had come before it was cut off. If they are corrupt, they are gone now, and the upload begins at 0.
                with suppress(Corrupt):
                    return await call(writer.commit)
            except UploadCutOff:
                await call(writer.suspend)
                raise
            finally:
                call.finally_(writer.suspend)  # harmless after a commit

    async def _receive(self, upload: _IncomingBlob, writer: BlobWriter, call: SerialCalls) -> BlobRef:
        put = upload.put
        if put.resume:
            upload.received = writer.size_bytes
        upload.link.send(Reply(put.msg_id, {"go": True, "offset": writer.size_bytes} if put.resume else {"go": True}))
        await _write(upload, writer, call)
        return await call(writer.commit)

    # ------------------------------------------------------------------------------------------------ downloads

    async def send(self, link: Connection, allowed: bool, command: SendBlob, place: BlobPlace | None) -> None:
        """Send a blob from this place; NotFound for a peer that is not `allowed` to read it."""
        get = command.get
        check_sha256(get.sha256)
        if not allowed:
            raise NotFound(f"job {get.job_id[:128]!r} has no blob {get.sha256} that you may read")
        if place is None:
            raise NotFound(f"blob {get.sha256} of job {get.job_id[:128]!r} is not stored any more")
        try:
            await self._send_chunks(link, command, place.generation)
        except NotFound as error:
            logger.warning("the store knows a blob that is not here: %s", error)
            raise BlobUnavailable(
                f"the bytes of blob {get.sha256} of job {get.job_id[:128]!r} are not at this server but at another one, or lost; "
                "all servers of a store need the same --blobs s3://…"
            ) from None
        except OSError as error:
            raise _for_peer(error, f"blob {get.sha256} could not be read") from error

    async def _send_chunks(self, link: Connection, command: SendBlob, generation: int) -> None:
        get, offset, number, peer = command.get, command.get.offset, 0, object()
        key = (get.sha256, generation)
        fans_out = bool(command.worker_id) and not offset and parse_cache_source(get.job_id) is not None
        read = self._fan_outs.get(key) if fans_out else None
        if read is None:
            verify = not fans_out or key not in self._just_written
            read = _BlobRead(self._chunks(*key, offset, verify), self._download_threads, FAN_OUT_BATCHES if fans_out else 1)
            if fans_out:
                self._fan_outs[key] = read
            if not verify:
                self._just_written.remove(key)  # a peer that asks again, because the bytes were wrong, is told which store it is
        try:
            while (some := await read.batch(peer, number)) != []:
                if some is None:
                    self._leave(read, peer, key)
                    read, number = _BlobRead(self._chunks(*key, offset, verify=False), self._download_threads), 0
                    continue
                number += 1
                try:
                    for piece in some:
                        link.send(Chunk(get.msg_id, offset, piece))
                        offset += len(piece)
                        await link.drain()
                except Unavailable:
                    return  # the peer left
        finally:
            self._leave(read, peer, key)
        link.send(Chunk(get.msg_id, offset, b"", last=True))

    def _chunks(self, sha256: str, generation: int, offset: int, verify: bool = True) -> Generator[bytes, None, None]:
        with self._blobs.open(sha256, offset, generation) as reader:
            reader.verify = verify
            yield from reader

    def _leave(self, read: _BlobRead, peer: object, key: tuple[str, int]) -> None:
        if read.leave(peer) and self._fan_outs.get(key) is read:
            del self._fan_outs[key]

    # ------------------------------------------------------------------------------------------------ deletions

    def sweep(self) -> None:
        """Drop suspended uploads that nobody resumed in time."""
        self._delete_thread.submit(self._sweep)

    def _sweep(self) -> None:
        try:
            self._blobs.sweep()
        except (TasukiError, OSError) as error:
            logger.warning("old suspended uploads could not be removed: %s", error)

    async def delete(self, places: Sequence[BlobPlace]) -> list[BlobPlace]:
        """Delete the bytes at these places, and return those that are gone. The store asks again for the others."""
        return await asyncio.get_running_loop().run_in_executor(self._delete_thread, self._delete, places)

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


async def _turn(upload: _IncomingBlob, before: _IncomingBlob) -> None:
    """Wait until the upload before this one has ended, so that its bytes can be resumed."""
    assert before.task is not None
    loop = asyncio.get_running_loop()
    deadline = loop.time() + TURN_S
    if before.conn == upload.conn:
        before.end()
    while not before.task.done():
        wake_at = deadline if before.over else min(deadline, before.silent_at)
        await asyncio.wait([before.task], timeout=max(0.0, wake_at - loop.time()))
        if loop.time() >= before.silent_at:
            before.end()
        if loop.time() >= deadline and not before.task.done():
            raise Unavailable(
                f"blob {upload.put.sha256} is being sent on another of your connections; try again when it has arrived"
            )
    if upload.over:
        raise UploadCutOff("the connection was lost")


async def _write(upload: _IncomingBlob, writer: BlobWriter, call: SerialCalls) -> None:
    """Write the chunks up to the last one; UploadCutOff if it does not come."""
    while True:
        chunks = await _queued_chunks(upload.chunks)
        written = [chunk for chunk in chunks if chunk is not None]
        if written:
            await call(_write_all, writer, [chunk.data for chunk in written])
            upload.queued -= sum(len(chunk.data) + CHUNK_COST_BYTES for chunk in written)
            if upload.queued <= QUEUED_MAX_BYTES // 2:
                upload.link.resume_reading(upload)
        if written and written[-1].last:
            return
        if chunks[-1] is None:
            raise UploadCutOff(
                f"the upload of blob {upload.put.sha256} is continued by another upload, from byte {writer.size_bytes}"
            )


async def _queued_chunks(queue: asyncio.Queue[Chunk | None]) -> list[Chunk | None]:
    """Return the next chunk, and the chunks behind it that have come already, up to the size of one call."""
    chunks = [await queue.get()]
    size_bytes = 0
    while (chunk := chunks[-1]) is not None and not chunk.last:
        size_bytes += len(chunk.data)
        if size_bytes >= WRITE_MAX_BYTES or queue.empty():
            break
        chunks.append(queue.get_nowait())
    return chunks


def _write_all(writer: BlobWriter, pieces: Sequence[Any]) -> None:
    for piece in pieces:
        writer.write(piece)


def may_read(reader: Reader, command: SendBlob) -> bool:
    """Return whether the peer may read the blob of the job or the file of a cache that it names."""
    cached = parse_cache_source(command.get.job_id)
    if cached is None:
        [job] = reader.get([command.get.job_id])
        return job is not None and may_read_blob(command, job)
    [file] = reader.cached_files([cached])
    return file is not None and file.sha256 == command.get.sha256 and command.identity.may_read_cache(file.owner, file.target)


def may_read_blob(command: SendBlob, job: Job) -> bool:
    """Return whether the peer may read the blob: inputs and result of a job that it may see; as a worker, inputs of its lease."""
    sha256 = command.get.sha256
    inputs = {file.sha256 for file in job.spec.files if file.sha256 is not None}
    if command.worker_id:
        lease = job.lease
        holder = (lease.worker_id, lease.incarnation, lease.owner) if lease is not None else None
        return holder == (command.worker_id, command.incarnation, command.identity.owner) and sha256 in inputs
    if not command.identity.may_see(job.submitter, job.spec.subject):
        return False
    result = job.outcome.result_ref if job.outcome is not None else None
    return sha256 in inputs or (result is not None and result.sha256 == sha256)


# ---------------------------------------------------------------------------------------------------- presigned


class PresignedTransfers:
    """Presigned URLs of one server. Callers have checked that the peer may read or upload the blob."""

    def __init__(self, presign: S3Presign) -> None:
        self._presign = presign
        self._presign_threads = ThreadPoolExecutor(PRESIGN_THREADS, thread_name_prefix="tasuki-blobs-links")
        self._verify_threads = ThreadPoolExecutor(VERIFY_THREADS, thread_name_prefix="tasuki-blobs-taken")
        self._verifying: dict[_PresignedUpload, asyncio.Future[None]] = {}

    async def check(self) -> None:
        """Raise an error for the operator if the bucket cannot be used with presigned URLs."""
        await self._on_thread(self._presign.check)

    async def download(self, place: BlobPlace) -> BlobLink:
        return await self._on_thread(lambda: self._presign.download(place.sha256, place.size_bytes, place.generation))

    async def upload(self, place: BlobPlace, owner: str) -> UploadPlan:
        return await self._on_thread(lambda: self._presign.upload(place.sha256, place.size_bytes, place.generation, owner))

    async def take(self, place: BlobPlace, owner: str, wait_s: float) -> bool:
        """Verify an upload and move it to its place; False if that takes longer than `wait_s`, and continues."""
        upload = (place.sha256, place.generation, owner)
        verifying = self._verifying.get(upload)
        if verifying is None:
            verifying = asyncio.get_running_loop().run_in_executor(
                self._verify_threads, self._presign.take, place.sha256, place.size_bytes, place.generation, owner
            )
            self._verifying[upload] = verifying
            verifying.add_done_callback(lambda done: self._verified(upload, done))
        await asyncio.wait([verifying], timeout=wait_s)
        if not verifying.done():
            return False
        verifying.result()
        return True

    def _verified(self, upload: _PresignedUpload, done: asyncio.Future[None]) -> None:
        """Forget a verification that has ended: the next caller finds the blob in its place, or begins again."""
        del self._verifying[upload]
        ignore_result(done)

    def close(self) -> None:
        """Leave the uploads that are being verified as they are, for another server or another time."""
        self._presign.close()
        self._presign_threads.shutdown(wait=False)
        self._verify_threads.shutdown(wait=False, cancel_futures=True)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._presign_threads, work)
