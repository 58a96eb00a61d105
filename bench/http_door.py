"""How fast is the HTTP door? No-op jobs of an app, from submit to recorded result, on SQLite and on Redis.

    python bench/http_door.py                   everything, Celery on the same kind of Redis included; recorded
    python bench/http_door.py --quick           a short look, nothing recorded, no Celery
    python bench/http_door.py --only single     some of: batch, single, latency, waiting

    batch     jobs are submitted, leased and reported 256 at a time
    single    one job per request: POST job, POST lease, POST result; 16 clients and 16 workers, each on a connection of its own.
              Celery beside it: one client and one worker process without results, as bench/peers has it
    latency   a lease request waits; from the submit's first byte to the answer of the lease, at idle
    waiting   1,000 workers with a lease request each that waits: memory of the server for each, and its CPU while nothing happens

The load comes from one other process over sockets that stay open, with requests that were written before: it takes
`client_cpu_us_per_job`, the server `server_cpu_us_per_job`. All processes share the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from _common import Process, folder, limit, percentile, record
from _redis import redis_server

APP = "zpe"
BATCH = 256
BATCHES_AHEAD = 6
SINGLE_AHEAD = 64
WAIT_S = 10
WARM_WORKERS = 32
TARGETS = (
    ("batch", "jobs_per_s", 3_000, False),
    ("single", "jobs_per_s", 400, False),
    ("latency", "p50_ms", 6.0, True),
    ("waiting", "kb_per_poll", 60.0, True),
    ("waiting", "idle_cpu_share", 0.03, True),
)
"""Part, figure, target, and whether that is the most or the least that it may be."""
RESULT = {"result": {"zpe_ev": 0.27}, "summary_text": "ZPE 0.27 eV", "freqs_csv": "mode,cm-1\n1,4401\n"}
PARTS = ("batch", "single", "latency", "waiting")
LIMIT_S = 240.0  # on a machine that is busy with other things; alone it takes less than half of that


class Size:
    """The amount of work."""

    def __init__(self, *, quick: bool) -> None:
        self.seconds = 1.0 if quick else 5.0
        self.latency_jobs = 30 if quick else 200
        self.polls = 100 if quick else 1_000
        self.idle_s = 1.0 if quick else 6.0


# ---------------------------------------------------------------------------------------------------- a client


class Connection(asyncio.Protocol):
    """One keep-alive connection: one request at a time, its answer as (status, body)."""

    def __init__(self, token: str) -> None:
        self.token = token
        self._transport: Any = None  # uvloop's is no asyncio.Transport by type
        self._received = b""
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0 or self._answer is None:
            return
        head = self._received[:end].lower()
        place = head.find(b"content-length:")
        size = int(head[place + 15 :].split(b"\r\n", 1)[0]) if place >= 0 else 0
        if len(self._received) >= end + 4 + size:
            body, self._received = self._received[end + 4 : end + 4 + size], b""
            answer, self._answer = self._answer, None
            answer.set_result((int(head[9:12]), body))

    def send(self, method: str, path: str, body: bytes = b"{}") -> asyncio.Future[tuple[int, bytes]]:
        """Write it now; the answer comes later."""
        self._answer = asyncio.get_running_loop().create_future()
        lines = (
            f"{method} {path} HTTP/1.1",
            "Host: localhost",
            f"Authorization: Bearer {self.token}",
            f"Content-Length: {len(body)}",
        )
        self._transport.write("\r\n".join((*lines, "\r\n")).encode() + body)
        return self._answer

    async def post(self, path: str, body: bytes = b"{}") -> bytes:
        """The body of a good answer; b'' if there is nothing (204)."""
        status, answer = await self.send("POST", path, body)
        if status not in (200, 204):
            raise SystemExit(f"POST {path}: {status} {answer.decode(errors='replace')[:300]}")
        return answer

    def close(self) -> None:
        self._transport.close()


class Site:
    """One server's HTTP door, and those who talk to it."""

    def __init__(self, process: Process, data: Path) -> None:
        self.process = process
        line = next(line for line in process.lines if "listening http://" in line)
        host, _, port = line.split("http://", 1)[1].split()[0].partition(":")
        self._host, self._port = host, int(port)
        self.admin = (data / "token").read_text().strip()
        self._open: list[Connection] = []

    async def connect(self, token: str) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(lambda: Connection(token), self._host, self._port)
        self._open.append(connection)
        return connection

    async def workers(self, count: int) -> list[Connection]:
        """Registered workers, each with a token and a connection of its own."""
        found: list[Connection] = []

        async def register(admin: Connection) -> None:
            while len(found) < count:
                connection = await self.connect("")
                found.append(connection)
                enrolled = await admin.post(f"/calc/{APP}/compute/enroll-tokens")
                connection.token = msgspec.json.decode(enrolled)["enroll_token"]
                registered = await connection.post(f"/calc/{APP}/compute/servers/register")
                connection.token = msgspec.json.decode(registered)["worker_token"]

        await asyncio.gather(*[register(await self.connect(self.admin)) for _ in range(min(count, 16))])
        return found

    def close(self) -> None:
        for connection in self._open:
            connection.close()


@contextlib.contextmanager
def server(store: str) -> Iterator[tuple[Process, Path]]:
    with folder() as data:
        command = [
            sys.executable,
            "-m",
            "tasuki",
            "server",
            "--data",
            str(data),
            "--no-tcp",
            "--http",
            "127.0.0.1:0",
            "--app",
            APP,
        ]
        process = Process(command, ready="listening http://", env={"TASUKI_STORE": store})
        try:
            yield process, data
        finally:
            process.stop()


class Leased(msgspec.Struct):
    """The parts of a leased job that a report needs."""

    job_id: str
    lease_id: str


class LeasedMany(msgspec.Struct):
    """A batch of them."""

    jobs: list[Leased]


_decode_one = msgspec.json.Decoder(Leased).decode
_decode_many = msgspec.json.Decoder(LeasedMany).decode


# ---------------------------------------------------------------------------------------------------- throughput


class Tally:
    """Counts recorded results for a while, after a time to get warm."""

    def __init__(self, site: Site, seconds: float) -> None:
        self._site = site
        self._seconds = seconds
        self.done = 0
        self.over = asyncio.Event()
        self._under_way = 0
        self._room = asyncio.Event()

    async def submitted(self, count: int, most: int) -> None:
        """Waits while more than so many are under way: a queue that grows would be another question."""
        self._under_way += count
        while self._under_way > most and not self.over.is_set():
            self._room.clear()
            await self._room.wait()

    def recorded(self, count: int) -> None:
        self.done += count
        self._under_way -= count
        self._room.set()

    async def watch(self) -> dict[str, Any]:
        await asyncio.sleep(min(1.0, self._seconds / 3))
        done, began, server_cpu, client_cpu = self.done, time.perf_counter(), self._site.process.cpu_s(), time.process_time()
        await asyncio.sleep(self._seconds)
        jobs, wall = self.done - done, time.perf_counter() - began
        server_cpu, client_cpu = self._site.process.cpu_s() - server_cpu, time.process_time() - client_cpu
        self.over.set()
        self._room.set()
        return {
            "jobs": jobs,
            "jobs_per_s": round(jobs / wall),
            "server_cpu_us_per_job": round(server_cpu / max(1, jobs) * 1e6),
            "client_cpu_us_per_job": round(client_cpu / max(1, jobs) * 1e6),
        }


async def throughput(site: Site, seconds: float, *, batched: bool) -> dict[str, Any]:
    """Clients that submit, workers that lease and report."""
    tally = Tally(site, seconds)
    clients = [await site.connect(site.admin) for _ in range(2 if batched else 16)]
    workers = await site.workers(3 if batched else 16)
    submit, work = (submit_batches, work_batches) if batched else (submit_single, work_single)
    loads = [asyncio.ensure_future(submit(client, tally)) for client in clients]
    loads += [asyncio.ensure_future(work(worker, tally)) for worker in workers]
    figures = await tally.watch()
    await asyncio.gather(*loads)
    return figures


async def submit_batches(client: Connection, tally: Tally) -> None:
    body = msgspec.json.encode({"jobs": [{"payload": {"molecule": "H2"}}] * BATCH})
    while not tally.over.is_set():
        await client.post(f"/calc/{APP}/jobs/batch", body)
        await tally.submitted(BATCH, most=BATCHES_AHEAD * BATCH)


async def work_batches(worker: Connection, tally: Tally) -> None:
    wish = msgspec.json.encode({"max_jobs": BATCH})
    while not tally.over.is_set():
        answer = await worker.post(f"/calc/{APP}/compute/jobs/lease?wait=1", wish)
        if not answer:
            continue
        leased = _decode_many(answer).jobs
        results = [{"job_id": job.job_id, "lease_id": job.lease_id, **RESULT} for job in leased]
        told = await worker.post(f"/calc/{APP}/compute/jobs/result", msgspec.json.encode({"results": results}))
        assert told.count(b'"status":200') == len(leased)
        tally.recorded(len(leased))


async def submit_single(client: Connection, tally: Tally) -> None:
    body = msgspec.json.encode({"molecule": "H2"})
    while not tally.over.is_set():
        await client.post(f"/calc/{APP}/jobs", body)
        await tally.submitted(1, most=SINGLE_AHEAD)


async def work_single(worker: Connection, tally: Tally) -> None:
    while not tally.over.is_set():
        answer = await worker.post(f"/calc/{APP}/compute/jobs/lease?wait=1")
        if not answer:
            continue
        leased = _decode_one(answer)
        body = msgspec.json.encode({"lease_id": leased.lease_id, **RESULT})
        await worker.post(f"/calc/{APP}/compute/jobs/{leased.job_id}/result", body)
        tally.recorded(1)


# ---------------------------------------------------------------------------------------------------- waiting


async def latency(site: Site, count: int) -> dict[str, Any]:
    """From a submit to the answer of the lease request that waited for it."""
    client, [worker] = await site.connect(site.admin), await site.workers(1)
    times = []
    for number in itertools.count():
        waiting = worker.send("POST", f"/calc/{APP}/compute/jobs/lease?wait={WAIT_S}")
        await asyncio.sleep(0.02)
        began = time.perf_counter()
        submitted = client.send("POST", f"/calc/{APP}/jobs")
        _, answer = await waiting
        times.append((time.perf_counter() - began) * 1e3)
        await submitted
        leased = _decode_one(answer)
        body = msgspec.json.encode({"lease_id": leased.lease_id, **RESULT})
        await worker.post(f"/calc/{APP}/compute/jobs/{leased.job_id}/result", body)
        if number == count + 10:
            break
    measured = times[10:]  # the first ones open connections and caches
    return {f"p{share}_ms": round(percentile(measured, share / 100), 2) for share in (50, 99)}


async def waiting(site: Site, count: int, idle_s: float) -> dict[str, Any]:
    """Return the cost of waiting requests: everything that the server has of such a worker, its sockets and tokens included."""
    await leased_once(await site.workers(WARM_WORKERS))
    before_mb = site.process.memory_mb()
    workers = await site.workers(count)
    await leased_once(workers)
    polls = [worker.send("POST", f"/calc/{APP}/compute/jobs/lease?wait=60") for worker in workers]
    await asyncio.sleep(2.0)
    grown_mb, cpu_s = site.process.memory_mb() - before_mb, site.process.cpu_s()
    await asyncio.sleep(idle_s)
    cpu_s = site.process.cpu_s() - cpu_s
    assert not any(poll.done() for poll in polls)
    for poll in polls:
        poll.cancel()
    return {"polls": count, "kb_per_poll": round(grown_mb / count * 1024, 1), "idle_cpu_share": round(cpu_s / idle_s, 4)}


async def leased_once(workers: list[Connection]) -> None:
    for worker in workers:
        await worker.post(f"/calc/{APP}/compute/jobs/lease")


# ---------------------------------------------------------------------------------------------------- all of it


async def measure(part: str, process: Process, data: Path, size: Size) -> dict[str, Any]:
    site = Site(process, data)
    try:
        if part == "latency":
            return await latency(site, size.latency_jobs)
        if part == "waiting":
            return await waiting(site, size.polls, size.idle_s)
        return await throughput(site, size.seconds, batched=part == "batch")
    finally:
        site.close()


def on_store(new_store: Callable[[], str], parts: list[str], size: Size) -> dict[str, Any]:
    """Each part on a server and a store of its own; the store's URL is empty for SQLite."""
    figures = {}
    for part in parts:
        with server(new_store()) as (process, data):
            figures[part] = uvloop.run(measure(part, process, data, size))
    return figures


def celery(venv: str | None) -> dict[str, Any]:
    from peers.run import measure_peers

    [found] = measure_peers(["celery"], seconds=3.0, **({"venv": Path(venv)} if venv else {}))
    return {"jobs_per_s": round(found.jobs_per_s), "version": found.version, "setting": found.setting}


def verdicts(figures: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Return whether each store meets each target that was measured."""
    found = {}
    for store, parts in figures.items():
        for part, key, target, is_most in TARGETS:
            if part in parts:
                value = parts[part][key]
                found[f"{store}_{part}_{key}"] = value <= target if is_most else value >= target
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run without Celery; nothing is recorded")
    parser.add_argument("--only", default=",".join(PARTS), help="some parts, with commas; nothing is recorded")
    parser.add_argument("--store", choices=["sqlite", "redis"], help="one store alone; nothing is recorded")
    parser.add_argument("--peers-venv", default=None, help="where Celery's environment is or is made")
    parser.add_argument("--no-peers", action="store_true")
    arguments = parser.parse_args()
    size, parts = Size(quick=arguments.quick), arguments.only.split(",")
    figures: dict[str, dict[str, Any]] = {}
    with limit(LIMIT_S):
        if arguments.store != "redis":
            figures["sqlite"] = on_store(lambda: "", parts, size)
        if arguments.store != "sqlite":
            with redis_server() as service:
                figures["redis"] = on_store(service.url, parts, size)
        told: dict[str, Any] = {**figures, "targets_met": verdicts(figures)}
        if not arguments.quick and not arguments.no_peers and "single" in parts:
            told["celery"] = celery(arguments.peers_venv)
    is_whole = not arguments.quick and parts == list(PARTS) and arguments.store is None
    record("http_door", told, save=is_whole)


if __name__ == "__main__":
    main()
