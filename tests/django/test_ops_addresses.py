"""Every address of the screens, in both homes, as everybody: deny by default, no change without the page's token."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import require
from tests.django.test_ops import SCREENS
from tests.django.test_ops_server import http_of, log_in
from tests.support.django_site import DjangoSite
from tests.support.ports import free_port
from tests.support.processes import TASUKI, ChildProcess, start_server, start_worker

pytestmark = pytest.mark.e2e
WITHOUT_SESSION = {"login", "logout", "language", "asset"}
OF_SERVERS = {"result", "tokens", "caches"}
OF_PROJECTS = {"definitions", "new_definition", "definition", "events", "settings"}
AGENTS = {"TASUKI_URL": "agents:http://127.0.0.1:9"}
"""Names a node agent that does not answer: then there is a screen for agents."""
OPERATED = {"jobs", "dead", "run", "definitions", "events"}
"""Screens whose POST needs the permission of an operator; that of all others needs more, or is refused to everybody."""
CLOSED = {("run", "viewer"), ("new_definition", "viewer"), ("new_definition", "operator")}
"""Forms for something new, and who gets 403 instead of one that they may not send."""
ADDRESSES = """
from django.urls import get_resolver
names = {"job_id": JOB, "stream": "stdout", "pk": PK, "name": "ops.css"}
addresses = {
    pattern.name: "/ops/" + re.sub(r"<\\w+:(\\w+)>", lambda match: str(names[match[1]]), str(pattern.pattern))
    for pattern in get_resolver("tasuki.django.ops.urls").url_patterns
}
"""


def test_every_address_of_a_project_answers_each_person_as_their_permissions_say(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path, **AGENTS)
    site.migrate()
    found: dict[str, dict[str, Any]] = site.ask(
        SCREENS
        + "from tasuki.django import emit\nwrite_log(job_id, 1, 'stdout', b'hello')\n"
        + ADDRESSES.replace("JOB", "job_id").replace("PK", "nightly.pk")
        + """
from django.contrib.auth.models import Group
def member(name):
    browser = user(name)
    User.objects.get(username=name).groups.add(Group.objects.get(name="tasuki admin"))
    return browser

def token_of(browser):
    return re.search(rb'name="csrfmiddlewaretoken" value="(\\w+)"', browser.get("/ops/login/").content).group(1).decode()

admin, ended = member("chief"), user("gone", "view_jobrun", "change_jobrun")
session = ended.cookies["sessionid"].value
ended.post("/ops/logout/", {"csrfmiddlewaretoken": token_of(ended)})
ended.cookies["sessionid"] = session
people = {"anonymous": Client(enforce_csrf_checks=True), "ended": ended, "nobody": nobody, "viewer": viewer,
          "operator": operator, "admin": admin}
found = {}
for name, address in addresses.items():
    row = found[name] = {}
    for person, browser in people.items():
        if name == "logout":  # who logs out cannot go on
            browser = Client(enforce_csrf_checks=True)
            if person not in ("anonymous", "ended"):
                browser.force_login(User.objects.get(username={"admin": "chief"}.get(person, person)))
        got, head = browser.get(address), browser.head(address)
        forged = browser.post(address, {"action": "cancel"})
        posted = browser.post(address, {"csrfmiddlewaretoken": token_of(browser), "action": "none"})
        policy = got.headers.get("Content-Security-Policy", "")
        row[person] = [one.status_code for one in (got, head, forged, posted)] + [policy.startswith("default-src 'none'")]
print(json.dumps(found))
"""
    )

    assert set(found) >= WITHOUT_SESSION | OF_SERVERS | OF_PROJECTS | OPERATED | {"overview", "job", "log", "audit"}
    assert found["login"]["anonymous"][:4] == [200, 200, 403, 401]
    for name in ("logout", "language"):
        assert all(row[:4] == [405, 405, 403, 302] for row in found[name].values()), name
    assert all(row[:2] == [200, 200] for row in found["asset"].values())
    for name in found.keys() - WITHOUT_SESSION:
        row = found[name]
        for person in ("anonymous", "ended"):
            assert row[person][:4] == [302, 302, 403, 302], f"{name} for {person}"
        assert row["nobody"][:4] == [403] * 4, name
        seen = 404 if name in OF_SERVERS else 200
        for person in ("viewer", "operator", "admin"):
            shown = 403 if (name, person) in CLOSED else seen
            assert row[person][:3] == [shown, shown, 403], f"{name} for {person}"
            assert row[person][4] or seen == 404, f"{name} for {person} has no policy"
        assert row["viewer"][3] == 403, f"{name}: a viewer changes nothing"
        assert (row["operator"][3] != 403) == (name in OPERATED), f"{name} for an operator"
        assert row["admin"][3] < 500, name


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All addresses, by their names; of a job that is named `seen`."""
    site = DjangoSite(tmp_path_factory.mktemp("site"))
    code = "import re\n" + ADDRESSES.replace("JOB", "'seen'").replace("PK", "1") + "print(json.dumps(addresses))"
    found: dict[str, str] = site.ask(code)
    return found


def test_every_address_of_a_server_is_for_admins_alone(tmp_path: Path, addresses: dict[str, str]) -> None:
    with start_server(tmp_path, "--http", "127.0.0.1:0", env=AGENTS) as server:
        url = http_of(server)
        with server.client() as client, start_worker(server, "--exec", "say=/bin/echo {args}", command=True):
            client.submit(exec="say", args=["hello"], job_id="seen").outcome(30)
        token_id, token = server.create_named_token("admin")
        ended, _ = log_in(url, token)
        with server.client() as client:
            client.wait(client.aio.call("token.revoke", token_id=token_id))
        admin, _ = log_in(url, server.token)
        anonymous = httpx.Client(base_url=url, timeout=20.0)
        anonymous.get("/ops/login/")

        def statuses(browser: httpx.Client, address: str) -> list[int]:
            form = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', browser.get("/ops/login/").text)
            assert form is not None
            asked = [browser.get(address), browser.head(address), browser.post(address, data={"action": "cancel"})]
            posted = browser.post(address, data={"csrfmiddlewaretoken": form[1], "action": "none"})
            return [answer.status_code for answer in (*asked, posted)]

        found = {name: {"anonymous": statuses(anonymous, address)} for name, address in addresses.items() if name != "logout"}
        for name, row in found.items():
            # The token was revoked: the first request finds out, and ends the session.
            row["ended"] = [ended.get(addresses[name]).status_code]
            row["admin"] = statuses(admin, addresses[name])

    assert found["login"]["anonymous"] == [200, 200, 403, 401]
    for name in found.keys() - WITHOUT_SESSION:
        row = found[name]
        assert row["anonymous"] == [302, 302, 403, 302], name
        assert row["ended"] == [302], name
        seen = 404 if name in OF_PROJECTS else 200
        assert row["admin"][:3] == [seen, seen, 403], name
        assert row["admin"][3] in ((404,) if name in OF_PROJECTS else (200, 302, 400, 403)), name


def test_a_link_that_is_opened_from_another_address_is_not_used_up(tmp_path: Path) -> None:
    """The one-time link is for the server's own machine; who else opens it gets nothing, and does not take it away."""
    own = _own_address()
    require("a network address besides loopback", own is not None, "ip addr")
    port = free_port()
    options = ("--tcp", "127.0.0.1:0", "--http", f"0.0.0.0:{port}", "--insecure", "--workers", "0")
    with ChildProcess([*TASUKI, "up", "--data", str(tmp_path / "data"), *options], tmp_path / "up.log", {}) as up:
        up.wait_for_output("/v1/jobs")
        link = re.search(r"/ops/login/\?code=\S+", up.output())
        assert link is not None
        assert f"http://127.0.0.1:{port}{link[0]}" in up.output(), "no address that is only good to listen on"
        passed_on = httpx.get(f"http://127.0.0.1:{port}{link[0]}", headers={"Host": "control.example"}).status_code
        far = [httpx.get(f"http://{own}:{port}{link[0]}").status_code for _ in range(2)]
        near = [httpx.get(f"http://127.0.0.1:{port}{link[0]}").status_code for _ in range(2)]

    assert passed_on == 401, "a proxy on this machine, which only tells by which name it was asked"
    assert far == [401, 401]
    assert near == [302, 401]


def _own_address() -> str | None:
    """Return an address of this machine that is not loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return None
        found = str(way.getsockname()[0])
    return None if found.startswith("127.") else found
