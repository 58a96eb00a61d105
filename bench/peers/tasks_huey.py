"""Huey: no results; its queue is a Redis list that workers pop with BRPOP, without acknowledgement."""

from __future__ import annotations

from huey import RedisHuey
from tally import REDIS_URL, tally

huey = RedisHuey("peers", url=REDIS_URL, results=False)


@huey.task()
def arm_worker(jobs: int) -> None:
    tally.arm(jobs)


@huey.task()
def empty() -> None:
    tally.finish_one()


def arm(jobs: int) -> None:
    arm_worker(jobs)


def submit(jobs: int) -> None:
    """Huey has no bulk enqueue."""
    for _ in range(jobs):
        empty()
