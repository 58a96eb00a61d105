"""Are the operations screens quick beside a long history, and what do they cost the jobs? 5,000,000 finished and 100,000 queued.

    python bench/screens.py            the whole thing: some minutes and 4 GB of disk; recorded
    python bench/screens.py --quick    a hundredth of it, nothing recorded

A server on SQLite with a week of rollups; each screen is asked for as a browser does, one after the other. Then the throughput of
new jobs is measured in turns, without anybody and with two people who have the overview and the list of jobs open.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import time
from pathlib import Path

import httpx
import uvloop
from _common import folder, handler_worker, percentile, record, server
from history import CONCURRENCY, new_jobs
from store import FINISHED, load

from tasuki import AsyncClient, Client
from tasuki.core.statistics import ROLLUP_S, GroupStatistics, QueueLength, Rollup, current_minute
from tasuki.stores.sql.store import SqlStore

QUEUED = 100_000
WEEK_S = 7 * 86_400
GROUPS = 20
ASKS = 40
ROUNDS = 5
POLL_S = 1.5  # as ops.js
SCREENS = (
    *(
        "",
        "?span=24h",
        "?span=7d",
        "jobs/",
        "jobs/?state=PENDING",
        "jobs/?state=FAILED",
        "jobs/?subject=math.>",
        "jobs/?text=0192b000",
    ),
    *("jobs/{job}/", "run/", "dead/", "workers/", "subjects/?subject=math.square", "tokens/", "caches/", "audit/"),
)


def add_rollups(path: Path) -> None:
    """Write a week of rollups, one for each minute."""
    store = SqlStore.open_sqlite(path)
    until = current_minute(time.time())
    counted = GroupStatistics(submitted=500, leased=500, succeeded=498, failed=2, delivery_s=1.0, delivery={2: 400, 5: 100})
    groups = {f"group-{number}": counted for number in range(GROUPS)}
    queues = dict.fromkeys(groups, QueueLength(100, 10))
    for hour in range(until - WEEK_S, until, 3600):
        store.add_rollups([Rollup(minute, "bench", groups, queues) for minute in range(hour, hour + 3600, ROLLUP_S)])
    store.close()


def logged_in(url: str, token: str) -> httpx.Client:
    browser = httpx.Client(base_url=url, timeout=60.0)
    form = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', browser.get("/ops/login/").text)
    assert form is not None
    assert browser.post("/ops/login/", data={"token": token, "csrfmiddlewaretoken": form[1]}).status_code == 302
    return browser


def ask_screens(browser: httpx.Client, job: str) -> dict[str, float]:
    """Return the 95th percentile of each screen's time, in milliseconds."""
    found = {}
    for name in SCREENS:
        address = "/ops/" + name.format(job=job)
        browser.get(address).raise_for_status()
        took = []
        for _ in range(ASKS):
            began = time.perf_counter()
            browser.get(address).raise_for_status()
            took.append((time.perf_counter() - began) * 1e3)
        found[f"/ops/{name}"] = round(percentile(took, 0.95), 1)
    return found


async def cost(url: str, http: str, cookies: httpx.Cookies, jobs: int) -> dict[str, float]:
    """Return jobs per second without and with people who look at screens, measured in turns."""
    alone, watched = [], []

    async def look(browser: httpx.AsyncClient, address: str) -> None:
        while True:
            (await browser.get(address)).raise_for_status()
            await asyncio.sleep(POLL_S)

    async with AsyncClient(url) as client, httpx.AsyncClient(base_url=http, cookies=cookies, timeout=60.0) as browser:
        await browser.get("/ops/")
        await new_jobs(client, 2000)
        for _ in range(ROUNDS):
            alone.append(await new_jobs(client, jobs))
            looking = [asyncio.create_task(look(browser, address)) for address in ("/ops/", "/ops/jobs/")]
            watched.append(await new_jobs(client, jobs))
            for task in looking:
                task.cancel()
    before, after = statistics.median(alone), statistics.median(watched)
    return {
        "alone_jobs_per_s": round(before),
        "watched_jobs_per_s": round(after),
        "cost_percent": round(100 * (1 - after / before), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    share, jobs = (100, 20_000) if arguments.quick else (1, 60_000)
    with folder() as data:
        load(data / "tasuki.sqlite3", "ordered", QUEUED // share, FINISHED // share)
        add_rollups(data / "tasuki.sqlite3")
        url = f"unix://{data}/socket"
        with server(data, "--http", "127.0.0.1:0") as broker, handler_worker(url, CONCURRENCY):
            http = (data / "listening").read_text()
            address = re.search(r"http://[^\s\"]+", http)
            assert address is not None, http
            browser = logged_in(address[0], (data / "token").read_text().strip())
            with Client(url) as client:
                job = client.submit(subject="bench.noop").outcome(60).job_id
            times = ask_screens(browser, job)
            figures = {
                "queued": QUEUED // share,
                "finished": FINISHED // share,
                "p95_ms": times,
                "p95_ms_max": max(times.values()),
            }
            figures["cost"] = uvloop.run(cost(url, address[0], browser.cookies, jobs))
            figures["server_memory_mb"] = round(broker.memory_mb())
    record("screens", figures, save=not arguments.quick)


if __name__ == "__main__":
    main()
