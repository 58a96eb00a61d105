"""The cache folder of a worker: what is believed, what is evicted, and what a job is given."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tasuki.core.job import BlobRef
from tasuki.core.protocol import CacheAck, CachePut, CacheStatus, WorkerCache
from tasuki.core.routing import hash_prefix, prefixes_in
from tasuki.core.store_messages import CacheEntry
from tasuki.errors import DiskFull, NotFound
from tasuki.worker import cache as cache_module
from tasuki.worker.cache import CacheFolder, InputCache
from tests.support.waiting import until


def ref_of(data: bytes) -> BlobRef:
    return BlobRef(hashlib.sha256(data).hexdigest(), len(data))


def entry_of(name: str, data: bytes) -> CacheEntry:
    return CacheEntry(name, *(ref_of(data).sha256, len(data)))


def store(folder: CacheFolder, data: bytes, *names: str) -> BlobRef:
    """Keep a file as a download does, and give it names in the cache `c`."""
    ref = ref_of(data)
    part = folder.part(ref)
    assert part is not None
    with part:
        part.write(data)
        folder.keep(part, ref)
    for name in names:
        folder.name("c", CacheEntry(name, ref.sha256, ref.size_bytes))
    return ref


@pytest.fixture
def folder(tmp_path: Path) -> CacheFolder:
    return CacheFolder(tmp_path / "cache", 100)


def files(folder: CacheFolder) -> set[str]:
    return {str(path.relative_to(folder.root)) for path in folder.root.rglob("*") if path.is_file()}


def test_a_file_has_one_inode_under_all_its_names_and_in_the_job(folder: CacheFolder, tmp_path: Path) -> None:
    ref = store(folder, b"abc", "a", "deep/b")

    assert folder.link(ref, tmp_path / "in")
    assert files(folder) == {f".blobs/{ref.sha256}", "c/a", "c/deep/b"}
    assert (tmp_path / "in").stat().st_nlink == 4
    assert oct((tmp_path / "in").stat().st_mode & 0o777) == "0o444"


def test_one_file_gets_many_names_at_once_while_others_are_evicted(folder: CacheFolder) -> None:
    ref = store(folder, b"same")
    names = [f"{number % 7}/{number}" for number in range(400)]

    def evict_again_and_again() -> None:
        for number in range(40):
            store(folder, b"%2d" % number, f"{number % 7}/gone/{number}")
            folder._drop({(folder.root / ".blobs" / ref_of(b"%2d" % number).sha256).stat().st_ino})

    with ThreadPoolExecutor(5) as threads:
        evicting = threads.submit(evict_again_and_again)
        list(threads.map(lambda name: folder.name("c", CacheEntry(name, ref.sha256, ref.size_bytes)), names))
        evicting.result()

    assert files(folder) == {f".blobs/{ref.sha256}", *(f"c/{name}" for name in names)}
    assert {path.name for path in (folder.root / "c").iterdir()} == set("0123456")
    assert not list((folder.root / "c").glob("*/gone"))


def test_heartbeats_tell_the_files_that_are_here(folder: CacheFolder) -> None:
    assert folder.held() == b""
    first = store(folder, b"first", "a.bin")
    (folder.root / ".blobs" / "stray").write_bytes(b"not ours")
    assert folder.held() == hash_prefix(first.sha256)

    second = store(folder, b"second", "b.bin")

    assert prefixes_in(folder.held()) == {hash_prefix(first.sha256), hash_prefix(second.sha256)}


def test_heartbeats_tell_a_file_that_came_in_the_same_tick_of_the_file_systems_clock(folder: CacheFolder) -> None:
    first = store(folder, b"first")
    blobs = folder.root / ".blobs"
    tick_ns = blobs.stat().st_mtime_ns
    assert folder.held() == hash_prefix(first.sha256)

    second = store(folder, b"second")
    os.utime(blobs, ns=(tick_ns, tick_ns))

    assert prefixes_in(folder.held()) == {hash_prefix(first.sha256), hash_prefix(second.sha256)}


def test_heartbeats_tell_a_file_that_is_used_again_where_there_are_too_many_to_tell(
    folder: CacheFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "HELD_MAX", 1)
    old, new = store(folder, b"old"), store(folder, b"new")
    for used_at, ref in enumerate((old, new)):
        path = folder.root / ".blobs" / ref.sha256
        os.utime(path, ns=(used_at, path.stat().st_mtime_ns))
    os.utime(folder.root / ".blobs", ns=(0, 0))  # long ago
    assert folder.held() == hash_prefix(new.sha256)

    assert folder.link(old, tmp_path / "in")

    assert folder.held() == hash_prefix(old.sha256)


def test_what_is_there_is_believed_by_the_next_process(folder: CacheFolder) -> None:
    ref = store(folder, b"abc")

    assert CacheFolder(folder.root).has(ref)


@pytest.mark.parametrize("change", ["write", "chmod", "swap", "truncate"])
def test_a_changed_file_is_dropped_under_all_its_names(folder: CacheFolder, tmp_path: Path, change: str) -> None:
    ref = store(folder, b"abc", "a")
    assert folder.link(ref, tmp_path / "in")
    path = folder.root / ".blobs" / ref.sha256
    if change == "swap":  # another file with the same size, mode and times
        found = path.stat()
        (tmp_path / "other").write_bytes(b"xyz")
        (tmp_path / "other").chmod(0o444)
        os.utime(tmp_path / "other", ns=(found.st_atime_ns, found.st_mtime_ns))
        (tmp_path / "other").replace(path)
    else:
        (tmp_path / "in").chmod(0o644)
        if change != "chmod":
            (tmp_path / "in").write_bytes(b"xyz" if change == "write" else b"")

    assert not folder.has(ref)
    assert not folder.link(ref, tmp_path / "again")
    assert files(folder) == ({"c/a"} if change == "swap" else set())


def test_the_file_used_longest_ago_goes_first_and_never_one_of_a_running_job(folder: CacheFolder, tmp_path: Path) -> None:
    old, used, new = store(folder, b"o" * 40, "old"), store(folder, b"u" * 30, "used"), store(folder, b"n" * 20, "new")
    for number, ref in enumerate((old, used, new)):
        path = folder.root / ".blobs" / ref.sha256
        os.utime(path, ns=(number, path.stat().st_mtime_ns))
    assert folder.link(used, tmp_path / "in")

    folder.make_room(50)
    assert [folder.has(ref) for ref in (old, used, new)] == [False, True, True]
    folder.make_room(70)
    assert [folder.has(ref) for ref in (used, new)] == [True, False]
    with pytest.raises(DiskFull, match="running jobs and downloads use all"):
        folder.make_room(71)
    with pytest.raises(DiskFull, match="--cache-max"):
        folder.make_room(101)
    (tmp_path / "in").unlink()
    folder.make_room(71)
    assert files(folder) == set()


def test_files_that_come_one_by_one_into_a_full_cache_cost_one_walk_together(
    folder: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = [store(folder, b"%02d" % number, f"a/{number}") for number in range(50)]
    for number, ref in enumerate(refs):
        path = folder.root / ".blobs" / ref.sha256
        os.utime(path, ns=(number, path.stat().st_mtime_ns))
    walked: list[Path] = []
    walk = cache_module._files
    monkeypatch.setattr(cache_module, "RECOUNT_S", math.inf)
    monkeypatch.setattr(cache_module, "_files", lambda at: (walked.append(at), walk(at))[1])

    for number in range(40):
        folder.make_room(2)
        store(folder, bytes([65 + number]) * 2)

    assert [folder.has(ref) for ref in refs] == [False] * 40 + [True] * 10
    assert walked == [folder.root]


def test_a_file_that_changes_its_place_in_the_order_after_the_walk_is_not_taken_for_what_it_was(
    folder: CacheFolder, tmp_path: Path
) -> None:
    first, again, renamed, new = (store(folder, b * 25, name) for b, name in ((b"f", "f"), (b"a", "a"), (b"r", "r"), (b"n", "n")))
    for number, ref in enumerate((first, again, renamed, new)):
        path = folder.root / ".blobs" / ref.sha256
        os.utime(path, ns=(number, path.stat().st_mtime_ns))
    folder.make_room(25)
    assert folder.link(again, tmp_path / "used-again")
    (tmp_path / "used-again").unlink()
    os.link(folder.root / ".blobs" / renamed.sha256, tmp_path / "of-a-running-job")
    folder.name("c", CacheEntry("r", again.sha256, 25))  # it has one name less here, and one more elsewhere

    folder.make_room(50)

    assert [folder.has(ref) for ref in (first, again, renamed, new)] == [False, True, True, False]
    assert (folder.root / "c" / "r").read_bytes() == b"a" * 25
    folder.make_room(75)  # in a new walk
    assert [folder.has(ref) for ref in (again, renamed)] == [False, True]


def test_a_removed_cache_takes_only_what_nothing_else_has(folder: CacheFolder, tmp_path: Path) -> None:
    shared, alone, used = store(folder, b"1", "a"), store(folder, b"2", "b"), store(folder, b"3", "d")
    folder.name("other", CacheEntry("x", shared.sha256, 1))
    assert folder.link(used, tmp_path / "in")

    folder.remove("c")
    assert [folder.has(ref) for ref in (shared, alone, used)] == [True, False, True]
    assert (tmp_path / "in").read_bytes() == b"3"


def test_a_name_of_a_cache_that_was_put_anew_leads_to_the_new_file(folder: CacheFolder) -> None:
    store(folder, b"before", "a")
    store(folder, b"after", "a")

    assert (folder.root / "c" / "a").read_bytes() == b"after"


@pytest.mark.parametrize(("cache_id", "name"), [("..", "a"), ("c", "../a"), ("c", "/etc/x"), (".blobs", "a")])
def test_no_name_leads_out_of_the_folder(folder: CacheFolder, cache_id: str, name: str) -> None:
    ref = store(folder, b"abc")

    with pytest.raises(Exception, match="must be"):
        folder.name(cache_id, CacheEntry(name, ref.sha256, 3))
    assert files(folder) == {f".blobs/{ref.sha256}"}


def test_where_there_are_no_links_a_job_gets_a_copy(folder: CacheFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: object) -> None:
        raise OSError(18, "cross-device link")

    ref = store(folder, b"abc")
    monkeypatch.setattr(cache_module.os, "link", no_link)

    assert folder.link(ref, tmp_path / "in")
    assert ((tmp_path / "in").read_bytes(), (tmp_path / "in").stat().st_nlink) == (b"abc", 1)


# ---------------------------------------------------------------------------------------------------- fetching


class Transfers:
    """Blobs that come when the test lets them."""

    def __init__(self, *data: bytes) -> None:
        self.data = {ref_of(one).sha256: one for one in data}
        self.asked: list[tuple[str, str]] = []
        self.may_come = asyncio.Event()

    async def fetch(self, job_id: str, sha256: str, size_bytes: int, target: Path) -> None:
        target.write_bytes(self.data[sha256])

    async def resume(self, part: Any, ref: BlobRef, source: str) -> None:
        self.asked.append((ref.sha256, source))
        if ref.sha256 not in self.data:
            raise NotFound("no such blob")
        half = ref.size_bytes // 2
        part.write(self.data[ref.sha256][:half])
        await self.may_come.wait()
        part.write(self.data[ref.sha256][half:])


class Stage:
    """A cache and what it answered."""

    def __init__(self, folder: CacheFolder, *data: bytes) -> None:
        self.transfers, self.acks = Transfers(*data), asyncio.Queue[CacheAck]()
        self.cache = InputCache(folder, self.transfers, "w", self.acks.put_nowait)  # type: ignore[arg-type]

    async def put(self, *entries: CacheEntry, wait_s: float = 5.0, msg_id: int = 1) -> WorkerCache:
        self.cache.asked(CachePut(msg_id, "c", ">", list(entries), wait_s))
        ack = await self.acks.get()
        assert (ack.corr_id, ack.cache_id, len(ack.workers)) == (msg_id, "c", 1)
        return ack.workers[0]


@pytest.fixture
def running() -> Callable[[Any], None]:
    def run(work: Any) -> None:
        asyncio.run(asyncio.wait_for(work, 20.0))

    return run


def test_a_put_says_how_far_it_is_goes_on_and_is_fetched_once(folder: CacheFolder, running: Any) -> None:
    async def test() -> None:
        stage = Stage(folder, b"abcdef")
        first, again = entry_of("a", b"abcdef"), entry_of("b", b"abcdef")

        told = await stage.put(first, again, wait_s=0.1)
        assert (told.status, told.done_bytes) == (CacheStatus.FETCHING, 6)  # half of each name's file
        stage.transfers.may_come.set()
        assert (await stage.put(first, again, msg_id=2)).status in (CacheStatus.OK, CacheStatus.SKIPPED)
        assert (await stage.put(first, again)).status is CacheStatus.SKIPPED
        assert stage.transfers.asked == [(ref_of(b"abcdef").sha256, "cache:c/a")]
        assert files(folder) == {f".blobs/{ref_of(b'abcdef').sha256}", "c/a", "c/b"}

    running(test())


def test_two_puts_of_one_cache_at_once_fetch_what_they_share_once(folder: CacheFolder, running: Any) -> None:
    async def test() -> None:
        stage = Stage(folder, b"shared", b"one", b"two")
        puts = [[entry_of("a", b"shared"), entry_of(name, name.encode())] for name in ("one", "two")]
        for msg_id, entries in enumerate(puts):
            stage.cache.asked(CachePut(msg_id, "c", ">", entries, 5.0))
        await asyncio.to_thread(until, lambda: len(stage.transfers.asked) == 3, 10.0, "all files are being fetched")
        stage.transfers.may_come.set()

        acks = [await stage.acks.get() for _ in puts]
        told = {ack.corr_id: ack.workers[0] for ack in acks}
        assert {one.status for one in told.values()} == {CacheStatus.OK}
        assert sorted(one.message for one in told.values()) == ["added=1, skipped=1", "added=2, skipped=0"]
        refs = [ref_of(data).sha256 for data in (b"shared", b"one", b"two")]
        assert sorted(sha256 for sha256, _ in stage.transfers.asked) == sorted(refs)
        assert files(folder) == {*(f".blobs/{sha256}" for sha256 in refs), "c/a", "c/one", "c/two"}

    running(test())


def test_a_put_of_which_a_part_is_here_says_how_many_files_came(folder: CacheFolder, running: Any) -> None:
    async def test() -> None:
        stage = Stage(folder, b"new", b"too")
        stage.transfers.may_come.set()
        store(folder, b"old", "a")
        entries = [entry_of("b", b"new"), entry_of("c", b"too"), entry_of("a", b"old")]

        told = await stage.put(*entries)
        assert (told.status, told.message) == (CacheStatus.OK, "added=2, skipped=1")
        told = await stage.put(*entries)
        assert (told.status, told.message) == (CacheStatus.SKIPPED, "added=0, skipped=3")

    running(test())


def test_what_cannot_be_fetched_is_told_without_paths_and_the_rest_can_be_put_again(folder: CacheFolder, running: Any) -> None:
    async def test() -> None:
        stage = Stage(folder, b"abc")
        stage.transfers.may_come.set()

        told = await stage.put(entry_of("a", b"abc"), entry_of("x", b"nowhere"))
        assert (told.status, told.message) == (CacheStatus.FAILED, "NOT_FOUND: no such blob")
        told = await stage.put(CacheEntry("large", "0" * 64, 1000))
        assert told.status is CacheStatus.FAILED
        assert told.message == "DISK_FULL: files of 1000 bytes do not fit the cache of 100; raise --cache-max"
        assert str(folder.root) not in told.message
        assert (await stage.put(entry_of("a", b"abc"))).status in (CacheStatus.OK, CacheStatus.SKIPPED)

    running(test())


def test_files_that_come_at_once_stay_within_the_limit_and_a_put_that_does_not_fit_has_failed(
    folder: CacheFolder, tmp_path: Path, running: Any
) -> None:
    async def test() -> None:
        stage = Stage(folder, b"a" * 40, b"b" * 40)
        stage.transfers.may_come.set()
        assert folder.link(store(folder, b"used" * 10), tmp_path / "of-a-running-job")

        together = [entry_of("a", b"a" * 40), entry_of("b", b"b" * 40)]
        told = await stage.put(*together)
        assert (told.status, told.message[:11]) == (CacheStatus.FAILED, "DISK_FULL: ")
        assert sum(path.stat().st_size for path in (folder.root / ".blobs").iterdir()) <= 100
        (tmp_path / "of-a-running-job").unlink()
        assert (await stage.put(*together)).status is CacheStatus.OK
        assert (await stage.put(*together)).status is CacheStatus.SKIPPED

    running(test())


def test_a_fetch_that_is_ended_while_it_begins_leaves_the_file_to_the_next(
    folder: CacheFolder, tmp_path: Path, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_go_on, claim = threading.Event(), threading.Event(), folder.part

    def slow_part(ref: BlobRef) -> Any:
        has_begun.set()
        assert may_go_on.wait(10.0)
        return claim(ref)

    async def test() -> None:
        stage, ref = Stage(folder, b"abc"), ref_of(b"abc")
        stage.transfers.may_come.set()
        monkeypatch.setattr(folder, "part", slow_part)
        ended = asyncio.create_task(stage.cache.place("job-1", ref.sha256, 3, tmp_path / "first"))
        await asyncio.to_thread(has_begun.wait, 10.0)
        ended.cancel()
        await asyncio.sleep(0)
        may_go_on.set()
        await asyncio.wait([ended])

        await asyncio.wait_for(stage.cache.place("job-2", ref.sha256, 3, tmp_path / "second"), 10.0)
        assert (tmp_path / "second").read_bytes() == b"abc"

    running(test())


def test_a_job_that_needs_a_file_fetches_it_through_itself(folder: CacheFolder, tmp_path: Path, running: Any) -> None:
    async def test() -> None:
        stage = Stage(folder, b"abc")
        stage.transfers.may_come.set()
        ref = ref_of(b"abc")

        await asyncio.gather(*(stage.cache.place("job-1", ref.sha256, 3, tmp_path / str(number)) for number in range(3)))
        assert stage.transfers.asked == [(ref.sha256, "job-1")]
        assert {(tmp_path / str(number)).stat().st_ino for number in range(3)} == {
            (folder.root / ".blobs" / ref.sha256).stat().st_ino
        }

    running(test())


def test_where_cached_files_do_not_stay_as_they_were_stored_a_job_gets_a_copy(
    folder: CacheFolder, tmp_path: Path, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "is_as_stored", lambda *_: False)  # as on a file system without modes

    async def test() -> None:
        stage, ref = Stage(folder, b"abc"), ref_of(b"abc")
        stage.transfers.may_come.set()

        await stage.cache.place("job-1", ref.sha256, 3, tmp_path / "in")

        assert (tmp_path / "in").read_bytes() == b"abc"
        assert stage.transfers.asked == [(ref.sha256, "job-1")] * cache_module.FETCH_TRIES

    running(test())


def test_a_server_that_removes_a_cache_is_not_answered(folder: CacheFolder, running: Any) -> None:
    async def test() -> None:
        stage = Stage(folder, b"abc")
        store(folder, b"abc", "a")
        stage.cache.asked(CachePut(1, "c", ">", []))
        await asyncio.to_thread(until, lambda: not list((folder.root / ".blobs").iterdir()), 5.0, "the files are gone")
        assert files(folder) == set()
        assert stage.acks.empty()

    running(test())
