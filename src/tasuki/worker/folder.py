"""Run folders: `<data>/runs/<incarnation>/<job_id>.<attempt>/`, made for one attempt and removed when its result is recorded.

    in/   inputs      out/   the job's output files      tmp/    its TMPDIR
    log/  stdout, stderr, progress                       stdin   its payload

The folder of an incarnation is locked (flock) while its worker lives: several workers may share a data folder, and a start can
tell the folders of a dead worker from those of a live one. Blocks on I/O: call it in a thread, except `create` after `is_quick`,
and `recycle`, which take a few system calls. Nothing is made durable: a job counts as done when its result is recorded.

A folder that its job has left unchanged becomes a *spare*, and the next job's folder by one rename: making and removing five
folders and two files costs more than starting a program.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

from tasuki.blobs.files import check_free, disk_full_as_error
from tasuki.config import DISK_FLOOR_BYTES, DISK_FLOOR_INODES
from tasuki.core.job import BlobRef, InputFile, check_file_name, check_job_id, check_name
from tasuki.errors import Corrupt, DiskFull, InvalidInput
from tasuki.worker.attempt import Attempt, JobRefused

SPARES_MAX = 64
SPARE = ".spare-"  # no job id begins with a dot
RECYCLED_LOG_MAX_BYTES = 256 * 1024  # truncating a larger file takes time
FULL_BYTES = 64 * 1024  # a disk with less free space counts as full
READ_ONLY = 0o444  # mode of an input that comes from a cache
_BELOW = ("in", "out", "tmp", "log")
_LOGS = frozenset({"stdout", "stderr", "progress"})
_OWN_FOLDER, _OWN_FILE = stat.S_IFDIR | 0o700, stat.S_IFREG | 0o600
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RunFolder:
    """The folder of one attempt. Paths that every job needs are text: `Path` would cost more than the system calls."""

    def __init__(self, path: Path | str) -> None:
        self.name = str(path)
        self._shared: dict[Path, tuple[int, BlobRef]] = {}
        """Inputs that are links to files of the worker's cache, with the inode."""

    @cached_property
    def path(self) -> Path:
        return Path(self.name)

    @cached_property
    def inputs(self) -> Path:
        return self.path / "in"

    def note_shared(self, path: Path, ref: BlobRef) -> None:
        """Note an input that came from the cache; one that is no link is the job's own."""
        found = path.lstat()
        if found.st_nlink > 1:
            self._shared[path] = found.st_ino, ref

    def changed_input(self) -> str:
        """Return the name of a shared input that was written to, by this job or another one; "" if there is none."""
        for path, (inode, ref) in self._shared.items():
            with contextlib.suppress(FileNotFoundError):
                found = path.lstat()
                if found.st_ino == inode and not is_as_stored(found, ref):  # another inode: the job has replaced its own link
                    return str(path.relative_to(self.inputs))
        return ""


def cache_mark(sha256: str, inode: int) -> int:
    """Return the modification time, in ns, of a cached file with this hash and inode: whole seconds, which every file system
    keeps."""
    return int.from_bytes(hashlib.sha256(f"{sha256} {inode}".encode()).digest()[:4], "big") // 2 * 1_000_000_000


def is_as_stored(found: os.stat_result, ref: BlobRef) -> bool:
    """Return whether a cached file has not been written to since it was verified."""
    is_marked = found.st_mtime_ns == cache_mark(ref.sha256, found.st_ino)
    return is_marked and found.st_mode == stat.S_IFREG | READ_ONLY and found.st_size == ref.size_bytes


class RunFolders:
    """All run folders of one worker process."""

    def __init__(self, data: Path, incarnation: str, *, floor_free_bytes: int = DISK_FLOOR_BYTES) -> None:
        self._runs = data / "runs"
        self.root = self._runs / check_name(incarnation, "incarnation")
        self._root = str(self.root)
        self._floor_free_bytes = floor_free_bytes
        self._spares: list[str] = []
        self._spare_numbers = itertools.count(1)
        with disk_full_as_error(self.root):
            # 0700: inputs and outputs may be secret, and the machine may have other users.
            self._runs.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(self._runs):  # no sweep meets the folder before it is locked
                self.root.mkdir(mode=0o700)
                self._lock = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Release the lock, and remove the incarnation's folder if it is empty."""
        for spare in self._spares:
            remove_tree(spare)
        with contextlib.suppress(OSError):  # it is not empty, or gone
            self.root.rmdir()
        os.close(self._lock)

    def at(self, attempt: Attempt) -> RunFolder:
        """Return the attempt's folder, which need not exist."""
        check_job_id(attempt.spec.job_id)  # it becomes a path
        return RunFolder(f"{self._root}/{attempt.spec.job_id}.{attempt.attempt:d}")

    def create(self, attempt: Attempt) -> RunFolder:
        """Make the folder with its payload and inline inputs. DiskFull below the floor; JobRefused for impossible inputs."""
        spec = attempt.spec
        for file in spec.files:
            _check_input(file)
        own = [file for file in spec.files if file.cached_as is None]  # a link takes no space
        needed_bytes = len(spec.payload) + sum(file.size_bytes or len(file.data or b"") for file in own)
        check_free(self._root, needed_bytes, self._floor_free_bytes, DISK_FLOOR_INODES)
        folder = self.at(attempt)
        with disk_full_as_error(folder.name):
            self._make(folder)
            if spec.payload:
                (folder.path / "stdin").write_bytes(spec.payload)
            for file in spec.files:
                target = folder.inputs / file.name
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if file.data is not None:
                    target.write_bytes(file.data)
        return folder

    def _make(self, folder: RunFolder) -> None:
        if os.access(folder.name, os.F_OK):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), folder.name)
        if self._spares:
            os.rename(self._spares.pop(), folder.name)  # noqa: PTH104
            return
        folder.path.mkdir(mode=0o700)
        for below in _BELOW:
            os.mkdir(f"{folder.name}/{below}", mode=0o700)  # noqa: PTH102

    def is_quick(self, attempt: Attempt) -> bool:
        """Return whether `create` takes only a few system calls for this attempt."""
        return bool(self._spares) and not attempt.spec.payload and not attempt.spec.files

    def recycle(self, attempt: Attempt) -> bool:
        """Make the attempt's folder a spare if that is simple (no thread needed), and return whether; nothing may run in it."""
        path = self.at(attempt).name
        if len(self._spares) >= SPARES_MAX or not _is_as_made(path):
            return False
        spare = f"{self._root}/{SPARE}{next(self._spare_numbers)}"
        os.rename(path, spare)  # noqa: PTH104
        self._spares.append(spare)
        return True

    def shortage(self) -> str:
        """Return why the disk is full, or "": a job that met a full disk cannot always report it itself."""
        try:
            check_free(self.root, 0, max(self._floor_free_bytes, FULL_BYTES), DISK_FLOOR_INODES)
        except DiskFull as error:
            return error.message
        return ""

    def sweep(self, dispose: Callable[[Path], None]) -> list[Path]:
        """Hand each folder of an incarnation whose worker is dead to `dispose`; return them."""
        with _locked(self._runs):
            abandoned = [path for path in sorted(self._runs.iterdir()) if path != self.root and _is_abandoned(path)]
            for path in abandoned:
                dispose(path)
        return abandoned


def _is_as_made(path: str) -> bool:
    """Return whether a job's folder is as it was at the start, except for small logs, which are truncated."""
    try:
        if not _is_ours(os.lstat(path), _OWN_FOLDER) or sorted(os.listdir(path)) != sorted(_BELOW):  # noqa: PTH208
            return False
    except OSError:  # something of it is gone
        return False
    return all(is_part_as_made(path, below) for below in _BELOW)


def is_part_as_made(path: str, below: str) -> bool:
    """Return whether one of the folders in a job's folder is as it was at the start; small logs are truncated."""
    part = f"{path}/{below}"
    try:
        if not _is_ours(os.lstat(part), _OWN_FOLDER):
            return False
        with os.scandir(part) as entries:
            found = [entry.name for entry in itertools.islice(entries, len(_LOGS) + 1)]
        return _emptied(part, found) if below == "log" else not found
    except OSError:
        return False


def _emptied(folder: str, logs: list[str]) -> bool:
    """Truncate the logs of a job if they are small and nothing else is there, and return whether."""
    found = {name: os.lstat(f"{folder}/{name}") for name in logs}
    if found.keys() != _LOGS or not all(_is_ours(log, _OWN_FILE) for log in found.values()):
        return False
    if any(log.st_size > RECYCLED_LOG_MAX_BYTES for log in found.values()):
        return False
    for name, log in found.items():
        if log.st_size:
            os.truncate(f"{folder}/{name}", 0)
    return True


def _is_ours(found: os.stat_result, mode: int) -> bool:
    """Return whether an entry has this kind and mode, belongs to this user, and, if it is a file, has no other name."""
    return found.st_mode == mode and found.st_uid == os.geteuid() and (stat.S_ISDIR(mode) or found.st_nlink == 1)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_abandoned(path: Path) -> bool:
    if path.is_symlink() or not path.is_dir():
        return False
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False  # its worker lives
    finally:
        os.close(descriptor)
    return True


def _check_input(file: InputFile) -> None:
    try:
        check_file_name(file.name)
    except InvalidInput as error:
        raise JobRefused("BAD_INPUT", error.message) from error
    if file.data is None and (file.sha256 is None or file.size_bytes is None):
        raise JobRefused("BAD_INPUT", f"input file {file.name!r} has no bytes: it is neither inline nor a blob")


def verify_input(path: Path, file: InputFile) -> None:
    """Raise Corrupt unless the file at `path` has the announced size and sha256."""
    with path.open("rb", buffering=0) as source:
        sha256 = hashlib.file_digest(source, "sha256").hexdigest()
        size_bytes = source.tell()
    if size_bytes != file.size_bytes or sha256 != file.sha256:
        raise Corrupt(
            f"input file {file.name!r} arrived with {size_bytes} bytes and sha256 {sha256}; "
            f"announced were {file.size_bytes} bytes and {file.sha256}"
        )


def remove_tree(path: Path | str) -> None:
    """Remove a folder with everything below it, also if a job made it unreadable; or a file; or a link, which is not followed.

    An entry that cannot be removed does not keep the others; the first such error is raised at the end."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)  # noqa: PTH108
            return
        os.chmod(path, 0o700)  # noqa: PTH101
        top = os.open(path, _FOLDER)
    except FileNotFoundError:
        return
    try:
        _empty(top)
    finally:
        os.close(top)
    os.rmdir(path)  # noqa: PTH106


def _empty(top: int) -> None:
    """Empty a folder. Each subfolder is moved to the top before it is emptied, so that no path becomes too long."""
    problems: list[OSError] = []
    mark, numbers = f".{secrets.token_hex(8)}-", itertools.count(1)
    found = _unlinked(top, problems)
    while found:
        name = found.pop()
        try:
            os.chmod(name, 0o700, dir_fd=top)
            folder = os.open(name, _FOLDER, dir_fd=top)
        except OSError as error:
            problems.append(error)
            continue
        try:
            for below in _unlinked(folder, problems):
                try:
                    os.chmod(below, 0o700, dir_fd=folder)
                    os.rename(below, moved := f"{mark}{next(numbers)}", src_dir_fd=folder, dst_dir_fd=top)
                    found.append(moved)
                except OSError as error:
                    problems.append(error)
            os.rmdir(name, dir_fd=top)
        except OSError as error:
            problems.append(error)
        finally:
            os.close(folder)
    if problems:
        raise problems[0]


def _unlinked(folder: int, problems: list[OSError]) -> list[str]:
    """Remove the files and links of a folder, and return the folders in it."""
    left = []
    for entry in list(os.scandir(folder)):
        try:
            if entry.is_dir(follow_symlinks=False):
                left.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=folder)
        except OSError as error:
            problems.append(error)
    return left
