"""Logs of a project's jobs as rows of the database: output of commands while they run, tracebacks of tasks.

A log never decides an outcome: what cannot be written is missing, and the job goes on.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from tasuki.django.conf import project_settings
from tasuki.django.models import JobRun, LogChunk


class StoredLog(NamedTuple):
    """A part of a log: attempt, position in its stream, bytes."""

    attempt: int
    offset: int
    data: bytes


def write_log(job_id: str, attempt: int, stream: str, data: bytes, offset: int = 0) -> JobRun:
    """Add a part to the log of a job, and return the job's row."""
    alias = project_settings().database
    row = JobRun.objects.using(alias).get(idempotency_key=job_id)
    chunk = {"attempt": attempt, "stream": stream, "offset": offset, "at": time.time(), "data": zlib.compress(data)}
    LogChunk.objects.using(alias).create(job=row, **chunk)
    return row


def read_log(job_id: str, stream: str, *, after: int = 0) -> Iterator[StoredLog]:
    """Yield the parts of a stream of a job in the order of attempts and positions."""
    rows = LogChunk.objects.using(project_settings().database).filter(job__idempotency_key=job_id, stream=stream, id__gt=after)
    for row in rows.order_by("attempt", "offset", "id"):
        yield StoredLog(row.attempt, row.offset, zlib.decompress(bytes(row.data)))
