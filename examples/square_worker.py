"""A worker with one async handler. `python examples/square_worker.py [tcp://host:7000]`, then square_client.py.

Async handlers run in the worker's own loop, 100 at once unless `concurrency` says otherwise: for work that waits.
"""

import sys

from tasuki import Worker

worker = Worker(sys.argv[1] if len(sys.argv) > 1 else None)


@worker.handler("math.square")
async def square(job):
    return str(int(job.payload) ** 2).encode()


if __name__ == "__main__":
    worker.run()  # until SIGTERM or Ctrl-C: no new jobs then, running ones finish; a second signal stops them
