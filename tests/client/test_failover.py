"""A client of several servers, over real sockets. The servers are the test's own, so that they can fail as it wants."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tasuki import AsyncClient
from tasuki.core import client_machine
from tasuki.core.job import Outcome, State
from tasuki.core.protocol import (
    Accepted,
    HelloClient,
    JobResult,
    Message,
    Reply,
    Request,
    Results,
    SubmitJobs,
    Welcome,
)
from tasuki.errors import Overloaded, TasukiError, Unavailable
from tasuki.net.tcp_link import TcpLink

DEADLINE_S = 15.0
FAILOVER_S = 0.5


class StandIn:
    """One of several servers: takes every client, accepts every job, and delivers what `ended` says it knows."""

    def __init__(self, ended: dict[str, bytes]) -> None:
        self.ended = ended
        self.names: tuple[str, ...] = ()
        self.silent = False
        self.refusal: TasukiError | None = None
        self.links: list[TcpLink] = []
        self.heard: list[Message] = []

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: TcpLink(self._hear, self._closed, self.links.append), "127.0.0.1", 0)
        self.host = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def kill(self) -> None:
        self._server.close()
        for link in list(self.links):
            link.abort("killed")

    def leave(self) -> None:
        """An orderly stop: peers hear why."""
        self._server.close()
        for link in list(self.links):
            link.close(Unavailable("the server is going down"))

    def _closed(self, link: TcpLink, reason: str) -> None:
        self.links.remove(link)

    def _hear(self, link: TcpLink, message: Message) -> None:
        self.heard.append(message)
        if self.silent:
            return
        match message:
            case HelloClient() if self.refusal is not None:
                link.close(self.refusal)
            case HelloClient():
                known = {"server_id": self.host, "identity": "me", "kind": "client", "servers": self.names}
                link.send(Welcome(corr_id=message.msg_id, version=2, idle_timeout_s=60, **known))
            case SubmitJobs():
                link.send(Accepted(message.msg_id, len(message.specs)))
                self._deliver(link, [spec.job_id for spec in message.specs])
            case Request(verb="watch"):
                link.send(Reply(message.msg_id, {"states": {}}))
                self._deliver(link, message.params["job_ids"])

    def _deliver(self, link: TcpLink, job_ids: list[str]) -> None:
        items = [JobResult(one, State.SUCCEEDED, 1, Outcome(result=self.ended[one])) for one in job_ids if one in self.ended]
        if items:
            link.send(Results(items))


def run(test: Callable[[list[StandIn], dict[str, bytes]], Awaitable[None]]) -> None:
    async def main() -> None:
        ended: dict[str, bytes] = {}
        servers = [StandIn(ended) for _ in range(3)]
        for server in servers:
            await server.open()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test(servers, ended)
        finally:
            for server in servers:
                server.kill()

    asyncio.run(main())


def client_of(*servers: StandIn) -> AsyncClient:
    return AsyncClient("tcp://" + ",".join(server.host for server in servers), token="t", connect_timeout_s=DEADLINE_S)


def home_of(client: AsyncClient, servers: list[StandIn]) -> StandIn:
    [home] = [server for server in servers if server.links]
    assert client.welcome is not None
    assert client.welcome.server_id == home.host
    return home


def test_results_are_asked_for_again_by_id_at_the_next_server_within_half_a_second() -> None:
    async def test(servers: list[StandIn], ended: dict[str, bytes]) -> None:
        async with client_of(*servers) as client:
            job = await client.submit(subject="any.1", job_id="a")
            home = home_of(client, servers)
            # when: the server is killed, and the job ends elsewhere meanwhile
            ended["a"] = b"from another"
            home.kill()
            async with asyncio.timeout(FAILOVER_S):
                assert await job.result() == b"from another"
            assert home_of(client, servers) is not home

    run(test)


def test_a_server_that_leaves_in_order_is_left_at_once() -> None:
    async def test(servers: list[StandIn], ended: dict[str, bytes]) -> None:
        async with client_of(*servers) as client:
            home_of(client, servers).leave()
            ended["b"] = b"x"
            async with asyncio.timeout(FAILOVER_S):
                assert await (await client.submit(subject="any.1", job_id="b")).result() == b"x"

    run(test)


def test_a_server_that_has_no_place_for_us_is_passed_over() -> None:
    async def test(servers: list[StandIn], ended: dict[str, bytes]) -> None:
        for server in servers[:2]:
            server.refusal = Overloaded("too many connections")
        async with asyncio.timeout(FAILOVER_S), client_of(*servers) as client:
            assert client.welcome is not None
            assert client.welcome.server_id == servers[2].host

    run(test)


def test_a_server_that_does_not_answer_the_hello_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_machine, "HELLO_QUICK_S", 0.3)

    async def test(servers: list[StandIn], ended: dict[str, bytes]) -> None:
        servers[0].silent = servers[1].silent = True
        async with client_of(*servers) as client:
            assert client.welcome is not None
            assert client.welcome.server_id == servers[2].host

    run(test)


def test_a_client_that_was_given_one_address_turns_to_those_that_the_server_named() -> None:
    async def test(servers: list[StandIn], ended: dict[str, bytes]) -> None:
        for server in servers:
            server.names = tuple(f"tcp://{one.host}" for one in servers)
        async with client_of(servers[0]) as client:
            servers[0].kill()
            ended["c"] = b"x"
            async with asyncio.timeout(FAILOVER_S):
                assert await (await client.submit(subject="any.1", job_id="c")).result() == b"x"

    run(test)


def test_with_one_address_it_waits_for_that_one() -> None:
    async def test(servers: list[StandIn], ended: dict[str, bytes]) -> None:
        async with client_of(servers[0]) as client:
            servers[0].kill()
            call = asyncio.ensure_future(client.submit(subject="any.1", job_id="d"))
            await asyncio.wait([call], timeout=FAILOVER_S)
            assert not call.done()
            assert not client.connected
            call.cancel()

    run(test)
