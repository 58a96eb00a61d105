"""From the end of a run to a server's last word on it: large results are brought first, what nobody takes is saved, what is
refused is kept aside.

Inline results pass through the machine alone; here they are seen only when they have waited for a while, or were refused. What
goes to disk does so on one thread, in order: a save before the removal that follows it.

    run ends ──► (1 MiB or more: saved) ──► brought ──► told ──► recorded: removed
                  smaller: saved after 3 s                  └──► fenced: kept aside, then removed
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import itertools
import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tasuki.blobs.files import disk_full_as_error, sync_file, sync_folder
from tasuki.core.ids import check_job_id, check_name
from tasuki.core.job import Outcome
from tasuki.core.protocol import Ending
from tasuki.core.worker.events import EndingSaved, Event, Restored
from tasuki.core.worker.machine import SAVE_AFTER_S
from tasuki.errors import DiskFull, InvalidInput, TasukiError
from tasuki.worker.attempt import StopReason, stopped_outcome, worker_failure
from tasuki.worker.transfers import WorkerTransfers

# ----------------------------------------------------------------------------------------------------
# Endings that no server has taken yet, kept on disk so that they outlive the worker's process.

OUTBOX_FOLDER = "endings"


class OutboxRecord(msgspec.Struct, frozen=True):
    """An ending, with what belongs to it beyond what a server is told."""

    ending: Ending
    subject: str = ""
    ended_at: float = 0.0
    """Unix time, on the worker's clock; 0: not known."""
    result: Path | bytes | None = None
    """What `outcome.result_ref` names: it has to be brought before the ending is told."""


class _OutboxFile(Ending, frozen=True, gc=False, omit_defaults=True):
    """What is written: the ending's own fields, and the record's."""

    subject: str = ""
    ended_at: float = 0.0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_OutboxFile).decode


class OutboxFiles:
    """The folder of one worker_id. Nothing is written before there is something to save."""

    def __init__(self, data: Path, worker_id: str) -> None:
        self.folder = data / OUTBOX_FOLDER / check_name(worker_id, "worker_id")

    def load(self) -> list[OutboxRecord]:
        """What earlier processes left behind. What they did not finish writing is completed or removed."""
        for part in self.folder.glob("*.part"):
            self._complete(part)
        found = [record for path in sorted(self.folder.glob("*.ending")) if (record := _read(path)) is not None]
        for left in (*self.folder.glob("*.result"), *self.folder.glob("*.bytes")):
            if left.suffix == ".bytes" or not left.with_suffix(".ending").exists():
                left.unlink()
        return found

    def save(self, record: OutboxRecord) -> bool:
        """Whether it is on disk now. Its result, if it is a file, is moved to `result_path` in either case or not at all."""
        ending = record.ending
        try:
            self._make_folder()
            path = self._path(ending.lease_id)
            part = path.with_suffix(".part")
            part.write_bytes(_encode(_file(record)))
            sync_file(part)
            if record.result is not None:
                _move(record.result, path.with_suffix(".result"))
            part.replace(path)
            sync_folder(self.folder)
        except OSError as error:
            logger.error("the ending of job %s attempt %d cannot be saved: %s", ending.job_id, ending.attempt, error)
            self._give_up(ending.lease_id)
            return False
        return True

    def _give_up(self, lease_id: str) -> None:
        """A full disk is not helped by halves. What has its result beside it is as good as saved."""
        path = self._path(lease_id)
        with contextlib.suppress(OSError):
            path.with_suffix(".bytes").unlink(missing_ok=True)
            if not path.with_suffix(".result").exists():
                path.with_suffix(".part").unlink(missing_ok=True)

    def remove(self, lease_id: str) -> None:
        """A server has spoken on it."""
        path = self._path(lease_id)
        for one in (path, path.with_suffix(".part"), path.with_suffix(".result")):
            one.unlink(missing_ok=True)

    def result_path(self, lease_id: str) -> Path:
        """Where the large result of a saved ending is."""
        return self._path(lease_id).with_suffix(".result")

    def _path(self, lease_id: str) -> Path:
        """The store chose the lease_id: it is not trusted as a file name."""
        return self.folder / f"{hashlib.sha256(lease_id.encode()).hexdigest()[:32]}.ending"

    def _make_folder(self) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_folder(self.folder.parent)
            sync_folder(self.folder.parent.parent)

    def _complete(self, part: Path) -> None:
        """A kill came between the writing of this file and its renaming."""
        try:
            ref = _decode(part.read_bytes()).outcome.result_ref
            result = part.with_suffix(".result")
            if ref is None or (result.exists() and result.stat().st_size == ref.size_bytes):
                part.replace(part.with_suffix(".ending"))
                return
        except msgspec.DecodeError:
            logger.info("%s was not written whole, and is removed", part)
        part.unlink()


def _read(path: Path) -> OutboxRecord | None:
    try:
        file = _decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("the saved ending %s cannot be read, and is ignored: %s", path, error)
        return None
    ending = Ending(file.job_id, file.lease_id, file.attempt, file.outcome, file.started_at)
    result = path.with_suffix(".result")
    return OutboxRecord(ending, file.subject, file.ended_at, result if result.exists() else None)


def _file(record: OutboxRecord) -> _OutboxFile:
    ending = record.ending
    return _OutboxFile(
        ending.job_id,
        ending.lease_id,
        ending.attempt,
        ending.outcome,
        ending.started_at,
        subject=record.subject,
        ended_at=record.ended_at,
    )


def _move(result: Path | bytes, target: Path) -> None:
    """By one rename: bytes are written beside it first."""
    source = result if isinstance(result, Path) else target.with_suffix(".bytes")
    if isinstance(result, bytes):
        source.write_bytes(result)
    sync_file(source)
    source.replace(target)


# ----------------------------------------------------------------------------------------------------
# Results that were refused because another worker has the job now. Somebody may still want them: they are kept for a while.

REJECTED_FOLDER = "kept-aside"
REJECTED_MAX_BYTES = 1024**3  # all together
REJECTED_MAX_ENTRIES = 1000
REJECTED_MAX_AGE_S = 7 * 86_400.0
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
        max_bytes: int = REJECTED_MAX_BYTES,
        max_entries: int = REJECTED_MAX_ENTRIES,
        max_age_s: float = REJECTED_MAX_AGE_S,
    ) -> None:
        self.folder = data / REJECTED_FOLDER
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


SAVE_AT_ONCE_BYTES = 1024 * 1024  # a result from here on is on disk before its upload begins; smaller ones are if it takes long
OFFERED_AT_ONCE = 4  # large results of earlier processes

logger = logging.getLogger("tasuki.worker")


class Outbox:
    """Without `unreported` nothing outlives this process, without `aside` nothing that was refused is kept.

    `closing` tells whether this process ends: then what is on disk is for the next one.
    """

    def __init__(
        self,
        transfers: WorkerTransfers,
        unreported: OutboxFiles | None,
        aside: RejectedResults | None,
        *,
        tell: Callable[[Event], None],
        closing: Callable[[], bool],
    ) -> None:
        self._transfers = transfers
        self._unreported = unreported
        self._aside = aside
        self._tell = tell
        self._closing = closing
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tasuki-endings")
        self._offering = asyncio.Semaphore(OFFERED_AT_ONCE)
        self._records: dict[str, OutboxRecord] = {}
        """By lease: large results that no server has spoken on, and endings of earlier processes."""
        self._saving: dict[str, asyncio.Future[bool]] = {}
        """What is on disk or about to be; whether it could be saved."""

    async def load(self) -> list[OutboxRecord]:
        """What earlier processes left behind, to be offered."""
        if self._aside is not None:
            await self._loop.run_in_executor(self._thread, self._aside.sweep)
        if self._unreported is None:
            return []
        found = await self._loop.run_in_executor(self._thread, self._unreported.load)
        for record in found:
            lease_id = record.ending.lease_id
            self._records[lease_id] = record
            self._saving[lease_id] = saved = self._loop.create_future()
            saved.set_result(True)
        return found

    async def offer(self, record: OutboxRecord) -> None:
        """An ending that an earlier process could not report; its large result goes first."""
        ending = record.ending
        logger.info("job %s attempt %d: its saved ending is offered", ending.job_id, ending.attempt)
        if record.result is not None and ending.outcome.result_ref is not None:
            try:
                async with self._offering:
                    await self._transfers.bring(record.result, ending.outcome.result_ref, self._loop.create_future())
            except (TasukiError, OSError) as error:
                if self._closing():
                    return
                reason = error.message if isinstance(error, TasukiError) else str(error)
                logger.error("job %s attempt %d: its saved result cannot be sent: %s", ending.job_id, ending.attempt, reason)
                self.set_aside(record, reason)
                self.forget(ending.lease_id)
                return
        self._tell(Restored(ending))

    async def bring(
        self, record: OutboxRecord, stop: asyncio.Future[StopReason], stopped: Callable[[], StopReason | None]
    ) -> Outcome | None:
        """Bring a large result; the outcome to tell then. None: it waits on disk for our next process.

        An attempt that is stopped meanwhile (by `stop`, or by a cancel with `stopped()` saying why) has ended all the same: a job
        whose end nobody tells would be renewed for ever.
        """
        outcome, lease_id = record.ending.outcome, record.ending.lease_id
        assert outcome.result_ref is not None
        self._records[lease_id] = record
        large = outcome.result_ref.size_bytes >= SAVE_AT_ONCE_BYTES
        timer = self._loop.call_later(SAVE_AFTER_S, self.save, record)
        try:
            if large and (saving := self.save(record)) is not None:
                await asyncio.shield(saving)  # the upload begins when a kill or a power cut costs nothing any more
            await self._transfers.bring(self._result_of(record), outcome.result_ref, stop)
            return outcome
        except asyncio.CancelledError:
            if (reason := stopped()) is None:
                raise
        except TasukiError as error:
            if (reason := stopped() or (StopReason.SHUTDOWN if self._closing() else None)) is None:
                self.set_aside(record, error.message)
                return Outcome(error_code=error.code, message=f"the result could not be kept: {error.message}")
        except OSError as error:
            logger.error("job %s: its result cannot be read: %s", record.ending.job_id, error)
            return worker_failure(error)
        finally:
            timer.cancel()
        if reason is StopReason.SHUTDOWN and self.save(record) is not None:
            return None
        return stopped_outcome(reason)

    def _result_of(self, record: OutboxRecord) -> Path | bytes:
        known = self._records.get(record.ending.lease_id, record)
        assert known.result is not None
        return known.result

    # ------------------------------------------------------------------------------------------------ on disk

    def save(self, record: OutboxRecord) -> asyncio.Future[bool] | None:
        """Keep it where it outlives this process, if anything does; once."""
        lease_id = record.ending.lease_id
        if self._unreported is None or lease_id in self._saving:
            return self._saving.get(lease_id)
        known = self._records.get(lease_id)
        if known is not None:
            record = msgspec.structs.replace(record, result=known.result)
        saving = self._loop.run_in_executor(self._thread, self._unreported.save, record)
        self._saving[lease_id] = saving
        saving.add_done_callback(functools.partial(self._saved, lease_id))
        return saving

    def _saved(self, lease_id: str, saving: asyncio.Future[bool]) -> None:
        assert self._unreported is not None
        known, place = self._records.get(lease_id), self._unreported.result_path(lease_id)
        if known is not None and known.result is not None and place.exists():
            self._records[lease_id] = msgspec.structs.replace(known, result=place)
        if saving.result() and not self._closing():
            self._tell(EndingSaved(lease_id))

    def set_aside(self, record: OutboxRecord, reason: str) -> None:
        """It was refused for good: what it has is kept for people. `forget` follows."""
        record = self._records.pop(record.ending.lease_id, record)
        ending = record.ending
        if self._aside is None or (record.result is None and not ending.outcome.result):
            logger.warning("job %s attempt %d: refused, its result is dropped: %s", ending.job_id, ending.attempt, reason)
        else:
            self._thread.submit(self._keep_aside, self._aside, record, reason)

    def _keep_aside(self, aside: RejectedResults, record: OutboxRecord, reason: str) -> None:
        ending = record.ending
        named = (ending.job_id, ending.attempt)
        if isinstance(record.result, Path) and self._unreported is not None and not record.result.exists():
            record = msgspec.structs.replace(record, result=self._unreported.result_path(ending.lease_id))  # moved meanwhile
        try:
            place = aside.keep(record, reason)
        except (DiskFull, OSError) as error:
            logger.error("job %s attempt %d: refused (%s), its result is lost: %s", *named, reason, error)
        else:
            logger.warning(
                "job %s attempt %d: refused, its result is kept in %s: %s", ending.job_id, ending.attempt, place, reason
            )

    def forget(self, lease_id: str) -> None:
        """A server has spoken on it."""
        self._records.pop(lease_id, None)
        if self._saving.pop(lease_id, None) is not None and self._unreported is not None:
            self._thread.submit(self._unreported.remove, lease_id)

    async def written(self) -> None:
        """Returns when all that was asked for so far is done."""
        await self._loop.run_in_executor(self._thread, int)

    async def close(self) -> None:
        """Returns when all that was said is on disk."""
        await asyncio.to_thread(self._thread.shutdown)
        waiting = sum(1 for saving in self._saving.values() if saving.done() and saving.result())
        if waiting and self._unreported is not None:
            logger.warning("%d result(s) wait in %s; the next start offers them", waiting, self._unreported.folder)
