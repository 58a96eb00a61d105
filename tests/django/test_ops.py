"""The operations screens, asked as a browser asks: permissions, actions, exports, output that is hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.django_site import DjangoSite
from tests.support.postgres_service import PostgresService

pytestmark = pytest.mark.e2e

SCREENS = """
import re
from django.contrib.auth.models import Permission, User
from functools import partial
from django.test import Client as AnyClient
from django.urls import get_resolver
from tasuki.django import emit, enqueue_command
from tasuki.django.definitions import apply
from tasuki.django.logs import write_log
from tasuki.django.models import Event, JobDefinition, JobRun, SchedulerSettings

Client = partial(AnyClient, headers={"host": "localhost"})

def user(name, *permissions):
    made = User.objects.create_user(name, password="a long password")
    made.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(made)
    return browser

def post(browser, address, **values):
    page = browser.get("/ops/")
    token = re.search(rb'name="csrfmiddlewaretoken" value="(\\w+)"', page.content).group(1).decode()
    return browser.post(address, {**values, "csrfmiddlewaretoken": token})

def said(response):
    from urllib.parse import parse_qs, urlsplit
    from django.core import signing
    from tasuki.django.ops.screens import DONE_SALT
    place = urlsplit(response.headers["Location"])
    return place.path + ": " + signing.loads(parse_qs(place.query)["done"][0], salt=DONE_SALT)

anonymous, nobody = Client(), user("nobody")
viewer = user("viewer", "view_jobrun")
operator = user("operator", "view_jobrun", "change_jobrun")
admin = user("admin", "view_jobrun", "change_jobrun", "change_jobdefinition", "change_schedulersettings")
job_id = enqueue_command("daily_report")
apply({"nightly": {"command_name": "daily_report", "daily_at": "02:30", "time_zone": "Europe/Berlin"}}, source="settings")
nightly = JobDefinition.objects.get()
"""


@pytest.fixture
def migrated(site: DjangoSite) -> DjangoSite:
    site.migrate()
    return site


def ask(site: DjangoSite, code: str) -> Any:
    return site.ask(SCREENS + code)


def test_every_address_asks_for_a_login_and_a_permission_and_shows_no_action_to_a_viewer(migrated: DjangoSite) -> None:
    found = ask(
        migrated,
        """
emit("order.paid", {"order": 1})
write_log(job_id, 1, "stdout", b"hello")
names = {"job_id": job_id, "stream": "stdout", "pk": nightly.pk, "name": "ops.css"}
found = {}
for pattern in get_resolver("tasuki.django.ops.urls").url_patterns:
    address = "/ops/" + re.sub(r"<\\w+:(\\w+)>", lambda match: str(names[match[1]]), str(pattern.pattern))
    if pattern.name in ("login", "logout", "language", "asset", "result", "tokens", "caches"):
        continue
    gets = [browser.get(address) for browser in (anonymous, nobody, viewer, operator, admin)]
    posts = [post(browser, address).status_code for browser in (viewer, operator)]
    forged = [browser.post(address).status_code for browser in (operator, admin)]
    policy = gets[2].headers.get("Content-Security-Policy", "")
    buttons = [b"<button name=" in page.getvalue() for page in gets[2:4]]
    strict = "unsafe" not in policy and "default-src 'none'" in policy
    found[pattern.name] = [[page.status_code for page in gets], posts, forged, strict, buttons]
asset = anonymous.get("/ops/assets/ops.css").status_code, anonymous.get("/ops/assets/../views.py").status_code
print(json.dumps([found, asset, anonymous.get("/ops/jobs/?state=FAILED").headers["Location"]]))
""",
    )
    screens, asset, location = found

    assert set(screens) == {
        "overview", "jobs", "job", "log", "run", "dead", "subjects", "workers", "definitions", "new_definition", "definition",
        "events", "settings", "audit",
    }  # fmt: skip
    for name, (gets, posts, forged, has_policy, buttons) in screens.items():
        assert gets == [302, 403, 200, 200, 200], name
        assert posts[0] == 403, f"{name}: a viewer changes nothing"
        assert forged == [403, 403], f"{name}: without a token of the page nothing is changed"
        assert has_policy, name
        assert not buttons[0], f"{name}: a viewer sees no action"
    assert {name for name, row in screens.items() if row[4][1]} == {"jobs", "job", "definitions"}, "an operator sees some"
    assert asset == [200, 404]
    assert location == "/ops/login/?next=%2Fops%2Fjobs%2F%3Fstate%3DFAILED"


def test_jobs_are_canceled_run_again_filtered_and_exported(migrated: DjangoSite) -> None:
    found = ask(
        migrated,
        """
other = enqueue_command("daily_report", queue="night")
canceled = post(operator, "/ops/jobs/", action="cancel", job_id=[job_id, other], reason="not today")
states = [JobRun.objects.get(idempotency_key=one).state for one in (job_id, other)]
again = post(operator, "/ops/jobs/", action="rerun", job_id=[job_id], one="1")
page = operator.get(f"/ops/jobs/{job_id}/").content.decode()
bad = [post(operator, "/ops/jobs/", **values) for values in (
    {"action": "cancel"}, {"action": "erase", "job_id": [job_id]}, {"action": "rerun", "job_id": [job_id]})]
listed = [operator.get("/ops/jobs/", values) for values in (
    {"state": "CANCELED", "within": "1h"}, {"subject": "night.>"}, {"text": job_id},
    {"state": "GONE"}, {"cursor": "x"}, {"subject": "a..b"})]
exported = json.loads(operator.get("/ops/jobs/?format=json").content)
csv = operator.get("/ops/jobs/?format=csv").content.decode().splitlines()
print(json.dumps([
    said(canceled), states, said(again), page,
    [(one.status_code, one.content.decode()) for one in bad],
    [(one.status_code, job_id in one.content.decode(), other in one.content.decode()) for one in listed],
    [one["job_id"] for one in exported], csv[0].split(",")[:2], len(csv), job_id, other,
    operator.get("/ops/jobs/nobody/").status_code]))
""",
    )
    location, states, again, page, bad, listed, exported, head, lines, job_id, other, unknown = found

    assert location == "/ops/jobs/: Canceled: 2. Being stopped: 0."
    assert states == ["CANCELED", "CANCELED"]
    assert again == f"/ops/jobs/{job_id}/: Run again: 1."
    assert "<td>operator</td>" in page
    assert "not today" in page
    assert "python manage.py tasuki_worker" in page
    for (status, text), says in zip(bad, ("no job was chosen", "action must be one of cancel, rerun", "not ended"), strict=True):
        assert (status, says in text) == (400, True)
    assert listed[:3] == [[200, False, True], [200, False, True], [200, True, False]]
    assert [status for status, _, _ in listed[3:]] == [400, 400, 400]
    assert exported == [other, job_id]
    assert (head, lines, unknown) == (["job_id", "state"], 3, 404)


def test_definitions_events_and_settings_are_changed_by_those_who_may(migrated: DjangoSite) -> None:
    found = ask(
        migrated,
        """
fields = {"name": "nightly", "command_name": "daily_report", "kind": "daily_at",
          "time_zone": "Europe/Berlin", "queue": "default", "max_retries": 3, "retry_backoff_seconds": 10,
          "concurrency_policy": "forbid", "enabled": "on"}
address = f"/ops/definitions/{nightly.pk}/"
wrong = post(admin, address, **fields, at="25:00")
refused = post(operator, address, **fields, at="03:30").status_code
saved = post(admin, address, **fields, at="03:30").status_code
page = viewer.get(address).content.decode()
run = said(post(operator, "/ops/definitions/", id=nightly.pk))
emitted = post(operator, "/ops/events/", event_type="order.paid", payload='{"order": 17}').status_code
unreadable = post(operator, "/ops/events/", event_type="order.paid", payload="{").content.decode()
Event.objects.update(problem="definition mail: it is wrong")
told = ["definition mail: it is wrong" in viewer.get(address).content.decode() for address in ("/ops/", "/ops/events/")]
admin.get("/ops/settings/")
[row] = SchedulerSettings.objects.values()
limits = {**{name: value for name, value in row.items() if value is not None}, "skip_late_runs_after_seconds": 60}
late = [post(browser, "/ops/settings/", **limits).status_code for browser in (operator, admin)]
print(json.dumps([wrong.status_code, "Enter a valid time" in wrong.content.decode(), refused, saved, "03:30" in page, run, emitted,
                  "is not JSON" in unreadable, Event.objects.count(), told, late,
                  SchedulerSettings.objects.get().skip_late_runs_after_seconds,
                  [(one["actor"], one["action"]) for one in json.loads(viewer.get("/ops/audit/?format=json").content)]]))
""",
    )

    assert found[:5] == [200, True, 403, 302, True]
    assert found[5].startswith("/ops/definitions/1/: Run e1-1 was asked for")
    assert found[6:9] == [302, True, 2]
    assert found[9:12] == [[True, True], [403, 302], 60.0]
    assert found[12] == [
        ["admin", "settings.change"],
        ["operator", "event.emit"],
        ["operator", "definition.run"],
        ["admin", "definition.change"],
    ]


def test_output_is_shown_as_text_whatever_it_is(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.migrate()
    found = ask(
        site,
        """
write_log(job_id, 1, "stdout", b"<script>alert(1)</script>\\x1b[31mred\\x00\\xff" + b"x" * 300_000)
write_log(job_id, 1, "stdout", b"after a gap\\n", offset=10_000_000)
write_log(job_id, 2, "stdout", b"once more\\n")
write_log(job_id, 1, "errors", json.dumps(["builtins.ValueError", "Traceback </pre><b>"]).encode())
page = viewer.get(f"/ops/jobs/{job_id}/").content.decode()
search = viewer.get(f"/ops/jobs/{job_id}/", {"find": "script"}).content.decode()
file = viewer.get(f"/ops/jobs/{job_id}/log/stdout/")
print(json.dumps([len(page), "<script>alert" in page + search, "&lt;/pre&gt;&lt;b&gt;" in page, "bytes were not kept" in page,
                  "attempt 2" in page,
                  "&lt;script&gt;alert(1)" in search, file.headers["Content-Disposition"].startswith("attachment"),
                  len(file.getvalue()), viewer.get(f"/ops/jobs/{job_id}/log/secret/").status_code]))
""",
    )

    assert found[0] < 200_000
    assert found[1:7] == [False, True, True, True, True, True]
    assert found[7] > 300_000
    assert found[8] == 404


def test_a_login_needs_the_password_goes_where_it_was_asked_and_is_slowed_down(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.migrate()
    found = ask(
        site,
        """
def log_in(password, **values):
    return Client().post("/ops/login/", {"username": "viewer", "password": password, **values})
wanted = [log_in("a long password", next=place).headers["Location"] for place in ("/ops/jobs/", "https://evil.example/", "")]
wrong = [log_in("wrong").status_code for _ in range(12)]
print(json.dumps([wanted, wrong, log_in("a long password").status_code, viewer.get("/ops/logout/").status_code,
                  post(viewer, "/ops/logout/").status_code, viewer.get("/ops/").status_code]))
""",
    )

    assert found[0] == ["/ops/jobs/", "/ops/", "/ops/"]
    assert found[1] == [401] * 10 + [429] * 2
    assert found[2:] == [429, 405, 302, 302]


def test_a_manager_pauses_and_resumes_subjects_and_nobody_else_does(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.manage("migrate", "-v0")

    found = ask(
        site,
        """
from django.contrib.auth.models import Group
from tasuki.django import operations
from tasuki.django.enqueueing import project_store

manager = user("manager")
User.objects.get(username="manager").groups.add(Group.objects.get(name="tasuki admin"))
subject = project_store().get([job_id])[0].spec.subject
refused = [post(one, "/ops/subjects/", action="pause", id=">").status_code for one in (viewer, operator)]
did = post(manager, "/ops/subjects/", action="pause", id=subject, reason="<b>disk</b>").status_code
page = manager.get("/ops/subjects/").content.decode()
seen = ['value="resume"' in one.get("/ops/subjects/").content.decode() for one in (viewer, manager)]
why = operations.explain_run(job_id)
wrong = [post(manager, "/ops/subjects/", action=action, id=id).status_code
         for action, id in (("erase", "a.b"), ("pause", "a..b"))]
ended = post(manager, "/ops/subjects/", action="resume", id=subject).status_code
log = json.loads(manager.get("/ops/audit/?format=json").content)
print(json.dumps([refused, did, "&lt;b&gt;disk" in page, seen, why["facts"]["why"], why["because"][0], wrong, ended,
                  len(project_store().paused()), [(one["actor"], one["action"]) for one in log][:2]]))
""",
    )

    assert found[:5] == [[403, 403], 302, True, [False, True], "PAUSED"]
    assert "by manager since" in found[5]
    assert "python manage.py tasuki_ops resume" in found[5]
    assert "because: <b>disk</b>" in found[5]
    assert found[6:] == [[400, 400], 302, 0, [["manager", "subject.resume"], ["manager", "subject.pause"]]]


def test_nodes_are_detached_drained_and_told_to_step_down_on_the_screen(postgres: PostgresService, tmp_path: Path) -> None:
    url = postgres.empty_database()
    site = DjangoSite(tmp_path, postgres_url=url, SITE_TASUKI=json.dumps({"grpc": {"authentication": "bearer"}}))
    site.manage("migrate", "-v0")
    with site.worker("--grpc", "127.0.0.1:0"):
        found = ask(
            site,
            """
from django.contrib.auth.models import Group
from tasuki.django import operations

manager = user("manager")
User.objects.get(username="manager").groups.add(Group.objects.get(name="tasuki admin"))
until = time.monotonic() + 30
while not operations.cluster_status()["leader"]:
    assert time.monotonic() < until, "nobody leads"
page = manager.get("/ops/workers/").content.decode()
[worker] = operations.cluster_status()["workers"]
did = [post(manager, "/ops/workers/", action=action, id=worker["worker_id"]).status_code
       for action in ("drain", "undrain", "detach", "attach", "degrade", "erase")]
refused = post(operator, "/ops/workers/", action="detach", id=worker["worker_id"]).status_code
log = json.loads(manager.get("/ops/audit/?format=json").content)
print(json.dumps([[f'value="{action}"' in page for action in ("drain", "undrain", "detach", "attach", "degrade")], did, refused,
                  [(one["actor"], one["action"]) for one in log], sorted(Group.objects.values_list("name", flat=True))]))
""",
        )
    postgres.drop(url)

    assert found[0] == [True, True, True, False, True]
    assert found[1:3] == [[302, 302, 302, 302, 302, 400], 403]
    assert found[3] == [
        ["manager", action] for action in ("leader.degrade", "worker.attach", "worker.detach", "worker.undrain", "worker.drain")
    ]
    assert found[4] == ["tasuki admin", "tasuki operator", "tasuki viewer"]
