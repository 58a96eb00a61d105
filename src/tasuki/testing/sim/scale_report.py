"""The figures of a big world: from its counters to plain data, and from these to tables for people."""

from __future__ import annotations

import resource
from array import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tasuki.testing.sim.scale_load import GROUPS, PRIORITIES, USUAL_PRIORITY
from tasuki.testing.sim.scale_tally import BUCKET_S, Tally

if TYPE_CHECKING:
    from tasuki.testing.sim.scale import ScaleSystem

WINDOW_S = 90.0  # what is looked at after a disaster

Key = tuple[int, str, int]


def figures(system: ScaleSystem, cpu_s: float) -> dict[str, Any]:
    """All figures as plain data, in seconds and counts."""
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


def _some(tally: Tally, wanted: Callable[[Key], bool]) -> dict[str, float]:
    together = array("f")
    for key, delays in tally.delays.items():
        if wanted(key):
            together.extend(delays)
    return percentiles(together)


def _delays(system: ScaleSystem) -> dict[str, Any]:
    """From the submit to the first start; apart from the whole, in the calm time before anything befell the world."""
    tally = system.tally
    first, last = int(system.disaster_free_from // BUCKET_S), int(system.disaster_free_until // BUCKET_S)

    def calm(key: Key) -> bool:
        return first <= key[0] < last

    return {
        "whole": _some(tally, lambda key: True),
        "all": _some(tally, calm),
        "groups": {group.name: _some(tally, lambda key, name=group.name: calm(key) and key[1] == name) for group in GROUPS},  # type: ignore[misc]
        "priorities": {
            str(priority): _some(tally, lambda key, band=priority: calm(key) and key[2] == band)  # type: ignore[misc]
            for priority, _ in PRIORITIES
        },
    }


def _timeline(system: ScaleSystem) -> list[dict[str, float]]:
    """Each ten seconds of submits: p50, p99 and the longest delay; how many waited and how many places were busy."""
    found = []
    for bucket in sorted({key[0] for key in system.tally.delays}):
        delays = _some(system.tally, lambda key, bucket=bucket: key[0] == bucket)  # type: ignore[misc]
        looks = [(waiting, busy) for at, waiting, busy in system.queue if int(at // BUCKET_S) == bucket]
        waiting, busy = (max(column) for column in zip(*looks, strict=True)) if looks else (0, 0)
        found.append({"at": bucket * BUCKET_S, **delays, "waiting": waiting, "busy": busy})
    return found


def _disasters(system: ScaleSystem) -> list[dict[str, Any]]:
    """What each did to the jobs that were submitted after it, until the next one. Groups are compared within one priority: a
    lower one waits for all of a higher one, whatever its group."""
    found = []
    ends = [disaster.at for disaster in system.disasters[1:]] + [system.load_ends]
    for disaster, end in zip(system.disasters, ends, strict=False):  # without any, the end of the load stands alone
        until = min(end, disaster.at + WINDOW_S)
        first, last = int(disaster.at // BUCKET_S), int(until // BUCKET_S)

        def then(key: Key, first: int = first, last: int = last) -> bool:
            return first <= key[0] < last

        def some(group: str | None, priority: int | None, then: Callable[[Key], bool] = then) -> dict[str, float]:
            return _some(system.tally, lambda key: then(key) and key[1] == (group or key[1]) and key[2] == (priority or key[2]))

        found.append(
            {
                "at": disaster.at,
                "what": disaster.what,
                "who": disaster.who,
                "all": some(None, None),
                "groups": {group.name: some(group.name, USUAL_PRIORITY) for group in GROUPS},
                "priorities": {str(priority): some(None, priority) for priority, _ in PRIORITIES},
                "longest_queue": max((waiting for at, waiting, _ in system.queue if disaster.at <= at < end), default=0),
            }
        )
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
