"""What /proc says about processes, and signals that reach exactly the one that was looked at. Linux only.

A process number says nothing for long: between a look at /proc and a signal it may have been given to somebody else. So
`signal_checked` holds the process by its pidfd, and looks again at when it was born.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_GONE = (FileNotFoundError, ProcessLookupError)


class Seen(NamedTuple):
    """A living process, as /proc showed it."""

    pid: int
    parent: int
    group: int
    session: int
    terminal: int
    """0: none."""
    born: int
    """Clock ticks since boot; with the pid it names the process for good."""
    rss_bytes: int


def living() -> Iterator[Seen]:
    """All processes but zombies: those are dead, and stay until their parent asks."""
    for name in os.listdir("/proc"):  # noqa: PTH208  # asked twenty times a second where limits are watched
        if name.isdigit() and (seen := look(int(name))) is not None:
            yield seen


def look(pid: int) -> Seen | None:
    """This process, or None if it is dead."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except _GONE:
        return None
    try:
        # The name, in brackets, may hold anything. Fields are counted from the state on.
        fields = os.read(descriptor, 4096).rpartition(b")")[2].split()
    except _GONE:
        return None
    finally:
        os.close(descriptor)
    if not fields or fields[0] in (b"Z", b"X"):
        return None
    return Seen(
        pid=pid,
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        terminal=int(fields[4]),
        born=int(fields[19]),
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
    )


def signal_checked(seen: Seen, number: signal.Signals) -> bool:
    """Send a signal to exactly this process. False if it is gone, or became another user (setuid)."""
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
    """`NAME=value` as the process was started with; nothing if it may not be read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (*_GONE, PermissionError):
        return []


def works_under(pid: int, folder: bytes) -> bool:
    """Whether it stands in the folder, or has something below it open for writing. (A backup reads, and is no job.)"""
    prefix = folder.rstrip(b"/") + b"/"
    process = Path(f"/proc/{pid}")
    if _leads_under(process / "cwd", prefix):
        return True
    with contextlib.suppress(*_GONE, PermissionError):
        return any(_leads_under(link, prefix) and _writable(process, link.name) for link in (process / "fd").iterdir())
    return False


def _leads_under(link: Path, prefix: bytes) -> bool:
    with contextlib.suppress(OSError):  # also a path that is too long to be told: anybody may have such a one open
        return (os.fsencode(link.readlink()) + b"/").startswith(prefix)
    return False


def _writable(process: Path, descriptor: str) -> bool:
    with contextlib.suppress(*_GONE, PermissionError):
        for line in (process / "fdinfo" / descriptor).read_text().splitlines():
            if line.startswith("flags:"):
                return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False
