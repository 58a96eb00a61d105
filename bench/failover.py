"""A server is killed: how long until the next job starts through another one? Two servers on one PostgreSQL, real processes.

    python bench/failover.py            20 kills under client and worker, 5 under one of them, 3 of a leader; recorded
    python bench/failover.py --quick    two kills under both, and one of a leader with a short ttl; nothing recorded

A client submits a job every few milliseconds; each says when its handler started. The clock runs from just before the SIGKILL to
the first start of a job that was submitted after the killed process was gone, so nothing that the dead server had already handed
out counts. Client and worker are given both addresses (`both`), or one and learn the other from the server (`client_only`,
`worker_only`). All jobs of a repetition have to be answered, else the bench fails.

`leader` is from the SIGKILL of the server that leads until the other is registered as the leader, which waits for the end of the
lock's ttl: the duties (reaping, delayed jobs, retention) rest meanwhile, submits and leases do not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from _common import Process, folder, handler_worker, limit, percentile, record, start_server
from _postgresql import PostgresService, postgresql, settings

from tasuki import AsyncClient
from tasuki.core.access import token_sha256
from tasuki.core.election import LOCK_TTL_S
from tasuki.core.store_messages import TokenRow
from tasuki.errors import TasukiError
from tasuki.server.assembly import make_secret
from tasuki.stores.sql.store import SqlStore

EVERY_S = 0.004
BEFORE_KILL_S = 0.3
STEADY_S = 1.2  # a connection younger than this counts as none when it is lost, and is dialed again with a pause
ANSWER_TIMEOUT_S = 30.0
KNOWN_TIMEOUT_S = 15.0
LEADER_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.005
CONCURRENCY = 100
QUICK_LEAD_TTL_S = 2.0
TARGET_MS = 500.0
LIMIT_S, QUICK_LIMIT_S = 900.0, 120.0


class Tokens(NamedTuple):
    """Secrets that all servers of the database know."""

    client: str
    worker: str


def make_tokens(url: str) -> Tokens:
    store = SqlStore.open_postgresql(url)
    made = Tokens(*map(make_secret, Tokens._fields))
    for kind, secret in made._asdict().items():
        store.add_token(
            TokenRow(token_id=kind, kind=kind, sha256=token_sha256(secret), created_at=time.time(), created_by="bench")
        )
    store.close()
    return made


class Host:
    """The place of one of the servers: its folder, its port, and the process that is there now."""

    def __init__(self, data: Path, store: str, tokens: Tokens, lead_ttl_s: float) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._data, self._store, self._lead_ttl_s = data, store, lead_ttl_s
        self.tokens = tokens
        self.process: Process | None = None

    @property
    def url(self) -> str:
        return f"tcp://{self.address}"

    async def start(self) -> None:
        assert self.process is None
        options = ("--lead-ttl", str(self._lead_ttl_s))
        self.process = await asyncio.to_thread(start_server, self._data, *options, tcp=self.address, store=self._store)

    async def kill(self) -> tuple[int, int]:
        """Return when the SIGKILL was sent, and when the process was gone."""
        assert self.process is not None
        process, self.process = self.process, None
        sent_ns = time.monotonic_ns()
        await asyncio.to_thread(process.kill)
        return sent_ns, time.monotonic_ns()

    async def stop(self) -> None:
        if self.process is not None:
            process, self.process = self.process, None
            await asyncio.to_thread(process.stop)


async def until(condition: Callable[[], bool], timeout_s: float) -> None:
    """TimeoutError if it does not come true."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is looked at is in other processes
            await asyncio.sleep(LOOK_EVERY_S)


class Load:
    """A job every few milliseconds from one client; `noted` are (submitted, started) of those that were answered, in ns."""

    def __init__(self, client: AsyncClient) -> None:
        self.noted: list[tuple[int, int]] = []
        self._client = client
        self._jobs: list[asyncio.Task[None]] = []
        self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while True:
            self._jobs.append(asyncio.create_task(self._one()))
            await asyncio.sleep(EVERY_S)

    async def _one(self) -> None:
        submitted_ns = time.monotonic_ns()
        handle = await self._client.submit(subject="bench.stamp")
        self.noted.append((submitted_ns, int(await handle.result(ANSWER_TIMEOUT_S))))

    async def first_start_ms(self, killed_ns: int, gone_ns: int) -> float:
        """From the kill to the first start of a job submitted after it. Then no more are sent, and all are waited for."""
        await until(lambda: any(submitted > gone_ns for submitted, _ in self.noted), ANSWER_TIMEOUT_S)
        await self.stop()
        return (min(started for submitted, started in self.noted if submitted > gone_ns) - killed_ns) / 1e6

    async def stop(self) -> None:
        """Every job that was sent has to be answered."""
        self._sending.cancel()
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            await asyncio.gather(*self._jobs)


@contextlib.asynccontextmanager
async def running_worker(url: str, token: str) -> AsyncIterator[Process]:
    with contextlib.ExitStack() as stack:
        yield await asyncio.to_thread(stack.enter_context, handler_worker(url, CONCURRENCY, token=token))
        await asyncio.to_thread(stack.close)


async def knows(host: Host, other: Host) -> None:
    """Until the one names the other to its peers."""
    async with asyncio.timeout(KNOWN_TIMEOUT_S):
        while True:
            async with AsyncClient(host.url, token=host.tokens.client) as client:
                assert client.welcome is not None
                if other.url in client.welcome.servers:
                    return
            await asyncio.sleep(0.1)


async def kill_under_load(client: AsyncClient, victim: Host) -> float:
    load = Load(client)
    await asyncio.sleep(BEFORE_KILL_S)
    if not load.noted:
        raise SystemExit("no job was answered before the kill: nothing can be measured")
    return await load.first_start_ms(*await victim.kill())


# ---------------------------------------------------------------------------------------------------- who is on the killed one


async def both(hosts: tuple[Host, Host], count: int) -> list[float]:
    """Client and worker on the same server, each time the one that they fled to before."""
    victim, other = hosts
    url = f"tcp://{victim.address},{other.address}"
    await victim.start()
    took = []
    async with AsyncClient(url, token=victim.tokens.client) as client, running_worker(url, victim.tokens.worker):
        await other.start()
        for _ in range(count):
            await asyncio.sleep(STEADY_S)
            took.append(await kill_under_load(client, victim))
            await victim.start()
            victim, other = other, victim
    return took


async def client_only(hosts: tuple[Host, Host], count: int) -> list[float]:
    """The worker's server lives on."""
    victim, other = hosts
    took = []
    async with running_worker(other.url, other.tokens.worker):
        for _ in range(count):
            await knows(victim, other)
            async with AsyncClient(victim.url, token=victim.tokens.client) as client:
                await asyncio.sleep(STEADY_S)
                took.append(await kill_under_load(client, victim))
            await victim.start()
    return took


async def worker_only(hosts: tuple[Host, Host], count: int) -> list[float]:
    """The client's server lives on; jobs wait there for the worker."""
    victim, other = hosts
    took = []
    async with AsyncClient(other.url, token=other.tokens.client) as client:
        for _ in range(count):
            await knows(victim, other)
            async with running_worker(victim.url, victim.tokens.worker):
                await asyncio.sleep(STEADY_S)
                took.append(await kill_under_load(client, victim))
            await victim.start()
    return took


async def leader(hosts: tuple[Host, Host], service: PostgresService, url: str, count: int) -> list[float]:
    """From the kill of the leader to the registration of the next epoch, in ms."""
    took = []
    with service.connect(url) as connection:

        def registered() -> tuple[int, Host | None]:
            row = connection.execute("SELECT epoch, holder FROM tasuki_scopeepoch ORDER BY epoch DESC LIMIT 1").fetchone()
            epoch, holder = row or (0, "")
            return epoch, next((host for host in hosts if host.process and f"-{host.process.pid}-" in holder), None)

        for _ in range(count):
            await until(lambda: registered()[1] is not None, LEADER_TIMEOUT_S)
            epoch, victim = registered()
            assert victim is not None
            killed_ns, _ = await victim.kill()
            await until(lambda: registered()[0] > epoch, LEADER_TIMEOUT_S)  # noqa: B023 - not called later
            took.append((time.monotonic_ns() - killed_ns) / 1e6)
            await victim.start()
    return took


def summary(took: list[float]) -> dict[str, Any]:
    return {
        "repetitions": len(took),
        "p50_ms": round(percentile(took, 0.5)),
        "max_ms": round(max(took)),
        "all_ms": [round(value) for value in took],
    }


async def measure(service: PostgresService, url: str, tokens: Tokens, *, quick: bool) -> dict[str, Any]:
    lead_ttl_s = QUICK_LEAD_TTL_S if quick else LOCK_TTL_S
    with folder() as first, folder() as second:
        hosts = Host(first, url, tokens, lead_ttl_s), Host(second, url, tokens, lead_ttl_s)
        try:
            figures: dict[str, Any] = {"both": summary(await both(hosts, 2 if quick else 20))}
            if not quick:
                figures["client_only"] = summary(await client_only(hosts, 5))
                figures["worker_only"] = summary(await worker_only(hosts, 5))
            figures["leader"] = {"ttl_s": lead_ttl_s, **summary(await leader(hosts, service, url, 1 if quick else 3))}
        except (TimeoutError, TasukiError) as error:
            raise SystemExit(f"not measured: {type(error).__name__}: {error}") from error
        finally:
            for host in hosts:
                await host.stop()
    figures["target"] = {"both_max_ms": TARGET_MS, "met": figures["both"]["max_ms"] <= TARGET_MS}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with limit(QUICK_LIMIT_S if options.quick else LIMIT_S), postgresql() as service:
        url = service.database()
        figures = uvloop.run(measure(service, url, make_tokens(url), quick=options.quick))
        record("failover", {"postgresql": settings(service), **figures}, save=not options.quick)


if __name__ == "__main__":
    main()
