"""How many durable no-op jobs per second, from submit to recorded finish? One client, one server, one worker process.

    python bench/throughput.py            our ids, random ids, and the peers on Redis in the same run; recorded
    python bench/throughput.py --quick    a short look, nothing recorded, no peers

SQLite with synchronous=FULL, batches as the client makes them by itself. The clock stops when the client has been told of the
last recorded finish. Peers (Celery, RQ, Dramatiq, Taskiq, Huey on Redis) run in an environment of their own with the same empty
handler; theirs stops at the end of the last handler.
"""

from __future__ import annotations

import argparse
import time
import uuid
from pathlib import Path

import uvloop
from _common import Process, folder, handler_worker, record, server

from tasuki import AsyncClient, JobSpec

CONCURRENCY = 2000


async def one_round(client: AsyncClient, ids: list[str]) -> float:
    began = time.perf_counter()
    specs = [JobSpec(job_id=job_id, subject="bench.noop") for job_id in ids]
    for handle in await client.submit_many(specs):
        await handle.outcome(120)
    return len(ids) / (time.perf_counter() - began)


async def ours(url: str, jobs: int, rounds: int, processes: dict[str, Process]) -> dict[str, object]:
    figures: dict[str, object] = {}
    async with AsyncClient(url) as client:
        await one_round(client, client.new_ids(2000))  # warm
        for name, make in (("our_ids", client.new_ids), ("uuid4_ids", lambda n: [str(uuid.uuid4()) for _ in range(n)])):
            before = {who: process.cpu_s() for who, process in processes.items()}
            rates = [await one_round(client, make(jobs)) for _ in range(rounds)]
            figures[name] = {
                "jobs_per_s": round(max(rates)),
                "rounds": [round(rate) for rate in rates],
                "cpu_us_per_job": {
                    who: round((process.cpu_s() - before[who]) / (jobs * rounds) * 1e6, 1) for who, process in processes.items()
                },
            }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run without peers; nothing is recorded")
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers-venv", default=None, help="where the peers' environment is or is made")
    parser.add_argument("--no-peers", action="store_true")
    arguments = parser.parse_args()
    jobs, rounds = (10_000, 1) if arguments.quick else (arguments.jobs, arguments.rounds)
    with folder() as data, server(data) as broker, handler_worker(f"unix://{data}/socket", CONCURRENCY) as worker:
        figures = uvloop.run(ours(f"unix://{data}/socket", jobs, rounds, {"server": broker, "worker": worker}))
    figures = {"jobs": jobs, "concurrency": CONCURRENCY, **figures}
    if not arguments.quick and not arguments.no_peers:
        figures.update(against_peers(figures, arguments.peers_venv, rounds))
    record("throughput", figures, save=not arguments.quick)


def against_peers(figures: dict[str, object], venv: str | None, rounds: int) -> dict[str, object]:
    from peers.run import fastest, measure_peers

    results = measure_peers(rounds=rounds, **({"venv": Path(venv)} if venv else {}))
    best = fastest(results)
    mine = figures["our_ids"]
    assert isinstance(mine, dict)
    return {
        "peers": {f"{peer.name} ({peer.setting})": round(peer.jobs_per_s) for peer in results},
        "ratio_to_fastest_peer": round(mine["jobs_per_s"] / best.jobs_per_s, 1),
    }


if __name__ == "__main__":
    main()
