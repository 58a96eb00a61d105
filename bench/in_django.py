"""How fast are jobs, tasks and schedules inside a Django project?

    python bench/in_django.py                    everything, with the peers; recorded
    python bench/in_django.py --quick            a short look, nothing recorded, no peers
    python bench/in_django.py --only due,idle    some parts; recorded beside the others

A project (examples/django_site with the app of bench/django_project) on a PostgreSQL of its own, whose fsync is on, and one node:
`manage.py tasuki_worker`. All share the cores of this machine. Parts:

    due      from the nominal time of a definition to the first line of its command. One is due every three seconds: a definition
             is due each minute, so the zones of the bench are some seconds apart.
    due_cluster  due, and the commands of crowd, by five nodes on three node ids, to which runs are assigned ahead.
    crowd    60 definitions due at the same second, with one slot per core; and 60 tasks with the same run_after and 60 slots, in
             processes that have run others before.
    enqueue  `enqueue` in a transaction beside `Model.objects.create` of a row with four columns, in turn; `enqueue_many` of
             1,000 tasks, on PostgreSQL and SQLite.
    commit   from the commit of a transaction to the first line of its task, at idle.
    tasks    empty tasks per second, from the first enqueue to the last recorded end.
    warm     from the grant of a command to its first line, in a fork of the warm interpreter; `python manage.py` beside it.
    idle     connections and CPU time of a node that leads, and of a second one that does not.
    peers    enqueue, commit and tasks for Celery, procrastinate, django-tasks-db and django-q2 (peers/on_django.py).
    peers_due  due for Celery beat, procrastinate, django-q2 and APScheduler.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _common import HERE, RESULTS, Process, folder, limit, machine, percentile, record
from _postgresql import PostgresService, postgresql, settings

EXAMPLE = HERE.parent / "examples" / "django_site"
PROJECT = HERE / "django_project"
CROWD = 60
CLUSTER_NODES, CLUSTER_NODE_IDS = 5, 3
ZONE_STEP_S = 3
LIMIT_S = 2_400.0
QUICK_LIMIT_S = 400.0

PREAMBLE = """
import json, sys, time
from functools import partial
import django
django.setup()
from django.db import connection, transaction
from shop.models import Order
from speed.tasks import empty, stamped
from tasuki.django import enqueue_command, enqueue_many
from tasuki.django.models import JobDefinition, JobRun
"""


class Size:
    """The amount of work."""

    def __init__(self, *, quick: bool) -> None:
        self.due_s = 65.0 if quick else 180.0
        self.crowds = 1 if quick else 2
        self.enqueues = 50 if quick else 1_000
        self.batches = 3 if quick else 15
        self.commits = 20 if quick else 300
        self.tasks = 500 if quick else 10_000
        self.task_rounds = 1 if quick else 3
        self.commands = 10 if quick else 200
        self.cold = 3 if quick else 20
        self.idle_s = 10.0 if quick else 40.0
        self.peer_s = 1.0 if quick else 8.0
        self.peer_commits = 5 if quick else 40
        self.peer_due_s = 12.0 if quick else 45.0


class Site:
    """The project on one database."""

    def __init__(self, data: Path, postgres_url: str = "") -> None:
        self.data = data
        self.stamps = data / "stamps"
        zones = data / "zones"
        for second in range(0, 60, ZONE_STEP_S):
            _write_zone(zones / "Bench" / f"S{second:02d}", second)
        self.env = {
            "DATABASE_URL": postgres_url,
            "SITE_SQLITE": str(data / "site.sqlite3"),
            "DJANGO_SETTINGS_MODULE": "speed_settings",
            "PYTHONPATH": os.pathsep.join(map(str, (PROJECT, EXAMPLE))),
            "PYTHONTZPATH": os.pathsep.join((str(zones), "/usr/share/zoneinfo")),
            "BENCH_STAMPS": str(self.stamps),
        }
        self.manage("migrate", "--verbosity=0")

    def manage(self, *arguments: str) -> None:
        subprocess.run([sys.executable, EXAMPLE / "manage.py", *arguments], env={**os.environ, **self.env}, check=True)

    def ask(self, code: str) -> Any:
        """Run code in a process of the project, and return the JSON that it printed."""
        command = [sys.executable, "-c", PREAMBLE + code]
        done = subprocess.run(command, env={**os.environ, **self.env}, check=True, stdout=subprocess.PIPE)
        return json.loads(done.stdout or "null")

    @contextlib.contextmanager
    def node(self, *arguments: str, node_id: str = "") -> Iterator[Process]:
        command = [sys.executable, str(EXAMPLE / "manage.py"), "tasuki_worker", *arguments]
        process = Process(command, ready="is warm", env={**self.env, **({"TASUKI_NODE_ID": node_id} if node_id else {})})
        try:
            yield process
        finally:
            process.stop()

    def stamped(self) -> dict[str, float]:
        """Return the times of the stamps by name."""
        lines = self.stamps.read_text().splitlines() if self.stamps.exists() else []
        return {name: float(at) for name, at in map(str.split, lines)}

    def wait_for_stamps(self, count: int, timeout_s: float, since: float = 0.0) -> dict[str, float]:
        """Wait until there are so many, with nominal times from `since` on, and forget all."""
        until = time.monotonic() + timeout_s
        while len(found := {name: at for name, at in self.stamped().items() if not since or nominal(name) >= since}) < count:
            if time.monotonic() > until:
                raise SystemExit(f"{len(found)} of {count} stamps within {timeout_s:g} s")
            time.sleep(0.02)
        self.stamps.unlink()
        return found


def _write_zone(file: Path, seconds: int) -> None:
    """Write a time zone so many seconds east of UTC (RFC 8536, version 1)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    name = b"BEN\0"
    head = b"TZif" + bytes(16) + struct.pack(">6I", 0, 0, 0, 0, 1, len(name))
    file.write_bytes(head + struct.pack(">iBB", seconds, 0, 0) + name)


def figures_ms(values: list[float]) -> dict[str, float]:
    """Return the count, and some percentiles of seconds as milliseconds."""
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0} if values else {}
    return {"count": len(values), **{name: round(1e3 * percentile(values, share), 2) for name, share in shares.items()}}


def nominal(name: str) -> float:
    return float(name.rpartition("@")[2])


def lateness(stamps: dict[str, float]) -> list[float]:
    return [at - nominal(name) for name, at in stamps.items()]


# ---------------------------------------------------------------------------------------------------- schedules


def due(service: PostgresService, size: Size, data: Path) -> dict[str, Any]:
    """One definition after the other."""
    with site_on(service, data) as site, site.node():
        return {"first_line_ms": figures_ms(_late_one_by_one(site, size))}


def _late_one_by_one(site: Site, size: Size) -> list[float]:
    site.ask(f"""
for second in range(0, 60, {ZONE_STEP_S}):
    JobDefinition.objects.create(name=f"s{{second}}", command_name="stamped", default_args_json=[f"s{{second}}"],
                                 schedule_type="cron", schedule_value="* * * * *", time_zone=f"Bench/S{{second:02d}}")
""")
    since = time.time() + 2.0  # until the leader has noticed all of them
    time.sleep(size.due_s)
    return lateness({name: at for name, at in site.stamped().items() if nominal(name) >= since})


def due_cluster(service: PostgresService, size: Size, data: Path) -> dict[str, Any]:
    """Return what one node does in `due` and `crowd`, by orders of a leader that only leads."""
    with site_on(service, data) as site, contextlib.ExitStack() as nodes:
        for number in range(CLUSTER_NODES):
            nodes.enter_context(site.node("--grpc", "127.0.0.1:0", node_id=f"n{number % CLUSTER_NODE_IDS + 1}"))
        late = _late_one_by_one(site, size)
        site.ask("JobDefinition.objects.all().delete()")
        site.stamps.unlink()
        return {"first_line_ms": figures_ms(late), "commands_ms": figures_ms(_late_crowd(site, size)), "crowds": size.crowds}


def _late_crowd(site: Site, size: Size) -> list[float]:
    site.ask(f"""
for number in range({CROWD}):
    JobDefinition.objects.create(name=f"c{{number}}", command_name="stamped", default_args_json=[f"c{{number}}"],
                                 schedule_type="cron", schedule_value="* * * * *")
""")
    return [late for _ in range(size.crowds) for late in lateness(site.wait_for_stamps(CROWD, 150.0, since=time.time() + 2.0))]


def crowd(service: PostgresService, size: Size, data: Path) -> dict[str, Any]:
    """Sixty commands of definitions, then sixty tasks, each time at one second."""
    with site_on(service, data) as site:
        with site.node():
            commands = _late_crowd(site, size)
        site.ask("JobDefinition.objects.all().delete()")
        tasks: list[float] = []
        with site.node("--slots", str(CROWD)):
            for number in range(size.crowds + 1):
                at = int(time.time()) + 8  # the process that enqueues has ended by then
                site.ask(f"""
from datetime import UTC, datetime
later = stamped.using(run_after=datetime.fromtimestamp({at}, UTC))
enqueue_many(partial(later.enqueue, f"t{{number}}@{at}") for number in range({CROWD}))
""")
                found = lateness(site.wait_for_stamps(CROWD, 60.0))
                tasks += found if number else []  # the first crowd has made the processes
    return {"commands_ms": figures_ms(commands), "tasks_ms": figures_ms(tasks), "crowds": size.crowds}


# ---------------------------------------------------------------------------------------------------- enqueueing


ENQUEUE = """
create, enqueue = [], []
with transaction.atomic():
    empty.enqueue()  # imports, the connection, the first plan
calls = [(create, lambda: Order.objects.create(customer="Sato", total=1)), (enqueue, empty.enqueue)]
for number in range(ENQUEUES):
    calls.reverse()
    with transaction.atomic():
        Order.objects.exists()  # the driver begins the transaction with the first statement
        for times, call in calls:
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
many, committed = [], []
for number in range(BATCHES):
    began = time.perf_counter()
    with transaction.atomic():
        enqueue_many(partial(stamped.enqueue, str(number)) for number in range(1000))
        many.append(time.perf_counter() - began)
    committed.append(time.perf_counter() - began)
print(json.dumps([create, enqueue, many, committed]))
"""


def enqueueing(service: PostgresService, size: Size, data: Path) -> dict[str, Any]:
    """No node runs: what is measured is what a web process pays."""
    figures: dict[str, Any] = {}
    code = ENQUEUE.replace("ENQUEUES", str(size.enqueues)).replace("BATCHES", str(size.batches))
    (data / "sqlite").mkdir()
    with site_on(service, data) as on_postgresql:
        for name, site in (("postgresql", on_postgresql), ("sqlite", Site(data / "sqlite"))):
            create, enqueue, many, committed = site.ask(code)
            figures[name] = {
                "create_ms": figures_ms(create),
                "enqueue_ms": figures_ms(enqueue),
                "enqueue_to_create": round(statistics.median(enqueue) / statistics.median(create), 2),
                "enqueue_many_1000_ms": round(1e3 * statistics.median(many), 1),
                "with_commit_ms": round(1e3 * statistics.median(committed), 1),
            }
    return figures


def commit(service: PostgresService, size: Size, data: Path) -> dict[str, Any]:
    """One task after the other."""
    with site_on(service, data) as site, site.node():
        committed = site.ask(f"""
import random
committed = {{}}
for number in range({size.commits}):
    time.sleep(0.05 + 0.1 * random.random())
    with transaction.atomic():
        transaction.on_commit(lambda: committed.update({{f"n{{number}}": time.time()}}))  # before the hint
        stamped.enqueue(f"n{{number}}")
print(json.dumps(committed))
""")
        stamps = site.wait_for_stamps(size.commits, 30.0)
    return {"first_line_ms": figures_ms([stamps[name] - at for name, at in committed.items()])}


def tasks(service: PostgresService, size: Size, data: Path) -> dict[str, Any]:
    """Tasks in batches of 1,000, to a node that runs."""
    with site_on(service, data) as site, site.node():
        rates = site.ask(f"""
rates = []
runs = JobRun.objects
for jobs in (500, *[{size.tasks}] * {size.task_rounds}):
    began = time.time()
    for first in range(0, jobs, 1000):
        enqueue_many([empty.enqueue] * min(1000, jobs - first))
    # In this order, since a job that is not ready any more is leased or has ended; both looks have a partial index.
    while runs.filter(ready=1).exists() or runs.filter(lease_expires_at__isnull=False).exists():
        time.sleep(0.05)
    rates.append(jobs / (time.time() - began))
print(json.dumps(rates[1:]))
""")
    return {"tasks": size.tasks, "tasks_per_s": round(statistics.median(rates)), "rounds": list(map(round, rates))}


# ---------------------------------------------------------------------------------------------------- the node


def warm(service: PostgresService, size: Size, data: Path) -> dict[str, Any]:
    """Commands one after the other, and the same command by hand."""
    with site_on(service, data) as site:
        with site.node():
            granted = site.ask(f"""
for number in range({size.commands}):
    job_id = enqueue_command("stamped", f"w{{number}}", job_id=f"w{{number}}")
    while not JobRun.objects.filter(idempotency_key=job_id, finished_at__isnull=False).exists():
        time.sleep(0.02)
rows = JobRun.objects.values_list("idempotency_key", "assigned_at", "created_at")
print(json.dumps({{name: [assigned.timestamp(), created.timestamp()] for name, assigned, created in rows}}))
""")
            stamps = site.wait_for_stamps(size.commands, 30.0)
        cold = []
        for number in range(size.cold):
            began = time.time()
            site.manage("stamped", f"cold{number}")
            cold.append(site.wait_for_stamps(1, 10.0)[f"cold{number}"] - began)
    starts = [stamps[name] - at for name, (at, _) in granted.items()]
    return {
        "granted_to_first_line_ms": figures_ms(starts),
        "enqueued_to_first_line_ms": figures_ms([stamps[name] - at for name, (_, at) in granted.items()]),
        "cold_ms": figures_ms(cold),
        "times_faster": round(statistics.median(cold) / statistics.median(starts), 1),
    }


def idle(service: PostgresService, size: Size, data: Path) -> dict[str, Any]:
    """A node that leads, and one beside it."""
    with site_on(service, data) as site, site.node() as leader:
        time.sleep(10.0)  # what was opened for its start is closed
        first = _connections(service, site)
        with site.node() as other:
            time.sleep(10.0)
            both = _connections(service, site)
            before = leader.cpu_s(), other.cpu_s()
            time.sleep(size.idle_s)
            used = [round(100 * (node.cpu_s() - at) / size.idle_s, 2) for node, at in zip((leader, other), before, strict=True)]
            memory = [round(leader.memory_mb()), round(other.memory_mb())]
    return {
        "leader": {"connections": first, "cpu_percent": used[0], "memory_mb": memory[0]},
        "other": {"connections": both - first, "cpu_percent": used[1], "memory_mb": memory[1]},
    }


def _connections(service: PostgresService, site: Site) -> int:
    statement = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    [[count]] = service.execute(statement, url=site.env["DATABASE_URL"])
    return int(count)


def peers(service: PostgresService, size: Size, data: Path) -> dict[str, Any]:
    from peers.on_django import measure

    return measure(iter(service.empty_database, None), size, data, figures_ms)


def peers_due(service: PostgresService, size: Size, data: Path) -> dict[str, Any]:
    from peers.on_django import measure_due

    return measure_due(service.empty_database(), size, data, lateness, figures_ms)


# ---------------------------------------------------------------------------------------------------- all


PARTS: dict[str, Callable[[PostgresService, Size, Path], dict[str, Any]]] = {
    "due": due,
    "due_cluster": due_cluster,
    "crowd": crowd,
    "enqueue": enqueueing,
    "commit": commit,
    "tasks": tasks,
    "warm": warm,
    "idle": idle,
    "peers": peers,  # last: what they leave behind cannot disturb ours
    "peers_due": peers_due,
}


@contextlib.contextmanager
def site_on(service: PostgresService, data: Path) -> Iterator[Site]:
    url = service.empty_database()
    yield Site(data, url)
    service.drop(url)


def verdict(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the targets and what came of them: at most so much, or (tasks, times faster) at least."""
    most: dict[str, tuple[float, float]] = {}
    least: dict[str, tuple[float, float]] = {}
    for part in ("due", "due_cluster"):
        if part in figures:
            line = figures[part]["first_line_ms"]
            most |= {f"{part}_p50_ms": (20.0, line["p50"]), f"{part}_p99_ms": (100.0, line["p99"])}
    if "crowd" in figures:
        most["crowd_tasks_p99_ms"] = (150.0, figures["crowd"]["tasks_ms"]["p99"])
    for part in ("crowd", "due_cluster"):
        if part in figures and "warm" in figures:
            bound = 1.5 * CROWD * figures["warm"]["granted_to_first_line_ms"]["p50"] / (os.cpu_count() or 1)
            most[f"{part}_commands_max_ms"] = (round(bound), figures[part]["commands_ms"]["max"])
    if "enqueue" in figures:
        most["enqueue_to_create"] = (1.1, figures["enqueue"]["postgresql"]["enqueue_to_create"])
        for name, wanted in (("postgresql", 30.0), ("sqlite", 60.0)):
            most[f"enqueue_many_1000_{name}_ms"] = (wanted, figures["enqueue"][name]["enqueue_many_1000_ms"])
    if "commit" in figures:
        line = figures["commit"]["first_line_ms"]
        most |= {"commit_p50_ms": (10.0, line["p50"]), "commit_p99_ms": (40.0, line["p99"])}
    if "tasks" in figures:
        least["tasks_per_s"] = (1_000.0, figures["tasks"]["tasks_per_s"])
    if "warm" in figures:
        most["warm_p50_ms"] = (15.0, figures["warm"]["granted_to_first_line_ms"]["p50"])
        least["warm_times_faster"] = (10.0, figures["warm"]["times_faster"])
    if "idle" in figures:
        other, leader = figures["idle"]["other"], figures["idle"]["leader"]
        most |= {"idle_connections": (1, other["connections"]), "leader_connections": (3, leader["connections"])}
        most |= {"idle_cpu_percent": (1.0, other["cpu_percent"]), "leader_cpu_percent": (1.0, leader["cpu_percent"])}
    if "peers" in figures and {"enqueue", "tasks"} <= figures.keys():
        theirs, ours = figures["peers"], figures["tasks"]["tasks_per_s"]
        enqueued_ms = figures["enqueue"]["postgresql"]["enqueue_ms"]["p50"]
        least["enqueue_times_procrastinate"] = (1.5, round(theirs["enqueue"]["procrastinate"] / enqueued_ms, 2))
        least["tasks_times_celery_prefork"] = (1.5, round(ours / theirs["tasks"]["celery_prefork"], 2))
        least["tasks_times_procrastinate"] = (3.0, round(ours / theirs["tasks"]["procrastinate"], 2))
    if "peers_due" in figures and "due" in figures:
        durable = min(figures["peers_due"][name]["p50"] for name in ("procrastinate", "django_q2"))
        least["due_times_closer"] = (10.0, round(durable / figures["due"]["first_line_ms"]["p50"], 1))
    found = {name: {"wanted": f"<= {wanted:g}", "got": got, "met": got <= wanted} for name, (wanted, got) in most.items()}
    return found | {name: {"wanted": f">= {wanted:g}", "got": got, "met": got >= wanted} for name, (wanted, got) in least.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short run without the peers; nothing is recorded")
    parser.add_argument("--only", default="", metavar="PART,…", help=f"of {', '.join(PARTS)}")
    options = parser.parse_args()
    quick_parts = [name for name in PARTS if not name.startswith("peers")]
    wanted = options.only.split(",") if options.only else quick_parts if options.quick else [*PARTS]
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    size = Size(quick=options.quick)
    with limit(QUICK_LIMIT_S if options.quick else LIMIT_S), postgresql() as service:
        recorded = RESULTS / "in_django.json"
        earlier = json.loads(recorded.read_text()) if options.only and not options.quick and recorded.exists() else {}
        figures: dict[str, Any] = {**earlier, "postgresql": settings(service)}
        for name, part in PARTS.items():
            if name in wanted:
                before = {key: value for key, value in machine().items() if key in ("commit", "load_before")}
                with folder() as data:
                    figures[name] = {"measured": before, **part(service, size, data)}
        record("in_django", {**figures, "machine": machine(), "targets": verdict(figures)}, save=not options.quick)


if __name__ == "__main__":
    main()
