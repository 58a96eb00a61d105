"""Files that must survive: durable writes, part files that a later transfer resumes, full disks as DiskFull, free space.

A write is durable after four steps: write a file under another name, fsync it, rename it, fsync its folder (`durable_write` does
all of them). All functions block on I/O: an event loop calls them in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from tasuki.errors import DiskFull

try:
    import fcntl
except ImportError:  # Windows, where only clients run
    HAS_LOCKS = False
else:
    HAS_LOCKS = True

DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
READ_BYTES = 1024 * 1024
WRITE_BACK_BYTES = 16 * 1024 * 1024


# ---------------------------------------------------------------------------------------------------- space


@contextlib.contextmanager
def disk_full_as_error(where: Path | str) -> Iterator[None]:
    """Turn "no space", "quota exceeded" and "file too large for this process" into DiskFull; let other errors pass."""
    try:
        yield
    except OSError as error:
        found = disk_full_or(error, where)
        if found is error:
            raise
        raise found from error


def disk_full_or(error: OSError, where: Path | str) -> OSError | DiskFull:
    """Return DiskFull for an error that means a full disk, and every other error as it is."""
    if error.errno not in DISK_FULL_ERRNOS:
        return error
    return DiskFull(
        f"cannot write {str(where)!r}: {os.strerror(error.errno)}; nothing of it was kept. "
        "Free space there (or raise the quota or file size limit) and try again"
    )


def check_free(folder: Path | str, needed_bytes: int, floor_bytes: int, floor_inodes: int) -> None:
    """Raise DiskFull unless `needed_bytes` fit and both floors would still be kept.

    The floor is for writes that must not fail: the store's own commits and the record of a job's end.
    """
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes - needed_bytes < floor_bytes:
        needed = f"{needed_bytes} are needed and " if needed_bytes else ""
        raise DiskFull(
            f"{str(folder)!r} has {free_bytes} bytes free; {needed}{floor_bytes} must stay free. Free space there and try again"
        )
    # File systems that make inodes as they need them (btrfs, for one) report none at all.
    if status.f_files and status.f_favail < floor_inodes:
        raise DiskFull(
            f"{str(folder)!r} has {status.f_favail} inodes free; {floor_inodes} must stay free. Remove files there and try again"
        )


# ---------------------------------------------------------------------------------------------------- durability


def sync_file(path: Path) -> None:
    """Make the contents of a file durable."""
    _fsync(path, os.O_RDONLY)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: a rename survives a power cut only after this."""
    _fsync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def durable_rename(source: Path, target: Path) -> None:
    """Make `source` durable under the name `target`, replacing what has that name. Both are in one folder."""
    sync_file(source)
    source.replace(target)
    sync_folder(target.parent)


def durable_write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Make `path` a file with these bytes, durably: readers, and the next start after a power cut, find the old or new one."""
    durable_rename(_written_beside(path, data, mode), path)


def replace_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Make `path` a file with these bytes: readers find the old or the new one, the next start after a power cut perhaps none."""
    _written_beside(path, data, mode).replace(path)


def _written_beside(path: Path, data: bytes, mode: int) -> Path:
    """Write the bytes as `.<name>.new`: one writer at a time, and no pattern such as `*.json` meets the file."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)  # left by a process that was killed
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    return temporary


# ---------------------------------------------------------------------------------------------------- part files


class PartFile:
    """A file that one or several transfers fill, and that its owner publishes under another name or discards.

    `claim` locks the file, so that one process at a time writes to it; a process that is killed leaves its bytes for the next.
    It is unlocked by `close`, after its name is gone, so that nobody takes up a file that was published or discarded.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._is_open = True
        self._unsynced_bytes = 0

    @classmethod
    def claim(cls, path: Path, *, create: bool = True, mode: int = 0o600) -> PartFile | None:
        """Open and lock the file; None while another transfer has it, without `create` also if it is not there.

        Nothing is changed before the lock is held and the name is known to lead to this file still: it may have been published.
        OSError on a file system without locks.
        """
        if not HAS_LOCKS:
            return None
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        while True:
            try:
                part = cls(path, os.open(path, flags, mode))
            except FileNotFoundError:
                if create:
                    raise
                return None
            try:
                fcntl.flock(part._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it when the process ends
                if part._is_named():
                    return part
            except (BlockingIOError, PermissionError):  # EWOULDBLOCK, on some systems EACCES: another descriptor has the lock
                part.close()
                return None
            except BaseException:
                part.close()
                raise
            part.close()  # its last owner has published or discarded it since it was opened

    @classmethod
    def create(cls, path: Path, mode: int = 0o600) -> PartFile:
        """Make a new file that no other transfer knows of, and therefore needs no lock."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)  # Windows
        return cls(path, os.open(path, flags, mode))

    def status(self) -> os.stat_result:
        return os.fstat(self._descriptor)

    def read_into(self, take: Callable[[bytes], object], max_bytes: int | None = None) -> int:
        """Call `take` with the bytes that are there, continue writing behind them, and return how many there are.

        A file with more than `max_bytes` cannot be a part of what is expected, and is emptied.
        """
        if max_bytes is not None and self.status().st_size > max_bytes:
            self.truncate()
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        size_bytes = 0
        while piece := os.read(self._descriptor, READ_BYTES):
            take(piece)
            size_bytes += len(piece)
        return size_bytes

    def seek(self, offset: int) -> None:
        os.lseek(self._descriptor, offset, os.SEEK_SET)
        self._unsynced_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all the bytes and return how many."""
        view = memoryview(data).cast("B")
        written = 0
        while written < view.nbytes:  # a disk that fills up takes a part first and says so at the next call
            written += os.write(self._descriptor, view[written:])
        self._unsynced_bytes += written
        if self._unsynced_bytes >= WRITE_BACK_BYTES:
            self._write_back()
        return written

    def _write_back(self) -> None:
        """Have the system write what came to the disk while more comes: `sync` would wait for all of it at the end."""
        if hasattr(os, "posix_fadvise"):  # not on Windows
            start = os.lseek(self._descriptor, 0, os.SEEK_CUR) - self._unsynced_bytes
            # Linux begins to write these bytes, and drops only those that are written already: none yet.
            os.posix_fadvise(self._descriptor, start, self._unsynced_bytes, os.POSIX_FADV_DONTNEED)
        self._unsynced_bytes = 0

    def truncate(self) -> None:
        """Begin at byte 0 again."""
        os.ftruncate(self._descriptor, 0)
        self.seek(0)

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def publish(self, target: Path) -> None:
        """Rename the file, and close it. Nothing is fsynced. If the rename fails, the file is still to be discarded."""
        if not HAS_LOCKS:
            self.close()  # Windows renames and removes no open file
        self.path.replace(target)
        self.close()

    def discard(self) -> None:
        """Remove the file, unless its name leads to another one by now, and close it. Harmless after `publish` or `close`.

        A file that cannot be removed stays, and is only in the way.
        """
        if not HAS_LOCKS:
            self.close()
        with contextlib.suppress(OSError):
            if not HAS_LOCKS or (self._is_open and self._is_named()):
                self.path.unlink()
        self.close()

    def close(self) -> None:
        """Unlock the file and leave it for the next transfer. Harmless when repeated."""
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)

    def _is_named(self) -> bool:
        try:
            return os.path.samestat(self.path.lstat(), self.status())
        except FileNotFoundError:
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
