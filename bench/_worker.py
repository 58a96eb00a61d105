"""The worker process of the benches: `python bench/_worker.py URL CONCURRENCY`."""

from __future__ import annotations

import logging
import sys
import time

from tasuki import Worker

worker = Worker(sys.argv[1], concurrency=int(sys.argv[2]), lease_ttl_s=60)


@worker.handler("bench.noop")
async def noop(job: object) -> None:
    """Nothing: what is measured is everything around it."""


@worker.handler("bench.stamp")
async def stamp(job: object) -> str:
    """When it was started, on the clock that all processes of a machine share."""
    return str(time.monotonic_ns())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    worker.run()
