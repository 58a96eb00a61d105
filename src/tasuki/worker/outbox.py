"""The outbox: ended attempts until a server has answered them. Large results are uploaded first, endings that no server takes are
saved on disk, refused results are kept for a while.

    run ends ──► (1 MiB or more: saved) ──► uploaded ──► reported ──► recorded: removed
                  smaller: saved after 3 s                     └────► fenced: result kept, then removed

Inline results pass through the machine (`core/worker`) alone; they come here only when they have waited for a while or were
refused. Everything that goes to disk does so on one thread, in order: a save before the removal that follows it.

    endings/<worker_id>/<hash of the lease_id>.ending     the ending, with `.result` beside it if the result is large
    kept-aside/<job_id>-<attempt>/                        a refused result, with about.json

The next process with the same data folder and worker_id offers saved endings again; the store decides whether they still count.
A kill at any moment leaves an ending whole or not at all: it is written as `.part` and synced, then the result is synced and
moved beside it, then the ending gets its name. A `.part` that can be read whole, with its result in place, counts as saved.
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
from msgspec.structs import asdict, replace

from tasuki.blobs.files import disk_full_as_error, sync_file, sync_folder
from tasuki.core.job import Outcome, check_job_id, check_name
from tasuki.core.protocol import Ending
from tasuki.core.worker.events import EndingSaved, Event, Restored
from tasuki.core.worker.machine import SAVE_AFTER_S
from tasuki.errors import DiskFull, InvalidInput, TasukiError
from tasuki.worker.attempt import StopReason, stopped_outcome, worker_failure
from tasuki.worker.transfers import WorkerTransfers

OUTBOX_FOLDER = "endings"
REJECTED_FOLDER = "kept-aside"
REJECTED_MAX_BYTES = 1024**3  # all together
REJECTED_MAX_ENTRIES = 1000
REJECTED_MAX_AGE_S = 7 * 86_400.0
SAVE_AT_ONCE_BYTES = 1024 * 1024  # a larger result is on disk before its upload begins; a smaller one if the upload takes long
OFFERED_AT_ONCE = 4  # large results of earlier processes
ZIP_STARTS = b"PK\x03\x04"
_NEW = ".new-"  # no job id begins with a dot; a folder that a kill leaves is removed when it is old

logger = logging.getLogger("tasuki.worker")


# ---------------------------------------------------------------------------------------------------- saved endings


class OutboxRecord(msgspec.Struct, frozen=True):
    """An ending, with the facts that are saved but not sent."""

    ending: Ending
    subject: str = ""
    ended_at: float = 0.0
    """Unix time, on the worker's clock; 0: not known."""
    result: Path | bytes | None = None
    """The result that `outcome.result_ref` names; it is uploaded before the ending is reported."""


class _OutboxFile(Ending, frozen=True, gc=False, omit_defaults=True):
    """The content of an `.ending` file: the ending's own fields, and the record's."""

    subject: str = ""
    ended_at: float = 0.0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_OutboxFile).decode


class OutboxFiles:
    """The folder of one worker_id, made when there is something to save. Blocks: call it on one thread, in order."""

    def __init__(self, data: Path, worker_id: str) -> None:
        self.folder = data / OUTBOX_FOLDER / check_name(worker_id, "worker_id")

    def load(self) -> list[OutboxRecord]:
        """Return the endings of earlier processes. Files that were not finished are completed or removed."""
        for part in self.folder.glob("*.part"):
            self._complete(part)
        found = [record for path in sorted(self.folder.glob("*.ending")) if (record := _read(path)) is not None]
        for left in (*self.folder.glob("*.result"), *self.folder.glob("*.bytes")):
            if left.suffix == ".bytes" or not left.with_suffix(".ending").exists():
                left.unlink()
        return found

    def save(self, record: OutboxRecord) -> bool:
        """Write the record and return whether it is on disk now. A result that is a file is moved to `result_path`, or stays."""
        ending = record.ending
        try:
            if not self.folder.is_dir():
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                sync_folder(self.folder.parent)
                sync_folder(self.folder.parent.parent)
            path = self._path(ending.lease_id)
            part = path.with_suffix(".part")
            part.write_bytes(_encode(_OutboxFile(**asdict(ending), subject=record.subject, ended_at=record.ended_at)))
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
        """Remove a half-written record from the full disk, unless its result is in place: that counts as saved."""
        path = self._path(lease_id)
        with contextlib.suppress(OSError):
            path.with_suffix(".bytes").unlink(missing_ok=True)
            if not path.with_suffix(".result").exists():
                path.with_suffix(".part").unlink(missing_ok=True)

    def remove(self, lease_id: str) -> None:
        """Remove the record: a server has answered it."""
        path = self._path(lease_id)
        for one in (path, path.with_suffix(".part"), path.with_suffix(".result")):
            one.unlink(missing_ok=True)

    def result_path(self, lease_id: str) -> Path:
        """Return the path of a saved ending's large result."""
        return self._path(lease_id).with_suffix(".result")

    def _path(self, lease_id: str) -> Path:
        """Return the path of an ending. The lease_id comes from the store and is not trusted as a file name."""
        return self.folder / f"{hashlib.sha256(lease_id.encode()).hexdigest()[:32]}.ending"

    def _complete(self, part: Path) -> None:
        """Rename a file that a kill left before its renaming, or remove it if it is not whole."""
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


def _move(result: Path | bytes, target: Path) -> None:
    """Put the result in place by one rename; bytes are written beside the target first."""
    source = result if isinstance(result, Path) else target.with_suffix(".bytes")
    if isinstance(result, bytes):
        source.write_bytes(result)
    sync_file(source)
    source.replace(target)


# ---------------------------------------------------------------------------------------------------- refused results


class RejectedResults:
    """The folder of results that were refused because another worker has the job now. Several workers may share it."""

    def __init__(self, data: Path) -> None:
        self.folder = data / REJECTED_FOLDER

    def keep(self, record: OutboxRecord, reason: str) -> Path:
        """Move or write the record's result to a folder of its own, and return that."""
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
            (new / "about.json").write_bytes(_about(record, reason, written))
            place = self._named(new, record)
        self.sweep()
        return place

    def sweep(self) -> None:
        """Remove the oldest until the rest is within the limits. The newest stays, whatever its size."""
        total_bytes = 0
        oldest_at = time.time() - REJECTED_MAX_AGE_S
        for count, (at, path) in enumerate(sorted(self._entries(), reverse=True)):
            total_bytes += _size_of(path)
            too_much = count >= REJECTED_MAX_ENTRIES or (count > 0 and total_bytes > REJECTED_MAX_BYTES)
            if too_much or at < oldest_at:
                shutil.rmtree(path, ignore_errors=True)

    def _entries(self) -> list[tuple[float, Path]]:
        found = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):  # another worker sweeps at the same time
                found.append((path.lstat().st_mtime, path))
        return found

    def _named(self, new: Path, record: OutboxRecord) -> Path:
        """Give the folder its name; a number is added if the id was used before by a job that is removed now."""
        ending = record.ending
        try:
            job_id = check_job_id(ending.job_id)
        except InvalidInput:  # not valid as a name
            job_id = hashlib.sha256(ending.job_id.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        name = f"{job_id}-{ending.attempt:d}"
        for number in itertools.count(1):
            place = self.folder / (name if number == 1 else f"{name}-{number}")
            try:
                return new.rename(place)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
        raise AssertionError("numbers do not end")


def _about(record: OutboxRecord, reason: str, written: Path) -> bytes:
    ending = record.ending
    about = {
        "job_id": ending.job_id,
        "attempt": ending.attempt,
        "lease_id": ending.lease_id,
        "subject": record.subject,
        "ended_at": record.ended_at or None,  # Unix time, on the worker's clock
        "reason": reason,  # of the refusal
        "error_code": ending.outcome.error_code,  # of the attempt; null: it succeeded
        "file": written.name,
        "size_bytes": written.stat().st_size,
        "sha256": ending.outcome.result_sha256,
    }
    return msgspec.json.format(msgspec.json.encode(about)) + b"\n"


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(ZIP_STARTS)) == ZIP_STARTS


def _size_of(folder: Path) -> int:
    size_bytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size_bytes += path.lstat().st_size
    return size_bytes


# ---------------------------------------------------------------------------------------------------- the outbox


class Outbox:
    """All ended attempts of a worker process. Without `files` nothing outlives it, without `rejected` no refused result is kept.

    `closing()` returns whether this process ends: then the files on disk are for the next one.
    """

    def __init__(
        self,
        transfers: WorkerTransfers,
        files: OutboxFiles | None,
        rejected: RejectedResults | None,
        *,
        tell: Callable[[Event], None],
        closing: Callable[[], bool],
    ) -> None:
        self._transfers = transfers
        self._files = files
        self._rejected = rejected
        self._tell = tell
        self._closing = closing
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tasuki-endings")
        self._offering = asyncio.Semaphore(OFFERED_AT_ONCE)
        self.leases: set[str] = set()
        """Leases of which there is something here or on disk; of most there is not."""
        self._records: dict[str, OutboxRecord] = {}
        """By lease: large results that no server has answered, and endings of earlier processes."""
        self._saving: dict[str, asyncio.Future[bool]] = {}
        """By lease: records that are on disk or about to be; the result is whether the write succeeded."""

    async def load(self) -> list[OutboxRecord]:
        """Return the endings of earlier processes, to be offered."""
        if self._rejected is not None:
            await self._loop.run_in_executor(self._thread, self._rejected.sweep)
        if self._files is None:
            return []
        found = await self._loop.run_in_executor(self._thread, self._files.load)
        for record in found:
            lease_id = record.ending.lease_id
            self.leases.add(lease_id)
            self._records[lease_id] = record
            self._saving[lease_id] = saved = self._loop.create_future()
            saved.set_result(True)
        return found

    async def offer(self, record: OutboxRecord) -> None:
        """Upload the result of an ending that an earlier process could not report, and report it."""
        ending = record.ending
        logger.info("job %s attempt %d: its saved ending is offered", ending.job_id, ending.attempt)
        if record.result is not None and ending.outcome.result_ref is not None:
            try:
                async with self._offering:
                    await self._transfers.upload(record.result, ending.outcome.result_ref, self._loop.create_future())
            except (TasukiError, OSError) as error:
                if self._closing():
                    return
                reason = error.message if isinstance(error, TasukiError) else str(error)
                logger.error("job %s attempt %d: its saved result cannot be sent: %s", ending.job_id, ending.attempt, reason)
                self.set_aside(record, reason)
                self.forget(ending.lease_id)
                return
        self._tell(Restored(ending))

    async def upload(
        self, record: OutboxRecord, stop: asyncio.Future[StopReason], stopped: Callable[[], StopReason | None]
    ) -> Outcome | None:
        """Upload a large result and return the outcome to report. None: it waits on disk for this worker's next process.

        An attempt that is stopped meanwhile (by `stop`, or by a cancel with the reason in `stopped()`) has ended all the same: a
        job whose end is not reported would be renewed for ever.
        """
        outcome, lease_id = record.ending.outcome, record.ending.lease_id
        assert outcome.result_ref is not None
        self.leases.add(lease_id)
        self._records[lease_id] = record
        large = outcome.result_ref.size_bytes >= SAVE_AT_ONCE_BYTES
        timer = self._loop.call_later(SAVE_AFTER_S, self.save, record)
        try:
            if large and (saving := self.save(record)) is not None:
                await asyncio.shield(saving)  # from here on a kill or a power cut loses nothing
            result = self._records.get(lease_id, record).result  # moved by a save, perhaps
            assert result is not None
            await self._transfers.upload(result, outcome.result_ref, stop)
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

    # ------------------------------------------------------------------------------------------------ on disk

    def save(self, record: OutboxRecord) -> asyncio.Future[bool] | None:
        """Write the record to disk, once, if there is a folder for it."""
        lease_id = record.ending.lease_id
        if self._files is None or lease_id in self._saving:
            return self._saving.get(lease_id)
        known = self._records.get(lease_id)
        if known is not None:
            record = replace(record, result=known.result)
        saving = self._loop.run_in_executor(self._thread, self._files.save, record)
        self.leases.add(lease_id)
        self._saving[lease_id] = saving
        saving.add_done_callback(functools.partial(self._saved, lease_id))
        return saving

    def _saved(self, lease_id: str, saving: asyncio.Future[bool]) -> None:
        assert self._files is not None
        known, place = self._records.get(lease_id), self._files.result_path(lease_id)
        if known is not None and known.result is not None and place.exists():
            self._records[lease_id] = replace(known, result=place)
        if saving.result() and not self._closing():
            self._tell(EndingSaved(lease_id))

    def set_aside(self, record: OutboxRecord, reason: str) -> None:
        """Keep the result of an ending that was refused for good, for people to look at. `forget` follows."""
        record = self._records.pop(record.ending.lease_id, record)
        ending = record.ending
        if self._rejected is None or (record.result is None and not ending.outcome.result):
            logger.warning("job %s attempt %d: refused, its result is dropped: %s", ending.job_id, ending.attempt, reason)
        else:
            self._thread.submit(self._keep_rejected, self._rejected, record, reason)

    def _keep_rejected(self, rejected: RejectedResults, record: OutboxRecord, reason: str) -> None:
        ending = record.ending
        named = (ending.job_id, ending.attempt)
        if isinstance(record.result, Path) and self._files is not None and not record.result.exists():
            record = replace(record, result=self._files.result_path(ending.lease_id))  # moved meanwhile
        try:
            place = rejected.keep(record, reason)
        except (DiskFull, OSError) as error:
            logger.error("job %s attempt %d: refused (%s), its result is lost: %s", *named, reason, error)
        else:
            logger.warning("job %s attempt %d: refused, its result is kept in %s: %s", *named, place, reason)

    def forget(self, lease_id: str) -> None:
        """Drop the record, in memory and on disk: a server has answered it."""
        self.leases.discard(lease_id)
        self._records.pop(lease_id, None)
        if self._saving.pop(lease_id, None) is not None and self._files is not None:
            self._thread.submit(self._files.remove, lease_id)

    async def written(self) -> None:
        """Wait until every write and removal so far is done."""
        await self._loop.run_in_executor(self._thread, int)

    async def close(self) -> None:
        """Wait until every record is on disk."""
        await asyncio.to_thread(self._thread.shutdown)
        waiting = sum(1 for saving in self._saving.values() if saving.done() and saving.result())
        if waiting and self._files is not None:
            logger.warning("%d result(s) wait in %s; the next start offers them", waiting, self._files.folder)
