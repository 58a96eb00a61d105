"""A worker's virtual connection against a server that is played: what it says, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from tasuki.core.access import Identity, PeerKind
from tasuki.core.job import JobSpec, Outcome
from tasuki.core.machine import Now
from tasuki.core.protocol import (
    AssignJobs,
    Claim,
    GiveCredit,
    Heartbeat,
    HeartbeatAnswer,
    HelloWorker,
    JobsFinished,
    JobsRecorded,
    JobsReleased,
    Message,
    Welcome,
)
from tasuki.core.store_messages import Grant
from tasuki.doors.http.virtual_connection import Caller
from tasuki.doors.http.workers import HttpWorker
from tasuki.errors import ProtocolError, Unauthorized, Unavailable

CALLER = Caller(Identity(PeerKind.WORKER, "token:t", worker_id="w1"), "0" * 64, "secret", "10.0.0.1:5")


class PlayedServer:
    """Welcomes everybody, answers heartbeats, and keeps what it was told."""

    def __init__(self) -> None:
        self.said: list[Message] = []
        self.link: Any = None
        self.answers_heartbeats = True

    def now(self) -> Now:
        return Now(asyncio.get_running_loop().time(), 0.0)

    def opened(self, link: Any) -> int:
        self.link = link
        return 1

    def closed(self, conn: int, reason: str) -> None:
        self.link = None

    def received(self, conn: int, message: Message) -> None:
        self.said.append(message)
        if isinstance(message, HelloWorker):
            self.link.send(Welcome(corr_id=message.msg_id, version=1, server_id="s", identity="token:t", kind="worker"))
        elif isinstance(message, Heartbeat) and self.answers_heartbeats:
            self.link.send(HeartbeatAnswer(message.msg_id))

    def told(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]


def grant(job_id: str, attempt: int = 1) -> Grant:
    return Grant(job_id, msgspec.msgpack.encode(JobSpec(job_id=job_id)), "me", f"lease-{job_id}", attempt, 60.0)


def played(test: Callable[[PlayedServer, HttpWorker], Awaitable[None]]) -> None:
    async def main() -> None:
        server = PlayedServer()
        worker = HttpWorker(server, "w1", "job.assign.zpe", 60.0)  # type: ignore[arg-type]
        async with asyncio.timeout(10.0):
            await test(server, worker)
        worker.leave()

    asyncio.run(main())


def lease(worker: HttpWorker, wanted: int = 1, wait_s: float = 5.0) -> asyncio.Task[list[Grant]]:
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    return asyncio.ensure_future(worker.lease(CALLER, wanted, wait_s, gone))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_job_that_comes_when_nobody_waits_is_given_back() -> None:
    async def test(server: PlayedServer, worker: HttpWorker) -> None:
        assert await lease(worker, wait_s=0.0) == []

        server.link.send(AssignJobs(60.0, [grant("a")]))

        assert [released.claims for released in server.told(JobsReleased)] == [[Claim("a", "lease-a", 1)]]

    played(test)


def test_a_short_wait_is_not_over_before_the_store_has_looked() -> None:
    async def test(server: PlayedServer, worker: HttpWorker) -> None:
        server.answers_heartbeats = False
        waiting = lease(worker, wait_s=0.001)

        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        server.link.send(AssignJobs(60.0, [grant("a")]))

        assert not done
        assert [one.job_id for one in await waiting] == ["a"]
        assert not server.told(JobsReleased)

    played(test)


def test_credit_that_was_not_used_is_taken_back() -> None:
    async def test(server: PlayedServer, worker: HttpWorker) -> None:
        waiting = lease(worker, wanted=5)
        await settle()
        server.link.send_together([AssignJobs(60.0, [grant("a")]), AssignJobs(60.0, [grant("b")])])

        assert [one.job_id for one in await waiting] == ["a", "b"]
        assert [message.credit for message in server.told(GiveCredit)] == [5, -3]

    played(test)


def test_a_job_that_was_handed_out_and_is_delivered_again_is_not_handed_out_again() -> None:
    async def test(server: PlayedServer, worker: HttpWorker) -> None:
        first = lease(worker)
        await settle()
        server.link.send(AssignJobs(60.0, [grant("a")]))
        await first
        second = lease(worker)
        await settle()
        server.link.send_together([AssignJobs(60.0, [grant("a")]), AssignJobs(60.0, [grant("b")])])

        assert [one.job_id for one in await second] == ["b"]
        assert not server.told(JobsReleased)

    played(test)


def test_a_job_for_who_left_meanwhile_is_given_back() -> None:
    async def test(server: PlayedServer, worker: HttpWorker) -> None:
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(worker.lease(CALLER, 1, 5.0, gone))
        await settle()
        gone.set_result(None)
        server.link.send(AssignJobs(60.0, [grant("a")]))

        assert await waiting == []
        assert [released.claims for released in server.told(JobsReleased)] == [[Claim("a", "lease-a", 1)]]

    played(test)


def test_a_server_that_hangs_up_ends_the_waiting_with_nothing() -> None:
    async def test(server: PlayedServer, worker: HttpWorker) -> None:
        waiting = lease(worker)
        await settle()

        server.link.close(ProtocolError("it has connected to another server"))

        assert await waiting == []

    played(test)


def test_a_token_that_ended_meanwhile_is_the_answer() -> None:
    async def test(server: PlayedServer, worker: HttpWorker) -> None:
        waiting = lease(worker)
        await settle()

        server.link.close(Unauthorized("token t was revoked"))

        with pytest.raises(Unauthorized):
            await waiting

    played(test)


def test_a_report_is_answered_when_it_is_recorded() -> None:
    async def test(server: PlayedServer, worker: HttpWorker) -> None:
        claims = [Claim("a", "lease-a", 1), Claim("b", "lease-b", 1)]
        report = asyncio.ensure_future(worker.report(CALLER, [(claim, Outcome()) for claim in claims]))
        await settle()
        assert not report.done()

        server.link.send(JobsRecorded(["lease-a"], [("lease-b", "not yours")]))

        assert await report == [None, "not yours"]
        assert len(server.told(JobsFinished)[0].endings) == 2

    played(test)


def test_a_report_that_the_server_never_answered_may_be_sent_again() -> None:
    async def test(server: PlayedServer, worker: HttpWorker) -> None:
        report = asyncio.ensure_future(worker.report(CALLER, [(Claim("a", "lease-a", 1), Outcome())]))
        await settle()

        server.link.close(Unavailable("the server is going down; try again"))

        with pytest.raises(Unavailable):
            await report

    played(test)


def test_a_waiting_worker_says_that_it_is_still_there() -> None:
    async def test(server: PlayedServer, worker: HttpWorker) -> None:
        waiting = lease(worker)
        await settle()
        before = len(server.told(Heartbeat))

        worker.tick(server.now().monotonic)

        assert len(server.told(Heartbeat)) == before + 1
        waiting.cancel()

    played(test)
