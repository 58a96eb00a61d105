"""A worker process of the tests: `python tests/support/handlers.py URL [--slots N] [--worker-id ID] [--lease-ttl S]`.

The token comes from TASUKI_TOKEN. What each handler does stands in its docstring; tests name them by subject.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import os
import time
from pathlib import Path

from tasuki import Worker

parser = argparse.ArgumentParser()
parser.add_argument("url")
parser.add_argument("--slots", type=int, default=64)
parser.add_argument("--worker-id")
parser.add_argument("--lease-ttl", type=float)
parser.add_argument("--tls-ca")
parser.add_argument("--plain", action="store_true", help="also take plain.*, run in child processes")
options = parser.parse_args()

worker = Worker(
    options.url,
    worker_id=options.worker_id,
    concurrency=options.slots,
    lease_ttl_s=options.lease_ttl,
    tls_ca=options.tls_ca,
)


def text_of(job) -> str:
    return bytes(job.payload).decode()


@worker.handler("math.square")
async def square(job):
    """The payload's number, squared."""
    return str(int(job.payload) ** 2).encode()


@worker.handler("noop")
async def noop(job):
    """Nothing."""


@worker.handler("echo.>")
async def echo(job):
    """The payload itself, whatever comes after echo."""
    return bytes(job.payload)


@worker.handler("fail")
async def fail(job):
    """Fails with the payload as the reason."""
    raise ValueError(text_of(job))


@worker.handler("big")
async def big(job):
    """Return as many bytes as the payload's number says."""
    return os.urandom(1024) * (int(job.payload) // 1024)


@worker.handler("inputs")
async def inputs(job):
    """The sha256 of the payload and of each file, by name."""
    with job.open_payload() as payload:
        found = {"payload": hashlib.file_digest(payload, "sha256").hexdigest()}
    for file in job.files:
        with file.open() as source:
            found[file.name] = hashlib.file_digest(source, "sha256").hexdigest()
    return json.dumps({**found, "folder": job.folder})


@worker.handler("wait")
async def wait(job):
    """Appends a line `job_id attempt pid` to the file `<payload>.runs`, then waits until the file <payload> exists."""
    gate = Path(text_of(job))
    with gate.with_name(gate.name + ".runs").open("a") as runs:
        runs.write(f"{job.job_id} {job.attempt} {os.getpid()}\n")
    while not gate.exists():  # noqa: ASYNC110 - another process opens it
        await asyncio.sleep(0.01)
    return b"the gate is open"


@worker.handler("read")
async def read(job):
    """Waits like `wait`, then returns its input file."""
    await wait(job)
    return job.files[0].read_bytes()


@worker.handler("spoil")
async def spoil(job):
    """Writes into its input file, which is read-only."""
    path = job.files[0].path
    path.chmod(0o644)
    path.write_bytes(b"spoilt")


if options.plain:

    @worker.handler("plain.read")
    def plain_read(job):
        """Do as `read`, in a child process."""
        return asyncio.run(read(job))

    @worker.handler("plain.spin")
    def spin(job):
        """Computes for the payload's number of seconds; runs in a child process."""
        end = time.monotonic() + float(job.payload)
        digest = b""
        while time.monotonic() < end:
            digest = hashlib.sha256(digest).digest()
        return b"done"


logging.basicConfig(level=logging.INFO)
worker.run()
