"""The operations screens of a server, asked over HTTP: who gets in, what is refused, and which servers have none."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tasuki.core.job import JobSpec
from tasuki.stores.sql.store import FIND_SCAN_MAX
from tests.cli.commands import User, running
from tests.client.agent_processes import start_agents
from tests.support.django_site import DjangoSite
from tests.support.ports import free_port
from tests.support.processes import ServerProcess, start_server, start_worker
from tests.support.waiting import until

pytestmark = pytest.mark.e2e


def http_of(server: ServerProcess) -> str:
    found = re.search(r"listening (http://\S+)", server.output())
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start_server(tmp_path_factory.mktemp("server"), "--http", "127.0.0.1:0") as started:
        yield started


def log_in(url: str, token: str, **headers: str) -> tuple[httpx.Client, httpx.Response]:
    browser = httpx.Client(base_url=url, timeout=20.0, headers=headers)
    return browser, post(browser, "/ops/login/", token=token)


def post(browser: httpx.Client, address: str, **values: str) -> httpx.Response:
    token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', browser.get("/ops/login/").text)
    assert token is not None
    return browser.post(address, data={**values, "csrfmiddlewaretoken": token[1]})


def test_an_admin_token_gets_in_and_no_other_does(server: ServerProcess) -> None:
    url = http_of(server)
    browser, entered = log_in(url, server.token)
    cookie = next(value for name, value in entered.headers.multi_items() if name == "set-cookie" and "tasuki_ops=" in value)

    assert (entered.status_code, entered.headers["location"]) == (302, "/ops/")
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert browser.get("/ops/").status_code == 200
    assert "default-src 'none'" in browser.get("/ops/").headers["content-security-policy"]
    for kind in ("client", "worker"):
        assert log_in(url, server.create_token(kind))[1].status_code == 401, kind
    assert httpx.get(f"{url}/ops/jobs/").headers["location"] == "/ops/login/?next=%2Fops%2Fjobs%2F"
    assert httpx.get(f"{url}/ops/jobs/", headers={"Authorization": f"Bearer {server.token}"}).status_code == 302


def test_people_log_in_through_a_proxy_that_ends_tls(tmp_path: Path) -> None:
    name = "https://control.example"
    with start_server(tmp_path, "--http", "127.0.0.1:0", "--host-name", "control.example") as server:
        url = http_of(server)
        entered = {}
        for host, proto in (("control.example", "https"), ("control.example", ""), (urlsplit(url).netloc, "")):
            passed_on = {"X-Forwarded-Proto": proto} if proto else {}
            _browser, entered[host, proto] = log_in(url, server.token, Host=host, Origin=name, **passed_on)
        other = httpx.post(f"{url}/ops/login/", data={"token": server.token}, headers={"Origin": "https://evil.example"})

    assert {answer.status_code for answer in entered.values()} == {302}
    assert "Secure" in entered["control.example", "https"].headers["set-cookie"]
    assert other.status_code == 403


def test_a_session_ends_with_its_logout_and_with_its_token(server: ServerProcess) -> None:
    url = http_of(server)
    browser, _ = log_in(url, server.token)
    assert post(browser, "/ops/logout/").status_code == 302
    assert browser.get("/ops/").status_code == 302

    token_id, token = server.create_named_token("admin")
    browser, _ = log_in(url, token)
    assert browser.get("/ops/workers/").status_code == 200
    with server.client() as client:
        client.wait(client.aio.call("token.revoke", token_id=token_id))
    assert browser.get("/ops/workers/").headers["location"] == "/ops/login/?next=%2Fops%2Fworkers%2F"


def test_forged_requests_large_forms_and_screens_of_projects_are_refused(server: ServerProcess) -> None:
    browser, _ = log_in(http_of(server), server.token)
    forged = {"program": "echo", "csrfmiddlewaretoken": "x" * 64}

    assert browser.post("/ops/run/", data=forged).status_code == 403
    assert browser.post("/ops/run/", data={"program": "x" * 300_000}).status_code == 413
    assert browser.get("/ops/", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert browser.get("/ops/", headers={"Host": "evil.example"}).status_code == 403
    assert browser.delete("/ops/").status_code == 405
    assert [browser.get(f"/ops/{name}/").status_code for name in ("definitions", "events", "settings", "nowhere")] == [404] * 4


def test_peers_that_send_half_a_form_do_not_keep_others_from_the_screens(server: ServerProcess) -> None:
    url = http_of(server)
    place = urlsplit(url)
    half = f"POST /ops/login/ HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Length: 100\r\n\r\ntoken=".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            peer = stack.enter_context(socket.create_connection((place.hostname, place.port)))
            peer.sendall(half)

        assert httpx.get(f"{url}/ops/login/", timeout=5.0).status_code == 200


def test_lists_are_exported_and_a_job_that_does_not_exist_is_not_found(server: ServerProcess, tmp_path: Path) -> None:
    browser, _ = log_in(http_of(server), server.token)
    with server.client() as client, start_worker(server, "--exec", "say=/bin/echo {args}", command=True):
        given = tmp_path / "scene.bin"
        given.write_bytes(b"x" * 300_000)
        client.submit(exec="say", args=["=1+1"], files=[given], job_id="exported").outcome(20)

    assert [row["job_id"] for row in browser.get("/ops/jobs/?text=exported&format=json").json()] == ["exported"]
    assert browser.get("/ops/jobs/?format=csv").text.startswith("job_id,state,")
    assert browser.get("/ops/jobs/exported/log/stdout/").text == "=1+1\n"
    assert browser.get("/ops/jobs/exported/result/").content.startswith(b"PK")
    page = browser.get("/ops/jobs/exported/").text
    assert all(f"<li>{name} " in page for name in ("stdout.log", "stderr.log", "result.json"))
    assert all(f'>{kind}</td><td data-label="Attempt">1</td>' in page for kind in ("given to a worker", "started", "ended"))
    assert f"sha256 {sha256(given.read_bytes()).hexdigest()}" in browser.get("/ops/jobs/exported/").text
    assert browser.get("/ops/jobs/nobody/").status_code == 404
    assert browser.get("/ops/jobs/exported/log/secret/").status_code == 404


def test_subjects_are_paused_and_resumed_on_the_screen_of_a_server(server: ServerProcess) -> None:
    browser, _ = log_in(http_of(server), server.token)
    with server.client() as client:
        client.submit(subject="held.x", payload=b"", job_id="held", watch=False)
        paused = post(browser, "/ops/subjects/", action="pause", id="held.>", reason="a test")
        said = browser.get("/ops/jobs/held/").text
        shown = browser.get("/ops/subjects/").text
        resumed = post(browser, "/ops/subjects/", action="resume", id="held.>")

        assert [paused.status_code, resumed.status_code] == [302, 302]
        assert "because: a test" in said
        assert 'name="question" value="held.&gt;: Resume?' in shown
        assert client.wait(client.aio.call("paused")) == []
        audit = client.wait(client.aio.call("token.audit", limit=2))
        assert [row["action"] for row in audit] == ["subject.resume", "subject.pause"]


def test_workers_of_a_server_show_what_they_run_on_and_when_they_were_heard_of(server: ServerProcess) -> None:
    browser, _ = log_in(http_of(server), server.token)
    with start_worker(server, "--worker-id", "shown", "--exec", "say=/bin/echo {args}", command=True):
        [row] = browser.get("/ops/workers/?format=json").json()
        page = browser.get("/ops/workers/").text

    assert re.fullmatch(r"tasuki-python/[^ ]+", row["agent"])
    assert row["containment"] in ("cgroup", "subreaper", "group")
    assert 0 <= row["heartbeat_age_s"] < 60
    assert row["cpu"].endswith("%")
    assert "Version" in page
    assert "Cached files" not in page, "nobody knows of any"


def test_dead_letters_raise_an_alert_and_are_run_again_one_by_one(server: ServerProcess) -> None:
    browser, _ = log_in(http_of(server), server.token)
    with server.client() as client, start_worker(server, "--exec", "fail=/bin/false", command=True):
        for name in ("dead-1", "dead-2"):
            client.submit(exec="fail", retries=0, job_id=name).outcome(20)
    alert = "Jobs that failed for good within the last hour: %d."

    before = browser.get("/ops/").text
    one = post(browser, "/ops/dead/", action="rerun_one", id="dead-1")
    after = browser.get("/ops/").text

    assert alert % 2 in before
    assert "There is no leader" not in before
    assert one.status_code == 302
    assert alert % 1 in after
    assert post(browser, "/ops/dead/", action="rerun_one", id="dead-1").status_code == 400
    assert post(browser, "/ops/dead/", action="rerun_one", id="nobody").status_code == 404


def test_a_second_page_has_older_jobs_and_one_without_any_says_how_to_go_on(tmp_path: Path) -> None:
    with start_server(tmp_path, "--http", "127.0.0.1:0") as server, server.client() as client:
        browser, _ = log_in(http_of(server), server.token)
        client.submit(subject="old.one", payload=b"", job_id="old", watch=False)
        client.submit_many([JobSpec(job_id=f"many-{n}", subject="many.x") for n in range(FIND_SCAN_MAX)], watch=False)

        first = browser.get("/ops/jobs/?subject=many.x").text
        second = browser.get(older(first)).text
        empty = browser.get("/ops/jobs/?subject=old.*").text
        found = browser.get(older(empty)).text

    assert [first.count(">many-"), second.count(">many-")] == [50, 50]
    assert f">many-{FIND_SCAN_MAX - 51}<" in second
    assert "No match among the 20,000 jobs that were looked at" in empty
    assert ">old<" in found


def older(page: str) -> str:
    """Return the address of the next page."""
    link = re.search(r'href="(\?[^"]*)" rel="next"', page)
    assert link is not None
    return "/ops/jobs/" + link[1].replace("&amp;", "&")


def test_the_audit_of_a_server_has_older_pages_and_is_filtered(tmp_path: Path, postgres_url: str) -> None:
    for store in ("", postgres_url):
        with start_server(tmp_path, "--http", "127.0.0.1:0", store=store, data="shared" if store else "own") as server:
            browser, _ = log_in(http_of(server), server.token)
            with server.client() as client:
                for number in range(60):
                    client.wait(client.aio.call("pause", pattern=f"p{number}.>", reason="one of many"))
            first = browser.get("/ops/audit/").text
            second = browser.get(older(first).replace("jobs", "audit")).text
            filtered = browser.get("/ops/audit/", params={"target": "p7.>", "action": "pause"}).text
            none = browser.get("/ops/audit/", params={"actor": "nobody"}).text
            csv = browser.get("/ops/audit/?format=csv").text.splitlines()

        assert [f">p{number}.&gt;<" in first for number in (59, 10, 9)] == [True, True, False]
        assert [f">p{number}.&gt;<" in second for number in (10, 9, 0)] == [False, True, True]
        assert "token.create" in second
        assert filtered.count("<tr>") == 2
        assert "No such entry" in none
        assert len(csv) > 61


def test_a_cache_is_removed_on_the_screen_and_others_stay(server: ServerProcess, tmp_path: Path) -> None:
    given = tmp_path / "scene.bin"
    given.write_bytes(b"scene")
    with server.client() as client:
        for name in ("scene-7", "scene-8"):
            client.put_cache(name, given, target="render.>", require="0")
    browser, _ = log_in(http_of(server), server.token)

    def shown() -> list[tuple[str, int]]:
        return [(row["cache_id"], row["files"]) for row in browser.get("/ops/caches/?format=json").json()]

    before = shown()
    question = post(browser, "/ops/caches/", action="remove", id="scene-7", question="scene-7: Remove?")
    asked = shown()
    removed = [post(browser, "/ops/caches/", action="remove", id=name).status_code for name in ("scene-7", "scene-7")]

    assert sorted(before) == sorted(asked) == [("scene-7", 1), ("scene-8", 1)]
    assert "Are you sure?" in question.text
    assert removed == [302, 404]
    assert shown() == [("scene-8", 1)]


def test_agents_are_shown_with_their_breakers_in_both_homes_where_the_environment_names_them(tmp_path: Path) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    with start_agents(tmp_path, 1) as agents:
        env = {"TASUKI_URL": f"agents:{agents.urls[0]},{gone}", "TASUKI_DATA": str(tmp_path / "notes")}
        with start_server(tmp_path, "--http", "127.0.0.1:0", env={"TASUKI_URL": env["TASUKI_URL"]}) as server:
            browser, _ = log_in(http_of(server), server.token)
            of_server = browser.get("/ops/agents/?format=json").json()
            page = browser.get("/ops/agents/").text
        site = DjangoSite(tmp_path, **env)
        site.migrate()
        of_project = site.ask(
            """
from django.contrib.auth.models import User
from django.test import Client
browser = Client(headers={"host": "localhost"})
browser.force_login(User.objects.create_superuser("admin"))
print(browser.get("/ops/agents/?format=json").content.decode())
"""
        )

    for found in (of_server, of_project):
        assert [(node["node"], node["standing"], node["breaker"]) for node in found] == [
            (agents.urls[0], "free", "closed"),
            (gone, "left_out", "open"),
        ]
    assert ">Agents</a>" in page


def test_pages_that_do_not_exist_have_the_headers_of_a_screen(server: ServerProcess) -> None:
    browser, _ = log_in(http_of(server), server.token)
    for answer in (
        browser.get("/ops/nowhere/"),
        browser.get("/ops/settings/"),
        browser.get("/ops/agents/"),
        browser.post("/ops/run/", data={"program": "x"}),
    ):
        assert answer.status_code in (403, 404)
        assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_the_link_of_tasuki_up_works_once_from_this_machine_and_logins_are_slowed_down(tmp_path: Path) -> None:
    user = User(tmp_path)
    with running(user, "up", "--tcp", "127.0.0.1:0", "--http", "127.0.0.1:0", "--workers", "0") as server:
        link = until(lambda: next((line.strip() for line in server.lines if "/ops/login/?code=" in line), ""), what="the link")

        passed_on = httpx.get(link, headers={"X-Forwarded-For": "192.0.2.1"})
        with httpx.Client(base_url=link.partition("/ops/")[0]) as browser:
            posted = post(browser, link.partition(str(browser.base_url).rstrip("/"))[2], token="")
        entered = [httpx.get(link).status_code for _ in range(2)]
        wrong = [log_in(link.partition("/ops/")[0], "tsk_a_wrong")[1].status_code for _ in range(10)]

    assert passed_on.status_code == posted.status_code == 401
    assert entered == [302, 401]
    assert wrong == [401] * 9 + [429], "an empty token counts, links do not"


def test_servers_on_postgresql_have_the_screens_too_and_the_leader_steps_down_there(tmp_path: Path, postgres_url: str) -> None:
    with (
        start_server(tmp_path, "--http", "127.0.0.1:0", store=postgres_url) as server,
        start_server(tmp_path, store=postgres_url, data="second"),
    ):
        browser, entered = log_in(http_of(server), server.token)
        until(lambda: 'value="degrade"' in browser.get("/ops/workers/").text, what="a server leads, and knows the other one")
        first = leader(browser)
        told = post(browser, "/ops/workers/", action="degrade", id=first, reason="a test")
        until(lambda: leader(browser) not in ("", first), what="the other one leads")
        audit = browser.get("/ops/audit/?format=json").json()
        with server.client() as client:
            client.submit(subject="a.b", payload=b"", job_id="waits", watch=False)

        assert entered.status_code == told.status_code == 302
        assert [(row["action"], row["target"], row["detail"]) for row in audit[:1]] == [("leader.degrade", first, "a test")]
        assert ">waits<" in browser.get("/ops/jobs/").text
        assert "No worker is connected" in browser.get("/ops/jobs/waits/").text
        assert [browser.get(f"/ops/{name}").status_code for name in ("", "workers/", "tokens/", "audit/")] == [200] * 4


def leader(browser: httpx.Client) -> str:
    """Return the leader that the overview names."""
    found = re.search(r"Leader: (\S+)", browser.get("/ops/").text)
    return found[1] if found is not None else ""


def test_a_server_on_redis_says_that_the_screens_need_sql_and_goes_on(tmp_path: Path, redis_url: str) -> None:
    with start_server(tmp_path, "--http", "127.0.0.1:0", store=redis_url) as server:
        answer = httpx.get(f"{http_of(server)}/ops/")

        assert answer.status_code == 404
        assert "the operations screens need a SQL store; this server is on Redis" in answer.json()["error"]["message"]
        with server.client() as client:
            client.submit(subject="a.b", payload=b"", watch=False)
