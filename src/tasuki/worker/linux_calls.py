"""System calls and /proc: prctl, holes in files, living processes, and signals that reach exactly the process that was seen.

A pid alone does not name a process for long: between a look at /proc and a signal it may have been given to another one. So
`signal_checked` holds the process by its pidfd, and compares when it was born. /proc and prctl are Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_LIBC = ctypes.CDLL(None, use_errno=True)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_GONE = (FileNotFoundError, ProcessLookupError)


def run_after_fork(main: Callable[[], object]) -> NoReturn:
    """Run `main` in a process that was just forked, print its exception, and never return into the code of the parent."""
    try:
        main()
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(os.EX_SOFTWARE)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the parent's thread that forked it ends; exit if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(os.EX_UNAVAILABLE)


def become_subreaper() -> None:
    """Make orphans among this process's descendants its children, instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def become_undumpable() -> None:
    """Close /proc/PID/environ, mem and fd of this process, and ptrace, to other processes of the same user: its programs."""
    _prctl(_PR_SET_DUMPABLE, 0)


def is_dumpable() -> bool:
    return _LIBC.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1


def wipe_variables(*names: str) -> None:
    """Overwrite variables that have left the environment where /proc/PID/environ still shows them."""
    if sys.platform != "linux":
        return
    start, end = _initial_memory(47)  # env_start and env_end
    if not start < end:
        return
    place = start
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        if entry.partition(b"=")[0].decode(errors="replace") in names:
            ctypes.memset(place, 0, len(entry))
        place += len(entry) + 1


def set_title(title: str) -> None:
    """Set the name that `top` shows, to the first word, and the command line that `ps` shows and `pkill -f` looks at, as far as
    there is room. A name with a space would mislead scripts that split /proc/PID/stat."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(title.partition(" ")[0].encode()))
    start, end = _initial_memory(45)  # arg_start and arg_end
    text = title.encode()[: max(0, end - start - 1)]
    if text:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))


def _initial_memory(field: int) -> tuple[int, int]:
    """Return start and end of a part of this process's memory that the kernel filled at its start; from proc(5), stat."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[field]), int(fields[field + 1])


def _prctl(option: int, value: int | ctypes.c_char_p) -> None:
    _check(_LIBC.prctl(option, value, 0, 0, 0))


def _check(status: int) -> None:
    if status != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def punch_hole(descriptor: int, offset: int, size_bytes: int) -> None:
    """Give the disk space of a part of a file back; it reads as zeroes. EOPNOTSUPP: the file system has no holes."""
    if not hasattr(_LIBC, "fallocate"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
    _check(_LIBC.fallocate(descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(size_bytes)))


# ---------------------------------------------------------------------------------------------------- /proc


class ProcessInfo(NamedTuple):
    """A living process, as /proc shows it."""

    pid: int
    parent: int
    group: int
    session: int
    terminal: int
    """0: none."""
    born: int
    """Clock ticks since boot; with the pid it names the process for good."""
    rss_bytes: int


def living() -> Iterator[ProcessInfo]:
    """Yield all processes except zombies, which are dead and only wait for their parent."""
    for name in os.listdir("/proc"):  # noqa: PTH208  # called twenty times a second where limits are watched
        if name.isdigit() and (seen := look(int(name))) is not None:
            yield seen


def look(pid: int) -> ProcessInfo | None:
    """Return this process, or None if it is dead."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except _GONE:
        return None
    try:
        # The name, in brackets, may have any character. Fields are counted from the state on.
        fields = os.read(descriptor, 4096).rpartition(b")")[2].split()
    except _GONE:
        return None
    finally:
        os.close(descriptor)
    if not fields or fields[0] in (b"Z", b"X"):
        return None
    return ProcessInfo(
        pid=pid,
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        terminal=int(fields[4]),
        born=int(fields[19]),
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
    )


def signal_checked(seen: ProcessInfo, number: signal.Signals) -> bool:
    """Send a signal to exactly this process; return False if it is gone, or has become another user (setuid)."""
    try:
        pidfd = os.pidfd_open(seen.pid)
    except OSError:  # gone; or no descriptor left, and the next pass tries again
        return False
    try:
        now = look(seen.pid)
        if now is None or now.born != seen.born:
            return False
        signal.pidfd_send_signal(pidfd, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(pidfd)
    return True


def environment_of(pid: int) -> list[bytes]:
    """Return the `NAME=value` entries with which the process was started; none if they may not be read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (*_GONE, PermissionError):
        return []


def works_under(pid: int, folder: bytes) -> bool:
    """Return whether its working folder is in the folder, or it writes to a file below it. (A backup only reads.)"""
    prefix = folder.rstrip(b"/") + b"/"
    process = Path(f"/proc/{pid}")
    if _leads_under(process / "cwd", prefix):
        return True
    with contextlib.suppress(*_GONE, PermissionError):
        return any(_leads_under(link, prefix) and _writable(process, link.name) for link in (process / "fd").iterdir())
    return False


def _leads_under(link: Path, prefix: bytes) -> bool:
    with contextlib.suppress(OSError):  # also for a path that is too long to be read
        return (os.fsencode(link.readlink()) + b"/").startswith(prefix)
    return False


def _writable(process: Path, descriptor: str) -> bool:
    with contextlib.suppress(*_GONE, PermissionError):
        for line in (process / "fdinfo" / descriptor).read_text().splitlines():
            if line.startswith("flags:"):
                return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def write_file(path: Path | str, text: str) -> None:
    """Write to a control file of the kernel, in one system call."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def counter(path: Path, name: str) -> int:
    """Return the number in the line `name number` of a file of the kernel; 0 if there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:  # the controller is not there
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
