"""Taskiq: async handler, no result backend; `list` pops without acknowledging, `stream` acknowledges each message."""

from __future__ import annotations

import asyncio

import uvloop
from tally import REDIS_URL, VARIANT, tally
from taskiq_redis import ListQueueBroker, RedisStreamBroker

SUBMITS_IN_FLIGHT = 50

_runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
broker = ListQueueBroker(REDIS_URL) if VARIANT == "list" else RedisStreamBroker(REDIS_URL)


@broker.task
async def arm_worker(jobs: int) -> None:
    tally.arm(jobs)


@broker.task
async def empty() -> None:
    tally.finish_one()


def arm(jobs: int) -> None:
    _runner.run(_arm(jobs))


def submit(jobs: int) -> None:
    _runner.run(_submit(jobs))


async def _arm(jobs: int) -> None:
    await broker.startup()
    await arm_worker.kiq(jobs)


async def _submit(jobs: int) -> None:
    """Taskiq has no bulk send; concurrent sends over its connection pool are its way to hide the round trip."""
    for first in range(0, jobs, SUBMITS_IN_FLIGHT):
        await asyncio.gather(*(empty.kiq() for _ in range(min(SUBMITS_IN_FLIGHT, jobs - first))))
