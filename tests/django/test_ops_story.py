"""The story of a first job in a browser, in both homes and languages: run it, watch it, kill its worker, read why it moved."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.django.test_ops_project_browser import PASSWORD, served
from tests.support.browser import keep_picture, new_context, open_browser
from tests.support.django_site import DjangoSite
from tests.support.processes import TASUKI, ChildProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
LOSS_TIMEOUT_MS = 90_000
SLOW_MS = 30_000
WORDS = {
    "en": (("Overview", "Run a job", "Running", "Succeeded"), ("lost", "was lost", "It runs at worker", "It succeeded")),
    "ja": (("概要", "ジョブを実行", "実行中", "成功"), ("喪失", "喪失", "で実行中です", "で成功しました")),
}
"""Words of the screens, and of what is said about the job."""


class Place(NamedTuple):
    """A home of the screens with one worker."""

    enter: Callable[[Page], None]
    """Log in, and be at the overview."""
    program: str
    arguments: str
    kill_worker: Callable[[], None]
    """Kill the worker; another one comes."""
    go: Path
    """File that lets the job end."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@contextlib.contextmanager
def up(folder: Path) -> Iterator[Place]:
    """`tasuki up`, opened by its link, and the worker that it started."""
    command = [*TASUKI, "up", "--data", str(folder / "data"), "--tcp", "127.0.0.1:0", "--http", "127.0.0.1:0", "--slots", "1"]
    with ChildProcess(command, folder / "up.log", {}) as started:
        started.wait_for_output("/v1/jobs")
        link = re.search(r"http://\S+/ops/login/\?code=\S+", started.output())
        assert link is not None

        def kill() -> None:
            [worker] = workers_of(started.pid)
            os.kill(worker, signal.SIGKILL)
            started.wait_for_output("started again in")

        script = "echo begun; until test -e go; do sleep 0.05; done; echo ended"
        yield Place(lambda page: _open(page, link[0]), "sh", f'-c "cd {folder}; {script}"', kill, folder / "go")


def _open(page: Page, link: str) -> None:
    page.goto(link)
    page.wait_for_url("**/ops/")


def workers_of(pid: int) -> list[int]:
    """Return the worker processes that a process started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"worker" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")]


@contextlib.contextmanager
def project(folder: Path) -> Iterator[Place]:
    """A Django project with a node, and a person who logs in by name and password."""
    site = DjangoSite(folder)
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(served(site))
        first = stack.enter_context(site.worker())

        def enter(page: Page) -> None:
            page.goto(f"{home.url}/ops/login/")
            page.locator("[name=username]").fill("admin")
            page.locator("[name=password]").fill(PASSWORD)
            page.locator("main button").click()
            page.wait_for_url(f"{home.url}/ops/")

        def kill() -> None:
            first.signal(signal.SIGKILL)
            first.wait()
            stack.enter_context(site.worker(log="second.log"))

        yield Place(enter, "probe", f"hold '{folder}'", kill, folder / "go")


HOMES = {"up": up, "project": project}


@pytest.mark.parametrize(
    ("home", "language"),
    [
        ("up", "en"),
        ("project", "ja"),
        pytest.param("up", "ja", marks=pytest.mark.soak),
        pytest.param("project", "en", marks=pytest.mark.soak),
    ],
)
def test_a_first_job_is_run_watched_moved_and_understood(home: str, language: str, browser: Browser, tmp_path: Path) -> None:
    (overview, run, running, succeeded), (lost, was_lost, runs_at, did) = WORDS[language]
    context = new_context(browser, locale={"en": "en-GB", "ja": "ja-JP"}[language])
    page, figures = context.new_page(), context.new_page()
    with HOMES[home](tmp_path) as place:
        place.enter(page)
        assert page.locator("html").get_attribute("lang") == language
        expect(page.locator("h1")).to_have_text(overview)
        figures.goto(page.url)
        figures.evaluate("window.isTheSamePage = true")
        expect(figure(figures, running)).to_have_text("0")

        page.get_by_role("link", name=run).click()
        program = page.locator("[name=program]")
        if program.evaluate("field => field.tagName") == "SELECT":
            program.select_option(place.program)
        else:
            program.fill(place.program)
        page.locator("[name=arguments]").fill(place.arguments)
        page.locator("main button").click()
        expect(page.locator("pre").first).to_contain_text("begun", timeout=SLOW_MS)
        expect(figure(figures, running)).to_have_text("1", timeout=SLOW_MS)

        place.kill_worker()
        timeline = page.locator("tbody")
        expect(timeline).to_contain_text(lost, timeout=LOSS_TIMEOUT_MS)
        expect(page.locator(".because").first).to_contain_text(was_lost, timeout=LOSS_TIMEOUT_MS)
        expect(page.locator(".because").first).to_contain_text(runs_at, timeout=LOSS_TIMEOUT_MS)
        keep_picture(page, f"story-{home}-{language}")
        place.go.touch()

        expect(page.locator(".summary .state")).to_have_text("SUCCEEDED", timeout=SLOW_MS)
        expect(page.locator("pre").first).to_contain_text("ended", timeout=SLOW_MS)
        expect(page.locator(".because").first).to_contain_text(did)
        expect(figure(figures, succeeded)).to_have_text("1", timeout=SLOW_MS)
        assert figures.evaluate("window.isTheSamePage"), "the figures followed without a reload"
    context.close()


def figure(page: Page, label: str) -> Locator:
    """Return the number under a label of the overview."""
    return page.locator(".figures li", has=page.locator(f"text='{label}'")).locator("strong")
