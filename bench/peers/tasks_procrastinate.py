"""Procrastinate: an empty async task, jobs deferred in batches, finished jobs kept (its default, and ours).

Run by on_postgresql.py with the peers' interpreter:

    tasks_procrastinate.py schema
    tasks_procrastinate.py worker CONCURRENCY
    tasks_procrastinate.py client WARM_UP_JOBS SECONDS ROUNDS      prints what it measured as JSON

A round ends when no job is left in the queue or at the worker. It may touch the database named in the environment and its
standard output.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import sys
import time

import uvloop
from procrastinate import App, PsycopgConnector

DEFER_BATCH_JOBS = 500
LOOK_EVERY_S = 0.01
ROUND_TIMEOUT_S = 120
LEFT = "SELECT EXISTS (SELECT FROM procrastinate_jobs WHERE status IN ('todo', 'doing')) AS some"

URL = os.environ["PEERS_POSTGRESQL_URL"]
CONNECTIONS = int(os.environ["PEERS_CONNECTIONS"])

app = App(connector=PsycopgConnector(conninfo=URL, min_size=CONNECTIONS, max_size=CONNECTIONS))


@app.task(name="empty")
async def empty() -> None:
    """Nothing: what is measured is everything around it."""


async def make_schema() -> None:
    async with app.open_async():
        await app.schema_manager.apply_schema_async()


async def work(concurrency: int) -> None:
    async with app.open_async():
        await app.run_worker_async(concurrency=concurrency)


async def one_round(jobs: int) -> float:
    """Seconds from the first defer to the last recorded finish."""
    begun = time.perf_counter()
    async with asyncio.timeout(ROUND_TIMEOUT_S):
        for first in range(0, jobs, DEFER_BATCH_JOBS):
            await empty.batch_defer_async(*({} for _ in range(min(DEFER_BATCH_JOBS, jobs - first))))
        while (await app.connector.execute_query_one_async(LEFT))["some"]:  # noqa: ASYNC110 - nobody would tell
            await asyncio.sleep(LOOK_EVERY_S)
    return time.perf_counter() - begun


async def measure(warm_up_jobs: int, seconds: float, rounds: int) -> None:
    async with app.open_async():
        await one_round(1)  # the worker is there
        warm_up_s = await one_round(warm_up_jobs)
        await app.connector.execute_query_async("ANALYZE")  # what autovacuum does to a table that has been there for a minute
        jobs = max(1, round(warm_up_jobs / warm_up_s * seconds))
        best_s = min([await one_round(jobs) for _ in range(rounds)])
    print(json.dumps({"version": importlib.metadata.version("procrastinate"), "jobs": jobs, "seconds": best_s}))


def main() -> None:
    match sys.argv[1:]:
        case ["schema"]:
            uvloop.run(make_schema())
        case ["worker", concurrency]:
            uvloop.run(work(int(concurrency)))
        case ["client", warm_up_jobs, seconds, rounds]:
            uvloop.run(measure(int(warm_up_jobs), float(seconds), int(rounds)))
        case unknown:
            raise SystemExit(f"unknown arguments {unknown}")


if __name__ == "__main__":
    main()
