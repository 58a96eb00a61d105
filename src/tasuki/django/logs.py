"""Logs of a project's jobs as rows of the database: output of commands while they run, tracebacks of tasks.

Old ones are in the archive (`log_archive`); those who read see no difference.

A log never decides an outcome: what cannot be written is missing, and the job continues.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from django.db import Error, connections

from tasuki.django.conf import project_settings
from tasuki.django.log_archive import archived_log
from tasuki.django.models import JobRun, LogChunk
from tasuki.errors import TasukiError
from tasuki.worker.attempt import Attempt
from tasuki.worker.logs import LogFollow, ReadableLog

logger = logging.getLogger("tasuki.django")
ERRORS = "errors"
"""Stream of the exceptions of a task: the class and the traceback of each attempt that raised, as JSON."""
CHUNK_BYTES = 64 * 1024
TAIL_ROWS = 16  # read at once for the end of a log
HEAD_BYTES = 1024 * 1024
TAIL_BYTES = 64 * 1024
ARCHIVED = 0  # in place of the id of a row: the part is in the archive
WRITE_TIMEOUT_S = 10.0  # the end of a job waits so long for its log


class StoredLog(NamedTuple):
    """A part of a log: attempt, position in its stream, bytes; and the id of its row."""

    attempt: int
    offset: int
    data: bytes
    row_id: int


def write_log(job_id: str, attempt: int, stream: str, data: bytes, offset: int = 0) -> JobRun:
    """Add a part to the log of a job, and return the job's row."""
    alias = project_settings().database
    row = JobRun.objects.using(alias).get(idempotency_key=job_id)
    chunk = {"attempt": attempt, "stream": stream, "offset": offset, "at": time.time(), "data": zlib.compress(data)}
    LogChunk.objects.using(alias).create(job=row, **chunk)
    return row


def read_log(job_id: str, stream: str, *, after: int = ARCHIVED - 1) -> list[StoredLog]:
    """Return the parts of a stream of a job in the order of attempts and positions, those in the archive too.

    `after`: only rows with a higher id; the row of what is archived is ARCHIVED. Raises the error of an archive that does not
    answer.
    """
    alias = project_settings().database
    rows = LogChunk.objects.using(alias).filter(job__idempotency_key=job_id, stream=stream, id__gt=after)
    # Rows first: parts that are archived between the two looks are found twice, and never not at all.
    found = {(row.attempt, row.offset): StoredLog(row.attempt, row.offset, _plain(row), row.pk) for row in rows.order_by("id")}
    if after < ARCHIVED:
        for part in archived_log(alias, job_id):
            if part.stream == stream:
                found.setdefault((part.attempt, part.offset), StoredLog(part.attempt, part.offset, part.data, ARCHIVED))
    return sorted(found.values())


def _plain(row: LogChunk) -> bytes:
    return zlib.decompress(bytes(row.data))


def log_bytes(job_id: str, stream: str) -> Iterator[bytes]:
    """Yield a stream of a job for people: attempts are told apart, and gaps, where output was not kept, are marked."""
    try:
        parts = read_log(job_id, stream)
    except TasukiError as error:
        yield f"── the archived log cannot be read now: {error.message} ──\n".encode()
        parts = read_log(job_id, stream, after=ARCHIVED)
    yield from _shown(parts, stream)


def log_tail(job_id: str, stream: str, max_bytes: int) -> tuple[bytes, bool]:
    """Return the end of what `log_bytes` yields, and whether there is more before it. A long log is read from its end."""
    rows = LogChunk.objects.using(project_settings().database).filter(job__idempotency_key=job_id, stream=stream)
    places = list(rows.order_by("-attempt", "-offset").values_list("id", flat=True))
    parts: list[StoredLog] = []
    size_bytes = 0
    for start in range(0, len(places), TAIL_ROWS):
        found = rows.filter(id__in=places[start : start + TAIL_ROWS])
        parts += sorted((StoredLog(row.attempt, row.offset, _plain(row), row.pk) for row in found), reverse=True)
        size_bytes = sum(len(part.data) for part in parts)
        if size_bytes > max_bytes:
            return b"".join(_shown(parts[::-1], stream))[-max_bytes:], True
    data = b"".join(log_bytes(job_id, stream))  # it is short, or a part of it is in the archive
    return data[-max_bytes:], len(data) > max_bytes


def _shown(parts: Iterable[StoredLog], stream: str) -> Iterator[bytes]:
    attempt, offset = None, 0
    for part in parts:
        if part.attempt != attempt:
            yield f"── attempt {part.attempt} ──\n".encode() if attempt is not None else b""
            attempt, offset = part.attempt, part.offset
        if part.offset > offset:
            yield f"\n── {part.offset - offset} bytes were not kept ──\n".encode()
        offset = part.offset + len(part.data)
        yield json.loads(part.data)[1].encode() if stream == ERRORS else part.data


# ---------------------------------------------------------------------------------------------------- in the node


class _NewLog(NamedTuple):
    lease_id: str
    stream: str
    offset: int
    data: bytes


class KeptLogFollow(LogFollow):
    """The logs of running commands, of which new bytes are also taken for the database: HEAD_BYTES, and TAIL_BYTES at the end."""

    def __init__(self, send: object) -> None:
        super().__init__(send)  # type: ignore[arg-type]
        self._taken: dict[tuple[str, str], int] = {}
        self._rest: dict[str, list[_NewLog]] = {}

    @contextmanager
    def of(self, lease_id: str, logs: Mapping[str, ReadableLog]) -> Iterator[None]:
        with super().of(lease_id, logs):
            try:
                yield
            finally:
                self._rest[lease_id] = list(self._new(lease_id, logs, ended=True))

    def take_new(self) -> list[_NewLog]:
        """Return the bytes that came since the last call."""
        return [one for lease_id, logs in self.open_logs().items() for one in self._new(lease_id, logs, ended=False)]

    def take_rest(self, lease_id: str) -> list[_NewLog]:
        """Return the last bytes of an attempt that has ended."""
        for stream in ("stdout", "stderr"):
            self._taken.pop((lease_id, stream), None)
        return self._rest.pop(lease_id, [])

    def _new(self, lease_id: str, logs: Mapping[str, ReadableLog], *, ended: bool) -> Iterator[_NewLog]:
        for stream, log in logs.items():
            size = log.size_bytes()
            offset = self._taken.get((lease_id, stream), 0)
            ends = [min(size, HEAD_BYTES), size] if ended else [min(size, HEAD_BYTES)]
            for end in ends:
                if end > HEAD_BYTES:
                    offset = max(offset, end - TAIL_BYTES)
                while offset < end:
                    start, data = log.read(offset, min(CHUNK_BYTES, end - offset))
                    if not data:  # it is being cut at this moment
                        break
                    yield _NewLog(lease_id, stream, start, data)
                    offset = start + len(data)
            self._taken[lease_id, stream] = offset


class LogWriter:
    """Writes logs into the database, on a thread with a connection of its own, which is open only while there is something."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tasuki-logs")
        self._problem = ""

    async def write(self, new: Iterable[_NewLog], attempts: Mapping[str, Attempt]) -> None:
        """Write the parts of these attempts, by lease. What cannot be written is lost, and logged."""
        parts = [(attempts[one.lease_id], one) for one in new if one.lease_id in attempts]
        if not parts:
            return
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await asyncio.get_running_loop().run_in_executor(self._thread, self._write, parts)
        except (Error, TimeoutError) as error:
            if str(error) != self._problem:
                logger.warning("logs cannot be stored: %s", error or "no answer in time")
            self._problem = str(error)

    def _write(self, parts: list[tuple[Attempt, _NewLog]]) -> None:
        names = {attempt.spec.job_id for attempt, _ in parts}
        try:
            rows = dict(JobRun.objects.using(self._alias).filter(idempotency_key__in=names).values_list("idempotency_key", "id"))
            chunks = [
                LogChunk(
                    job_id=rows[attempt.spec.job_id],
                    attempt=attempt.attempt,
                    stream=one.stream,
                    offset=one.offset,
                    at=time.time(),
                    data=zlib.compress(one.data),
                )
                for attempt, one in parts
                if attempt.spec.job_id in rows
            ]
            LogChunk.objects.using(self._alias).bulk_create(chunks)
        finally:
            connections[self._alias].close()

    def close(self) -> None:
        self._thread.shutdown(wait=False)  # the database may not answer
