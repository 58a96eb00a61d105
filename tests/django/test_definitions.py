"""Definitions and events of a project: what is applied, what is refused, and that nothing is half-written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasuki.django import standalone

standalone.configure()

from django.core.exceptions import ValidationError  # noqa: E402
from django.db import connections, transaction  # noqa: E402
from django.test.utils import CaptureQueriesContext  # noqa: E402

from tasuki.core.scheduler.thresholds import RANGES, Thresholds  # noqa: E402
from tasuki.django.commands import is_own  # noqa: E402
from tasuki.django.definitions import apply, emit, process_again, read_file, run_now, scheduler_settings  # noqa: E402
from tasuki.django.models import Event, JobDefinition, SchedulerSettings  # noqa: E402
from tasuki.errors import ConfigError, InvalidInput, NotFound, TooLarge, WrongType  # noqa: E402
from tasuki.stores.common import SystemClock  # noqa: E402
from tasuki.stores.sql.store import SqlStore  # noqa: E402

NIGHTLY = {"command_name": "rebuild_index", "daily_at": "02:30", "time_zone": "Europe/Berlin"}


@pytest.fixture
def alias(tmp_path: Path) -> Iterator[str]:
    alias = standalone.register(tmp_path / "one.sqlite3")
    standalone.migrate(alias)
    yield alias
    connections[alias].close()
    standalone.forget(alias)


@pytest.fixture(autouse=True)
def any_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no project here: `test_testing` and `test_schedules` look at its commands."""
    monkeypatch.setattr("tasuki.django.commands.check_command", lambda name: name)


def names(alias: str) -> list[str]:
    return sorted(JobDefinition.objects.using(alias).values_list("name", flat=True))


def test_a_second_apply_changes_what_differs_and_deletes_what_is_gone(alias: str) -> None:
    JobDefinition(name="by hand", command_name="x", schedule_type="daily_at", schedule_value="01:00").save(using=alias)
    first = apply({"nightly": NIGHTLY, "paid": {"command_name": "mail", "event_type": "order.paid"}}, source="a", using=alias)
    again = apply({"nightly": NIGHTLY, "paid": {"command_name": "mail", "event_type": "order.paid"}}, source="a", using=alias)
    later = apply({"nightly": {**NIGHTLY, "daily_at": "03:30"}}, source="a", using=alias)

    assert (first.created, again.unchanged) == (["nightly", "paid"], ["nightly", "paid"])
    assert (later.changed, later.deleted) == (["nightly"], ["paid"])
    assert names(alias) == ["by hand", "nightly"]
    nightly = JobDefinition.objects.using(alias).get(name="nightly")
    assert (nightly.schedule_type, nightly.schedule_value, nightly.managed_by) == ("daily_at", "03:30", "a")


def test_a_disabled_definition_stays_disabled_when_it_is_applied_again(alias: str) -> None:
    apply({"nightly": NIGHTLY}, source="a", using=alias)
    JobDefinition.objects.using(alias).update(enabled=False)

    apply({"nightly": {**NIGHTLY, "max_retries": 9}}, source="a", using=alias)

    assert JobDefinition.objects.using(alias).values_list("enabled", "max_retries").get() == (False, 9)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"daily_at": "02:30"}, "has no command_name"),
        ({**NIGHTLY, "daily_at": "25:00"}, "'bad': schedule_value '25:00'"),
        ({**NIGHTLY, "time_zone": "Mars/Olympus"}, "'bad': time_zone 'Mars/Olympus' is not known"),
        ({**NIGHTLY, "cron": "* * * * *"}, "has more than one schedule: daily_at, cron"),
        ({**NIGHTLY, "colour": 1}, "has unknown columns: colour"),
        ({**NIGHTLY, "default_args_json": "x"}, "default_args_json"),
        ({**NIGHTLY, "max_retries": "many"}, "max_retries: expected `int`, got `str`"),
        ({**NIGHTLY, "enabled": "no"}, "enabled: expected `bool`, got `str`"),
        ("daily", "must be a table of columns"),
        ({**NIGHTLY, "timeout_seconds": 2.5}, "timeout_seconds: expected `int | null`, got `float`"),
        ({**NIGHTLY, "queue": 3}, "queue: expected `str`, got `int`"),
        ({**NIGHTLY, "default_args_json": [math.nan]}, "default_args_json has nan, which is not JSON"),
        ({**NIGHTLY, "default_args_json": ["\ud800"]}, "default_args_json has a lone surrogate"),
        ({**NIGHTLY, "default_args_json": [10**5000]}, "default_args_json has a number that cannot be written"),
        ({**NIGHTLY, "event_type": "order.*"}, "has an event_type and a schedule (daily_at); give one"),
    ],
)
def test_one_bad_entry_leaves_all_as_it_was(alias: str, entry: Any, words: str) -> None:
    apply({"nightly": NIGHTLY}, source="a", using=alias)

    with pytest.raises(InvalidInput) as refused:
        apply({"fine": NIGHTLY, "bad": entry}, source="a", using=alias)

    assert refused.value.message.startswith("definition 'bad'")
    assert words in refused.value.message
    assert names(alias) == ["nightly"]


def test_definitions_of_others_are_not_taken_over(alias: str) -> None:
    apply({"nightly": NIGHTLY}, source="a", using=alias)

    with pytest.raises(InvalidInput, match="belongs to a; rename one"):
        apply({"nightly": NIGHTLY}, source="b", using=alias)
    assert apply({}, source="b", using=alias).deleted == []


def test_a_dry_run_tells_and_writes_nothing(alias: str) -> None:
    assert apply({"nightly": NIGHTLY}, source="a", using=alias, dry_run=True).created == ["nightly"]
    assert names(alias) == []


def test_definitions_are_read_from_a_file(alias: str, tmp_path: Path) -> None:
    file = tmp_path / "definitions.toml"
    text = '[definitions.nightly]\ncommand_name = "rebuild_index"\nevery_n_minutes = 15\n'
    file.write_text(text + "[definitions.nightly.default_args_json]\ndays = 7\n")
    apply(read_file(file), source=file.name, using=alias)
    found = JobDefinition.objects.using(alias).get()

    assert (found.schedule_type, found.schedule_value, found.default_args_json) == ("every_n_minutes", "15", {"days": 7})
    for text, words in (("x = 1", "it has x"), ("[definitions", "cannot read"), ("", "it has none")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_file(file)


def test_the_form_of_a_definition_names_the_field(alias: str) -> None:
    bad = JobDefinition(name="n", command_name="c", schedule_type="cron", schedule_value="61 * * * *")

    with pytest.raises(ValidationError) as refused:
        bad.full_clean(validate_unique=False)

    assert list(refused.value.message_dict) == ["schedule_value"]


def test_a_change_of_the_schedule_has_a_time_and_other_changes_have_none(alias: str) -> None:
    row = JobDefinition(name="n", command_name="c", schedule_type="daily_at", schedule_value="02:30")
    row.save(using=alias)
    made_at = row.changed_at
    row.max_retries = 1
    row.save(using=alias)
    unchanged = row.changed_at
    row.enabled = False
    row.save(using=alias, update_fields=["enabled"])

    assert made_at == unchanged < row.changed_at
    found = JobDefinition.objects.using(alias).get()
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT changed_at FROM tasuki_jobdefinition")
        assert cursor.fetchone() == (found.definition().changed_at,)  # else the leader would see a change whenever it is saved
    assert found.changed_at == row.changed_at


def test_an_event_is_part_of_the_callers_transaction_and_its_key_counts_once(alias: str) -> None:
    def broken() -> None:
        with transaction.atomic(using=alias):
            emit("order.paid", {"order": 1}, using=alias)
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    first = emit("order.paid", {"order": 17}, dedupe_key="order-17", using=alias)
    second = emit("order.paid", {"order": 17}, dedupe_key="order-17", using=alias)

    assert first.pk == second.pk
    assert list(Event.objects.using(alias).values_list("event_type", "payload_json")) == [("order.paid", {"order": 17})]


def test_an_event_with_a_key_is_one_statement(alias: str) -> None:
    with transaction.atomic(using=alias), CaptureQueriesContext(connections[alias]) as statements:
        event = emit("order.paid", {"order": 17}, dedupe_key="order-17", using=alias)

    assert len(statements) == 1
    stored = Event.objects.using(alias).get(pk=event.pk)
    assert (stored.event_type, stored.payload_json, stored.created_at) == (event.event_type, {"order": 17}, event.created_at)
    event.problem = "seen"
    event.save()  # as one that was read
    assert Event.objects.using(alias).get().problem == "seen"


def test_the_payload_of_an_event_is_stored_as_the_command_will_see_it(alias: str) -> None:
    payload = {"at": datetime(2026, 11, 18, tzinfo=UTC), "rate": math.nan, "orders": (1, 2), "path": "\\u0000"}
    emit("order.paid", payload, using=alias)

    stored = Event.objects.using(alias).get().payload_json
    assert stored == {"at": "2026-11-18T00:00:00Z", "rate": None, "orders": [1, 2], "path": "\\u0000"}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("order.*",), InvalidInput, "event_type"),
        (("order", object()), InvalidInput, "payload is not JSON"),
        (("order", {"name": ["a\\\0"]}), InvalidInput, "payload has a NUL character"),
        (("order", "x" * 10_000_000), TooLarge, "payload has 10000002 bytes"),
        (("order", json.loads("[" * 110 + "]" * 110)), InvalidInput, "payload has lists or objects more than 100 deep"),
        ((None,), WrongType, "event_type must be str, got NoneType"),
        ((b"order",), WrongType, "event_type must be str, got bytes"),
    ],
)
def test_a_bad_event_is_refused_and_nothing_is_written(alias: str, arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        emit(*arguments, using=alias)

    assert not Event.objects.using(alias).exists()


def test_a_definition_that_no_one_checked_does_not_stop_the_leader(alias: str) -> None:
    rows = JobDefinition.objects.using(alias)
    each_minute = {"schedule_type": "every_n_minutes", "schedule_value": "1", "command_name": "c"}
    rows.create(name="surrogate", default_args_json=["\ud800"], **each_minute)
    rows.create(name="deep", default_args_json=json.loads("[" * 110 + "]" * 110), **each_minute)
    rows.create(name="good", **each_minute)
    store = SqlStore.in_django(alias, clock=_Later(120.0))

    fired = store.fire(epoch=store.epoch()[0])

    assert {run.definition_id for run in fired.runs} == {rows.get(name="good").pk}
    problems = dict(rows.exclude(state__problem="").values_list("name", "state__problem"))
    assert sorted(problems) == ["deep", "surrogate"]
    assert problems["deep"] == "default_args_json has an argument of type list; an argument is a text or a number"


class _Later(SystemClock):
    """The machine's clock, so many seconds later."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wall(self) -> float:
        return super().wall() + self._seconds


def test_an_event_that_a_definition_cannot_be_run_upon_is_noted_and_can_be_processed_again(alias: str) -> None:
    for name in ("good", "bad"):
        JobDefinition(name=name, command_name="c", type="event", event_type=">").save(using=alias)
    rows = JobDefinition.objects.using(alias)
    rows.filter(name="bad").update(queue="a b")
    event = emit("order.paid", using=alias)
    store = SqlStore.in_django(alias)
    store.take_over("leader", 1)

    first = store.fire(epoch=1)
    event.refresh_from_db(using=alias)
    assert event.problem.startswith("definition bad: ")
    assert event.processed_at is not None
    rows.filter(name="bad").update(queue="default")
    process_again([event.pk], using=alias)
    again = store.fire(epoch=1)

    number_of = dict(rows.values_list("name", "pk"))
    assert [run.job_id for run in first.runs] == [f"e{event.pk}-{number_of['good']}"]
    assert [run.job_id for run in again.runs] == [f"e{event.pk}-{number_of['bad']}"]
    assert not Event.objects.using(alias).exclude(problem="").exists()
    with pytest.raises(NotFound, match=f"events without a problem: {event.pk}"):
        process_again([event.pk], using=alias)


def test_by_time_runs_do_not_overlap_and_by_event_none_is_left_out_unless_a_policy_is_given(alias: str) -> None:
    by_event = {"type": "event", "event_type": ">"}
    by_time = {"schedule_type": "daily_at", "schedule_value": "01:00"}
    for name, fields in (("t", by_time), ("e", by_event), ("r", {**by_event, "concurrency_policy": "replace"})):
        row = JobDefinition(name=name, command_name="c", **fields)
        row.full_clean(validate_unique=False)
        row.save(using=alias)
    entries = {"at": {"command_name": "c", "daily_at": "01:00"}, "ae": {"command_name": "c", "event_type": ">"}}
    apply(entries, source="a", using=alias)

    assert dict(JobDefinition.objects.using(alias).values_list("name", "concurrency_policy")) == {
        "t": "forbid", "e": "allow", "r": "replace", "at": "forbid", "ae": "allow",
    }  # fmt: skip
    assert apply(entries, source="a", using=alias).unchanged == ["at", "ae"]


def test_times_are_those_of_the_project_unless_a_definition_names_a_zone(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.conf import settings

    monkeypatch.setattr(settings, "TIME_ZONE", "Asia/Tokyo")
    nightly = {"command_name": "c", "daily_at": "02:30"}
    apply({"own": nightly, "named": {**nightly, "time_zone": "UTC"}}, source="a", using=alias)
    JobDefinition(name="row", command_name="c", schedule_type="daily_at", schedule_value="02:30").save(using=alias)

    rows = JobDefinition.objects.using(alias)
    assert dict(rows.values_list("name", "time_zone")) == {"own": "Asia/Tokyo", "named": "UTC", "row": "Asia/Tokyo"}
    assert {row.name: row.preview(1)[0].astimezone(UTC).hour for row in rows} == {"own": 17, "named": 2, "row": 17}


def test_a_run_by_hand_has_its_id_at_once(alias: str) -> None:
    row = JobDefinition(name="n", command_name="c", schedule_type="daily_at", schedule_value="02:30")
    row.save(using=alias)

    assert run_now(row, using=alias) == f"e{Event.objects.using(alias).get().pk}-{row.pk}"


def test_the_settings_of_the_project_are_the_first_values(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.conf import settings

    monkeypatch.setattr(settings, "SCHEDULER_SKIP_LATE_RUNS_AFTER_SECONDS", 60, raising=False)
    assert scheduler_settings(alias).skip_late_runs_after_seconds == 60
    monkeypatch.setattr(settings, "SCHEDULER_SKIP_LATE_RUNS_AFTER_SECONDS", 90)
    assert scheduler_settings(alias).skip_late_runs_after_seconds == 60


def test_each_setting_is_a_column_with_its_default_and_a_range(alias: str) -> None:
    row = scheduler_settings(alias)
    assert [field.name for field in SchedulerSettings._meta.concrete_fields] == ["id", *Thresholds.__struct_fields__]
    assert row.thresholds() == Thresholds()

    for name, (least, most) in RANGES.items():
        for value in (least - 1, most + 1):
            row = SchedulerSettings(**{name: value})
            with pytest.raises(ValidationError) as refused:
                row.full_clean(validate_unique=False)
            assert f"{value:g} is not between {least:g} and {most:g}" in refused.value.message_dict[name][0]


@pytest.mark.parametrize("wrong", [-1, math.inf, math.nan])
def test_a_window_that_cannot_be_is_refused(alias: str, monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    from django.conf import settings

    monkeypatch.setattr(settings, "SCHEDULER_SKIP_LATE_RUNS_AFTER_SECONDS", wrong, raising=False)

    with pytest.raises(ConfigError, match="it must be 0 to 31622400 seconds"):
        scheduler_settings(alias)


def test_an_id_is_never_used_again(alias: str) -> None:
    row = JobDefinition(name="n", command_name="c", schedule_type="daily_at", schedule_value="02:30")
    row.save(using=alias)
    first = row.pk
    row.delete(using=alias)
    other = JobDefinition(name="n", command_name="c", schedule_type="daily_at", schedule_value="02:30")
    other.save(using=alias)

    assert other.pk > first


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("/srv/shop/orders/management", True),
        ("/usr/lib/python3/dist-packages/django/contrib/auth", False),
        ("/home/sato/.local/lib/python3.13/site-packages/debug_toolbar", False),
    ],
)
def test_commands_of_packages_are_not_those_of_the_project_wherever_they_are_installed(file: str, own: bool) -> None:
    assert is_own(file) is own


def test_pools_of_connections_are_closed_before_a_fork() -> None:
    from django.db.backends.postgresql.base import DatabaseWrapper

    from tasuki.django.node import close_connections

    alias = standalone.register_postgresql({"dbname": "nowhere", "pool": True})
    closed: list[str] = []
    DatabaseWrapper._connection_pools[alias] = SimpleNamespace(close=lambda: closed.append(alias))
    assert connections[alias].vendor == "postgresql"

    close_connections()

    assert closed == [alias]
    assert alias not in DatabaseWrapper._connection_pools
    standalone.forget(alias)
