"""How long from an order at the worker to the first line of a Python function, in a fork of a warm interpreter and in a cold one?

The imports are the same (`_warm_job.py`: asyncio, ssl, sqlite3, email, Django's models). Both go the whole way of a job at the
worker: run folder, keeper, process. *Idle*: one after the other, with a short pause; *busy*: two at a time, without. Targets for
the idle worker: 10 ms, and 5 times faster than cold.

python bench/warm.py            500 warm jobs, 60 cold ones; recorded
python bench/warm.py --quick    50 and 10, nothing recorded
"""

from __future__ import annotations

import argparse
import asyncio
import io
import time
import zipfile
from pathlib import Path

from _common import HERE, folder, limit, percentile, record

from tasuki.core.job import JobSpec
from tasuki.worker.attempt import Attempt, StopReason
from tasuki.worker.execs import parse_execs
from tasuki.worker.runner import CommandRunner

CALL = "_warm_job:main"
PAUSE_S = 0.01
TARGET_MS, TARGET_RATIO = 10.0, 5.0


async def start_ms(runner: CommandRunner, exec_: str, number: int) -> float:
    """From the order to the function's first line."""
    attempt = Attempt(spec=JobSpec(job_id=f"{exec_}-{number}", exec=exec_), lease_id=f"{exec_}-{number}", attempt=1)
    stop: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
    began = time.monotonic_ns()
    result = await runner.run(attempt, stop)
    assert result.outcome.exit_code == 0, result.outcome
    assert result.outcome.result is not None
    with zipfile.ZipFile(io.BytesIO(result.outcome.result)) as archive:
        stamp = int(archive.read("stdout.log"))
    await runner.cleanup(attempt)
    return (stamp - began) / 1e6


async def series(runner: CommandRunner, exec_: str, count: int, at_once: int, pause_s: float) -> list[float]:
    await start_ms(runner, exec_, -1)  # the import of the warm one, and the disk cache for both
    found: list[float] = []
    for first in range(0, count, at_once):
        found += await asyncio.gather(*(start_ms(runner, exec_, number) for number in range(first, first + at_once)))
        await asyncio.sleep(pause_s)
    return found


async def no_fetch(job_id: str, sha256: str, size_bytes: int, target: Path) -> None:
    raise AssertionError("no job of this bench has inputs")


async def measure(data: Path, preforked_jobs: int, cold_jobs: int) -> dict[str, object]:
    env = {"PYTHONPATH": str(HERE)}
    warm = parse_execs({"warm": {"kind": "python", "call": CALL, "env": env}})["warm"]
    execs = {"warm": warm, **parse_execs({"cold": {"argv": list(warm.argv), "env": env}})}
    runner = CommandRunner(data, execs, incarnation="bench-warm", fetch=no_fetch, floor_free_bytes=0)
    figures: dict[str, object] = {"preforked_jobs": preforked_jobs, "cold_jobs": cold_jobs}
    try:
        for name, at_once, pause_s in (("idle", 1, PAUSE_S), ("busy", 2, 0.0)):
            found = {
                "warm": await series(runner, "warm", preforked_jobs, at_once, pause_s),
                "cold": await series(runner, "cold", cold_jobs, at_once, pause_s),
            }
            medians = {kind: percentile(values, 0.5) for kind, values in found.items()}
            figures[name] = {
                **{f"{kind}_start_ms_p50": round(value, 2) for kind, value in medians.items()},
                **{f"{kind}_start_ms_p99": round(percentile(values, 0.99), 2) for kind, values in found.items()},
                "times_faster": round(medians["cold"] / medians["warm"], 1),
            }
            if name == "idle":
                figures["met"] = medians["warm"] <= TARGET_MS and medians["cold"] >= TARGET_RATIO * medians["warm"]
    finally:
        runner.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    counts = (50, 10) if arguments.quick else (500, 60)
    with limit(300), folder() as data:
        figures = asyncio.run(measure(data, *counts))
    record("warm", {"target_ms": TARGET_MS, "target_times_faster": TARGET_RATIO, **figures}, save=not arguments.quick)


if __name__ == "__main__":
    main()
