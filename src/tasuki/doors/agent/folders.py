"""Job folders and their markers, which are the truth: what a job is, is read from here, also after any death of the process.

    <data>/jobs/<job_id>/   .running | .done | .failed | .interrupted     result.zip     in/ out/ tmp/ log/ while it runs
    <data>/incoming/<n>/    an upload that is not whole yet: gone after a restart
    <data>/trash/<n>/       what was a job's folder: removed as soon as there is time
    <data>/spare/<n>/       what a job left as it was, for the next one
    <data>/agent.lock       held by the one agent of this folder, with its pid

A folder comes among the jobs with `.running` in it, by one rename. `.done` and `.failed` come after the result is durable, and
whole: tmp, fsync, rename, fsync of the folder. Where several markers are found, an end counts if its result is there; one that
cannot be read counts for nothing. All of it blocks: call it in a thread, but for `read`, `open_result` and `discard`, a few
system calls each.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import TypeVar

import msgspec

from tasuki.blobs.disk import disk_full_as_error
from tasuki.core.agent_job import AgentOutcome, EndedMarker, InterruptedMarker, Marker, RunningMarker
from tasuki.core.ids import check_job_id
from tasuki.doors.agent.spares import KEPT_BELOW, Spares
from tasuki.errors import ConfigError, InvalidInput
from tasuki.worker.attempt import Attempt
from tasuki.worker.folder import RunFolder, RunFolders, remove_tree

RUNNING, DONE, FAILED, INTERRUPTED, RESULT = ".running", ".done", ".failed", ".interrupted", "result.zip"
_KEPT = frozenset({DONE, FAILED, INTERRUPTED, RESULT})
_TMP = ".tmp"
MARKER_MAX_BYTES = 64 * 1024
OPEN_TRIES = 3

FAULT_POINTS = (
    "agent.received", "agent.running", "agent.zipped", "agent.done.written", "agent.done.marked", "agent.ended",
    "agent.interrupted.written", "agent.interrupted.marked",
)  # fmt: skip
"""Where `fault` is called, so that a test can end the process exactly there: an upload is whole, its folder stands among the
jobs, the result is durable, the marker of the end is written, is in place, all is done but the answer; and the same of a marker
that a start writes for what an earlier process left. `.failed` has its points as `.done` has."""

MarkerT = TypeVar("MarkerT", RunningMarker, EndedMarker, InterruptedMarker)
_encode = msgspec.json.Encoder().encode


class JobFolders:
    """All jobs of one agent."""

    def __init__(self, data: Path, fault: Callable[[str], None] = lambda point: None) -> None:
        self.root = data / "jobs"
        self._root = str(self.root)
        self._incoming = data / "incoming"
        self._trash = data / "trash"
        self._spares = Spares(data / "spare")
        self._numbers = itertools.count(1)
        self._fault = fault
        self._lock = _lock(data)
        with disk_full_as_error(data):
            for folder in (self.root, self._incoming, self._trash, self._spares.place):
                folder.mkdir(mode=0o700, exist_ok=True)

    def close(self) -> None:
        self._spares.remove()
        os.close(self._lock)

    def at(self, job_id: str) -> str:
        return f"{self._root}/{check_job_id(job_id)}"  # it becomes a path: checked again where that happens

    def result(self, job_id: str) -> Path:
        return Path(self.at(job_id), RESULT)

    def new_place(self) -> str:
        """Where an upload may put its folder."""
        return f"{self._incoming}/{next(self._numbers)}"

    def free_bytes(self) -> int:
        status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize

    # ------------------------------------------------------------------------------------------------ what there is

    def read(self, job_id: str) -> Marker | None:
        """What the markers say; a `.running` is told as it is, whoever wrote it."""
        folder = self.at(job_id)
        if not os.access(folder, os.F_OK):
            return None
        for name in (DONE, FAILED):
            ended = _read(f"{folder}/{name}", EndedMarker)
            if ended is not None and _size_of(f"{folder}/{RESULT}") == ended.result_bytes:
                return ended
        return _read(f"{folder}/{RUNNING}", RunningMarker) or _read(f"{folder}/{INTERRUPTED}", InterruptedMarker)

    def open_result(self, job_id: str) -> tuple[EndedMarker, FileIO] | None:
        """The end of a job with its result, which stays readable whatever becomes of the folder."""
        for _ in range(OPEN_TRIES):
            ended = self.read(job_id)
            if not isinstance(ended, EndedMarker):
                return None
            with contextlib.suppress(FileNotFoundError):
                file = FileIO(f"{self.at(job_id)}/{RESULT}")
                if self.read(job_id) == ended:  # else the job was set going again in between
                    return ended, file
                file.close()
        return None

    def job_ids(self) -> Iterator[str]:
        """Of all folders that may be jobs."""
        with os.scandir(self._root) as found:
            for entry in found:
                with contextlib.suppress(InvalidInput):  # what somebody else put there is none of ours
                    yield check_job_id(entry.name)

    # ------------------------------------------------------------------------------------------------ a job's life

    def begin(self, place: str, marker: RunningMarker) -> None:
        """The upload at `place` becomes the job's folder; what was there before goes."""
        with disk_full_as_error(place):
            for below in KEPT_BELOW:
                self._spares.put(place, below)
            _write(f"{place}/{RUNNING}", marker)
            self._fault("agent.received")
            target = self.at(marker.job_id)
            if (old := self.discard(marker.job_id)) is not None:
                remove_tree(old)
            os.rename(place, target)  # noqa: PTH104
            _sync(self._root)
        self._fault("agent.running")

    def conclude(self, marker: EndedMarker, result: bytes | Path) -> None:
        """The program has ended, and nothing of it is alive. When this returns, that and its result outlive a power cut."""
        folder = self.at(marker.job_id)
        with disk_full_as_error(folder):
            _take_back(folder)
            new = f"{folder}/{RESULT}{_TMP}"
            if isinstance(result, bytes):
                _write_bytes(new, result)
            else:
                os.rename(result, new)  # noqa: PTH104
                _sync(new)
            os.rename(new, f"{folder}/{RESULT}")  # noqa: PTH104
            self._fault("agent.zipped")
            self._mark(folder, DONE if marker.outcome is AgentOutcome.SUCCEEDED else FAILED, marker)
        self._fault("agent.ended")

    def interrupt(self, running: RunningMarker, at: float) -> None:
        """The job did not come to its end, and nothing of it is alive."""
        folder = self.at(running.job_id)
        marker = InterruptedMarker(
            job_id=running.job_id,
            node=running.node,
            exec=running.exec,
            input=running.input,
            attempt=running.attempt,
            started_at=running.started_at,
            interrupted_at=at,
        )
        with disk_full_as_error(folder):
            _take_back(folder)
            self._mark(folder, INTERRUPTED, marker)

    def _mark(self, folder: str, name: str, marker: Marker) -> None:
        _write(f"{folder}/{name}{_TMP}", marker)
        self._fault(f"agent{name}.written")
        os.rename(f"{folder}/{name}{_TMP}", f"{folder}/{name}")  # noqa: PTH104
        self._fault(f"agent{name}.marked")
        self._clear(folder)
        _sync(folder)

    def _clear(self, folder: str) -> None:
        """Only what tells of the end stays. `.running` goes last: as long as it is there, a start tidies up what is left."""
        found = sorted(os.listdir(folder), key=RUNNING.__eq__)  # noqa: PTH208
        for name in found:
            if name not in _KEPT and not self._spares.keep(folder, name):
                _remove(f"{folder}/{name}")

    def discard(self, job_id: str) -> Path | None:
        """The job is none any more, at once; the folder that is to be removed, or None if there was none."""
        place = self._trash / str(next(self._numbers))
        try:
            os.rename(self.at(job_id), place)  # noqa: PTH104
        except FileNotFoundError:
            return None
        return place

    # ------------------------------------------------------------------------------------------------ the start

    def recover(self) -> list[str]:
        """Before the port opens, and after what dead processes left running is killed: mark what they had as interrupted."""
        self._spares.remove()
        for folder in (self._incoming, self._trash):
            for left in folder.iterdir():
                remove_tree(left)
        found = []
        for job_id in self.job_ids():
            marker = self.read(job_id)
            if isinstance(marker, RunningMarker):
                self.interrupt(marker, time.time())
                found.append(job_id)
            elif marker is None and (torn := self.discard(job_id)) is not None:
                remove_tree(torn)  # a power cut took its marker: there is nothing to tell of it
            elif os.access(f"{self.at(job_id)}/{RUNNING}", os.F_OK):
                self._clear(self.at(job_id))  # it had ended, and was just being tidied up
        return found


class AgentRunFolders(RunFolders):
    """The executor's view: the folder of an attempt is the job's own, and is there already, with its inputs."""

    def __init__(self, data: Path, incarnation: str, jobs: JobFolders) -> None:
        super().__init__(data, incarnation)
        self._jobs = jobs

    def at(self, attempt: Attempt) -> RunFolder:
        return RunFolder(self._jobs.at(attempt.spec.job_id))

    def is_quick(self, attempt: Attempt) -> bool:
        return True

    def create(self, attempt: Attempt) -> RunFolder:
        return self.at(attempt)


def _lock(data: Path) -> int:
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(data / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"the data folder {data} cannot be used: {error.strerror or error}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(descriptor, 20).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise ConfigError(
            f"the data folder {data} is used by another agent (pid {pid}); stop it, or give another --data"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _read(path: str, kind: type[MarkerT]) -> MarkerT | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return msgspec.json.decode(os.read(descriptor, MARKER_MAX_BYTES), type=kind)
    except (OSError, msgspec.MsgspecError):  # torn, or not ours: as good as absent
        return None
    finally:
        os.close(descriptor)


def _size_of(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return -1


def _write(path: str, marker: Marker) -> None:
    _write_bytes(path, _encode(marker) + b"\n")


def _write_bytes(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        written = 0
        while written < len(data):
            written += os.write(descriptor, memoryview(data)[written:])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take_back(folder: str) -> None:
    """The program worked in this folder, and may have done anything to it: the names that are ours become free again."""
    try:
        os.chmod(folder, 0o700)  # noqa: PTH101
    except FileNotFoundError:
        os.makedirs(folder, mode=0o700)  # noqa: PTH103
    for name in os.listdir(folder):  # noqa: PTH208
        if name in _KEPT or name.endswith(_TMP):
            _remove(f"{folder}/{name}")


def _remove(path: str) -> None:
    """Most folders of a job are empty or have a few files: for those `remove_tree` would take longer than the program."""
    try:
        os.unlink(path)  # noqa: PTH108
    except IsADirectoryError:
        try:
            for name in os.listdir(path):  # noqa: PTH208
                os.unlink(f"{path}/{name}")  # noqa: PTH108
            os.rmdir(path)  # noqa: PTH106
        except OSError:
            remove_tree(Path(path))
