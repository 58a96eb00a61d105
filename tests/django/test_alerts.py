"""Alerts of a project reach a real receiver: signed, sent again until they are taken, never to an address that is not meant."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.django_site import DjangoSite
from tests.support.waiting import until

pytestmark = pytest.mark.e2e


LOOKED = """
from tasuki.django.models import ScopeEpoch
until = time.monotonic() + 30
while not ScopeEpoch.objects.filter(scope="alerts").exists():
    assert time.monotonic() < until
    time.sleep(0.01)
"""


class Receiver(ThreadingHTTPServer):
    """A receiver of webhooks; it answers with the next of `answers`, then with 204."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[tuple[bytes, str]] = []
        self.answers: list[int] = []
        self.url = f"http://127.0.0.1:{self.server_port}/hook?team=a"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((data, self.headers.get("Tasuki-Signature", "")))
        self.send_response(self.server.answers.pop(0) if self.server.answers else 204)
        self.send_header("Location", self.server.url)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_arguments: Any) -> None: ...


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        yield receiver
        receiver.shutdown()


def site_with(site: DjangoSite, alerts: dict[str, Any]) -> DjangoSite:
    site.env["SITE_TASUKI"] = json.dumps({"alerts": alerts})
    site.migrate()
    return site


def test_a_run_that_failed_is_told_signed_by_the_worker(site: DjangoSite, receiver: Receiver) -> None:
    site_with(site, {"everything": {"url": receiver.url, "secret": "key", "allow_private": True}})
    with site.worker() as worker:
        site.run(LOOKED)
        failed = site.ask("print(json.dumps(finished(fail.enqueue('broken')).id))")
        until(lambda: receiver.got, 30.0, f"the alert comes: {worker.output()}")

    data, signature = receiver.got[0]
    body = json.loads(data)
    assert (body["kind"], body["job_id"]) == ("dead_letter", failed)
    assert signature == "sha256=" + hmac.new(b"key", data, hashlib.sha256).hexdigest()


STEPS = """
from tasuki.django.alerts import Alerts
from tasuki.django.definitions import apply
from tasuki.django.models import Alert, DefinitionState, Incident, JobDefinition, JobRun, ScopeLease
apply({"nightly": {"command_name": "daily_report", "daily_at": "02:30"}}, source="settings")
nightly = JobDefinition.objects.get()
Alerts("default").step()

def dies():
    from tasuki.django import enqueue_command
    row = JobRun.objects.get(idempotency_key=enqueue_command("daily_report"))
    JobRun.objects.filter(pk=row.pk).update(job_definition=nightly, state="FAILED", ready=0)
    Incident.objects.create(job=row, at=time.time(), kind="dead_lettered", attempt=1, reason="it broke")

def state():
    rows = Alert.objects.order_by("id")
    return [[row.key.partition(":")[0], row.target, row.tries, row.next_at is None, row.problem] for row in rows]
"""


def test_an_alert_is_made_once_for_each_receiver_and_sent_until_it_is_taken(site: DjangoSite, receiver: Receiver) -> None:
    target = {"url": receiver.url, "allow_private": True}
    site_with(site, {"everything": target, "definitions": {"nightly": target}})
    receiver.answers = [500, 302]  # a redirect is not followed
    first, second = site.ask(
        STEPS
        + """
dies()
Alerts("default").step()
first = state()
Alert.objects.filter(next_at__isnull=False).update(next_at=1.0)
Alerts("default").step()
Alerts("default").step()
print(json.dumps([first, state()]))
"""
    )

    assert [one[:4] for one in first] == [["dead_letter", "nightly", 1, False], ["dead_letter", "", 1, False]]
    assert [one[4] for one in first] == ["the receiver answered 500", "the receiver answered 302"]
    assert second == [["dead_letter", "nightly", 2, True, ""], ["dead_letter", "", 2, True, ""]]
    assert len(receiver.got) == 4


def test_late_schedules_and_a_missing_leader_are_told(site: DjangoSite, receiver: Receiver) -> None:
    site_with(site, {"everything": {"url": receiver.url, "allow_private": True}})
    site.run(
        STEPS
        + """
DefinitionState.objects.update_or_create(definition=nightly, defaults={"next_at": time.time() - 90})
ScopeLease.objects.create(scope="leader", epoch=3, holder="7", expires_at=time.time() - 90)
for _ in range(2):
    Alerts("default").step()
"""
    )

    bodies = [json.loads(data) for data, _ in receiver.got]
    assert [(one["kind"], one["definition"], one.get("epoch")) for one in bodies] == [
        ("late", "nightly", None),
        ("no_leader", "", 3),
    ]


@pytest.mark.parametrize("site", ["sqlite"], indirect=True)
def test_addresses_that_are_not_public_are_refused(site: DjangoSite, receiver: Receiver) -> None:
    hosts = ["127.0.0.1", "localhost", "[::1]", "10.0.0.1", "169.254.169.254", "[::ffff:127.0.0.1]", "0.0.0.0"]
    found = site_with(site, {"everything": {"url": receiver.url}}).ask(
        STEPS
        + f"""
from tasuki.django.alerts import send
from tasuki.django.conf import AlertTarget
from tasuki.errors import TasukiError
codes = []
for host in {hosts!r}:
    try:
        send(AlertTarget(url=f"http://{{host}}:{receiver.server_port}/"), {{}})
    except TasukiError as error:
        codes.append(error.code)
dies()
Alerts("default").step()
print(json.dumps([codes, state()]))
"""
    )

    assert found[0] == ["FORBIDDEN"] * len(hosts)
    assert "not public" in found[1][0][4]
    assert receiver.got == []
