"""Blobs in a folder: `<root>/ab/cdef…` (`cdef….7` for generation 7), content-addressed; temporary files in `<root>/tmp/`.

Nothing outside the root is touched. A blob becomes visible in these steps, of which none leaves a torn one:

    create tmp/blob-…  →  write, hash  →  fsync file  →  rename to ab/cdef…  →  fsync ab/  →  fsync root (once per ab/)

A crash before the rename leaves only a temporary file, which is swept later; a crash after it leaves a whole blob. Several
processes may share one root: the rename is atomic, and two writers of one blob write the same bytes.

An upload that may be resumed is written to `tmp/part-…` instead, a name made of its uploader and its hash (the generation is no
part of it: the bytes are the same). The file is written in place from the start, so a process that is killed loses nothing that
it had written. The next writer reads and hashes what is there, unless this process itself has just suspended it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tasuki.blobs.blob import RESUMED_MIN_BYTES, BlobReader, BlobStore, BlobWriter, StreamCheck, name_of
from tasuki.blobs.files import PartFile, check_free, disk_full_as_error, sync_folder
from tasuki.core.job import BlobRef, is_sha256
from tasuki.errors import ConfigError, Corrupt, DiskFull, NotFound

SUSPENDED_GRACE_S = 60.0  # where space is short, half-sent uploads that nobody has written to for so long make room
TEMPORARY_GRACE_S = 3600.0  # since the last write; a live upload writes far more often, so only crashes are swept
PARTIAL_GRACE_S = 24 * 3600.0  # since the last write
PARTIAL_PREFIX = "part-"
SUSPENDED_MAX = 256  # hashes of suspended uploads that this process remembers; one takes a few hundred bytes
FLOOR_FREE_INODES = 1024
FREE_CHECK_BYTES = 16 * 1024 * 1024  # how much an unannounced writer may add before free space is looked at again


class FolderBlobs(BlobStore):
    """A `BlobStore` in a local folder. Opening it makes the folder and sweeps the temporary files of crashed writers."""

    threads = 2  # one more than a disk needs, so that a slow fsync does not stop a read

    def __init__(
        self,
        root: Path,
        *,
        max_blob_bytes: int,
        floor_free_bytes: int,
        floor_free_inodes: int = FLOOR_FREE_INODES,
    ) -> None:
        self.root = root
        self.where = repr(str(root))
        self.max_blob_bytes = max_blob_bytes
        self.floor_free_bytes = floor_free_bytes
        self.floor_free_inodes = floor_free_inodes
        self._temporary = root / "tmp"
        self._suspended = _SuspendedUploads(self._temporary)
        self._lock = threading.Lock()  # for the two sets; never held over I/O
        self._durable_prefixes: set[str] = set()
        self._doubtful: set[Path] = set()
        with disk_full_as_error(root):
            # 0700: results may hold secrets, and other users live on the machine.
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._temporary.mkdir(mode=0o700, exist_ok=True)
            if self._temporary.is_symlink():  # what is swept there must be ours
                raise ConfigError(f"{self._temporary} is a symbolic link, which may lead anywhere; remove it")
            sync_folder(root)
            sync_folder(root.parent)
        self.sweep()

    def begin(
        self, sha256: str | None = None, size_bytes: int | None = None, generation: int = 0, resume_key: str = ""
    ) -> FolderWriter:
        check = StreamCheck(sha256, size_bytes, self.max_blob_bytes)
        if resume_key and sha256 is not None and (size_bytes or 0) >= RESUMED_MIN_BYTES:
            part = self._suspended.resume(resume_key, check)
            if part is not None:
                writer = FolderWriter(self, check, generation, part, self._suspended)
                try:
                    self.make_space((size_bytes or 0) - check.size_bytes)
                except BaseException:
                    writer.suspend()
                    raise
                return writer
        self.make_space(size_bytes or 0)
        return FolderWriter(self, check, generation, self._create_temporary())

    def make_space(self, size_bytes: int) -> None:
        # Suspended uploads go first: they would only have saved some bytes.
        try:
            self.check_space(size_bytes)
        except DiskFull:
            if not self._suspended.sweep(SUSPENDED_GRACE_S):
                raise
            self.check_space(size_bytes)

    def _open(self, sha256: str, offset: int, generation: int) -> FolderReader:
        try:
            descriptor = os.open(self._path(sha256, generation), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise self._not_found(sha256, generation) from None
        return FolderReader(descriptor, sha256, os.fstat(descriptor).st_size, offset, self.where)

    def size(self, sha256: str, generation: int = 0) -> int:
        try:
            return self._path(sha256, generation).stat().st_size
        except FileNotFoundError:
            raise self._not_found(sha256, generation) from None

    def delete(self, sha256: str, generation: int = 0) -> bool:
        # No fsync: a deleted blob that is back after a power cut costs space and harms nobody.
        try:
            self._path(sha256, generation).unlink()
        except FileNotFoundError:
            return False
        return True

    def touch(self, sha256: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._path(sha256, 0))  # by the clock of the disk, which may be another machine's

    def remove_untouched(self, since: float, in_use: Callable[[str], bool]) -> Iterator[BlobRef]:
        for folder in sorted(self.root.glob("[0-9a-f][0-9a-f]")):
            for path in sorted(folder.iterdir()):
                sha256 = folder.name + path.name
                if not is_sha256(sha256) or in_use(sha256):
                    continue
                try:
                    status = path.lstat()
                    if status.st_mtime >= since or not stat.S_ISREG(status.st_mode):
                        continue
                    path.unlink()
                except FileNotFoundError:
                    continue  # another process cleans too
                yield BlobRef(sha256, status.st_size)

    def resumable_bytes(self, resume_key: str) -> int:
        return self._suspended.size_bytes(resume_key)

    def check_space(self, size_bytes: int = 0) -> None:
        check_free(self.root, size_bytes, self.floor_free_bytes, self.floor_free_inodes)

    def local_path(self, sha256: str, generation: int = 0) -> Path | None:
        self.size(sha256, generation)
        return self._path(sha256, generation)

    def check(self) -> None:
        """Do nothing: opening the folder has shown that it can be written to, and on a full disk reports are still accepted."""

    def close(self) -> None:
        """Do nothing: no call waits for a folder."""

    def _create_temporary(self) -> PartFile:
        """Make a new file (mode 0600) in the same file system as the blobs, so that a rename publishes it."""
        with disk_full_as_error(self._temporary):
            descriptor, name = tempfile.mkstemp(prefix="blob-", dir=self._temporary)
        return PartFile(Path(name), descriptor)

    def publish(self, part: PartFile, ref: BlobRef, generation: int) -> None:
        """Make the verified temporary file the blob `ref`, durably; an equal blob that is there already stays."""
        final = self._path(ref.sha256, generation)
        with self._lock:
            doubtful = final in self._doubtful
        with disk_full_as_error(final):
            final.parent.mkdir(mode=0o700, exist_ok=True)
            if not doubtful and self._is_there(final, ref):
                part.path.unlink(missing_ok=True)
            else:
                part.sync()
                self._rename(part.path, final)
            # Also for a blob that was there: its writer may be between its rename and its fsync.
            self._make_name_durable(final)
        if doubtful:
            with self._lock:
                self._doubtful.discard(final)

    def _is_there(self, final: Path, ref: BlobRef) -> bool:
        """Return whether an earlier blob can be relied on; one of another size is torn, and is replaced by the new one.

        Its age counts from now on, so that a blob that has just been sent is not removed as old.
        """
        try:
            os.utime(final)
            status = final.stat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == ref.size_bytes

    def _rename(self, temporary: Path, final: Path) -> None:
        try:
            temporary.replace(final)
        except FileNotFoundError:
            raise NotFound(
                f"the temporary file {str(temporary)!r} is gone (a writer that is silent for {TEMPORARY_GRACE_S:.0f} s "
                "is swept when the store is opened again); send the blob again"
            ) from None

    def _make_name_durable(self, final: Path) -> None:
        """Sync the folder, and once per process its entry in the root.

        After a failed fsync a second one that succeeds proves nothing, so the blob stays doubtful: the next writer of
        it does not rely on the file that is there but renames its own over it.
        """
        prefix = final.parent.name
        with self._lock:
            root_is_durable = prefix in self._durable_prefixes
        try:
            sync_folder(final.parent)
            if not root_is_durable:
                sync_folder(self.root)
        except OSError:
            with self._lock:
                self._doubtful.add(final)
            raise
        with self._lock:
            self._durable_prefixes.add(prefix)

    def sweep(self) -> None:
        """Remove the temporary files of crashed writers; young ones may belong to another process that lives."""
        self._suspended.sweep()
        oldest = time.time() - TEMPORARY_GRACE_S
        for path in self._temporary.iterdir():
            if path.name.startswith(PARTIAL_PREFIX):
                continue
            try:
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and status.st_mtime < oldest:
                    path.unlink()
            except FileNotFoundError:
                continue  # its writer has just finished, or another process sweeps too

    def _path(self, sha256: str, generation: int) -> Path:
        return self.root / sha256[:2] / name_of(sha256, generation)[2:]


class _Suspended(NamedTuple):
    """The state of a file when its writer suspended it: its hash so far, and the signs that nobody has written to it since."""

    inode: int
    size_bytes: int
    written_ns: int
    check: StreamCheck


def _prefix_of(resume_key: str) -> str:
    """Return how the names of all partial files of this uploader begin; the key may have any characters."""
    return f"{PARTIAL_PREFIX}{hashlib.sha256(resume_key.encode(errors='backslashreplace')).hexdigest()[:32]}-"


class _SuspendedUploads:
    """The resumable uploads of one folder, for all its threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # for the table; never held over I/O
        self._known: OrderedDict[Path, _Suspended] = OrderedDict()

    def resume(self, resume_key: str, check: StreamCheck) -> PartFile | None:
        """Return the locked file, with its bytes added to `check`; None while another writer has it."""
        path = self._folder / (_prefix_of(resume_key) + str(check.sha256))
        with disk_full_as_error(path):
            part = PartFile.claim(path)
        if part is None:
            return None
        try:
            with self._lock:
                known = self._known.pop(path, None)
            status = part.status()
            if known is not None and known[:3] == (status.st_ino, status.st_size, status.st_mtime_ns):
                check.resume(known.check)
                part.seek(check.size_bytes)
            else:
                part.read_into(check.add, max_bytes=check.announced_bytes)
        except BaseException:
            part.close()
            raise
        return part

    def suspend(self, part: PartFile, check: StreamCheck) -> None:
        """Unlock the file of a writer that stops here, and remember its hash."""
        with part:
            status = part.status()
            with self._lock:
                self._known[part.path] = _Suspended(status.st_ino, status.st_size, status.st_mtime_ns, check)
                if len(self._known) > SUSPENDED_MAX:
                    self._known.popitem(last=False)

    def size_bytes(self, resume_key: str) -> int:
        """Return the size of all files with this key; none counts as small, because each takes an inode too."""
        size_bytes = 0
        for path in self._folder.glob(_prefix_of(resume_key) + "*"):
            with contextlib.suppress(FileNotFoundError):  # it has just become a blob
                size_bytes += max(path.lstat().st_size, RESUMED_MIN_BYTES)
        return size_bytes

    def sweep(self, grace_s: float = PARTIAL_GRACE_S) -> int:
        """Remove the files that nobody has written to for so long, and nobody has open; return how many."""
        removed = 0
        for path in self._folder.glob(PARTIAL_PREFIX + "*"):
            with contextlib.suppress(FileNotFoundError):  # it has just become a blob, or another process sweeps too
                if path.lstat().st_mtime >= time.time() - grace_s:
                    continue
                part = PartFile.claim(path, create=False)
                if part is not None:
                    part.discard()
                    removed += 1
                    with self._lock:
                        self._known.pop(path, None)
        return removed


class FolderWriter(BlobWriter):
    """A `BlobWriter` onto a temporary file, which is one of `suspended` if the upload can be resumed."""

    def __init__(
        self,
        store: FolderBlobs,
        check: StreamCheck,
        generation: int,
        part: PartFile,
        suspended: _SuspendedUploads | None = None,
    ) -> None:
        super().__init__(check)
        self._store = store
        self._generation = generation
        self._next_check_bytes = check.size_bytes + FREE_CHECK_BYTES
        self._part = part
        self._suspended = suspended

    def _add(self, piece: memoryview) -> None:
        size_bytes = self._check.size_bytes + piece.nbytes
        if size_bytes >= self._next_check_bytes:
            self._store.check_space(piece.nbytes)
            self._next_check_bytes = size_bytes + FREE_CHECK_BYTES
        with disk_full_as_error(self._part.path):
            self._part.write(piece)

    def _publish(self, ref: BlobRef) -> None:
        self._store.publish(self._part, ref, self._generation)
        self._part.close()

    def abort(self) -> None:
        self._is_open = False
        self._part.discard()

    def suspend(self) -> None:
        if self._suspended is None or not self._check.size_bytes:
            self.abort()
        elif self._is_open:
            self._is_open = False
            self._suspended.suspend(self._part, self._check)


class FolderReader(BlobReader):
    """A `BlobReader` from an open file; it owns the descriptor."""

    def __init__(self, descriptor: int, sha256: str, size_bytes: int, offset: int, where: str) -> None:
        super().__init__(sha256, size_bytes, offset, where)
        self._descriptor = descriptor
        self._is_open = True

    def _read(self, position: int, wanted_bytes: int) -> bytes:
        chunk = os.pread(self._descriptor, wanted_bytes, position)
        if not chunk:
            raise Corrupt(f"blob {self._sha256} ends at byte {position} of {self.size_bytes}")
        return chunk

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)
