"""The operations screens of a Django project in a real browser: operations and the audit, output, live parts, who sees what."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.support.browser import TIMEOUT_MS, keep_picture, look_at, new_context, open_browser, refused_by_policy, violations
from tests.support.django_site import EXAMPLE, DjangoSite
from tests.support.ports import free_port
from tests.support.processes import ChildProcess
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
LOSS_TIMEOUT_MS = 40_000
PASSWORD = "a long password"
USERS = f"""
from django.contrib.auth.models import Permission, User
from tasuki.django.definitions import apply

def user(name, *permissions):
    made = User.objects.create_user(name, password="{PASSWORD}")
    made.user_permissions.set(Permission.objects.filter(codename__in=permissions))

user("viewer", "view_jobrun")
user("admin", "view_jobrun", "change_jobrun", "change_jobdefinition", "change_schedulersettings", "change_member")
apply({{"nightly": {{"command_name": "daily_report", "daily_at": "02:30", "time_zone": "Europe/Berlin"}}}}, source="settings")
"""


class Home(NamedTuple):
    """The web server of a project, and its project."""

    url: str
    site: DjangoSite


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@contextlib.contextmanager
def served(site: DjangoSite) -> Iterator[Home]:
    """A web server on a project with its tables and users."""
    site.manage("migrate", "-v0")
    site.run(USERS)
    place = f"127.0.0.1:{free_port()}"
    command = [site.python, EXAMPLE / "manage.py", "runserver", "--noreload", place]
    with ChildProcess(command, site.folder / "web.log", site.env):
        until(lambda: _answers(f"http://{place}/ops/login/"), what="the web server answers")
        yield Home(f"http://{place}", site)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with served(DjangoSite(tmp_path_factory.mktemp("site"))) as home:
        yield home


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def logged_in(browser: Browser, home: Home, name: str, **options: Any) -> BrowserContext:
    context = new_context(browser, **options)
    page = context.new_page()
    page.goto(f"{home.url}/ops/login/")
    page.locator("[name=username]").fill(name)
    page.locator("[name=password]").fill(PASSWORD)
    page.locator("main button").click()
    page.wait_for_url(f"{home.url}/ops/")
    page.close()
    return context


def on(page: Page, text: str, timeout: float = TIMEOUT_MS) -> None:
    expect(page.get_by_text(text).first).to_be_visible(timeout=timeout)


def test_output_of_any_kind_is_text_of_which_beginning_and_end_are_kept(home: Home, browser: Browser) -> None:
    page = logged_in(browser, home, "admin").new_page()
    with home.site.worker():
        page.goto(f"{home.url}/ops/run/")
        page.get_by_label("Command").select_option("probe")
        page.get_by_label("Arguments").fill("noisy")
        page.get_by_role("button", name="Run", exact=True).click()
        expect(page.locator(".summary .state")).to_have_text("SUCCEEDED", timeout=LOSS_TIMEOUT_MS)
        page.reload()
        expect(page.locator("pre").first).to_contain_text("the last line")
        assert page.title() != "owned"
        assert len(page.content()) < 500_000
        page.get_by_label("Lines with").fill("<script>")
        page.get_by_role("button", name="Search output").click()
        expect(page.locator("pre").first).to_contain_text("document.title='owned'")
        assert page.title() != "owned"
        assert refused_by_policy(page) == []
        with page.expect_download() as downloading:
            page.get_by_role("link", name="download all").first.click()
        kept = downloading.value.path().read_bytes()
        assert b"bytes were not kept" in kept
        assert 1_000_000 < len(kept) < 2_000_000
        assert b"\x1b[31mred" in kept
    page.context.close()


def test_the_overview_and_a_job_follow_within_two_seconds_and_rest_in_a_hidden_tab(home: Home, browser: Browser) -> None:
    context = logged_in(browser, home, "admin")
    overview, job = context.new_page(), context.new_page()
    overview.goto(f"{home.url}/ops/")
    waiting = overview.locator(".figures li", has_text="Waiting").locator("strong")
    before = int(waiting.inner_text())
    job_id = home.site.run("from tasuki.django import enqueue_command\nprint(enqueue_command('daily_report'))").strip()
    expect(waiting).to_have_text(str(before + 1))
    job.goto(f"{home.url}/ops/jobs/{job_id}/")
    home.site.manage("tasuki_runs", "cancel", job_id)
    expect(job.locator(".summary .state")).to_have_text("CANCELED")
    expect(waiting).to_have_text(str(before))

    for page in (overview, job):
        page.evaluate(COUNT_REQUESTS)
    until(lambda: overview.evaluate("window.looks.length") >= 3, what="the overview asks three times")
    looks = overview.evaluate("window.looks")
    assert min(later - sooner for sooner, later in pairwise(looks)) <= 2_000, looks
    overview.evaluate("Object.defineProperty(document, 'visibilityState', {get: () => 'hidden'})")
    overview.wait_for_timeout(500)  # for a request under way
    seen = overview.evaluate("window.looks.length")
    overview.wait_for_timeout(3_500)  # longer than two intervals
    assert overview.evaluate("window.looks.length") == seen, "a hidden tab asks for nothing"
    assert job.evaluate("window.looks.length") == 0, "nothing more happens to a job that has ended"
    context.close()


COUNT_REQUESTS = """
window.looks = [];
document.addEventListener("htmx:beforeRequest", () => window.looks.push(performance.now()));
"""


def test_operations_of_a_project_take_effect_and_stand_in_the_audit(home: Home, browser: Browser) -> None:
    page = logged_in(browser, home, "admin").new_page()
    page.goto(f"{home.url}/ops/definitions/")
    page.get_by_role("button", name="Run now").click()
    on(page, "Run e1-1 was asked for")
    page.get_by_label("Time", exact=True).fill("03:45")
    page.get_by_role("button", name="Save").click()
    on(page, "Saved.")
    on(page, "03:45+0")
    page.get_by_role("button", name="Pause").click()
    on(page, "It is not fired any more.")
    page.get_by_role("button", name="Resume").click()
    on(page, "It is fired again.")
    page.goto(f"{home.url}/ops/settings/")
    page.get_by_label("Skip late runs after seconds").fill("90")
    page.get_by_role("button", name="Save").click()
    on(page, "In force within two ticks.")
    page.goto(f"{home.url}/ops/run/")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("button", name="Cancel").click()
    on(page, "CANCELED")
    page.get_by_role("button", name="Run again").click()
    on(page, "Run again: 1.")
    page.goto(f"{home.url}/ops/audit/")
    for done in (
        "definition.run",
        "definition.change",
        "definition.disable",
        "definition.enable",
        "settings.change",
        "run.enqueue",
        "run.cancel",
        "run.rerun",
    ):
        expect(page.locator("tr", has_text=done).first).to_contain_text("admin")
    keep_picture(page, "project-audit")
    page.context.close()


def test_the_form_of_a_schedule_shows_the_fitting_fields_and_the_next_times_while_one_writes(
    home: Home, browser: Browser
) -> None:
    page = logged_in(browser, home, "admin").new_page()
    page.goto(f"{home.url}/ops/definitions/new/")
    page.get_by_label("Time zone").select_option("Europe/Berlin")
    page.get_by_label("When").select_option("cron")
    expect(page.get_by_label("Time", exact=True)).to_be_hidden()
    page.get_by_label("Cron").fill("0 12 31 2 *")
    on(page, "Bad day-of-month")
    page.get_by_label("Cron").fill("30 2 25-31 mar,oct sun")
    expect(page.locator(".times li")).to_have_count(10)
    expect(page.locator(".times mark").first).to_contain_text(re.compile("clock set (forward|back) by 60 min"))
    page.get_by_label("When").select_option("weekly")
    expect(page.get_by_label("Cron")).to_be_hidden()
    page.get_by_label("Sat").check()
    page.get_by_label("Time", exact=True).fill("09:15")
    on(page, "09:15+0")
    page.get_by_label("Name").fill("written")
    keep_picture(page, "project-schedule")
    page.get_by_role("button", name="Save").click()
    on(page, "Saved.")
    expect(page.get_by_label("When")).to_have_value("weekly")
    page.get_by_role("button", name="Delete").click()
    on(page, "Definition written is deleted.")
    page.context.close()


def test_a_viewer_sees_every_screen_without_buttons_to_change_anything(home: Home, browser: Browser) -> None:
    page = logged_in(browser, home, "viewer").new_page()
    for name in ("", "jobs/", "dead/", "workers/", "subjects/", "definitions/", "events/", "settings/", "run/"):
        page.goto(f"{home.url}/ops/{name}")
        assert page.locator("main form[method=post] button").count() == 0, name
    page.goto(f"{home.url}/ops/definitions/")
    page.get_by_role("link", name="nightly").click()
    for field, screen in (("Name", ""), ("Leader tick seconds", "settings/")):
        if screen:
            page.goto(f"{home.url}/ops/{screen}")
        expect(page.get_by_label(field)).to_be_disabled()
        on(page, "Your account may look at this, but not change it.")
        assert violations(page) == []
    page.context.close()


@pytest.mark.parametrize(("theme", "locale"), [("light", "en-GB"), ("dark", "ja-JP")])
def test_screens_of_a_project_are_accessible_and_fit_a_phone(home: Home, browser: Browser, theme: Any, locale: str) -> None:
    job_id = home.site.run("from tasuki.django import enqueue_command\nprint(enqueue_command('daily_report'))").strip()
    page = logged_in(browser, home, "admin", color_scheme=theme, locale=locale).new_page()
    page.goto(f"{home.url}/ops/definitions/")
    assert page.locator("html").get_attribute("lang") == locale[:2]
    nightly = page.get_by_role("link", name="nightly").get_attribute("href") or ""
    common = ("", "jobs/", f"jobs/{job_id}/", "run/", "dead/", "workers/", "subjects/?subject=tasuki.default", "audit/", "login/")
    own = ("definitions/", nightly.removeprefix("/ops/"), "definitions/new/", "events/?event_type=order.paid", "settings/")
    look_at(page, home.url, common + own, f"project-{theme}")
    page.context.close()
