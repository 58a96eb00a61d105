"""Reading a command's stdout or stderr while it runs and after it has ended: every byte that is kept, once, in order.

Theory of operation. Output is requested by its offset in the stream of an attempt, so a lost connection, a dead server or a
worker that moved costs nothing but the request under way. While the attempt runs, its worker answers through the server that it
is connected to; if that is another server than the client's, the follower connects to it. After the end the rest is read from the
result, by the same offsets. A new attempt begins at 0; parts name their attempt.
"""

from __future__ import annotations

import asyncio
import io
import os
import tempfile
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import msgspec

from tasuki.blobs.zip.reader import ZipReader
from tasuki.core.backoff import Backoff
from tasuki.core.decoding import decodable
from tasuki.core.job import BlobRef, Outcome, Progress, State
from tasuki.core.protocol import LOG_PIECE_MAX_BYTES, LOG_STREAMS, LOG_WAIT_MAX_S, PROGRESS_STREAM, JobResult, Welcome
from tasuki.errors import InvalidInput, NotFound, Overloaded, ProtocolError, TasukiError
from tasuki.event_loop import ignore_result

PAUSE_MIN_S, PAUSE_MAX_S = 0.1, 1.0  # between two requests, after an answer without new output
PROGRESS_WAIT_S = 5.0  # of a request when progress is wanted too: an answer has the progress of the moment it was asked
BESIDE_CONNECT_S = 3.0
BESIDE_LOOK_S = 1.0
REPORT_MAX_BYTES = 16 * 1024 * 1024  # of result.json, whose list of skipped files is bounded too
SPOOL_BYTES = 1024 * 1024

Ending = asyncio.Future[JobResult]


class WatchedJob(Protocol):
    """The part of AsyncJobHandle that a follower uses."""

    async def outcome(self) -> JobResult: ...


class LogClient(Protocol):
    """The part of AsyncClient that a follower uses."""

    welcome: Welcome | None

    @property
    def connected(self) -> bool: ...
    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def call(self, verb: str, /, **params: Any) -> Any: ...
    async def save_result(self, ended: JobResult, path: str | os.PathLike[str]) -> int: ...
    def job(self, job_id: str) -> WatchedJob: ...
    def beside(self, url: str, connect_timeout_s: float) -> LogClient | None: ...


class LogPart(msgspec.Struct, frozen=True):
    """A piece of an attempt's output. `cut_bytes` were written before it and are not kept."""

    stream: str
    attempt: int
    offset: int
    data: bytes
    cut_bytes: int = 0

    @property
    def text(self) -> bytes:
        """The data, with a line before it if output is missing there; as in the log of the result."""
        return b"\n[tasuki: %d bytes were cut here]\n%s" % (self.cut_bytes, self.data) if self.cut_bytes else self.data


@decodable
class _Answer(msgspec.Struct, kw_only=True):
    """The answer to the request `logs` (docs/wire.md)."""

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


@decodable
class _Report(msgspec.Struct):
    """The part of result.json that is decoded."""

    cut_logs: dict[str, _CutLog] = {}


class LogFollower:
    """Reads one stream of one job; `attempt` and `offset` are the position."""

    def __init__(
        self,
        client: LogClient,
        job_id: str,
        stream: str = "stdout",
        *,
        offset: int = 0,
        tail_bytes: int | None = None,
        on_progress: Callable[[float, str], None] | None = None,
    ) -> None:
        """`tail_bytes`: begin so many bytes before the end of the output so far, instead of at an offset."""
        if stream not in LOG_STREAMS:
            raise InvalidInput(f"a job has stdout, stderr and progress, not {stream[:40]!r}")
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
        """The last failed attempt whose result was looked for."""
        self._ended: JobResult | None = None
        self._beside: LogClient | None = None
        """The client of the worker's server, if that is another one."""

    async def parts(self, *, follow: bool = True) -> AsyncGenerator[LogPart, None]:
        """Yield the output to the end of the job, or (follow=False) the output so far."""
        ending = asyncio.ensure_future(self._client.job(self.job_id).outcome()) if follow else None
        if ending is not None:
            ending.add_done_callback(ignore_result)
        try:
            async for part in self.live(ending):
                yield part
            ended = self._ended = await ending if ending is not None else await self._ended_with()
            if ended is not None:
                async for part in self._rest(ended):
                    yield part
        finally:
            if ending is not None:
                ending.cancel()
            await self.close()

    async def close(self) -> None:
        """Close the connection to the worker's server, if there is one."""
        beside, self._beside = self._beside, None
        if beside is not None:
            await beside.close()

    async def progress(self) -> AsyncGenerator[Progress, None]:
        """Yield the reports of a follower of progress, to the end of the job, whose outcome has the last one."""
        attempt, unfinished = 0, b""
        last: Progress | None = None
        async with aclosing(self.parts()) as parts:
            async for part in parts:
                if part.attempt != attempt or part.cut_bytes:
                    attempt, unfinished = part.attempt, b""
                *lines, unfinished = (unfinished + part.data).split(b"\n")
                for line in lines:
                    last = _report_of(line)
                    yield last
        told = self._ended.outcome.meta.get(PROGRESS_STREAM) if self._ended is not None else None
        final = last
        with suppress(msgspec.ValidationError):  # else the word is one of the app's own
            final = msgspec.convert(told, Progress | None) or last
        if final is not None and final != last:
            yield final

    # ------------------------------------------------------------------------------------------------ while it runs

    async def live(self, ending: Ending | None) -> AsyncIterator[LogPart]:
        """Yield the output of running attempts until the job's `ending`; without one, until there is nothing new.

        Failed attempts are read to their end while the next one waits. The rest of the last one is in its result.
        """
        backoff = Backoff(PAUSE_MIN_S, PAUSE_MAX_S)
        loop = asyncio.get_running_loop()
        welcome = self._client.welcome
        if welcome is not None and "logs" not in welcome.features:  # an older server: all output comes with the result
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
                if self._beside is not None and answer.complete is None:  # the worker's server became known just now
                    continue
                return
            if loop.time() - asked_at >= PAUSE_MAX_S:  # the worker has waited before it answered
                backoff.reset()
            await asyncio.wait({ending}, timeout=backoff.next_s())

    async def _ask(self, ending: Ending | None) -> _Answer | None:
        """Return the answer to the next request; None: ask again, or the job has ended meanwhile."""
        beside, measuring = self._beside, self._tail_bytes is not None
        params = {
            "job_id": self.job_id,
            "stream": self.stream,
            "offset": 0 if measuring else self.offset,
            "attempt": self.attempt,
            "wait_s": 0.0 if ending is None or measuring else self._wait_s,
            "max_bytes": 1 if measuring else LOG_PIECE_MAX_BYTES,
        }
        asking = asyncio.ensure_future((beside or self._client).call("logs", **params))
        waited_for = {asking} if ending is None else {asking, ending}
        timeout_s = None if beside is None else BESIDE_LOOK_S
        try:
            # For the answer, the job's end, or the loss of the other server. The client itself reconnects and asks again.
            while not any(one.done() for one in waited_for) and (beside is None or beside.connected):
                await asyncio.wait(waited_for, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                await self.close()
                return None
            answer = msgspec.convert(asking.result(), _Answer)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"the server's answer about the log cannot be read: {error}") from None
        except Overloaded:  # this client has many questions open
            await asyncio.sleep(PAUSE_MAX_S)
            return None
        except TasukiError:
            if beside is None:
                raise
            await self.close()
            return None
        finally:
            asking.cancel()
        if beside is not None and answer.complete is None:  # the worker has moved
            await self.close()
        elif answer.elsewhere and beside is None:
            await self._connect_beside(answer.elsewhere)
        progress = (answer.progress, answer.progress_text)
        if progress != self._progress:
            self._progress = progress
            if answer.progress is not None and self._on_progress is not None:
                self._on_progress(answer.progress, answer.progress_text)
        return answer

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

    # ------------------------------------------------------------------------------------------------ the worker's server

    async def _connect_beside(self, urls: list[str]) -> None:
        """Connect to the worker's server. If that fails, the client's own server is asked again after the pause."""
        for url in urls:
            beside = self._client.beside(url, BESIDE_CONNECT_S)
            if beside is None:
                continue
            try:
                await beside.open()
            except TasukiError:  # of no use to the reader of a log: the result has the output that is missed now
                continue
            self._beside = beside
            return

    # ------------------------------------------------------------------------------------------------ after its end

    async def _ended_with(self) -> JobResult | None:
        """Return the end of the latest attempt by the job's row; None: it has no result, or another attempt runs."""
        [view] = await self._client.call("get", job_ids=[self.job_id], result=True)
        outcome = view["outcome"]
        if outcome is None:
            return None
        ref = BlobRef(outcome["result_sha256"], outcome["result_bytes"]) if outcome["result_is_blob"] else None
        left = Outcome(error_code=outcome["error_code"], result=outcome["result"], result_ref=ref, meta=outcome["meta"])
        return JobResult(self.job_id, State(view["state"]), view["attempt"], left)

    async def _rest(self, ended: JobResult) -> AsyncIterator[LogPart]:
        if self._rest_of >= ended.attempt or self.stream == PROGRESS_STREAM:  # no result has it
            return
        if ended.outcome.result is None and ended.outcome.result_ref is None:
            traceback = ended.outcome.meta.get("traceback")
            if self.stream == "stderr" and isinstance(traceback, str):
                for part in self._rest_of_attempt(ended.attempt, io.BytesIO(traceback.encode()), _CutLog(0, 0, 0)):
                    yield part
            return
        with tempfile.TemporaryDirectory(prefix="tasuki-logs-") as folder:
            path = Path(folder) / "result.zip"
            await self._client.save_result(ended, path)
            if not await asyncio.to_thread(zipfile.is_zipfile, path):
                if self.attempt:  # its output was read while it ran
                    return
                raise NotFound(f"job {self.job_id!r} has no logs: a handler's and an app's result has none")
            async for part in self.rest_in(path, ended.attempt):
                yield part

    async def rest_in(self, path: Path, attempt: int) -> AsyncIterator[LogPart]:
        """Yield the output of this attempt that was not read yet; `path` is the ZIP of its result."""
        if attempt < self.attempt or self._rest_of >= attempt:
            return
        kept, cut = await asyncio.to_thread(unpack_log, path, self.stream)
        with kept:
            for part in self._rest_of_attempt(attempt, kept, cut):
                yield part

    def _rest_of_attempt(self, attempt: int, kept: BinaryIO, cut: _CutLog) -> Iterator[LogPart]:
        if attempt > self.attempt:
            self._begin(attempt)
        self._rest_of = attempt
        for part in self._parts_of(kept, cut):
            self.offset = part.offset + len(part.data)
            yield part

    def _parts_of(self, kept: BinaryIO, cut: _CutLog) -> Iterator[LogPart]:
        """Yield the rest of a log. `kept` is its head, a line that marks the gap, and its tail; offsets count the gap."""
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


def _report_of(line: bytes) -> Progress:
    try:
        told = msgspec.json.decode(line, type=dict[str, Any])
        return Progress.of(told["fraction"], told["text"])
    except (msgspec.DecodeError, KeyError, TypeError, InvalidInput) as error:
        raise ProtocolError(f"a report of progress cannot be read: {error}") from None


def unpack_log(path: Path, stream: str) -> tuple[BinaryIO, _CutLog]:
    """Return one log of a result, and its gap. The archive came from a worker, and nothing in it is trusted."""
    report = bytearray()
    kept = cast(BinaryIO, tempfile.SpooledTemporaryFile(SPOOL_BYTES))  # noqa: SIM115 - closed by the caller
    try:
        with path.open("rb") as source:
            archive = ZipReader(source)
            for entry in archive.entries:
                if entry.name == f"{stream}.log":
                    archive.unpack(entry, kept.write)
                elif entry.name == "result.json" and entry.size_bytes <= REPORT_MAX_BYTES:
                    archive.unpack(entry, report.extend)
        return kept, _cut_of(bytes(report), stream, kept.seek(0, os.SEEK_END))
    except BaseException:
        kept.close()
        raise


def _cut_of(report: bytes, stream: str, size_bytes: int) -> _CutLog:
    """Return the gap in a log of this size by result.json; no gap if the numbers cannot be true."""
    whole = _CutLog(size_bytes, 0, 0)
    try:
        cut = msgspec.json.decode(report, type=_Report).cut_logs.get(stream, whole)
    except msgspec.DecodeError:
        return whole
    numbers = (cut.head_bytes, cut.cut_bytes, cut.tail_bytes)
    return cut if min(numbers) >= 0 and cut.head_bytes + cut.tail_bytes <= size_bytes else whole
