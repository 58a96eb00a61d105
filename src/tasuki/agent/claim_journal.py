"""Which jobs an agent has claimed and not yet settled with the registry, on its disk: for the next start, if it is killed.

    <data>/claims/<job_id>   written before the claim is asked for, removed when its end is recorded or it was given up
    <data>/node-id           what tells this node from others of the same name; its data folder has one user at a time

A note says no more than "ask what became of it": whose lease counts is in the registry, how it ended here in the job's folder.
All of it blocks: call it in a thread.
"""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from tasuki.blobs.files import disk_full_as_error, durable_write, sync_folder
from tasuki.core.failover.registry_records import ID_CHARS
from tasuki.core.ids import check_job_id
from tasuki.errors import InvalidInput


class ClaimJournal:
    """Of one data folder."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._folder = data / "claims"

    def prepare(self) -> str:
        """Make what is missing; the id of this node."""
        with disk_full_as_error(self._data):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            path = self._data / "node-id"
            with contextlib.suppress(FileNotFoundError):
                if len(known := path.read_text("ascii").strip()) == ID_CHARS:
                    return known
            made = secrets.token_hex(ID_CHARS // 2)
            durable_write(path, f"{made}\n".encode())
        return made

    def write(self, job_id: str) -> None:
        with disk_full_as_error(self._folder):
            (self._folder / check_job_id(job_id)).touch()
            sync_folder(self._folder)

    def remove(self, job_id: str) -> None:
        """Not made durable: one that is back after a power cut is looked at once more."""
        (self._folder / check_job_id(job_id)).unlink(missing_ok=True)

    def left(self) -> list[str]:
        """What an earlier process did not settle."""
        found = []
        for path in sorted(self._folder.iterdir()):
            with contextlib.suppress(InvalidInput):  # what somebody else put there
                found.append(check_job_id(path.name))
        return found
