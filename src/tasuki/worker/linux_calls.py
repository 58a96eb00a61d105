"""The few calls that Linux has and Python has no name for: prctl on its own process, and holes in files."""

from __future__ import annotations

import ctypes
import errno
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the parent's thread that forked it ends; end at once if that was already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(os.EX_UNAVAILABLE)


def become_subreaper() -> None:
    """Orphans among this process's descendants become its children, instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """What `ps` and `top` show; 15 characters."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def _prctl(option: int, value: int | ctypes.c_char_p) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def punch_hole(descriptor: int, offset: int, size_bytes: int) -> None:
    """Give the disk space of this part of a file back: it reads as zeroes, and nothing else changes. EOPNOTSUPP: not here."""
    if not hasattr(_LIBC, "fallocate"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    if _LIBC.fallocate(descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(size_bytes)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
