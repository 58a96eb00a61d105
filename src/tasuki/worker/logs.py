"""A job's output while it runs: stdout and stderr with a size limit, their followers, and its progress.

A pipe would block the job when the worker hangs, and RLIMIT_FSIZE would hit its outputs too. So the job appends to a file
(O_APPEND), whose size is checked every LOOK_S. The bytes between the head and the tail are given back to the disk by a hole in
the file: nothing moves, the job continues at the end, and a byte's position in the file is its offset in the stream. Where the
file system has no holes the file is truncated to its head instead, and the tail is kept in memory; bytes that the job writes in
the microseconds of that truncation are lost and not counted.

While space is given back, about 0.2 s for a GB, the job's next write waits. So a log that grows fast is left alone until it
rests, or has POSTPONED_BYTES too many, or the disk has little room. Between two checks a job can write as much as the disk
takes in that time, some hundred MB at worst.

An *offset* is always one in the stream that the job wrote, whatever was cut of it. Followers ask for pieces by offset; nothing is
sent unasked. Progress is a line `progress 0.4 text` that a job writes to the descriptor named in TASUKI_PROGRESS_FD.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from tasuki.core.job import Progress
from tasuki.core.protocol import LOG_PIECE_MAX_BYTES, LOG_WAIT_MAX_S, PROGRESS_STREAM, LogPiece, ReadLog
from tasuki.errors import ConfigError
from tasuki.worker.linux_calls import punch_hole

HEAD_BYTES = 16 * 1024 * 1024 - 64 * 1024
TAIL_BYTES = 64 * 1024
CAP_MAX_BYTES = 256 * 1024 * 1024  # of a kept log: it is in memory once, while the result is made
SLACK_BYTES = 1024 * 1024  # allowed on disk beyond the tail before the next hole
POSTPONED_BYTES = 1024 * 1024 * 1024
FAST_BYTES = 32 * 1024 * 1024  # of growth between two checks
ROOMY_BYTES = 8 * POSTPONED_BYTES  # free on the disk; with less nothing is postponed
LOOK_S = 0.25
FOLLOW_S = 0.1
CUT_S = 1.0
WAITING_MAX = 64  # questions of one server, which itself sends fewer at a time
PROGRESS_VARIABLE = "TASUKI_PROGRESS_FD"
PROGRESS_READ_BYTES = 4 * 1024  # several lines of the greatest length
PROGRESS_TRUNCATE_BYTES = 64 * 1024
PROGRESS_KEPT_BYTES = 16 * 1024  # of each attempt, for followers that come later
_PROGRESS_WORD = "progress"
_OPEN_LOG = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_APPEND | os.O_CLOEXEC
_NO_HOLES = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

logger = logging.getLogger(__name__)


class LogCaps(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a log that are kept if it is longer than both together."""

    head_bytes: int = HEAD_BYTES
    tail_bytes: int = TAIL_BYTES

    def __post_init__(self) -> None:
        if self.head_bytes < 0 or self.tail_bytes < 0 or not 0 < self.cap_bytes <= CAP_MAX_BYTES:
            raise ConfigError(
                f"a log's head and tail must be 0 bytes or more, and 1 to {CAP_MAX_BYTES} together, "
                f"got {self.head_bytes} and {self.tail_bytes}"
            )

    @property
    def cap_bytes(self) -> int:
        return self.head_bytes + self.tail_bytes


DEFAULT_CAPS = LogCaps()


class LogRead(NamedTuple):
    """A piece of a log. `offset` is where the data begins: behind the requested one if the bytes there were cut."""

    offset: int
    data: bytes


class ReadableLog(Protocol):
    """A log that grows, as its readers see it."""

    def read(self, offset: int, max_bytes: int) -> LogRead: ...

    def size_bytes(self) -> int: ...


class KeptLog(NamedTuple):
    """The kept parts of a log that has ended."""

    head: bytes
    cut_bytes: int = 0
    tail: bytes = b""

    @property
    def text(self) -> bytes:
        """The whole text, with a line where bytes are missing."""
        return b"%s\n[tasuki: %d bytes were cut here]\n%s" % self if self.cut_bytes else self.head


class CappedLog:
    """One log file. Held by its descriptor: a job may remove or replace the name.

    `trim` may run in another thread than `read`, which needs no lock: it notices a change that came meanwhile.
    """

    def __init__(self, path: Path | str, caps: LogCaps = DEFAULT_CAPS, *, holes: bool = True) -> None:
        self._caps = caps
        self._holes = holes
        self._gap_end = caps.head_bytes  # offset of the first byte that is kept behind the head
        self._shift = 0
        """Difference between the offset of a byte behind the head and its position in the file: the bytes that were truncated."""
        self._remembered = b""  # the bytes before the end of the last truncation
        self._changes = 0  # odd while `trim` runs
        self._last_bytes = 0  # size of the file at the last check
        self.descriptor = os.open(path, _OPEN_LOG, 0o600)

    def size_bytes(self) -> int:
        """Return the number of bytes written so far: the offset of the next byte."""
        return os.fstat(self.descriptor).st_size + self._shift

    def due(self) -> bool:
        """Return whether there is space to give back now. Called at every check."""
        in_file = os.fstat(self.descriptor).st_size
        grown, self._last_bytes = in_file - self._last_bytes, in_file
        excess = self._excess(in_file)
        if excess <= 0 or grown < FAST_BYTES or excess >= POSTPONED_BYTES:
            return excess > 0
        room = os.fstatvfs(self.descriptor)
        return room.f_bavail * room.f_frsize < ROOMY_BYTES

    def _excess(self, in_file: int) -> int:
        """Return how many bytes `trim` would give back; below 0 if that is not worth it."""
        if in_file <= self._caps.cap_bytes:
            return 0
        kept_bytes = self._gap_end + self._caps.tail_bytes + SLACK_BYTES if self._holes else self._caps.cap_bytes
        return in_file - kept_bytes

    def trim(self) -> None:
        """Give the space of bytes that are not kept back to the disk, if that is worth it."""
        if self._excess(os.fstat(self.descriptor).st_size) <= 0:
            return
        self._changes += 1
        try:
            if self._holes:
                self._punch()
            if not self._holes:
                self._cut_back()
        finally:
            self._changes += 1

    def _punch(self) -> None:
        head_bytes = self._caps.head_bytes
        end = self.size_bytes() - self._caps.tail_bytes
        try:
            punch_hole(self.descriptor, head_bytes, end - head_bytes)
        except OSError as error:
            if error.errno not in _NO_HOLES:
                raise
            self._holes = False
        else:
            self._gap_end = end

    def _cut_back(self) -> None:
        caps, place = self._caps, os.fstat(self.descriptor).st_size
        in_file = min(caps.tail_bytes, place - caps.head_bytes)
        self._remembered = (self._remembered + os.pread(self.descriptor, in_file, place - in_file))[-caps.tail_bytes :]
        os.ftruncate(self.descriptor, caps.head_bytes)
        self._shift += place - caps.head_bytes
        self._gap_end = caps.head_bytes + self._shift - len(self._remembered)

    def read(self, offset: int, max_bytes: int) -> LogRead:
        """Return the bytes from this offset on, or from the next that is kept; none while `trim` runs."""
        before, head_bytes, start = self._changes, self._caps.head_bytes, offset
        if before & 1:
            return LogRead(offset, b"")
        if head_bytes <= offset < self._gap_end:
            start = self._gap_end
        if start < head_bytes:
            if self._gap_end > head_bytes:
                max_bytes = min(max_bytes, head_bytes - start)
            data = os.pread(self.descriptor, max_bytes, start)
        elif start < head_bytes + self._shift:
            data = self._remembered[start - self._gap_end :][:max_bytes]
        else:
            data = os.pread(self.descriptor, max_bytes, start - self._shift)
        return LogRead(start, data) if self._changes == before else LogRead(offset, b"")

    def kept(self) -> KeptLog:
        """Return the kept parts. A log that cannot be read has that as its text, and fails nothing."""
        try:
            size_bytes, caps = self.size_bytes(), self._caps
            if size_bytes <= caps.cap_bytes and not self._shift:
                return KeptLog(self._read_all(0, size_bytes))
            head = self._read_all(0, caps.head_bytes)
            tail = self._read_all(max(self._gap_end, size_bytes - caps.tail_bytes), size_bytes)
            return KeptLog(head, size_bytes - len(head) - len(tail), tail)
        except OSError as error:
            logger.warning("a log cannot be read: %s", error)
            return KeptLog(b"[tasuki: this log could not be read: %s]\n" % (error.strerror or "").encode())

    def _read_all(self, start: int, end: int) -> bytes:
        pieces = []
        while start < end and (piece := self.read(start, end - start).data):
            pieces.append(piece)
            start += len(piece)
        return b"".join(pieces)

    def close(self) -> None:
        os.close(self.descriptor)


class LogWatch:
    """Checks the logs and the progress of one job while its `with` block lasts."""

    def __init__(self, logs: Sequence[CappedLog], progress: ProgressFile | None = None, look_s: float = LOOK_S) -> None:
        self._logs = logs
        self._progress = progress
        self._look_s = look_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._trimming: asyncio.Future[None] | None = None

    async def __aenter__(self) -> LogWatch:
        self._timer = self._loop.call_later(self._look_s, self._look)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._trimming is not None:
            await self._trimming

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._look_s, self._look)
        if self._progress is not None:
            self._progress.look()
        due = [log.due() for log in self._logs]
        if any(due) and (self._trimming is None or self._trimming.done()):
            self._trimming = self._loop.run_in_executor(None, self._trim)

    def _trim(self) -> None:
        for log in self._logs:
            try:
                log.trim()
            except OSError as error:  # not the job's fault; the next check tries again
                logger.warning("a log cannot be cut: %s", error)


# ---------------------------------------------------------------------------------------------------- followers


class _WaitingRead(msgspec.Struct):
    question: ReadLog
    until: float


class ProgressLog:
    """The reports of progress of one attempt as a log, a line of JSON each; the latest are kept."""

    def __init__(self) -> None:
        self._start = 0
        self._lines = b""
        self.latest: Progress | None = None

    def note(self, progress: Progress) -> None:
        self.latest = progress
        self._lines += msgspec.json.encode({"fraction": progress.fraction, "text": progress.text}) + b"\n"
        if len(self._lines) > PROGRESS_KEPT_BYTES:
            cut = self._lines.index(b"\n", len(self._lines) - PROGRESS_KEPT_BYTES // 2) + 1
            self._start, self._lines = self._start + cut, self._lines[cut:]

    def read(self, offset: int, max_bytes: int) -> LogRead:
        start = max(offset, self._start)
        return LogRead(start, self._lines[start - self._start :][:max_bytes])

    def size_bytes(self) -> int:
        return self._start + len(self._lines)


class LogFollow:
    """The logs of a worker's attempts, as followers read them. `send` reaches the server that asked, if it is connected."""

    def __init__(self, send: Callable[[LogPiece], None]) -> None:
        self._send = send
        self.progress: dict[str, ProgressLog] = {}
        """By lease: of attempts that report their progress."""
        self._logs: dict[str, Mapping[str, ReadableLog]] = {}
        self._waiting: list[_WaitingRead] = []
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def of(self, lease_id: str, logs: Mapping[str, ReadableLog]) -> Iterator[None]:
        """Let these logs be read while the block lasts; at its end waiting readers get the rest, or learn that there is none."""
        self._logs[lease_id] = logs
        try:
            yield
        finally:
            self._end(lease_id)
            self._logs.pop(lease_id, None)

    def progress_of(self, lease_id: str) -> ProgressLog:
        """Return the log of the attempt's progress, which `end_progress` has to end."""
        return self.progress.setdefault(lease_id, ProgressLog())

    def end_progress(self, lease_id: str) -> Progress | None:
        """Let waiting readers have the rest of an attempt's progress; return its last report."""
        if lease_id not in self.progress:
            return None
        self._end(lease_id)
        return self.progress.pop(lease_id).latest

    def _end(self, lease_id: str) -> None:
        waiting = [one for one in self._waiting if one.question.lease_id == lease_id]
        self._waiting = [one for one in self._waiting if one.question.lease_id != lease_id]
        for one in waiting:
            self._send(self._answer(one.question, over=True))

    def ask(self, question: ReadLog) -> None:
        """Answer now, or when there are bytes, but not later than the question says."""
        piece = self._answer(question)
        wait_s = question.wait_s if 0.0 < question.wait_s <= LOG_WAIT_MAX_S else 0.0
        if piece.end > question.offset:  # there are bytes, but the log is being trimmed
            wait_s = max(wait_s, CUT_S)
        if piece.data or piece.ended or not wait_s or len(self._waiting) >= WAITING_MAX:
            self._send(piece)
            return
        self._waiting.append(_WaitingRead(question, asyncio.get_running_loop().time() + wait_s))
        self._look_soon()

    def open_logs(self) -> dict[str, Mapping[str, ReadableLog]]:
        """Return the logs that can be read now, by lease and stream."""
        return dict(self._logs)

    def forget(self) -> None:
        """Drop all questions: the connection is gone."""
        self._waiting.clear()

    def _look_soon(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(FOLLOW_S, self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            piece = self._answer(one.question)
            if piece.data or piece.ended or now >= one.until:
                self._send(piece)
            else:
                self._waiting.append(one)
        self._look_soon()

    def _answer(self, question: ReadLog, *, over: bool = False) -> LogPiece:
        log: ReadableLog | None = self._logs.get(question.lease_id, {}).get(question.stream)
        if question.stream == PROGRESS_STREAM:
            log = self.progress.get(question.lease_id)
        offset = question.offset
        if log is None or offset < 0:
            return LogPiece(question.msg_id, offset, b"", offset, offset, ended=True)
        try:
            start, data = log.read(offset, max(1, min(question.max_bytes, LOG_PIECE_MAX_BYTES)))
            end = log.size_bytes()
        except OSError as error:
            logger.warning("the %s of lease %s cannot be read: %s", question.stream, question.lease_id, error)
            return LogPiece(question.msg_id, offset, b"", offset, offset, ended=True)
        following = start + len(data)
        if not data:  # without new bytes it is not known whether any are missing
            start = following = offset
        return LogPiece(question.msg_id, start, data, following, end, start - offset, over and following >= end)


# ---------------------------------------------------------------------------------------------------- progress


def parse_progress(line: bytes, mask: Callable[[str], str] = str) -> Progress | None:
    """Return the progress in a line, or None. `mask` gets the text before it is cut: half a secret is one too."""
    word, _, rest = line.decode("utf-8", "replace").strip().partition(" ")
    number, _, text = rest.strip().partition(" ")
    try:
        fraction = float(number)
    except ValueError:
        return None
    if word != _PROGRESS_WORD or not 0.0 <= fraction <= 1.0:  # NaN is not either
        return None
    return Progress.of(fraction, mask(text.strip()))


class ProgressFile:
    """The progress file of one attempt. `tell` receives new progress, with secrets masked. Errors never fail the attempt."""

    def __init__(self, path: Path | str, tell: Callable[[Progress], None], mask: Callable[[str], str] = str) -> None:
        self._descriptor = os.open(path, _OPEN_LOG, 0o600)
        self._tell = tell
        self._mask = mask
        self._seen_bytes = 0
        self._latest: Progress | None = None
        self.malformed = 0  # number of lines that were read and are not progress

    def look(self) -> None:
        """Read the lines since the last call."""
        try:
            found = self._read()
        except OSError as error:
            logger.debug("progress cannot be read: %s", error)
            return
        if found is not None and found != self._latest:
            self._latest = found
            self._tell(found)

    def _read(self) -> Progress | None:
        size_bytes = os.fstat(self._descriptor).st_size
        if size_bytes < self._seen_bytes:  # the job has emptied it
            self._seen_bytes = 0
        if size_bytes == self._seen_bytes:
            return None
        start = max(self._seen_bytes, size_bytes - PROGRESS_READ_BYTES)
        data = os.pread(self._descriptor, PROGRESS_READ_BYTES, start)
        complete, newline, unfinished = data.rpartition(b"\n")
        lines = complete.split(b"\n") if newline else []
        if start > self._seen_bytes:
            lines = lines[1:]  # cut off at its beginning
        self._seen_bytes = start + len(data) - len(unfinished) if len(unfinished) < PROGRESS_READ_BYTES else size_bytes
        if size_bytes > PROGRESS_TRUNCATE_BYTES:
            os.ftruncate(self._descriptor, 0)
            self._seen_bytes = 0
        found = [parse_progress(line, self._mask) for line in lines if line.strip()]
        valid = [progress for progress in found if progress is not None]
        self.malformed += len(found) - len(valid)
        return valid[-1] if valid else None

    def close(self) -> None:
        os.close(self._descriptor)
