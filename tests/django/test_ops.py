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
from tasuki.django.definitions import apply, run_now
from tasuki.django.enqueueing import project_store
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
    if pattern.name in ("login", "logout", "language", "asset", "result", "tokens", "caches", "agents"):
        continue
    gets = [browser.get(address) for browser in (anonymous, nobody, viewer, operator, admin)]
    posts = [post(browser, address).status_code for browser in (viewer, operator)]
    forged = [browser.post(address).status_code for browser in (operator, admin)]
    policy = gets[2].headers.get("Content-Security-Policy", "")
    buttons = [b"<button name=" in page.getvalue() for page in gets[2:4]]
    strict = "unsafe" not in policy and "default-src 'none'" in policy
    found[pattern.name] = [[page.status_code for page in gets], posts, forged, strict, buttons]
[style] = re.findall(r'href="(/ops/assets/ops.css[?]v=[0-9a-f]{12})"', anonymous.get("/ops/login/").content.decode())
asset = anonymous.get(style).status_code, anonymous.get("/ops/assets/../views.py").status_code
print(json.dumps([found, asset, anonymous.get("/ops/jobs/?state=FAILED").headers["Location"]]))
""",
    )
    screens, asset, location = found

    assert set(screens) == {
        "overview", "jobs", "job", "log", "run", "dead", "subjects", "workers", "definitions", "new_definition", "definition",
        "events", "settings", "audit",
    }  # fmt: skip
    shown = {"run": [302, 403, 403, 200, 200], "new_definition": [302, 403, 403, 403, 200]}
    for name, (gets, posts, forged, has_policy, buttons) in screens.items():
        assert gets == shown.get(name, [302, 403, 200, 200, 200]), name
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
    assert ">operator</td>" in page
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
many = Event.objects.bulk_create([Event(event_type="a.b", created_at=time.time()) for _ in range(60)])
exported = len(json.loads(viewer.get("/ops/events/?format=json").content))
Event.objects.filter(pk__gte=many[0].pk).delete()
Event.objects.update(problem="definition mail: it is wrong")
told = ["definition mail: it is wrong" in viewer.get(address).content.decode() for address in ("/ops/", "/ops/events/")]
admin.get("/ops/settings/")
[row] = SchedulerSettings.objects.values()
limits = {**{name: value for name, value in row.items() if value is not None}, "skip_late_runs_after_seconds": 60}
late = [post(browser, "/ops/settings/", **limits).status_code for browser in (operator, admin)]
at_field = "Enter a valid time" in wrong.content.decode()
print(json.dumps([wrong.status_code, at_field, refused, saved, "03:30" in page, run, emitted,
                  "is not JSON" in unreadable, [Event.objects.count(), exported], told, late,
                  SchedulerSettings.objects.get().skip_late_runs_after_seconds,
                  [(one["actor"], one["action"]) for one in json.loads(viewer.get("/ops/audit/?format=json").content)]]))
""",
    )

    assert found[:5] == [200, True, 403, 302, True]
    assert found[5].startswith("/ops/definitions/1/: Run e1-1 was asked for")
    assert found[6:9] == [302, True, [2, 62]]
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
link = b"\\x1b]8;;https://a.example\\x1b\\\\link\\x1b]8;;\\x07"
write_log(job_id, 2, "stdout", b"once more\\n\\x1b[1;32mgreen\\x1b[0m " + link + b" \\x1b]open\\n")
write_log(job_id, 1, "errors", json.dumps(["builtins.ValueError", "Traceback </pre><b>"]).encode())
page = viewer.get(f"/ops/jobs/{job_id}/").content.decode()
search = viewer.get(f"/ops/jobs/{job_id}/", {"find": "script"}).content.decode()
coloured = viewer.get(f"/ops/jobs/{job_id}/", {"find": "green link"}).content.decode()
shown = ["green link \\x1b]open" in one and one.count("\\x1b") == 1 for one in (page, coloured)]
file = viewer.get(f"/ops/jobs/{job_id}/log/stdout/")
whole = file.getvalue()
print(json.dumps([len(page), "<script>alert" in page + search, "&lt;/pre&gt;&lt;b&gt;" in page, "bytes were not kept" in page,
                  "attempt 2" in page,
                  "&lt;script&gt;alert(1)" in search, file.headers["Content-Disposition"].startswith("attachment"),
                  len(whole), viewer.get(f"/ops/jobs/{job_id}/log/secret/").status_code,
                  shown, b"\\x1b[1;32mgreen" in whole]))
""",
    )

    assert found[0] < 200_000
    assert found[1:7] == [False, True, True, True, True, True]
    assert found[7] > 300_000
    assert found[8] == 404
    assert found[9:] == [[True, True], True], "colours are in the file alone"


def test_a_manager_pauses_and_resumes_subjects_and_nobody_else_does(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.manage("migrate", "-v0")

    found = ask(
        site,
        """
from django.contrib.auth.models import Group
from tasuki.django import operations

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
from tasuki.django import node_door
from tasuki.django.models import AdminActionLog
from tasuki.errors import Unavailable
noted = []
async def order_drain(*_order):
    noted.append([connection.in_atomic_block, await AdminActionLog.objects.acount()])
    raise Unavailable("the node does not answer")
node_door.order_drain, count = order_drain, AdminActionLog.objects.count()
unanswered = post(manager, "/ops/workers/", action="drain", id=worker["worker_id"], reason="disk").status_code
noted = [unanswered, noted[0][0], noted[0][1] - count, AdminActionLog.objects.latest("id").detail]
log = json.loads(manager.get("/ops/audit/?format=json").content)
print(json.dumps([[f'value="{action}"' in page for action in ("drain", "undrain", "detach", "attach", "degrade")], did, refused,
                  [(one["actor"], one["action"]) for one in log], sorted(Group.objects.values_list("name", flat=True)),
                  noted]))
""",
        )
    postgres.drop(url)

    assert found[0] == [True, True, True, False, True]
    assert found[1:3] == [[302, 302, 302, 302, 302, 400], 403]
    assert found[3] == [
        ["manager", action]
        for action in ("worker.drain", "leader.degrade", "worker.attach", "worker.detach", "worker.undrain", "worker.drain")
    ]
    assert found[4] == ["tasuki admin", "tasuki operator", "tasuki viewer"]
    assert found[5] == [400, False, 1, "not confirmed (the node does not answer): disk"], "noted before and after"


# ---------------------------------------------------------------------------------------------------- the overview


def test_the_overview_says_what_needs_attention_until_it_is_gone(postgres: PostgresService, tmp_path: Path) -> None:
    url = postgres.empty_database()
    site = DjangoSite(tmp_path, postgres_url=url)
    site.manage("migrate", "-v0")
    found = ask(
        site,
        """
import msgspec
from tasuki.core.cluster_messages import ServerInfo, WorkerInfo
from tasuki.django.models import DefinitionState, Member, ScopeEpoch

def member(name, age_s, **facts):
    info = ServerInfo(server_id=name, node_id="n1", workers=(WorkerInfo(name, "i", (">",)),), sub_leads=True, **facts)
    row = {"kind": "server", "incarnation": "i", "beat_at": time.time() - age_s, "info": msgspec.msgpack.encode(info)}
    Member.objects.update_or_create(member_id=name, defaults=row)

def alerts():
    page = viewer.get("/ops/").content.decode()
    return re.findall(r'class="problem">([^<]*)<', page), re.search(r"Sub-leaders: ([^<]*)", page)

SchedulerSettings.objects.update_or_create(id=1, defaults={"heartbeat_ttl_seconds": 600})
member("w1", 500, blob_problem="the folder is full")
member("w2", 0)
DefinitionState.objects.create(definition=nightly, next_at=time.time() - 7_000)
JobRun.objects.update(state="FAILED", ready=0, error_code="EXIT_CODE", finished_at=time.time() - 60)
before, subleaders = alerts()
member("w1", 0)
member("w2", 0, epoch=7)
ScopeEpoch.objects.create(scope="leader", epoch=7, holder="w2")
DefinitionState.objects.update(next_at=time.time() + 1_000)
JobRun.objects.update(finished_at=time.time() - 4_000)
print(json.dumps([before, subleaders[1], alerts()[0]]))
""",
    )
    postgres.drop(url)

    said, subleaders, after = found
    assert [line.partition(":")[0].partition(" for ")[0] for line in said] == [
        "There is no leader",
        "Worker w1 was not heard of",
        "Jobs that failed",
        "Definition nightly is late",
        "Disk or store of w1",
    ]
    assert subleaders == "w1, w2"
    assert after == []


def test_the_overview_says_that_the_disk_of_a_sqlite_file_is_full(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.migrate()
    full, free = ask(
        site,
        """
from tasuki.django.ops import backend

pages = []
for backend.DISK_FLOOR_BYTES in (2**62, 0):
    pages.append(viewer.get("/ops/").content.decode())
print(json.dumps(pages))
""",
    )

    assert "Disk or store of site.sqlite3: " in full
    assert "bytes free" in full
    assert "Disk or store" not in free


def test_the_screen_of_subjects_sums_up_what_happened_over_the_chosen_span(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.migrate()
    found = ask(
        site,
        """
from tasuki.core.statistics import GroupStatistics, Rollup, current_minute, encode_rollup
from tasuki.django.models import MinuteRollup

for age_s, lost in ((600, 3), (7_200, 40)):
    counted = GroupStatistics(succeeded=110, failed=10, redelivered=4, retried_failed=2, retried_lost=lost)
    counted.delivery, counted.delivery_s = {4: 3, 11: 1}, 4.06  # three of 0.02 s, one of 4 s
    minute = current_minute(time.time() - age_s)
    data = encode_rollup(Rollup(minute, "s", {"default": counted}))
    MinuteRollup.objects.create(minute=minute, server_id="s", data=data)
rows = [json.loads(viewer.get("/ops/subjects/", {"span": span, "format": "json"}).content)[0] for span in ("1h", "24h")]
print(json.dumps([rows, viewer.get("/ops/subjects/").content.decode()]))
""",
    )
    (hour, day), page = found

    assert (hour["queue"], hour["pending"], hour["per_minute"]) == ("default", 1, "2.00")
    assert (hour["redelivered"], hour["retried"], hour["dead"]) == (4, 5, 10)
    assert hour["p50"].endswith("ms")
    assert hour["p99"].endswith(" s")
    assert (day["per_minute"], day["retried"], day["dead"]) == ("0.17", 47, 20)
    assert "Delivery p99" in page


# ---------------------------------------------------------------------------------------------------- definitions


def test_next_times_tell_of_changes_of_the_clock_also_before_the_first_one(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.migrate()
    forward, back, first, preview = ask(
        site,
        """
from datetime import UTC, datetime
from unittest.mock import patch
from django.utils import timezone
from tasuki.django.ops.project_views import next_times

def times(kind, value, *start):
    return [(one["shown"], one["change"]) for one in next_times((kind, value), "Europe/Berlin", datetime(*start, tzinfo=UTC))]

fields = {"kind": "weekly", "days": ["mon", "sun"], "at": "02:30", "time_zone": "Europe/Berlin"}
places = ("/ops/definitions/new/", f"/ops/definitions/{nightly.pk}/")
with patch.object(timezone, "now", lambda: datetime(2026, 3, 28, 12, tzinfo=UTC)):
    shown = [admin.get(address, fields).content.decode() for address in places]
print(json.dumps([
    times("daily_at", "02:30", 2026, 3, 27, 12)[:3],
    times("hourly_at_minute", "30", 2026, 10, 24, 23)[:4],
    times("weekly", "mon 08:00", 2026, 3, 24)[:2],
    [re.findall(r"<li>([^<]*)(?: <mark>([^<]*)</mark>)?</li>", page)[:2] for page in shown],
]))
""",
    )

    assert forward == [
        ["Sat 2026-03-28 02:30+01:00", ""],
        ["Sun 2026-03-29 03:00+02:00", "clock set forward by 60 min"],
        ["Mon 2026-03-30 02:30+02:00", ""],
    ]
    assert back == [
        ["Sun 2026-10-25 01:30+02:00", ""],
        ["Sun 2026-10-25 02:30+02:00", ""],
        ["Sun 2026-10-25 02:30+01:00", "clock set back by 60 min"],
        ["Sun 2026-10-25 03:30+01:00", ""],
    ]
    assert first[0] == ["Mon 2026-03-30 08:00+02:00", "clock set forward by 60 min"]
    for of_unsaved in preview:
        assert [" ".join(one).strip() for one in of_unsaved] == [
            "Sun 2026-03-29 03:00+02:00 clock set forward by 60 min",
            "Mon 2026-03-30 02:30+02:00",
        ]


def test_the_form_of_a_definition_refuses_what_cannot_be_fired_at_its_field(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.migrate()
    refused, saved, shown = ask(
        site,
        """
fields = {"name": "new", "command_name": "daily_report", "time_zone": "Europe/Berlin", "queue": "default", "max_retries": 3,
          "retry_backoff_seconds": 10, "enabled": "on"}
wrong = [{"kind": "daily_at", "at": "25:00"}, {"kind": "daily_at"}, {"kind": "weekly", "at": "02:30"},
         {"kind": "weekly", "at": "02:30", "days": ["mon", "someday"]}, {"kind": "hourly_at_minute", "minute": "60"},
         {"kind": "every_n_minutes", "every": "7"}, {"kind": "cron", "cron": "0 0 31 2 *"}, {"kind": "cron", "cron": "now"},
         {"kind": "event", "event_type": "a..b"}, {"kind": "yearly"},
         {"kind": "daily_at", "at": "02:30", "time_zone": "Mars/Base"},
         {"kind": "daily_at", "at": "02:30", "command_name": "flush"}, {"kind": "daily_at", "at": "02:30", "name": "nightly"},
         {"kind": "daily_at", "at": "02:30", "default_args_json": '["--nonsense"]'},
         {"kind": "daily_at", "at": "02:30", "default_args_json": "{"}, {"kind": "event", "event_type": "order.>"}]
refused = []
for one in wrong:
    page = post(admin, "/ops/definitions/new/", **{**fields, **one})
    body = page.content.decode()
    form = body[body.index('id="form"'):body.index('id="preview"')]
    blocks = form.split('<div class="field"')[1:]
    refused.append([page.status_code, [re.search(r'name="([^"]*)"', block)[1] for block in blocks if 'class="problem"' in block]])
right = [{"kind": "daily_at", "at": "02:30"}, {"kind": "weekly", "at": "02:30", "days": ["mon", "thu"]},
         {"kind": "hourly_at_minute", "minute": "0"}, {"kind": "every_n_minutes", "every": "15"},
         {"kind": "cron", "cron": "0 2 * * *"},
         {"kind": "event", "event_type": "order.>", "command_name": "probe", "default_args_json": '["say"]'}]
saved, shown = [], []
for number, one in enumerate(right):
    name = f"new-{number}"
    post(admin, "/ops/definitions/new/", **{**fields, **one, "name": name})
    row = JobDefinition.objects.get(name=name)
    saved.append([row.type, row.schedule_type, row.schedule_value, row.event_type])
    page = viewer.get(f"/ops/definitions/{row.pk}/").content.decode()
    again = post(admin, f"/ops/definitions/{row.pk}/", **{**fields, **one, "name": name, "max_retries": 5})
    shown.append([f'value="{one["kind"]}" selected' in page, again.status_code, page.count("checked")])
print(json.dumps([refused, saved, shown]))
""",
    )

    places = ["at", "at", "days", "days", "minute", "every", "cron", "cron", "event_type", "kind", "time_zone", "command_name"]
    assert refused == [[200, [place]] for place in [*places, "name", *["default_args_json"] * 3]], "the last: no --event"
    assert saved == [
        ["time", "daily_at", "02:30", ""],
        ["time", "weekly", "mon,thu 02:30", ""],
        ["time", "hourly_at_minute", "0", ""],
        ["time", "every_n_minutes", "15", ""],
        ["time", "cron", "0 2 * * *", ""],
        ["event", "", "", "order.>"],
    ]
    assert [(selected, status) for selected, status, _ in shown] == [(True, 302)] * 6
    assert [checked for _, _, checked in shown] == [1, 3, 1, 1, 1, 1], "the two days of the weekly one, and enabled"


def test_a_definition_is_paused_resumed_tried_and_deleted_by_those_who_may(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.migrate()
    found = ask(
        site,
        """
apply({"paid": {"command_name": "probe", "event_type": "order.*"}, "off": {"command_name": "probe", "event_type": ">",
      "enabled": False}}, source="here")
paid = JobDefinition.objects.get(name="paid")
address = f"/ops/definitions/{paid.pk}/"
matches = [re.findall(r">(paid|off)</a>", viewer.get("/ops/events/", {"event_type": kind}).content.decode())
           for kind in ("order.paid", "mail.sent")]
refused = [post(operator, address, action=action).status_code for action in ("pause", "resume", "delete")]
events = Event.objects.count()
states = []
for action in ("pause", "resume"):
    states.append([post(admin, address, action=action).status_code, JobDefinition.objects.get(pk=paid.pk).enabled])
fired = said(post(operator, "/ops/definitions/", id=paid.pk, payload='{"order": 1}'))
event = Event.objects.get()
gone = said(post(admin, address, action="delete")), viewer.get(address).status_code
print(json.dumps([matches, refused, events, states, fired, [event.payload_json, event.job_definition_id == paid.pk], gone,
                  [row["action"] for row in json.loads(viewer.get("/ops/audit/?format=json").content)],
                  [b'value="pause"' in one.get(f"/ops/definitions/{nightly.pk}/").content for one in (viewer, admin)]]))
""",
    )

    assert found[:4] == [[["off", "paid"], ["off"]], [403, 403, 403], 0, [[302, False], [302, True]]]
    assert "was asked for" in found[4]
    assert found[5] == [{"order": 1}, True]
    assert found[6] == ["/ops/definitions/: Definition paid is deleted.", 404]
    assert found[7] == ["definition.delete", "definition.run", "definition.enable", "definition.disable"]
    assert found[8] == [False, True]


# ---------------------------------------------------------------------------------------------------- jobs, audit


def test_jobs_are_found_by_definition_and_time_and_page_by_page(migrated: DjangoSite) -> None:
    found = ask(
        migrated,
        """
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo
import tasuki.django.ops.views as ops_views
import tasuki.stores.sql.store as sql_store

for number in range(60):
    enqueue_command("daily_report", job_id=f"job-{number:02}")
apply({"other": {"command_name": "daily_report", "daily_at": "02:30"}}, source="here")
for row in (nightly, JobDefinition.objects.get(name="other")):
    run_now(row)
project_store().take_over("leader", 1)
project_store().fire(epoch=1)

def listed(**wanted):
    page = viewer.get("/ops/jobs/", wanted)
    body = page.content.decode()
    older = re.search(r'href="\\?([^"]*cursor=[^"]*)" rel="next"', body)
    return page.status_code, re.findall(r">((?:job|d|e)[0-9]*-[0-9]+)</a>", body), older and older[1].replace("&amp;", "&"), body

of_definition = listed(definition="nightly")[1]
unknown = listed(definition="nobody")[0]
there = datetime.now(ZoneInfo("Asia/Tokyo")).replace(tzinfo=None)
times = [len(listed(**{name: (there + timedelta(hours=hours)).isoformat(timespec="minutes")}, zone="Asia/Tokyo")[1])
         for name, hours in (("from", -1), ("from", 1), ("until", -1), ("until", 1))]
wrong = listed(**{"from": "yesterday"})[0]
first = listed()
second = viewer.get("/ops/jobs/?" + first[2]).content.decode()
sql_store.FIND_SCAN_MAX = 20
scanned = listed(text="job-3")
says = ["Only 20,000 jobs were looked at" in one for one in (first[3], listed(text="job-5")[3])]
ops_views.EXPORT_FINDS_MAX = 2
exports = [viewer.get("/ops/jobs/", {"text": "job-0", "format": "json", **more}) for more in ({}, {"cursor": "20"})]
exports = [exports[0].status_code, "narrow it" in exports[0].content.decode(), len(json.loads(exports[1].content))]
went_on = viewer.get("/ops/jobs/?" + scanned[2]).content.decode()
of_page = ">e1-1</a>" in viewer.get(f"/ops/definitions/{nightly.pk}/").content.decode()
print(json.dumps([of_definition, unknown, times, wrong, len(first[1]), second.count(">job-"), "job-00" in second,
                  scanned[1], "continue with older ones" in scanned[3], "No such job" in scanned[3], went_on.count(">job-3"),
                  of_page, says, exports]))
""",
    )

    assert found[:2] == [["e1-1"], 400]
    assert found[2:4] == [[50, 0, 0, 50], 400]
    assert found[4:7] == [50, 12, True]
    assert found[7:12] == [[], True, False, 10, True], "the last: a run by hand stands on the page of its definition"
    assert found[12:] == [[False, True], [400, True, 10]], "a search that saw only some jobs says so"


def test_the_audit_is_filtered_paged_and_exported_as_a_whole(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.migrate()
    found = ask(
        site,
        """
from tasuki.django.models import AdminActionLog

AdminActionLog.objects.bulk_create(
    [AdminActionLog(at=1_000.0 + n, actor=f"user{n % 3}", action="run.cancel" if n % 2 else "run.rerun", target=f"job-{n}")
     for n in range(10_050)])

def listed(address="", **wanted):
    body = viewer.get("/ops/audit/" + address, wanted).content.decode()
    older = re.search(r'href="(\\?[^"]*cursor=[^"]*)" rel="next"', body)
    return re.findall(r">(job-\\d+)<", body), older and older[1].replace("&amp;", "&"), body

first = listed(actor="user0", action="cancel")
second = listed(first[1])
exact = listed(target="job-77", until="1970-01-01T00:20", zone="UTC")
live = ["hx-trigger" in one for one in (first[2], listed()[2])]
csv = viewer.get("/ops/audit/", {"format": "csv"}).content.decode().splitlines()
print(json.dumps([first[0][:2], len(first[0]), second[0][0], exact[0], exact[1], live, len(csv), csv[1].endswith(",10050"),
                  csv[1].partition(",")[0]]))
""",
    )

    assert found[:3] == [["job-10047", "job-10041"], 50, "job-9747"]
    assert found[3:6] == [["job-77"], None, [False, True]]
    assert found[6:] == [10_051, True, "1970-01-01T03:04:09.000+00:00"]


def test_dead_letters_are_run_again_one_by_one_and_a_refused_one_does_not_keep_the_others(migrated: DjangoSite) -> None:
    found = ask(
        migrated,
        """
for number in range(3):
    enqueue_command("daily_report", job_id=f"dead-{number}")
store = project_store()
store.take_over("leader", 1)
for _ in range(2):
    dead = JobRun.objects.exclude(idempotency_key=job_id)
    run_now(nightly)
    store.fire(epoch=1)
    if not dead.filter(state="FAILED").exists():
        dead.update(state="FAILED", ready=0, error_code="EXIT_CODE", finished_at=time.time())
page = operator.get("/ops/dead/").content.decode()
csv = operator.get("/ops/dead/?list=letters&format=csv").content.decode().splitlines()
one = said(post(operator, "/ops/dead/", action="rerun_one", id="dead-0"))
rest = said(post(operator, "/ops/dead/", action="rerun", id="EXIT_CODE"))
states = dict(JobRun.objects.values_list("idempotency_key", "state"))
refused = post(operator, "/ops/dead/", action="rerun_one", id=f"e1-{nightly.pk}")
print(json.dumps([page.count('value="rerun_one"'), "There are more than" in page, len(csv), one, rest, states,
                  refused.status_code]))
""",
    )

    buttons, says_more, exported, one, rest, states, refused = found
    assert (buttons, says_more, exported) == (4, False, 5)
    assert one == "/ops/dead/: Run again: 1."
    assert rest.startswith("/ops/dead/: Run again: 2. Refused: 1: job 'e1-1' cannot run now: run e2-1 of the same definition")
    assert [states[name] for name in ("dead-0", "dead-1", "dead-2", "e1-1")] == ["PENDING"] * 3 + ["FAILED"]
    assert refused == 400


def test_the_end_of_a_long_log_is_read_without_the_rest(migrated: DjangoSite) -> None:
    found = ask(
        migrated,
        """
from tasuki.django import logs

for number in range(80):
    write_log(job_id, 1, "stdout", b"%07d\\n" % number * 512, offset=number * 4_096)
write_log(job_id, 2, "stdout", b"the second attempt\\n")
whole = b"".join(logs.log_bytes(job_id, "stdout"))
unpacked, plain = [], logs._plain
logs._plain = lambda row: unpacked.append(row.pk) or plain(row)
tail, cut = logs.log_tail(job_id, "stdout", 20_000)
looked_at = len(unpacked)
short = [logs.log_tail(job_id, "stdout", size) for size in (len(whole) - 1, len(whole), 1_000_000)]
print(json.dumps([whole.endswith(tail), len(tail), cut, looked_at, [[text == whole[-len(text):], more] for text, more in short]]))
""",
    )

    assert found[:3] == [True, 20_000, True]
    assert found[3] <= 32, "rows that were unpacked"
    assert found[4] == [[True, True], [True, False], [True, False]]


# ---------------------------------------------------------------------------------------------------- pages


def test_every_answer_has_the_headers_and_links_of_others_put_no_words_into_a_page(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.migrate()
    found = ask(
        site,
        """
answers = {
    "nothing": viewer.get("/ops/jobs/nobody/"),
    "wrong": viewer.get("/ops/jobs/?state=GONE"),
    "forged": admin.post("/ops/settings/"),
    "logout": admin.post("/ops/logout/"),
    "refused": post(viewer, "/ops/settings/"),
    "method": admin.delete("/ops/"),
    "login": anonymous.get("/ops/login/"),
    "to login": anonymous.get("/ops/"),
    "form": viewer.get("/ops/jobs/?format=xml"),
    "nul": viewer.get("/ops/jobs/", {"definition": "a\\0b"}),
    "long cursors": viewer.get("/ops/events/", {"cursor": "9" * 5000}),
    "deep": post(operator, "/ops/events/", event_type="a.b", payload="[" * 100_000),
    "language": post(viewer, "/ops/language/", language="ja"),
}
policies = {name: "default-src 'none'" in answer.headers.get("Content-Security-Policy", "") for name, answer in answers.items()}
canceled = post(operator, "/ops/jobs/", action="cancel", job_id=[job_id])
link = canceled.headers["Location"]
pages = [viewer.get(address).content.decode() for address in (link, link[:-2] + "xx", "/ops/jobs/?done=Pay+here")]
asked = ("nothing", "forged", "logout", "refused", "nul", "long cursors", "deep")
print(json.dumps([policies, [answers[name].status_code for name in asked],
                  ['class="done"' in page for page in pages], "Pay here" in pages[2]]))
""",
    )
    policies, statuses, says, is_foreign = found

    assert {name for name, has_policy in policies.items() if not has_policy} == set()
    assert statuses == [404, 403, 403, 403, 400, 400, 400]
    assert says == [True, False, False]
    assert not is_foreign


def test_a_browser_without_script_is_asked_by_a_page_before_anything_is_done(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.migrate()
    found = ask(
        site,
        """
other = enqueue_command("daily_report")
page = operator.get("/ops/jobs/").content.decode()
questions = dict(re.findall(r'name="(question\\w*)" value="([^"]*)"', page))
asked = post(operator, "/ops/jobs/", action="cancel", job_id=[job_id, other], reason="<b>", **questions).content.decode()
states = set(JobRun.objects.values_list("state", flat=True))
form = asked[asked.index('id="main"'):]
fields = re.findall(r'<input type="hidden" name="(\\w+)" value="([^"]*)"', form)
values = {name: [value for key, value in fields if key == name] for name, _ in fields if name != "csrfmiddlewaretoken"}
done = post(operator, "/ops/jobs/", **{**values, "reason": "<b>"}).status_code
print(json.dumps([questions["question_cancel"] in asked, sorted(values), values["reason"], sorted(states), done,
                  sorted(set(JobRun.objects.values_list("state", flat=True)))]))
""",
    )

    assert found[:4] == [True, ["action", "job_id", "reason"], ["&lt;b&gt;"], ["PENDING"]]
    assert found[4:] == [302, ["CANCELED"]]
