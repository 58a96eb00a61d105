"""Uploads into a folder that were cut off: `part-…`, named by whose and which they are, and written in place from the start.

So a process that is killed loses nothing that it had written. Whoever writes one holds a lock on it, which the system gives back
when the process is gone; what is found is read and hashed again, unless this process itself has just put it aside. The generation
is no part of the name: the bytes are the same whichever they are kept under. Touches only the files of its own folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from tasuki.blobs.disk import disk_full_as_error
from tasuki.blobs.stream_check import StreamCheck

__all__ = ["PARTIAL_GRACE_S", "PREFIX", "Partials"]

PREFIX = "part-"
PARTIAL_GRACE_S = 24 * 3600.0  # since the last write
READ_BYTES = 1024 * 1024
KNOWN_MAX = 256  # put aside by this process, and not to be read again; a hash takes a few hundred bytes


class _PartFile(NamedTuple):
    """What a file held when it was put aside, and how to tell that nobody has touched it since."""

    inode: int
    size_bytes: int
    written_ns: int
    intake: StreamCheck


class Partials:
    """The half-sent blobs of one folder, for all its threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # for the table; never held over I/O
        self._known: OrderedDict[Path, _PartFile] = OrderedDict()

    def take(self, resume_key: str, intake: StreamCheck) -> tuple[int, Path] | None:
        """(descriptor, path) of the file, locked, with `intake` told what it holds; None while another writes it."""
        name = hashlib.sha256(f"{resume_key}\0{intake.sha256}".encode(errors="backslashreplace")).hexdigest()
        path = self._folder / (PREFIX + name)
        descriptor = self._locked(path, os.O_CREAT)
        if descriptor is None:
            return None
        try:
            self._take_in(descriptor, path, intake)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, path

    def put_aside(self, descriptor: int, path: Path, intake: StreamCheck) -> None:
        """Its writer stops here. Gives the lock back."""
        try:
            status = os.fstat(descriptor)
            with self._lock:
                self._known[path] = _PartFile(status.st_ino, status.st_size, status.st_mtime_ns, intake)
                if len(self._known) > KNOWN_MAX:
                    self._known.popitem(last=False)
        finally:
            os.close(descriptor)

    def sweep(self, grace_s: float = PARTIAL_GRACE_S) -> int:
        """Remove those that nobody has written to for so long, and nobody has open; how many."""
        removed = 0
        for path in self._folder.glob(PREFIX + "*"):
            try:
                if path.lstat().st_mtime < time.time() - grace_s:
                    removed += self._remove(path)
            except FileNotFoundError:
                continue  # it has just become a blob, or another process sweeps too
        return removed

    def _remove(self, path: Path) -> bool:
        descriptor = self._locked(path)
        if descriptor is None:
            return False
        try:
            path.unlink()
        finally:
            os.close(descriptor)
        with self._lock:
            self._known.pop(path, None)
        return True

    def _locked(self, path: Path, flags: int = 0) -> int | None:
        while True:
            with disk_full_as_error(path):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_named(descriptor, path):
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                return None
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # who had it before has published or dropped it since it was opened

    def _take_in(self, descriptor: int, path: Path, intake: StreamCheck) -> None:
        status = os.fstat(descriptor)
        if status.st_size > (intake.announced_bytes or 0) or not stat.S_ISREG(status.st_mode):
            os.ftruncate(descriptor, 0)
            return
        with self._lock:
            known = self._known.pop(path, None)
        if known is not None and known[:3] == (status.st_ino, status.st_size, status.st_mtime_ns):
            intake.go_on(known.intake)
        else:
            _read(descriptor, intake)
        os.lseek(descriptor, intake.size_bytes, os.SEEK_SET)


def is_named(descriptor: int, path: Path) -> bool:
    """Whether the name still leads to this file."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read(descriptor: int, intake: StreamCheck) -> None:
    while chunk := os.pread(descriptor, READ_BYTES, intake.size_bytes):
        intake.take(memoryview(chunk))
