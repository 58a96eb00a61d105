"""Pages of the operations screens that are seldom seen, in a real browser: agents, a question without script, 404, 400."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.django.test_ops_server import http_of
from tests.support.browser import TIMEOUT_MS, look_at, new_context, open_browser, violations
from tests.support.ports import free_port
from tests.support.processes import start_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SEND_WITHOUT_SCRIPT = """() => {
    const form = document.createElement("form");
    form.method = "post";
    form.innerHTML = '<input name="action" value="pause"><input name="id" value="a.b"><input name="question" value="Pause a.b?">';
    form.append(document.querySelector("[name=csrfmiddlewaretoken]").cloneNode());
    document.body.append(form);
    form.submit();
}"""


def test_agents_questions_and_errors_are_accessible_and_fit_a_phone(tmp_path: Path) -> None:
    agents = {"TASUKI_URL": f"agents:http://127.0.0.1:{free_port()}", "TASUKI_DATA": str(tmp_path / "notes")}
    with start_server(tmp_path, "--http", "127.0.0.1:0", env=agents) as server, open_browser() as browser:
        url, context = http_of(server), new_context(browser)
        page = context.new_page()
        page.goto(f"{url}/ops/subjects/")
        page.get_by_label("Admin token").fill(server.token)
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("heading", name="Subjects")).to_be_visible(timeout=TIMEOUT_MS)
        page.evaluate(SEND_WITHOUT_SCRIPT)
        expect(page.get_by_role("heading", name="Are you sure?")).to_be_visible(timeout=TIMEOUT_MS)
        assert violations(page) == []
        page.get_by_role("button", name="Yes").click()
        expect(page.get_by_text("a.b is paused: its jobs wait.")).to_be_visible(timeout=TIMEOUT_MS)
        look_at(page, url, ("agents/", "jobs/nobody/", "audit/?from=yesterday"), "server-seldom")
        context.close()
