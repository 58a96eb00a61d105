"""How long does it take from the end of a leader to the start of the next due run, and what does leading cost?

    python bench/leadership.py                        # five kills and stops, with the settings' defaults; ticks
    python bench/leadership.py --quick
    python bench/leadership.py --only database        # or redis, tick; each part is recorded beside the others when it ends

database  Five nodes of a Django project on PostgreSQL, on three node ids, with the database as coordination. Of ten definitions
          one is due each second, and its run is assigned ahead. SIGKILL and SIGTERM hit the node that leads 0.1 s before such a
          time. Recorded: seconds from the signal to the start of the first run that was due behind it.
redis     The same with Redis as coordination.
tick      Fifty nodes and 600 definitions that are due once a minute, ten of them at each second, all assigned ahead. Recorded:
          CPU time of the whole process that leads in each second, in which it looks once or twice at all definitions.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from _common import RESULTS, machine, percentile, record

from tests.django.test_many_nodes import many_nodes
from tests.support.django_nodes import NodeRig
from tests.support.postgres_service import PostgresService
from tests.support.redis_service import RedisService
from tests.support.waiting import until

GOALS = {"SIGKILL_s": 7.0, "SIGTERM_s": 1.0, "tick_cpu_p99_ms": 50.0}
NODE_IDS = ("n1", "n2", "n3", "n1", "n2")
DEFINE = """
from tasuki.django.definitions import apply
entry = {"command_name": "probe", "default_args_json": ["say"], "concurrency_policy": "allow"}
entry["schedule_type"] = "hourly_at_minute"
apply({f"d{second}": {**entry, "schedule_value": str(second)} for second in range(10)}, source="bench")
"""


def measured(rig: NodeRig, number: signal.Signals) -> float:
    """Send the leader a signal, and return the seconds until the first run starts that was due behind it."""
    leader = rig.settled()
    ahead = "state = 'ASSIGNED' AND scheduled_for > extract(epoch FROM clock_timestamp()) + 2"
    next_due = f"SELECT scheduled_for FROM tasuki_jobrun WHERE {ahead} ORDER BY 1 LIMIT 1"
    [(due_at,)] = until(lambda: rig.rows(next_due), 60.0, "runs are assigned ahead")
    time.sleep(max(0.0, due_at - 0.1 - time.time()))
    ended_at = time.time()
    leader.process.signal(number)
    started = f"SELECT started_at FROM tasuki_jobrun WHERE scheduled_for = {due_at} AND started_at IS NOT NULL"
    [(started_at,)] = until(lambda: rig.rows(started), 60.0, "the run starts")
    leader.process.wait(30.0)
    del rig.nodes[leader.name]
    rig.start(leader.name, leader.node_id)
    return float(started_at) - ended_at


def takeover(*, quick: bool, in_redis: bool) -> dict[str, Any]:
    times: dict[str, list[float]] = {}
    with ExitStack() as stack:
        postgres = stack.enter_context(PostgresService())
        url = stack.enter_context(RedisService()).url() if in_redis else ""
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rig = stack.enter_context(NodeRig(folder, postgres, url, SITE_SECONDS="10"))
        for place, node_id in enumerate(NODE_IDS):
            rig.start(f"node-{place}", node_id)
        rig.site.run(DEFINE)
        for number in (signal.SIGKILL, signal.SIGTERM):
            found = times[number.name] = [round(measured(rig, number), 2) for _ in range(2 if quick else 5)]
            goal_s = GOALS[f"{number.name}_s"]
            shown = f"median {statistics.median(found):.2f} s, most {max(found):.2f} s, goal {goal_s:g} s"
            print(f"{'redis' if in_redis else 'database':10} {number.name}: {shown}", flush=True)
    return {"seconds": times}


def tick(*, quick: bool) -> dict[str, Any]:
    nodes, definitions, seconds = (12, 144, 15) if quick else (50, 600, 120)
    with tempfile.TemporaryDirectory() as folder, many_nodes(Path(folder), nodes, definitions, 60) as many:
        leader = until(many.project.leader, 60.0, "a node leads")
        used_ms = []
        for _ in range(seconds):
            before = _cpu_ms(leader.pid)
            time.sleep(1.0)
            used_ms.append(_cpu_ms(leader.pid) - before)
        assert many.project.leader() is leader, "another node leads: measure again"
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    figures = {name: round(percentile(used_ms, share), 1) for name, share in shares.items()}
    print(
        f"tick, {nodes} nodes, {definitions} definitions: {figures} ms of CPU per second, goal p99 {GOALS['tick_cpu_p99_ms']:g}"
    )
    return {"nodes": nodes, "definitions_per_min": definitions, "seconds": seconds, "leader_cpu_ms_per_s": figures}


def _cpu_ms(pid: int) -> float:
    """Return the CPU time of all threads of a process so far; /proc/PID/stat counts in steps of 10 ms."""
    spent_ns = [int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(spent_ns) / 1e6


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "database": partial(takeover, in_redis=False),
    "redis": partial(takeover, in_redis=True),
    "tick": tick,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run; nothing is recorded")
    parser.add_argument("--only", choices=PARTS)
    options = parser.parse_args()
    recorded = RESULTS / "leadership.json"
    figures: dict[str, Any] = json.loads(recorded.read_text()) if recorded.exists() else {}
    figures = {"goals": GOALS, **{name: figures[name] for name in PARTS if name in figures}}
    for name, part in PARTS.items():
        if options.only in (None, name):
            before = {key: value for key, value in machine().items() if key in ("commit", "load_before")}
            figures[name] = {"measured": before, **part(quick=options.quick)}
            record("leadership", figures, save=not options.quick)


if __name__ == "__main__":
    main()
