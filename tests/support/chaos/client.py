"""A client process of the chaos tests: `python client.py URL --name NAME --jobs N --history FILE --seed N`.

Submits jobs under known ids (`NAME-1`, …) in batches of random sizes, some of them twice, and waits for every result. The token
comes from TASUKI_TOKEN. Each thing that it learned is a line of JSON in the history:

    {"did": "submit", "ids": […]}                          about to ask
    {"did": "accepted", "ids": […], "existed": […]}        the server's word that they are durable
    {"did": "result", "id": …, "attempt": …, "words": …, "sha256": …}
    {"did": "all_submitted"}                               and, when every result is there, {"did": "done"}

with `at`, the time at which it was noted.

It ends with 0 only if every submit was accepted and every job succeeded: any error at all is for the test to see.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import random
import sys
import time
from pathlib import Path
from typing import TextIO

from tasuki import AsyncClient
from tasuki.client.aio import AsyncJobHandle
from tasuki.core.job import JobSpec

GROUP = "chaos"
LARGE_BYTES = 100_000  # above what is kept inline, so that it becomes a blob
BATCH_MAX = 50
WAITING_MAX = 500
RESULT_TIMEOUT_S = 600.0  # the test's own deadline comes sooner


def spec_of(name: str, number: int, large_every: int) -> JobSpec:
    """The job of this number: most end at once, some rest, some stumble, a few have large results."""
    work = ("", "", "rest 0.02", "", "rest 0.2", "", "stumble", "", "rest 0.05", "")[number % 10]
    if large_every and number % large_every == 0:
        work = f"large {LARGE_BYTES}"
    return JobSpec(
        job_id=f"{name}-{number}",
        subject=f"{GROUP}.{name}",
        payload=work.encode(),
        priority=4 + number % 3,
        max_retries=3,
        max_losses=100,  # more than there will be faults: whatever is not finished then was forgotten
        backoff_s=0.1,
    )


class History:
    """The file. Lines are written at once: whoever reads it sees what was known at that moment."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def note(self, did: str, **facts: object) -> None:
        self._file.write(json.dumps({"did": did, "at": time.time(), **facts}) + "\n")
        self._file.flush()


async def collect(history: History, waiting: dict[str, AsyncJobHandle], room: asyncio.Semaphore, handle: AsyncJobHandle) -> None:
    ended = await handle.outcome(RESULT_TIMEOUT_S)
    result = await handle.result(RESULT_TIMEOUT_S)
    history.note(
        "result",
        id=handle.job_id,
        attempt=ended.attempt,
        words=result.rstrip(b".").decode(),
        bytes=len(result),
        sha256=hashlib.sha256(result).hexdigest(),
    )
    waiting.pop(handle.job_id)
    room.release()


async def submit_all(client: AsyncClient, history: History, options: argparse.Namespace) -> None:
    chance = random.Random(options.seed)
    waiting: dict[str, AsyncJobHandle] = {}
    room = asyncio.Semaphore(WAITING_MAX)
    async with asyncio.TaskGroup() as group:
        number = 1
        while number <= options.jobs:
            count = min(chance.randint(1, BATCH_MAX), options.jobs + 1 - number)
            specs = [spec_of(options.name, n, options.large_every) for n in range(number, number + count)]
            number += count
            for _ in specs:
                await room.acquire()
            fresh = await accepted(client, history, specs)
            waiting.update((handle.job_id, handle) for handle in fresh)
            for handle in fresh:
                group.create_task(collect(history, waiting, room, handle))
            if chance.random() < 0.1:  # once more, as somebody would who did not hear the answer
                await accepted(client, history, specs)
            await asyncio.sleep(chance.uniform(0, 2 * options.pause))
        history.note("all_submitted")


async def accepted(client: AsyncClient, history: History, specs: list[JobSpec]) -> list[AsyncJobHandle]:
    history.note("submit", ids=[spec.job_id for spec in specs])
    handles = await client.submit_many(specs)
    history.note("accepted", ids=[handle.job_id for handle in handles], existed=[handle.existed for handle in handles])
    return handles


async def main(options: argparse.Namespace) -> None:
    with options.history.open("w") as file:
        history = History(file)
        async with AsyncClient(options.url, client_id=options.name) as client:
            await submit_all(client, history, options)
        history.note("done")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--name", required=True)
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--pause", type=float, default=0.05, help="between two batches, on average")
    parser.add_argument("--large-every", type=int, default=0, help="every so manieth job has a result that becomes a blob")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    asyncio.run(main(parser.parse_args()))
