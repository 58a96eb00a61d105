"""How many durable no-op jobs per second, from submit to recorded finish? One client, one server, one worker process.

    python bench/throughput.py            our ids, random ids, typed tasks, and the peers on Redis in the same run; recorded
    python bench/throughput.py --quick    a short look, nothing recorded, no peers
    python bench/throughput.py --route sticky        the same short look, with a routing policy for the jobs

SQLite with synchronous=FULL, batches as the client makes them by itself. The clock stops when the client has been told of the
last recorded finish. Peers (Celery, RQ, Dramatiq, Taskiq, Huey on Redis) run in an environment of their own with the same empty
handler; theirs stops at the end of the last handler.
"""

from __future__ import annotations

import argparse
import time
import uuid
from pathlib import Path
from typing import Any

import uvloop
from _common import Process, folder, handler_worker, record, server

from tasuki import AsyncClient, JobSpec, Tasks, gather

CONCURRENCY = 2000


async def one_round(client: AsyncClient, ids: list[str], keys: int = 0) -> float:
    began = time.perf_counter()
    routed = ({"route_key": str(number % keys)} if keys else {} for number in range(len(ids)))
    specs = [JobSpec(job_id=job_id, subject="bench.noop", **key) for job_id, key in zip(ids, routed, strict=True)]
    for handle in await client.submit_many(specs):
        await handle.outcome(120)
    return len(ids) / (time.perf_counter() - began)


async def ours(url: str, jobs: int, rounds: int, processes: dict[str, Process], keys: int = 0) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    async with AsyncClient(url) as client:
        await one_round(client, client.new_ids(2000), keys)  # warm
        for name, make in (("our_ids", client.new_ids), ("uuid4_ids", lambda n: [str(uuid.uuid4()) for _ in range(n)])):
            before = {who: process.cpu_s() for who, process in processes.items()}
            rates = [await one_round(client, make(jobs), keys) for _ in range(rounds)]
            figures[name] = {
                "jobs_per_s": round(max(rates)),
                "rounds": [round(rate) for rate in rates],
                "cpu_us_per_job": {
                    who: round((process.cpu_s() - before[who]) / (jobs * rounds) * 1e6, 1) for who, process in processes.items()
                },
            }
    return figures


def typed(url: str, jobs: int, rounds: int, processes: dict[str, Process]) -> dict[str, Any]:
    """Typed tasks with the blocking client: encoded calls, handles, decoded results."""
    tasks = Tasks(url)

    @tasks.task(subject="bench.typed")
    async def typed_noop() -> None: ...

    def one_round(count: int) -> float:
        began = time.perf_counter()
        gather(typed_noop.starmap([()] * count), timeout=120)
        return count / (time.perf_counter() - began)

    with tasks:
        one_round(2000)  # warm
        before = {who: process.cpu_s() for who, process in processes.items()}
        rates = [one_round(jobs) for _ in range(rounds)]
    return {
        "jobs_per_s": round(max(rates)),
        "rounds": [round(rate) for rate in rates],
        "cpu_us_per_job": {
            who: round((process.cpu_s() - before[who]) / (jobs * rounds) * 1e6, 1) for who, process in processes.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run without peers; nothing is recorded")
    parser.add_argument("--route", metavar="POLICY", help="a short run of jobs with this routing policy and 100 keys")
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers-venv", default=None, help="where the peers' environment is or is made")
    parser.add_argument("--no-peers", action="store_true")
    arguments = parser.parse_args()
    is_short, route = arguments.quick or arguments.route, ("--route", f"bench.>={arguments.route}") if arguments.route else ()
    jobs, rounds = (10_000, 1) if is_short else (arguments.jobs, arguments.rounds)
    with folder() as data, server(data, *route) as broker, handler_worker(f"unix://{data}/socket", CONCURRENCY) as worker:
        url, processes = f"unix://{data}/socket", {"server": broker, "worker": worker}
        figures = uvloop.run(ours(url, jobs, rounds, processes, 100 if arguments.route else 0))
        figures["typed_tasks"] = typed(url, jobs, rounds, processes)
    figures["typed_to_raw"] = round(figures["typed_tasks"]["jobs_per_s"] / figures["our_ids"]["jobs_per_s"], 2)
    figures = {"jobs": jobs, "concurrency": CONCURRENCY, **figures}
    if not is_short and not arguments.no_peers:
        figures.update(against_peers(figures, arguments.peers_venv, rounds))
    record("throughput", figures, save=not is_short)


def against_peers(figures: dict[str, Any], venv: str | None, rounds: int) -> dict[str, Any]:
    from peers.run import fastest, measure_peers

    results = measure_peers(rounds=rounds, **({"venv": Path(venv)} if venv else {}))
    best = fastest(results)
    mine, typed_tasks = figures["our_ids"], figures["typed_tasks"]
    dramatiq = max(peer.jobs_per_s for peer in results if peer.name == "dramatiq")
    return {
        "peers": {f"{peer.name} ({peer.setting})": round(peer.jobs_per_s) for peer in results},
        "ratio_to_fastest_peer": round(mine["jobs_per_s"] / best.jobs_per_s, 1),
        "typed_to_dramatiq": round(typed_tasks["jobs_per_s"] / dramatiq, 1),
    }


if __name__ == "__main__":
    main()
