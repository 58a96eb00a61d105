"""A worker process of these tests: `python jobs.py URL --ledger FILE [options]`. The token comes from TASUKI_TOKEN.

Every run first adds its line to the ledger. What it does then stands in the job's payload, word by word:

    (nothing)           ends at once
    hold FILE           waits until the file exists
    rest SECONDS        sleeps
    spin SECONDS        computes; only with --plain, where handlers run in child processes
    alone FILE          holds a lock on the file until FILE.end exists; fails if another run holds it. The file has the pid of
                        the process that forked the handler's. Only with --plain
    withdraw            lets a cancellation escape that nobody asked for
    freeze              stops this process as SIGSTOP does, before anything else in it runs; nothing in a later attempt
    stumble             fails in its first attempt, succeeds in the next
    subscribe PATTERN…  has the worker take these subjects from now on
    large BYTES         has a result of so many bytes, filled up with dots

The result is the number of the attempt; with --signed also who ran what: `attempt job_id pid`.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import hashlib
import logging
import os
import signal
import time
from pathlib import Path

from tasuki import Worker
from tasuki.worker.execs import parse_exec_flag

parser = argparse.ArgumentParser()
parser.add_argument("url")
parser.add_argument("--ledger", type=Path, required=True)
parser.add_argument("--subject", action="append", default=[])
parser.add_argument("--slots", type=int, default=64)
parser.add_argument("--worker-id")
parser.add_argument("--plain", action="store_true")
parser.add_argument("--signed", action="store_true")
parser.add_argument("--ahead", action="store_true", help="be sent jobs ahead, as workers for commands are while jobs are short")
parser.add_argument("--answer", metavar="SUBJECT", help="send back the messages of this subject")
parser.add_argument("--on-disconnect", default="stop")
parser.add_argument("--reconnect-grace", type=float, default=60.0)
options = parser.parse_args()

worker = Worker(
    options.url,
    worker_id=options.worker_id,
    subjects=options.subject or [">"],
    concurrency=options.slots,
    on_disconnect=options.on_disconnect,
    reconnect_grace_s=options.reconnect_grace,
    execs={"true": parse_exec_flag("true=/bin/true")} if options.ahead else None,
)
if options.answer:

    @worker.subscribe(options.answer)
    async def answer(message):
        await worker.publish(message.reply_to, message.payload)


parent_pid = os.getpid()


def begin(job) -> list[str]:
    """Note the run in the ledger, in one write that no other process can break into; the words of the payload."""
    line = f"{job.job_id} {job.attempt} {parent_pid} {time.time():.3f}\n"
    descriptor = os.open(options.ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
    return bytes(job.payload).decode().split() or [""]


def ended(job, size_bytes: int = 0) -> bytes:
    words = f"{job.attempt} {job.job_id} {parent_pid}" if options.signed else str(job.attempt)
    return words.encode().ljust(size_bytes, b".")


async def act(job):
    match begin(job):
        case ["freeze"] if job.attempt == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["hold", gate]:
            while not Path(gate).exists():  # noqa: ASYNC110 - nothing tells of a file that appears
                await asyncio.sleep(0.01)
        case ["rest", seconds]:
            await asyncio.sleep(float(seconds))
        case ["stumble"] if job.attempt == 1:
            raise ValueError("the first attempt stumbles")
        case ["withdraw"]:
            raise asyncio.CancelledError
        case ["subscribe", *patterns]:
            worker.change_subjects(*patterns)
        case ["large", size_bytes]:
            return ended(job, int(size_bytes))
    return ended(job)


def compute(job):
    match begin(job):
        case ["spin", seconds]:
            end = time.monotonic() + float(seconds)
            digest = b""
            while time.monotonic() < end:
                digest = hashlib.sha256(digest).digest()
        case ["alone", path]:
            with Path(path).open("a") as locked:
                fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked.write(f"{os.getppid()}\n")
                locked.flush()
                while not Path(f"{path}.end").exists():
                    time.sleep(0.01)
    return ended(job)


worker.handler(">")(compute if options.plain else act)
logging.basicConfig(level=logging.INFO)
worker.run()
