"""Reading a command's stdout or stderr while it runs and after it has ended: every byte that is kept, once, in order.

Theory of operation. Everything is asked for by its offset in what the attempt wrote, so a lost connection, a dead server or a
worker that moved cost nothing but the question that was under way. While the attempt runs, its worker answers, through the
server it is connected to: if that is not ours, we ask there. When it has ended the rest is read from its result, by the same
offsets. A new attempt begins at 0; parts say which attempt they are of.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgspec

from tasuki.blobs.zip.reader import Meter, ZipLimits, read_directory, unpack_entry
from tasuki.core.backoff import Backoff
from tasuki.core.job import BlobRef, Outcome, State
from tasuki.core.protocol import LOG_PIECE_MAX_BYTES, LOG_WAIT_MAX_S, JobResult
from tasuki.errors import InvalidInput, NotFound, ProtocolError, TasukiError
from tasuki.event_loop import ignore_result

if TYPE_CHECKING:
    from tasuki.client.aio import AsyncClient

PAUSE_MIN_S, PAUSE_MAX_S = 0.1, 1.0  # between two questions, after one whose answer had nothing new
PROGRESS_WAIT_S = 5.0  # who wants to hear of progress waits no longer for output: it is as old as the question
BESIDE_CONNECT_S = 3.0
BESIDE_LOOK_S = 1.0
REPORT_MAX_BYTES = 16 * 1024 * 1024  # of result.json, whose list of skipped files is bounded too
SPOOL_BYTES = 1024 * 1024
STREAMS = ("stdout", "stderr")

Ending = asyncio.Future[JobResult]


class LogPart(msgspec.Struct, frozen=True):
    """Some of what an attempt wrote. `cut_bytes` were written before it and are not kept."""

    stream: str
    attempt: int
    offset: int
    data: bytes
    cut_bytes: int = 0

    @property
    def text(self) -> bytes:
        """The data, with a line before it if something is missing there; as in the log of the result."""
        return b"\n[tasuki: %d bytes were cut here]\n%s" % (self.cut_bytes, self.data) if self.cut_bytes else self.data


class _Answer(msgspec.Struct, kw_only=True):
    """What a server says to the request `logs` (docs/wire.md)."""

    offset: int
    data: bytes
    cut_bytes: int = 0
    ended: bool = False
    state: State
    attempt: int
    end: int | None = None
    complete: bool | None = None
    """None: the worker was not asked."""
    elsewhere: list[str] = []
    progress: float | None = None
    progress_text: str = ""


class _CutLog(msgspec.Struct):
    head_bytes: int
    cut_bytes: int
    tail_bytes: int


class _Report(msgspec.Struct):
    """What is read of result.json."""

    cut_logs: dict[str, _CutLog] = {}


class LogFollower:
    """One stream of one job. `attempt` and `offset` say how far it has come."""

    def __init__(
        self,
        client: AsyncClient,
        job_id: str,
        stream: str = "stdout",
        *,
        offset: int = 0,
        tail_bytes: int | None = None,
        on_progress: Callable[[float, str], None] | None = None,
    ) -> None:
        """`tail_bytes`: begin so much before the end of what there is, instead of at an offset."""
        if stream not in STREAMS:
            raise InvalidInput(f"a command has stdout and stderr, not {stream[:40]!r}")
        if offset < 0 or (tail_bytes is not None and tail_bytes < 0):
            raise InvalidInput(f"an offset or a number of bytes cannot be negative, got {min(offset, tail_bytes or 0)}")
        self.job_id = job_id
        self.stream = stream
        self.attempt = 0
        self.offset = offset
        self._client = client
        self._tail_bytes = tail_bytes
        self._on_progress = on_progress
        self._wait_s = LOG_WAIT_MAX_S if on_progress is None else PROGRESS_WAIT_S
        self._progress: tuple[float | None, str] = (None, "")
        self._rest_of = 0
        """The attempt whose result has been read."""
        self._looked_at = 0
        """The last attempt that failed, and was looked at for what it left."""
        self._beside: AsyncClient | None = None
        """The client of the server that has the worker, if that is not our own."""

    async def parts(self, *, follow: bool = True) -> AsyncGenerator[LogPart, None]:
        """All of it: to the end of the job, or (follow=False) what there is now."""
        ending = asyncio.ensure_future(self._client.job(self.job_id).outcome()) if follow else None
        if ending is not None:
            ending.add_done_callback(ignore_result)
        try:
            async for part in self.live(ending):
                yield part
            ended = await ending if ending is not None else await self._ended_with()
            if ended is not None:
                async for part in self._rest(ended):
                    yield part
        finally:
            if ending is not None:
                ending.cancel()
            await self.close()

    async def close(self) -> None:
        """Leave the other server, if there is one."""
        beside, self._beside = self._beside, None
        if beside is not None:
            await beside.close()

    # ------------------------------------------------------------------------------------------------ while it runs

    async def live(self, ending: Ending | None) -> AsyncIterator[LogPart]:
        """What comes from running attempts, until the job's `ending`; without one, until there is nothing new.

        Failed attempts are read to their end while the next one waits. What the last one leaves stands in its result.
        """
        backoff = Backoff(PAUSE_MIN_S, PAUSE_MAX_S)
        loop = asyncio.get_running_loop()
        welcome = self._client.welcome
        if welcome is not None and "logs" not in welcome.features:  # an older server: all of it comes with the result
            if ending is not None:
                await asyncio.wait({ending})
            return
        while ending is None or not ending.done():
            asked_at = loop.time()
            answer = await self._ask(ending)
            if answer is None:
                continue
            part = self._taken(answer)
            if part is not None:
                backoff.reset()
                if part.data:
                    yield part
                continue
            if answer.ended:
                return
            if answer.state is State.PENDING and self._looked_at < answer.attempt == self.attempt:
                self._looked_at = self.attempt
                failed = await self._ended_with()
                if failed is not None and failed.attempt == self.attempt:
                    async for part in self._rest(failed):
                        yield part
            if ending is None:
                if self._beside is not None and answer.complete is None:  # it was told where to ask just now
                    continue
                return
            if loop.time() - asked_at >= PAUSE_MAX_S:  # the worker has waited with it
                backoff.reset()
            await asyncio.wait({ending}, timeout=backoff.next_s())

    async def _ask(self, ending: Ending | None) -> _Answer | None:
        """The answer to the next question; None: ask again, or the job has ended meanwhile."""
        beside, measuring = self._beside, self._tail_bytes is not None
        params = {
            "job_id": self.job_id,
            "stream": self.stream,
            "offset": 0 if measuring else self.offset,
            "attempt": self.attempt,
            "wait_s": 0.0 if ending is None or measuring else self._wait_s,
            "max_bytes": 1 if measuring else LOG_PIECE_MAX_BYTES,
        }
        asking = asyncio.ensure_future((beside or self._client).request("logs", **params))
        try:
            await self._first(asking, ending, beside)
            if not asking.done():
                await self._go_home(beside)
                return None
            answer = msgspec.convert(asking.result(), _Answer)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"the server's answer about the log cannot be read: {error}") from None
        except TasukiError:
            if beside is None:
                raise
            await self._go_home(beside)
            return None
        finally:
            asking.cancel()
        if beside is not None and answer.complete is None:  # the worker is not there any more
            await self._go_home(beside)
        elif answer.elsewhere and beside is None:
            await self._go_beside(answer.elsewhere)
        self._note_progress(answer)
        return answer

    async def _first(self, asking: asyncio.Future[Any], ending: Ending | None, beside: AsyncClient | None) -> None:
        """Until there is an answer, the job has ended, or the other server is gone. Our own is dialed again and asked again."""
        waited_for = {asking} if ending is None else {asking, ending}
        while not any(one.done() for one in waited_for) and (beside is None or beside.connected):
            timeout_s = None if beside is None else BESIDE_LOOK_S
            await asyncio.wait(waited_for, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    def _taken(self, answer: _Answer) -> LogPart | None:
        if answer.attempt < self.attempt:  # another server, whose store lags behind
            return None
        if answer.attempt > self.attempt:
            self._begin(answer.attempt)
        if self._tail_bytes is not None:
            if answer.end is not None:
                self._measured(answer.end)
                return LogPart(self.stream, self.attempt, self.offset, b"")
            return None
        if not answer.data:
            return None
        if answer.offset != self.offset + answer.cut_bytes:
            raise ProtocolError(f"asked for byte {self.offset} of a log, the server answered with byte {answer.offset}")
        self.offset = answer.offset + len(answer.data)
        return LogPart(self.stream, self.attempt, answer.offset, answer.data, answer.cut_bytes)

    def _begin(self, attempt: int) -> None:
        if self.attempt:
            self.offset = 0
        self.attempt = attempt

    def _measured(self, end: int) -> None:
        self.offset, self._tail_bytes = max(0, end - (self._tail_bytes or 0)), None

    def _note_progress(self, answer: _Answer) -> None:
        told = (answer.progress, answer.progress_text)
        if told != self._progress:
            self._progress = told
            if answer.progress is not None and self._on_progress is not None:
                self._on_progress(answer.progress, answer.progress_text)

    # ------------------------------------------------------------------------------------------------ the other server

    async def _go_beside(self, urls: list[str]) -> None:
        """Connect to the server that has the worker. If that cannot be done, our own is asked again after the pause."""
        for url in urls:
            beside = self._client.beside(url, BESIDE_CONNECT_S)
            if beside is None:
                continue
            try:
                await beside.open()
            except TasukiError:  # its own words are of no use to whoever reads a log: the result has what is missed now
                continue
            self._beside = beside
            return

    async def _go_home(self, beside: AsyncClient | None) -> None:
        if beside is not None and beside is self._beside:
            await self.close()

    # ------------------------------------------------------------------------------------------------ after its end

    async def _ended_with(self) -> JobResult | None:
        """How the latest attempt ended, as the job's row says; None: it has left nothing, or another one runs."""
        view = await self._client.status(self.job_id, result=True)
        outcome = view["outcome"]
        if outcome is None:
            return None
        ref = BlobRef(outcome["result_sha256"], outcome["result_bytes"]) if outcome["result_is_blob"] else None
        left = Outcome(error_code=outcome["error_code"], result=outcome["result"], result_ref=ref)
        return JobResult(self.job_id, State(view["state"]), view["attempt"], left)

    async def _rest(self, ended: JobResult) -> AsyncIterator[LogPart]:
        nothing = ended.outcome.result is None and ended.outcome.result_ref is None
        if nothing or self._rest_of >= ended.attempt:
            return
        with tempfile.TemporaryDirectory(prefix="tasuki-logs-") as folder:
            path = Path(folder) / "result.zip"
            await self._client.save_result(ended, path)
            if not await asyncio.to_thread(zipfile.is_zipfile, path):
                if self.attempt:  # what it wrote while it ran was told
                    return
                raise NotFound(f"job {self.job_id!r} has no logs: a handler's and an app's result has none")
            async for part in self.rest_in(path, ended.attempt):
                yield part

    async def rest_in(self, path: Path, attempt: int) -> AsyncIterator[LogPart]:
        """What the result of this attempt has beyond what was read of it; `path` is the ZIP."""
        if attempt < self.attempt or self._rest_of >= attempt:
            return
        if attempt > self.attempt:
            self._begin(attempt)
        self._rest_of = attempt
        kept, cut = await asyncio.to_thread(unpack_log, path, self.stream)
        with kept:
            for part in self._parts_of(kept, cut):
                self.offset = part.offset + len(part.data)
                yield part

    def _parts_of(self, kept: BinaryIO, cut: _CutLog) -> Iterator[LogPart]:
        """`kept` is the head, a line that says what is missing, and the tail; offsets count what is missing."""
        size_bytes = kept.seek(0, os.SEEK_END)
        head_bytes = cut.head_bytes if cut.cut_bytes else size_bytes
        tail_start = head_bytes + cut.cut_bytes
        if self._tail_bytes is not None:
            self._measured(tail_start + cut.tail_bytes)
        yield from self._pieces(kept, self.offset, self.offset, head_bytes)
        if cut.cut_bytes:
            start = max(self.offset, tail_start)
            place = size_bytes - cut.tail_bytes + start - tail_start
            yield from self._pieces(kept, start, place, size_bytes, start - self.offset)

    def _pieces(self, kept: BinaryIO, offset: int, place: int, stop: int, cut_bytes: int = 0) -> Iterator[LogPart]:
        while place < stop or cut_bytes:
            kept.seek(place)
            data = kept.read(min(LOG_PIECE_MAX_BYTES, max(0, stop - place)))
            yield LogPart(self.stream, self.attempt, offset, data, cut_bytes)
            offset, place, cut_bytes = offset + len(data), place + len(data), 0
            if not data:
                return


def unpack_log(path: Path, stream: str) -> tuple[BinaryIO, _CutLog]:
    """One log of a result, and what was cut of it. The archive came from a worker, and is believed in nothing."""
    limits = ZipLimits()
    meter = Meter(limits)
    report = bytearray()
    kept = cast(BinaryIO, tempfile.SpooledTemporaryFile(SPOOL_BYTES))  # noqa: SIM115 - the caller's, if nothing goes wrong
    try:
        with path.open("rb") as source:
            for entry in read_directory(source, limits):
                if entry.name == f"{stream}.log":
                    unpack_entry(source, entry, meter, _into(kept))
                elif entry.name == "result.json" and entry.claimed_bytes <= REPORT_MAX_BYTES:
                    unpack_entry(source, entry, meter, report.extend)
        return kept, _cut_of(bytes(report), stream, kept.seek(0, os.SEEK_END))
    except BaseException:
        kept.close()
        raise


def _into(kept: BinaryIO) -> Callable[[bytes], None]:
    def take(data: bytes) -> None:
        kept.write(data)

    return take


def _cut_of(report: bytes, stream: str, size_bytes: int) -> _CutLog:
    """What result.json says was cut of a log of this size; nothing if it says nothing that can be true."""
    whole = _CutLog(size_bytes, 0, 0)
    try:
        cut = msgspec.json.decode(report, type=_Report).cut_logs.get(stream, whole)
    except msgspec.DecodeError:
        return whole
    numbers = (cut.head_bytes, cut.cut_bytes, cut.tail_bytes)
    return cut if min(numbers) >= 0 and cut.head_bytes + cut.tail_bytes <= size_bytes else whole
