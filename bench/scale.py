"""How do delay, fairness and upkeep look with thousands of workers, many servers and an hour of load? In the simulator.

    python bench/scale.py              10,000 workers, 20 servers, 1,000 jobs/s, one hour
    python bench/scale.py --quick      50 workers, 3 servers, one minute
    python bench/scale.py --workers 500 --servers 4 --jobs-per-s 50 --minutes 5
    python bench/scale.py --curve      how the delay grows with the load, in smaller worlds

Everything is virtual but the CPU: an hour with 3.6 million jobs takes some tens of minutes of one core. Figures are explained in
docs/operate/scale.md; `--json` writes them to a file.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from _scale_world import (
    BUCKET_S,
    FLOODING,
    GROUPS,
    PATTERNS,
    PRIORITIES,
    USUAL_PRIORITY,
    Load,
    ScaleClient,
    ScaleCoordination,
    ScaleNetwork,
    ScaleStore,
    ScaleWorker,
    ScaleWorld,
    Tally,
)

from tasuki.core.machine import Peer
from tasuki.core.worker.events import WorkerIdentity
from tasuki.testing.sim.nodes import OWN_UID
from tasuki.testing.sim.servers import SimServer
from tasuki.testing.sim.workers import DrawnEndings
from tasuki.testing.sim.world import HostClock, SimOptions

WARM_S = 15.0  # for everybody to connect
LOOK_S = 5.0
PROGRESS_S = 10.0
RETENTION_S = 60.0  # finished jobs are pruned so soon, or millions of them would stand in memory
SERVER_TICK_S = 0.5
LATENCY_S = 0.000_5  # of the network, up to four times that
DOWN_S = 60.0  # how long a server stays away
RACK_SHARE = 0.02  # of the workers die together, with their hosts
FLOOD_S = 30.0
DRAIN_LIMIT_S = 600.0
QUICK = {"workers": 50, "servers": 3, "clients": 4, "jobs_per_s": 5.0, "minutes": 1.0}
CURVE = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
OFFSET_MAX_S = 10_000.0


class ScaleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a large world."""

    seed: int = 1
    servers: int = 20
    workers: int = 10_000
    """Workers with one slot each."""
    clients: int = 40
    jobs_per_s: float = 1_000.0
    minutes: float = 60.0
    load: float = 0.7
    """The share of busy slots, which decides how long the average job takes."""
    disasters: bool = True
    """One server dies, then the leader, then a rack of workers, then one group floods the others."""

    @property
    def virtual_s(self) -> float:
        return self.minutes * 60.0

    @property
    def mean_s(self) -> float:
        return self.load * self.workers / self.jobs_per_s

    def text(self) -> str:
        shape = f"{self.workers} workers, {self.servers} servers, {self.clients} clients, {self.jobs_per_s:g} jobs/s"
        return f"{shape}, {self.load:.0%} load (jobs of {self.mean_s:.1f} s), {self.minutes:g} min, seed {self.seed}"


class Disaster(msgspec.Struct, frozen=True):
    """A disaster: its time, kind and target."""

    at: float
    what: str
    who: str


class ScaleSystem:
    """All processes of a large world."""

    def __init__(self, options: ScaleOptions) -> None:
        self.options = options
        self.world = world = ScaleWorld(options.seed, _sim_options(options), lambda line: None)
        world.leaderships = []
        self.network = ScaleNetwork(world)
        self.storage = ScaleStore(world, self.network)
        self.tally: Tally = self.storage.recorder
        self.load = Load(world.streams, self.tally, options.mean_s)
        self.coordination = ScaleCoordination(world, self.network, self.storage.clock)
        self.coordination.tally = self.tally
        self.servers = [
            SimServer(world, number, self.network, self.storage, self.coordination, self._clock())
            for number in range(1, options.servers + 1)
        ]
        self.coordination.servers = self.servers
        self.workers = [self._worker(number) for number in range(options.workers)]
        self.coordination.workers = {worker.name: worker for worker in self.workers}
        self.clients = [self._client(number) for number in range(options.clients)]
        self.disasters: list[Disaster] = []
        self.queue: list[tuple[float, int, int]] = []
        """Samples: (at, jobs that wait for their first attempt, busy workers)."""

    def _clock(self) -> HostClock:
        return HostClock(self.world, OFFSET_MAX_S * self.world.streams.clocks.random())

    def _worker(self, number: int) -> ScaleWorker:
        name = f"worker-{number}"
        identity = WorkerIdentity(worker_id=name, incarnation="", token="", patterns=PATTERNS[number % len(PATTERNS)], capacity=1)
        peer = Peer("unix", OWN_UID, "unix socket")
        worker = ScaleWorker(self.world, self.network, self.servers, identity, peer, self._clock(), DrawnEndings(self.world))
        worker.load, worker.tally = self.load, self.tally
        return worker

    def _client(self, number: int) -> ScaleClient:
        peer = Peer("unix", OWN_UID, "unix socket")
        client = ScaleClient(self.world, self.network, self.servers, f"client-{number}", peer, "", self._clock())
        client.tally = self.tally
        return client

    # -- running --------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Start the servers, then everybody else; the load begins when they are connected."""
        for server in self.servers:
            server.start()
        self.world.run_until(3.0)
        for worker in self.workers:
            worker.start()
        for client in self.clients:
            client.start()
        self.world.run_until(WARM_S)
        self._arrive("", self.options.jobs_per_s, WARM_S + self.options.virtual_s)
        self._look()
        if self.options.disasters:
            self._plan_disasters()

    def _arrive(self, group: str, rate: float, until: float) -> None:
        world, load, choose, clients = self.world, self.load, self.world.streams.load.choice, self.clients

        def arrive() -> None:
            if world.at < until:
                choose(clients).submit_one(load.spec(world.at, group))
                world.after(load.until_next_s(rate), "arrives", arrive)

        world.after(load.until_next_s(rate), "arrives", arrive)

    def _look(self) -> None:
        busy = sum(1 for worker in self.workers if worker.attempts)
        self.queue.append((self.world.at, len(self.tally.waiting), busy))
        self.world.after(LOOK_S, "looks", self._look)

    # -- disasters ------------------------------------------------------------------------------------------------
    def _plan_disasters(self) -> None:
        plans = ((0.2, self._server_dies), (0.35, self._leader_dies), (0.5, self._rack_dies), (0.65, self._group_floods))
        for share, action in plans:
            self.world.at_time(WARM_S + share * self.options.virtual_s, "disaster", action)

    def _server_dies(self) -> None:
        self._kill(next(server for server in self.servers if not server.leads), "a server is killed")

    def _leader_dies(self) -> None:
        self._kill(next((server for server in self.servers if server.leads), self.servers[0]), "the leader is killed")

    def _kill(self, server: SimServer, what: str) -> None:
        self.disasters.append(Disaster(self.world.at, what, server.name))
        server.crash()
        self.world.after(DOWN_S, "starts again", server.start)

    def _rack_dies(self) -> None:
        rack = self.workers[:: round(1 / RACK_SHARE)]
        self.disasters.append(Disaster(self.world.at, "a rack of workers loses power", f"{len(rack)} workers"))
        for worker in rack:
            worker.crash(silent=True)
            self.world.after(2 * DOWN_S, "starts again", worker.start)

    def _group_floods(self) -> None:
        self.disasters.append(Disaster(self.world.at, "a group floods", FLOODING))
        self._arrive(FLOODING, self.options.jobs_per_s, self.world.at + FLOOD_S)

    # -- the end --------------------------------------------------------------------------------------------------
    @property
    def load_ends(self) -> float:
        return WARM_S + self.options.virtual_s

    @property
    def disaster_free_from(self) -> float:
        """The time from which slots count as filled."""
        return WARM_S + min(60.0, 0.05 * self.options.virtual_s)

    @property
    def disaster_free_until(self) -> float:
        return self.disasters[0].at if self.disasters else self.load_ends

    @property
    def at_rest(self) -> bool:
        return self.tally.accepted == self.tally.submits and not self.tally.unheard


def _sim_options(options: ScaleOptions) -> SimOptions:
    return SimOptions(
        servers=options.servers,
        workers=options.workers,
        clients=options.clients,
        jobs=0,
        tokens=False,
        wire=False,
        kinds=(),
        faults=0,
        tick_s=SERVER_TICK_S,
        lease_ttl_s=15.0,
        lock_ttl_s=10.0,
        retention_s=RETENTION_S,
        latency_s=LATENCY_S,
    )


Progress = Callable[["ScaleSystem", float], None]
"""Told every ten virtual seconds: the world so far, and its CPU time."""


def run_scale(options: ScaleOptions, progress: Progress | None = None) -> dict[str, Any]:
    """Run one world to its end; return the figures as plain data (`text` shows them to people)."""
    begun = time.process_time()
    system = ScaleSystem(options)
    thresholds = gc.get_threshold()
    gc.set_threshold(200_000, 50, 1_000)  # nearly all that lives here lives until the end
    try:
        system.start()
        gc.freeze()
        _run(system, progress, begun)
        return figures(system, time.process_time() - begun)
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        system.storage.close()


def _run(system: ScaleSystem, progress: Progress | None, begun: float) -> None:
    world, end = system.world, system.load_ends
    while world.at < end or (not system.at_rest and world.at < end + DRAIN_LIMIT_S):
        world.run_until(world.at + PROGRESS_S if world.at >= end else min(end, world.at + PROGRESS_S))
        if progress is not None:
            progress(system, time.process_time() - begun)


def run_curve(seed: int = 1, minutes: float = 10.0) -> list[dict[str, Any]]:
    """Return the delay at several loads: the same small world again and again, without disasters."""
    found = []
    for load in CURVE:
        shape = ScaleOptions(seed=seed, servers=4, workers=500, clients=8, jobs_per_s=50.0 * load, load=load, minutes=minutes)
        figures = run_scale(msgspec.structs.replace(shape, disasters=False))
        found.append({"load": load, **figures["delay"]["all"], "busy": figures["busy"]})
    return found


def _show(system: ScaleSystem, cpu_s: float, file: Path | None) -> None:
    """Show the progress, and write the figures so far, because a run may be ended before it is over."""
    tally, at = system.tally, system.world.at - WARM_S
    done = f"{tally.submits} submitted, {tally.ends} ended, {len(tally.waiting)} wait"
    sys.stderr.write(f"{at:7.0f} s virtual, {cpu_s:6.0f} s CPU: {done}\n")
    if file is not None and round(at / PROGRESS_S) % 6 == 0:
        file.write_text(json.dumps(figures(system, cpu_s), indent=1))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    usual = ScaleOptions()
    parser.add_argument("--workers", type=int, default=usual.workers)
    parser.add_argument("--servers", type=int, default=usual.servers)
    parser.add_argument("--clients", type=int, default=usual.clients)
    parser.add_argument("--jobs-per-s", type=float, default=usual.jobs_per_s)
    parser.add_argument("--minutes", type=float, default=usual.minutes, help="of virtual time (default: %(default)g)")
    parser.add_argument("--load", type=float, default=usual.load, help="share of the places kept busy (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--quick", action="store_true", help="a small world for one minute, whatever else is said")
    parser.add_argument("--calm", action="store_true", help="no disasters")
    parser.add_argument("--curve", action="store_true", help="the delay at loads from 50 %% to 95 %%, in worlds of 500 workers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    chosen = vars(parser.parse_args(arguments))
    file, curve, calm, quick = (chosen.pop(name) for name in ("json", "curve", "calm", "quick"))
    if quick:
        chosen |= QUICK
    figures: Any
    if curve:
        figures = run_curve(chosen["seed"])
        shown, good = curve_text(figures), True
    else:
        figures = run_scale(ScaleOptions(**chosen, disasters=not calm), lambda system, cpu_s: _show(system, cpu_s, file))
        shown, good = text(figures), not figures["violations"]
    sys.stdout.write(f"{shown}\n")
    if file is not None:
        file.write_text(json.dumps(figures, indent=1))
    return 0 if good else 1


# ---------------------------------------------------------------------------------------------------- figures

WINDOW_S = 90.0  # what is looked at after a disaster


def figures(system: ScaleSystem, cpu_s: float) -> dict[str, Any]:
    """Return all figures as plain data, in seconds and counts."""
    tally, world, options = system.tally, system.world, system.options
    busy = [count for at, _, count in system.queue if at >= system.disaster_free_from and at < system.load_ends]
    return {
        "world": options.text(),
        "virtual_s": world.at,
        "cpu_s": cpu_s,
        "cpu_ms_per_job": 1000 * cpu_s / max(1, tally.submits),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "events": world.events,
        "jobs": {
            "submitted": tally.submits,
            "accepted": tally.accepted,
            "ended": tally.ends,
            "attempts": tally.starts,
            "fenced": tally.fenced,
            "followed": len(tally.followed),
        },
        "violations": tally.violations() if system.at_rest else [],
        "busy": sum(busy) / max(1, len(busy)) / options.workers,
        "delay": _delays(system),
        "timeline": _timeline(system),
        "disasters": _disasters(system),
        "recovered": percentiles(tally.recovered),
        "leaderships": world.leaderships,
        "workers": percentiles(tally.attempts[worker.name] for worker in system.workers),
        "servers": _servers(system),
        "verbs": dict(tally.verbs),
        "items": dict(tally.items),
        "empty_leases": tally.empty_leases,
        "heartbeats_per_s": tally.heartbeats / world.at,
        "hints_per_s": tally.hints / world.at,
        "hints_heard_per_s": tally.hints_heard / world.at,
        "duties": dict(tally.duties),
    }


def percentiles(values: Iterable[float]) -> dict[str, float]:
    found = sorted(values)
    if not found:
        return {"count": 0, "p5": 0.0, "p50": 0.0, "p95": 0.0, "p99": 0.0, "max": 0.0}
    at = {f"p{percent}": found[min(len(found) - 1, len(found) * percent // 100)] for percent in (5, 50, 95, 99)}
    return {"count": len(found), **at, "max": found[-1]}


def _some(tally: Tally, between: tuple[float, float], group: str | None = None, priority: int | None = None) -> dict[str, float]:
    """Return the delays of jobs submitted between two times, in whole buckets; of one group or priority, if these are named."""
    first, last = (at // BUCKET_S for at in between)
    together = array("f")
    for (bucket, of_group, of_priority), delays in tally.delays.items():
        if first <= bucket < last and group in (None, of_group) and priority in (None, of_priority):
            together.extend(delays)
    return percentiles(together)


def _by_kind(tally: Tally, between: tuple[float, float], priority: int | None = None) -> dict[str, Any]:
    """Return the delays of all jobs, of each group (of one priority, if it is named) and of each priority."""
    return {
        "all": _some(tally, between),
        "groups": {group.name: _some(tally, between, group.name, priority) for group in GROUPS},
        "priorities": {str(priority): _some(tally, between, priority=priority) for priority, _ in PRIORITIES},
    }


def _delays(system: ScaleSystem) -> dict[str, Any]:
    """Return the delays from submit to first start: of the whole, and of the time before the first disaster."""
    calm = (system.disaster_free_from, system.disaster_free_until)
    return {"whole": _some(system.tally, (0.0, system.world.at + BUCKET_S)), **_by_kind(system.tally, calm)}


def _timeline(system: ScaleSystem) -> list[dict[str, float]]:
    """Return for each ten seconds of submits p50, p99 and longest delay, waiting jobs and busy slots."""
    found = []
    for bucket in sorted({key[0] for key in system.tally.delays}):
        at = bucket * BUCKET_S
        looks = [(waiting, busy) for looked_at, waiting, busy in system.queue if looked_at // BUCKET_S == bucket]
        waiting, busy = (max(column) for column in zip(*looks, strict=True)) if looks else (0, 0)
        found.append({"at": at, **_some(system.tally, (at, at + BUCKET_S)), "waiting": waiting, "busy": busy})
    return found


def _disasters(system: ScaleSystem) -> list[dict[str, Any]]:
    """Return the effect of each disaster on jobs submitted between it and the next. Groups are compared within one priority: a
    lower one waits for all of a higher one, whatever its group.
    """
    found = []
    ends = [disaster.at for disaster in system.disasters[1:]] + [system.load_ends]
    for disaster, end in zip(system.disasters, ends, strict=False):  # without any, the end of the load stands alone
        then = (disaster.at, min(end, disaster.at + WINDOW_S))
        longest = max((waiting for at, waiting, _ in system.queue if disaster.at <= at < end), default=0)
        about = {"at": disaster.at, "what": disaster.what, "who": disaster.who, "longest_queue": longest}
        found.append({**about, **_by_kind(system.tally, then, USUAL_PRIORITY)})
    return found


def _servers(system: ScaleSystem) -> dict[str, Any]:
    tally, virtual_s = system.tally, system.world.at
    tallies = [tally.servers[server.name] for server in system.servers]
    sizes = array("I")
    for one in tallies:
        sizes.extend(one.items)
    return {
        "turns_per_s": percentiles(one.turns / virtual_s for one in tallies),
        "items_per_turn": percentiles(sizes),
        "submitted": percentiles(one.submitted for one in tallies),
        "granted": percentiles(one.granted for one in tallies),
        "store_share": percentiles(one.store_s / virtual_s for one in tallies),
        "duty_turns": sum(one.duty_turns for one in tallies),
        "duty_share": sum(one.duty_s for one in tallies) / virtual_s,
    }


# ---------------------------------------------------------------------------------------------------- for people


def text(figures: dict[str, Any]) -> str:
    lines = [
        figures["world"],
        f"{figures['virtual_s']:.0f} s virtual, {figures['cpu_s']:.0f} s CPU ({figures['cpu_ms_per_job']:.3f} ms per job), "
        f"{figures['memory_mb']:.0f} MB, {figures['events']} events; {figures['busy']:.1%} of the places busy",
        f"jobs: {figures['jobs']}",
        f"violations: {figures['violations'] or 'none'}",
        "",
        "delay from submit to first start, ms      count       p50       p95       p99       max",
        _row("whole run", figures["delay"]["whole"]),
        _row("calm time", figures["delay"]["all"]),
        *(_row(f"  group {name}", found) for name, found in figures["delay"]["groups"].items()),
        *(_row(f"  priority {name}", found) for name, found in figures["delay"]["priorities"].items()),
    ]
    for disaster in figures["disasters"]:
        lines.append(_row(f"{disaster['what']} ({disaster['at']:.0f} s)", disaster["all"]))
        lines += [_row(f"  group {name}, priority {USUAL_PRIORITY}", found) for name, found in disaster["groups"].items()]
        lines += [_row(f"  priority {name}", found) for name, found in disaster["priorities"].items()]
        lines.append(f"  longest queue: {disaster['longest_queue']}")
    lines.append(_row("lost with its worker, until it runs again", figures["recovered"]))
    servers = figures["servers"]
    lines += [
        "",
        f"attempts per worker: {_plain(figures['workers'])}",
        f"turns/s per server: {_plain(servers['turns_per_s'])}",
        f"items per turn: {_plain(servers['items_per_turn'])}",
        f"submitted per server: {_plain(servers['submitted'])}",
        f"granted per server: {_plain(servers['granted'])}",
        f"share of the time a server's turn is at the store: {_plain(servers['store_share'])}",
        f"duty turns: {servers['duty_turns']}, at the store for {servers['duty_share']:.1%} of the time; {figures['duties']}",
        f"leaderships: {figures['leaderships']}",
        f"heartbeats/s: {figures['heartbeats_per_s']:.0f}, hints/s: {figures['hints_per_s']:.0f}, "
        f"heard: {figures['hints_heard_per_s']:.0f}",
        f"calls of verbs: {figures['verbs']}",
        f"items in them: {figures['items']}, lease requests that found nothing: {figures['empty_leases']}",
    ]
    return "\n".join(lines)


def _row(name: str, found: dict[str, float]) -> str:
    cells = "".join(f"{1000 * found[column]:10.1f}" for column in ("p50", "p95", "p99", "max"))
    return f"{name:40.40}{found['count']:8}{cells}"


def _plain(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in found.items() if name != "count")


def curve_text(curve: list[dict[str, Any]]) -> str:
    lines = ["load    busy    p50 ms    p95 ms    p99 ms    max ms"]
    for point in curve:
        cells = "".join(f"{1000 * point[name]:10.1f}" for name in ("p50", "p95", "p99", "max"))
        lines.append(f"{point['load']:4.0%}  {point['busy']:6.1%}{cells}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
