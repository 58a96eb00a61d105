"""The archive of old logs: after `log_retention_days_db` the parts of a run's log become one compressed object in the blob store.

    parts in LogChunk ─► pack ─► place the blob ─► write its bytes ─► note them as stored
    ─► one transaction, under the leader's epoch: the run refers to the blob (JobBlob, log_ref), and the parts are deleted

The bytes are durable before the run refers to them, and the parts are there until it does: whoever is killed in between leaves a
log in the database, and a blob that nothing refers to. The next try packs the same bytes, which have the same name, and
collection removes what is never referred to. A place that does not answer leaves everything in the database, and is tried again.

A run that ran again after its log was archived gets one object with both. Runs that have not ended stay in the database.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import msgspec
import zstandard
from django.conf import settings
from django.db import Error, connections

from tasuki.blobs.blob import BlobStore
from tasuki.blobs.open_blobs import open_blobs
from tasuki.core.backoff import Backoff
from tasuki.core.decoding import decodable
from tasuki.core.job import BlobRef, State
from tasuki.core.lifecycle import BLOB_GRACE_S
from tasuki.core.store_messages import BlobClaim, CondemnOrder
from tasuki.django.conf import file_of, project_settings
from tasuki.django.models import Blob, JobBlob, JobRun, LogChunk
from tasuki.errors import Corrupt, NotFound, StaleEpoch, TasukiError, TooLarge
from tasuki.stores.sql.store import SqlStore
from tasuki.wire.compression import ZSTD, decompress

logger = logging.getLogger("tasuki.django")
INTERVAL_S = 10.0
STEP_RUNS = 16  # that are archived in one step
STEP_PARTS = 2_000  # that one step looks at, the oldest first; the next one continues where it stopped
LOG_MAX_BYTES = 64 * 1024 * 1024  # of one run, in memory while it is archived or read; a longer log stays in the database
RETRY_S = 2.0  # of one request to a bucket: a page waits for it
RETRY_MAX_S = 300.0
DAY_S = 86_400.0
FOLDER = "tasuki-logs"
FAULT_POINTS = (
    "archive.packed",
    "archive.placed",
    "archive.written",
    "archive.stored",
    "archive.referred",
    "turn.before_commit",
    "archive.recorded",
)
"""Points at which `fault` is called while one log is archived, so that a test can end the process exactly there."""
_ENDED = [state.value for state in State if state.terminal]


class ArchivedPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of a log, as LogChunk has it, uncompressed."""

    attempt: int
    stream: str
    offset: int
    at: float
    data: bytes


@decodable
class _Archive(msgspec.Struct, frozen=True, array_like=True):
    job_id: str
    """Id of the run, which makes the object its own: two runs never have equal bytes."""
    parts: list[ArchivedPart]


def pack(job_id: str, parts: list[ArchivedPart]) -> bytes:
    """Return the object of a run's log: msgpack, compressed by zstd. Equal parts give equal bytes."""
    return zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(_Archive(job_id, parts)))


def unpack(data: bytes) -> list[ArchivedPart]:
    """Return the parts in an object."""
    return msgspec.msgpack.decode(decompress(data, ZSTD, 2 * LOG_MAX_BYTES), type=_Archive).parts


def archive_place() -> str:
    """Return the place of old logs: `TASUKI["blobs"]`, else `TASUKI["log_archive"]`, else a folder of the project."""
    project = project_settings()
    if project.blobs or project.log_archive:
        return project.blobs or project.log_archive
    beside = file_of(project.database).parent if connections[project.database].vendor == "sqlite" else None
    return str((beside or Path(getattr(settings, "BASE_DIR", "."))).resolve() / FOLDER)


@lru_cache(4)
def _opened(place: str) -> BlobStore:
    return open_blobs(place, max_blob_bytes=2 * LOG_MAX_BYTES, floor_free_bytes=0, retry_s=RETRY_S)


def archived_log(alias: str, job_id: str) -> list[ArchivedPart]:
    """Return the parts of a job's log that are in the archive. NotFound, Unavailable: they cannot be read now."""
    references = JobBlob.objects.using(alias).filter(job__idempotency_key=job_id, role="log")
    for sha256 in references.values_list("sha256", flat=True):
        generation = Blob.objects.using(alias).filter(sha256=sha256, condemned=0).values_list("generation", flat=True).first()
        return unpack(_opened(archive_place()).read_bytes(sha256, 2 * LOG_MAX_BYTES, generation or 0))
    return []


class LogArchive:
    """Moves old logs, a bounded number at a time, on the connection of the calling thread."""

    def __init__(self, alias: str, fault: Callable[[str], None] | None = None) -> None:
        self._alias = alias
        self._fault = fault or (lambda point: None)
        self._store = SqlStore.in_django(alias, fault=fault)
        self._after = 0
        """Id of the last part that was looked at."""

    def step(self, *, days: float, epoch: int) -> tuple[int, bool]:
        """Archive the logs of some runs that ended so long ago; return how many, and whether there may be more at once.

        StaleEpoch: another node leads. Errors of the place of the archive are raised, and the log stays where it is.
        """
        before = self._store.clock.wall() - days * DAY_S
        found = LogChunk.objects.using(self._alias).filter(id__gt=self._after, at__lt=before).order_by("id")
        parts = list(found.values_list("id", "job_id")[:STEP_PARTS])
        jobs = list(dict.fromkeys(job_id for _, job_id in parts))
        rows = {row.pk: row for row in JobRun.objects.using(self._alias).filter(id__in=jobs).defer("spec", "result")}
        moved = 0
        for part_id, job_id in parts:
            if job_id in rows and (rows[job_id].state not in _ENDED or rows[job_id].finished_at.timestamp() >= before):
                self._after = part_id
                continue
            if moved == STEP_RUNS:
                return moved, True
            if job_id in jobs:
                jobs.remove(job_id)
                moved += self._move(rows.get(job_id), job_id, epoch)
            self._after = part_id
        if len(parts) < STEP_PARTS:
            self._after = 0  # the end; runs that had not ended are looked at again
        return moved, len(parts) == STEP_PARTS

    def _move(self, row: JobRun | None, job_id: int, epoch: int) -> bool:
        chunks = LogChunk.objects.using(self._alias).filter(job_id=job_id)
        if row is None:  # deleted with its log; a worker that was slow wrote this afterwards
            return self._store.archive_log(job_id, 0, None, list(chunks.values_list("id", flat=True)), epoch=epoch)
        try:
            ids, parts = self._collect(row, chunks.order_by("attempt", "stream", "offset", "id").iterator(64))
        except (TooLarge, NotFound, Corrupt) as error:  # too long, or what was archived before is gone
            logger.warning("the log of job %s stays in the database: %s", row.job_id, error)
            return False
        data = pack(row.job_id, parts)
        self._fault("archive.packed")
        log = self._keep(data)
        if not self._store.archive_log(row.pk, row.version, log, ids, epoch=epoch):
            return False
        self._fault("archive.recorded")
        return True

    def _collect(self, row: JobRun, chunks: Iterator[LogChunk]) -> tuple[list[int], list[ArchivedPart]]:
        """Return the ids of the parts in the database, and these with those that were archived before."""
        ids: list[int] = []
        found = {(part.attempt, part.stream, part.offset): part for part in archived_log(self._alias, row.job_id)}
        size_bytes = sum(len(part.data) for part in found.values())
        for chunk in chunks:
            data = zlib.decompress(bytes(chunk.data))
            size_bytes += len(data)
            if size_bytes > LOG_MAX_BYTES:
                raise TooLarge(f"it has more than {LOG_MAX_BYTES} bytes")
            ids.append(chunk.pk)
            part = ArchivedPart(chunk.attempt, chunk.stream, chunk.offset, chunk.at.timestamp(), data)
            found[part.attempt, part.stream, part.offset] = part
        return ids, list(found.values())

    def _keep(self, data: bytes) -> BlobRef:
        """Store the bytes, durably, unless they are there, and return their reference."""
        ref = BlobRef(hashlib.sha256(data).hexdigest(), len(data))
        [place] = self._store.place_blobs([BlobClaim(ref.sha256, ref.size_bytes)])
        self._fault("archive.placed")
        if not place.stored:
            blobs = _opened(archive_place())
            with blobs.begin(ref.sha256, ref.size_bytes, place.generation) as writer:
                writer.write(data)
                writer.commit()
            self._fault("archive.written")
            self._store.blobs_stored([place])
        self._fault("archive.stored")
        return ref

    def collect(self, *, epoch: int) -> int:
        """Delete archived logs of runs that were deleted; return how many. Only where no server of the project collects blobs."""
        wall = self._store.clock.wall()
        condemned = self._store.condemn_blobs(CondemnOrder(wall - BLOB_GRACE_S, limit=STEP_RUNS), epoch=epoch)
        for place in condemned.places:
            with suppress(NotFound):
                _opened(archive_place()).delete(place.sha256, place.generation)
        return self._store.forget_blobs(condemned.places, epoch=epoch) if condemned.places else 0


class LogArchiver:
    """The archive in a node: while it leads, it moves old logs, on a thread whose connection is open only meanwhile."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._archive: LogArchive | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tasuki-log-archive")
        self._problem = ""

    async def run(self, epoch: Callable[[], int], days: Callable[[], float]) -> None:
        """Move old logs until this is canceled; `epoch` is 0 while another node leads."""
        backoff, wait_s, loop = Backoff(INTERVAL_S, RETRY_MAX_S), 0.0, asyncio.get_running_loop()
        while True:
            await asyncio.sleep(wait_s)
            wait_s = INTERVAL_S
            if not (leads := epoch()):
                continue
            try:
                more = await loop.run_in_executor(self._thread, self._step, days(), leads)
            except StaleEpoch:
                continue
            except (TasukiError, Error, OSError) as error:
                if str(error) != self._problem:
                    logger.warning("old logs stay in the database, and are tried again: %s", error)
                self._problem, wait_s = str(error), backoff.next_s()
            else:
                self._problem, wait_s = "", 0.0 if more else INTERVAL_S
                backoff.reset()

    def _step(self, days: float, epoch: int) -> bool:
        began = time.monotonic()
        try:
            self._archive = self._archive or LogArchive(self._alias)
            moved, more = self._archive.step(days=days, epoch=epoch)
            if not project_settings().blobs:
                more = bool(self._archive.collect(epoch=epoch) >= STEP_RUNS) or more
        finally:
            connections[self._alias].close()
        if moved:
            logger.info("logs of %d runs were archived in %.1f s", moved, time.monotonic() - began)
        return more

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
