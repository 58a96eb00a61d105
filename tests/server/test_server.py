"""A whole server in this process, without a socket: turns, reads, pressure, faults of the store, and its end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tasuki.blobs.folder import FolderBlobs
from tasuki.core.access import token_sha256
from tasuki.core.broker import state, turn_builder
from tasuki.core.broker.events import Hinted
from tasuki.core.cluster_messages import Hint
from tasuki.core.job import JobSpec, Outcome, State
from tasuki.core.machine import Send
from tasuki.core.protocol import (
    Accepted,
    AssignJobs,
    Ending,
    ErrorMessage,
    GiveCredit,
    HelloClient,
    JobsFinished,
    JobsRecorded,
    Reply,
    Request,
    Results,
    SubmitJobs,
    Welcome,
)
from tasuki.core.store_messages import ReadyPage, Submission, Submitted
from tasuki.errors import Conflict, InternalError, InterruptCause, TurnInterrupted, Unauthorized, Unavailable
from tasuki.server import server as server_module
from tasuki.server.queries import UNREAD_MIN_BYTES
from tasuki.server.server import Server, ServerConfig
from tasuki.stores.common import RETRY_S, SystemClock
from tasuki.stores.memory.store import MemoryStore
from tests.server.peers import PATIENCE_S, FakeConnection, client, worker


class GatedStore(MemoryStore):
    """A store whose submits wait until the test lets them go, or break."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.broken = False

    def submit(self, submissions: list[Submission], *, on_failed: str = "return") -> list[Submitted | Conflict]:  # type: ignore[override]
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        if self.broken:
            raise RuntimeError("the disk is on fire")
        return super().submit(submissions, on_failed=on_failed)


@pytest.fixture
def store() -> GatedStore:
    return GatedStore()


def serve(tmp_path: Path, store: MemoryStore, work: Callable[[Server], Awaitable[None]], **config: int) -> None:
    async def main() -> None:
        blobs = FolderBlobs(tmp_path / "blobs", max_blob_bytes=10**6, floor_free_bytes=0)
        settings = ServerConfig(server_id="test", data=tmp_path, **{"disk_floor_bytes": 0, "disk_floor_inodes": 0, **config})  # type: ignore[arg-type]
        server = Server(settings, lambda: store, lambda: store, blobs)
        await server.start()
        try:
            await work(server)
        finally:
            await server.stop()

    asyncio.run(main())


def test_a_job_goes_from_submit_to_result(tmp_path: Path, store: GatedStore) -> None:
    async def work(server: Server) -> None:
        (mine, link), (its, runner) = await client(server), await worker(server)
        server.received(its, GiveCredit(1))
        server.received(mine, SubmitJobs(5, [JobSpec(job_id="a")]))
        assert (await link.wait_for(Accepted)).corr_id == 5
        [grant] = (await runner.wait_for(AssignJobs)).grants
        server.received(its, JobsFinished([Ending("a", grant.lease_id, grant.attempt, Outcome(result=b"42"))]))
        assert (await runner.wait_for(JobsRecorded)).recorded == [grant.lease_id]
        [result] = (await link.wait_for(Results)).items
        assert (result.state, result.outcome.result) == (State.SUCCEEDED, b"42")

    serve(tmp_path, store, work)


def test_a_worker_hears_what_was_recorded_and_what_it_gets_next_in_one_write(tmp_path: Path, store: GatedStore) -> None:
    async def work(server: Server) -> None:
        # Given a worker with one place, and two jobs
        (mine, link), (its, runner) = await client(server), await worker(server)
        server.received(mine, SubmitJobs(5, [JobSpec(job_id="a"), JobSpec(job_id="b")]))
        await link.wait_for(Accepted)
        server.received(its, GiveCredit(1))
        [grant] = (await runner.wait_for(AssignJobs)).grants
        # When it reports the first, and has room for the next
        server.received(its, JobsFinished([Ending(grant.job_id, grant.lease_id, grant.attempt, Outcome())]))
        server.received(its, GiveCredit(1))
        await runner.wait_for(AssignJobs, 2)
        # Then one turn of the store was enough, and one write
        assert [type(message) for message in runner.writes[-1]] == [JobsRecorded, AssignJobs]

    serve(tmp_path, store, work)


def test_a_job_whose_time_comes_before_the_next_tick_is_started_at_its_time(
    tmp_path: Path, store: GatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "TICK_S", 3600.0)
    monkeypatch.setattr(server_module, "IDLE_TICK_S", 3600.0)

    async def work(server: Server) -> None:
        (mine, link), (its, runner) = await client(server), await worker(server)
        server.received(its, GiveCredit(1))
        due_at = time.time() + 0.3
        server.received(mine, SubmitJobs(5, [JobSpec(job_id="a", not_before=due_at)]))
        await link.wait_for(Accepted)
        server.tell(Hinted(Hint(server_id="other", everything=True)))  # the leader looks, and learns of it
        await runner.wait_for(AssignJobs)
        assert time.time() >= due_at

    serve(tmp_path, store, work)


def test_what_arrives_while_the_store_is_busy_shares_the_next_transaction(tmp_path: Path, store: GatedStore) -> None:
    batches: list[int] = []
    plain = store.submit

    def counted(submissions: list[Submission], *, on_failed: str = "return") -> list[Submitted | Conflict]:
        batches.append(len(submissions))
        return plain(submissions, on_failed=on_failed)

    store.submit = counted  # type: ignore[method-assign]

    async def work(server: Server) -> None:
        conn, link = await client(server)
        store.gate.clear()
        server.received(conn, SubmitJobs(1, [JobSpec(job_id="first")]))
        assert await asyncio.to_thread(store.entered.wait, PATIENCE_S)
        for number in range(10):
            server.received(conn, SubmitJobs(2 + number, [JobSpec(job_id=f"job-{number}")]))
        assert link.all(Accepted) == []
        store.gate.set()
        await link.wait_for(Accepted, 11)

    serve(tmp_path, store, work)
    assert batches == [1, 10]


def test_a_worker_with_too_many_reports_on_leases_of_others_is_not_read_from_until_they_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_builder, "PACED_MAX_BYTES", 10 * turn_builder.PACED_ITEM_BYTES)
    foreign = JobsFinished([Ending(f"job-{n}", f"lease-{n}", 1, Outcome()) for n in range(20)])

    async def work(server: Server) -> None:
        conn, link = await worker(server)
        _, other = await client(server)
        server.received(conn, foreign)
        assert link.paused != set()
        assert other.paused == set()
        server.received(conn, foreign)
        await link.until(lambda: link.paused == set())
        await link.wait_for(JobsRecorded, 2)

    serve(tmp_path, MemoryStore(SystemClock()), work)


def test_peers_are_not_read_from_while_too_much_waits_for_the_store(
    tmp_path: Path, store: GatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "DRAFT_SOFT_ITEMS", 3)

    async def work(server: Server) -> None:
        conn, link = await client(server)
        store.gate.clear()
        server.received(conn, SubmitJobs(1, [JobSpec(job_id="first")]))
        assert await asyncio.to_thread(store.entered.wait, PATIENCE_S)
        server.received(conn, SubmitJobs(2, [JobSpec(job_id=f"job-{number}") for number in range(4)]))
        await link.until(lambda: bool(link.paused))
        store.gate.set()
        await link.wait_for(Accepted, 2)
        assert link.paused == set()

    serve(tmp_path, store, work)


def test_one_token_fills_no_turn_and_others_are_read_from_meanwhile(
    tmp_path: Path, store: GatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (server_module, state):
        monkeypatch.setattr(module, "OWNER_PER_TURN", 3)

    async def work(server: Server) -> None:
        operator, _ = await client(server)
        server.received(
            operator, Request(1, "token.create", {"token_id": "a", "kind": "client", "sha256": token_sha256("greedy")})
        )
        greedy = [await client(server, token="greedy") for _ in range(3)]
        _, other = await client(server)
        store.gate.clear()
        server.received(operator, SubmitJobs(1, [JobSpec(job_id="first")]))
        assert await asyncio.to_thread(store.entered.wait, PATIENCE_S)

        server.received(greedy[0][0], SubmitJobs(1, [JobSpec(job_id=f"a-{number}") for number in range(4)]))
        assert [bool(link.paused) for _, link in greedy] == [True, False, False]
        server.received(greedy[1][0], SubmitJobs(1, [JobSpec(job_id=f"b-{number}", payload=b"x" * 4096) for number in range(2)]))
        assert [bool(link.paused) for _, link in greedy] == [True, True, True]
        assert other.paused == set()

        store.gate.set()
        for _, link in greedy[:2]:
            await link.wait_for(Accepted)
        assert [link.paused for _, link in greedy] == [set()] * 3

    serve(tmp_path, store, work)


def test_a_defect_of_the_store_is_told_and_does_not_end_the_server(tmp_path: Path, store: GatedStore) -> None:
    async def work(server: Server) -> None:
        conn, link = await client(server)
        store.broken = True
        server.received(conn, SubmitJobs(5, [JobSpec(job_id="a")]))
        error = await link.wait_for(ErrorMessage)
        assert (error.corr_id, error.code) == (5, "UNAVAILABLE")
        store.broken = False
        server.received(conn, SubmitJobs(6, [JobSpec(job_id="a")]))
        assert (await link.wait_for(Accepted)).corr_id == 6

    serve(tmp_path, store, work)


def test_reads_are_answered_from_the_reader_and_errors_go_to_the_asker(tmp_path: Path, store: GatedStore) -> None:
    async def work(server: Server) -> None:
        conn, link = await client(server)
        server.received(conn, SubmitJobs(5, [JobSpec(job_id="a")]))
        await link.wait_for(Accepted)
        server.received(conn, Request(6, "get", {"job_ids": ["a"]}))
        assert (await link.wait_for(Reply)).body[0]["job_id"] == "a"
        server.received(conn, Request(7, "get", {"job_ids": ["ghost"]}))
        error = await link.wait_for(ErrorMessage)
        assert (error.corr_id, error.code) == (7, "NOT_FOUND")

    serve(tmp_path, store, work)


@pytest.mark.parametrize("error", [Unavailable("the connection was lost"), RuntimeError("a defect")])
def test_a_page_of_ready_queues_that_cannot_be_read_is_asked_for_again(
    tmp_path: Path, store: GatedStore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    asked = 0
    is_read_again = threading.Event()

    def ready_queues(place: Any = None, *, limit: int = 256) -> ReadyPage:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise error
        is_read_again.set()
        return MemoryStore.ready_queues(store, place, limit=limit)

    monkeypatch.setattr(store, "ready_queues", ready_queues)

    async def work(server: Server) -> None:
        await worker(server)
        assert await asyncio.to_thread(is_read_again.wait, PATIENCE_S)

    serve(tmp_path, store, work)


def test_a_full_disk_is_noticed_before_a_job_is_taken(tmp_path: Path, store: GatedStore) -> None:
    async def work(server: Server) -> None:
        conn, link = await client(server)
        server.received(conn, SubmitJobs(5, [JobSpec(job_id="a")]))
        assert (await link.wait_for(ErrorMessage)).code == "DISK_FULL"

    serve(tmp_path, store, work, disk_floor_bytes=2**62)
    assert store.get(["a"]) == [None]


def test_a_peer_that_is_refused_is_hung_up_on_with_the_reason(tmp_path: Path, store: GatedStore) -> None:
    async def work(server: Server) -> None:
        link = FakeConnection()
        conn = server.opened(link)
        server.received(conn, HelloClient(msg_id=1, client_id="c1", token="guess"))
        await link.until(lambda: link.closed != "")
        assert isinstance(link.closed, Unauthorized)
        assert link.max_bytes == 0

    serve(tmp_path, store, work)


def test_a_peer_that_does_not_read_is_hung_up_on_in_the_turn_that_had_jobs_for_it(tmp_path: Path, store: GatedStore) -> None:
    async def work(server: Server) -> None:
        conn, link = await worker(server)
        link.unread_bytes = UNREAD_MIN_BYTES
        # its token is revoked in a turn that granted it jobs: the broker has forgotten it when these are sent
        revoked = server.broker.hang_up(conn, Unauthorized("it was revoked"))
        server._perform([Send(conn, AssignJobs(1.0, [])), *revoked])
        assert isinstance(link.closed, Unauthorized)

    serve(tmp_path, store, work)


def test_larger_frames_are_allowed_with_the_welcome(tmp_path: Path, store: GatedStore) -> None:
    async def work(server: Server) -> None:
        _, link = await client(server)
        assert link.max_bytes == server.config.frame_max_bytes
        assert link.all(Welcome)[0].server_id == "test"

    serve(tmp_path, store, work)


def test_stop_answers_what_is_under_way_and_closes_every_link(tmp_path: Path, store: GatedStore) -> None:
    links: list[FakeConnection] = []

    async def work(server: Server) -> None:
        conn, link = await client(server)
        links.append(link)
        store.gate.clear()
        server.received(conn, SubmitJobs(1, [JobSpec(job_id="first")]))
        assert await asyncio.to_thread(store.entered.wait, PATIENCE_S)
        server.received(conn, SubmitJobs(2, [JobSpec(job_id="second")]))
        stopping = asyncio.ensure_future(server.stop())
        store.gate.set()
        await stopping
        server.received(conn, SubmitJobs(3, [JobSpec(job_id="third")]))

    async def main() -> None:
        blobs = FolderBlobs(tmp_path / "blobs", max_blob_bytes=10**6, floor_free_bytes=0)
        config = ServerConfig(server_id="test", data=tmp_path, disk_floor_bytes=0, disk_floor_inodes=0)
        server = Server(config, lambda: store, lambda: store, blobs)
        await server.start()
        await work(server)

    asyncio.run(main())
    [link] = links
    assert [message.corr_id for message in link.all(Accepted)] == [1, 2]
    assert link.closed is None
    assert store.get(["third"]) == [None]


def test_a_server_stops_soon_though_its_store_is_away(tmp_path: Path, store: GatedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STOP_TIMEOUT_S", 0.1)

    def away(submissions: list[Submission], *, on_failed: str = "return") -> list[Submitted | Conflict]:
        store.entered.set()
        raise TurnInterrupted("the store cannot be reached", InterruptCause.CONNECTION)

    store.submit = away  # type: ignore[method-assign]

    async def work(server: Server) -> None:
        conn, _ = await client(server)
        server.received(conn, SubmitJobs(1, [JobSpec(job_id="waits")]))
        assert await asyncio.to_thread(store.entered.wait, PATIENCE_S)

    began = time.monotonic()
    serve(tmp_path, store, work)
    assert time.monotonic() - began < RETRY_S / 2


def test_the_cause_of_a_failed_turn_is_logged_once_in_a_while(
    tmp_path: Path, store: GatedStore, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong_type(submissions: list[Submission], *, on_failed: str = "return") -> list[Submitted | Conflict]:
        raise InternalError("Redis at db:6379: WRONGTYPE Operation against a key")

    store.submit = wrong_type  # type: ignore[method-assign]

    async def work(server: Server) -> None:
        conn, link = await client(server)
        for number in (1, 2):
            server.received(conn, SubmitJobs(number, [JobSpec(job_id=f"job-{number}")]))
            await link.wait_for(ErrorMessage, number)

    serve(tmp_path, store, work)

    [line] = [record.getMessage() for record in caplog.records if "turn" in record.getMessage()]
    assert "INTERNAL: Redis at db:6379: WRONGTYPE Operation against a key" in line


def test_the_last_client_is_told_of_and_workers_do_not_count(tmp_path: Path, store: GatedStore) -> None:
    told: list[str] = []

    async def work(server: Server) -> None:
        server.on_last_client = lambda: told.append("last")
        (first, _), (second, _), _ = await client(server), await client(server), await worker(server)
        server.closed(first, "gone")
        assert told == []
        server.closed(second, "gone")
        assert told == ["last"]

    serve(tmp_path, store, work)


def test_a_store_that_cannot_be_opened_fails_the_start(tmp_path: Path) -> None:
    def refuse() -> MemoryStore:
        raise PermissionError("not yours")

    async def main() -> None:
        blobs = FolderBlobs(tmp_path / "blobs", max_blob_bytes=10**6, floor_free_bytes=0)
        server = Server(ServerConfig(server_id="test", data=tmp_path), refuse, refuse, blobs)
        with pytest.raises(PermissionError):
            await server.start()

    asyncio.run(main())


def test_results_for_a_peer_that_does_not_read_wait_in_the_store(tmp_path: Path, store: GatedStore) -> None:
    async def work(server: Server) -> None:
        # Given a client that watches a job and does not read what it is sent
        (mine, link), (its, runner) = await client(server), await worker(server)
        server.received(its, GiveCredit(1))
        server.received(mine, SubmitJobs(5, [JobSpec(job_id="a")]))
        await link.wait_for(Accepted)
        grant = (await runner.wait_for(AssignJobs)).grants[0]
        link.writable.clear()
        # When the job ends
        ending = Ending(grant.job_id, grant.lease_id, grant.attempt, Outcome(result=b"49"))
        server.received(its, JobsFinished([ending]))
        await runner.wait_for(JobsRecorded)
        assert link.all(Results) == []
        # Then its result is sent when the client has read the rest
        link.writable.set()
        [item] = (await link.wait_for(Results)).items
        assert (item.job_id, item.state, item.outcome.result) == ("a", State.SUCCEEDED, b"49")

    serve(tmp_path, store, work)
