"""Endings that no server has taken yet, kept on disk so that they outlive the worker's process.

One file for each, in the worker's data folder: `endings/<worker_id>/<hash of the lease_id>.ending`, beside it `.result` if the
result is too large to travel with it. The next process with the same data folder and worker_id offers them; whether they still
count is the store's to decide.

A kill at any moment leaves all of it or nothing. The ending is written to a temporary name (`.part`) and synced, then the result
is synced and moved beside it, then the ending gets its name: a temporary file that can be read whole, with its result in place,
is as good as a named one. All of it blocks: call it on one thread, in order.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from pathlib import Path

import msgspec

from tasuki.blobs.files import sync_file, sync_folder
from tasuki.core.ids import check_name
from tasuki.core.protocol import Ending

FOLDER = "endings"

logger = logging.getLogger("tasuki.worker")


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


class Unreported:
    """The folder of one worker_id. Nothing is written before there is something to save."""

    def __init__(self, data: Path, worker_id: str) -> None:
        self.folder = data / FOLDER / check_name(worker_id, "worker_id")

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
