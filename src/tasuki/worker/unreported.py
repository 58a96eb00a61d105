"""Endings that no server has taken yet, kept on disk so that they outlive the worker's process.

One file for each, in the worker's data folder: `endings/<worker_id>/<hash of the lease_id>.ending`, beside it `.result` if the
result was still to be uploaded. The next process with the same data folder and worker_id offers them; whether they still count is
the store's to decide. Written to a temporary name, synced and renamed: a file is whole or not there. All of it happens on one
thread, in order.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tasuki.core.ids import check_name
from tasuki.core.protocol import Ending

FOLDER = "endings"

logger = logging.getLogger("tasuki.worker")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Ending).decode


class Saved(msgspec.Struct, frozen=True):
    """An ending of an earlier process. With a `result_file`, its result has to be brought first."""

    ending: Ending
    result_file: Path | None = None


class Unreported:
    """The folder of one worker_id. Nothing is written before there is something to save."""

    def __init__(self, data: Path, worker_id: str) -> None:
        self._folder = data / FOLDER / check_name(worker_id, "worker_id")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tasuki-endings")
        self._saved: dict[str, Ending] = {}
        self._earlier: set[str] = set()
        """Leases of earlier processes."""

    async def load(self) -> list[Saved]:
        """What earlier processes left behind."""
        found = await asyncio.get_running_loop().run_in_executor(self._thread, self._load)
        self._saved.update((saved.ending.lease_id, saved.ending) for saved in found)
        self._earlier.update(self._saved)
        return found

    def save(self, ending: Ending, result_file: Path | None = None) -> None:
        """Keep it; `result_file` is moved here."""
        self._saved[ending.lease_id] = ending
        self._thread.submit(self._save, ending, result_file)

    def forget(self, lease_id: str, fenced: str = "") -> None:
        """A server has spoken on it: recorded, or refused for this reason."""
        ending = self._saved.pop(lease_id, None)
        if ending is None:
            return
        self._thread.submit(self._remove, lease_id)
        if lease_id in self._earlier and fenced:
            logger.warning("job %s attempt %d: refused, its saved result is dropped: %s", ending.job_id, ending.attempt, fenced)

    async def close(self) -> None:
        """Returns when all that was said is on disk."""
        await asyncio.to_thread(self._thread.shutdown)

    # ------------------------------------------------------------------------------------------------ on the thread

    def _load(self) -> list[Saved]:
        found: list[Saved] = []
        for path in sorted(self._folder.glob("*.ending")):
            try:
                ending = _decode(path.read_bytes())
            except (OSError, msgspec.DecodeError) as error:
                logger.warning("the saved ending %s cannot be read, and is ignored: %s", path, error)
                continue
            result_file = path.with_suffix(".result")
            found.append(Saved(ending, result_file if result_file.exists() else None))
        for torn in self._folder.glob("*.part"):
            torn.unlink()
        return found

    def _save(self, ending: Ending, result_file: Path | None) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._path(ending.lease_id)
            if result_file is not None:
                _sync(result_file)
                result_file.replace(path.with_suffix(".result"))
            temporary = path.with_suffix(".part")
            temporary.write_bytes(_encode(ending))
            _sync(temporary)
            temporary.replace(path)
            _sync(self._folder)
        except OSError as error:
            logger.error("the ending of job %s attempt %d cannot be saved: %s", ending.job_id, ending.attempt, error)

    def _remove(self, lease_id: str) -> None:
        path = self._path(lease_id)
        for one in (path, path.with_suffix(".result")):
            one.unlink(missing_ok=True)

    def _path(self, lease_id: str) -> Path:
        """The store chose the lease_id: it is not trusted as a file name."""
        return self._folder / f"{hashlib.sha256(lease_id.encode()).hexdigest()[:32]}.ending"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
