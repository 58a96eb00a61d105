"""The operations screens of a server in a real browser: every operation, output of any kind, the keyboard, accessibility."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tasuki.core.subject import DEFAULT_SUBJECT
from tests.support.browser import PHONE, TIMEOUT_MS, keep_picture, look_at, new_context, open_browser, refused_by_policy
from tests.support.processes import ChildProcess, ServerProcess, start_server, start_worker
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
NOISY = r"""
import sys
import pathlib
import time
out = sys.stdout.buffer
out.write(b"<script>document.title='owned'</script>\x1b[31mred\x1b[0m\x00\xff\n" + b"y" * 200_000 + b"\n")
for number in range(100_000):
    out.write(b"%099d\n" % number)
    if number == 50_000:
        out.flush()
        while not pathlib.Path(sys.argv[1]).exists():
            time.sleep(0.01)
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


def test_output_of_any_kind_is_text_live_and_from_the_result(server: ServerProcess, home: Home, tmp_path: Path) -> None:
    page = home.context.new_page()
    (tmp_path / "noisy.py").write_text(NOISY)
    with worker_of(server):
        run_job(page, home.url, "python", f"{tmp_path / 'noisy.py'} {tmp_path / 'go'}")
        expect(page.locator("pre")).to_contain_text(f"{49_999:099d}")
        expect(page.locator(".summary .state")).to_have_text("RUNNING")
        assert page.title() != "owned"
        assert len(page.content()) < 500_000
        (tmp_path / "go").touch()
        on(page, "SUCCEEDED")
        page.reload()
        on(page, "the last line")
        assert page.title() != "owned"
        assert len(page.content()) < 500_000
        assert refused_by_policy(page) == []
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


def test_live_parts_follow_within_two_seconds_and_rest_in_a_hidden_tab(
    server: ServerProcess, home: Home, browser: Browser
) -> None:
    context = new_context(browser, storage_state=home.context.storage_state())
    page = context.new_page()
    asked: list[str] = []
    page.goto(f"{home.url}/ops/jobs/?subject=live.>")
    on(page, "No such job.")
    page.on("request", lambda request: asked.append(request.url))
    with server.client() as client:
        client.submit(subject="live.one", payload=b"", job_id="live-1", watch=False)
        expect(page.get_by_text("live-1")).to_be_visible(timeout=2_000)

        page.route("**/ops/jobs/*", lambda route: route.abort())
        on(page, "No answer from the server")
        assert page.get_by_text("live-1").is_visible()
        page.unroute("**/ops/jobs/*")
        expect(page.locator("#away")).to_be_hidden()

        page.evaluate("Object.defineProperty(document, 'visibilityState', {get: () => 'hidden', configurable: true})")
        with page.expect_event("console", lambda message: message.text == "later"):
            page.evaluate("setTimeout(() => { window.asked = performance.getEntriesByType('resource').length;"
                          " setTimeout(() => console.log('later'), 3500) }, 1000)")  # fmt: skip
        assert page.evaluate("performance.getEntriesByType('resource').length - window.asked") == 0
        client.cancel("live-1")
    assert asked
    page.evaluate("delete document.visibilityState")
    context.clear_cookies()
    expect(page.get_by_label("Admin token")).to_be_visible()
    context.close()


KEPT = """
const row = text => [...document.querySelectorAll("#live tr")].find(one => one.innerText.includes(text));
"""


def test_a_live_list_follows_and_keeps_ticks_focus_marked_text_and_scroll_position(
    server: ServerProcess, home: Home, browser: Browser
) -> None:
    context = new_context(browser, storage_state=home.context.storage_state(), viewport={"width": 700, "height": 600})
    page = context.new_page()
    with server.client() as client:
        for number in range(4):
            client.submit(subject="kept.a-rather-long-subject-of-a-job", job_id=f"kept-{number}", payload=b"", watch=False)
        page.goto(f"{home.url}/ops/jobs/?subject=kept.>&state=PENDING")
        page.get_by_label("Choose kept-1").check()
        page.get_by_label("Choose kept-0").check()
        page.get_by_role("link", name="kept-2").focus()
        page.evaluate(
            KEPT + "getSelection().selectAllChildren(row('kept-3').cells[3]); document.querySelector('.scroll').scrollLeft = 40"
        )
        marked = page.evaluate("String(getSelection())")
        scrolled = page.evaluate("document.querySelector('.scroll').scrollLeft")
        client.cancel("kept-0")
        client.submit(subject="kept.later", job_id="kept-later", payload=b"", watch=False)
        expect(page.get_by_text("kept-later")).to_be_visible()

        expect(page.get_by_label("Choose kept-1")).to_be_checked()
        expect(page.get_by_label("Choose kept-0")).to_be_checked()  # not left out of the action because the list went on
        expect(page.get_by_label("Choose kept-later")).not_to_be_checked()
        expect(page.get_by_role("link", name="kept-2")).to_be_focused()
        assert marked.startswith("kept.a-rather")
        assert page.evaluate("String(getSelection())") == marked
        assert page.evaluate("document.querySelector('.scroll').scrollLeft") == scrolled > 0
        client.cancel("kept-1", "kept-2", "kept-3", "kept-later")
    context.close()


AT_ITS_END = "(box => box.scrollTop + box.clientHeight > box.scrollHeight - 8)(document.querySelector('pre'))"


def test_output_that_is_read_stays_while_more_arrives_and_is_followed_again_at_its_end(
    server: ServerProcess, home: Home, tmp_path: Path
) -> None:
    page = home.context.new_page()
    waits = [f"until test -e {tmp_path / name}; do sleep 0.05; done" for name in ("go", "end")]
    script = f"seq 1000; {waits[0]}; seq 1001 1400; {waits[1]}"
    with worker_of(server):
        run_job(page, home.url, "sh", f'-c "{script}"')
        box = page.locator("pre")
        expect(box).to_contain_text("\n1000\n")
        page.wait_for_function(AT_ITS_END)
        page.get_by_text("Details").click()
        page.evaluate("""() => {
            const box = document.querySelector("pre"), text = box.firstChild, at = text.data.indexOf("\\n500\\n") + 1;
            box.scrollTop = box.scrollHeight / 2;
            getSelection().setBaseAndExtent(text, at, text, at + 7);
        }""")
        place = page.evaluate("document.querySelector('pre').scrollTop")
        (tmp_path / "go").touch()
        expect(box).to_contain_text("\n1400\n")
        assert page.evaluate("String(getSelection())") == "500\n501"
        assert page.evaluate("document.querySelector('pre').scrollTop") == place
        expect(page.locator("#details")).to_have_attribute("open", "")
        page.evaluate("getSelection().empty(); document.querySelector('pre').scrollTop = 1e9")
        (tmp_path / "end").touch()
        on(page, "SUCCEEDED")
        page.wait_for_function(AT_ITS_END)
    page.close()


def test_the_page_of_a_job_tells_state_reason_worker_and_result_first_also_on_a_phone(
    server: ServerProcess, home: Home, browser: Browser
) -> None:
    context = new_context(browser, storage_state=home.context.storage_state(), viewport=PHONE)
    page = context.new_page()
    with worker_of(server, "--worker-id", "lab-7"), server.client() as client:
        script = "seq 500; seq -s - 900; exit 3"
        client.submit(exec="sh", args=["-c", script], retries=0, job_id="facts-first").outcome(TIMEOUT_MS / 1000)
        page.goto(f"{home.url}/ops/jobs/facts-first/")
        facts = page.locator(".facts.first")
        for text in ("lab-7", "EXIT_CODE", "exit code 3", script):
            expect(facts).to_contain_text(text)
        places = [page.locator(one).bounding_box() for one in (".summary .state", ".because", ".facts.first", "pre", "#timeline")]
        edges = [edge for place in places if place is not None for edge in (place["y"], place["y"] + place["height"])]
        assert edges == sorted(edges)
        assert edges[5] < PHONE["height"], "the facts end on the first screen"
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    context.close()


def test_an_alert_that_stays_is_announced_once(server: ServerProcess, home: Home) -> None:
    page = home.context.new_page()
    page.goto(f"{home.url}/ops/")
    on(page, "No worker runs.")
    page.evaluate("""() => {
        window.announced = [];
        window.looks = 0;
        const added = change => [...change.addedNodes].map(node => node.textContent);
        const watch = changes => window.announced.push(...changes.flatMap(added));
        new MutationObserver(watch).observe(document.querySelector("[aria-live]"), {childList: true, subtree: true});
        document.addEventListener("htmx:afterSettle", () => window.looks++);
    }""")
    until(lambda: page.evaluate("window.looks") > 2, what="the overview has asked three times")
    assert page.evaluate("window.announced") == []
    assert page.locator("#live [role=alert]").count() == 0
    with worker_of(server, "--worker-id", "alone"), server.client() as client:
        expect(page.get_by_text("No worker runs.")).to_be_hidden()
        client.wait(client.aio.call("detach", worker_id="alone"))
        on(page, "All workers are detached")
        assert page.evaluate("window.announced.map(text => text.trim()).filter(Boolean)") == [
            "All workers are detached: no job starts."
        ]
        client.wait(client.aio.call("attach", worker_id="alone"))
    page.close()


def test_a_token_is_shown_once_and_revoked_and_the_language_is_changed(home: Home) -> None:
    page = home.context.new_page()
    page.goto(f"{home.url}/ops/tokens/")
    expect(page.get_by_label("Kind")).to_have_value("enrol")
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


def test_a_subject_is_paused_and_resumed_on_the_screen_of_a_server(server: ServerProcess, home: Home) -> None:
    page = home.context.new_page()
    with worker_of(server):
        page.goto(f"{home.url}/ops/subjects/")
        page.get_by_label("Pattern").fill(DEFAULT_SUBJECT)
        page.get_by_label("Reason").fill("the disk is full")
        page.get_by_role("button", name="Pause", exact=True).click()
        on(page, f"{DEFAULT_SUBJECT} is paused: its jobs wait.")
        run_job(page, home.url, "sh", "-c 'echo went on'")
        on(page, "because: the disk is full")
        job = page.url
        page.goto(f"{home.url}/ops/subjects/")
        page.get_by_role("button", name="Resume").click()
        on(page, f"{DEFAULT_SUBJECT} is resumed.")
        page.goto(job)
        on(page, "SUCCEEDED")
    page.close()


def test_a_job_is_submitted_by_the_keyboard_alone(server: ServerProcess, home: Home) -> None:
    page = home.context.new_page()
    with worker_of(server):
        page.goto(f"{home.url}/ops/")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        assert page.url.endswith("#main")
        tab_to(page, "Run a job")
        page.keyboard.press("Enter")
        page.wait_for_url("**/ops/run/")
        tab_to(page, "program")
        page.keyboard.type("sh")
        tab_to(page, "arguments")
        page.keyboard.type("-c 'echo typed'")
        tab_to(page, "Run")
        page.keyboard.press("Enter")
        expect(page.locator("pre")).to_have_text("typed\n")
    page.close()


def tab_to(page: Page, name: str) -> None:
    """Press Tab until the field with this name, or the link or button with this text, has the focus."""
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("[document.activeElement.name, document.activeElement.innerText]").count(name):
            return
    raise AssertionError(f"no Tab leads to {name}")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_in_a_field_is_that_of_the_page_and_no_placeholder_looks_like_it(home: Home, browser: Browser, theme: Any) -> None:
    context = new_context(browser, color_scheme=theme, storage_state=home.context.storage_state())
    page = context.new_page()
    for screen in ("jobs/", "run/", "subjects/", "tokens/", "audit/", "login/"):
        page.goto(f"{home.url}/ops/{screen}")
        text, fields = page.evaluate("""() => [getComputedStyle(document.body).color,
            [...document.querySelectorAll("main input:not([type=hidden]), main select, main textarea")].map(field =>
                [getComputedStyle(field).color, field.placeholder && getComputedStyle(field, "::placeholder").color])]""")
        assert fields, screen
        assert {colour for colour, _placeholder in fields} == {text}, screen
        assert text not in {placeholder for _colour, placeholder in fields}, screen
    context.close()


def test_times_are_those_of_the_viewers_zone(server: ServerProcess, home: Home, browser: Browser) -> None:
    with server.client() as client:
        client.submit(subject="zone.x", payload=b"", job_id="in-tokyo", watch=False)
    context = new_context(browser, timezone_id="Asia/Tokyo", storage_state=home.context.storage_state())
    page = context.new_page()
    page.goto(f"{home.url}/ops/jobs/in-tokyo/")
    time = page.locator("time").first
    at = datetime.fromisoformat(time.get_attribute("datetime") or "").astimezone(ZoneInfo("Asia/Tokyo"))
    shown = " ".join(time.inner_text().split())

    assert shown == f"{at.month}/{at.day}/{at.year}, {at:%I:%M:%S %p}".replace(", 0", ", ")
    context.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_screens_of_a_server_are_accessible_and_fit_a_phone(
    server: ServerProcess, home: Home, browser: Browser, theme: Any
) -> None:
    with worker_of(server, "--worker-id", "w" * 64), server.client() as client:
        job_id = "j" * 100
        long = client.submit(exec="sh", args=["-c", "exit 1"], retries=0, job_id=job_id, subject=".".join(["x" * 60] * 3))
        long.outcome(TIMEOUT_MS / 1000)
        context = new_context(browser, color_scheme=theme, storage_state=home.context.storage_state())
        some = ("", "jobs/", f"jobs/{job_id}/", "run/", "dead/", "workers/", "subjects/?subject=a&exec=sh", "tokens/", "caches/")
        look_at(context.new_page(), home.url, (*some, "audit/", "login/"), f"server-{theme}")
        context.close()
