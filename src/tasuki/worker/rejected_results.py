"""Results that were refused because another worker has the job now. Somebody may still want them: they are kept for a while.

`kept-aside/<job_id>-<attempt>/` in the data folder, with `result` (or `result.zip`) and `about.json`. The oldest go when they are
too old, too many or too large together. Nothing reads them but people. All of it blocks: call it on one thread.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import shutil
import tempfile
import time
from pathlib import Path

import msgspec

from tasuki.blobs.files import disk_full_as_error
from tasuki.core.ids import check_job_id
from tasuki.errors import InvalidInput
from tasuki.worker.outbox_files import OutboxRecord
from tasuki.worker.settings import ASIDE_MAX_AGE_S, ASIDE_MAX_BYTES, ASIDE_MAX_ENTRIES

FOLDER = "kept-aside"
ZIP_STARTS = b"PK\x03\x04"
_NEW = ".new-"  # no job id begins with a dot; what a kill leaves goes when it is old


class RejectedResult(msgspec.Struct, frozen=True, kw_only=True):
    """about.json"""

    job_id: str
    attempt: int
    lease_id: str
    subject: str
    ended_at: float | None
    """Unix time, on the worker's clock."""
    reason: str
    """Why it was refused."""
    error_code: str | None
    """How the attempt ended; null: it succeeded."""
    file: str
    size_bytes: int
    sha256: str | None


class RejectedResults:
    """One folder, which several workers on the same data folder may share."""

    def __init__(
        self,
        data: Path,
        *,
        max_bytes: int = ASIDE_MAX_BYTES,
        max_entries: int = ASIDE_MAX_ENTRIES,
        max_age_s: float = ASIDE_MAX_AGE_S,
    ) -> None:
        self.folder = data / FOLDER
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._max_age_s = max_age_s

    def keep(self, record: OutboxRecord, reason: str) -> Path:
        """Move or write what it has to a folder of its own; which one. The record has a result."""
        with disk_full_as_error(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = Path(tempfile.mkdtemp(prefix=_NEW, dir=self.folder))
            written = new / "result"
            result = record.result if record.result is not None else record.ending.outcome.result or b""
            if isinstance(result, Path):
                shutil.move(result, written)
            else:
                written.write_bytes(result)
            if _is_zip(written):
                written = written.rename(new / "result.zip")
            (new / "about.json").write_bytes(msgspec.json.format(msgspec.json.encode(_about(record, reason, written))) + b"\n")
            place = self._named(new, record)
        self.sweep()
        return place

    def sweep(self) -> None:
        """The oldest go, until the rest is within the limits. The newest stays, whatever its size: it was worth moving here."""
        total_bytes = 0
        oldest_at = time.time() - self._max_age_s
        for count, (at, path) in enumerate(sorted(self._entries(), reverse=True)):
            total_bytes += _size_of(path)
            too_much = count >= self._max_entries or (count > 0 and total_bytes > self._max_bytes)
            if too_much or at < oldest_at:
                shutil.rmtree(path, ignore_errors=True)

    def _entries(self) -> list[tuple[float, Path]]:
        found = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):  # another worker sweeps at the same time
                found.append((path.lstat().st_mtime, path))
        return found

    def _named(self, new: Path, record: OutboxRecord) -> Path:
        """An id may come again, after its job was removed: then the folder's name says so."""
        name = _name(record)
        for number in itertools.count(1):
            place = self.folder / (name if number == 1 else f"{name}-{number}")
            try:
                return new.rename(place)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
        raise AssertionError("numbers do not end")


def _name(record: OutboxRecord) -> str:
    """A server chose the id: it becomes a name only if it is one."""
    ending = record.ending
    try:
        job_id = check_job_id(ending.job_id)
    except InvalidInput:
        job_id = hashlib.sha256(ending.job_id.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return f"{job_id}-{ending.attempt:d}"


def _about(record: OutboxRecord, reason: str, written: Path) -> RejectedResult:
    ending = record.ending
    return RejectedResult(
        job_id=ending.job_id,
        attempt=ending.attempt,
        lease_id=ending.lease_id,
        subject=record.subject,
        ended_at=record.ended_at or None,
        reason=reason,
        error_code=ending.outcome.error_code,
        file=written.name,
        size_bytes=written.stat().st_size,
        sha256=ending.outcome.result_sha256,
    )


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(ZIP_STARTS)) == ZIP_STARTS


def _size_of(folder: Path) -> int:
    size_bytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size_bytes += path.lstat().st_size
    return size_bytes
