"""Ends what outlived a keeper: at the start of a worker on the same data folder, and when a worker loses its keeper.

In its lifetime the keeper is the parent of all; after its death its jobs are somebody else's children. They are found by
their cgroup, if they were in one: then nothing escapes. Else by tag, by marker, by a working folder or a file open for
writing below the incarnation's run folder, and as children of those, until two passes in a row find nothing. What has
changed its limit of file locks, cleared its environment, left its folder *and* lost its parent is not found: only a
cgroup holds that.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from pathlib import Path

from tasuki.worker.keeper.cgroup import kill_group_of
from tasuki.worker.keeper.linux import MARK, RLIMIT_LOCKS, TAG_BITS, tag_of
from tasuki.worker.keeper.proc import Seen, environment_of, living, signal_checked, works_under

SWEEP_S = 10.0  # what cannot be killed in this time sits in the kernel (a dead disk); the start goes on without it
_POLL_S = 0.02


def sweep(incarnation: str, folder: Path) -> list[int]:
    """Kill all that is left of a dead incarnation, whose run folder this was; the pids."""
    if sys.platform != "linux":
        return []
    kill_group_of(incarnation)
    killed: set[int] = set()
    deadline = time.monotonic() + SWEEP_S
    empty_passes = 0
    while empty_passes < 2 and time.monotonic() < deadline:
        found = _left_of(incarnation, os.fsencode(folder.resolve()))
        for number in (signal.SIGSTOP, signal.SIGKILL):  # first all stand still, so that none starts another
            for seen in found:
                if signal_checked(seen, number):
                    killed.add(seen.pid)
        empty_passes = 0 if found else empty_passes + 1
        if found:
            time.sleep(_POLL_S)
    return sorted(killed)


def _left_of(incarnation: str, folder: bytes) -> list[Seen]:
    tag, mark = tag_of(incarnation) >> TAG_BITS, MARK + incarnation.encode() + b"/"
    everyone = [seen for seen in living() if seen.pid != os.getpid()]
    found = {seen.pid: seen for seen in everyone if _belongs(seen, tag, mark, folder)}
    grown = True
    while grown:  # down to the children, which may have hidden better than their parent
        below = {seen.pid: seen for seen in everyone if seen.parent in found and seen.pid not in found}
        found.update(below)
        grown = bool(below)
    return list(found.values())


def _belongs(seen: Seen, tag: int, mark: bytes, folder: bytes) -> bool:
    with contextlib.suppress(OSError):
        if resource.prlimit(seen.pid, RLIMIT_LOCKS)[0] >> TAG_BITS == tag:
            return True
    if any(entry.startswith(mark) for entry in environment_of(seen.pid)):
        return True
    # A person who looks into the folder has a terminal; a job has none.
    return seen.terminal == 0 and works_under(seen.pid, folder)
