"""Measures other schedulers and task queues of Django projects beside tasuki, for bench/in_django.py.

They live in the peers' environment, as a project of their own (`django_peers/`). Each choice favours the peer: Celery and
APScheduler keep their schedule in memory, django-q2 looks for tasks five times as often as by default. It may touch the
environment's folder, temporary folders, the databases that it is given, and the processes that it starts and stops.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _common import leftover
from _redis import redis_server
from peers.on_postgresql import SETTINGS, measure_procrastinate
from peers.run import DEFAULT_VENV, HERE, ensure_environment, measure_peers, python_of, running_process, stop_group

PROJECT = HERE / "django_peers"
SETTLE_S = 6.0  # after the start of a worker: none of them says when it is ready
PREAMBLE = """
import json, random, time
import django
django.setup()
from django.db import transaction
from django_q.tasks import async_task
from peer_app.jobs import procrastinate_stamped, q_stamped, tasks_db_stamped
from peer_app.models import Order
CALLS = {
    "procrastinate": lambda name: procrastinate_stamped.defer(name=name),
    "django_tasks_db": tasks_db_stamped.enqueue,
    "django_q2": lambda name: async_task(q_stamped, name),
}
"""
WORKERS: Mapping[str, Sequence[str]] = {
    "procrastinate": ("-m", "django", "procrastinate", "worker"),
    "django_tasks_db": ("-m", "django", "db_worker", "--interval", "0.2", "--queue-name", "*"),
    "django_q2": ("-m", "django", "qcluster"),
}


class Peers:
    """The project of the peers on one database and one Redis."""

    def __init__(self, venv: Path, data: Path, postgres_url: str, redis_url: str) -> None:
        self.python = python_of(venv)
        self.data = data
        self.stamps = data / "stamps"
        self.env = {
            **os.environ,
            "DATABASE_URL": postgres_url,
            "PEERS_REDIS_URL": redis_url,
            "DJANGO_SETTINGS_MODULE": "peer_settings",
            "PYTHONPATH": str(PROJECT),
            "BENCH_STAMPS": str(self.stamps),
        }
        self._run(["-m", "django", "migrate", "--verbosity=0"])

    def _run(self, arguments: Sequence[str]) -> str:
        return subprocess.run([self.python, *arguments], env=self.env, check=True, stdout=subprocess.PIPE, text=True).stdout

    def ask(self, code: str) -> Any:
        return json.loads(self._run(["-c", PREAMBLE + code]))

    @contextlib.contextmanager
    def started(self, name: str, *arguments: str, **env: str) -> Iterator[None]:
        command, log = [self.python, *arguments], self.data / f"{name}.log"
        with running_process(command, log, {**self.env, **env}) as process, leftover(process, lambda: stop_group(process)):
            time.sleep(SETTLE_S)
            if process.poll() is not None:
                raise SystemExit(f"{name} ended with {process.returncode}:\n{log.read_text()[-2000:]}")
            yield

    def take_stamps(self) -> dict[str, float]:
        """Return the times of the stamps by name, and forget them."""
        lines = self.stamps.read_text().splitlines() if self.stamps.exists() else []
        self.stamps.unlink(missing_ok=True)
        return {name: float(at) for name, at in map(str.split, lines)}


def measure(postgres_urls: Iterator[str], size: Any, data: Path, figures_ms: Any) -> dict[str, Any]:
    """Return the figures of peers under the names of the parts of bench/in_django.py, but for `due`."""
    with _peers_on(next(postgres_urls), data) as peers:
        figures: dict[str, Any] = {"enqueue": _enqueue(peers, size), "commit": _commit(peers, size, figures_ms)}
    venv = DEFAULT_VENV.absolute()
    rates = [measure_procrastinate(next(postgres_urls), name, venv, seconds=size.peer_s)["jobs_per_s"] for name in SETTINGS]
    celery = measure_peers(["celery"], venv=venv, seconds=size.peer_s, all_settings=True)
    prefork = next(one.jobs_per_s for one in celery if one.setting == "prefork")
    return {**figures, "tasks": {"procrastinate": max(rates), "celery_prefork": round(prefork)}}


def measure_due(postgres_url: str, size: Any, data: Path, lateness: Any, figures_ms: Any) -> dict[str, Any]:
    """Return how late the schedulers among the peers are."""
    with _peers_on(postgres_url, data) as peers:
        return _due(peers, size, lateness, figures_ms)


@contextlib.contextmanager
def _peers_on(postgres_url: str, data: Path) -> Iterator[Peers]:
    ensure_environment(DEFAULT_VENV.absolute(), HERE / "requirements-django.txt")
    with redis_server() as redis:
        yield Peers(DEFAULT_VENV.absolute(), data, postgres_url, redis.url())


def _enqueue(peers: Peers, size: Any) -> dict[str, float]:
    """Return the median of each call inside a transaction, in milliseconds."""
    found = peers.ask(f"""
times = {{name: [] for name in ("create", *CALLS)}}
for number in range({size.enqueues}):
    with transaction.atomic():
        calls = {{"create": lambda name: Order.objects.create(customer="Sato", total=1), **CALLS}}
        Order.objects.exists()  # the driver begins the transaction with the first statement
        for name, call in calls.items():
            began = time.perf_counter()
            call("x")
            times[name].append(time.perf_counter() - began)
        transaction.set_rollback(True)
print(json.dumps(times))
""")
    return {name: round(1e3 * statistics.median(times), 3) for name, times in found.items()}


def _commit(peers: Peers, size: Any, figures_ms: Any) -> dict[str, Any]:
    figures = {}
    for name, worker in WORKERS.items():
        with peers.started(name, *worker):
            committed = peers.ask(f"""
committed = {{}}
for number in range({size.peer_commits}):
    time.sleep(0.3 + 0.4 * random.random())
    with transaction.atomic():
        transaction.on_commit(lambda: committed.update({{f"n{{number}}": time.time()}}))
        CALLS["{name}"](f"n{{number}}")
time.sleep(3)
print(json.dumps(committed))
""")
        stamps = peers.take_stamps()
        figures[name] = figures_ms([stamps[one] - at for one, at in committed.items() if one in stamps])
    return figures


def _due(peers: Peers, size: Any, lateness: Any, figures_ms: Any) -> dict[str, Any]:
    celery = ("-m", "celery", "--app", "celery_app", "worker", "--beat", "--concurrency", "2", "--loglevel", "WARNING")
    schedule = ("--schedule", str(peers.data / "beat"))
    runs = {
        "celery_beat": (celery + schedule, {}),
        "procrastinate": (tuple(WORKERS["procrastinate"]), {"BENCH_PERIODIC": "1"}),
        "apscheduler": ((str(PROJECT / "apscheduler_run.py"),), {}),
    }
    figures = {}
    for name, (command, env) in runs.items():
        with peers.started(name, *command, **env):
            peers.take_stamps()
            time.sleep(size.peer_due_s)
            figures[name] = figures_ms(lateness(peers.take_stamps()))
    with peers.started("django_q2", *WORKERS["django_q2"]):  # once, at a time that was set before
        peers.ask(f"""
from datetime import timedelta
from django.utils import timezone
from django_q.models import Schedule
now = timezone.now()
for number in range(20):
    at = now + timedelta(seconds=5 + number * {size.peer_due_s} / 20)
    arguments = f"'q@{{at.timestamp()}}',"
    Schedule.objects.create(func="peer_app.jobs.q_stamped", args=arguments, schedule_type=Schedule.ONCE, next_run=at)
print("null")
""")
        time.sleep(size.peer_due_s + 45)
    figures["django_q2"] = figures_ms(lateness(peers.take_stamps()))
    return figures
