"""The pictures of the documentation, with example data: `make soak TESTARGS=tests/django/test_ops_pictures.py`, then
`cp build/pictures/docs/*.png docs/pictures/`."""

from __future__ import annotations

import math
import random
import re
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tasuki.core.statistics import GroupStatistics, QueueLength, Rollup, current_minute
from tasuki.stores.sql.store import SqlStore
from tests.support.browser import PICTURES, new_context, open_browser
from tests.support.processes import ServerProcess, start_server, start_worker

pytestmark = [pytest.mark.e2e, pytest.mark.soak]
SIZE = {"width": 1100, "height": 720}
GROUPS = {"render": 12, "encode": 7, "report": 3}
"""Jobs per minute of each group of the example."""
LOSS_TIMEOUT_MS = 60_000
SCRIPT = "for frame in $(seq 600); do echo frame $frame of 600; sleep 0.2; done"


def rollups_of_an_hour() -> list[Rollup]:
    """Return an hour with a wave in it, as one server counts it."""
    now, chance = current_minute(time.time()), random.Random(7)
    found = []
    for minute in range(now - 3_600, now, 60):
        wave = 1.0 + 0.5 * math.sin((now - minute) / 600.0)
        counts = {group: round(rate * wave * chance.uniform(0.9, 1.1)) for group, rate in GROUPS.items()}
        failed = {group: int(group == "encode" and minute % 1_800 == 0) for group in GROUPS}
        slow = {group: chance.choice((3, 4, 4, 5)) for group in GROUPS}
        groups = {
            group: GroupStatistics(
                submitted=count,
                leased=count,
                succeeded=count - failed[group],
                failed=failed[group],
                delivery={2: count, slow[group]: 2},
            )
            for group, count in counts.items()
        }
        queues = {group: QueueLength(2 * count + chance.randrange(4), 4) for group, count in counts.items()}
        found.append(Rollup(minute, "server-1", groups, queues))
    return found


def run_jobs_of(server: ServerProcess, rollups: list[Rollup]) -> None:
    """Have the jobs done that the hour counts, and those submitted that wait at its end."""
    programs = ("--exec", "fine=/bin/true", "--exec", "broken=/bin/false")
    with server.client() as client, start_worker(server, "--subject", ">", *programs, "--slots", "8", command=True):
        jobs: list[Any] = []
        for group in GROUPS:
            succeeded, failed = (sum(getattr(one.groups[group], name) for one in rollups) for name in ("succeeded", "failed"))
            jobs += [client.submit(subject=f"{group}.eu", exec="fine") for _ in range(succeeded)]
            jobs += [client.submit(subject=f"{group}.eu", exec="broken", retries=0) for _ in range(failed)]
            for _ in range(rollups[-1].queues[group].queued):
                client.submit(subject=f"{group}.later", exec="elsewhere", watch=False)
        for job in jobs:
            job.outcome(LOSS_TIMEOUT_MS / 1000)


def test_pictures_of_the_overview_and_of_a_job_that_moved(tmp_path: Path) -> None:
    folder = PICTURES / "docs"
    folder.mkdir(parents=True, exist_ok=True)
    options = ("--http", "127.0.0.1:0", "--lease-ttl", "3")
    rollups = rollups_of_an_hour()
    with start_server(tmp_path, *options) as server:
        run_jobs_of(server, rollups)
    database = server.folder.database
    with sqlite3.connect(database) as tables:
        tables.execute("DELETE FROM tasuki_minuterollup")  # the jobs that ran within one minute just now
    store = SqlStore.open_sqlite(database)
    with store.turn():
        store.add_rollups(rollups)
    store.close()

    program = ("--subject", ">", "--exec", "render=/bin/sh {args}")
    with (
        start_server(tmp_path, *options) as server,
        server.client() as client,
        open_browser() as browser,
        start_worker(server, "--subject", ">", "--exec", "fine=/bin/true", "--worker-id", "node-1", "--slots", "4", command=True),
    ):
        [leader] = client.wait(client.aio.call("servers"))
        context = new_context(browser, viewport=SIZE, device_scale_factor=2)

        def named(route: Any) -> None:
            """Answer with a page that names no machine."""
            answer = route.fetch(max_redirects=0)
            route.fulfill(response=answer, body=answer.text().replace(leader["server_id"], "server-1"))

        page = context.new_page()
        page.goto(f"{server.http_url}/ops/login/")
        page.get_by_label("Admin token").fill(server.token)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url("**/ops/")
        page.route(re.compile(r"/ops/(jobs/.*)?(\?.*)?$"), named)
        page.goto(f"{server.http_url}/ops/")
        expect(page.locator(".charts path.series").first).to_be_visible()
        page.screenshot(path=folder / "overview.png")
        page.get_by_role("button", name="日本語").click()
        expect(page.locator("h1")).to_have_text("概要")
        page.goto(f"{server.http_url}/ops/")  # a redirect is not answered by `named`
        page.screenshot(path=folder / "overview-ja.png")
        page.get_by_role("button", name="English").click()

        with start_worker(server, *program, "--worker-id", "lab-7", command=True) as first:
            client.submit(subject="render.eu", exec="render", args=["-c", SCRIPT], job_id="render-2026-03", watch=False)
            page.goto(f"{server.http_url}/ops/jobs/render-2026-03/")
            expect(page.locator("pre")).to_contain_text("frame 9 of 600")
            with start_worker(server, *program, "--worker-id", "lab-8", command=True):
                first.signal(signal.SIGKILL)
                expect(page.get_by_text("It runs at worker lab-8")).to_be_visible(timeout=LOSS_TIMEOUT_MS)
                expect(page.locator("pre")).to_contain_text("frame 9 of 600")
                page.screenshot(path=folder / "job.png")
                client.cancel("render-2026-03")
        context.close()

    assert {file.name for file in folder.iterdir()} >= {
        file.name for file in (PICTURES.parents[1] / "docs" / "pictures").iterdir()
    }
