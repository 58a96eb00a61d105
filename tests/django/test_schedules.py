"""Definitions and events of a project, from its files to runs of its commands. Real processes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.django.test_operations import IMPORTS
from tests.support.django_site import DjangoSite

pytestmark = pytest.mark.e2e

DEFINITIONS = """
[definitions.nightly]
command_name = "daily_report"
daily_at = "02:30"
time_zone = "Europe/Berlin"
default_args_json = { minimum = 100 }

[definitions.on-payment]
command_name = "probe"
event_type = "order.*"
default_args_json = ["say"]
"""


def test_definitions_of_the_settings_are_applied_and_enabled_and_events_emitted_by_hand(site: DjangoSite) -> None:
    site.migrate()
    found = site.ask(
        IMPORTS
        + """
from django.conf import settings
from tasuki.django.models import AdminActionLog, JobDefinition

settings.TASUKI = {"definitions": {"nightly": {"command_name": "daily_report", "daily_at": "02:30"}}}
said("tasuki_definitions", "apply", "--dry-run")
applied = data("tasuki_definitions", "apply")
row = JobDefinition.objects.get()
said("tasuki_definitions", "apply")
switched = [data("tasuki_definitions", what, "nightly") for what in ("disable", "enable")]
enabled = JobDefinition.objects.get()
settings.TASUKI = {}
deleted = data("tasuki_definitions", "apply")["deleted"]
paid = ("tasuki_events", "emit", "order.paid", "--payload", '{"order": 17}', "--dedupe-key", "order-17")
events = [data(*paid), data(*paid), data("tasuki_events", "emit", "order.sent")]
wrong = [said("tasuki_events", "emit", *words) for words in (("order.paid", "--payload", "{"), ("order paid",))]
stored = list(Event.objects.order_by("id").values_list("id", "event_type", "payload_json", "dedupe_key"))
Event.objects.filter(pk=stored[1][0]).update(processed_at=time.time(), problem="definition mail: it is wrong")
said("tasuki_events", "retry", str(stored[1][0]))
audit = list(AdminActionLog.objects.order_by("id").values_list("action", "target", "detail"))
actors = {one.actor.partition(":")[0] for one in AdminActionLog.objects.all()}
print(json.dumps([applied, row.managed_by, switched, [enabled.enabled, enabled.changed_at > row.changed_at], deleted, events,
                  wrong, stored, audit, sorted(actors)]))
"""
    )
    applied, source, switched, enabled, deleted, events, wrong, stored, audit, actors = found

    assert (applied["created"], source, deleted) == (["nightly"], "settings", ["nightly"])
    assert switched == [{"name": "nightly", "enabled": False}, {"name": "nightly", "enabled": True}]
    assert enabled == [True, True]  # its times count from now on
    first, again, sent = events
    assert first == again == {"id": stored[0][0], "event_type": "order.paid"}
    assert [row[1:] for row in stored] == [["order.paid", {"order": 17}, "order-17"], ["order.sent", None, None]]
    assert sent["id"] == stored[1][0]
    assert "CommandError: --payload is not JSON" in wrong[0]
    assert "'order paid'" in wrong[1]
    assert audit == [
        ["definition.change", "nightly", "applied from settings"],
        ["definition.disable", "nightly", ""],
        ["definition.enable", "nightly", ""],
        ["definition.delete", "nightly", "applied from settings"],
        *[["event.emit", kind, ""] for kind in ("order.paid", "order.paid", "order.sent")],
        ["event.retry", str(stored[1][0]), ""],
    ]
    assert actors == ["manage.py"]


def test_a_file_of_definitions_becomes_runs_by_hand_and_upon_events(site: DjangoSite, tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").write_text(DEFINITIONS)
    (tmp_path / "wrong.toml").write_text('[definitions.bad]\ncommand_name = "flush"\ndaily_at = "02:30"\n')
    (tmp_path / "args.toml").write_text('[definitions.bad]\ncommand_name = "daily_report"\nevent_type = "order.*"\n')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "jobs.toml").write_text(
        '[definitions.hourly]\ncommand_name = "probe"\nhourly_at_minute = 5\ndefault_args_json = ["say"]\n'
    )
    site.migrate()
    with site.worker() as worker:
        worker.wait_for_output("is warm")
        found = site.ask(
            IMPORTS
            + """
from tasuki.django import emit
from tasuki.django.logs import read_log
from tasuki.django.models import JobDefinition

def ended(job_id, timeout=30.0):
    until = time.monotonic() + timeout
    while True:
        row = JobRun.objects.filter(idempotency_key=job_id).first()
        if row is not None and row.finished_at is not None:
            return row
        assert time.monotonic() < until, f"{job_id}: {row} did not end"
        time.sleep(0.01)

Order.objects.create(customer="Sato", total=300)
dry = data("tasuki_definitions", "apply", "--file", "jobs.toml", "--dry-run")
applied = data("tasuki_definitions", "apply", "--file", "jobs.toml")
again = data("tasuki_definitions", "apply", "--file", "jobs.toml")
wrong = [said("tasuki_definitions", "apply", "--file", name) for name in ("wrong.toml", "args.toml")]
other = data("tasuki_definitions", "apply", "--file", os.path.abspath("other/jobs.toml"))
times = data("tasuki_definitions", "next", "nightly", "--count", "3")["next"]
by_hand = ended(data("tasuki_definitions", "run", "nightly")["job_id"])
try:
    with transaction.atomic():
        emit("order.paid", {"order": 1})
        raise ZeroDivisionError
except ZeroDivisionError:
    pass
with transaction.atomic():
    event = emit("order.paid", {"order": 17}, dedupe_key="order-17")
emit("order.paid", {"order": 18}, dedupe_key="order-17")
upon = ended(f"e{event.pk}-{JobDefinition.objects.get(name='on-payment').pk}")
said("tasuki_definitions", "disable", "on-payment")
listed = data("tasuki_definitions", "list")
sources = [one["managed_by"] for one in listed]
events = data("tasuki_events", "list")
log = b"".join(part.data for part in read_log(by_hand.idempotency_key, "stdout")).decode()
spec = upon.spec and __import__("msgspec").msgpack.decode(upon.spec)
print(json.dumps([dry, applied, again, wrong, other, sources, times, by_hand.state, log, upon.state, spec["args"],
                  {one["name"]: one["enabled"] for one in listed}, [one["event_type"] for one in events]]))
"""
        )
    dry, applied, again, wrong, other, sources, times, state, log, upon, args, listed, events = found

    assert dry == applied == {"created": ["nightly", "on-payment"], "changed": [], "unchanged": [], "deleted": []}
    assert again["unchanged"] == ["nightly", "on-payment"]
    assert "definition 'bad': command_name: command 'flush' may not be run by jobs" in wrong[0]
    assert "definition 'bad': default_args_json: arguments of command 'daily_report': Error: unrecognized" in wrong[1]
    assert (other["created"], other["deleted"], sources) == (["hourly"], [], ["other/jobs.toml", "jobs.toml", "jobs.toml"])
    assert all(82_800 <= later - earlier <= 90_000 for earlier, later in pairwise(times))
    assert (state, upon) == ("SUCCEEDED", "SUCCEEDED")
    assert log.startswith("1 orders, 300 yen (")
    assert args[:2] == ["probe", "say"]
    assert '"order":17' in args[2].replace(" ", "")
    assert listed == {"hourly": True, "nightly": True, "on-payment": False}
    assert events == ["order.paid", "definition.run"]
