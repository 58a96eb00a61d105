"""A large result on its way to the server: however that goes, it is safe on disk or its attempt has an end that can be told."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest

from tasuki.core.job import BlobRef, Outcome
from tasuki.core.protocol import Ending
from tasuki.core.worker.events import EndingSaved, Event, Restored
from tasuki.errors import TooLarge, Unauthorized
from tasuki.net.blob_transfer import BlobClient
from tasuki.net.streams import FileSource
from tasuki.worker.attempt import StopReason
from tasuki.worker.outbox import SAVE_AT_ONCE_BYTES, Outbox, OutboxFiles, OutboxRecord, RejectedResults
from tasuki.worker.transfers import WorkerTransfers
from tests.support.waiting import until_async

SMALLER, LARGE = b"x" * 100_000, b"y" * SAVE_AT_ONCE_BYTES


def record(result: Path | bytes) -> OutboxRecord:
    content = result if isinstance(result, bytes) else result.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    outcome = Outcome(result_ref=BlobRef(sha256, len(content)), result_sha256=sha256)
    return OutboxRecord(Ending("job", "lease", 1, outcome), "a.job", 1.0, result)


class Scene:
    """A worker's endings with a line that has no server yet."""

    def __init__(self, data: Path | None) -> None:
        self.line = BlobClient()
        self.data = data
        self.told: list[Event] = []
        self.ends = False
        self.stopped: StopReason | None = None
        self.stop: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
        self.unreported = None if data is None else OutboxFiles(data, "w1")
        aside = None if data is None else RejectedResults(data)
        transfers = WorkerTransfers(self.line)
        self.endings = Outbox(transfers, self.unreported, aside, tell=self.told.append, closing=lambda: self.ends)

    def bring(self, one: OutboxRecord) -> asyncio.Task[Outcome | None]:
        return asyncio.ensure_future(self.endings.upload(one, self.stop, lambda: self.stopped))

    def on_disk(self) -> list[OutboxRecord]:
        """The records that the next process would find."""
        return [] if self.unreported is None else self.unreported.load()


class Server:
    """A carrier that takes blobs, and notes what lay on the worker's disk when it was given them."""

    def __init__(self, scene: Scene, refuses: Exception | None = None) -> None:
        self.scene = scene
        self.refuses = refuses
        self.got: list[bytes] = []
        self.seen: list[list[OutboxRecord]] = []
        self.told_before: list[Event] = []

    async def put(self, source: FileSource, ref: BlobRef, progress: Callable[[int], None] | None) -> None:
        self.seen.append(self.scene.on_disk())
        self.told_before += self.scene.told
        if self.refuses is not None:
            raise self.refuses
        self.got.append(b"".join([piece async for piece in source.pieces(0, ref.size_bytes)]))

    def pieces(self, ref: BlobRef, job_id: str, offset: int) -> AsyncGenerator[bytes, None]:
        raise NotImplementedError


def play(data: Path | None, act: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        scene = Scene(data)
        async with asyncio.timeout(10):
            await act(scene)
            await scene.endings.close()

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------- on disk first


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_large_result_is_on_disk_before_its_first_byte_is_sent(tmp_path: Path, in_memory: bool) -> None:
    async def act(scene: Scene) -> None:
        server = Server(scene)
        (tmp_path / "result.zip").write_bytes(LARGE)
        one = record(LARGE if in_memory else tmp_path / "result.zip")
        scene.line.carried_by(server)
        assert await scene.bring(one) == one.ending.outcome
        [[saved]] = server.seen
        assert (saved.ending, saved.subject, saved.ended_at) == (one.ending, "a.job", 1.0)
        assert server.got == [LARGE]
        assert scene.told == [EndingSaved("lease")]
        # and: it stays until a server has spoken on the ending
        assert len(scene.on_disk()) == 1
        scene.endings.forget("lease")
        await scene.endings.written()
        assert list((tmp_path / "data" / "endings" / "w1").iterdir()) == []

    play(tmp_path / "data", act)


def test_a_smaller_one_goes_without_a_write(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        server = Server(scene)
        scene.line.carried_by(server)
        await scene.bring(record(SMALLER))
        assert server.got == [SMALLER]
        assert not (tmp_path / "data").exists()

    play(tmp_path / "data", act)


def test_a_smaller_one_is_saved_if_nobody_takes_it_for_a_while_and_brought_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasuki.worker.outbox.SAVE_AFTER_S", 0.01)

    async def act(scene: Scene) -> None:
        (tmp_path / "result.zip").write_bytes(SMALLER)
        bringing = scene.bring(record(tmp_path / "result.zip"))
        await until_async(lambda: scene.told == [EndingSaved("lease")])
        assert len(scene.on_disk()) == 1
        server = Server(scene)
        scene.line.carried_by(server)
        await bringing
        assert server.got == [SMALLER]

    play(tmp_path / "data", act)


def test_one_that_was_brought_but_not_told_is_saved_with_its_bytes(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.line.carried_by(Server(scene))
        one = record(SMALLER)
        await scene.bring(one)
        scene.endings.save(OutboxRecord(one.ending, "a.job", 1.0))
        await scene.endings.written()
        [saved] = scene.on_disk()
        assert isinstance(saved.result, Path)
        assert saved.result.read_bytes() == SMALLER

    play(tmp_path / "data", act)


# ---------------------------------------------------------------------------------------------------- it is stopped


@pytest.mark.parametrize("result", [SMALLER, LARGE])
def test_a_worker_that_ends_leaves_it_to_its_next_process(
    tmp_path: Path, result: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(scene: Scene) -> None:
        bringing = scene.bring(record(result))
        await asyncio.sleep(0)
        scene.ends, scene.stopped = True, StopReason.SHUTDOWN
        scene.stop.set_result(StopReason.SHUTDOWN)
        assert await bringing is None
        await scene.endings.written()
        assert len(scene.on_disk()) == 1

    play(tmp_path / "data", act)
    assert f"1 result(s) wait in {tmp_path / 'data' / 'endings' / 'w1'}; the next start offers them" in caplog.text


def test_an_async_handler_that_is_canceled_for_it_does_the_same(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        bringing = scene.bring(record(LARGE))
        await asyncio.sleep(0)
        scene.ends, scene.stopped = True, StopReason.SHUTDOWN
        bringing.cancel()
        assert await bringing is None
        await scene.endings.written()
        assert len(scene.on_disk()) == 1

    play(tmp_path / "data", act)


def test_a_token_that_was_revoked_costs_no_result(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        bringing = scene.bring(record(LARGE))
        await until_async(lambda: scene.told)
        scene.ends = True  # the machine says Exit: the line is closed, and the worker ends
        scene.line.close(Unauthorized("token t was revoked"))
        assert await bringing is None
        assert len(scene.on_disk()) == 1

    play(tmp_path / "data", act)


def test_without_a_folder_an_attempt_that_is_stopped_has_ended(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        bringing = scene.bring(record(LARGE))
        await asyncio.sleep(0)
        scene.stopped = StopReason.LEASE_LOST
        bringing.cancel()
        ended = await bringing
        assert ended is not None
        assert (ended.error_code, ended.result_ref) == ("LEASE_LOST", None)

    play(None, act)


def test_a_canceled_job_has_ended_and_its_result_is_of_no_use(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        bringing = scene.bring(record(LARGE))
        await until_async(lambda: scene.told)
        scene.stopped = StopReason.CANCELED
        scene.stop.set_result(StopReason.CANCELED)
        ended = await bringing
        assert ended is not None
        assert ended.error_code == "CANCELED"
        scene.endings.forget("lease")
        await scene.endings.written()
        assert scene.on_disk() == []
        assert not (tmp_path / "data" / "kept-aside").exists()

    play(tmp_path / "data", act)


# ---------------------------------------------------------------------------------------------------- it is refused


@pytest.mark.parametrize("result", [SMALLER, LARGE])
def test_a_result_whose_lease_was_lost_is_kept_aside(tmp_path: Path, result: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def act(scene: Scene) -> None:
        one = record(result)
        bringing = scene.bring(one)
        await asyncio.sleep(0)
        scene.stopped = StopReason.LEASE_LOST
        scene.stop.set_result(StopReason.LEASE_LOST)
        ended = await bringing
        assert ended is not None
        # when: the machine says what follows from a lost lease
        scene.endings.set_aside(OutboxRecord(Ending("job", "lease", 1, ended)), "the lease was lost")
        scene.endings.forget("lease")
        await scene.endings.written()
        assert (tmp_path / "data" / "kept-aside" / "job-1" / "result").read_bytes() == result
        assert scene.on_disk() == []

    with caplog.at_level(logging.WARNING, "tasuki.worker"):
        play(tmp_path / "data", act)
    assert f"refused, its result is kept in {tmp_path / 'data' / 'kept-aside' / 'job-1'}: the lease was lost" in caplog.text


def test_a_fenced_inline_result_is_kept_aside_and_an_empty_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def act(scene: Scene) -> None:
        for job_id, result in (("full", b"dear"), ("empty", b"")):
            scene.endings.set_aside(
                OutboxRecord(Ending(job_id, job_id, 1, Outcome(result=result)), "a.job", 1.0), "attempt 2 runs"
            )
            scene.endings.forget(job_id)

    play(tmp_path / "data", act)
    assert [path.name for path in (tmp_path / "data" / "kept-aside").iterdir()] == ["full-1"]
    assert "job empty attempt 1: refused, its result is dropped: attempt 2 runs" in caplog.text


def test_a_result_that_the_server_will_never_take_is_a_failure_that_says_so_and_is_kept_aside(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.line.carried_by(Server(scene, TooLarge("a blob may have 1 MB")))
        ended = await scene.bring(record(LARGE))
        assert ended is not None
        assert (ended.error_code, ended.message) == ("TOO_LARGE", "the result could not be kept: a blob may have 1 MB")
        scene.endings.forget("lease")
        await scene.endings.written()
        assert (tmp_path / "data" / "kept-aside" / "job-1" / "result").read_bytes() == LARGE
        assert scene.on_disk() == []

    play(tmp_path / "data", act)


# ---------------------------------------------------------------------------------------------------- the next process


def saved_before(data: Path) -> OutboxRecord:
    one = record(LARGE)
    OutboxFiles(data, "w1").save(one)
    return one


def test_the_next_process_brings_the_result_and_then_offers_the_ending(tmp_path: Path) -> None:
    one = saved_before(tmp_path)

    async def act(scene: Scene) -> None:
        server = Server(scene)
        [found] = await scene.endings.load()
        scene.line.carried_by(server)
        await scene.endings.offer(found)
        assert (server.got, server.told_before) == ([LARGE], [])
        assert scene.told == [Restored(one.ending)]

    play(tmp_path, act)


def test_an_ending_of_an_earlier_process_that_is_fenced_is_kept_aside_with_its_result(tmp_path: Path) -> None:
    one = saved_before(tmp_path)

    async def act(scene: Scene) -> None:
        await scene.endings.load()
        scene.endings.set_aside(OutboxRecord(one.ending), "attempt 2 runs")
        scene.endings.forget("lease")

    play(tmp_path, act)
    [about] = (tmp_path / "kept-aside").rglob("about.json")
    assert b'"subject": "a.job"' in about.read_bytes()
    assert about.with_name("result").read_bytes() == LARGE
    assert OutboxFiles(tmp_path, "w1").load() == []


def test_a_saved_result_that_the_server_will_never_take_is_kept_aside_and_not_offered_for_ever(tmp_path: Path) -> None:
    saved_before(tmp_path)

    async def act(scene: Scene) -> None:
        scene.line.carried_by(Server(scene, TooLarge("a blob may have 1 MB")))
        [found] = await scene.endings.load()
        await scene.endings.offer(found)
        assert scene.told == []

    play(tmp_path, act)
    assert (tmp_path / "kept-aside" / "job-1" / "result").read_bytes() == LARGE
    assert OutboxFiles(tmp_path, "w1").load() == []
