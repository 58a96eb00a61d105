"""The one client process of a measurement: waits for the worker, submits empty jobs, prints what it measured as JSON.

Run by run.py with the peers' interpreter: `client.py MODULE DISTRIBUTION WARM_UP_JOBS JOBS SECONDS ROUNDS`.
MODULE offers `arm(jobs)` and `submit(jobs)`. JOBS 0 means: as many as the rate of the warm-up round fills SECONDS with.
It may touch the Redis server named in the environment and its standard output.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import time
from typing import Protocol, cast

import redis
from tally import DONE_KEY, READY_KEY, REDIS_URL

READY_TIMEOUT_S = 30
DONE_TIMEOUT_S = 120


class TaskModule(Protocol):
    """Functions that each tasks_*.py offers to the client."""

    def arm(self, jobs: int) -> None: ...

    def submit(self, jobs: int) -> None: ...


def await_signal(connection: redis.Redis, key: str, jobs: int, timeout_s: int) -> None:
    """Block until the worker announces this round; anything else means that the count went wrong."""
    announced = cast("tuple[bytes, bytes] | None", connection.blpop([key], timeout=timeout_s))
    if announced is None:
        raise SystemExit(f"no word from the worker on {key} within {timeout_s} s")
    if int(announced[1]) != jobs:
        raise SystemExit(f"the worker announced {int(announced[1])} jobs on {key}, expected {jobs}")


def run_round(tasks: TaskModule, connection: redis.Redis, jobs: int) -> float:
    """Seconds from the first submit to the end of the last handler."""
    tasks.arm(jobs)
    await_signal(connection, READY_KEY, jobs, READY_TIMEOUT_S)
    begun = time.perf_counter()
    tasks.submit(jobs)
    await_signal(connection, DONE_KEY, jobs, DONE_TIMEOUT_S)
    return time.perf_counter() - begun


def main() -> None:
    module, distribution, warm_up_jobs, jobs, seconds, rounds = sys.argv[1:]
    tasks = cast(TaskModule, importlib.import_module(module))
    # redis-py gives up on a silent socket after a few seconds by default; the limits of a round are ours.
    with redis.Redis.from_url(REDIS_URL, socket_timeout=None) as connection:
        warm_up_s = run_round(tasks, connection, int(warm_up_jobs))
        measured_jobs = int(jobs) or max(1, round(int(warm_up_jobs) / warm_up_s * float(seconds)))
        best_s = min(run_round(tasks, connection, measured_jobs) for _ in range(int(rounds)))
        redis_version = cast("dict[str, str]", connection.info("server"))["redis_version"]
    version = importlib.metadata.version(distribution)
    report = {"version": version, "redis_version": redis_version, "jobs": measured_jobs, "seconds": best_s}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
