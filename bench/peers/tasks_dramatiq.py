"""Dramatiq: no result backend; every message is acknowledged in Redis after its run, as it always is."""

from __future__ import annotations

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from tally import REDIS_URL, tally

# Only what an empty handler needs: the default list adds limits, callbacks and retries that cost time per message.
broker = RedisBroker(url=REDIS_URL, middleware=[])
dramatiq.set_broker(broker)


@dramatiq.actor
def arm_worker(jobs: int) -> None:
    tally.arm(jobs)


@dramatiq.actor
def empty() -> None:
    tally.finish_one()


def arm(jobs: int) -> None:
    arm_worker.send(jobs)


def submit(jobs: int) -> None:
    """Dramatiq has no bulk enqueue: `group.run` sends one message after the other, too."""
    for _ in range(jobs):
        empty.send()
