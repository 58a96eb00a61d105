"""Blobs on their way into a server, in chunks that never stand in memory whole.

Theory of operation. Each upload is a task that takes chunks from a queue, which is bounded: past QUEUED_MAX_BYTES the peer is not
read from. One that may be gone on with (`BlobPut.resume`) is not dropped with its connection: what has come is written, and the
blob store keeps it for its sender's next try. So of one sender and one blob there is never more than one at a time: the next one
waits until the one before it has ended, and goes on behind it. One that has fallen silent is ended for it, because its connection
may be dead without anybody having noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

from msgspec.structs import replace

from tasuki.blobs.blob import RESUMED_MIN_BYTES, BlobRef, BlobStore, BlobWriter, check_sha256
from tasuki.core.protocol import BlobPut, Chunk, Message, Reply, error_message
from tasuki.core.store_messages import BlobPlace
from tasuki.errors import Corrupt, InvalidInput, Overloaded, ProtocolError, TasukiError, Unavailable, UploadCutOff
from tasuki.event_loop import BackgroundTasks
from tasuki.server.serial_calls import SerialCalls, told

UPLOADS_PER_CONNECTION_MAX = 16
QUEUED_MAX_BYTES = 8 * 1024 * 1024  # of one upload; past this the peer is not read from
CHUNK_COST_BYTES = 1024  # what a chunk takes beside its bytes: one of a single byte is not free
WRITE_MAX_BYTES = 2 * 1024 * 1024  # in one call on the thread, which costs as much as hashing some 100 KiB
SILENT_S = 5.0  # without a byte; then the next one of the same uploader takes its place
TURN_S = 15.0  # how long the next one waits for one that is not silent; less than a door waits for an answer

Arrived = Callable[[int, BlobPut, BlobPlace], None]


class TransferConnection(Protocol):
    """What a transfer needs of a connection."""

    def send(self, message: Message) -> None: ...
    def close(self, error: TasukiError | None = None) -> None: ...
    def pause_reading(self, why: object = None) -> None: ...
    def resume_reading(self, why: object = None) -> None: ...
    async def drain(self) -> None: ...


class _IncomingBlob:
    """One blob on its way in: a queue of chunks and the task that writes them."""

    def __init__(self, conn: int, link: TransferConnection, put: BlobPut, place: BlobPlace, uploader: str) -> None:
        self.conn, self.link = conn, link
        self.put, self.place = put, place
        resumes = put.resume and put.size_bytes >= RESUMED_MIN_BYTES
        self.key = (uploader, put.sha256) if resumes and uploader else None
        """By which the next one finds what this one has written. None: it is dropped when it is cut off."""
        self.received = -1 if put.resume else 0
        """Where the next chunk begins; -1: the peer has to be told first."""
        self.queued = 0
        self.chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self.heard_at = asyncio.get_running_loop().time()
        self.over = False
        self.kept: BlobPlace | None = None
        """Where it is whole and durable: it has arrived, or the one before it."""
        self.task: asyncio.Task[None] | None = None

    def end(self) -> None:
        """Nothing more comes. What has come is written first."""
        if not self.over:
            self.over = True
            self.chunks.put_nowait(None)

    @property
    def silent_at(self) -> float:
        """When it counts as silent. Not while it is we who are behind."""
        now = asyncio.get_running_loop().time()
        return (now if self.queued else self.heard_at) + SILENT_S


class Uploads:
    """All uploads of one server. `arrived` is told, in the loop, when bytes are durable at their place."""

    def __init__(self, blobs: BlobStore, threads: ThreadPoolExecutor, arrived: Arrived) -> None:
        self._blobs = blobs
        self._threads = threads
        self._arrived = arrived
        self._uploads: dict[tuple[int, int], _IncomingBlob] = {}
        self._latest: dict[tuple[str, str], _IncomingBlob] = {}
        """By key: the one that the next one has to wait for."""
        self._tasks = BackgroundTasks()

    def close(self) -> None:
        self._tasks.cancel()

    def begin(self, conn: int, link: TransferConnection, put: BlobPut, place: BlobPlace, uploader: str) -> None:
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
        upload = self._uploads[conn, put.msg_id] = _IncomingBlob(conn, link, put, place, uploader)
        before = None
        if upload.key is not None:
            before = self._latest.get(upload.key)
            self._latest[upload.key] = upload
        upload.task = self._tasks.spawn(self._take(upload, before))

    def under_way(self) -> list[BlobPut]:
        """Those that have not come to their end."""
        return [upload.put for upload in self._uploads.values()]

    def piece(self, conn: int, link: TransferConnection, chunk: Chunk) -> None:
        """The next chunk of an upload."""
        upload = self._uploads.get((conn, chunk.corr_id))
        if upload is None or upload.over:  # it failed, and the peer had sent more before it heard of it
            return
        if chunk.offset != upload.received:
            expected = "after the Reply with the offset" if upload.received < 0 else upload.received
            link.close(ProtocolError(f"a chunk starts at {chunk.offset}, expected {expected}"))
            return
        upload.received += len(chunk.data)
        upload.queued += len(chunk.data) + CHUNK_COST_BYTES
        upload.heard_at = asyncio.get_running_loop().time()
        upload.chunks.put_nowait(chunk)
        if upload.queued > QUEUED_MAX_BYTES:
            link.pause_reading(upload)

    def forget(self, conn: int) -> None:
        """The connection is gone: half-sent blobs are put aside, or dropped."""
        for at in [at for at in self._uploads if at[0] == conn]:
            upload = self._uploads.pop(at)
            if upload.key is not None:
                upload.end()
            elif upload.task is not None:
                upload.task.cancel()

    # ------------------------------------------------------------------------------------------------ one of them

    async def _take(self, upload: _IncomingBlob, before: _IncomingBlob | None) -> None:
        put, link = upload.put, upload.link
        try:
            if before is not None:
                await _turn(upload, before)
                upload.kept = before.kept
            ref = await self._keep(upload)
        except (TasukiError, OSError) as error:
            link.send(error_message(put.msg_id, told(error, f"blob {put.sha256} could not be kept")))
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
            self._arrived(upload.conn, put, replace(upload.place, size_bytes=ref.size_bytes))

    async def _keep(self, upload: _IncomingBlob) -> BlobRef | None:
        """Write what the peer sends to its place; None if it was there."""
        put, generation = upload.put, upload.place.generation
        call = SerialCalls(self._threads)
        # A row can say more than is true: somebody may have deleted the bytes. Then they are taken again.
        if (upload.place.stored or upload.kept == upload.place) and await call(self._blobs.has, put.sha256, generation):
            return None if upload.place.stored else BlobRef(put.sha256, put.size_bytes)
        resume_key = upload.key[0] if upload.key is not None else ""
        while True:
            announced = (put.sha256, put.size_bytes, generation, resume_key)
            writer: BlobWriter = await call.opened(_suspend, self._blobs.begin, *announced)
            try:
                if not 0 < put.size_bytes == writer.size_bytes:
                    return await self._receive(upload, writer, call)
                # All had come before it was cut off. If it is not what it should be, it is gone now, and begins at 0.
                with suppress(Corrupt):
                    ref: BlobRef = await call(writer.commit)
                    return ref
            except UploadCutOff:
                await call(writer.suspend)
                raise
            finally:
                call.at_last(_suspend, writer)  # harmless after the commit

    async def _receive(self, upload: _IncomingBlob, writer: BlobWriter, call: SerialCalls) -> BlobRef:
        put = upload.put
        if put.resume:
            upload.received = writer.size_bytes
            upload.link.send(Reply(put.msg_id, {"go": True, "offset": writer.size_bytes}))
        else:
            upload.link.send(Reply(put.msg_id, {"go": True}))
        await _write(upload, writer, call)
        ref: BlobRef = await call(writer.commit)
        return ref


async def _turn(upload: _IncomingBlob, before: _IncomingBlob) -> None:
    """Returns when the one before has ended and what it wrote can be gone on with."""
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
                f"blob {upload.put.sha256} is being sent on another connection of yours; try again when it is there"
            )
    if upload.over:
        raise UploadCutOff("the connection was lost")


async def _write(upload: _IncomingBlob, writer: BlobWriter, call: SerialCalls) -> None:
    """Until the last chunk; UploadCutOff if it does not come."""
    while True:
        chunks = await _some(upload.chunks)
        written = [chunk for chunk in chunks if chunk is not None]
        if written:
            await call(_write_all, writer, [chunk.data for chunk in written])
            upload.queued -= sum(len(chunk.data) + CHUNK_COST_BYTES for chunk in written)
            if upload.queued <= QUEUED_MAX_BYTES // 2:
                upload.link.resume_reading(upload)
        if written and written[-1].last:
            return
        if chunks[-1] is None:
            raise UploadCutOff(f"the upload of blob {upload.put.sha256} goes on elsewhere, from byte {writer.size_bytes}")


async def _some(queue: asyncio.Queue[Chunk | None]) -> list[Chunk | None]:
    """The next chunk, and those behind it that are there already: as many as go into one call."""
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


def _suspend(writer: BlobWriter) -> None:
    writer.suspend()
