"""Are the operations screens quick beside a long history, and what do they cost the jobs? 5,000,000 finished and 100,000 queued.

    python bench/screens.py                      SQLite and PostgreSQL: half an hour and 10 GB of disk; recorded
    python bench/screens.py --only postgresql    one of them; recorded under its name
    python bench/screens.py --quick              a hundredth of it, nothing recorded; --share 25: another share

On each database the same jobs are first those of a server, then those of a Django project (the example's, in uvicorn), with a
week of rollups. Each screen is asked for as a browser does, one after the other; `first` is the first time in a new process. Then
the throughput of new jobs, of a project of empty tasks, is measured in turns, without anybody and with two people who have the
overview and the list of jobs open.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import uvloop
from _common import Process, folder, handler_worker, limit, percentile, record, server
from _postgresql import PostgresService, postgresql
from history import CONCURRENCY, new_jobs
from in_django import Site
from store import FINISHED, LOAD, counters, load, load_values

from tasuki import AsyncClient, Client
from tasuki.core.statistics import ROLLUP_S, GroupStatistics, QueueLength, Rollup, current_minute
from tasuki.stores.sql.store import SqlStore

STORES = ("sqlite", "postgresql")
QUEUED = 100_000
FAILED_EVERY = 1_000
WEEK_S = 7 * 86_400
GROUPS = 20
DEFINITIONS = 100
ENTRIES = 10_000
ASKS = 40
ROUNDS = 5
POLL_S = 1.5  # as ops.js
LIMIT_S = 7_200.0
COMMON = (
    *("", "?span=24h", "?span=7d", "jobs/", "jobs/?state=PENDING", "jobs/?state=FAILED", "jobs/?state=RUNNING"),
    *("jobs/?subject=math.>", "jobs/?text=nowhere", "jobs/?within=1h", "jobs/?worker=nobody", "jobs/{job}/"),
    *("run/", "dead/", "workers/", "subjects/", "subjects/?subject=math.square", "audit/"),
)
OF_SERVERS = ("tokens/", "caches/")
OF_PROJECTS = ("definitions/", "definitions/1/", "definitions/new/", "events/", "settings/")
TARGETS = {"p95_ms_max": 150.0, "cost_percent": 3.0}
PASSWORD = "a long password"
PREPARE = f"""
from django.contrib.auth.models import User
from tasuki.django.models import AdminActionLog, Event, LogChunk
from tasuki.django.logs import write_log
User.objects.create_superuser("bench", password="{PASSWORD}")
JobDefinition.objects.bulk_create(JobDefinition(name=f"nightly-{{number}}", command_name="stamped", schedule_type="daily_at",
    schedule_value="02:30", time_zone="Europe/Berlin") for number in range({DEFINITIONS}))
at = time.time() - 3600.0
Event.objects.bulk_create(Event(event_type="order.paid", payload_json={{"order": number}}, created_at=at, processed_at=at)
                          for number in range({ENTRIES}))
AdminActionLog.objects.bulk_create(AdminActionLog(at=at, actor="bench", action="run.cancel", target=str(number))
                                   for number in range({ENTRIES}))
job_id = enqueue_command("stamped", "once")
write_log(job_id, 1, "stdout", b"a line of text\\n" * 5000)
print(json.dumps(job_id))
"""
RATE = """
from tasuki.django.enqueueing import project_store

def succeeded():
    return sum(counts.succeeded for counts in project_store().counts().values())

before, began = succeeded(), time.time()
for first in range(0, JOBS, 1000):
    enqueue_many([empty.enqueue] * min(1000, JOBS - first))
while succeeded() - before < JOBS:
    time.sleep(0.02)
print(JOBS / (time.time() - began))
"""


# ---------------------------------------------------------------------------------------------------- the history


def load_postgresql(service: PostgresService, url: str, queued: int, finished: int) -> None:
    """Fill a database with tasuki's tables by one statement, and have it look at them once, as autovacuum would."""
    key = "'0192a000-' || lpad(to_hex(n >> 16), 4, '0') || '-7000-8000-' || lpad(to_hex(n), 12, '0')"
    numbers = "SELECT generate_series(0, :finished + :queued - 1) AS n"
    statement = LOAD.replace("{key}", key).replace("{numbers}", numbers).replace("%", "%%")
    with service.connect(url) as connection:
        connection.execute("SET synchronous_commit = off")
        connection.execute(re.sub(r"(?<!\w):(\w+)", r"%(\1)s", statement), load_values(queued, finished, FAILED_EVERY))
        rows = counters(queued, finished, FAILED_EVERY)
        connection.cursor().executemany('INSERT INTO tasuki_counter ("group", state, n) VALUES (%s, %s, %s)', rows)
        connection.execute("VACUUM ANALYZE")


def add_rollups(store: SqlStore) -> None:
    """Write a week of rollups, one for each minute."""
    until = current_minute(time.time())
    counted = GroupStatistics(submitted=500, leased=500, succeeded=498, failed=2, delivery_s=1.0, delivery={2: 400, 5: 100})
    groups = {f"group-{number}": counted for number in range(GROUPS)}
    queues = dict.fromkeys(groups, QueueLength(100, 10))
    for hour in range(until - WEEK_S, until, 3600):
        store.add_rollups([Rollup(minute, "bench", groups, queues) for minute in range(hour, hour + 3600, ROLLUP_S)])
    store.close()


# ---------------------------------------------------------------------------------------------------- screens


def logged_in(url: str, **fields: str) -> httpx.Client:
    browser = httpx.Client(base_url=url, timeout=60.0)
    form = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', browser.get("/ops/login/").text)
    assert form is not None
    assert browser.post("/ops/login/", data={**fields, "csrfmiddlewaretoken": form[1]}).status_code == 302
    return browser


def ask_screens(browser: httpx.Client, job: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the first time and the 95th percentile of each screen, in milliseconds."""
    first, p95 = {}, {}
    for name in names:
        took = []
        for _ in range(ASKS + 1):
            began = time.perf_counter()
            browser.get("/ops/" + name.format(job=job)).raise_for_status()
            took.append((time.perf_counter() - began) * 1e3)
        first[f"/ops/{name}"] = round(took[0], 1)
        p95[f"/ops/{name}"] = round(percentile(took[1:], 0.95), 1)
    return {"p95_ms_max": max(p95.values()), "p95_ms": p95, "first_ms_max": max(first.values()), "first_ms": first}


@contextlib.contextmanager
def watched(browser: httpx.Client) -> Iterator[None]:
    """Two people look while the block lasts."""
    ended = threading.Event()

    def look(address: str) -> None:
        with httpx.Client(base_url=browser.base_url, cookies=browser.cookies, timeout=60.0) as own:
            while not ended.wait(POLL_S):
                own.get(address).raise_for_status()

    people = [threading.Thread(target=look, args=(address,)) for address in ("/ops/", "/ops/jobs/")]
    for person in people:
        person.start()
    try:
        yield
    finally:
        ended.set()
        for person in people:
            person.join()


def cost(alone: list[float], seen: list[float]) -> dict[str, float]:
    before, after = statistics.median(alone), statistics.median(seen)
    return {"alone_per_s": round(before), "watched_per_s": round(after), "cost_percent": round(100 * (1 - after / before), 1)}


# ---------------------------------------------------------------------------------------------------- homes


async def rate_of_jobs(url: str, jobs: int) -> float:
    async with AsyncClient(url) as client:
        return await new_jobs(client, jobs)


def of_a_server(data: Path, store: str, jobs: int) -> dict[str, Any]:
    url = f"unix://{data}/socket"
    with server(data, "--http", "127.0.0.1:0", store=store) as broker, handler_worker(url, CONCURRENCY):
        address = re.search(r"http://[^\s\"]+", (data / "listening").read_text())
        assert address is not None
        browser = logged_in(address[0], token=(data / "token").read_text().strip())
        with Client(url) as client:
            job = client.submit(subject="bench.noop").outcome(60).job_id
        figures = ask_screens(browser, job, COMMON + OF_SERVERS)
        alone, seen = [], []
        uvloop.run(rate_of_jobs(url, 2_000))
        for _ in range(ROUNDS):
            alone.append(uvloop.run(rate_of_jobs(url, jobs)))
            with watched(browser):
                seen.append(uvloop.run(rate_of_jobs(url, jobs)))
        return {**figures, "cost": cost(alone, seen), "server_memory_mb": round(broker.memory_mb())}


def of_a_project(site: Site, tasks: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "uvicorn", "--factory", "--port", "0", "--no-access-log"]
    job = site.ask(PREPARE)
    web = Process([*command, "django.core.asgi:get_asgi_application"], ready="running on", env=site.env)
    try:
        address = re.search(r"http://[\d.:]+", web.lines[-1])
        assert address is not None
        with site.node():
            browser = logged_in(address[0], username="bench", password=PASSWORD)
            figures = ask_screens(browser, job, COMMON + OF_PROJECTS)
            alone, seen = [], []
            code = RATE.replace("JOBS", str(tasks))
            site.ask(code)
            for _ in range(ROUNDS):
                alone.append(site.ask(code))
                with watched(browser):
                    seen.append(site.ask(code))
            return {**figures, "cost": cost(alone, seen), "web_memory_mb": round(web.memory_mb())}
    finally:
        web.stop()


def on_sqlite(data: Path, queued: int, finished: int, jobs: int, tasks: int) -> dict[str, Any]:
    file = data / "tasuki.sqlite3"
    load(file, "ordered", queued, finished, every=FAILED_EVERY)
    add_rollups(SqlStore.open_sqlite(file))
    figures = {"server": of_a_server(data, "", jobs)}
    file.rename(data / "site.sqlite3")
    return {**figures, "project": of_a_project(Site(data), tasks)}


def on_postgresql(data: Path, queued: int, finished: int, jobs: int, tasks: int) -> dict[str, Any]:
    with postgresql() as service:
        url = service.database()
        load_postgresql(service, url, queued, finished)
        add_rollups(SqlStore.open_postgresql(url))
        figures = {"server": of_a_server(data, url, jobs)}
        return {**figures, "project": of_a_project(Site(data, url), tasks)}


def verdict(figures: dict[str, Any]) -> dict[str, Any]:
    homes = [home for name in STORES if name in figures for home in figures[name].values()]
    found = {"p95_ms_max": max(home["p95_ms_max"] for home in homes)}
    found["cost_percent"] = max(home["cost"]["cost_percent"] for home in homes)
    return {name: {"at_most": most, "is": found[name], "met": found[name] <= most} for name, most in TARGETS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--share", type=int, default=1, help="so many times fewer jobs; nothing is recorded")
    parser.add_argument("--only", choices=STORES)
    arguments = parser.parse_args()
    share = 100 if arguments.quick else arguments.share
    jobs, tasks = (20_000, 2_000) if share > 1 else (60_000, 8_000)
    figures: dict[str, Any] = {"queued": QUEUED // share, "finished": FINISHED // share}
    with limit(LIMIT_S):
        for name, measure in (("sqlite", on_sqlite), ("postgresql", on_postgresql)):
            if arguments.only in (None, name):
                with folder() as data:
                    figures[name] = measure(data, QUEUED // share, FINISHED // share, jobs, tasks)
    figures["verdict"] = verdict(figures)
    record("_".join(filter(None, ("screens", arguments.only))), figures, save=share == 1)


if __name__ == "__main__":
    main()
