"""What does it cost to run a program as a job: how many per second, and how soon does one start?

    python bench/commands.py            ours, HyperQueue and a bare loop in alternating rounds, then latency; recorded
    python bench/commands.py --quick    a short look, nothing recorded; HyperQueue only with --peers-venv

`/bin/true` through one server and one `tasuki worker` with 2 slots, with the full promise: every submit and every finish durable
(SQLite, synchronous=FULL), a run folder and a log for each job, its result kept as a ZIP. The clock stops when the client has
been told of the last recorded finish. Beside it, in the same run and in turn:

    hyperqueue  the same number of tasks on 2 CPUs, as one job and as many, the best counts; nothing durable, nothing kept
    bare        two threads that start `/bin/true` with posix_spawn and wait for it: what the machine itself can do

Latency is from `submit` to the program's first instruction, at idle; `bare` is from posix_spawn to there.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import statistics
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop
from _common import HERE, Process, folder, limit, percentile, record, server
from peers.run import DEFAULT_VENV

from tasuki import AsyncClient, JobSpec

SLOTS = 2
PROGRAM = "/bin/true"
WARM_UP_JOBS = 100
PAUSE_S = 0.02  # between two jobs whose latency is measured: the system is idle again
TARGETS = {"to_hyperqueue": 1.0, "to_bare": 0.25, "submit_to_start_ms_p50": 4.0}
LIMIT_S = 600.0
QUICK_LIMIT_S = 60.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------------------------------------------- what is measured with


class Programs:
    """The two small programs in C, or what takes their place where nothing compiles them."""

    def __init__(self, place: Path) -> None:
        self.stamp = self._compiled("_stamp.c", place) or "/bin/date +%s%N"
        self.spawn_loop = self._compiled("_spawn_loop.c", place, "-pthread")

    def _compiled(self, source: str, place: Path, *options: str) -> str | None:
        program = place / Path(source).stem.lstrip("_")
        command = ["cc", "-O2", "-static", *options, "-o", str(program), str(HERE / source)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return str(program)


def bare_round(programs: Programs, jobs: int) -> float:
    """Programs per second without anything around them."""
    began = time.perf_counter()
    if programs.spawn_loop is not None:
        subprocess.run([programs.spawn_loop, str(SLOTS), str(jobs), PROGRAM], check=True)
    else:
        threads = [threading.Thread(target=_spawn_and_wait, args=(jobs // SLOTS,)) for _ in range(SLOTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return jobs / (time.perf_counter() - began)


def _spawn_and_wait(count: int) -> None:
    for _ in range(count):
        os.waitpid(os.posix_spawn(PROGRAM, [PROGRAM], os.environ), 0)


def bare_start_ms(programs: Programs, count: int) -> list[float]:
    """From posix_spawn to the program's first instruction."""
    argv = programs.stamp.split()
    times = []
    for _ in range(count):
        read, write = os.pipe()
        began = time.time_ns()
        pid = os.posix_spawn(argv[0], argv, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)])
        os.close(write)
        with os.fdopen(read) as output:
            times.append((int(output.read()) - began) / 1e6)
        os.waitpid(pid, 0)
        time.sleep(PAUSE_S)
    return times


# ---------------------------------------------------------------------------------------------------- ours


@contextmanager
def command_worker(data: Path, stamp: str) -> Iterator[Process]:
    """`tasuki worker` as anybody would start it."""
    allowed = ["--exec", f"true={PROGRAM}", "--exec", f"stamp={stamp}"]
    command = [sys.executable, "-m", "tasuki", "worker", "--to", f"unix://{data}/socket", "--data", str(data)]
    process = Process([*command, "--subject", "bench.>", "--slots", str(SLOTS), *allowed], ready="connected")
    try:
        yield process
    finally:
        process.stop()


class Cpu:
    """CPU time that each process of ours has used since the last look."""

    def __init__(self, broker: Process, worker: Process) -> None:
        self._broker, self._worker = broker, worker
        self._keeper = _child_named(worker.pid, "tasuki-keeper")
        self._before = self._now()

    def since(self) -> dict[str, float]:
        now, before = self._now(), self._before
        self._before = now
        return {who: now[who] - before[who] for who in now}

    def _now(self) -> dict[str, float]:
        own, children = _cpu_s(self._keeper)
        return {
            "client": time.process_time(),
            "server": _cpu_s(self._broker.pid)[0],
            "worker": _cpu_s(self._worker.pid)[0],
            "keeper": own,
            "children": children,
        }


def _cpu_s(pid: int) -> tuple[float, float]:
    """Of a process itself, and of those that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system, children_user, children_system = (int(field) / _TICKS_PER_S for field in fields[11:15])
    return user + system, children_user + children_system


def _child_named(parent: int, name: str) -> int:
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if Path(f"/proc/{child}/comm").read_text().strip() == name:
            return int(child)
    raise SystemExit(f"process {parent} has no child named {name}")


async def our_round(client: AsyncClient, jobs: int) -> float:
    specs = [JobSpec(job_id=job_id, subject="bench.true", exec="true") for job_id in client.new_ids(jobs)]
    began = time.perf_counter()
    handles = await client.submit_many(specs)
    outcomes = [await handle.outcome(120) for handle in handles]
    rate = jobs / (time.perf_counter() - began)
    for ended in outcomes:
        kept = zipfile.ZipFile(io.BytesIO(ended.outcome.result or b"")).namelist()
        if ended.outcome.exit_code != 0 or not {"stdout.log", "stderr.log", "result.json"} <= set(kept):
            raise SystemExit(f"job {ended.job_id} ended with {ended.outcome}")
    return rate


async def start_ms(client: AsyncClient, count: int) -> dict[str, list[float]]:
    """One job after the other, each on an idle system."""
    started, answered = [], []
    for _ in range(count):
        began = time.time_ns()
        handle = await client.submit(subject="bench.stamp", exec="stamp")
        result = await handle.result(30)
        answered.append((time.time_ns() - began) / 1e6)
        started.append((int(zipfile.ZipFile(io.BytesIO(result)).read("stdout.log")) - began) / 1e6)
        await asyncio.sleep(PAUSE_S)
    return {"submit_to_start": started, "submit_to_result": answered}


# ---------------------------------------------------------------------------------------------------- the run


async def measure(data: Path, programs: Programs, size: argparse.Namespace, peer: Callable[[int], Any]) -> dict[str, Any]:
    with server(data) as broker, command_worker(data, programs.stamp) as worker:
        async with AsyncClient(f"unix://{data}/socket") as client:
            await our_round(client, WARM_UP_JOBS)
            await start_ms(client, 5)
            latency = await start_ms(client, size.latency_jobs)
            bare_latency = bare_start_ms(programs, size.latency_jobs)
            ours, bare, peers, used = [], [], [], []
            cpu = Cpu(broker, worker)
            for number in range(size.rounds):
                peers.append(peer(number))
                bare.append(bare_round(programs, size.jobs))
                cpu.since()
                ours.append(await our_round(client, size.jobs))
                used.append(cpu.since())
    return {
        "jobs_per_s": {"ours": _spread(ours), "bare": _spread(bare)},
        "cpu_ms_per_job": {who: round(1e3 * sum(one[who] for one in used) / size.jobs / len(used), 3) for who in used[0]},
        "latency": {**_percentiles(latency), **_percentiles({"bare_spawn_to_start": bare_latency})},
        "peers": [found for found in peers if found],
    }


def _spread(rates: list[float]) -> dict[str, Any]:
    return {"median": round(statistics.median(rates)), "best": round(max(rates)), "rounds": [round(rate) for rate in rates]}


def _percentiles(times_ms: dict[str, list[float]]) -> dict[str, float]:
    shares = {"p50": 0.5, "p99": 0.99}
    return {
        f"{name}_ms_{label}": round(percentile(values, share), 2)
        for name, values in times_ms.items()
        for label, share in shares.items()
    }


def compared(figures: dict[str, Any]) -> dict[str, Any]:
    """The ratios that count, and whether the targets are met. Of the peer's shapes the better one is taken."""
    ours, bare = (figures["jobs_per_s"][who]["median"] for who in ("ours", "bare"))
    found = {"to_bare": round(ours / bare, 2), "submit_to_start_ms_p50": figures["latency"]["submit_to_start_ms_p50"]}
    by_shape: dict[str, list[float]] = {}
    for peer in figures["peers"]:
        by_shape.setdefault(peer["shape"], []).append(peer["jobs_per_s"])
    if by_shape:
        best = max(by_shape, key=lambda shape: statistics.median(by_shape[shape]))
        figures["jobs_per_s"]["hyperqueue"] = {"shape": best, **_spread(by_shape[best])}
        found["to_hyperqueue"] = round(ours / statistics.median(by_shape[best]), 2)
    met = {
        name: found[name] <= TARGETS[name] if name.endswith(("_p50",)) else found[name] >= TARGETS[name]
        for name in TARGETS
        if name in found
    }
    return {"ratios": found, "targets": {name: TARGETS[name] for name in met}, "met": met}


def peer_rounds(venv: Path | None, jobs: int) -> Callable[[int], Any]:
    """Return the function that measures HyperQueue in round `number`, its shapes in turn; without an environment nothing."""
    if venv is None:
        return lambda number: None
    from peers.on_processes import SHAPES, measure_hyperqueue, prepare

    prepare(venv)
    return lambda number: measure_hyperqueue(SHAPES[number % len(SHAPES)], jobs, SLOTS, venv)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run; nothing is recorded")
    parser.add_argument("--jobs", type=int, help="jobs of a round")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--latency-jobs", type=int)
    parser.add_argument("--peers-venv", type=Path, help="where the peers' environment is or is made")
    parser.add_argument("--no-peers", action="store_true")
    size = parser.parse_args()
    size.jobs = size.jobs or (500 if size.quick else 3_000)
    size.rounds = size.rounds or (2 if size.quick else 8)
    size.latency_jobs = size.latency_jobs or (40 if size.quick else 500)
    venv = size.peers_venv or (None if size.quick else DEFAULT_VENV)
    with limit(QUICK_LIMIT_S if size.quick else LIMIT_S), folder() as data:
        peer = peer_rounds(None if size.no_peers else venv, size.jobs)
        figures = uvloop.run(measure(data, Programs(data), size, peer))
    sizes = {"jobs": size.jobs, "rounds": size.rounds, "slots": SLOTS}
    record("commands", {**sizes, **compared(figures), **figures}, save=not size.quick)


if __name__ == "__main__":
    main()
