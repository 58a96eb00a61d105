"""A plain function as handler, for CPU-bound work. `python examples/primes_worker.py [tcp://host:7000]`.

A `def` handler runs in a child process: it can use a whole core, be stopped at its time limit, and be killed when the job is
canceled. The lease is renewed by the worker, not by the function, so a job may be far longer than a lease.
"""

import sys

from tasuki import Worker

worker = Worker(sys.argv[1] if len(sys.argv) > 1 else None, concurrency=2)


@worker.handler("math.primes", timeout_s=60)
def count_primes(job):
    below = int(job.payload)
    sieve = bytearray([1]) * below
    sieve[:2] = bytes(min(2, below))
    for number in range(2, int(below**0.5) + 1):
        if sieve[number]:
            sieve[number * number :: number] = bytes(len(range(number * number, below, number)))
    return str(sum(sieve))


if __name__ == "__main__":
    worker.run()
