"""Folders that a job left as they were, and that become the next job's by one rename.

Making and removing them takes more of a small job's time than its program does: a file system looks for a free inode, and ext4
looks at each that was freed lately before it gives one out. Nothing here is durable or of worth: a start throws it away. All of
it blocks for a few system calls; called from several threads.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from tasuki.worker.folder import is_part_as_made, remove_tree

KEPT_BELOW = ("out", "tmp", "log")
SPARES_MAX = 64  # of each


class Spares:
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
        if kept is None or len(kept) >= SPARES_MAX or not is_part_as_made(folder, name):
            return False
        spare = f"{self._place}/{next(self._numbers)}"
        try:
            os.rename(f"{folder}/{name}", spare)  # noqa: PTH104
        except FileNotFoundError:  # as above
            return False
        kept.append(spare)
        return True

    def remove(self) -> None:
        """All of them, also those of an earlier process."""
        for kept in self._kept.values():
            kept.clear()
        for left in self.place.iterdir() if self.place.is_dir() else ():
            remove_tree(left)
