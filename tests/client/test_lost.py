"""A client whose server closes the connection at the worst moment. The server is the test's own, so that it can choose it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tasuki import AsyncClient
from tasuki.core.address import Address
from tasuki.core.job import BlobRef
from tasuki.core.protocol import ErrorMessage, HelloClient, Message, Reply, Request, SubmitJobs, Welcome
from tasuki.errors import Unauthorized, Unavailable
from tasuki.net import server_connection
from tasuki.net.tcp_link import TcpLink, connect

DEADLINE_S = 25.0


class OwnServer:
    """Welcomes every client and keeps what is said after the Hello; answers nothing by itself."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "s.sock"
        self.links: list[TcpLink] = []
        self.heard: list[Message] = []
        self.refuse: ErrorMessage | None = None
        self._something = asyncio.Event()

    async def __aenter__(self) -> OwnServer:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: TcpLink(self._hear, lambda *_: None, self.links.append), self.path)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for link in self.links:
            link.abort("the test is over")

    def _hear(self, link: TcpLink, message: Message) -> None:
        if isinstance(message, HelloClient):
            welcome = Welcome(corr_id=message.msg_id, version=1, server_id="s", identity="me", kind="client", idle_timeout_s=60)
            link.send(self.refuse or welcome)
        else:
            self.heard.append(message)
            self._something.set()

    async def hears(self, count: int) -> Message:
        """The message of that number."""
        while len(self.heard) < count:
            self._something.clear()
            await self._something.wait()
        return self.heard[count - 1]

    def client(self) -> AsyncClient:
        return AsyncClient(f"unix://{self.path}", connect_timeout_s=DEADLINE_S)


def run(folder: Path, test: Callable[[OwnServer], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), OwnServer(folder) as server:
            await test(server)

    asyncio.run(main())


def test_requeue_is_not_said_again_after_a_lost_connection(tmp_path: Path) -> None:
    async def test(server: OwnServer) -> None:
        async with server.client() as client:
            # Given a requeue, and a question, on their way
            requeue = asyncio.ensure_future(client.retry("a"))
            question = asyncio.ensure_future(client.counts())
            await server.hears(2)
            # When the connection is lost before the answer
            server.links[0].abort("cut")
            # Then only the question, which is safe to ask twice, is said again
            with pytest.raises(Unavailable, match="not known"):
                await requeue
            again = await server.hears(3)
            assert isinstance(again, Request)
            assert again.verb == "counts"
            server.links[1].send(Reply(again.msg_id, {}))
            assert await question == {}
            assert len(server.heard) == 3

    run(tmp_path, test)


def test_submit_that_reruns_is_not_said_again_after_a_lost_connection_and_a_plain_one_is(tmp_path: Path) -> None:
    async def test(server: OwnServer) -> None:
        async with server.client() as client:
            rerun = asyncio.ensure_future(client.submit(job_id="a", subject="noop", on_failed="rerun"))
            plain = asyncio.ensure_future(client.submit(job_id="b", subject="noop"))
            await server.hears(2)
            server.links[0].abort("cut")
            with pytest.raises(Unavailable, match="not known"):
                await rerun
            again = await server.hears(3)
            assert isinstance(again, SubmitJobs)
            assert [spec.job_id for spec in again.specs] == ["b"]
            plain.cancel()

    run(tmp_path, test)


def test_link_that_is_closed_before_the_client_hears_of_it_is_dialed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialed: list[TcpLink] = []

    async def connect_and_lose_the_first(address: Address, *ends: Callable[..., None], **options: object) -> TcpLink:
        link = await connect(address, *ends, **options)  # type: ignore[arg-type]
        dialed.append(link)
        if len(dialed) == 1:
            link.abort("the peer closed the connection")
        return link

    monkeypatch.setattr(server_connection, "connect", connect_and_lose_the_first)

    async def test(server: OwnServer) -> None:
        async with asyncio.timeout(DEADLINE_S / 2), server.client():
            assert len(dialed) == 2

    run(tmp_path, test)


def test_transfer_ends_when_the_server_will_never_take_us_again(tmp_path: Path) -> None:
    async def test(server: OwnServer) -> None:
        async with server.client() as client:
            # Given a download under way
            getting = asyncio.ensure_future(client._blobs.get(BlobRef("0" * 64, 1), "a", lambda data: None))
            await server.hears(1)
            # When the token is not taken any more
            server.refuse = ErrorMessage(0, "UNAUTHORIZED", "the token was revoked")
            server.links[0].abort("cut")
            # Then the download ends with that instead of waiting for a connection
            with pytest.raises(Unauthorized, match="revoked"):
                await getting

    run(tmp_path, test)
