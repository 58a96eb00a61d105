"""Celery: no result backend, early acknowledgement (its default), a wide prefetch, one kept producer."""

from __future__ import annotations

from celery import Celery
from tally import REDIS_URL, tally

app = Celery("tasks_celery", broker=REDIS_URL)
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_ignore_result=True,
    worker_disable_rate_limits=True,
    worker_enable_remote_control=False,
    worker_prefetch_multiplier=128,
)


@app.task(name="arm")
def arm_worker(jobs: int) -> None:
    tally.arm(jobs)


@app.task(name="empty")
def empty() -> None:
    tally.finish_one()


def arm(jobs: int) -> None:
    arm_worker.delay(jobs)


def submit(jobs: int) -> None:
    """Celery has no bulk publish; keeping one producer saves the pool's hand-out for every job."""
    with app.producer_pool.acquire(block=True) as producer:
        for _ in range(jobs):
            empty.apply_async(producer=producer)
