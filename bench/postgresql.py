"""How fast is tasuki on PostgreSQL, alone and with several servers on one database?

    python bench/postgresql.py                     everything, Procrastinate on the same PostgreSQL included; recorded
    python bench/postgresql.py --quick             a short look, nothing recorded, no peer
    python bench/postgresql.py --only snapshot     some parts (several: store,pairs); recorded under their names

A PostgreSQL of its own, from the wheel, on this machine: its processes share the cores with all others. fsync and
synchronous_commit are on. Parts:

    store    the store alone on one connection: submit, lease and finish in one transaction per turn, batches of 1, 16 and 256.
             Beside it `raw`: an INSERT and two UPDATEs of as many rows with arrays, on a table with the same columns, without any
             condition, index (but the key) or counter. `waits_per_turn` is how often a turn waits for PostgreSQL.
    broker   one client, one server, one worker process, as bench/throughput.py does it.
    peer     Procrastinate: async worker, empty task, jobs deferred in batches; the best of several settings counts.
    pairs    two clients and two workers on one server, and on two servers of one database, in turn.
    snapshot the same while another connection holds an old snapshot, round after round, until 500,000 jobs are done under it: the
             rate of the last rounds against the rounds before the snapshot, and how large table and indexes became.
    latency  from a submit to the start of its handler at idle: all on one server; client and worker on two (the hint path).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import uvloop
from _common import folder, handler_worker, limit, percentile, record, server
from _postgresql import PostgresService, cpu_s, postgresql, raw_commits_ms, settings, table_of
from latency import measure as measure_latency
from store import SUBJECT, ids
from store import measure as measure_store
from throughput import CONCURRENCY, one_round

from tasuki import AsyncClient, JobSpec
from tasuki.core.job import Outcome, body_hash
from tasuki.core.store_messages import LeaseRequest, Report, Submission
from tasuki.stores.sql.rows import encode_spec
from tasuki.stores.sql.store import SqlStore

BATCHES = (1, 16, 256)
FULL_BATCH = 256
WARM_UP_JOBS = 2_000
COUNTED_TURNS = 20
TARGETS = {"store_jobs_per_s": 6_000.0, "broker_jobs_per_s": 5_000.0, "two_servers_to_one": 0.9, "snapshot_to_plain": 0.8}
LIMIT_S = 1_500.0
QUICK_LIMIT_S = 120.0


class Size:
    """The amount of work."""

    def __init__(self, *, quick: bool) -> None:
        self.store_s = 0.7 if quick else 5.0
        self.jobs = 3_000 if quick else 50_000
        self.rounds = 1 if quick else 3
        self.pair_rounds = 1 if quick else 6
        self.peer_s = 1.0 if quick else 10.0
        self.snapshot_rounds = 4 if quick else 10  # of `jobs`
        self.latency_jobs = 60 if quick else 1_000


# ---------------------------------------------------------------------------------------------------- the store alone


def store_alone(service: PostgresService, size: Size) -> dict[str, Any]:
    """Jobs per second through the verbs, and what PostgreSQL itself could do."""
    with opened_store(service) as (store, url):
        new_ids = ids("ordered")
        rows = [{"batch": batch, **cpu_of(service, store, batch, new_ids, size.store_s)} for batch in BATCHES]
        waits = waits_per_turn(store, FULL_BATCH, new_ids)
        table = table_of(service, url)
    raw = raw_limit(service, FULL_BATCH, size.store_s)
    best = rows[-1]["jobs_per_s"]
    return {"rows": rows, "waits_per_turn": waits, "table": table, "raw": raw, "share_of_raw": round(best / raw["jobs_per_s"], 2)}


@contextlib.contextmanager
def opened_store(service: PostgresService) -> Iterator[tuple[SqlStore, str]]:
    url = service.database()
    store = SqlStore.open_postgresql(url)
    try:
        yield store, url
    finally:
        store.close()
        service.drop(url)


def cpu_of(service: PostgresService, store: SqlStore, batch: int, new_ids: Iterator[str], enough_s: float) -> dict[str, float]:
    """With what PostgreSQL computed meanwhile; its checkpoints and its autovacuum included."""
    measure_store(store, batch, new_ids, enough_s / 5)  # statements are prepared, pages are in memory
    before = cpu_s(service)
    row = measure_store(store, batch, new_ids, enough_s)
    return {**row, "postgresql_cpu_us_per_job": round((cpu_s(service) - before) / row["jobs"] * 1e6, 1)}


def waits_per_turn(store: SqlStore, batch: int, new_ids: Iterator[str]) -> float:
    """Return how often the driver waits for an answer in one turn under load; counted apart, since counting costs."""
    waits = 0
    original = psycopg.Connection.wait

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal waits
        waits += 1
        return original(self, *arguments, **options)

    request = LeaseRequest(worker_id="w1", incarnation="w1/1", patterns=("math.>",), limit=batch)
    grants: list[Any] = []
    psycopg.Connection.wait = counted  # type: ignore[method-assign]
    try:
        for number in range(COUNTED_TURNS + 1):
            waits = 0 if number == 1 else waits  # the first has nothing to finish
            specs = [JobSpec(job_id=next(new_ids), subject=SUBJECT, payload=b"7") for _ in range(batch)]
            reports = [Report(grant.job_id, "w1", grant.lease_id, grant.attempt, Outcome(result=b"49")) for grant in grants]
            with store.turn():
                store.finish(reports)
                store.submit([Submission(spec, "client:bench", body_hash(spec)) for spec in specs])
                [grants] = store.lease([request])
    finally:
        psycopg.Connection.wait = original  # type: ignore[method-assign]
    store.finish([Report(grant.job_id, "w1", grant.lease_id, grant.attempt, Outcome()) for grant in grants])
    return waits / COUNTED_TURNS


RAW_TABLE = "CREATE TABLE raw (LIKE tasuki_jobrun INCLUDING DEFAULTS, PRIMARY KEY (id))"
RAW_INSERT = """
INSERT INTO raw (id, created_at, idempotency_key, subject, "group", submitter, body_hash, spec)
SELECT id, 1.7e9, key, 'math.square', 'math', 'client:bench', hash, spec
FROM unnest(%s::bigint[], %s::text[], %s::bytea[], %s::bytea[]) AS row (id, key, hash, spec)
"""
RAW_LEASE = """
UPDATE raw SET state = 'ASSIGNED', ready = 0, attempt = 1, version = 1, lease_id = row.lease, assigned_worker_id = 'w1',
    incarnation = 'w1/1', lease_expires_at = 1.7e9, assigned_at = 1.7e9
FROM unnest(%s::bigint[], %s::text[]) AS row (id, lease) WHERE raw.id = row.id RETURNING raw.id, spec
"""
RAW_FINISH = """
UPDATE raw SET state = 'SUCCEEDED', version = 2, lease_expires_at = NULL, started_at = 1.7e9, finished_at = 1.7e9,
    result = row.result, result_sha256 = row.sha256, result_size_bytes = 2
FROM unnest(%s::bigint[], %s::bytea[], %s::text[]) AS row (id, result, sha256) WHERE raw.id = row.id RETURNING raw.id
"""


def raw_limit(service: PostgresService, batch: int, enough_s: float) -> dict[str, float]:
    """Measure the same rows through bare statements."""
    url = service.database()
    new_ids = ids("ordered")
    spec = JobSpec(job_id="x" * 36, subject=SUBJECT, payload=b"7")
    hashes, specs = [body_hash(spec)] * batch, [encode_spec(spec)] * batch
    results, sha256s, leases = [b"49"] * batch, ["ab" * 32] * batch, ["ab" * 16 + ".1"] * batch
    done, wall = 0, 0.0
    last: list[int] = []
    with service.connect(url) as connection:
        connection.execute(RAW_TABLE)
        while wall < enough_s:
            rows = list(range(done + 1, done + batch + 1))
            keys = [next(new_ids) for _ in rows]
            began = time.perf_counter()
            with connection.transaction():
                connection.execute(RAW_FINISH, (last, results[: len(last)], sha256s[: len(last)]), prepare=True)
                connection.execute(RAW_INSERT, (rows, keys, hashes, specs), prepare=True)
                leased = connection.execute(RAW_LEASE, (rows, leases), prepare=True).fetchall()
            wall += time.perf_counter() - began
            assert len(leased) == batch
            done, last = done + batch, rows
    service.drop(url)
    return {"batch": batch, "jobs_per_s": round(done / wall), "turn_ms": round(wall / done * batch * 1e3, 2)}


# ---------------------------------------------------------------------------------------------------- with servers


def broker(service: PostgresService, size: Size) -> dict[str, Any]:
    """Client, server, worker; the clock stops when the client has heard of the last recorded finish."""
    url = service.database()
    with folder() as data, server(data, store=url) as process, handler_worker(f"unix://{data}/socket", CONCURRENCY) as worker:

        async def rounds() -> list[float]:
            async with AsyncClient(f"unix://{data}/socket") as client:
                await one_round(client, client.new_ids(WARM_UP_JOBS))
                return [await one_round(client, client.new_ids(size.jobs)) for _ in range(size.rounds)]

        meters: dict[str, Callable[[], float]] = {
            "server": process.cpu_s,
            "worker": worker.cpu_s,
            "postgresql": lambda: cpu_s(service),
        }
        before = {name: meter() for name, meter in meters.items()}
        rates = uvloop.run(rounds())
        jobs = WARM_UP_JOBS + size.jobs * size.rounds
        cpu = {name: round((meter() - before[name]) / jobs * 1e6, 1) for name, meter in meters.items()}
        figures = {"jobs_per_s": round(max(rates)), "rounds": list(map(round, rates)), "cpu_us_per_job": cpu}
    figures["table"] = table_of(service, url)
    service.drop(url)
    return figures


def pairs(service: PostgresService, size: Size) -> dict[str, Any]:
    """Measure two clients and two workers on one server and on two, alternating: what else goes on hits both alike."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    for number in range(size.pair_rounds):
        for servers in (1, 2) if number % 2 == 0 else (2, 1):
            rates[servers].append(two_pairs(service, servers, size.jobs))
    one, two = (statistics.median(measured) for measured in rates.values())
    return {
        "one_server": list(map(round, rates[1])),
        "two_servers": list(map(round, rates[2])),
        "two_servers_to_one": round(two / one, 2),
    }


def two_pairs(service: PostgresService, servers: int, jobs: int) -> float:
    """Jobs per second of both pairs together."""
    url = service.database()
    with contextlib.ExitStack() as running:
        folders = [running.enter_context(folder()) for _ in range(servers)]
        for data in folders:
            running.enter_context(server(data, store=url))
        places = [f"unix://{folders[number % servers]}/socket" for number in range(2)]
        for place in places:
            running.enter_context(handler_worker(place, CONCURRENCY // 2))
        rate = uvloop.run(both(places, jobs // 2))
    service.drop(url)
    return rate


async def both(places: list[str], jobs: int) -> float:
    async with AsyncClient(places[0]) as first, AsyncClient(places[1]) as second:
        clients = (first, second)
        await asyncio.gather(*(one_round(client, client.new_ids(WARM_UP_JOBS)) for client in clients))
        began = time.perf_counter()
        await asyncio.gather(*(one_round(client, client.new_ids(jobs)) for client in clients))
        return 2 * jobs / (time.perf_counter() - began)


def snapshot(service: PostgresService, size: Size) -> dict[str, Any]:
    """Jobs per second before somebody holds a snapshot, under it, and after its release."""
    url = service.database()
    with folder() as data, server(data, store=url), handler_worker(f"unix://{data}/socket", CONCURRENCY):

        async def rounds(count: int) -> list[float]:
            async with AsyncClient(f"unix://{data}/socket") as client:
                return [await one_round(client, client.new_ids(size.jobs)) for _ in range(count)]

        uvloop.run(rounds(1))
        plain = uvloop.run(rounds(size.rounds))
        with service.connect(url) as connection, connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            connection.execute("SELECT count(*) FROM tasuki_jobrun")
            held = uvloop.run(rounds(size.snapshot_rounds))
            table = table_of(service, url)
            sizes = service.execute(
                "SELECT indexrelname, pg_relation_size(indexrelid) / 1048576 FROM pg_stat_user_indexes"
                " WHERE relname = 'tasuki_jobrun'",
                url=url,
            )
        released = uvloop.run(rounds(size.rounds))
    service.drop(url)
    return {
        "plain": list(map(round, plain)),
        "snapshot": list(map(round, held)),
        "released": list(map(round, released)),
        "snapshot_to_plain": round(statistics.median(held[-size.rounds :]) / statistics.median(plain), 2),
        "table": {**table, "indexes_mb": {name: int(mb) for name, mb in sizes}},
    }


def latency(service: PostgresService, size: Size) -> dict[str, Any]:
    """One job after the other, with nothing else going on."""
    url = service.database()
    floor = raw_commits_ms(service, size.latency_jobs)
    with folder() as near, folder() as far, server(near, store=url):
        with handler_worker(f"unix://{near}/socket", 10):
            same = uvloop.run(measure_latency(f"unix://{near}/socket", size.latency_jobs))
        with server(far, store=url), handler_worker(f"unix://{far}/socket", 10):
            other = uvloop.run(measure_latency(f"unix://{near}/socket", size.latency_jobs))
    service.drop(url)
    return {
        "one_server": same,
        "client_and_worker_on_two": other,
        "raw_commit_ms_p50": round(percentile(floor, 0.5), 2),
        "raw_commit_ms_p99": round(percentile(floor, 0.99), 2),
    }


# ---------------------------------------------------------------------------------------------------- the peer


def peer(service: PostgresService, size: Size, venv: Path | None) -> dict[str, Any]:
    """Procrastinate, on the same PostgreSQL, in a database of its own."""
    from peers.on_postgresql import DEFAULT_VENV, SETTINGS, measure_procrastinate

    results = []
    for setting in SETTINGS:
        url = service.empty_database()
        results.append(measure_procrastinate(url, setting, venv or DEFAULT_VENV, seconds=size.peer_s))
        service.drop(url)
    best = max(results, key=lambda result: result["jobs_per_s"])
    return {"procrastinate": best, "settings": {result["setting"]: result["jobs_per_s"] for result in results}}


# ---------------------------------------------------------------------------------------------------- all


PARTS: dict[str, Callable[[PostgresService, Size], dict[str, Any]]] = {
    "store": store_alone,
    "broker": broker,
    "pairs": pairs,
    "snapshot": snapshot,
    "latency": latency,
}


def verdict(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the targets and what came of them."""
    got: dict[str, float] = {}
    if "store" in figures:
        got["store_jobs_per_s"] = figures["store"]["rows"][-1]["jobs_per_s"]
    if "broker" in figures:
        got["broker_jobs_per_s"] = figures["broker"]["jobs_per_s"]
    if "pairs" in figures:
        got["two_servers_to_one"] = figures["pairs"]["two_servers_to_one"]
    if "snapshot" in figures:
        got["snapshot_to_plain"] = figures["snapshot"]["snapshot_to_plain"]
    return {name: {"wanted": TARGETS[name], "got": value, "met": value >= TARGETS[name]} for name, value in got.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run without the peer; nothing is recorded")
    parser.add_argument("--only", default="", metavar="PART,…", help=f"of {', '.join((*PARTS, 'peer'))}")
    parser.add_argument("--peers-venv", type=Path, default=None, help="where the peers' environment is or is made")
    parser.add_argument("--no-peers", action="store_true")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else [*PARTS, "peer"]
    if unknown := set(wanted) - {*PARTS, "peer"}:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    if options.no_peers or (options.quick and not options.only):
        wanted = [name for name in wanted if name != "peer"]
    size = Size(quick=options.quick)
    with limit(QUICK_LIMIT_S if options.quick else LIMIT_S), postgresql() as service:
        figures: dict[str, Any] = {"postgresql": settings(service), "jobs": size.jobs, "concurrency": CONCURRENCY}
        if "peer" in wanted:  # first: if its environment cannot be made, that is known soon
            figures["peer"] = peer(service, size, options.peers_venv)
        for name, part in PARTS.items():
            if name in wanted:
                figures[name] = part(service, size)
        if {"peer", "broker"} <= figures.keys():
            ratio = figures["broker"]["jobs_per_s"] / figures["peer"]["procrastinate"]["jobs_per_s"]
            figures["broker_to_peer"] = round(ratio, 1)
        name = "_".join(("postgresql", *(wanted if options.only else ())))
        record(name, {**figures, "targets": verdict(figures)}, save=not options.quick)


if __name__ == "__main__":
    main()
