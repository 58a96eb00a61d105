"""Stage of the tests of the dispatcher: a dispatcher in the test's own loop, before nodes that do as they are told."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx

from tasuki.core.address import Address, parse_agents
from tasuki.core.failover.agent_protocol import InputRecord, input_hash
from tasuki.dispatcher.app import Dispatcher
from tasuki.dispatcher.settings import DispatcherConfig, Mode
from tests.client.agent_stand_in import StandIn

DEADLINE_S = 20.0
BOOK = b"100,95"
NO_CA = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # for plain HTTP; to load those of the system takes longer than most tests


class DispatcherStage:
    """A dispatcher that listens, and a client of it."""

    def __init__(
        self, dispatcher: Dispatcher, address: Address, tokens: tuple[str, ...], trusting: ssl.SSLContext = NO_CA
    ) -> None:
        self.dispatcher = dispatcher
        self.url, self.port = str(address), address.port
        headers = {"Authorization": f"Bearer {tokens[0]}"} if tokens else {}
        self.http = httpx.AsyncClient(base_url=self.url, timeout=DEADLINE_S, headers=headers, verify=trusting)

    async def post(self, job_id: str, data: bytes = BOOK, *, query: str = "", **fields: str) -> httpx.Response:
        return await self.http.post(f"/run/{job_id}{query}", files=[("file", ("book.csv", data))], data=fields)

    async def close(self) -> None:
        """At once. The orderly end, which takes uvicorn 0.2 s, has a test of its own."""
        await self.http.aclose()
        serving, self.dispatcher.http.serving = self.dispatcher.http.serving, None
        assert serving is not None
        assert serving._serving is not None
        for listener in serving._server.servers:
            listener.close()
        serving._serving.cancel()
        await asyncio.gather(serving._serving, return_exceptions=True)
        await self.dispatcher.close()


@asynccontextmanager
async def dispatching(
    *nodes: StandIn | str,
    mode: Mode = Mode.PROXY,
    tls: ssl.SSLContext | None = None,
    trusting: ssl.SSLContext = NO_CA,
    **config: Any,
) -> AsyncIterator[DispatcherStage]:
    urls = ",".join(node if isinstance(node, str) else node.url for node in nodes)
    settings = DispatcherConfig(agents=tuple(parse_agents(urls)), mode=mode, **config)
    dispatcher = Dispatcher(settings)
    address = await dispatcher.start(Address("http", "127.0.0.1", 0), tls)
    stage = DispatcherStage(dispatcher, address, settings.tokens, trusting)
    try:
        yield stage
    finally:
        await stage.close()


@asynccontextmanager
async def two_nodes(**config: Any) -> AsyncIterator[tuple[StandIn, StandIn, DispatcherStage]]:
    """The first has more room, so that it is the first to be sent anything."""
    async with AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(StandIn(running=taken)) for taken in (0, 1)]
        yield one, two, await stack.enter_async_context(dispatching(one, two, **config))


def tell(story: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await story

    asyncio.run(main())


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def hash_of(data: bytes = BOOK, exec_: str = "pricer") -> str:
    """The input hash of a run with this one file."""
    return input_hash(exec_, (), [InputRecord("book.csv", sha256_of(data), len(data))])


def job(state: str, **facts: Any) -> dict[str, Any]:
    """The answer of a node about a job."""
    return {"state": state, "input": hash_of(), "exec": "pricer", "node": "n1", "started_at": 1.0, **facts}
