"""The worker process of the benches: `python bench/_worker.py URL CONCURRENCY [bench|queue|few]`."""

from __future__ import annotations

import logging
import sys
import time

from tasuki import Tasks, Worker

kind = sys.argv[3] if len(sys.argv) > 3 else "bench"
worker = Worker(sys.argv[1], concurrency=int(sys.argv[2]), lease_ttl_s=60)


async def noop(job: object) -> None:
    """Nothing: what is measured is everything around it."""


tasks = Tasks()


@tasks.task(subject="bench.typed")
async def typed_noop() -> None:
    """Nothing, as a typed task."""


async def stamp(job: object) -> str:
    """Return the time of its start, on the clock that all processes of a machine share."""
    return str(time.monotonic_ns())


if kind == "queue":
    worker.handler("math.square")(noop)
elif kind == "few":
    worker.handler("render.*.few")(noop)
else:
    worker.handler("bench.noop")(noop)
    tasks.add_to(worker)
    worker.handler("bench.stamp")(stamp)

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    worker.run()
