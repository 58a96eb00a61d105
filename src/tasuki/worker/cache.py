"""The cache of a worker: input files that many jobs share, kept by their hash, and put into a job's folder by a link.

    <cache>/<cache_id>/<name>     the files of each cache, for people to look at
    <cache>/.blobs/<sha256>       the same files (hard links), which jobs are given
    <cache>/.incoming/            downloads that have not ended

A file is verified and made durable before it gets its name in `.blobs`, and is marked then: read-only, with a modification time
that is made of its hash and inode. A file that does not have size, mode and mark is not believed: a job may have written into it
(as root, or after a chmod), or another file may have come to its place. It is dropped, and fetched again. So there is no index
beside the files that could be wrong, and several workers can share a folder. The access time is set at each use, and tells which
file was used longest ago. A file that a job was given has one link more than the cache made; it is not evicted.

`CacheFolder` blocks on I/O; `InputCache` drives it from the event loop, and answers the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec

from tasuki.blobs.files import PartFile, check_free, disk_full_as_error, sync_folder
from tasuki.config import DISK_FLOOR_BYTES, DISK_FLOOR_INODES
from tasuki.core.job import BlobRef, check_file_name, check_name, check_sha256, is_sha256
from tasuki.core.protocol import CacheAck, CachePut, CacheStatus, WorkerCache, cache_source
from tasuki.core.routing import HELD_MAX, hash_prefix, prefixes_in
from tasuki.core.store_messages import CacheEntry
from tasuki.errors import DiskFull, TasukiError, discreet
from tasuki.event_loop import BackgroundTasks, on_thread
from tasuki.worker.folder import READ_ONLY, cache_mark, is_as_stored, remove_tree
from tasuki.worker.transfers import WorkerTransfers, close_part

CACHE_FOLDER = "cache"  # of the data folder
RECOUNT_S = 30.0  # how long the size of the folder and the order of eviction are believed: other workers may use it too
SETTLED_NS = 1_000_000_000  # age from which on the time of a folder shows every later change: clocks of file systems are coarse
FETCHES_AT_ONCE = 4  # as many as a server sends on one connection
NAME_TRIES = 10
FETCH_TRIES = 3  # for one job; then it gets a copy of its own
BUSY_S = 0.2  # pause while another worker of the folder fetches the same file
_FICLONE = 0x40049409  # ioctl: the new file shares the blocks of the old one until one of them is written to
_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP})

logger = logging.getLogger("tasuki.worker")


class CacheConfig(msgspec.Struct, frozen=True):
    """The place of a worker's files of caches, and its limit."""

    folder: Path | None = None
    """None: in its data folder."""
    max_bytes: int = 64 * 1024**3


DEFAULT_CACHE = CacheConfig()


class CacheFull(DiskFull):
    """A file does not fit the limit of the cache, beside those that running jobs use."""


class _StoredFile(NamedTuple):
    """A file as a walk has found it, with all its names here; the first one is that in `.blobs`."""

    inode: int
    used_ns: int
    paths: list[Path]


class CacheFolder:
    """The files of one cache folder."""

    def __init__(self, root: Path, max_bytes: int = DEFAULT_CACHE.max_bytes, *, floor_free_bytes: int = DISK_FLOOR_BYTES) -> None:
        self.root = root
        self._blobs, self._incoming = root / ".blobs", root / ".incoming"
        self._max_bytes = max_bytes
        self._floor_free_bytes = floor_free_bytes
        self._lock = threading.RLock()  # for the sizes, and while files are evicted
        self._size_bytes, self._counted_at = 0, -RECOUNT_S
        self._coming: dict[str, int] = {}
        """By sha256: sizes of the files for which room is kept."""
        self._to_evict: deque[_StoredFile] = deque()
        """Files of the last walk that are still to be looked at, the one used longest ago first."""
        self._told = b""
        self._told_at: int | None = None

    def make(self) -> None:
        """Make the folders. Files of others may be secret, as in run folders."""
        for folder in (self.root, self._blobs, self._incoming):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    # ------------------------------------------------------------------------------------------------ files by hash

    def has(self, ref: BlobRef) -> bool:
        """Return whether the file is there as it was stored; one that was changed is dropped."""
        path = self._path(ref.sha256)
        try:
            found = path.lstat()
        except FileNotFoundError:
            return False
        if is_as_stored(found, ref):
            return True
        logger.warning("the cached file %s was changed; it is dropped, and fetched again", ref.sha256)
        self._drop({found.st_ino})
        return False

    def link(self, ref: BlobRef, target: Path) -> bool:
        """Put the file at `target`, which must not exist; False if it is not there."""
        if not self.has(ref):
            return False
        path = self._path(ref.sha256)
        try:
            os.utime(path, ns=(time.time_ns(), path.lstat().st_mtime_ns))
            if hash_prefix(ref.sha256) not in prefixes_in(self._told):
                self._told_at = None  # it is one of the latest used now
            _link(path, target)
        except FileNotFoundError:  # evicted meanwhile
            return False
        return True

    def held(self) -> bytes:
        """Return prefixes of the hashes of the files that are here, the latest used first, as a heartbeat tells them."""
        with contextlib.suppress(FileNotFoundError):
            changed_at = self._blobs.stat().st_mtime_ns
            if changed_at != self._told_at:
                self._told_at = changed_at if time.time_ns() - changed_at > SETTLED_NS else None
                newest = sorted(_files(self._blobs), key=lambda entry: -entry[1].st_atime_ns)[:HELD_MAX]
                self._told = b"".join(sorted(hash_prefix(path.name) for path, _ in newest if is_sha256(path.name)))
        return self._told

    def part(self, ref: BlobRef) -> PartFile | None:
        """Return the file that a download goes to; None while another worker downloads it."""
        self.make()
        return PartFile.claim(self._incoming / f"{check_sha256(ref.sha256)}.part")

    def part_bytes(self, ref: BlobRef) -> int:
        """Return how much of a file is there."""
        if os.access(self._path(ref.sha256), os.F_OK):
            return ref.size_bytes
        with contextlib.suppress(FileNotFoundError):
            return min(ref.size_bytes, (self._incoming / f"{ref.sha256}.part").stat().st_size)
        return 0

    def keep(self, part: PartFile, ref: BlobRef) -> None:
        """Make a verified download a file of the cache, durably."""
        part.path.chmod(READ_ONLY)
        inode = part.status().st_ino
        os.utime(part.path, ns=(time.time_ns(), cache_mark(ref.sha256, inode)))
        part.sync()
        part.publish(self._path(ref.sha256))
        sync_folder(self._blobs)
        with self._lock:
            self._size_bytes += ref.size_bytes
            self.came(ref.sha256)

    def _path(self, sha256: str) -> Path:
        return self._blobs / check_sha256(sha256)

    # ------------------------------------------------------------------------------------------------ names

    def name(self, cache_id: str, entry: CacheEntry) -> None:
        """Give a file of the cache its name for people, unless it was evicted. A file that had the name before, in a cache that
        was removed, loses it."""
        path, target = self._path(entry.sha256), self.root / check_name(cache_id, "cache_id") / check_file_name(entry.name)
        with contextlib.suppress(FileNotFoundError):
            if target.lstat().st_ino == path.lstat().st_ino:
                return
        temporary = self._incoming / f"{entry.sha256}.{os.getpid()}.{threading.get_ident()}.link"
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except FileNotFoundError:
            return
        for _ in range(NAME_TRIES):
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # an eviction has just removed the folder, which was empty
                temporary.replace(target)
                break
        temporary.unlink(missing_ok=True)  # a rename between two links of one file leaves both

    def remove(self, cache_id: str) -> None:
        """Remove a cache, and those of its files that nothing else has."""
        folder = self.root / check_name(cache_id, "cache_id")
        inodes = {found.st_ino for _, found in _files(folder)}
        with contextlib.suppress(FileNotFoundError):
            remove_tree(folder)
        for path, found in list(_files(self._blobs)):
            if found.st_ino in inodes and found.st_nlink == 1:
                path.unlink(missing_ok=True)
        self._counted_at = -RECOUNT_S

    # ------------------------------------------------------------------------------------------------ room

    def check_together(self, refs: Iterable[BlobRef]) -> None:
        """Refuse files that do not fit the cache together."""
        needed_bytes = sum(ref.size_bytes for ref in refs)
        if needed_bytes > self._max_bytes:
            raise CacheFull(f"files of {needed_bytes} bytes do not fit the cache of {self._max_bytes}; raise --cache-max")

    def came(self, sha256: str) -> None:
        """Keep no more room for a file that has come, or does not come."""
        with self._lock:
            self._coming.pop(sha256, None)

    def make_room(self, needed_bytes: int, coming: str = "") -> None:
        """Evict files until so many bytes fit, those used longest ago first; CacheFull or DiskFull if they do not even so.

        The room is kept for the file `coming`, given by its sha256, until `keep` or `came`.
        """
        self.make()
        if needed_bytes > self._max_bytes:
            raise CacheFull(f"a file of {needed_bytes} bytes does not fit the cache of {self._max_bytes}; raise --cache-max")
        with self._lock:
            if time.monotonic() - self._counted_at > RECOUNT_S:
                self._size_bytes = sum(found.st_size for _, found in _files(self._blobs))
                self._counted_at = time.monotonic()
                self._to_evict.clear()
            if (over_bytes := self._over_bytes(needed_bytes)) > 0:
                self._evict(over_bytes)
                if self._over_bytes(needed_bytes) > 0:
                    used = f"running jobs and downloads use all of the cache of {self._max_bytes} bytes"
                    raise CacheFull(f"{used}; raise --cache-max")
            try:
                check_free(self.root, needed_bytes, self._floor_free_bytes, DISK_FLOOR_INODES)
            except DiskFull:
                self._evict(needed_bytes)
                check_free(self.root, needed_bytes, self._floor_free_bytes, DISK_FLOOR_INODES)
            if coming:
                self._coming[coming] = needed_bytes

    def _over_bytes(self, needed_bytes: int) -> int:
        return self._size_bytes + sum(self._coming.values()) + needed_bytes - self._max_bytes

    def _evict(self, bytes_to_free: int) -> None:
        """Remove the files used longest ago. One walk serves many calls, until all that it found was looked at."""
        has_walked = False
        while bytes_to_free > 0:
            if self._to_evict:
                bytes_to_free -= self._evict_file(self._to_evict.popleft())
            elif has_walked:
                return
            else:
                self._to_evict, has_walked = self._by_last_use(), True

    def _by_last_use(self) -> deque[_StoredFile]:
        names: dict[int, list[Path]] = {}
        stored: list[tuple[Path, os.stat_result]] = []
        for path, found in _files(self.root):
            if path.parent == self._blobs:
                stored.append((path, found))
            else:
                names.setdefault(found.st_ino, []).append(path)
        stored.sort(key=lambda entry: entry[1].st_atime_ns)
        return deque(_StoredFile(at.st_ino, at.st_atime_ns, [path, *names.get(at.st_ino, ())]) for path, at in stored)

    def _evict_file(self, file: _StoredFile) -> int:
        """Remove a file under all its names and return its size; 0 if it was used since the walk, or a job has it."""
        paths = [path for path in file.paths if _inode_of(path) == file.inode]
        try:
            found = file.paths[0].lstat()
        except FileNotFoundError:
            return 0
        if (found.st_ino, found.st_atime_ns) != (file.inode, file.used_ns) or found.st_nlink > len(paths):
            return 0
        for path in paths:
            self._unlink(path, found.st_size)
        return found.st_size

    def _drop(self, inodes: set[int]) -> None:
        """Remove these files under all names that they have here."""
        with self._lock:
            for path, found in list(_files(self.root)):
                if found.st_ino in inodes:
                    self._unlink(path, found.st_size)

    def _unlink(self, path: Path, size_bytes: int) -> None:
        path.unlink(missing_ok=True)
        if path.parent == self._blobs:
            self._size_bytes -= size_bytes
        elif path.parent != self._incoming:
            self._remove_empty(path.parent)

    def _remove_empty(self, folder: Path) -> None:
        with contextlib.suppress(OSError):  # not empty, or gone
            while folder != self.root:
                folder.rmdir()
                folder = folder.parent


def _inode_of(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the regular files below a folder, which may change meanwhile."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with contextlib.suppress(FileNotFoundError):
                found = path.lstat()
                if stat.S_ISREG(found.st_mode):
                    yield path, found


def _link(path: Path, target: Path) -> None:
    """Make `target` a file with the same bytes: of its own that shares the blocks, else a hard link, else a copy."""
    try:
        with path.open("rb") as source, target.open("xb") as copy:
            fcntl.ioctl(copy, _FICLONE, source.fileno())
            os.fchmod(copy.fileno(), READ_ONLY)
            return
    except FileNotFoundError:
        raise
    except OSError:
        target.unlink(missing_ok=True)
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        shutil.copyfile(path, target)
        target.chmod(READ_ONLY)


# ---------------------------------------------------------------------------------------------------- fetching


class InputCache:
    """Fetches the files of a cache folder from the server: those that a job needs, and those that a client puts."""

    def __init__(self, folder: CacheFolder, transfers: WorkerTransfers, worker_id: str, send: Callable[[CacheAck], None]) -> None:
        self._folder = folder
        self._transfers = transfers
        self._worker_id = worker_id
        self._send = send
        self._tasks = BackgroundTasks()
        self._fetching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By sha256, of the files that are being fetched."""
        self._puts: dict[tuple[str, tuple[CacheEntry, ...]], asyncio.Task[int]] = {}
        self._slots = asyncio.Semaphore(FETCHES_AT_ONCE)

    async def close(self) -> None:
        await self._tasks.close()

    async def held(self) -> bytes:
        """Return prefixes of the hashes of the files that are here."""
        return await asyncio.to_thread(self._folder.held)

    async def place(self, job_id: str, sha256: str, size_bytes: int, target: Path) -> None:
        """Put an input of a leased job at `target`, fetched first if it is not here; past the cache if it does not fit there."""
        ref, tries = BlobRef(sha256, size_bytes), 0
        with disk_full_as_error(target):
            while not await asyncio.to_thread(self._folder.link, ref, target):
                try:
                    if tries == FETCH_TRIES:  # evicted each time, or on a file system that does not keep modes and times
                        raise CacheFull(f"cached file {sha256} was fetched {tries} times and did not stay as it was stored")
                    tries += 1
                    await self._fetch(ref, job_id)
                except CacheFull as error:
                    logger.warning("job %s gets a copy of its own: %s", job_id, error.message)
                    await self._transfers.fetch(job_id, sha256, size_bytes, target)
                    await asyncio.to_thread(target.chmod, READ_ONLY)
                    return

    @contextlib.contextmanager
    def _coming(self, ref: BlobRef) -> Iterator[None]:
        try:
            yield
        finally:
            self._folder.came(ref.sha256)

    async def _fetch(self, ref: BlobRef, source: str) -> bool:
        """Fetch a file, through the job or cache that has it; return False if it was here."""
        lock = self._fetching.setdefault(ref.sha256, asyncio.Lock())
        async with lock:
            while not await asyncio.to_thread(self._folder.has, ref):
                with disk_full_as_error(self._folder.root), self._coming(ref):
                    await on_thread(self._folder.make_room, ref.size_bytes, ref.sha256)
                    part = await on_thread(self._folder.part, ref, release=close_part)
                    if part is not None:
                        with part:
                            await self._transfers.resume(part, ref, source)
                            await on_thread(self._folder.keep, part, ref)
                        return True
                await asyncio.sleep(BUSY_S)
            return False

    # ------------------------------------------------------------------------------------------------ the server's questions

    def asked(self, put: CachePut) -> None:
        """Answer a CachePut when its files are here, or how far they are after its time."""
        self._tasks.spawn(self._answer(put) if put.entries else self._remove(put.cache_id))

    async def _remove(self, cache_id: str) -> None:
        try:
            await asyncio.to_thread(self._folder.remove, cache_id)
        except (OSError, TasukiError) as error:  # it costs only space, until it is evicted
            logger.warning("cache %s could not be removed: %s", cache_id[:64], error)

    async def _answer(self, put: CachePut) -> None:
        key = (put.cache_id, tuple(put.entries))
        task = self._puts.get(key)
        if task is None:
            task = self._puts[key] = self._tasks.spawn(self._take(put))
            task.add_done_callback(lambda _: self._puts.pop(key, None))
        await asyncio.wait([task], timeout=put.wait_s)
        if not task.done():
            done_bytes = await asyncio.to_thread(self._done_bytes, put.entries)
            told = WorkerCache(self._worker_id, CacheStatus.FETCHING, done_bytes=done_bytes)
        elif (error := task.exception()) is not None:
            told = WorkerCache(self._worker_id, CacheStatus.FAILED, _shown(error))
        else:
            whole = sum(entry.size_bytes for entry in put.entries)
            status = CacheStatus.OK if task.result() else CacheStatus.SKIPPED
            note = f"added={task.result()}, skipped={len(put.entries) - task.result()}"
            told = WorkerCache(self._worker_id, status, note, whole)
        self._send(CacheAck(put.msg_id, put.cache_id, [told]))

    def _done_bytes(self, entries: list[CacheEntry]) -> int:
        return sum(self._folder.part_bytes(BlobRef(entry.sha256, entry.size_bytes)) for entry in entries)

    async def _take(self, put: CachePut) -> int:
        """Fetch what is not here, and return how many files that were; CacheFull if they cannot all be here at once."""
        added, refs = 0, {BlobRef(entry.sha256, entry.size_bytes) for entry in put.entries}

        async def take(entry: CacheEntry) -> None:
            nonlocal added
            async with self._slots:
                ref = BlobRef(entry.sha256, entry.size_bytes)
                is_new = await self._fetch(ref, cache_source(put.cache_id, entry.name))
                added += is_new  # not in one statement: others add while this one waits
                await asyncio.to_thread(self._folder.name, put.cache_id, entry)

        try:
            self._folder.check_together(refs)
            async with asyncio.TaskGroup() as group:
                for entry in put.entries:
                    group.create_task(take(entry))
            if not await asyncio.to_thread(lambda: all(map(self._folder.has, refs))):
                raise CacheFull("some of the files have been evicted for others; raise --cache-max, or let running jobs end")
        except CacheFull as error:
            logger.warning("files of cache %s could not be kept: %s", put.cache_id, error.message)
            raise
        except ExceptionGroup as errors:
            logger.warning("files of cache %s could not be kept: %s", put.cache_id, errors.exceptions[0])
            raise errors.exceptions[0] from None
        return added


def _shown(error: BaseException) -> str:
    """Return code and words of an error without paths, which are the worker's own business."""
    if isinstance(error, TasukiError):
        return f"{error.code}: {(error if isinstance(error, CacheFull) else discreet(error)).message}"
    return f"ERROR: {os.strerror(error.errno) if isinstance(error, OSError) and error.errno else type(error).__name__}"
