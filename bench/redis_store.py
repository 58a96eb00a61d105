"""How fast is the Redis store alone? Submit, lease and finish on one connection, without doors or workers.

    python bench/redis_store.py               batches of 1, 16 and 256; recorded
    python bench/redis_store.py --quick       a short look, nothing recorded

One turn is one call of the script: it finishes the batch leased before, submits a batch and leases a batch, as a server does
under load. Rows:

    jobs     of any subject
    app      of the app's own subject, whose keys are a contract with outsiders: status, lease, list, and a TTL
    starts   jobs of any subject, each also reported as started in the turn after its lease (commands are)
    raw      what Redis itself can do: as many jobs per round trip, pipelined without any script, condition or counter: SET of the
             job + LPUSH, then RPOPLPUSH + SET of a lease + GET of the job, then LREM + SET of the result

µs of CPU per job: of this process (Python), and of Redis. Both run at once only for moments, so their sum is the time that a job
takes. Redis has an append-only file that is synced once a second.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import hiredis
from _common import limit, record
from _redis import RedisService, commands, cpu_s, redis_server, settings
from store import SUBJECT

from tasuki.core.job import IdMaker, JobSpec, Outcome, State, body_hash
from tasuki.core.store_messages import Grant, HeldLease, LeaseRequest, Report, Submission, Turn
from tasuki.stores.batching import execute
from tasuki.stores.redis.store import RedisStore

APP = "zpe"
OWN_SUBJECT = f"job.assign.{APP}"
BATCHES = (1, 16, 256)
FULL_BATCH = 256
TARGET_JOBS_PER_S = 15_000
PAYLOAD = b"7"
OUTCOME = Outcome(result=b"49", result_sha256="ab" * 32)
WARM_UP_S = 0.2
RECEIVED_BYTES = 1 << 20
LIMIT_S = 110.0

Step = Callable[[], int]
"""One round trip; how many jobs it ended."""


def turns(store: RedisStore, batch: int, subject: str, new_ids: IdMaker, *, starts: bool = False) -> tuple[Step, Step]:
    """Return the function that makes the next turn, which is not measured, and the one that does it."""
    request = LeaseRequest(worker_id="w1", incarnation="w1/1", patterns=(subject,), limit=batch)
    leased: list[Grant] = []
    started: list[Grant] = []
    turn = Turn()

    def prepare() -> int:
        nonlocal turn
        specs = [JobSpec(job_id=job_id, subject=subject, payload=PAYLOAD) for job_id in new_ids.many(batch)]
        ended = started if starts else leased
        turn = Turn(
            finish=[Report(grant.job_id, "w1", grant.lease_id, grant.attempt, OUTCOME, 1.7e9) for grant in ended],
            start=[HeldLease(grant.job_id, "w1", "w1/1", grant.lease_id, grant.attempt) for grant in leased] if starts else [],
            submit=[Submission(spec, "client:bench", body_hash(spec)) for spec in specs],
            lease=[request],
        )
        return 0

    def do() -> int:
        nonlocal leased, started
        answers = execute(store, turn)
        assert all(answer.state is State.SUCCEEDED for answer in answers.finish)
        started, [leased] = leased, answers.lease
        assert len(leased) == batch
        return len(answers.finish)

    return prepare, do


def raw(connection: socket.socket, batch: int, new_ids: IdMaker) -> tuple[Step, Step]:
    """Return steps of as many round trips and the least that must be written, without a rule, and without a client library."""
    spec, lease = b"s" * 200, b"r" * 150  # as long as those of the store
    reader = hiredis.Reader()
    before: list[bytes] = []
    fresh: list[bytes] = []

    def prepare() -> int:
        nonlocal fresh
        fresh = [job_id.encode() for job_id in new_ids.many(batch)]
        return 0

    def do() -> int:
        nonlocal before
        wanted = [
            part
            for job_id in before
            for part in ((b"LREM", b"raw:leased", b"1", job_id), (b"SET", b"raw:result:" + job_id, b"49"))
        ]
        wanted += [part for job_id in fresh for part in ((b"SET", b"raw:job:" + job_id, spec), (b"LPUSH", b"raw:queue", job_id))]
        for job_id in fresh:
            wanted += (
                (b"RPOPLPUSH", b"raw:queue", b"raw:leased"),
                (b"SET", b"raw:lease:" + job_id, lease),
                (b"GET", b"raw:job:" + job_id),
            )
        connection.sendall(b"".join(map(hiredis.pack_command, wanted)))
        answers: list[bytes] = []
        while len(answers) < len(wanted):
            while (answer := reader.gets()) is False:
                reader.feed(connection.recv(RECEIVED_BYTES))
            answers.append(answer)
        ended, before = len(before), answers[-3 * batch :: 3]
        return ended

    return prepare, do


def measure(service: RedisService, steps: tuple[Step, Step], enough_s: float) -> dict[str, float]:
    """Jobs per second of what is measured, and who computed how long for one."""
    prepare, do = steps
    for_warmth = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < for_warmth:
        prepare()
        do()
    done, wall, cpu, redis_before = 0, 0.0, 0.0, cpu_s(service)
    called_before = sum(commands(service).values())
    while wall < enough_s:
        prepare()
        wall_0, cpu_0 = time.perf_counter(), time.thread_time()
        done += do()
        wall += time.perf_counter() - wall_0
        cpu += time.thread_time() - cpu_0
    return {
        "jobs": done,
        "jobs_per_s": round(done / wall),
        "python_us_per_job": round(cpu / done * 1e6, 1),
        "redis_us_per_job": round((cpu_s(service) - redis_before) / done * 1e6, 1),
        "commands_per_job": round((sum(commands(service).values()) - called_before) / done, 2),
    }


def all_rows(service: RedisService, enough_s: float, batches: tuple[int, ...]) -> dict[str, Any]:
    rows = []
    new_ids = IdMaker(lambda: time.time_ns() // 1_000_000, os.urandom)
    store = RedisStore.open(service.url(), app=APP)
    try:
        for batch in batches:
            rows.append({"row": "jobs", "batch": batch, **measure(service, turns(store, batch, SUBJECT, new_ids), enough_s)})
        for name, subject, starts in (("app", OWN_SUBJECT, False), ("starts", SUBJECT, True)):
            steps = turns(store, FULL_BATCH, subject, new_ids, starts=starts)
            rows.append({"row": name, "batch": FULL_BATCH, **measure(service, steps, enough_s)})
    finally:
        store.close()
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        limit_of_redis = measure(service, raw(connection, FULL_BATCH, new_ids), enough_s)
    rows.append({"row": "raw", "batch": FULL_BATCH, **limit_of_redis})
    full = next(row for row in rows if row["row"] == "jobs" and row["batch"] == FULL_BATCH)
    return {
        "rows": rows,
        "share_of_raw": round(full["jobs_per_s"] / limit_of_redis["jobs_per_s"], 2),
        "target_jobs_per_s": TARGET_JOBS_PER_S,
        "target_met": full["jobs_per_s"] >= TARGET_JOBS_PER_S,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run; nothing is recorded")
    arguments = parser.parse_args()
    enough_s, batches = (0.5, (FULL_BATCH,)) if arguments.quick else (5.0, BATCHES)
    with limit(LIMIT_S), redis_server() as service:
        figures = {"settings": settings(service), **all_rows(service, enough_s, batches)}
    record("redis_store", figures, save=not arguments.quick)


if __name__ == "__main__":
    main()
