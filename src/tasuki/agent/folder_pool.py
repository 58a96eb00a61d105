"""Folders that a job left as they were, and that become the next job's by one rename.

Making and removing them takes more of a small job's time than its program does: a file system looks for a free inode, and ext4
looks at each that was freed lately before it gives one out. Nothing here is durable or of worth: a start throws it away. All of
it blocks for a few system calls; called from several threads.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from pathlib import Path

from tasuki.worker.folder import is_part_as_made

INPUTS, WORKED_IN = "in", ("out", "tmp", "log")
KEPT_BELOW = (INPUTS, *WORKED_IN)
FEW_FILES, FEW_BYTES = 4, 64 * 1024
"""Inputs of a job that are removed at once: so many, of this size."""
SPARES_MAX = 64  # of each


class FolderPool:
    """All of one agent."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._place = str(place)
        self._numbers = itertools.count(1)
        self._kept: dict[str, list[str]] = {name: [] for name in KEPT_BELOW}

    def put(self, folder: str, name: str) -> None:
        """Make this folder below `folder`, or let it be a spare one."""
        path = f"{folder}/{name}"
        try:
            os.rename(self._kept[name].pop(), path)  # noqa: PTH104  # `Path` costs more than the call
        except (IndexError, FileNotFoundError):  # there is none, or somebody has tidied up here
            os.mkdir(path, mode=0o700)  # noqa: PTH102

    def keep(self, folder: str, name: str) -> bool:
        """Take it out of there if it can be used again; nothing may be running in it."""
        kept = self._kept.get(name)
        if name == INPUTS:
            with contextlib.suppress(OSError):  # what cannot be removed here is thrown away as it is
                _remove_few(f"{folder}/{name}")
        if kept is None or len(kept) >= SPARES_MAX or not is_part_as_made(folder, name):
            return False
        spare = f"{self._place}/{next(self._numbers)}"
        try:
            os.rename(f"{folder}/{name}", spare)  # noqa: PTH104
        except FileNotFoundError:  # as above
            return False
        kept.append(spare)
        return True

    def taken(self) -> list[str]:
        """All of them, to be removed."""
        taken = [spare for kept in self._kept.values() for spare in kept]
        for kept in self._kept.values():
            kept.clear()
        return taken


def _remove_few(folder: str) -> None:
    """What is in it, if that is little; no link is followed."""
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        return
    with os.scandir(folder) as found_in:  # a program may have made a million
        files = [entry.path for entry in itertools.islice(found_in, FEW_FILES + 1)]
    if len(files) > FEW_FILES:
        return
    for file in files:
        found = os.lstat(file)
        if not stat.S_ISDIR(found.st_mode) and found.st_size <= FEW_BYTES:
            os.unlink(file)  # noqa: PTH108
