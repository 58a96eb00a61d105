"""The pictures of the documentation, with example data: `make soak TESTARGS=tests/django/test_ops_pictures.py`, then
`cp build/pictures/docs/*.png docs/pictures/`."""

from __future__ import annotations

import math
import re
import signal
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tasuki.core.statistics import GroupStatistics, QueueLength, Rollup, current_minute
from tasuki.stores.sql.store import SqlStore
from tests.support.browser import PICTURES, new_context, open_browser
from tests.support.processes import start_server, start_worker

pytestmark = [pytest.mark.e2e, pytest.mark.soak]
SIZE = {"width": 1100, "height": 720}
GROUPS = {"render": 40, "encode": 25, "report": 6}
"""Jobs per minute of each group of the example."""
LOSS_TIMEOUT_MS = 60_000


def fill(file: Path) -> None:
    """Write an hour of a day with a wave in it."""
    store = SqlStore.open_sqlite(file)
    now = current_minute(time.time())
    rollups = []
    for minute in range(now - 3_600, now, 60):
        wave = 1.0 + 0.5 * math.sin((now - minute) / 600.0)
        counts = {group: int(rate * wave) for group, rate in GROUPS.items()}
        groups = {
            group: GroupStatistics(
                submitted=count, leased=count, succeeded=count - count // 30, failed=count // 30, delivery={2: count, 8: 1}
            )
            for group, count in counts.items()
        }
        rollups.append(Rollup(minute, "s1", groups, {group: QueueLength(2 * count, 4) for group, count in counts.items()}))
    with store.turn():
        store.add_rollups(rollups)
    store.close()


def test_pictures_of_the_overview_and_of_a_job_that_moved(tmp_path: Path) -> None:
    folder = PICTURES / "docs"
    folder.mkdir(parents=True, exist_ok=True)
    (tmp_path / "data").mkdir(mode=0o700)
    fill(tmp_path / "data" / "tasuki.sqlite3")
    program = ("--subject", ">", "--exec", "render=/bin/sh {args}")
    script = "for frame in $(seq 600); do echo frame $frame of 600; sleep 0.2; done"
    with (
        start_server(tmp_path, "--http", "127.0.0.1:0", "--lease-ttl", "3") as server,
        server.client() as client,
        open_browser() as browser,
        start_worker(server, "--subject", ">", "--exec", "fine=/bin/true", "--worker-id", "node-1", "--slots", "4", command=True),
    ):
        for group, count in GROUPS.items():
            for _ in range(count):
                client.submit(subject=f"{group}.eu", exec="fine").outcome(60)
                client.submit(subject=f"{group}.later", exec="elsewhere", watch=False)
        context = new_context(browser, viewport=SIZE)
        page = context.new_page()
        listening = re.search(r"listening (http://\S+)", server.output())
        assert listening is not None
        page.goto(f"{listening[1]}/ops/login/")
        page.get_by_label("Admin token").fill(server.token)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url("**/ops/")
        expect(page.locator(".charts path.series").first).to_be_visible()
        page.screenshot(path=folder / "overview.png")

        with start_worker(server, *program, "--worker-id", "lab-7", command=True) as first:
            client.submit(subject="render.eu", exec="render", args=["-c", script], job_id="render-2026-03", watch=False)
            page.goto(f"{listening[1]}/ops/jobs/render-2026-03/")
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
