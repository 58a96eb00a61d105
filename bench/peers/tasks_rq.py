"""RQ: results discarded, jobs enqueued through its pipelined `enqueue_many`."""

from __future__ import annotations

import redis
from rq import Queue
from tally import REDIS_URL, tally

ENQUEUE_BATCH_JOBS = 500

queue = Queue("default", connection=redis.Redis.from_url(REDIS_URL))


def arm_worker(jobs: int) -> None:
    tally.arm(jobs)


def empty() -> None:
    tally.finish_one()


def arm(jobs: int) -> None:
    # By name: a function given as an object would carry the module name of the client's process.
    queue.enqueue("tasks_rq.arm_worker", jobs, result_ttl=0)


def submit(jobs: int) -> None:
    for first in range(0, jobs, ENQUEUE_BATCH_JOBS):
        batch = range(min(ENQUEUE_BATCH_JOBS, jobs - first))
        queue.enqueue_many([Queue.prepare_data("tasks_rq.empty", result_ttl=0) for _ in batch])
