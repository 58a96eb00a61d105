"""Blobs in a folder: `<root>/ab/cdef…` (`cdef….7` for generation 7), content-addressed; temporary files in `<root>/tmp/`.

It touches nothing outside its root. How a blob becomes visible, and why nothing torn ever is:

    create tmp/blob-…  →  write, hash  →  fsync file  →  rename to ab/cdef…  →  fsync ab/  →  fsync root (once per ab/)

A crash before the rename leaves only a temporary file, which is swept later; a crash after it leaves a whole blob. An upload
that may be gone on with is written to `tmp/part-…` instead (`partials.py`). Several processes may share one root: the rename is
atomic, and two writers of one blob write the same bytes.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from tasuki.blobs.blob import CHUNK_BYTES, RESUMED_MIN_BYTES, BlobRef, check_sha256, is_sha256, name_of
from tasuki.blobs.disk import check_free, disk_full_as_error, sync_folder
from tasuki.blobs.resumable_uploads import PREFIX, Partials, is_named
from tasuki.blobs.stream_check import StreamCheck, WholeBlobs
from tasuki.errors import Corrupt, DiskFull, InvalidInput, NotFound

__all__ = ["FLOOR_FREE_INODES", "FREE_CHECK_BYTES", "TEMPORARY_GRACE_S", "FolderBlobs", "Step"]

TEMPORARY_GRACE_S = 3600.0  # since the last write; a live upload writes far more often, so only crashes are swept
FLOOR_FREE_INODES = 1024
FREE_CHECK_BYTES = 16 * 1024 * 1024  # how much an unannounced writer may add before free space is looked at again


class Step(enum.StrEnum):
    """The moments of a write between which a crash must be harmless; tests stop the process at each."""

    CREATED = "created"
    WRITTEN = "written"
    SYNCED = "synced"
    RENAMED = "renamed"
    DURABLE = "durable"


def _no_step(step: Step) -> None:
    """What `on_step` is outside tests."""


class FolderBlobs(WholeBlobs):
    """A `BlobStore` in a local folder. Opening it makes the folder and sweeps the temporary files of crashed writers."""

    threads = 2  # one more than a disk needs, so that a slow fsync does not stop a read

    def __init__(
        self,
        root: Path,
        *,
        max_blob_bytes: int,
        floor_free_bytes: int,
        floor_free_inodes: int = FLOOR_FREE_INODES,
        on_step: Callable[[Step], None] = _no_step,
    ) -> None:
        self.root = root
        self.max_blob_bytes = max_blob_bytes
        self.floor_free_bytes = floor_free_bytes
        self.floor_free_inodes = floor_free_inodes
        self._temporary = root / "tmp"
        self._partials = Partials(self._temporary)
        self._on_step = on_step
        self._lock = threading.Lock()  # for the two sets; never held over I/O
        self._durable_prefixes: set[str] = set()
        self._doubtful: set[Path] = set()
        with disk_full_as_error(root):
            # 0700: results may hold secrets, and other users live on the machine.
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._temporary.mkdir(mode=0o700, exist_ok=True)
            sync_folder(root)
            sync_folder(root.parent)
        self.sweep()

    def begin(
        self, sha256: str | None = None, size_bytes: int | None = None, generation: int = 0, resume_key: str = ""
    ) -> FolderWriter:
        intake = StreamCheck(sha256, size_bytes, self.max_blob_bytes)
        if resume_key and sha256 is not None and (size_bytes or 0) >= RESUMED_MIN_BYTES:
            taken = self._partials.take(resume_key, intake)
            if taken is not None:
                writer = FolderWriter(self, intake, generation, *taken, self._partials)
                try:
                    self._make_space((size_bytes or 0) - intake.size_bytes)
                except BaseException:
                    writer.suspend()
                    raise
                return writer
        self._make_space(size_bytes or 0)
        return FolderWriter(self, intake, generation, *self.create_temporary())

    def _make_space(self, size_bytes: int) -> None:
        """Where there is none, what others left half-sent goes first: it would only have spared them some bytes."""
        try:
            self.check_space(size_bytes)
        except DiskFull:
            if not self._partials.sweep(TEMPORARY_GRACE_S):
                raise
            self.check_space(size_bytes)

    def open(self, blob: BlobRef | str, offset: int = 0, generation: int = 0) -> FolderReader:
        sha256 = check_sha256(blob.sha256 if isinstance(blob, BlobRef) else blob)
        try:
            descriptor = os.open(self._path(sha256, generation), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise self._not_found(sha256, generation) from None
        try:
            size_bytes = os.fstat(descriptor).st_size
            if isinstance(blob, BlobRef) and blob.size_bytes != size_bytes:
                raise Corrupt(f"blob {sha256} has {size_bytes} bytes in {str(self.root)!r}, its reference says {blob.size_bytes}")
            if not 0 <= offset <= size_bytes:
                raise InvalidInput(f"offset {offset} is outside of blob {sha256}, which has {size_bytes} bytes")
            return FolderReader(descriptor, sha256, size_bytes, offset)
        except BaseException:
            os.close(descriptor)
            raise

    def size(self, sha256: str, generation: int = 0) -> int:
        try:
            return self._path(sha256, generation).stat().st_size
        except FileNotFoundError:
            raise self._not_found(sha256, generation) from None

    def has(self, sha256: str, generation: int = 0) -> bool:
        return self._path(sha256, generation).is_file()

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

    def check_space(self, size_bytes: int = 0) -> None:
        check_free(self.root, size_bytes, self.floor_free_bytes, self.floor_free_inodes)

    def local_path(self, sha256: str, generation: int = 0) -> Path | None:
        if not self.has(sha256, generation):
            raise self._not_found(sha256, generation)
        return self._path(sha256, generation)

    def check(self) -> None:
        """Opening it has shown that it can be written to. A full disk is no reason not to start: reports are still taken."""

    def close(self) -> None:
        """Nobody waits for a folder."""

    def create_temporary(self) -> tuple[int, Path]:
        """A new file (mode 0600) in the same file system as the blobs, so that a rename publishes it."""
        with disk_full_as_error(self._temporary):
            descriptor, name = tempfile.mkstemp(prefix="blob-", dir=self._temporary)
        self._on_step(Step.CREATED)
        return descriptor, Path(name)

    def publish(self, descriptor: int, temporary: Path, ref: BlobRef, generation: int) -> None:
        """Make the verified temporary file the blob `ref`, durably; an equal blob that is there already stays."""
        final = self._path(ref.sha256, generation)
        self._on_step(Step.WRITTEN)
        with self._lock:
            doubtful = final in self._doubtful
        with disk_full_as_error(final):
            final.parent.mkdir(mode=0o700, exist_ok=True)
            if not doubtful and self._is_there(final, ref):
                temporary.unlink(missing_ok=True)
            else:
                os.fsync(descriptor)
                self._on_step(Step.SYNCED)
                self._rename(temporary, final)
                self._on_step(Step.RENAMED)
            # Also for a blob that was there: its writer may stand between its rename and its fsync.
            self._make_name_durable(final)
        if doubtful:
            with self._lock:
                self._doubtful.discard(final)
        self._on_step(Step.DURABLE)

    def _is_there(self, final: Path, ref: BlobRef) -> bool:
        """Whether an earlier blob can be relied on; one of another size is torn, and is replaced by the one in hand.

        Its age counts from now on, so that nobody removes as old what has just been sent.
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
        """fsync the folder, and once per process its entry in the root.

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
        """Remove the temporary files of crashed writers; the young ones may belong to another process that lives."""
        self._partials.sweep()
        oldest = time.time() - TEMPORARY_GRACE_S
        for path in self._temporary.iterdir():
            if path.name.startswith(PREFIX):
                continue
            try:
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and status.st_mtime < oldest:
                    path.unlink()
            except FileNotFoundError:
                continue  # its writer has just finished, or another process sweeps too

    def _path(self, sha256: str, generation: int) -> Path:
        return self.root / sha256[:2] / name_of(sha256, generation)[2:]

    def _not_found(self, sha256: str, generation: int) -> NotFound:
        return NotFound(f"no blob {name_of(sha256, generation)} in {str(self.root)!r}")


class FolderWriter:
    """A `BlobWriter` onto a temporary file, which may be one of `partials`. It owns the descriptor."""

    def __init__(
        self,
        store: FolderBlobs,
        intake: StreamCheck,
        generation: int,
        descriptor: int,
        path: Path,
        partials: Partials | None = None,
    ) -> None:
        self._store = store
        self._intake = intake
        self._generation = generation
        self._next_check_bytes = intake.size_bytes + FREE_CHECK_BYTES
        self._descriptor, self._path = descriptor, path
        self._partials = partials
        self._is_open = True

    @property
    def size_bytes(self) -> int:
        return self._intake.size_bytes

    def write(self, chunk: bytes | bytearray | memoryview) -> int:
        self._check_open()
        view = memoryview(chunk).cast("B")
        try:
            self._check_growth(view.nbytes)
            self._write_all(view)
            self._intake.take(view)
        except BaseException:
            self.abort()
            raise
        return view.nbytes

    def commit(self) -> BlobRef:
        self._check_open()
        try:
            ref = self._intake.verify()
            self._store.publish(self._descriptor, self._path, ref, self._generation)
        finally:
            self.abort()  # frees the descriptor; the temporary name is gone already unless something was raised
        return ref

    def abort(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            # The name of a partial may be another upload's by now. While the lock is held it stays what it is.
            if is_named(self._descriptor, self._path):
                self._path.unlink()
        finally:
            os.close(self._descriptor)

    def suspend(self) -> None:
        if self._partials is None or not self._intake.size_bytes:
            self.abort()
        elif self._is_open:
            self._is_open = False
            self._partials.put_aside(self._descriptor, self._path, self._intake)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError("this blob writer was committed or aborted; begin a new one")

    def _check_growth(self, more_bytes: int) -> None:
        self._intake.check_growth(more_bytes)
        size_bytes = self._intake.size_bytes + more_bytes
        if size_bytes >= self._next_check_bytes:
            self._store.check_space(more_bytes)
            self._next_check_bytes = size_bytes + FREE_CHECK_BYTES

    def _write_all(self, view: memoryview) -> None:
        with disk_full_as_error(self._path):
            written = 0
            while written < view.nbytes:  # a disk that fills up takes a part first and says so at the next call
                written += os.write(self._descriptor, view[written:])


class FolderReader:
    """A `BlobReader` from an open file; it owns the descriptor."""

    def __init__(self, descriptor: int, sha256: str, size_bytes: int, offset: int) -> None:
        self._descriptor = descriptor
        self._is_open = True
        self._sha256 = sha256
        self._size_bytes = size_bytes
        self._offset = offset

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def __iter__(self) -> Iterator[bytes]:
        position = self._offset
        digest = hashlib.sha256() if position == 0 else None
        while position < self._size_bytes:
            chunk = os.pread(self._descriptor, min(CHUNK_BYTES, self._size_bytes - position), position)
            if not chunk:
                raise Corrupt(f"blob {self._sha256} ends at byte {position} of {self._size_bytes}")
            position += len(chunk)
            if digest is not None:
                digest.update(chunk)
                if position == self._size_bytes:
                    self._verify(digest.hexdigest())
            yield chunk
        if digest is not None and self._size_bytes == 0:
            self._verify(digest.hexdigest())

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _verify(self, found_sha256: str) -> None:
        if found_sha256 != self._sha256:
            raise Corrupt(f"blob {self._sha256} reads as sha256 {found_sha256}: the disk changed it; delete it and put it again")
