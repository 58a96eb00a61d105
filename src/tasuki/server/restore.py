"""Restoring a backup into a data folder, or only checking it. Touches the data folder only, as the holder of its owner lock.

Everything is verified before it is visible: names, sizes and hashes while the archive is read, then the database itself, in the
folder `<data>/restoring/`. Then the database begins a new life (`stores/sql/sqlite_backup.py`): epoch and attempts are raised,
and leases ended.

The restored store takes its place as a whole or not at all, whenever the process is killed. The renames that it needs are written
down, durably, in the file `restoring/decided`: from that moment on the restore is decided, and the next process (a server,
another restore) finishes it. Without that file the folder is garbage of a restore that was killed. Old files are moved aside into
`<data>/replaced-<time>/`, never deleted.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from tasuki.blobs.blob import BlobStore
from tasuki.blobs.files import check_free, disk_full_as_error, durable_write, sync_file, sync_folder
from tasuki.blobs.folder import FolderBlobs
from tasuki.config import DISK_FLOOR_BYTES, DISK_FLOOR_INODES, DataFolder
from tasuki.errors import ConfigError, Corrupt, InvalidInput
from tasuki.server.archive import DATABASE_NAME, MANIFEST_NAME, ArchiveMember, ArchiveReader, Manifest, read_manifest

STAGING_NAME = "restoring"
DECIDED_NAME = "decided"
PROGRESS_BYTES = 16 * 1024 * 1024  # between two reports of progress

ReportProgress = Callable[[str], None]
Move = tuple[str, str]
"""(from, to), both below the data folder."""


def store_names(folder: DataFolder) -> list[str]:
    """Return the names of a store's files, in the order in which they are moved: a journal without a database is harmless."""
    database = folder.database.name
    return [database, f"{database}-wal", f"{database}-shm", folder.blobs.name]


def staging_of(folder: DataFolder) -> Path:
    return folder.root / STAGING_NAME


def decide(folder: DataFolder, aside: str, fault: Callable[[str], None]) -> None:
    """Write down the renames that publish the staged store; the present one goes to the folder `aside`. The lock is held."""
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
    """Do the renames that were decided and are not done yet. The lock is held."""
    note = staging_of(folder) / DECIDED_NAME
    for start, end in msgspec.json.decode(note.read_bytes(), type=list[Move]):
        source, target = folder.root / start, folder.root / end
        # A rename that was done has left its target. For one to `aside` only that tells: a new file may have the old name.
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
    """Remove a staged store that is not decided, the list of renames first. The lock is held."""
    staging = staging_of(folder)
    if staging.exists():
        (staging / DECIDED_NAME).unlink(missing_ok=True)
        shutil.rmtree(staging)


def finish_publishing(folder: DataFolder) -> bool:
    """Finish a restore that was killed after it was decided; True if there was one. Cheap if there was none."""
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


# ---------------------------------------------------------------------------------------------------- the restore


class RestoreReport(msgspec.Struct, frozen=True):
    """The result of a restore."""

    data: str
    manifest: Manifest
    epoch: int
    given_back: int
    """Number of jobs that a worker held when the backup was made, and that wait again."""
    canceled: int
    replaced: str | None
    """Folder to which the earlier store was moved."""


def check_backup(file: Path, *, progress: ReportProgress = lambda text: None) -> Manifest:
    """Verify a backup as `restore` does, and leave nothing behind."""
    from tasuki.stores.sql.sqlite_backup import check_copy

    with tempfile.TemporaryDirectory(prefix="tasuki-check-") as folder, disk_full_as_error(folder):
        manifest, _ = _unpack(file, Path(folder), None, progress)
        progress("checking the database")
        check_copy(Path(folder) / DATABASE_NAME)
    return manifest


def restore(
    file: Path,
    folder: DataFolder,
    *,
    force: bool = False,
    progress: ReportProgress = lambda text: None,
    fault: Callable[[str], None] = lambda point: None,
) -> RestoreReport:
    """Put the store of a backup into a data folder that has none. With `force` the one that is there is moved aside."""
    from tasuki.stores.sql.sqlite import OwnerLock

    size_bytes = _size_of(file)
    try:
        folder.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the data folder {folder.root} cannot be made: {error.strerror or error}") from None
    finish_publishing(folder)
    lock = OwnerLock(folder.database)
    try:
        there = [name for name in store_names(folder) if (folder.root / name).exists()]
        if there and not force:
            raise ConfigError(
                f"{folder.root} has a store already ({', '.join(there)}); "
                "choose an empty folder, or --force to have it moved aside"
            )
        check_free(folder.root, size_bytes, DISK_FLOOR_BYTES, DISK_FLOOR_INODES)
        with disk_full_as_error(folder.root):
            return _restore(file, folder, bool(there), progress, fault)
    finally:
        lock.release()


def _restore(
    file: Path, folder: DataFolder, has_store: bool, progress: ReportProgress, fault: Callable[[str], None]
) -> RestoreReport:
    from tasuki.stores.sql.sqlite_backup import begin_new_life, check_copy

    staging = staging_of(folder)
    withdraw(folder)  # left by a restore that was killed before it was decided
    staging.mkdir(mode=0o700)
    try:
        blobs = FolderBlobs(staging / folder.blobs.name, max_blob_bytes=2**63, floor_free_bytes=DISK_FLOOR_BYTES)
        manifest, places = _unpack(file, staging, blobs, progress)
        fault("restore.unpacked")
        progress("checking the database")
        database = staging / DATABASE_NAME
        check_copy(database)
        life = begin_new_life(database, now=time.time(), present=places if manifest.with_blobs else None)
        for sha256, generation in life.unknown_blobs:
            blobs.delete(sha256, generation)
        if not manifest.with_blobs:
            shutil.rmtree(blobs.root)  # so that one rename can bring the bytes back
        sync_file(database)
        sync_folder(database.parent)
        aside = _free_name(folder.root, f"replaced-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
        decide(folder, aside, fault)
    except BaseException:
        withdraw(folder)
        raise
    carry_out(folder, fault)
    return RestoreReport(
        data=str(folder.root),
        manifest=manifest,
        epoch=life.epoch,
        given_back=life.given_back,
        canceled=life.canceled,
        replaced=str(folder.root / aside) if has_store else None,
    )


def _free_name(root: Path, name: str) -> str:
    number, free = 1, name
    while (root / free).exists():
        number += 1
        free = f"{name}-{number}"
    return free


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise InvalidInput(f"the backup {str(file)!r} cannot be read: {error.strerror or error}") from None


def _unpack(
    file: Path, staging: Path, blobs: BlobStore | None, progress: ReportProgress
) -> tuple[Manifest, list[tuple[str, int]]]:
    """Read and verify the whole archive: the database into `staging`, the blobs into `blobs` or nowhere."""
    try:
        with file.open("rb") as source:
            return _Unpacking(staging, blobs, progress, os.fstat(source.fileno()).st_size).run(source)
    except IsADirectoryError:
        raise InvalidInput(f"{str(file)!r} is a folder, not a file that tasuki backup made") from None
    except PermissionError as error:
        raise InvalidInput(f"the backup {str(file)!r} cannot be read: {error.strerror}") from None


class _Unpacking:
    """One reading of an archive, and its contents so far."""

    def __init__(self, staging: Path, blobs: BlobStore | None, progress: ReportProgress, archive_bytes: int) -> None:
        self._staging = staging
        self._blobs = blobs
        self._progress = progress
        self._archive_bytes = archive_bytes
        self._next_report_bytes = 0
        self._found: list[tuple[str, int, int]] = []
        self._database = (-1, "")
        self._manifest: Manifest | None = None

    def run(self, source: BinaryIO) -> tuple[Manifest, list[tuple[str, int]]]:
        reader = ArchiveReader(source)
        for member in reader:
            self._report(source.tell())
            if member.blob is not None:
                self._take_blob(member, member.blob, reader.pieces())
            elif member.name == MANIFEST_NAME:
                self._manifest = read_manifest(b"".join(reader.pieces()))
            else:
                self._take_database(member, reader.pieces())
        assert self._manifest is not None, "the reader ends only after it"
        self._compare(self._manifest)
        return self._manifest, [(sha256, generation) for sha256, generation, _ in self._found]

    def _report(self, read_bytes: int) -> None:
        if read_bytes >= self._next_report_bytes:
            self._next_report_bytes = read_bytes + PROGRESS_BYTES
            self._progress(f"reading: {read_bytes:,} of {self._archive_bytes:,} bytes")

    def _take_blob(self, member: ArchiveMember, blob: tuple[str, int], pieces: Iterable[bytes]) -> None:
        sha256, generation = blob
        if self._blobs is None:
            digest = hashlib.sha256()
            for piece in pieces:
                digest.update(piece)
            if digest.hexdigest() != sha256:
                raise Corrupt(f"{member.name} in the backup reads as sha256 {digest.hexdigest()}; use another backup")
        else:
            with self._blobs.begin(sha256, member.size_bytes, generation) as writer:
                for piece in pieces:
                    writer.write(piece)
                writer.commit()
        self._found.append((sha256, generation, member.size_bytes))

    def _take_database(self, member: ArchiveMember, pieces: Iterable[bytes]) -> None:
        digest = hashlib.sha256()
        descriptor = os.open(self._staging / member.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
        self._database = (member.size_bytes, digest.hexdigest())

    def _compare(self, manifest: Manifest) -> None:
        if self._database != (manifest.database_bytes, manifest.database_sha256):
            raise Corrupt("the database in the backup is not the one that its manifest names; use another backup")
        if sorted(self._found) != sorted(manifest.blobs):
            raise Corrupt("the blobs in the backup are not those that its manifest names; use another backup")
