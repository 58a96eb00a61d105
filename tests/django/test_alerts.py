"""Alerts of a project reach a real receiver: signed, sent again until they are taken, never to an address that is not meant."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import sqlite3
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from tasuki.django.conf import AlertSettings
from tasuki.django.standalone import configure
from tasuki.errors import Forbidden
from tests.cli.commands import User
from tests.support.certificates import TestAuthority
from tests.support.django_site import DjangoSite
from tests.support.processes import start_server, start_worker
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

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[tuple[bytes, str]] = []
        self.answers: list[int] = []
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.server_port}/hook?team=a"
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)

    def handle_error(self, *_arguments: Any) -> None:
        """Say nothing of a client that hung up."""


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


@contextmanager
def listening(receiver: Receiver) -> Iterator[Receiver]:
    with receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        yield receiver
        receiver.shutdown()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with listening(Receiver()) as receiver:
        yield receiver


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
from tasuki.django.conf import project_settings
from tasuki.django.definitions import apply
from tasuki.django.models import Alert, DefinitionState, Incident, JobDefinition, JobRun, ScopeEpoch, ScopeLease
apply({"nightly": {"command_name": "daily_report", "daily_at": "02:30"}}, source="settings")
nightly = JobDefinition.objects.get()

def project_alerts():
    return Alerts("default", project_settings().alerts, project_settings().coordination)

project_alerts().step()

def dies():
    from tasuki.django import enqueue_command
    row = JobRun.objects.get(idempotency_key=enqueue_command("daily_report"))
    JobRun.objects.filter(pk=row.pk).update(job_definition=nightly, state="FAILED", ready=0)
    Incident.objects.create(job=row, at=time.time(), kind="dead_lettered", attempt=1, reason="it broke")

def try_again():
    Alert.objects.filter(next_at__isnull=False).update(next_at=1.0)
    project_alerts().step()

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
project_alerts().step()
first = state()
try_again()
project_alerts().step()
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
    project_alerts().step()
"""
    )

    bodies = [json.loads(data) for data, _ in receiver.got]
    assert [(one["kind"], one["definition"], one.get("epoch")) for one in bodies] == [
        ("late", "nightly", None),
        ("no_leader", "", 3),
    ]


@pytest.mark.parametrize("site", ["postgresql"], indirect=True)
def test_a_missing_leader_is_told_where_redis_has_the_lock(site: DjangoSite, receiver: Receiver, redis_url: str) -> None:
    site.env["SITE_TASUKI"] = json.dumps(
        {"alerts": {"everything": {"url": receiver.url, "allow_private": True}}, "coordination": redis_url}
    )
    site.migrate()
    site.run(
        STEPS
        + f"""
import redis
ScopeEpoch.objects.update_or_create(scope="leader", defaults={{"epoch": 4, "holder": "9"}})
with redis.Redis.from_url({redis_url!r}) as client:
    for ago in (10, 90):
        client.set("scheduler:leader:last_seen_ts", time.time() - ago)
        for _ in range(3):
            project_alerts().step()
"""
    )

    bodies = [json.loads(data) for data, _ in receiver.got]
    assert [(one["kind"], one["epoch"], one["last_leader"]) for one in bodies] == [("no_leader", 4, "9")]


@pytest.mark.parametrize("site", ["sqlite"], indirect=True)
def test_a_receiver_with_tls_is_told_if_its_certificate_can_be_trusted(site: DjangoSite, tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path / "tls")
    with listening(Receiver(authority.serving())) as receiver:
        site_with(site, {"everything": {"url": receiver.url, "secret": "key", "allow_private": True}})
        refused = site.ask(STEPS + "dies()\nproject_alerts().step()\nprint(json.dumps(state()))")
        assert receiver.got == []
        taken = site.ask(
            f"import os\nos.environ['SSL_CERT_FILE'] = {authority.ca!r}" + STEPS + "try_again()\nprint(json.dumps(state()))"
        )

    assert "CERTIFICATE_VERIFY_FAILED" in refused[0][4]
    assert taken == [["dead_letter", "", 2, True, ""]]
    [(data, signature)] = receiver.got
    assert signature == "sha256=" + hmac.new(b"key", data, hashlib.sha256).hexdigest()


@pytest.mark.parametrize("site", ["sqlite"], indirect=True)
def test_whatever_one_receiver_does_others_are_told_and_a_send_ends_before_its_claim(
    site: DjangoSite, receiver: Receiver
) -> None:
    def answer_a_byte_now_and_then() -> None:
        while not ended.is_set():
            with suppress(OSError):
                link, _ = slow.accept()
                called.append(link)
                for letter in b"HTTP/1.1 204 No Content, and so on for ever":
                    link.sendall(bytes([letter]))
                    ended.wait(0.1)

    called: list[socket.socket] = []
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as slow:
        threading.Thread(target=answer_a_byte_now_and_then, daemon=True).start()
        odd = {"url": "http://a..b/hook"}  # its name cannot be encoded, which is a UnicodeError
        slow_one = {"url": f"http://127.0.0.1:{slow.getsockname()[1]}/", "allow_private": True}
        good = {"url": receiver.url, "allow_private": True}
        told = site_with(site, {"definitions": {"nightly": odd}, "everything": good}).ask(
            STEPS + "dies()\nproject_alerts().step()\nprint(json.dumps(state()))"
        )
        site.env["SITE_TASUKI"] = json.dumps({"alerts": {"definitions": {"nightly": slow_one}, "everything": slow_one}})
        began_and_ended = site.ask(
            """
import tasuki.django.alerts as alerts
alerts.SEND_S = 0.4
"""
            + STEPS
            + """
dies()
before = time.monotonic()
try_again()
took_s = time.monotonic() - before
loop = alerts.AlertLoop("default", project_settings().alerts)
Alert.objects.update(next_at=1.0)
due = Alert.objects.filter(next_at=1.0).count()
loop._thread.submit(loop._step)
while Alert.objects.filter(next_at=1.0).count() == due:
    time.sleep(0.01)
began = time.monotonic()
loop.close()
closed_s = time.monotonic() - began
loop._thread.shutdown()
said = []
alerts.logger.error = lambda text, *values: said.append(text % values)
Alert.objects.update(created_at=time.time() - 7.1 * 86_400)
try_again()
print(json.dumps([took_s, closed_s, state(), said]))
"""
        )
        ended.set()

    assert [one[3] for one in told] == [False, True]
    assert len(receiver.got) == 1
    took_s, closed_s, given_up, said = began_and_ended
    assert 0.4 <= took_s < 5.0
    assert closed_s < 0.3, "who stops does not wait for a receiver"
    assert len(called) <= 4, "in each of the four steps only the first alert waits for that receiver"
    assert all(one[3] and one[4] == "the receiver had not answered within 0.4 s" for one in given_up if one[2] > 1)
    assert any("is given up, as nobody has taken it for 7 days" in text for text in said)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("hooks.example.org/x", "must be https://host/path or http://host/path"),
        ("https://u:secret@h/x", "without credentials, got 'https://h'"),
        ("https://h:99999/x", "Port out of range"),
        ("https://h/ä b", "percent-encode"),
    ],
)
def test_the_address_of_a_receiver_is_checked_when_it_is_set(url: str, says: str) -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert({"everything": {"url": url}}, AlertSettings)

    assert says in str(raised.value)
    assert "everything" in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("site", ["sqlite"], indirect=True)
def test_a_name_that_has_a_private_address_the_second_time_gets_nothing_there(site: DjangoSite) -> None:
    site.migrate()
    found = site.ask(
        """
import socket
from tasuki.django.alerts import send
from tasuki.django.conf import AlertTarget
from tasuki.errors import TasukiError

answers = ["93.184.216.34", "127.0.0.1"]
asked, tried = [], []

def look_up(host, port, *rest, **options):
    asked.append(host)
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers.pop(0), port))]

def connect(address, *rest, **options):
    tried.append(address)
    raise OSError("no way there")

socket.getaddrinfo, socket.create_connection = look_up, connect
said = []
for _ in range(2):
    try:
        send(AlertTarget(url="https://rebind.example/hook"), {}, time.monotonic() + 20)
    except (TasukiError, OSError) as error:
        said.append(str(error))
print(json.dumps([asked, tried, said]))
"""
    )

    assert found[0] == ["rebind.example"] * 2, "each try asks once"
    assert found[1] == [["93.184.216.34", 443]], "the address that was checked, and only that"
    assert "127.0.0.1, which is not public" in found[2][1]


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
        send(AlertTarget(url=f"http://{{host}}:{receiver.server_port}/"), {{}}, time.monotonic() + 20)
    except TasukiError as error:
        codes.append(error.code)
dies()
project_alerts().step()
print(json.dumps([codes, state()]))
"""
    )

    assert found[0] == ["FORBIDDEN"] * len(hosts)
    assert "not public" in found[1][0][4]
    assert receiver.got == []


@pytest.mark.parametrize(
    ("public", "address"),
    [
        (True, "93.184.216.34"),
        (True, "2606:2800:220:1::1"),
        (True, "::ffff:8.8.8.8"),
        (True, "64:ff9b::8.8.8.8"),
        (True, "2002:808:808::1"),
        (False, "100.64.0.1"),
        (False, "224.0.0.1"),
        (False, "::ffff:10.0.0.1"),
        (False, "::10.0.0.1"),
        (False, "::ffff:0:10.0.0.1"),
        (False, "64:ff9b::127.0.0.1"),
        (False, "64:ff9b::169.254.169.254"),
        (False, "64:ff9b:1::8.8.8.8"),
        (False, "2002:7f00:1::1"),
        (False, "2002:c0a8:1::1"),
        (False, "2001:0:4136:e378:8000:63bf:3fff:fdd2"),
        (False, "fd00::1"),
        (False, "fec0::1"),
        (False, "ff02::1"),
    ],
)
def test_an_ipv6_address_that_leads_to_a_private_ipv4_one_is_as_private(public: bool, address: str) -> None:
    configure()
    from tasuki.django.alerts import checked_address

    if public:
        assert checked_address(address, 443, allow_private=False)
    else:
        with pytest.raises(Forbidden, match="not public"):
            checked_address(address, 443, allow_private=False)
    assert checked_address(address, 443, allow_private=True)


# ---------------------------------------------------------------------------------------------------- servers


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest) -> str:
    """The address of a store; empty: SQLite in the data folder."""
    return "" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


def looks(store: str, data: Path) -> bool:
    """Return whether a server has begun to look for what is to be told."""
    if store:
        with closing(psycopg.connect(store)) as shared:
            return bool(shared.execute(LOOKED_AT).fetchall())
    with closing(sqlite3.connect(data / "tasuki.sqlite3", timeout=20.0)) as file:
        return bool(file.execute(LOOKED_AT).fetchall())


LOOKED_AT = "SELECT 1 FROM tasuki_scopeepoch WHERE scope = 'alerts'"


def test_a_server_tells_of_failures_and_dead_letters_signed_until_they_are_taken(
    store: str, receiver: Receiver, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("key\n")
    options = ("--webhook", receiver.url, "--webhook-secret", tmp_path / "key", "--webhook-private")
    kinds = ("--webhook-on", "failure", "--webhook-on", "dead_letter")
    receiver.answers = [503]
    with (
        start_server(tmp_path, *options, *kinds, store=store) as server,
        start_worker(server, "--exec", "sh=/bin/sh {args}", command=True),
        server.client() as client,
    ):
        until(lambda: looks(store, server.data), what="the server looks")
        client.submit(exec="sh", args=["-c", "exit 3"], retries=1, backoff_s=0.1, job_id="breaks", watch=False)
        until(lambda: len({data for data, _ in receiver.got}) == 2 and len(receiver.got) >= 3, 60.0, "both are told, one twice")

    bodies = [json.loads(data) for data, _ in receiver.got]
    assert {(one["kind"], one["job_id"], one["attempt"]) for one in bodies} == {
        ("failure", "breaks", 1),
        ("dead_letter", "breaks", 2),
    }
    for data, signature in receiver.got:
        assert signature == "sha256=" + hmac.new(b"key", data, hashlib.sha256).hexdigest()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--webhook", "ftp://h/x"], "--webhook: a receiver must be https://host/path or http://host/path"),
        (["--webhook", "https://u:p@h/x"], "without credentials"),
        (["--webhook", "https://h/x", "--webhook-on", "rain"], "--webhook-on: Invalid enum value 'rain'"),
        (["--webhook-private"], "give --webhook URL too"),
        (["--webhook", "https://h/x", "--webhook-secret", "empty"], "the file empty is empty"),
        (["--webhook", "https://h/x", "--store", "redis://127.0.0.1:1/0"], "--webhook needs a SQL store"),
    ],
)
def test_options_of_webhooks_that_cannot_work_are_refused(tmp_path: Path, options: list[str], says: str) -> None:
    (tmp_path / "empty").touch()

    done = User(tmp_path).run("server", *options)

    assert done.returncode == 2
    assert says in done.stderr
