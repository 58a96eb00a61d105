"""Do jobs that nobody takes, or patterns that match nothing, delay other groups? Waiting subjects and patterns, from few to many.

    python bench/isolation.py                   SQLite, PostgreSQL and Redis: half an hour; each recorded under its name
    python bench/isolation.py --only sqlite     one of them
    python bench/isolation.py --quick           few numbers and jobs, nothing recorded

Each waiting job has a subject of its own (`render.N.gpu`). An idle worker subscribes to `render.*.cpu`, which matches none.
In one table FEW_MATCHES of them are `render.N.few`, for a worker that runs them one by one meanwhile, in `few_s` seconds.
Beside the patterns that are counted the waiting jobs are of 20 groups. Idle workers have 200 patterns each, once `pM.qN.>`, once
`*.qN`, and a token each, as workers elsewhere have: what one token may subscribe to is bounded. Beside them jobs of another group
run one after the other: how long each takes, submit to result, and how much CPU server and store take when nothing is submitted
any more. The script ends with 1 if the p99 is above max(1.5 times, 5 ms more than) that of the smallest step, or the idle CPU
above that of the smallest and 2 % of a core.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from _common import Process, folder, handler_worker, limit, percentile, record, server
from _postgresql import cpu_s as postgresql_cpu_s
from _postgresql import postgresql
from _redis import cpu_s as redis_cpu_s
from _redis import redis_server

from tasuki import AsyncClient, JobSpec
from tasuki.core.access import token_sha256
from tasuki.core.protocol import FRAME_MAX_BYTES, GiveCredit, HelloWorker, Welcome
from tasuki.server.assembly import make_secret
from tasuki.wire.messages import FrameDecoder, decode, encode

STORES = ("sqlite", "postgresql", "redis")
SUBJECTS = (1_000, 10_000, 100_000, 1_000_000)
PATTERNS = (1, 200, 4_000, 40_000)
PATTERNS_EACH = 200
OF_GROUPS, OF_ANY_GROUP = (
    "p{parent}.q{number}.>",
    "*.q{number}",
)  # forms of patterns; the index finds none of the latter by a group
FEW_SUBJECTS = 1_000
FEW_GROUPS = 20
FEW_MATCHES = 20
CHUNK = 5_000
PROBES = 2_000  # p99 of fewer is one hiccup of the machine
IDLE_S = 10.0
SETTLE_S = 120.0
TTL_S = 3_600.0  # the idle workers never beat
ANSWER_S = 60.0


@dataclass(frozen=True)
class BenchStore:
    """An empty store. SQLite has no address and no CPU time: it is in the data folder and works in the server."""

    url: str = ""
    cpu_s: Callable[[], float] = lambda: 0.0
    settle: Callable[[], object] = lambda: None
    """Do at once what the store would do about many new rows some time later: PostgreSQL's autovacuum is not what is asked."""


@contextlib.contextmanager
def store_of(name: str) -> Iterator[BenchStore]:
    if name == "postgresql":
        with postgresql() as postgres:
            url = postgres.database()
            yield BenchStore(url, lambda: postgresql_cpu_s(postgres), lambda: postgres.execute("VACUUM ANALYZE", url=url))
    elif name == "redis":
        with redis_server() as redis:
            yield BenchStore(redis.url(), lambda: redis_cpu_s(redis))
    else:
        yield BenchStore()


@contextlib.contextmanager
def idle_workers(data: Path, patterns: int, form: str) -> Iterator[None]:
    """Connections of workers with credit, and with so many patterns of a form in all."""
    names = ["render.*.cpu", *(form.format(number=number, parent=number % 997) for number in range(patterns - 1))]
    some = [tuple(names[start : start + PATTERNS_EACH]) for start in range(0, len(names), PATTERNS_EACH)]
    secrets = uvloop.run(worker_tokens(data, len(some)))
    with contextlib.ExitStack() as stack:
        for number, (own, secret) in enumerate(zip(some, secrets, strict=True)):
            link = stack.enter_context(socket.socket(socket.AF_UNIX))
            link.settimeout(ANSWER_S)
            link.connect(str(data / "socket"))
            hello = HelloWorker(
                msg_id=1, worker_id=f"idle-{number}", incarnation="i", token=secret, patterns=own, ttl_s=TTL_S, slots=4
            )
            link.sendall(encode(hello))
            expect_welcome(link, hello.worker_id)
            link.sendall(encode(GiveCredit(4)))
        yield


async def worker_tokens(data: Path, count: int) -> list[str]:
    """Return the secrets of new worker tokens."""
    secrets = [make_secret("worker") for _ in range(count)]
    async with AsyncClient(f"unix://{data}/socket") as client:
        for number, secret in enumerate(secrets):
            about = {"kind": "worker", "sha256": token_sha256(secret), "created_at": time.time()}
            await client.call("token.create", token_id=f"idle{number}", **about)
    return secrets


def expect_welcome(link: socket.socket, worker_id: str) -> None:
    """Read the answer to a Hello; SystemExit unless the worker is welcome: one that was refused has no patterns."""
    decoder = FrameDecoder()
    while not (frames := decoder.feed(data := link.recv(65_536))):
        if not data:
            raise SystemExit(f"{worker_id}: the server hung up before it answered")
    answer = decode(frames[0], FRAME_MAX_BYTES)
    if not isinstance(answer, Welcome):
        raise SystemExit(f"{worker_id} was refused: {answer}")


async def wait_for_rest(cpu_s: Callable[[], float]) -> None:
    """Return when server and store have nothing to do, or do not come to rest."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        before = cpu_s()
        await asyncio.sleep(1.0)
        if cpu_s() - before < 0.05:
            return


async def measure(data: Path, broker: Process, cpu_s: Callable[[], float], probes: int, idle_s: float) -> dict[str, float]:
    async with AsyncClient(f"unix://{data}/socket") as client:
        took = []
        for _ in range(probes):
            began = time.perf_counter()
            handle = await client.submit(subject="bench.noop")
            await handle.outcome(120)
            took.append((time.perf_counter() - began) * 1e3)
        await wait_for_rest(cpu_s)
        before = cpu_s()
        await asyncio.sleep(idle_s)
        idle_percent = (cpu_s() - before) / idle_s * 100
    return {
        "p50_ms": round(percentile(took, 0.5), 2),
        "p99_ms": round(percentile(took, 0.99), 2),
        "idle_cpu_percent": round(idle_percent, 1),
        "server_memory_mb": round(broker.memory_mb()),
    }


async def few_done_s(data: Path, subjects: int) -> float:
    """Return when the jobs that match are done, in seconds from now."""
    began = time.monotonic()
    async with AsyncClient(f"unix://{data}/socket") as client:
        names = [f"wait-{number}" for number in range(subjects) if is_few(number, subjects)]
        await asyncio.gather(*(client.job(name).outcome() for name in names))
    return round(time.monotonic() - began, 2)


def is_few(number: int, subjects: int) -> bool:
    return number % (subjects // FEW_MATCHES) == 0


async def fill(data: Path, subjects: int, groups: int, *, with_few: bool) -> None:
    async with AsyncClient(f"unix://{data}/socket") as client:
        for start in range(0, subjects, CHUNK):
            numbers = range(start, min(start + CHUNK, subjects))
            ends = ["few" if with_few and is_few(number, subjects) else "gpu" for number in numbers]
            names = [f"render{number % groups or ''}.{number:07}.{end}" for number, end in zip(numbers, ends, strict=True)]
            specs = [JobSpec(job_id=f"wait-{number}", subject=subject) for number, subject in zip(numbers, names, strict=True)]
            await client.submit_many(specs, watch=False)


def one(
    name: str,
    probes: int,
    idle_s: float,
    *,
    subjects: int = FEW_SUBJECTS,
    groups: int = 1,
    patterns: int = 1,
    form: str = OF_GROUPS,
    with_few: bool = False,
) -> dict[str, float]:
    with folder() as data, store_of(name) as store, server(data, store=store.url) as broker:

        def cpu_s() -> float:
            return broker.cpu_s() + store.cpu_s()

        url = f"unix://{data}/socket"
        uvloop.run(fill(data, subjects, groups, with_few=with_few))
        store.settle()
        with contextlib.ExitStack() as workers:
            workers.enter_context(idle_workers(data, patterns, form))
            workers.enter_context(handler_worker(url, 100))
            uvloop.run(wait_for_rest(cpu_s))
            if with_few:
                workers.enter_context(handler_worker(url, 1, "few"))

            async def measured() -> dict[str, float]:
                beside = asyncio.create_task(few_done_s(data, subjects)) if with_few else None
                found = await measure(data, broker, cpu_s, probes, idle_s)
                return found | ({"few_s": await beside} if beside is not None else {})

            return {"subjects": subjects, "patterns": patterns, **uvloop.run(measured())}


def judged(rows: list[dict[str, float]]) -> dict[str, Any]:
    """The rows, and whether the larger ones are as good as the smallest."""
    least = rows[0]
    allowed_ms = max(1.5 * least["p99_ms"], least["p99_ms"] + 5)
    good = all(row["p99_ms"] <= allowed_ms and row["idle_cpu_percent"] <= least["idle_cpu_percent"] + 2 for row in rows)
    return {"good": good, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=STORES)
    arguments = parser.parse_args()
    subjects, patterns, probes, idle_s = SUBJECTS, PATTERNS, PROBES, IDLE_S
    if arguments.quick:
        subjects, patterns, probes, idle_s = (1_000, 20_000), (1, 40_000), 500, 3.0
    bad: list[str] = []
    with limit(7_200):
        for name in (arguments.only,) if arguments.only else STORES:
            beside = partial(one, name, probes, idle_s)
            figures = {
                "by_subjects": judged([beside(subjects=count) for count in subjects]),
                "by_subjects_of_which_few_match": judged([beside(subjects=count, with_few=True) for count in subjects]),
                "by_patterns": judged([beside(patterns=count, groups=FEW_GROUPS) for count in patterns]),
                "by_patterns_of_any_group": judged(
                    [beside(patterns=count, groups=FEW_GROUPS, form=OF_ANY_GROUP) for count in patterns]
                ),
            }
            record(f"isolation_{name}", figures, save=not arguments.quick)
            bad += [f"{name} {what}" for what, found in figures.items() if not found["good"]]
    if bad:
        sys.exit(f"above the bound: {', '.join(bad)}")


if __name__ == "__main__":
    main()
