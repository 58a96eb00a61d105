"""Making a backup: a consistent copy of a data folder's database, and the blobs that it refers to, in one file.

The data folder is only read (its server may be running), and the file appears whole or not at all. The database has tokens as
hashes only; the folder's own `token` file is not part of a backup.

Between the copy and the reading of a blob the server may have deleted the blob, because its job was pruned or ran again. Then a
newer copy is made, which no longer refers to it; blobs that were read before stay in the file.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tasuki.blobs.blob import CHUNK_BYTES
from tasuki.blobs.files import disk_full_as_error, durable_rename
from tasuki.blobs.folder import FolderBlobs
from tasuki.config import DataFolder
from tasuki.core.job import BlobRef
from tasuki.core.store_messages import BlobPlace
from tasuki.errors import Corrupt, InvalidInput, NotFound
from tasuki.server.archive import DATABASE_NAME, ArchiveWriter, Manifest, blob_name
from tasuki.version import __version__

COPIES_MAX = 3

ReportProgress = Callable[[str], None]


def back_up(
    folder: DataFolder, target: Path, *, with_blobs: bool = True, progress: ReportProgress = lambda text: None
) -> Manifest:
    """Make the backup `target`, and return its manifest."""
    from tasuki.server.restore import finish_publishing

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
        if with_blobs and self._folder.blobs.is_dir():
            self._blobs = FolderBlobs(self._folder.blobs, max_blob_bytes=0, floor_free_bytes=0)
        with self._archive.open("wb") as file:
            writer = ArchiveWriter(file)
            missing = self._copy_until_whole(writer) if with_blobs else self._copy_database()
            size_bytes = self._copy.stat().st_size
            sha256 = writer.add(DATABASE_NAME, size_bytes, _pieces(self._copy))
            manifest = self._manifest(size_bytes, sha256, with_blobs, missing)
            writer.close(manifest)
        return manifest

    def _copy_until_whole(self, writer: ArchiveWriter) -> list[tuple[str, int]]:
        """Copy the database and every blob that it refers to; return the blobs that are missing even after another copy."""
        missing: list[tuple[str, int]] = []
        for _ in range(COPIES_MAX):
            self._copy_database()
            missing = self._add_blobs(writer)
            if not missing:
                break
        return missing

    def _copy_database(self) -> list[tuple[str, int]]:
        from tasuki.stores.sql.sqlite_backup import snapshot

        self._copy.unlink(missing_ok=True)
        self._copy.touch(mode=0o600)
        snapshot(self._folder.database, self._copy, lambda done, whole: self._progress(f"database: {done:,} of {whole:,} bytes"))
        return []

    def _add_blobs(self, writer: ArchiveWriter) -> list[tuple[str, int]]:
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

    def _manifest(self, size_bytes: int, sha256: str, with_blobs: bool, missing: list[tuple[str, int]]) -> Manifest:
        from tasuki.stores.sql.sqlite_backup import facts_of

        facts = facts_of(self._copy)
        return Manifest(
            tasuki=__version__,
            made_at=time.time(),
            schema_version=facts.schema_version,
            migrations=list(facts.migrations),
            epoch=facts.epoch,
            holder=facts.holder,
            jobs=facts.jobs,
            database_bytes=size_bytes,
            database_sha256=sha256,
            with_blobs=with_blobs,
            blobs=[(blob, generation, bytes_) for (blob, generation), bytes_ in self._done.items()],
            missing=missing,
        )


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            yield piece
