"""Blobs that travel through a server, in chunks that never stand in memory whole. File work happens on its own threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from tasuki.blobs.blob import BlobReader, BlobStore, BlobWriter, check_sha256
from tasuki.core.broker import error_message
from tasuki.core.broker_events import SendBlob
from tasuki.core.job import Job
from tasuki.core.protocol import BlobPut, Chunk, Message, Reply
from tasuki.errors import InvalidInput, NotFound, Overloaded, ProtocolError, TasukiError, Unavailable

UPLOADS_PER_CONNECTION_MAX = 16
QUEUED_MAX_BYTES = 8 * 1024 * 1024  # of one upload; past this the peer is not read from
CHUNK_COST_BYTES = 1024  # what a chunk takes beside its bytes: one of a single byte is not free


class Connection(Protocol):
    """What a transfer needs of a connection."""

    def send(self, message: Message) -> None: ...
    def close(self, error: TasukiError | None = None) -> None: ...
    def pause_reading(self, why: object = None) -> None: ...
    def resume_reading(self, why: object = None) -> None: ...
    async def drain(self) -> None: ...


class _Upload:
    """One blob on its way in: a queue of chunks and the task that writes them."""

    def __init__(self, put: BlobPut) -> None:
        self.put = put
        self.received = 0
        self.queued = 0
        self.chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None


class Transfers:
    """All uploads and downloads of one server."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tasuki-blobs")
        self._uploads: dict[tuple[int, int], _Upload] = {}

    def close(self) -> None:
        for upload in self._uploads.values():
            if upload.task is not None:
                upload.task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    # ------------------------------------------------------------------------------------------------ in

    def begin(self, conn: int, link: Connection, put: BlobPut) -> None:
        """A peer wants to send a blob. It is told whether it is needed."""
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
        upload = self._uploads[conn, put.msg_id] = _Upload(put)
        upload.task = asyncio.ensure_future(self._take(conn, link, upload))

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
        put = upload.put
        try:
            if await self._call(self._blobs.has, put.sha256):
                link.send(Reply(put.msg_id, {"have": True}))
                return
            writer: BlobWriter = await self._call(self._blobs.begin, put.sha256, put.size_bytes)
            try:
                link.send(Reply(put.msg_id, {"go": True}))
                await self._write(link, upload, writer)
                await self._call(writer.commit)
            except BaseException:
                writer.abort()
                raise
            link.send(Reply(put.msg_id, {"have": True}))
        except TasukiError as error:
            link.send(error_message(put.msg_id, error))
        finally:
            self._uploads.pop((conn, put.msg_id), None)
            link.resume_reading(upload)

    async def _write(self, link: Connection, upload: _Upload, writer: BlobWriter) -> None:
        while True:
            chunk = await upload.chunks.get()
            await self._call(writer.write, chunk.data)
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

    def missing(self, sha256s: Iterable[str]) -> frozenset[str]:
        """Those that are not here. A look at the folder for each: only jobs with blobs pay for it."""
        return frozenset(sha256 for sha256 in sha256s if not self._has(sha256))

    def _has(self, sha256: str) -> bool:
        try:
            return self._blobs.has(sha256)
        except InvalidInput:  # what is no sha256 is not here; whoever checks the job tells what is wrong with it
            return False

    async def send(self, link: Connection, job: Job | None, command: SendBlob) -> None:
        """Send a blob of a job to somebody who may read it."""
        get = command.get
        check_sha256(get.sha256)
        if job is None or not may_read_blob(command, job):
            raise NotFound(f"job {get.job_id[:128]!r} has no blob {get.sha256} that you may read")
        reader: BlobReader = await self._call(self._blobs.open, get.sha256, get.offset)
        try:
            pieces: Iterator[bytes] = iter(reader)
            offset = get.offset
            while (piece := await self._call(next, pieces, b"")) != b"":
                link.send(Chunk(get.msg_id, offset, piece))
                offset += len(piece)
                await link.drain()
            link.send(Chunk(get.msg_id, offset, b"", last=True))
        except Unavailable:
            return  # the peer left; there is nobody to tell
        finally:
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
