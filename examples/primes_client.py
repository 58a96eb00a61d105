"""A batch of jobs in one call. `python examples/primes_client.py [tcp://host:7000]`; primes_worker.py must run.

`submit_many` returns when all jobs are on disk. Its ids come from the numbers, so running this again runs nothing again.
"""

import asyncio
import sys

from tasuki import AsyncClient, JobSpec, State


async def main() -> None:
    limits = [10, 1_000, 100_000, 1_000_000]
    specs = [JobSpec(job_id=f"primes-{limit}", subject="math.primes", payload=str(limit).encode()) for limit in limits]
    async with AsyncClient(sys.argv[1] if len(sys.argv) > 1 else None) as client:
        jobs = await client.submit_many(specs)
        for limit, job in zip(limits, jobs, strict=True):
            ended = await job.outcome(timeout=60)
            if ended.state is State.SUCCEEDED:
                count = await client.result_bytes(ended)
                print(count.decode(), "primes below", limit)
            else:
                print(f"{ended.job_id} is {ended.state}: {ended.outcome.message}")


asyncio.run(main())
