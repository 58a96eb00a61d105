"""How long does it take from the end of a leader to the start of the next due run?

    python bench/leadership.py             # five kills and five stops, with the settings' defaults
    python bench/leadership.py --quick

Three nodes of a Django project on PostgreSQL, on three node ids, with the database as coordination and again with Redis. Runs are
enqueued for a time right behind the fault, so that only a leader lets them start. SIGKILL and SIGTERM hit the node that leads.
Recorded: seconds from the signal to the start of the first run that was due behind it.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from _common import record

from tests.support.django_nodes import NodeRig
from tests.support.postgres_service import PostgresService
from tests.support.redis_service import RedisService
from tests.support.waiting import until

GOALS_S = {"SIGKILL": 7.0, "SIGTERM": 1.0}
DUE = """
from datetime import datetime, timedelta, timezone
from tasuki.django import enqueue_command
at = datetime.now(timezone.utc) + timedelta(seconds=2)
print(json.dumps([enqueue_command("probe", "say", not_before=at), at.timestamp()]))
"""


def measured(rig: NodeRig, number: signal.Signals) -> float:
    """Send the leader a signal, and return the seconds until a run starts that was due right behind it."""
    leader = rig.settled()
    job_id, due_at = rig.site.ask(DUE)
    time.sleep(max(0.0, due_at - 0.1 - time.time()))
    ended_at = time.time()
    leader.process.signal(number)
    started = f"SELECT started_at FROM tasuki_jobrun WHERE idempotency_key = '{job_id}' AND started_at IS NOT NULL"
    [(started_at,)] = until(lambda: rig.rows(started), 60.0, "the run starts")
    leader.process.wait(30.0)
    del rig.nodes[leader.name]
    rig.start(leader.name, leader.node_id)
    return float(started_at) - ended_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    times: dict[str, dict[str, list[float]]] = {}
    with PostgresService() as postgres, RedisService() as redis:
        for coordination, url in (("database", ""), ("redis", redis.url())):
            with tempfile.TemporaryDirectory() as folder, NodeRig(Path(folder), postgres, url) as rig:
                for name in ("n1", "n2", "n3"):
                    rig.start(name)
                for number in (signal.SIGKILL, signal.SIGTERM):
                    found = [measured(rig, number) for _ in range(2 if options.quick else 5)]
                    times.setdefault(coordination, {})[number.name] = [round(one, 2) for one in found]
                    shown = f"median {statistics.median(found):.2f} s, most {max(found):.2f} s, goal {GOALS_S[number.name]:g} s"
                    print(f"{coordination:10} {number.name}: {shown}", flush=True)
    record("leadership", {"seconds": times, "goals": GOALS_S}, save=not options.quick)


if __name__ == "__main__":
    main()
