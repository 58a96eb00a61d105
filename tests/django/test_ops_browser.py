"""The operations screens in a real browser: the story of a first job, every operation, output of any kind, accessibility."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.support.browser import TIMEOUT_MS, keep_picture, look_at, new_context, open_browser
from tests.support.processes import TASUKI, ChildProcess, ServerProcess, start_server, start_worker

pytestmark = pytest.mark.e2e
LOSS_TIMEOUT_MS = 30_000
NOISY = r"""
import sys
out = sys.stdout.buffer
out.write(b"<script>document.title='owned'</script>\x1b[31mred\x1b[0m\x00\xff\n" + b"y" * 200_000 + b"\n")
for number in range(100_000):
    out.write(b"%099d\n" % number)
out.write(b"the last line\n")
"""


class Home(NamedTuple):
    """A place that serves the screens, with a browser that is logged in."""

    url: str
    context: BrowserContext


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = new_context(browser)
    yield context.new_page()
    context.close()


def on(page: Page, text: str) -> None:
    """Wait until the page shows a text."""
    expect(page.get_by_text(text).first).to_be_visible(timeout=TIMEOUT_MS)


def run_job(page: Page, url: str, program: str, arguments: str) -> None:
    page.goto(f"{url}/ops/run/")
    page.get_by_label("Program").fill(program)
    page.get_by_label("Arguments").fill(arguments)
    page.get_by_role("button", name="Run", exact=True).click()


# ---------------------------------------------------------------------------------------------------- tasuki up


@contextlib.contextmanager
def up(tmp_path: Path) -> Iterator[tuple[ChildProcess, str]]:
    """`tasuki up`, and the link that it prints."""
    command = [*TASUKI, "up", "--data", str(tmp_path / "data"), "--tcp", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    with ChildProcess(command, tmp_path / "up.log", {}) as started:
        started.wait_for_output("/v1/jobs")
        link = re.search(r"http://\S+/ops/login/\?code=\S+", started.output())
        assert link is not None
        yield started, link[0]


def test_the_link_of_tasuki_up_opens_the_screens_and_a_first_job_runs_from_there(tmp_path: Path, page: Page) -> None:
    with up(tmp_path) as (_, link):
        page.goto(link)
        on(page, "No job yet")
        keep_picture(page, "overview")
        page.get_by_role("link", name="Run a job").click()
        page.get_by_label("Program").fill("echo")
        page.get_by_label("Arguments").fill("hello 'from the browser'")
        page.get_by_role("button", name="Run", exact=True).click()

        expect(page.locator("pre")).to_have_text("hello from the browser\n")
        on(page, "SUCCEEDED")
        page.goto(link)
        on(page, "This link was used before")
        page.goto(f"{link.partition('login')[0]}jobs/")
        expect(page.locator("tbody tr")).to_have_count(1)


# ---------------------------------------------------------------------------------------------------- a server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    with start_server(folder, "--http", "127.0.0.1:0", "--lease-ttl", "3") as started:
        yield started


@pytest.fixture(scope="module")
def home(server: ServerProcess, browser: Browser) -> Iterator[Home]:
    """The screens of a server, with somebody who has logged in with its admin token."""
    listening = re.search(r"listening (http://\S+)", server.output())
    assert listening is not None
    context = new_context(browser)
    page = context.new_page()
    page.goto(f"{listening[1]}/ops/jobs/")
    page.get_by_label("Admin token").fill("tsk_a_wrong")
    page.get_by_role("button", name="Log in").click()
    on(page, "This is not an admin token of this server")
    page.get_by_label("Admin token").fill(server.token)
    page.get_by_role("button", name="Log in").click()
    on(page, "No such job.")
    page.close()
    yield Home(listening[1], context)
    context.close()


def worker_of(server: ServerProcess, *options: str) -> ChildProcess:
    execs = ("--exec", "sh=/bin/sh {args}", "--exec", f"python={sys.executable} {{args}}")
    return start_worker(server, "--subject", ">", *execs, *options, command=True)


def test_a_job_whose_worker_is_killed_moves_to_another_and_the_page_tells_why(server: ServerProcess, home: Home) -> None:
    page = home.context.new_page()
    with worker_of(server, "--worker-id", "first") as first:
        run_job(page, home.url, "sh", "-c 'for i in $(seq 600); do echo line $i; sleep 0.1; done'")
        on(page, "line 5")
        on(page, "It runs at worker first")
        with worker_of(server, "--worker-id", "second"):
            first.signal(signal.SIGKILL)

            expect(page.get_by_text("It runs at worker second")).to_be_visible(timeout=LOSS_TIMEOUT_MS)
            on(page, "Attempt 1 at first was lost")
            on(page, "line 5")
            keep_picture(page, "job")
            page.get_by_role("button", name="Cancel").click()
            expect(page.locator(".summary .state")).to_have_text("CANCELED")
    page.close()


def test_output_of_any_kind_is_text_live_and_from_the_result(server: ServerProcess, home: Home, tmp_path: Path) -> None:
    page = home.context.new_page()
    (tmp_path / "noisy.py").write_text(NOISY)
    with worker_of(server):
        run_job(page, home.url, "python", str(tmp_path / "noisy.py"))
        on(page, "SUCCEEDED")
        page.reload()
        on(page, "the last line")
        assert page.title() != "owned"
        assert len(page.content()) < 500_000
        page.get_by_label("Lines with").fill("<script>")
        page.get_by_role("button", name="Search output").click()
        expect(page.locator("pre")).to_contain_text("document.title='owned'")
        with page.expect_download() as downloading:
            page.get_by_role("link", name="download all").click()
        assert downloading.value.path().stat().st_size > 10_000_000
        with page.expect_download() as downloading:
            page.get_by_role("link", name="Download the result").click()
        assert downloading.value.path().read_bytes().startswith(b"PK")
    page.close()


def test_operations_take_effect_and_stand_in_the_audit_with_the_person(server: ServerProcess, home: Home) -> None:
    page = home.context.new_page()
    with worker_of(server, "--worker-id", "steered"), server.client() as client:
        page.goto(f"{home.url}/ops/workers/")
        page.get_by_role("button", name="Detach").click()
        on(page, "steered gets no more jobs.")
        run_job(page, home.url, "sh", "-c 'exit 3'")
        on(page, "The workers that fit are detached: steered")
        page.goto(f"{home.url}/ops/subjects/?subject=a.b&exec=sh")
        on(page, "it is detached")
        page.goto(f"{home.url}/ops/workers/")
        page.get_by_role("button", name="Attach").click()
        on(page, "steered gets jobs again.")
        client.submit(exec="sh", args=["-c", "exit 4"], retries=0).outcome(TIMEOUT_MS / 1000)
        page.goto(f"{home.url}/ops/dead/")
        on(page, "EXIT_CODE")
        keep_picture(page, "dead")
        page.get_by_role("button", name="Run all again").click()
        on(page, "Run again: 1.")
        page.goto(f"{home.url}/ops/audit/")
        for done in ("worker.detach", "worker.attach", "run.rerun"):
            expect(page.locator("tr", has_text=done).first).to_contain_text("token:")
    page.close()


def test_live_parts_follow_within_two_seconds_and_rest_in_a_hidden_tab(server: ServerProcess, home: Home) -> None:
    page = home.context.new_page()
    asked: list[str] = []
    page.goto(f"{home.url}/ops/jobs/?subject=live.>")
    on(page, "No such job.")
    page.on("request", lambda request: asked.append(request.url))
    with server.client() as client:
        client.submit(subject="live.one", payload=b"", job_id="live-1", watch=False)
        expect(page.get_by_text("live-1")).to_be_visible(timeout=2_000)

        page.evaluate("Object.defineProperty(document, 'visibilityState', {get: () => 'hidden'})")
        with page.expect_event("console", lambda message: message.text == "later"):
            page.evaluate("setTimeout(() => { window.asked = performance.getEntriesByType('resource').length;"
                          " setTimeout(() => console.log('later'), 3500) }, 1000)")  # fmt: skip
        assert page.evaluate("performance.getEntriesByType('resource').length - window.asked") == 0
        client.cancel("live-1")
    assert asked
    page.close()


def test_a_token_is_shown_once_and_revoked_and_the_language_is_changed(home: Home) -> None:
    page = home.context.new_page()
    page.goto(f"{home.url}/ops/tokens/")
    page.get_by_label("Kind").select_option("client")
    page.get_by_label("Label").fill("for the test")
    page.get_by_role("button", name="Make a token").click()
    expect(page.locator(".done code")).to_have_text(re.compile("^tsk_c_"))
    page.goto(f"{home.url}/ops/tokens/")
    assert "tsk_c_" not in page.content()
    page.get_by_role("row", name="for the test").get_by_role("button", name="Revoke").click()
    on(page, "is revoked.")

    page.get_by_role("button", name="日本語").click()
    expect(page.locator("h1")).to_have_text("トークン")
    page.get_by_role("link", name="概要").click()
    on(page, "1分あたりのジョブ")
    assert page.locator("html").get_attribute("lang") == "ja"
    keep_picture(page, "overview-ja")
    page.get_by_role("button", name="English").click()
    on(page, "Jobs per minute")
    page.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_screens_of_a_server_are_accessible_and_fit_a_phone(
    server: ServerProcess, home: Home, browser: Browser, theme: Any
) -> None:
    with worker_of(server), server.client() as client:
        job_id = client.run("sh", "-c", "echo done; exit 1", retries=0, check=False).job_id
        context = new_context(browser, color_scheme=theme, storage_state=home.context.storage_state())
        names = ("", "jobs/", f"jobs/{job_id}/", "run/", "dead/", "workers/", "subjects/?subject=a&exec=sh", "tokens/", "caches/")
        look_at(context.new_page(), home.url, names, f"server-{theme}")
        context.close()
