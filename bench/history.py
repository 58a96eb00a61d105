"""Does a long history or a long queue slow a server down? 1,000,000 queued and 5,000,000 finished jobs against an empty store.

    python bench/history.py            the whole thing: some minutes and 4 GB of disk; recorded
    python bench/history.py --quick    a hundredth of it, nothing recorded

Measured with real processes, the HTTP door open: throughput of new jobs beside the queue; throughput of taking the queue itself
while new jobs come in; `stats` and `list` while that goes on; the server's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import uvloop
from _common import Process, folder, handler_worker, percentile, record, server
from store import FINISHED, QUEUED, SUBJECT, load

from tasuki import AsyncClient, JobSpec

CONCURRENCY = 2000
CHUNK = 5000


async def new_jobs(client: AsyncClient, jobs: int) -> float:
    """Jobs per second, from submit to the recorded finish that the client hears of."""
    began = time.perf_counter()
    specs = [JobSpec(job_id=job_id, subject="bench.noop") for job_id in client.new_ids(jobs)]
    for handle in await client.submit_many(specs):
        await handle.outcome(120)
    return jobs / (time.perf_counter() - began)


async def while_asked(client: AsyncClient, jobs: int) -> dict[str, float]:
    """Measure while somebody looks at `stats` and `list` ten times a second."""
    times: dict[str, list[float]] = {"stats": [], "list": [], "list_failed": []}

    async def look() -> None:
        while True:
            for name, ask in (
                ("stats", client.counts()),
                ("list", client.list_jobs(limit=50)),
                ("list_failed", client.list_jobs(limit=50, states=["FAILED"])),
            ):
                began = time.perf_counter()
                await ask
                times[name].append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(0.1)

    looking = asyncio.create_task(look())
    rate = await new_jobs(client, jobs)
    looking.cancel()
    return {"jobs_per_s": round(rate), **{f"{name}_ms_p95": round(percentile(values, 0.95), 1) for name, values in times.items()}}


async def idle_asks(client: AsyncClient) -> dict[str, float]:
    """`stats` and `list` with nothing else going on."""
    figures = {}
    for name, ask in (("stats", client.counts), ("list", client.list_jobs)):
        took = []
        for _ in range(20):
            began = time.perf_counter()
            await ask()
            took.append((time.perf_counter() - began) * 1e3)
        figures[f"{name}_ms_max"] = round(max(took), 1)
    return figures


async def take_queue(client: AsyncClient, jobs: int) -> float:
    """Return how fast the queue itself is worked off while as many new jobs are put behind it."""
    before = (await client.counts())["math"].succeeded
    began = time.perf_counter()
    for start in range(0, jobs, CHUNK):
        specs = [JobSpec(job_id=job_id, subject=SUBJECT, payload=b"7") for job_id in client.new_ids(min(CHUNK, jobs - start))]
        await client.submit_many(specs, watch=False)
    while (done := (await client.counts())["math"].succeeded - before) < jobs:  # noqa: ASYNC110 - the counters are all there is to look at
        await asyncio.sleep(0.02)
    return done / (time.perf_counter() - began)


async def measure(url: str, jobs: int, broker: Process, *, queue: bool) -> dict[str, object]:
    async with AsyncClient(url) as client:
        await new_jobs(client, 2000)
        figures: dict[str, object] = {"jobs_per_s": round(max([await new_jobs(client, jobs) for _ in range(3)]))}
        figures["while_asked"] = await while_asked(client, jobs)
        figures["idle"] = await idle_asks(client)
        if queue:
            with handler_worker(url, CONCURRENCY, "queue"):
                figures["taking_the_queue_per_s"] = round(await take_queue(client, jobs))
    figures["server_memory_mb"] = round(broker.memory_mb())
    return figures


def one(data: Path, jobs: int, *, queue: bool) -> dict[str, object]:
    url = f"unix://{data}/socket"
    with server(data, "--http", "127.0.0.1:0") as broker, handler_worker(url, CONCURRENCY):
        return uvloop.run(measure(url, jobs, broker, queue=queue))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    share, jobs = (100, 5_000) if arguments.quick else (1, 60_000)
    with folder() as data:
        empty = one(data, jobs, queue=False)
    with folder() as data:
        load(data / "tasuki.sqlite3", "ordered", QUEUED // share, FINISHED // share)
        full = one(data, jobs, queue=True)
    ratio = round(full["jobs_per_s"] / empty["jobs_per_s"], 2)  # type: ignore[operator]
    figures = {"queued": QUEUED // share, "finished": FINISHED // share, "empty": empty, "full": full, "ratio": ratio}
    record("history", figures, save=not arguments.quick)


if __name__ == "__main__":
    main()
