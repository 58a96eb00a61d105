"""Many subscribers, one of which never reads: the others get everything in order, and jobs do not notice."""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tasuki import AsyncClient
from tasuki.core.protocol import DeliverMessages, HelloClient, Message, Reply, Request, Welcome
from tasuki.wire.messages import FrameDecoder, decode, encode
from tests.conftest import Require
from tests.support.processes import ServerProcess, rss_bytes, start_server, start_worker

pytestmark = pytest.mark.e2e

MIB = 1024 * 1024
MESSAGES = 200  # to all of them
BULK = 40 * [bytes(MIB // 2)]  # to the one that never reads as well: more than it may leave unread, and its connection holds
JOBS = 60
DEADLINE_S = 120.0
USUAL_FILES, FILES = 1024, 4096  # open files of a process: as shells set it, and as this test needs


@pytest.fixture
def server(tmp_path: Path, require: Require) -> Iterator[ServerProcess]:
    """A server that is started with the usual soft limit of open files, and raises it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    require("open files", hard >= FILES, f"the hard limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES), hard))
    try:
        usual = (USUAL_FILES, hard)
        with start_server(tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, usual)) as server:
            yield server
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Subscriber:
    """A connection that counts what comes, and does no more: a thousand clients would be busier than the server."""

    def __init__(self, server: ServerProcess) -> None:
        host, _, port = server.url.removeprefix("tcp://").rpartition(":")
        self._place, self._token = (host, int(port)), server.token
        self._frames = FrameDecoder(8 * MIB)
        self._found: deque[Message] = deque()
        self.numbers: list[int] = []
        self.bulk = self.dropped = 0

    async def subscribe(self, stack: AsyncExitStack, *patterns: str) -> None:
        self._reader, writer = await asyncio.open_connection(*self._place)
        stack.callback(writer.close)
        writer.write(encode(HelloClient(msg_id=1, client_id="many", token=self._token)))
        assert isinstance(await self._next(), Welcome)
        for number, pattern in enumerate(patterns, 2):
            writer.write(encode(Request(number, "subscribe", {"pattern": pattern})))
            assert isinstance(await self._next(), Reply)

    async def read(self, count: int) -> None:
        while len(self.numbers) + self.bulk + self.dropped < count:
            message = await self._next()
            assert isinstance(message, DeliverMessages)
            news = [item for item in message.items if item.subject == "news.1"]
            self.numbers += [int(item.payload) for item in news]
            self.bulk += len(message.items) - len(news)
            self.dropped += message.dropped

    async def _next(self) -> Message:
        while not self._found:
            data = await self._reader.read(MIB)
            assert data, "the server hung up"
            self._found += [decode(frame, 8 * MIB) for frame in self._frames.feed(data)]
        return self._found.popleft()


async def median_job_s(client: AsyncClient, while_running: asyncio.Future[object] | None = None) -> float:
    """Return how long jobs take one after the other; all of them while something else goes on, if it is given."""
    times: list[float] = []
    while len(times) < JOBS if while_running is None else not while_running.done() or len(times) < 5:
        began = time.monotonic()
        await (await client.submit(subject="noop")).result(DEADLINE_S)
        times.append(time.monotonic() - began)
    return statistics.median(times)


async def publish(client: AsyncClient) -> None:
    for number in range(MESSAGES):
        if number < len(BULK):
            await client.publish("bulk.1", BULK[number])
        await client.publish("news.1", b"%d" % number)
        await client.flush()


@pytest.mark.parametrize("subscribers", [100, pytest.param(1_000, marks=pytest.mark.soak)])
def test_one_that_never_reads_costs_only_itself(server: ServerProcess, subscribers: int) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(server.async_client())
            readers = [Subscriber(server) for _ in range(subscribers - 1)]
            silent = Subscriber(server)
            for start in range(0, len(readers), 50):
                await asyncio.gather(*(reader.subscribe(stack, "news.>") for reader in readers[start : start + 50]))
            await silent.subscribe(stack, "news.>", "bulk.>")
            alone_s = await median_job_s(client)
            before_bytes = rss_bytes(server.pid)

            reading = asyncio.gather(publish(client), *(reader.read(MESSAGES) for reader in readers))
            beside_s = await median_job_s(client, reading)
            await reading

            grown_bytes = rss_bytes(server.pid) - before_bytes
            print(f"a job alone {alone_s * 1000:.1f} ms, beside them {beside_s * 1000:.1f} ms; {grown_bytes / MIB:.0f} MiB more")
            assert {tuple(reader.numbers) for reader in readers} == {tuple(range(MESSAGES))}
            assert {reader.dropped for reader in readers} == {0}
            assert grown_bytes < 64 * MIB
            [lately] = (await client.call("statistics"))["periods"]
            news, bulk = lately["groups"]["news"], lately["groups"]["bulk"]
            assert (news["published"], bulk["published"]) == (MESSAGES, len(BULK))
            assert 0 < bulk["dropped"] < len(BULK), "it was given some, and then no more"
            assert news.get("dropped", 0) <= MESSAGES, "nobody else lost any"
            # jobs have their turn between any two slices of messages; on a busy machine that takes its time
            assert beside_s < alone_s + 0.25

    with start_worker(server):
        asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
