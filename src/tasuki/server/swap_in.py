"""How a restored store takes its place: all of it, or nothing, whenever the process is killed.

It is made ready in `<data>/restoring/`. Then the renames that it needs are written down there, durably: from that moment on it is
decided, and whoever comes next (a server, another restore) finishes them. Without that note the folder is garbage of a restore
that came to nothing. Old files are moved aside into `<data>/replaced-<time>/`, never deleted.

Touches the data folder's own names only, and only as the holder of its owner lock.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from tasuki.blobs.files import durable_write, sync_folder
from tasuki.config import DataFolder

STAGING_NAME = "restoring"
DECIDED_NAME = "decided"

Move = tuple[str, str]
"""(from, to), both below the data folder."""


def store_names(folder: DataFolder) -> list[str]:
    """What makes up a store, in the order in which it is moved away: without the database the journal does no harm."""
    database = folder.database.name
    return [database, f"{database}-wal", f"{database}-shm", folder.blobs.name]


def staging_of(folder: DataFolder) -> Path:
    return folder.root / STAGING_NAME


def decide(folder: DataFolder, aside: str, fault: Callable[[str], None]) -> None:
    """Write down how the staged store takes its place; what is there now goes to the folder `aside`. The lock is held."""
    names = store_names(folder)
    moves: list[Move] = [(name, f"{aside}/{name}") for name in names if (folder.root / name).exists()]
    # The database last: while it is not there, there is no store.
    moves += [(f"{STAGING_NAME}/{name}", name) for name in reversed(names) if (staging_of(folder) / name).exists()]
    note = staging_of(folder) / DECIDED_NAME
    sync_folder(staging_of(folder))
    sync_folder(folder.root)
    fault("restore.staged")
    durable_write(note, msgspec.json.encode(moves))
    fault("restore.decided")


def carry_out(folder: DataFolder, fault: Callable[[str], None] = lambda point: None) -> None:
    """Do what was decided and is not done yet. The lock is held."""
    note = staging_of(folder) / DECIDED_NAME
    for start, end in msgspec.json.decode(note.read_bytes(), type=list[Move]):
        source, target = folder.root / start, folder.root / end
        # A move that was done has left its target. For one to `aside` that is the only sign: a new file may have its old name.
        if source.exists() and not target.exists():
            target.parent.mkdir(mode=0o700, exist_ok=True)
            source.rename(target)
            sync_folder(target.parent)
            sync_folder(source.parent)
            fault("restore.moved")
    sync_folder(folder.root)
    note.unlink()
    sync_folder(staging_of(folder))
    fault("restore.published")
    shutil.rmtree(staging_of(folder))


def withdraw(folder: DataFolder) -> None:
    """Nothing has been moved yet: drop what is staged, the note first. The lock is held."""
    staging = staging_of(folder)
    if staging.exists():
        (staging / DECIDED_NAME).unlink(missing_ok=True)
        shutil.rmtree(staging)


def finish_publishing(folder: DataFolder) -> bool:
    """Finish what a restore that was killed had decided; True if there was something. Cheap if there was not."""
    if not (staging_of(folder) / DECIDED_NAME).exists():
        return False
    from tasuki.stores.sql.sqlite import OwnerLock

    lock = OwnerLock(folder.database)
    try:
        if (staging_of(folder) / DECIDED_NAME).exists():
            carry_out(folder)
    finally:
        lock.release()
    return True
