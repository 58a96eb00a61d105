"""Inputs that are fetched: what was there before is not fetched again, and nobody disturbs anybody."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from tasuki.core.job import BlobRef
from tasuki.errors import Corrupt, DiskFull, NotFound, TasukiError
from tasuki.net.blob_transfer import BlobClient
from tasuki.net.streams import FileSource
from tasuki.worker.transfers import RESUMED_INPUT_MIN_BYTES, WorkerTransfers, sweep_incoming
from tests.support.waiting import until

CONTENT = os.urandom(64 * 1024) * (2 * RESUMED_INPUT_MIN_BYTES // (64 * 1024))
REF = BlobRef(hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))
HALF = len(CONTENT) // 2
PIECE_BYTES = 256 * 1024


class Server:
    """A carrier that has one blob. It breaks off where it is told to, and counts what it sends."""

    def __init__(self, content: bytes = CONTENT, *, until: int | None = None) -> None:
        self.content = content
        self.until = until
        self.offsets: list[int] = []
        self.sent_bytes = 0
        self.reached = asyncio.Event()

    async def put(self, source: FileSource, ref: BlobRef, progress: Callable[[int], None] | None) -> None:
        raise NotImplementedError

    async def pieces(self, ref: BlobRef, job_id: str, offset: int) -> AsyncGenerator[bytes, None]:
        self.offsets.append(offset)
        for at in range(offset, len(self.content), PIECE_BYTES):
            if self.until is not None and at >= self.until:
                self.reached.set()
                await asyncio.Event().wait()  # a line that carries nothing any more
            piece = self.content[at : at + PIECE_BYTES]
            self.sent_bytes += len(piece)
            yield piece


def line_to(server: Server) -> BlobClient:
    line = BlobClient()
    line.carried_by(server)
    return line


async def fetch(data: Path, server: Server, target: Path) -> None:
    async with asyncio.timeout(10):
        await WorkerTransfers(line_to(server), data).fetch("job", REF.sha256, REF.size_bytes, target)


async def half_fetched(data: Path) -> None:
    """An attempt that was given up when half of its input was there."""
    server = Server(until=HALF)
    fetching = asyncio.ensure_future(fetch(data, server, data / "given-up"))
    await server.reached.wait()
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)


def parts(data: Path) -> list[Path]:
    return list((data / "incoming").iterdir()) if (data / "incoming").exists() else []


def test_the_next_attempt_goes_on_where_the_last_one_was(tmp_path: Path) -> None:
    async def main() -> Server:
        await half_fetched(tmp_path)
        server = Server()
        await fetch(tmp_path, server, tmp_path / "target")
        return server

    server = asyncio.run(main())
    assert server.offsets == [HALF]
    assert server.sent_bytes == len(CONTENT) - HALF
    assert (tmp_path / "target").read_bytes() == CONTENT
    assert parts(tmp_path) == []


def test_so_does_the_next_process_after_a_kill(tmp_path: Path) -> None:
    # given: a worker that is killed when half of the input was there
    pid = os.fork()
    if pid == 0:

        async def die() -> None:
            server = Server(until=HALF)
            fetching = asyncio.ensure_future(fetch(tmp_path, server, tmp_path / "target"))
            await server.reached.wait()
            while parts(tmp_path)[0].stat().st_size < HALF:  # noqa: ASYNC110 - a thread writes it
                await asyncio.sleep(0.001)
            os.kill(os.getpid(), 9)
            await fetching

        asyncio.run(die())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    # when
    server = Server()
    asyncio.run(fetch(tmp_path, server, tmp_path / "target"))
    # then
    assert server.sent_bytes <= 1.1 * len(CONTENT) - HALF
    assert (tmp_path / "target").read_bytes() == CONTENT


def test_what_is_whole_already_is_not_asked_for_again(tmp_path: Path) -> None:
    (tmp_path / "incoming").mkdir()
    (tmp_path / "incoming" / f"{REF.sha256}.part").write_bytes(CONTENT)
    server = Server()
    asyncio.run(fetch(tmp_path, server, tmp_path / "target"))
    assert server.offsets == []
    assert (tmp_path / "target").read_bytes() == CONTENT


@pytest.mark.parametrize("damaged", [b"\0" * HALF, CONTENT + b"more", b"\0" * len(CONTENT)])
def test_a_damaged_piece_is_thrown_away_and_all_of_it_fetched_once_more(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "incoming").mkdir()
    (tmp_path / "incoming" / f"{REF.sha256}.part").write_bytes(damaged)
    server = Server()
    asyncio.run(fetch(tmp_path, server, tmp_path / "target"))
    assert server.offsets[-1] == 0
    assert (tmp_path / "target").read_bytes() == CONTENT


def test_a_server_with_other_bytes_is_not_asked_for_ever(tmp_path: Path) -> None:
    server = Server(b"\0" * len(CONTENT))
    with pytest.raises(Corrupt):
        asyncio.run(fetch(tmp_path, server, tmp_path / "target"))
    assert server.offsets == [0]
    assert parts(tmp_path) == []
    assert not (tmp_path / "target").exists()


def test_two_attempts_that_need_the_same_blob_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    async def main() -> None:
        slow = Server(until=HALF)
        first = asyncio.ensure_future(fetch(tmp_path, slow, tmp_path / "one"))
        await slow.reached.wait()
        # when: another one comes, in this process or another: the lock does not tell them apart
        quick = Server()
        await fetch(tmp_path, quick, tmp_path / "two")
        assert quick.offsets == [0]
        assert (tmp_path / "two").read_bytes() == CONTENT
        # then: what the first one has is as it was, once its last pieces have reached the disk
        [part] = parts(tmp_path)
        await asyncio.to_thread(until, lambda: part.stat().st_size >= HALF, 10.0, "its pieces are on the disk")
        assert part.read_bytes() == CONTENT[:HALF]
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    asyncio.run(main())


def test_a_small_input_goes_straight_to_its_place(tmp_path: Path) -> None:
    small = b"x" * (RESUMED_INPUT_MIN_BYTES - 1)
    transfers = WorkerTransfers(line_to(Server(small)), tmp_path)
    asyncio.run(transfers.fetch("job", hashlib.sha256(small).hexdigest(), len(small), tmp_path / "target"))
    assert (tmp_path / "target").read_bytes() == small
    assert parts(tmp_path) == []


def test_a_full_disk_leaves_no_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlobClient, "get", full)
    with pytest.raises(DiskFull):
        asyncio.run(fetch(tmp_path, Server(), tmp_path / "target"))
    assert parts(tmp_path) == []


def test_a_server_that_says_no_costs_nothing_of_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> None:
        raise NotFound("not stored any more")

    asyncio.run(half_fetched(tmp_path))
    [part] = parts(tmp_path)
    before = part.read_bytes()
    assert before == CONTENT[:HALF]
    monkeypatch.setattr(BlobClient, "get", gone)
    with pytest.raises(TasukiError):
        asyncio.run(fetch(tmp_path, Server(), tmp_path / "target"))
    assert parts(tmp_path) == [part]
    assert part.read_bytes() == before


# ---------------------------------------------------------------------------------------------------- the sweep


def part_of(data: Path, name: str, *, size_bytes: int = 10, age_s: float = 0.0) -> Path:
    part = data / "incoming" / f"{name}.part"
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(b"x" * size_bytes)
    at = time.time() - age_s
    os.utime(part, (at, at))
    return part


def test_a_start_removes_what_nobody_came_back_for(tmp_path: Path) -> None:
    part_of(tmp_path, "old", age_s=100.0)
    new = part_of(tmp_path, "new", age_s=10.0)
    sweep_incoming(tmp_path, max_age_s=50.0)
    assert parts(tmp_path) == [new]


def test_a_start_removes_the_oldest_of_what_is_too_much(tmp_path: Path) -> None:
    part_of(tmp_path, "older", size_bytes=60, age_s=20.0)
    new = part_of(tmp_path, "new", size_bytes=60, age_s=10.0)
    sweep_incoming(tmp_path, max_bytes=100)
    assert parts(tmp_path) == [new]


def test_a_start_removes_nothing_that_another_worker_fetches_into(tmp_path: Path) -> None:
    used = part_of(tmp_path, "used", age_s=100.0)
    with used.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        sweep_incoming(tmp_path, max_age_s=50.0)
    assert parts(tmp_path) == [used]
