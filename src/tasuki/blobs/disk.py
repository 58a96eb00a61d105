"""What a file system owes us and how it says no: full disks as DiskFull, folders made durable, floors of free space."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from tasuki.errors import DiskFull

__all__ = ["DISK_FULL_ERRNOS", "check_free", "disk_full_as_error", "disk_full_or", "sync_folder"]

DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextlib.contextmanager
def disk_full_as_error(where: Path | str) -> Iterator[None]:
    """Turn "no space", "quota exceeded" and "file too large for this process" into DiskFull; let the rest pass."""
    try:
        yield
    except OSError as error:
        found = disk_full_or(error, where)
        if found is error:
            raise
        raise found from error


def disk_full_or(error: OSError, where: Path | str) -> OSError | DiskFull:
    """The same for one that is not raised here."""
    if error.errno not in DISK_FULL_ERRNOS:
        return error
    return DiskFull(
        f"cannot write {str(where)!r}: {os.strerror(error.errno)}; nothing of it was kept. "
        "Free space there (or raise the quota or file size limit) and try again"
    )


def check_free(folder: Path | str, needed_bytes: int, floor_bytes: int, floor_inodes: int) -> None:
    """DiskFull unless `needed_bytes` fit and both floors would still be kept.

    The floor is for what must not fail: the store's own commits and the record of a job's end.
    """
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes - needed_bytes < floor_bytes:
        raise DiskFull(
            f"{str(folder)!r} has {free_bytes} bytes free; {needed_bytes} are needed and {floor_bytes} must stay free. "
            "Free space there and try again"
        )
    # File systems that make inodes as they need them (btrfs, for one) report none at all.
    if status.f_files and status.f_favail < floor_inodes:
        raise DiskFull(
            f"{str(folder)!r} has {status.f_favail} inodes free; {floor_inodes} must stay free. Remove files there and try again"
        )


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: a rename survives a power cut only after this."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
