"""How long from a submit to the start of its handler, at idle, with the job durable in between?

python bench/latency.py            1,000 jobs one after the other; recorded
python bench/latency.py --quick    100 jobs, nothing recorded
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sqlite3
import time
from pathlib import Path

import uvloop
from _common import folder, handler_worker, percentile, record, server

from tasuki import AsyncClient

PAUSE_S = 0.005  # between two jobs: the measurement is of an idle system


async def measure(url: str, count: int) -> dict[str, float]:
    started: list[float] = []
    answered: list[float] = []
    async with AsyncClient(url) as client:
        for number in range(count + 20):
            began = time.monotonic_ns()
            handle = await client.submit(subject="bench.stamp")
            stamp = int(await handle.result(10))
            if number >= 20:  # the first ones warm everybody up
                started.append((stamp - began) / 1e6)
                answered.append((time.monotonic_ns() - began) / 1e6)
            await asyncio.sleep(PAUSE_S)
    return {
        "submit_to_start_ms_p50": round(percentile(started, 0.5), 2),
        "submit_to_start_ms_p99": round(percentile(started, 0.99), 2),
        "submit_to_result_ms_p50": round(percentile(answered, 0.5), 2),
        "submit_to_result_ms_p99": round(percentile(answered, 0.99), 2),
    }


def raw_commit_ms(data: Path, count: int) -> dict[str, float]:
    """The floor: what one durable SQLite commit costs on this disk."""
    database = sqlite3.connect(data / "raw.sqlite3", isolation_level=None)
    database.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; CREATE TABLE t (a)")
    times = []
    for number in range(count):
        began = time.perf_counter()
        database.execute("BEGIN IMMEDIATE")
        database.execute("INSERT INTO t VALUES (?)", (os.urandom(200) + bytes([number % 256]),))
        database.execute("COMMIT")
        times.append((time.perf_counter() - began) * 1e3)
        time.sleep(PAUSE_S)
    database.close()
    return {"raw_commit_ms_p50": round(percentile(times, 0.5), 2), "raw_commit_ms_p99": round(percentile(times, 0.99), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    count = 100 if arguments.quick else 1000
    with folder() as data:
        floor = raw_commit_ms(data, count)
        with server(data), handler_worker(f"unix://{data}/socket", 10):
            figures = uvloop.run(measure(f"unix://{data}/socket", count))
    record("latency", {"jobs": count, **figures, **floor}, save=not arguments.quick)


if __name__ == "__main__":
    main()
