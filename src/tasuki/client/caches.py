"""Putting files into a cache, and asking until every worker has them.

The server is asked with the hashes first: it names the blobs that it lacks, which are uploaded (an upload that was cut off goes
on where it was), and it asks the workers. Each answer says how they stand; those that are not done are asked about again, until
enough of them are done or too many have failed. So the same put again, after whatever ended this one, does only what is left.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from tasuki.client.types import read_answer
from tasuki.core.job import BlobRef, check_file_name, check_name, check_together
from tasuki.core.protocol import CacheAck, CachePut, CacheStatus, Message, WorkerCache, batches
from tasuki.core.store_messages import CachedFile, CacheEntry, CacheSummary
from tasuki.core.subject import check_pattern
from tasuki.errors import InvalidInput, NotFound, ProtocolError, TasukiError
from tasuki.net.blob_transfer import BlobClient
from tasuki.net.streams import OnProgress

ASK_WAIT_S = 2.0  # for one answer: as often as progress is told
ASK_EVERY_S = 0.5  # while there is nobody to wait for
PARTS_AT_ONCE = 4
UPLOADS_AT_ONCE = 8
IDLE_TIMEOUT_S = 60.0
FINAL = (CacheStatus.OK, CacheStatus.SKIPPED, CacheStatus.FAILED)

OnUpload = Callable[[int, int], None]
"""Gets the bytes that were uploaded so far, and how many are to be."""
OnWorkers = Callable[[Mapping[str, WorkerCache], int], None]
"""Gets how each worker stands, and the bytes that each is to have."""


class PutResult(msgspec.Struct, frozen=True):
    """The end of a put: how each worker stands."""

    cache_id: str
    files: int
    size_bytes: int
    workers: dict[str, WorkerCache]

    @property
    def done(self) -> int:
        """Number of workers that have all files."""
        return sum(one.status in (CacheStatus.OK, CacheStatus.SKIPPED) for one in self.workers.values())

    def satisfies(self, require: str) -> bool:
        """Return whether enough workers have all files: `all` of them, a number, or a percentage; one at least, unless of 0."""
        return self.done >= required(require, len(self.workers))


def required(require: str, workers: int) -> int:
    """Return how many of so many workers `all`, `90%` or `3` are."""
    digits = "100" if require == "all" else require.removesuffix("%")
    is_share = digits != require
    if not (digits.isascii() and digits.isdigit()) or (is_share and int(digits) > 100):
        raise InvalidInput(f"require must be all, a number of workers, or a percentage; got {require[:40]!r}")
    number = int(digits)
    return max(min(1, number), -(-number * workers // 100)) if is_share else number


class LocalFile(msgspec.Struct, frozen=True):
    """A file that is to be put."""

    entry: CacheEntry
    path: Path


def read_files(paths: Sequence[str | os.PathLike[str]]) -> list[LocalFile]:
    """Return files and those below folders, with their hashes. Names begin with the last part of a folder's path (`assets/a.bin`
    for `assets/` and for `/data/assets`); those below `.` do not. Links and other things than files are refused."""
    found: dict[str, Path] = {}
    for given in paths:
        for name, path in _named(Path(given)):
            try:
                check_file_name(name)
            except InvalidInput as error:
                raise InvalidInput(f"{str(path)!r} cannot be put into a cache: {error.message}") from None
            if found.setdefault(name, path) != path:
                raise InvalidInput(f"{str(path)!r} and {str(found[name])!r} would both be {name!r} in the cache; put one of them")
    if not found:
        raise InvalidInput(f"there is no file in {', '.join(repr(str(path)) for path in paths)}; a cache needs one")
    check_together(found)
    return [LocalFile(_entry(name, path), path) for name, path in sorted(found.items())]


def _named(given: Path) -> Iterator[tuple[str, Path]]:
    _check_kind(given)
    top = "" if given == Path() else given.resolve().name
    if not given.is_dir():
        yield top, given
        return
    for folder, folders, names in os.walk(given):
        for name in (*folders, *names):
            _check_kind(Path(folder, name))
        for name in names:
            path = Path(folder, name)
            yield f"{top}/{path.relative_to(given).as_posix()}".removeprefix("/"), path


def _check_kind(path: Path) -> None:
    if path.is_symlink() or not (path.is_file() or path.is_dir()):
        kind = "a link" if path.is_symlink() else "not a file or folder" if path.exists() else "not there"
        raise InvalidInput(f"{str(path)!r} is {kind}; a cache has plain files only")


def _entry(name: str, path: Path) -> CacheEntry:
    with path.open("rb", buffering=0) as file:
        return CacheEntry(name, hashlib.file_digest(file, "sha256").hexdigest(), file.tell())


class CacheCalls(ABC):
    """The calls of a client about caches."""

    _blobs: BlobClient

    @abstractmethod
    def _ask(self, make: Callable[[int], Message]) -> asyncio.Future[Any]: ...

    @abstractmethod
    async def call(self, verb: str, /, **params: Any) -> Any: ...

    @abstractmethod
    def beside(self, url: str, connect_timeout_s: float) -> Any: ...

    async def put_cache(
        self,
        cache_id: str,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        target: str = ">",
        require: str = "all",
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        on_upload: OnUpload | None = None,
        on_workers: OnWorkers | None = None,
    ) -> PutResult:
        """Put files and folders into a cache, and have the workers that `target` meets fetch them ahead of their jobs.

            result = await client.put_cache("scene-7", "assets/", target="render.>")
            job = await client.submit(subject="render.eu", files=[InputFile("a.bin", cache=("scene-7", "assets/a.bin"))])

        Names of a cache are never overwritten: CacheConflict for one with other bytes. The put ends when as many workers as
        `require` says (`all`, `3`, `90%`) have the files, or no longer can; others continue by themselves. A worker that makes no
        progress for `idle_timeout_s` is FAILED, and fetches the files when a job needs them. The same put again continues.
        """
        given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        check_name(cache_id, "cache_id")
        check_pattern(target)
        required(require, 0)
        files = await asyncio.to_thread(read_files, given)
        return await CacheUpload(self, cache_id, files, target, idle_timeout_s, on_upload, on_workers, require).run()

    async def ask_cache(self, put: CachePut) -> CacheAck:
        """Ask the server once to have the workers keep these files, whose blobs it has."""
        answer = await self._ask(lambda msg_id: replace(put, msg_id=msg_id))
        if not isinstance(answer, CacheAck):
            raise ProtocolError(f"the server answered a CachePut with {type(answer).__name__}")
        return answer

    async def upload(self, path: Path, ref: BlobRef, progress: OnProgress = None) -> None:
        """Upload a file whose hash is known as a blob."""
        with await asyncio.to_thread(path.open, "rb") as file:
            await self._blobs.put(file, ref, progress)

    async def caches(self) -> list[CacheSummary]:
        """Return the caches that the caller may use."""
        return read_answer(await self._pages("cache.list", "caches"), list[CacheSummary])

    async def cache(self, cache_id: str) -> list[CachedFile]:
        """Return the files of a cache; NotFound for an unknown one."""
        return read_answer(await self._pages("cache.show", "files", cache_id=cache_id), list[CachedFile])

    async def remove_cache(self, cache_id: str) -> int:
        """Remove a cache, also at the workers that are connected; return how many files it had. Accepted jobs keep theirs."""
        [first, *_] = await self.cache(cache_id)
        return int((await self.call("cache.remove", cache_id=cache_id, target=first.target))["files"])

    async def _pages(self, verb: str, field: str, **params: str) -> list[Any]:
        found: list[Any] = []
        after: str | None = ""
        while after is not None:
            page = await self.call(verb, after=after, **params)
            found, after = found + page[field], page["after"]
        return found


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group, which may hold groups."""
    found = errors.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found


def _best(*answers: Iterable[WorkerCache]) -> dict[str, WorkerCache]:
    """Return what the servers said of each worker: to all but the one that it is connected to, it is away."""
    best: dict[str, WorkerCache] = {}
    for one in chain(*answers):
        if one.status is not CacheStatus.AWAY or one.worker_id not in best:
            best[one.worker_id] = one
    return best


class CacheUpload:
    """One put: a loop for each part of the files that fits a message."""

    def __init__(
        self,
        client: CacheCalls,
        cache_id: str,
        files: Sequence[LocalFile],
        target: str,
        idle_timeout_s: float,
        on_upload: OnUpload | None,
        on_workers: OnWorkers | None,
        require: str = "all",
    ) -> None:
        self._client = client
        self._require = require
        self._cache_id, self._target = cache_id, target
        self._files, self._size_bytes = files, sum(file.entry.size_bytes for file in files)
        self._idle_timeout_s = idle_timeout_s
        self._on_upload, self._on_workers = on_upload, on_workers
        self._by_hash = {file.entry.sha256: file for file in files}
        self._parts = [list(part) for part in batches(files, lambda file: len(file.entry.name.encode()) + 128)]
        self._told: list[dict[str, WorkerCache]] = [{} for _ in self._parts]
        self._unstored = set(range(len(self._parts)))
        """Numbers of the parts that the server has not stored yet."""
        self._lacked: set[tuple[int, str]] = set()
        """Numbers of parts, with the workers that did not have all files of it when this put began."""
        self._given_up: set[str] = set()
        """Workers that made no progress for the idle time in one of the parts."""
        self._uploaded: dict[str, int] = {}
        self._uploads, self._slots = asyncio.Semaphore(UPLOADS_AT_ONCE), asyncio.Semaphore(PARTS_AT_ONCE)
        self._others: dict[str, CacheCalls] = {}

    async def run(self) -> PutResult:
        """Put the files, and wait for the workers. A worker that makes no progress for the idle time counts as FAILED."""
        async with AsyncExitStack() as stack:
            self._stack = stack
            to_ask = list(range(len(self._parts)))
            while to_ask:
                try:
                    async with asyncio.TaskGroup() as group:
                        for number in to_ask:
                            group.create_task(self._part(number))
                except ExceptionGroup as errors:
                    raise _first(errors) from None
                # Of workers that came meanwhile, the parts that had ended know nothing.
                known = self._known()
                to_ask = [] if self._is_decided() else [n for n, told in enumerate(self._told) if known - told.keys()]
        return PutResult(self._cache_id, len(self._files), self._size_bytes, self._merged())

    async def _part(self, number: int) -> None:
        async with self._slots:
            told, moved_at, entries = self._told[number], time.monotonic(), [file.entry for file in self._parts[number]]
            while True:
                before, asked_at = dict(told), time.monotonic()
                ack = await self._ask(self._client, entries)
                self._unstored.discard(number)
                others = await asyncio.gather(*(self._ask_other(url, entries) for url in ack.elsewhere))
                self._note(number, _best(ack.workers, *others))
                if self._on_workers is not None:
                    self._on_workers(self._merged(), self._size_bytes)
                if told != before:
                    moved_at = time.monotonic()
                waiting = [one for one in told.values() if one.status not in FINAL]
                if not waiting or self._is_decided():
                    return
                is_late = time.monotonic() - moved_at > self._idle_timeout_s
                for one in waiting:
                    if is_late or one.worker_id in self._given_up:
                        self._given_up.add(one.worker_id)
                        reason = one.message or "it did not answer in time"
                        late = f"{reason}; it fetches the files when a job needs them"
                        told[one.worker_id] = WorkerCache(one.worker_id, CacheStatus.FAILED, late, one.done_bytes)
                if is_late:
                    return
                await asyncio.sleep(max(0.0, asked_at + ASK_EVERY_S - time.monotonic()))

    def _note(self, number: int, answers: Mapping[str, WorkerCache]) -> None:
        told, size_bytes = self._told[number], sum(file.entry.size_bytes for file in self._parts[number])
        for worker_id in self._known() | answers.keys():
            before = told.get(worker_id)
            if before is not None and before.status in FINAL:
                continue
            now = answers.get(worker_id) or WorkerCache(worker_id, CacheStatus.AWAY, "it left before it had all files")
            if now.status is CacheStatus.AWAY or (now.status is CacheStatus.FETCHING and now.done_bytes < size_bytes):
                self._lacked.add((number, worker_id))
            if now.status is CacheStatus.SKIPPED and (number, worker_id) in self._lacked:
                now = replace(now, status=CacheStatus.OK, message="")
            elif now.status is CacheStatus.AWAY and before is not None:
                now = replace(now, done_bytes=before.done_bytes)
            told[worker_id] = now

    def _known(self) -> set[str]:
        return set().union(*self._told)

    def _merged(self) -> dict[str, WorkerCache]:
        """Return how each worker stands over all parts: as in the worst one."""
        order = (CacheStatus.FAILED, CacheStatus.AWAY, CacheStatus.FETCHING, CacheStatus.OK, CacheStatus.SKIPPED)
        merged: dict[str, WorkerCache] = {}
        for worker_id in self._known():
            parts = [told.get(worker_id) or WorkerCache(worker_id, CacheStatus.FETCHING) for told in self._told]
            worst = min(parts, key=lambda each: order.index(each.status))
            is_sum = len(parts) > 1 and worst.status is CacheStatus.OK
            done_bytes = sum(one.done_bytes for one in parts)
            merged[worker_id] = replace(worst, done_bytes=done_bytes, message="" if is_sum else worst.message)
        return merged

    def _is_decided(self) -> bool:
        """Return whether the files are at the server, and what is still to come changes nothing about the requirement."""
        if self._unstored:
            return False
        merged = self._merged().values()
        failed = sum(one.status is CacheStatus.FAILED for one in merged)
        done = sum(one.status in (CacheStatus.OK, CacheStatus.SKIPPED) for one in merged)
        needed = required(self._require, len(merged))
        return done >= needed or len(merged) - failed < needed

    async def _ask(self, client: CacheCalls, entries: list[CacheEntry]) -> CacheAck:
        """Ask one server, and bring the blobs that it lacks."""
        while True:
            try:
                return await client.ask_cache(CachePut(0, self._cache_id, self._target, entries, ASK_WAIT_S))
            except NotFound as error:
                missing = [self._by_hash[sha256] for sha256 in error.details().get("blobs", ()) if sha256 in self._by_hash]
                if not missing:
                    raise
            self._uploaded |= {file.entry.sha256: 0 for file in missing}
            async with asyncio.TaskGroup() as group:
                for file in missing:
                    group.create_task(self._upload(client, file))

    async def _upload(self, client: CacheCalls, file: LocalFile) -> None:
        def progress(done_bytes: int) -> None:
            self._uploaded[file.entry.sha256] = done_bytes
            if self._on_upload is not None:
                to_upload_bytes = sum(self._by_hash[sha256].entry.size_bytes for sha256 in self._uploaded)
                self._on_upload(sum(self._uploaded.values()), to_upload_bytes)

        async with self._uploads:
            await client.upload(file.path, BlobRef(file.entry.sha256, file.entry.size_bytes), progress)
            progress(file.entry.size_bytes)

    async def _ask_other(self, url: str, entries: list[CacheEntry]) -> list[WorkerCache]:
        """Ask a server beside this one; none of its workers if it cannot be asked."""
        try:
            if url not in self._others:
                other = self._client.beside(url, ASK_WAIT_S * 2)
                if other is None:
                    return []
                self._others[url] = await self._stack.enter_async_context(other)
            return (await self._ask(self._others[url], entries)).workers
        except TasukiError:
            self._others.pop(url, None)
            return []
