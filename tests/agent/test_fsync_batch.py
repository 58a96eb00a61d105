"""Many jobs are made durable together: one hop for all that wait, and each is told of its own end."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tasuki.agent import folders
from tasuki.agent.folders import FsyncBatch, sync_now
from tasuki.errors import DiskFull
from tests.support.waiting import until


def opened(folder: Path, name: str) -> int:
    return os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600)


def pipe_end() -> int:
    """A descriptor that cannot be fsynced."""
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of waiters for each hop into a thread."""
    sizes = []

    def synced(batch: Any, root: Any, real: Callable[[Any, Any], Any] = folders._synced) -> Any:
        sizes.append(len(batch))
        return real(batch, root)

    monkeypatch.setattr(folders, "_synced", synced)
    return sizes


def run(test: Callable[[FsyncBatch], Coroutine[Any, Any, None]], place: Path) -> None:
    async def main() -> None:
        await test(FsyncBatch(str(place)))

    asyncio.run(main())


def test_all_that_wait_go_in_one_hop_and_are_closed(tmp_path: Path, batches: list[int]) -> None:
    descriptors = [opened(tmp_path, str(number)) for number in range(20)]

    async def test(syncer: FsyncBatch) -> None:
        await asyncio.gather(*(syncer.sync([descriptor]) for descriptor in descriptors))
        await syncer.sync([os.open(tmp_path, os.O_RDONLY)])

    run(test, tmp_path)
    assert batches == [20, 1]
    assert not any(map(is_open, descriptors))


def test_what_comes_while_one_is_under_way_goes_in_the_next(
    tmp_path: Path, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "FSYNC_THREADS", 1)

    async def test(syncer: FsyncBatch) -> None:
        first = syncer.sync([opened(tmp_path, "first")])
        await asyncio.to_thread(until, lambda: batches, what="the first is under way")
        others = [syncer.sync([opened(tmp_path, str(number))]) for number in range(5)]
        await asyncio.gather(first, *others)

    run(test, tmp_path)
    assert sum(batches) == 6
    assert batches[0] == 1
    assert len(batches) <= 3


def test_one_that_fails_is_told_so_and_the_others_are_not(tmp_path: Path) -> None:
    good, bad, after_bad = opened(tmp_path, "good"), pipe_end(), opened(tmp_path, "after")

    async def test(syncer: FsyncBatch) -> None:
        ends = await asyncio.gather(syncer.sync([bad, after_bad]), syncer.sync([good]), return_exceptions=True)
        assert isinstance(ends[0], OSError)
        assert ends[0].errno == errno.EINVAL
        assert ends[1] is None

    run(test, tmp_path)
    assert not any(map(is_open, (good, bad, after_bad)))


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = opened(tmp_path, "file")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    async def test(syncer: FsyncBatch) -> None:
        with pytest.raises(DiskFull, match=str(tmp_path)):
            await syncer.sync([descriptor])

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        run(test, tmp_path)
    assert not is_open(descriptor)


def test_who_stops_waiting_leaves_nothing_open(tmp_path: Path, batches: list[int]) -> None:
    left, other = opened(tmp_path, "left"), opened(tmp_path, "other")

    async def test(syncer: FsyncBatch) -> None:
        leaving, staying = syncer.sync([left]), syncer.sync([other])
        await asyncio.to_thread(until, lambda: batches, what="the first is under way")
        leaving.cancel()
        await staying

    run(test, tmp_path)
    assert not is_open(left)
    assert not is_open(other)


def test_the_root_is_synced_after_the_others_once_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = os.open(tmp_path, os.O_RDONLY)
    descriptors = [opened(tmp_path, str(number)) for number in range(3)]
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)

    async def main() -> None:
        syncer = FsyncBatch(str(tmp_path), root)
        await asyncio.gather(*(syncer.sync([descriptor]) for descriptor in descriptors))

    asyncio.run(main())
    assert synced == [*descriptors, root]
    assert is_open(root)
    os.close(root)


def test_a_root_that_fails_is_everybodys_failure(tmp_path: Path) -> None:
    root = pipe_end()

    async def main() -> None:
        syncer = FsyncBatch(str(tmp_path), root)
        ends = await asyncio.gather(*(syncer.sync([opened(tmp_path, n)]) for n in "ab"), return_exceptions=True)
        assert [isinstance(end, OSError) for end in ends] == [True, True]

    asyncio.run(main())
    os.close(root)


def test_a_descriptor_that_is_not_open_any_more_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    gone, good = 1_000_000, opened(tmp_path, "good")

    async def test(syncer: FsyncBatch) -> None:
        ends = await asyncio.gather(syncer.sync([gone]), syncer.sync([good]), return_exceptions=True)
        assert isinstance(ends[0], OSError)
        assert ends[1] is None

    run(test, tmp_path)
    assert not is_open(good)


def test_alone_the_first_failure_is_raised(tmp_path: Path) -> None:
    bad, good = pipe_end(), opened(tmp_path, "good")

    with pytest.raises(OSError, match="Invalid argument"):
        sync_now([bad, good])
    assert not is_open(bad)
    assert not is_open(good)
