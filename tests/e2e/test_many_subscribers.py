"""Many subscribers, one of which never reads: the others get everything in order, and jobs do not notice."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from asyncio.subprocess import PIPE
from collections import deque
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tasuki import AsyncClient
from tasuki.core.protocol import DeliverMessages, Heartbeat, HeartbeatAnswer, HelloClient, Message, Reply, Request, Welcome
from tasuki.wire.messages import FrameDecoder, decode, encode
from tests.conftest import Require
from tests.support.processes import ServerProcess, rss_bytes, start_server, start_worker

pytestmark = pytest.mark.e2e

MIB = 1024 * 1024
BULK = 40 * [bytes(MIB // 2)]  # to the one that never reads as well: more than it may leave unread, and its connection holds
END = b"end"
WARM_UP, JOBS, ROUNDS = 5, 30, 4
PAUSE_S = 0.05  # between two messages: 1,000 subscribers get 20,000 a second, a third of what a core of the server sends
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
        self.dropped = 0

    async def subscribe(self, stack: AsyncExitStack, *patterns: str) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._place)
        writer = self._writer
        stack.callback(writer.close)
        writer.write(encode(HelloClient(msg_id=1, client_id="many", token=self._token)))
        assert isinstance(await self._next(), Welcome)
        for number, pattern in enumerate(patterns, 2):
            writer.write(encode(Request(number, "subscribe", {"pattern": pattern})))
            assert isinstance(await self._next(), Reply)

    def beat(self) -> None:
        """Say that it is there: on a busy machine the test takes longer than servers wait for a word."""
        self._writer.write(encode(Heartbeat(1_000)))

    async def read(self) -> None:
        while True:
            message = await self._next()
            if isinstance(message, HeartbeatAnswer):
                continue
            assert isinstance(message, DeliverMessages), message
            self.dropped += message.dropped
            for item in message.items:
                if item.payload == END:
                    return
                self.numbers.append(int(item.payload))

    async def _next(self) -> Message:
        while not self._found:
            data = await self._reader.read(MIB)
            assert data, "the server hung up"
            self._found += [decode(frame, 8 * MIB) for frame in self._frames.feed(data)]
        return self._found.popleft()


TIMED = f"""
import statistics, sys, time
from tasuki import Client
with Client(sys.argv[1]) as client:
    times = []
    for _ in range({WARM_UP + JOBS}):
        began = time.perf_counter()
        client.submit(subject="noop").result({DEADLINE_S})
        times.append(time.perf_counter() - began)
    print(statistics.median(times[{WARM_UP}:]))
"""


async def median_job_s(server: ServerProcess) -> float:
    """Return how long a job takes when they come one after the other, from a process that has nothing else to do."""
    environment = {**os.environ, "TASUKI_TOKEN": server.token}
    timing = await asyncio.create_subprocess_exec(sys.executable, "-c", TIMED, server.url, stdout=PIPE, env=environment)
    told, _ = await timing.communicate()
    assert timing.returncode == 0
    return float(told)


async def publish(client: AsyncClient, start: int, bulk: list[bytes], until: asyncio.Future[float]) -> int:
    """Publish numbers from `start` on, so many a second, and return the next one."""
    number = start
    while not until.done():
        while bulk:
            await client.publish("bulk.1", bulk.pop())
        await client.publish("news.1", b"%d" % number)
        await client.flush()
        number += 1
        await asyncio.wait([until], timeout=PAUSE_S)
    return number


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
            reading = asyncio.gather(*(reader.read() for reader in readers))
            before_bytes = rss_bytes(server.pid)

            number, bulk = 0, [*BULK]
            alone: list[float] = []
            beside: list[float] = []  # medians of the rounds
            for _ in range(ROUNDS):  # one after the other, so that a machine that gets busier does so for both
                alone.append(await median_job_s(server))
                timed = asyncio.ensure_future(median_job_s(server))
                number = await publish(client, number, bulk, timed)
                beside.append(await timed)
                for subscriber in (*readers, silent):
                    subscriber.beat()
            await client.publish("news.1", END)
            await reading

            grown_bytes = rss_bytes(server.pid) - before_bytes
            both = [", ".join(f"{one * 1000:.1f}" for one in sorted(medians)) for medians in (alone, beside)]
            print(
                f"jobs alone {both[0]} ms, beside them {both[1]} ms; {number} messages to each; {grown_bytes / MIB:.0f} MiB more"
            )
            assert {tuple(reader.numbers) for reader in readers} == {tuple(range(number))}
            assert {reader.dropped for reader in readers} == {0}
            assert grown_bytes < 64 * MIB
            [lately] = (await client.call("statistics"))["periods"]
            news, bulk_sent = lately["groups"]["news"], lately["groups"]["bulk"]
            assert (news["published"], bulk_sent["published"]) == (number + 1, len(BULK))
            assert 0 < bulk_sent["dropped"] < len(BULK), "it was given some, and then no more"
            assert news.get("dropped", 0) <= number + 1, "nobody else lost any"
            # the better rounds count, each beside its neighbor: what else a busy machine does comes and goes
            slower = sorted(second - 2 * first for first, second in zip(alone, beside, strict=True))
            assert slower[ROUNDS // 4] < 0.002, (alone, beside)

    with start_worker(server):
        asyncio.run(asyncio.wait_for(main(), DEADLINE_S))
