"""Putting files into a cache: which files, asking until all workers are done, and who may."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tasuki import Client, InputFile
from tasuki.client import caches
from tasuki.client.caches import CacheCalls, CacheUpload, LocalFile, PutResult, read_files
from tasuki.core.job import BlobRef
from tasuki.core.protocol import CacheAck, CachePut, CacheStatus, WorkerCache
from tasuki.core.store_messages import CacheEntry
from tasuki.errors import Forbidden, InvalidInput, NotFound
from tests.support.processes import ServerProcess

OK, SKIPPED, FAILED, FETCHING, AWAY = CacheStatus


def tree(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def names_of(*paths: str | Path) -> list[str]:
    return [file.entry.name for file in read_files(paths)]


def test_files_are_named_from_the_last_part_of_the_path_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, "assets/a.bin", "assets/deep/b", "single")
    monkeypatch.chdir(tmp_path)

    assert names_of("assets/") == names_of(tmp_path / "assets") == ["assets/a.bin", "assets/deep/b"]
    assert names_of(".") == ["assets/a.bin", "assets/deep/b", "single"]
    assert names_of("single", "assets/deep") == ["deep/b", "single"]
    monkeypatch.chdir("assets")
    assert names_of("../single", ".") == ["a.bin", "deep/b", "single"]


def test_a_file_has_its_hash_and_size_and_may_be_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()

    assert read_files([tmp_path / "empty"])[0].entry == CacheEntry("empty", hashlib.sha256(b"").hexdigest(), 0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: (folder / "x").symlink_to("/etc/passwd"), "is a link"),
        (lambda folder: (folder / "x").symlink_to(folder), "is a link"),
        (lambda folder: os.mkfifo(folder / "x"), "not a file or folder"),
        (lambda folder: tree(folder, "back\\slash"), "cannot be put"),
        (lambda folder: tree(folder, "new\nline"), "cannot be put"),
        (lambda folder: tree(folder, "Same", "same"), "without case"),
        (lambda folder: (folder / "only-a-folder").mkdir(), "no file"),
    ],
)
def test_what_is_no_plain_file_with_a_plain_name_is_refused(tmp_path: Path, make: Callable[[Path], object], says: str) -> None:
    make(tmp_path)

    with pytest.raises(InvalidInput, match=says):
        read_files([tmp_path])


def test_two_files_of_one_name_and_a_path_that_is_not_there_are_refused(tmp_path: Path) -> None:
    tree(tmp_path, "one/a", "two/a")

    with pytest.raises(InvalidInput, match="both be 'a'"):
        read_files([tmp_path / "one" / "a", tmp_path / "two" / "a"])
    with pytest.raises(InvalidInput, match="not there"):
        read_files([tmp_path / "nothing"])


@pytest.mark.parametrize(
    ("require", "statuses", "enough"),
    [
        ("all", [OK, SKIPPED], True),
        ("all", [OK, FAILED], False),
        ("all", [], False),
        ("1%", [], False),
        ("0", [], True),
        ("2", [OK, SKIPPED, FAILED], True),
        ("2", [OK], False),
        ("50%", [OK, FAILED], True),
        ("51%", [OK, FAILED], False),
        ("0%", [FAILED], True),
    ],
)
def test_enough_workers_are_all_a_number_or_a_share(require: str, statuses: list[CacheStatus], enough: bool) -> None:
    workers = {str(number): WorkerCache(str(number), status) for number, status in enumerate(statuses)}

    assert PutResult("c", 1, 1, workers).satisfies(require) is enough


@pytest.mark.parametrize("require", ["", "some", "-1", "101%", "1.5", "%", "٣"])
def test_another_requirement_is_refused(require: str) -> None:
    with pytest.raises(InvalidInput, match="require must be"):
        PutResult("c", 1, 1, {}).satisfies(require)


# ---------------------------------------------------------------------------------------------------- asking


class FakeClient(CacheCalls):
    """A server that answers as the test says, after the blobs have come.

    It is the clock too: an answer takes as long as the pause between two questions, so that nobody sleeps or asks in a loop.
    """

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)
        self.uploads: list[str] = []
        self.asked: list[str] = []
        self.others: dict[str, FakeClient] = {}
        self.elsewhere: tuple[str, ...] = ()
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def _ask(self, make: Any) -> Any:
        raise NotImplementedError

    async def call(self, verb: str, /, **params: Any) -> Any:
        raise NotImplementedError

    async def ask_cache(self, put: CachePut) -> CacheAck:
        missing = [entry.sha256 for entry in put.entries if entry.sha256 not in self.uploads]
        if missing:
            raise NotFound("blobs", blobs=missing[:1])
        self.asked.append("".join(entry.name for entry in put.entries))
        self.now += caches.ASK_EVERY_S
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        workers = [WorkerCache(name, *(told if isinstance(told, tuple) else (told,))) for name, told in answer.items()]
        return CacheAck(1, put.cache_id, workers, self.elsewhere)

    async def upload(self, path: Path, ref: BlobRef, progress: Any = None) -> None:
        self.uploads.append(ref.sha256)

    def beside(self, url: str, connect_timeout_s: float) -> Any:
        return self.others.get(url)

    async def __aenter__(self) -> FakeClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass


def put(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, *, idle_timeout_s: float = 30.0, require: str = "all"
) -> dict[str, CacheStatus]:
    monkeypatch.setattr(caches, "time", client)
    files = [LocalFile(CacheEntry(name, name * 64, 1), Path(name)) for name in "ab"]
    result = asyncio.run(CacheUpload(client, "c", files, ">", idle_timeout_s, None, None, require).run())
    return {name: one.status for name, one in result.workers.items()}


def test_missing_blobs_are_brought_and_workers_are_asked_until_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient({"w": AWAY, "x": SKIPPED}, {"w": (FETCHING, "", 1), "x": SKIPPED}, {"w": SKIPPED, "x": SKIPPED})

    assert put(client, monkeypatch) == {"w": OK, "x": SKIPPED}
    assert client.uploads == ["a" * 64, "b" * 64]


def test_a_worker_that_only_took_long_to_look_has_been_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, checked = {"w": (FETCHING, "", 2), "x": (FETCHING, "", 1)}, {"w": (FETCHING, "", 2), "x": (FETCHING, "", 2)}

    assert put(FakeClient(slow, checked, {"w": SKIPPED, "x": SKIPPED}), monkeypatch) == {"w": SKIPPED, "x": OK}


def test_progress_is_told_with_what_there_is_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    client, uploads, told = FakeClient({"w": (FETCHING, "", 3)}, {"w": OK}), [], []
    client.uploads = ["a" * 64]
    files = [LocalFile(CacheEntry(name, name * 64, size_bytes), Path(name)) for name, size_bytes in (("a", 1), ("b", 5))]
    monkeypatch.setattr(caches, "time", client)

    def on_upload(*progress: int) -> None:
        uploads.append(progress)

    def on_workers(workers: Mapping[str, WorkerCache], size_bytes: int) -> None:
        told.append((workers["w"].status, workers["w"].done_bytes, size_bytes))

    asyncio.run(CacheUpload(client, "c", files, ">", 30.0, on_upload, on_workers).run())

    assert uploads == [(5, 5)]
    assert told == [(FETCHING, 3, 6), (OK, 0, 6)]


def test_a_worker_that_left_is_waited_for_and_given_up_when_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    back = FakeClient({"w": FETCHING}, {}, {}, {"w": OK})
    gone = FakeClient({"w": FETCHING, "x": OK}, {"x": SKIPPED})

    assert put(back, monkeypatch) == {"w": OK}
    assert put(gone, monkeypatch, idle_timeout_s=2.0) == {"w": FAILED, "x": OK}
    assert gone.now == 1.0 + 2.0 + caches.ASK_EVERY_S  # it was gone in the second answer


@pytest.mark.parametrize(
    ("require", "ends"),
    [
        ("1", {"w": OK, "x": FETCHING, "y": AWAY}),
        ("30%", {"w": OK, "x": FETCHING, "y": AWAY}),
        ("all", {"w": OK, "x": FAILED, "y": AWAY}),
        ("67%", {"w": OK, "x": FAILED, "y": AWAY}),
        ("4", {"w": FETCHING, "x": FETCHING, "y": AWAY}),
        ("2", {"w": OK, "x": FAILED, "y": OK}),
    ],
)
def test_a_put_ends_when_the_requirement_is_met_or_cannot_be_met_any_more(
    monkeypatch: pytest.MonkeyPatch, require: str, ends: dict[str, CacheStatus]
) -> None:
    told = [{"w": FETCHING, "x": FETCHING}, {"w": OK, "x": FETCHING}, {"w": OK, "x": FAILED}]
    client = FakeClient(*({**one, "y": AWAY} for one in told), {"w": OK, "x": FAILED, "y": OK})

    assert put(client, monkeypatch, require=require) == ends


def test_all_parts_are_at_the_server_and_with_workers_that_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "batches", lambda files, _: [[file] for file in files])
    monkeypatch.setattr(caches, "PARTS_AT_ONCE", 1)
    late, failed = (
        FakeClient({"w": OK}, {"w": OK, "late": OK}, {"w": SKIPPED, "late": FETCHING}, {"late": OK}),
        FakeClient({"w": FAILED}),
    )

    assert put(late, monkeypatch) == {"w": OK, "late": OK}
    assert late.asked == ["a", "b", "a", "a"]
    assert put(failed, monkeypatch) == {"w": FAILED}
    assert failed.asked == ["a", "b"]


def test_a_worker_that_was_given_up_is_not_waited_for_again_in_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "batches", lambda files, _: [[file] for file in files])
    monkeypatch.setattr(caches, "PARTS_AT_ONCE", 1)
    client = FakeClient({"w": OK, "x": AWAY})

    assert put(client, monkeypatch, idle_timeout_s=2.0) == {"w": OK, "x": FAILED}
    assert client.asked[-1:] == ["b"]
    assert client.asked.count("b") == 1


def test_no_worker_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    assert put(FakeClient({}), monkeypatch) == {}


def test_workers_of_other_servers_are_asked_there(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient({"w": FETCHING, "y": AWAY}, {"w": OK, "y": AWAY})
    other = FakeClient({"w": AWAY, "y": AWAY}, {"w": AWAY, "y": OK})
    client.elsewhere, client.others = ("tcp://b:1", "tcp://nowhere:1"), {"tcp://b:1": other}

    assert put(client, monkeypatch) == {"w": OK, "y": OK}


# ---------------------------------------------------------------------------------------------------- who may


@pytest.mark.parametrize("transport", ["tcp", "http"])
def test_a_token_without_the_scope_neither_puts_nor_reads_nor_uses_nor_removes_a_cache(
    server: ServerProcess, tmp_path: Path, transport: str
) -> None:
    tree(tmp_path, "assets/secret")
    url, cache_id = (server.url if transport == "tcp" else server.http_url), f"scope-{transport}"
    with server.client() as admin, Client(url, token=server.create_token("client", scope=["other.>"])) as stranger:
        admin.put_cache(cache_id, tmp_path / "assets", target="render.>", require="0")
        [file] = admin.cache(cache_id)
        named, read = InputFile("in", cache=(cache_id, file.name)), bytearray()
        reading = stranger.aio._blobs.get(BlobRef(file.sha256, file.size_bytes), f"cache:{cache_id}/{file.name}", read.extend)

        with pytest.raises(Forbidden, match="render"):
            stranger.put_cache("another", tmp_path / "assets", target="render.>", require="0")
        with pytest.raises(Forbidden, match="render"):
            stranger.call("cache.remove", cache_id=cache_id, target="render.>")
        with pytest.raises(NotFound):
            stranger.cache(cache_id)
        with pytest.raises(NotFound, match="which no cache has, or not for you"):
            stranger.submit(subject="other.a", exec="x", files=[named])
        with pytest.raises(NotFound, match="that you may read"):
            stranger.wait(reading)

        assert (stranger.caches(), bytes(read)) == ([], b"")
        assert [one.cache_id for one in admin.caches() if one.cache_id in (cache_id, "another")] == [cache_id]
