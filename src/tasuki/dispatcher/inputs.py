"""`/inputs/{sha256}`: the store of inputs, which dispatchers share. Content-addressed and verified; nothing is ever overwritten.

    HEAD   is it there, and how large                      GET   its bytes; Range: bytes=N- continues a download
    PUT    the whole input, or with Content-Range a part. A part that was cut is kept, and the next PUT may continue it:
           Content-Range: bytes */SIZE, without a body, asks where

The hash of an upload is known only at its end: a folder can wait for that, a bucket cannot. So a file for a bucket is in a
nameless temporary file first. A stored file stays, whatever becomes of the request.

An input is kept for some days after its last use, by any dispatcher: a use is noted in the store as the age of the blob, a few
times in that period at most. An input that a request of this dispatcher uses is not removed meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import IO

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from tasuki.agent.input_sources import PIECE_BYTES, StoredInputs
from tasuki.agent.refusals import input_not_found
from tasuki.agent.upload import Upload, UploadDeadline, UploadForm
from tasuki.blobs.blob import CHUNK_BYTES, BlobStore, BlobWriter
from tasuki.blobs.files import disk_full_as_error
from tasuki.blobs.folder import FolderBlobs
from tasuki.core.failover.agent_protocol import InputRecord
from tasuki.core.failover.nodes import InputRef
from tasuki.core.job import BlobRef, check_sha256
from tasuki.core.ranges import BodyRange, body_range, content_range, parse_range
from tasuki.core.units import DAY_S
from tasuki.dispatcher.metrics import DispatcherMetrics
from tasuki.dispatcher.proxying import StoredForm
from tasuki.doors.http.exchange import json_answer
from tasuki.errors import AgentRefusal, Corrupt, InvalidInput, NotFound, OffsetConflict, TasukiError, TooLarge

# ------------------------------------------------------------------------------------------------ writing


class InputWriter:
    """Writer of one file whose hash is not known yet."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by abort
        self._digest = hashlib.sha256()
        self._size_bytes = 0
        self.was_there = False

    def write(self, chunk: bytes) -> int:
        with disk_full_as_error(tempfile.gettempdir()):
            self._file.write(chunk)
        self._digest.update(chunk)
        self._size_bytes += len(chunk)
        return len(chunk)

    def commit(self) -> BlobRef:
        """Store the file, unless it is stored already; see `was_there`."""
        ref = BlobRef(self._digest.hexdigest(), self._size_bytes)
        try:
            self.was_there = self._blobs.has(ref.sha256)
            if not self.was_there:
                self._file.seek(0)
                with self._blobs.begin(ref.sha256, ref.size_bytes) as writer:
                    while chunk := self._file.read(CHUNK_BYTES):
                        writer.write(chunk)
                    writer.commit()
        finally:
            self.abort()
        return ref

    def abort(self) -> None:
        self._file.close()


class StoredFiles:
    """Files of one upload, each a blob. See `agent.upload.UploadFiles`."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self.made = False
        self.records: list[InputRecord] = []
        self.known: list[str] = []
        """Hashes that were stored already, and whose age has not changed."""
        self._name = ""
        self._writer: BlobWriter | InputWriter | None = None

    def write(self, steps: Sequence[str | bytes | None]) -> None:
        for step in steps:
            if isinstance(step, str):
                self.made = True
                self._name = step
                direct = isinstance(self._blobs, FolderBlobs)
                self._writer = self._blobs.begin() if direct else InputWriter(self._blobs)
                continue
            assert self._writer is not None
            if step is not None:
                self._writer.write(step)
            else:
                ref = self._writer.commit()
                if isinstance(self._writer, InputWriter) and self._writer.was_there:
                    self.known.append(ref.sha256)
                self._writer = None
                self.records.append(InputRecord(self._name, ref.sha256, ref.size_bytes))

    def remove(self) -> None:
        if self._writer is not None:
            self._writer.abort()
            self._writer = None


# ------------------------------------------------------------------------------------------------ retention

SOON_S = 60.0  # after the start, and after that every day
AGAIN_S = 3600.0  # after a failure
NOTES_PER_KEPT_TIME = 4  # so that an input which is kept for a few hours does not appear unused
NOTED_MAX = 16_384  # inputs; the use of one that is forgotten is noted once more
TOLD_EVERY = 1000  # removed inputs


class InputRetention:
    """Retention of the inputs in a store."""

    def __init__(
        self, blobs: BlobStore, keep_days: float, metrics: DispatcherMetrics, clock: Callable[[], float] = time.time
    ) -> None:
        """`keep_days` 0: for ever."""
        self._blobs = blobs
        self._keep_s = keep_days * DAY_S
        self._note_every_s = min(DAY_S, self._keep_s / NOTES_PER_KEPT_TIME) if keep_days else DAY_S
        self._metrics = metrics
        self._clock = clock
        self._noted: OrderedDict[str, float] = OrderedDict()
        """Time of the last noted use of each input, the oldest first."""
        self._held: Counter[str] = Counter()
        self._closed = threading.Event()

    def close(self) -> None:
        """Stop removing."""
        self._closed.set()

    # ------------------------------------------------------------------------------------------------ uses

    async def used(self, sha256: str) -> None:
        """Note a use. A failure to note it is not an error: the input is there, and will be for some days."""
        noted_at = self._noted.get(sha256)
        if noted_at is not None and 0 <= self._clock() - noted_at < self._note_every_s:
            return
        self.stored(sha256)  # first, so that requests meanwhile do not note it too
        try:
            await asyncio.to_thread(self._blobs.touch, sha256)
        except (TasukiError, OSError) as error:
            self._noted.pop(sha256, None)
            logger.warning("the use of input %s could not be noted: %s", sha256, error)

    def stored(self, sha256: str) -> None:
        """Note that an input was stored, which the store notes itself."""
        self._noted[sha256] = self._clock()
        self._noted.move_to_end(sha256)
        if len(self._noted) > NOTED_MAX:
            self._noted.popitem(last=False)

    @contextmanager
    def holding(self, hashes: Sequence[str]) -> Iterator[None]:
        """Do not remove these inputs meanwhile."""
        self._held.update(hashes)
        try:
            yield
        finally:
            self._held.subtract(hashes)
            for sha256 in hashes:
                if not self._held[sha256]:
                    del self._held[sha256]

    # ------------------------------------------------------------------------------------------------ cleaning

    async def daily(self) -> None:
        """Remove unused inputs once a day, until canceled; at another time than dispatchers that were started together."""
        if not self._keep_s:
            return
        wait_s = SOON_S
        while True:
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.5))  # noqa: S311 - no secret depends on it
            try:
                await self.clean()
                wait_s = DAY_S
            except (TasukiError, OSError) as error:
                logger.warning("old inputs could not be removed; another try in an hour: %s", error)
                wait_s = AGAIN_S

    async def clean(self) -> int:
        """Remove unused inputs; return how many."""
        return await asyncio.to_thread(self._clean, self._clock() - self._keep_s)

    def _clean(self, since: float) -> int:
        removed = removed_bytes = 0
        for ref in self._blobs.remove_untouched(since, lambda sha256: sha256 in self._held or self._closed.is_set()):
            removed += 1
            removed_bytes += ref.size_bytes
            self._metrics.cleaned.inc()
            self._metrics.cleaned_bytes.inc(ref.size_bytes)
            if removed % TOLD_EVERY == 0:
                logger.info("removed %d inputs so far, %d bytes", removed, removed_bytes)
        if removed:
            days = self._keep_s / DAY_S
            logger.info("removed %d inputs, %d bytes, unused for %g days", removed, removed_bytes, days)
        return removed


logger = logging.getLogger("tasuki.dispatcher")
SWEEP_EVERY_S = 600.0


class InputStore(StoredInputs):
    """Store of inputs, for requests."""

    def __init__(self, blobs: BlobStore, max_bytes: int, keep_days: float, metrics: DispatcherMetrics) -> None:
        super().__init__(blobs)
        self._max_bytes = max_bytes
        self._stored = metrics.stored.inc
        self.keeping = InputRetention(blobs, keep_days, metrics)

    async def check(self) -> None:
        await self._in_thread(self._blobs.check)

    async def keep_sweeping(self) -> None:
        """Drop uploads that were cut and not continued, until canceled."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            try:
                await self._in_thread(self._blobs.sweep)
            except (TasukiError, OSError) as error:
                logger.warning("half-sent inputs could not be removed; another try later: %s", error)

    async def close(self) -> None:
        self.keeping.close()
        await super().close()

    # ------------------------------------------------------------------------------------------------ forms

    @asynccontextmanager
    async def taking_in(self, request: Request, boundary: bytes) -> AsyncIterator[StoredForm]:
        """Store the files of a form; files that it names must be stored. None is removed before the end."""
        stored = await self._take_in(request, boundary)
        with self.keeping.holding(stored.hashes):
            yield stored

    async def _take_in(self, request: Request, boundary: bytes) -> StoredForm:
        files = StoredFiles(self._blobs)
        intake = Upload(boundary, None, self._max_bytes, files=files)
        try:
            form = await intake.receive(request.stream())
            records = await intake.finish()
        except BaseException:
            await asyncio.shield(intake.discard())
            raise
        self._stored(intake.received_bytes)
        for record in records:
            if record.sha256 in files.known:
                await self.keeping.used(record.sha256)
            else:
                self.keeping.stored(record.sha256)
        sent = [(InputRef(record.sha256, record.name), record.size_bytes) for record in records]
        return StoredForm(request, self, form, sent + await self._named(form))

    async def _named(self, form: UploadForm) -> list[tuple[InputRef, int]]:
        found: list[tuple[InputRef, int]] = []
        for ref in form.inputs:
            try:
                found.append((ref, await self._use(ref.sha256)))
            except NotFound:
                raise input_not_found(ref.sha256) from None
        return found

    async def _use(self, sha256: str) -> int:
        """Return the size of an input, and note its use; NotFound."""
        size_bytes = await self.size(sha256)
        await self.keeping.used(sha256)
        return size_bytes

    # ------------------------------------------------------------------------------------------------ the routes

    async def head(self, request: Request) -> Response:
        size_bytes = await self._use(_sha256(request))
        return Response(headers={"Content-Length": str(size_bytes), "Accept-Ranges": "bytes"})

    async def get(self, request: Request) -> Response:
        sha256 = _sha256(request)
        size_bytes = await self._use(sha256)
        first, last = parse_range(request.headers.get("range", "")) or (None, None)
        ranged = first is not None and last is None  # other forms are answered with everything
        offset = first if ranged and first else 0
        if offset and offset >= size_bytes:
            raise AgentRefusal(416, "RANGE_NOT_SATISFIABLE", f"input {sha256} has {size_bytes} bytes; ask for some of them")
        headers = {"Content-Length": str(size_bytes - offset), "Accept-Ranges": "bytes", "ETag": f'"{sha256}"'}
        if ranged:
            headers["Content-Range"] = content_range(offset, size_bytes, size_bytes)
        return StreamingResponse(
            self._held(sha256, offset), 206 if ranged else 200, headers=headers, media_type="application/octet-stream"
        )

    async def _held(self, sha256: str, offset: int) -> AsyncGenerator[bytes, None]:
        with self.keeping.holding([sha256]):
            async with aclosing(self.pieces(sha256, offset)) as pieces:
                async for piece in pieces:
                    yield piece

    async def put(self, request: Request, whose: str) -> Response:
        """Store an input or a part of it. `whose`: only the same client may continue an upload."""
        sha256 = _sha256(request)
        span = body_range(request.headers.get("content-length", ""), request.headers.get("content-range"))
        if span.size_bytes > self._max_bytes:
            raise TooLarge(f"an input of {span.size_bytes} bytes is too large; the limit of this dispatcher is {self._max_bytes}")
        if await self._in_thread(lambda: self._blobs.has(sha256)):
            size_bytes = await self._use(sha256)
            if size_bytes != span.size_bytes:
                raise InvalidInput(f"input {sha256} has {size_bytes} bytes, not {span.size_bytes}; send it under its own sha256")
            return json_answer({"sha256": sha256, "size_bytes": size_bytes, "offset": size_bytes})
        writer = await self._in_thread(lambda: self._blobs.begin(sha256, span.size_bytes, resume_key=whose))
        try:
            done = await self._write(writer, span, request)
        except Corrupt as error:
            raise AgentRefusal(400, Corrupt.code, f"{error.message}; send it again from byte 0") from None
        finally:
            await asyncio.shield(self._in_thread(writer.suspend))  # does nothing after commit or abort
        if done:
            self.keeping.stored(sha256)
        offset = span.size_bytes if done else writer.size_bytes
        return json_answer({"sha256": sha256, "size_bytes": span.size_bytes, "offset": offset}, 201 if done else 200)

    async def _write(self, writer: BlobWriter, span: BodyRange, request: Request) -> bool:
        """Write the body; return whether the input is complete. Bytes that are stored already are skipped; the hash covers all of
        them."""
        at = writer.size_bytes
        if span.start == span.stop and span.size_bytes:  # the question where to continue
            return False
        if span.start > at or (span.start and span.start != at):
            raise OffsetConflict(f"the input continues at byte {at}, not at {span.start}", offset=at)
        known = at - span.start
        async with aclosing(_pieces(request)) as pieces:
            async for piece in pieces:
                new = piece[known:]
                known = max(0, known - len(piece))
                if new:
                    await self._in_thread(partial(writer.write, new))
                    self._stored(len(new))
        if span.stop < span.size_bytes:
            return False
        await self._in_thread(writer.commit)
        return True


def _sha256(request: Request) -> str:
    return check_sha256(request.path_params["sha256"])


async def _pieces(request: Request) -> AsyncGenerator[bytes, None]:
    """Yield the body in pieces that are worth a call of a thread. It must not be slower than an upload to an agent may be."""
    body, deadline, found = aiter(request.stream()), UploadDeadline(), bytearray()
    problem = ""
    while True:
        try:
            piece = await deadline.wait(anext(body, None))
        except InvalidInput as error:
            piece, problem = None, error.message
        except ClientDisconnect:
            piece, problem = None, "the upload ended before it was whole"
        deadline.received_bytes += len(piece or b"")
        found += piece or b""
        if found and (piece is None or len(found) >= PIECE_BYTES):
            yield bytes(found)
            found.clear()
        if piece is None:
            break
    if problem:
        raise InvalidInput(f"{problem}; send the rest")
