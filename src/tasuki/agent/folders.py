"""Job folders and their markers, which are the truth: the state of a job is read from them, also after any death of the process.

    <data>/jobs/<job_id>/   .running | .done | .failed | .interrupted     result.zip     in/ out/ tmp/ log/ while it runs
    <data>/incoming/<n>/    an upload that is not complete; removed by a restart
    <data>/trash/<n>/       a discarded folder; removed as soon as there is time
    <data>/spare/<n>/       an empty folder that a job left unchanged, for the next job
    <data>/agent.lock       held by the one agent of this folder, with its pid

A folder is renamed into `jobs` with `.running` in it. `.done` and `.failed` follow after the result is durable: temporary file,
fsync, rename, fsync of the folder. If there are several markers, an end counts if its result is there; a marker that cannot be
read does not count.

Methods return what has to be fsynced as open descriptors, so that one thread can do it for many jobs at once (`FsyncBatch`);
everything else is a few system calls for a job of ordinary size. `conclude`, `interrupt` and `recover` sync by themselves, and
block.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
import secrets
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

from tasuki.agent.upload import UploadFolder
from tasuki.blobs.files import disk_full_as_error, disk_full_or
from tasuki.config import DataFolder
from tasuki.core.failover.agent_protocol import AgentOutcome, EndedMarker, InterruptedMarker, Marker, RunningMarker
from tasuki.core.job import check_job_id
from tasuki.errors import ConfigError, DiskFull, InvalidInput
from tasuki.event_loop import ignore_result
from tasuki.worker.attempt import Attempt
from tasuki.worker.folder import RunFolder, RunFolders, is_part_as_made, remove_tree

# ------------------------------------------------------------------------------------------------ batched fsync

FSYNC_THREADS = 4
"""Threads at once: a file system commits for several waiters together, and the next commit may begin during one."""
Unsynced: TypeAlias = Sequence[int]
"""Open descriptors of files and folders, to be fsynced in this order and closed."""


def sync_now(descriptors: Unsynced) -> None:
    """Sync these descriptors in this thread."""
    problem = _synced([descriptors], None)[0]
    if problem is not None:
        raise problem


class FsyncBatch:
    """Batched fsync: one call in a thread, and one commit of the file system's journal, serve all jobs that wait meanwhile.

    Made inside the running loop. Descriptors are closed here in any case: a caller who stops waiting does not stop the thread.
    """

    def __init__(self, place: str, root: int | None = None) -> None:
        """`place` is named when its disk is full. `root` is synced after all others, and stays open."""
        self._place = place
        self._root = root
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[Unsynced, asyncio.Future[None]]] = []
        self._under_way = 0
        self._is_woken = False

    def sync(self, descriptors: Unsynced) -> asyncio.Future[None]:
        """Sync and close descriptors; done when they are durable. OSError, DiskFull."""
        synced: asyncio.Future[None] = self._loop.create_future()
        synced.add_done_callback(ignore_result)
        self._waiting.append((descriptors, synced))
        if not self._is_woken and self._under_way < FSYNC_THREADS:
            self._is_woken = True
            self._loop.call_soon(self._next)  # callers that are ready in this turn of the loop join
        return synced

    def _next(self) -> None:
        self._is_woken = False
        batch, self._waiting = self._waiting, []
        self._under_way += 1
        syncing = self._loop.run_in_executor(None, _synced, [descriptors for descriptors, _ in batch], self._root)

        def tell(syncing: asyncio.Future[list[OSError | None]]) -> None:
            self._under_way -= 1
            if self._waiting and not self._is_woken:
                self._next()
            for (_, synced), problem in zip(batch, syncing.result(), strict=True):
                if synced.done():  # its caller has stopped waiting
                    continue
                if problem is None:
                    synced.set_result(None)
                else:
                    synced.set_exception(disk_full_or(problem, self._place))

        syncing.add_done_callback(tell)


def _synced(batch: Sequence[Unsynced], root: int | None) -> list[OSError | None]:
    """Return the problem of each. A failed fsync is not repeated: the next one would report success."""
    problems = [_problem_of(descriptors) for descriptors in batch]
    try:
        if root is not None:
            os.fsync(root)
    except OSError as error:
        return [problem or error for problem in problems]
    return problems


def _problem_of(descriptors: Unsynced) -> OSError | None:
    problem = None
    for descriptor in descriptors:
        try:
            if problem is None:
                os.fsync(descriptor)
        except OSError as error:
            problem = error
        try:
            os.close(descriptor)
        except OSError as error:
            problem = problem or error
    return problem


# ------------------------------------------------------------------------------------------------ the pool of empty folders

INPUTS, WORKED_IN = "in", ("out", "tmp", "log")
KEPT_BELOW = (INPUTS, *WORKED_IN)
FEW_FILES, FEW_BYTES = 4, 64 * 1024
"""Inputs of a job that are removed at once: at most this many, of this size."""
SPARES_MAX = 64  # for each name


class FolderPool:
    """Empty folders of one agent that jobs left unchanged; each becomes the next job's by one rename."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._place = str(place)
        self._numbers = itertools.count(1)
        self._kept: dict[str, list[str]] = {name: [] for name in KEPT_BELOW}

    def put(self, folder: str, name: str) -> None:
        """Put a new folder below `folder`: a spare one, else one that is made."""
        path = f"{folder}/{name}"
        try:
            os.rename(self._kept[name].pop(), path)  # noqa: PTH104  # `Path` costs more than the call
        except (IndexError, FileNotFoundError):  # the pool is empty, or its folder was removed
            os.mkdir(path, mode=0o700)  # noqa: PTH102

    def keep(self, folder: str, name: str) -> bool:
        """Move a folder into the pool if it can be used again; nothing may run in it."""
        kept = self._kept.get(name)
        if name == INPUTS:
            with contextlib.suppress(OSError):  # a folder that cannot be emptied here is discarded
                _remove_few(f"{folder}/{name}")
        if kept is None or len(kept) >= SPARES_MAX or not is_part_as_made(folder, name):
            return False
        spare = f"{self._place}/{next(self._numbers)}"
        try:
            os.rename(f"{folder}/{name}", spare)  # noqa: PTH104
        except FileNotFoundError:  # its folder was removed
            return False
        kept.append(spare)
        return True

    def taken(self) -> list[str]:
        """Remove all folders from the pool, and return them."""
        taken = [spare for kept in self._kept.values() for spare in kept]
        for kept in self._kept.values():
            kept.clear()
        return taken


def _remove_few(folder: str) -> None:
    """Remove the files in a folder, if they are few; no link is followed."""
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        return
    with os.scandir(folder) as found_in:  # a program may have made a million files
        files = [entry.path for entry in itertools.islice(found_in, FEW_FILES + 1)]
    if len(files) > FEW_FILES:
        return
    for file in files:
        found = os.lstat(file)
        if not stat.S_ISDIR(found.st_mode) and found.st_size <= FEW_BYTES:
            os.unlink(file)  # noqa: PTH108


logger = logging.getLogger("tasuki.agent")
RUNNING, DONE, FAILED, INTERRUPTED, RESULT = ".running", ".done", ".failed", ".interrupted", "result.zip"
_KEPT = frozenset({DONE, FAILED, INTERRUPTED, RESULT})
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MARKER = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a program may have put a FIFO there
_TMP = ".tmp"
MARKER_MAX_BYTES = 64 * 1024
OPEN_TRIES = 3

FAULT_POINTS = (
    "agent.received", "agent.running", "agent.zipped", "agent.done.written", "agent.done.marked", "agent.ended",
    "agent.interrupted.written", "agent.interrupted.marked",
)  # fmt: skip
"""Points at which `fault` is called, so that a test can end the process there: an upload is complete, its folder is among the
jobs, the result is durable, the marker of the end is written, is in place, everything is done but the response; and the same
for a marker that a start writes for an earlier process. `.failed` has the points of `.done`."""

MarkerT = TypeVar("MarkerT", RunningMarker, EndedMarker, InterruptedMarker)
_encode = msgspec.json.Encoder().encode


class JobFolders:
    """Folders of all jobs of one agent."""

    def __init__(self, data: Path, fault: Callable[[str], None] = lambda point: None) -> None:
        self.root = data / "jobs"
        self._root = str(self.root)
        self._incoming = data / "incoming"
        self._trash = data / "trash"
        self._spares = FolderPool(data / "spare")
        self._rubbish: deque[str] = deque()
        self.on_rubbish: Callable[[], None] = lambda: None
        """Called, in any thread, when there is something for `remove_rubbish`."""
        self._name = secrets.token_hex(4)  # folders of earlier processes may still be there
        self._numbers = itertools.count(1)
        self._fault = fault
        self._lock = _lock(data)
        with disk_full_as_error(data):
            for folder in (self.root, self._incoming, self._trash, self._spares.place):
                folder.mkdir(mode=0o700, exist_ok=True)
        self.root_descriptor = os.open(self.root, _FOLDER)
        """Descriptor with which the list of jobs is made durable."""

    def close(self) -> None:
        self._rubbish += self._spares.taken()
        self.remove_rubbish()
        os.close(self.root_descriptor)
        os.close(self._lock)

    def at(self, job_id: str) -> str:
        return f"{self._root}/{check_job_id(job_id)}"  # a job_id becomes a path here: it is checked again

    def result(self, job_id: str) -> Path:
        return Path(self.at(job_id), RESULT)

    def new_place(self) -> UploadFolder:
        """Return the folder for a new upload."""
        return UploadFolder(f"{self._incoming}/{self._name}-{next(self._numbers)}", self._make_place)

    def are_there(self) -> bool:
        """Return False if the folders were removed, or their disk has failed."""
        return os.access(self._root, os.W_OK | os.X_OK)

    def free_bytes(self) -> int:
        status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize

    # ------------------------------------------------------------------------------------------------ what there is

    def read(self, job_id: str) -> Marker | None:
        """Read the marker of a job. A `.running` is returned whichever process wrote it."""
        folder = self.at(job_id)
        if not os.access(folder, os.F_OK):
            return None
        for name in (DONE, FAILED):
            ended = _read(f"{folder}/{name}", EndedMarker)
            if ended is not None and _size_of(f"{folder}/{RESULT}") == ended.result_bytes:
                return ended
        return _read(f"{folder}/{RUNNING}", RunningMarker) or _read(f"{folder}/{INTERRUPTED}", InterruptedMarker)

    def open_result(self, job_id: str) -> tuple[EndedMarker, FileIO] | None:
        """Open the result of a job that has ended; it stays readable if the folder is removed."""
        for _ in range(OPEN_TRIES):
            ended = self.read(job_id)
            if not isinstance(ended, EndedMarker):
                return None
            with contextlib.suppress(FileNotFoundError):
                file = FileIO(f"{self.at(job_id)}/{RESULT}")
                if self.read(job_id) == ended:  # else the job was run again in between
                    return ended, file
                file.close()
        return None

    def job_ids(self) -> Iterator[str]:
        """Yield the names of all folders that may be jobs."""
        with os.scandir(self._root) as found:
            for entry in found:
                with contextlib.suppress(InvalidInput):  # other files are ignored
                    yield check_job_id(entry.name)

    def newest_first(self) -> list[str]:
        """Return the jobs by the time of their last change."""
        with os.scandir(self._root) as found:
            changed = {entry.name: entry.stat(follow_symlinks=False).st_mtime for entry in found}
        return sorted((job_id for job_id in self.job_ids() if job_id in changed), key=changed.__getitem__, reverse=True)

    # ------------------------------------------------------------------------------------------------ a job's life

    def _make_place(self, place: str) -> None:
        os.mkdir(place, mode=0o700)  # noqa: PTH102  # `Path` costs more than the call
        self._spares.put(place, INPUTS)

    def begin(self, place: str, marker: RunningMarker) -> None:
        """Rename the upload at `place` to the folder of the job; an earlier folder is discarded."""
        with disk_full_as_error(place):
            for below in WORKED_IN:
                self._spares.put(place, below)
            os.close(_written(f"{place}/{RUNNING}", _encode(marker)))
            self._fault("agent.received")
            self.discard(marker.job_id)
            os.rename(place, self.at(marker.job_id))  # noqa: PTH104
        self._fault("agent.running")

    def marked(self, job_id: str) -> Unsynced:
        """Return the descriptors that make the marker of a running job durable."""
        folder = self.at(job_id)
        with _closed_on_error() as opened:
            opened.append(os.open(f"{folder}/{RUNNING}", _MARKER))
            opened.append(os.open(folder, _FOLDER))
            return opened

    def conclude(self, marker: EndedMarker, result: bytes | Path) -> None:
        """Record an end: both steps, durable when this returns."""
        with disk_full_as_error(self._root):
            sync_now(self.write_end(marker, result))
            sync_now([*self.show_end(marker), os.open(self._root, _FOLDER)])
        self.has_ended()

    def write_end(self, marker: EndedMarker, result: bytes | Path) -> Unsynced:
        """Write the result and the marker of an end beside `.running`, after the program has ended."""
        folder = self.at(marker.job_id)
        with disk_full_as_error(folder), _closed_on_error() as opened:
            self._take_back(folder)
            new = f"{folder}/{RESULT}{_TMP}"
            if isinstance(result, bytes):
                opened.append(_written(new, result))
            else:
                os.rename(result, new)  # noqa: PTH104
                opened.append(os.open(new, os.O_RDONLY | os.O_CLOEXEC))
            self._fault("agent.zipped")
            name = _name_of(marker)
            opened.append(_written(f"{folder}/{name}{_TMP}", _encode(marker)))
            self._fault(f"agent{name}.written")
            return opened

    def show_end(self, marker: EndedMarker) -> Unsynced:
        """Rename result and marker into place, after they were synced. The end is durable when the returned descriptors are
        synced."""
        folder, name = self.at(marker.job_id), _name_of(marker)
        with disk_full_as_error(folder), _closed_on_error() as opened:
            os.rename(f"{folder}/{RESULT}{_TMP}", f"{folder}/{RESULT}")  # noqa: PTH104
            opened.append(os.open(folder, _FOLDER))
            self._show(folder, name)
            return opened

    def has_ended(self) -> None:
        """Pass the last fault point: only the response is left."""
        self._fault("agent.ended")

    def interrupt(self, running: RunningMarker, at: float) -> None:
        """Mark a job as interrupted, of which no process is alive."""
        folder = self.at(running.job_id)
        marker = InterruptedMarker(**running.common, interrupted_at=at)
        with disk_full_as_error(folder):
            self._take_back(folder)
            sync_now([_written(f"{folder}/{INTERRUPTED}{_TMP}", _encode(marker))])
            self._fault(f"agent{INTERRUPTED}.written")
            self._show(folder, INTERRUPTED)
            sync_now([os.open(folder, _FOLDER)])

    def _show(self, folder: str, name: str) -> None:
        os.rename(f"{folder}/{name}{_TMP}", f"{folder}/{name}")  # noqa: PTH104
        self._fault(f"agent{name}.marked")
        self._clear(folder)

    def _clear(self, folder: str) -> None:
        """Remove everything but the end. `.running` goes last: while it is there, a start cleans up the rest."""
        found = sorted(os.listdir(folder), key=RUNNING.__eq__)  # noqa: PTH208
        for name in found:
            try:
                if name == RUNNING:
                    os.unlink(f"{folder}/{name}")  # noqa: PTH108
                elif name not in _KEPT and not self._spares.keep(folder, name):
                    self._throw_away(f"{folder}/{name}")
            except OSError as error:  # the end counts all the same
                logger.warning("%s/%s cannot be removed: %s", folder, name, error)

    def _take_back(self, folder: str) -> None:
        """Make our names in a folder usable again; the program may have done anything to it."""
        try:
            if not stat.S_ISDIR(os.lstat(folder).st_mode):  # a link would lead out of the folder
                self._throw_away(folder)
            os.chmod(folder, 0o700)  # noqa: PTH101
        except FileNotFoundError:
            os.makedirs(folder, mode=0o700)  # noqa: PTH103
        for name in os.listdir(folder):  # noqa: PTH208
            if name in _KEPT or name.endswith(_TMP):
                self._throw_away(f"{folder}/{name}")

    def _throw_away(self, path: str) -> None:
        """Move a folder to the trash; `remove_rubbish` removes it."""
        place = f"{self._trash}/{self._name}-{next(self._numbers)}"
        try:
            os.rename(path, place)  # noqa: PTH104
        except PermissionError:  # a program may have made its folder unwritable
            os.chmod(path, 0o700)  # noqa: PTH101  # links need no permission: this is none
            os.rename(path, place)  # noqa: PTH104
        self._rubbish.append(place)
        self.on_rubbish()

    def remove_rubbish(self) -> None:
        """Remove the trash; blocks. A folder that cannot be removed is tried again at the next start."""
        while self._rubbish:
            try:
                path = self._rubbish.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                remove_tree(path)
            except OSError as error:
                logger.warning("%s cannot be removed: %s; remove it by hand, or with the rights that it needs", path, error)

    def discard(self, job_id: str) -> bool:
        """Discard a job at once; False if there was none."""
        try:
            self._throw_away(self.at(job_id))
        except FileNotFoundError:
            return False
        return True

    # ------------------------------------------------------------------------------------------------ the start

    def recover(self) -> list[str]:
        """Mark the jobs of dead processes as interrupted, before the port opens and after their processes were killed."""
        for folder in (self._incoming, self._trash, self._spares.place):
            self._rubbish += map(str, folder.iterdir())
        self.remove_rubbish()
        found = []
        for job_id in self.job_ids():
            try:
                if self._recover(job_id):
                    found.append(job_id)
            except (OSError, DiskFull) as error:  # a job without an end counts as interrupted, whatever its marker says
                logger.warning("job %s: its folder cannot be put in order: %s", job_id, error)
        self.remove_rubbish()
        return found

    def _recover(self, job_id: str) -> bool:
        """Recover one job; return whether it is interrupted."""
        marker = self.read(job_id)
        if isinstance(marker, RunningMarker):
            self.interrupt(marker, time.time())
            return True
        if marker is None:
            self.discard(job_id)  # a power cut took its marker: nothing is known of it
        elif os.access(f"{self.at(job_id)}/{RUNNING}", os.F_OK):
            self._clear(self.at(job_id))  # it had ended, and was being cleaned up
        return False


class AgentRunFolders(RunFolders):
    """Folders as the executor sees them: the folder of an attempt is the job's own, and exists already, with its inputs."""

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
        DataFolder(data).make()
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
    with disk_full_as_error(data / "agent.lock"):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _read(path: str, kind: type[MarkerT]) -> MarkerT | None:
    try:
        descriptor = os.open(path, _MARKER)
    except OSError:
        return None
    try:
        return msgspec.json.decode(os.read(descriptor, MARKER_MAX_BYTES), type=kind)
    except (OSError, msgspec.MsgspecError):  # torn, or written by a program: treated as absent
        return None
    finally:
        os.close(descriptor)


def _size_of(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return -1


def _name_of(marker: EndedMarker) -> str:
    return DONE if marker.outcome is AgentOutcome.SUCCEEDED else FAILED


def _written(path: str, data: bytes) -> int:
    """Write a new file; return its descriptor."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        written = os.write(descriptor, data)
        while written < len(data):
            written += os.write(descriptor, memoryview(data)[written:])
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def _closed_on_error() -> Iterator[list[int]]:
    """Yield a list for the descriptors that a step opens; they are closed if it fails."""
    opened: list[int] = []
    try:
        yield opened
    except BaseException:
        for descriptor in opened:
            os.close(descriptor)
        raise
