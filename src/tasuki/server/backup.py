"""Backups of a data folder: made while its server runs, checked, and restored. `archive.py` has the file format.

A backup is a consistent copy of the database and the blobs that it refers to, in one file that appears whole or not at all. The
database has tokens as hashes only; the folder's own `token` file is not part of a backup. Between the copy and the reading of a
blob the server may have deleted the blob, because its job was pruned or ran again. Then a newer copy is made, which no longer
refers to it; blobs that were read before stay in the file.

A restore touches the data folder only, as the holder of its owner lock. Everything is verified before it is visible: names, sizes
and hashes while the archive is read, then the database itself, in the folder `<data>/restoring/`. Then the database begins a new
life (`stores/sql/sqlite_backup.py`): epoch and attempts are raised, and leases ended.

The restored store takes its place as a whole or not at all, whenever the process is killed. The renames that it needs are written
down, durably, in the file `restoring/decided`: from that moment on the restore is decided, and the next process (a server,
another restore) finishes it. Without that file the folder is garbage of a restore that was killed. Old files are moved aside into
`<data>/replaced-<time>/`, never deleted.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tasuki.blobs.blob import CHUNK_BYTES, BlobStore
from tasuki.blobs.files import check_free, disk_full_as_error, durable_rename, durable_write, sync_file, sync_folder
from tasuki.blobs.folder import FolderBlobs
from tasuki.config import DISK_FLOOR_BYTES, DISK_FLOOR_INODES, DataFolder
from tasuki.core.job import BlobRef
from tasuki.core.store_messages import BlobPlace
from tasuki.errors import ConfigError, Corrupt, InvalidInput, NotFound
from tasuki.server.archive import DATABASE_NAME, MANIFEST_NAME, ArchiveReader, ArchiveWriter, Manifest, blob_name, read_manifest
from tasuki.version import __version__

COPIES_MAX = 3
STAGING_NAME = "restoring"
DECIDED_NAME = "decided"
PROGRESS_BYTES = 16 * 1024 * 1024  # between two reports of progress

ReportProgress = Callable[[str], None]
Move = tuple[str, str]
"""(from, to), both below the data folder."""


# ---------------------------------------------------------------------------------------------------- the backup


def back_up(
    folder: DataFolder, target: Path, *, with_blobs: bool = True, progress: ReportProgress = lambda text: None
) -> Manifest:
    """Make the backup `target`, and return its manifest."""
    if not target.parent.is_dir():
        raise InvalidInput(f"the folder of {str(target)!r} does not exist; make it first, or choose another file")
    finish_publishing(folder)
    if not folder.database.is_file():
        raise NotFound(
            f"there is no SQLite store in {folder.root}; name its folder with --data. "
            "A store in PostgreSQL is backed up with pg_dump, see docs/operate/backup.md"
        )
    with disk_full_as_error(target), _new_file(target) as archive, _new_file(target) as copy:
        manifest = _Backup(folder, archive, copy, progress).write(with_blobs=with_blobs)
        durable_rename(archive, target)  # the moment at which the backup exists
    return manifest


@contextmanager
def _new_file(target: Path) -> Iterator[Path]:
    """Make a temporary file beside the target, mode 0600; remove it afterwards, unless it was renamed."""
    descriptor, name = tempfile.mkstemp(prefix=f"{target.name}.", suffix=".new", dir=target.parent)
    os.close(descriptor)
    path = Path(name)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


class _Backup:
    """One run: the archive being written, the latest copy of the database, and the blobs written so far."""

    def __init__(self, folder: DataFolder, archive: Path, copy: Path, progress: ReportProgress) -> None:
        self._folder = folder
        self._archive = archive
        self._copy = copy
        self._progress = progress
        self._done: dict[tuple[str, int], int] = {}
        self._blobs: FolderBlobs | None = None

    def write(self, *, with_blobs: bool) -> Manifest:
        from tasuki.stores.sql.sqlite_backup import facts_of

        if with_blobs and self._folder.blobs.is_dir():
            self._blobs = FolderBlobs(self._folder.blobs, max_blob_bytes=0, floor_free_bytes=0)
        missing: list[tuple[str, int]] = []
        with self._archive.open("wb") as file:
            writer = ArchiveWriter(file)
            for _ in range(COPIES_MAX if with_blobs else 1):
                self._copy_database()
                missing = self._add_blobs(writer) if with_blobs else []
                if not missing:
                    break
            size_bytes = self._copy.stat().st_size
            manifest = Manifest(
                tasuki=__version__,
                made_at=time.time(),
                database_bytes=size_bytes,
                database_sha256=writer.add(DATABASE_NAME, size_bytes, _pieces(self._copy)),
                with_blobs=with_blobs,
                blobs=[(sha256, generation, size) for (sha256, generation), size in self._done.items()],
                missing=missing,
                **msgspec.structs.asdict(facts_of(self._copy)),
            )
            writer.close(manifest)
        return manifest

    def _copy_database(self) -> None:
        from tasuki.stores.sql.sqlite_backup import snapshot

        self._copy.unlink(missing_ok=True)
        self._copy.touch(mode=0o600)
        snapshot(self._folder.database, self._copy, lambda done, whole: self._progress(f"database: {done:,} of {whole:,} bytes"))

    def _add_blobs(self, writer: ArchiveWriter) -> list[tuple[str, int]]:
        """Add the blobs of the copy that the archive does not have; return those that are missing."""
        from tasuki.stores.sql.sqlite_backup import blobs_of

        places = blobs_of(self._copy)
        missing = []
        for number, place in enumerate(places, 1):
            key = (place.sha256, place.generation)
            if key not in self._done and not self._add_blob(writer, place):
                missing.append(key)
            if number % 100 == 0:
                self._progress(f"blobs: {number:,} of {len(places):,}")
        return missing

    def _add_blob(self, writer: ArchiveWriter, place: BlobPlace) -> bool:
        """Add a blob; False if its bytes are gone or corrupt, and then the archive is as it was before."""
        if self._blobs is None:
            return False
        try:
            with self._blobs.open(BlobRef(place.sha256, place.size_bytes), generation=place.generation) as reader:
                writer.add(blob_name(place.sha256, place.generation), place.size_bytes, reader)
        except (NotFound, Corrupt):
            return False
        self._done[place.sha256, place.generation] = place.size_bytes
        return True


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            yield piece


# ---------------------------------------------------------------------------------------------------- publication


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
    moves: list[Move] | None = None
    with suppress(msgspec.DecodeError):
        moves = msgspec.json.decode(note.read_bytes(), type=list[Move])
    # The folder may be a copy of somebody else's: nothing is moved but the files of a store, and those stay in the folder.
    is_inside = re.compile(rf"(?:[\w-]+/)?(?:{'|'.join(map(re.escape, store_names(folder)))})").fullmatch
    if moves is None or not all(is_inside(path) for move in moves for path in move):
        raise ConfigError(
            f"{note} has renames that no restore has written; remove {staging_of(folder)}, or use another data folder"
        )
    for start, end in moves:
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


def prepare_folder(folder: DataFolder) -> None:
    """Make the folder, for this user only, and finish a restore that was killed."""
    folder.make()
    if finish_publishing(folder):
        folder.make()  # looks at what was moved there


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

    try:
        size_bytes = file.stat().st_size
    except OSError as error:
        raise InvalidInput(f"the backup {str(file)!r} cannot be read: {error.strerror or error}") from None
    prepare_folder(folder)
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


def _unpack(
    file: Path, staging: Path, blobs: BlobStore | None, progress: ReportProgress
) -> tuple[Manifest, list[tuple[str, int]]]:
    """Read and verify the whole archive: the database into `staging`, the blobs into `blobs` or nowhere."""
    manifest: Manifest | None = None
    database = (-1, "")
    found: list[tuple[str, int, int]] = []
    next_report_bytes = 0
    try:
        with file.open("rb") as source:
            archive_bytes = os.fstat(source.fileno()).st_size
            reader = ArchiveReader(source)
            for member in reader:
                if source.tell() >= next_report_bytes:
                    next_report_bytes = source.tell() + PROGRESS_BYTES
                    progress(f"reading: {source.tell():,} of {archive_bytes:,} bytes")
                if member.blob is not None:
                    _take_blob(*member.blob, member.size_bytes, blobs, reader.pieces())
                    found.append((*member.blob, member.size_bytes))
                elif member.name == MANIFEST_NAME:
                    manifest = read_manifest(b"".join(reader.pieces()))
                else:
                    database = (member.size_bytes, _take_database(staging / member.name, reader.pieces()))
    except IsADirectoryError:
        raise InvalidInput(f"{str(file)!r} is a folder, not a file that tasuki backup made") from None
    except PermissionError as error:
        raise InvalidInput(f"the backup {str(file)!r} cannot be read: {error.strerror}") from None
    assert manifest is not None, "the reader ends only after it"
    if database != (manifest.database_bytes, manifest.database_sha256):
        raise Corrupt("the database in the backup is not the one that its manifest names; use another backup")
    if sorted(found) != sorted(manifest.blobs):
        raise Corrupt("the blobs in the backup are not those that its manifest names; use another backup")
    return manifest, [(sha256, generation) for sha256, generation, _ in found]


def _take_blob(sha256: str, generation: int, size_bytes: int, blobs: BlobStore | None, pieces: Iterable[bytes]) -> None:
    if blobs is None:
        digest = hashlib.sha256()
        for piece in pieces:
            digest.update(piece)
        if digest.hexdigest() != sha256:
            name = blob_name(sha256, generation)
            raise Corrupt(f"{name} in the backup reads as sha256 {digest.hexdigest()}; use another backup")
    else:
        with blobs.begin(sha256, size_bytes, generation) as writer:
            for piece in pieces:
                writer.write(piece)
            writer.commit()


def _take_database(path: Path, pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()
