"""Definitions and events of a Django project: apply definitions from settings or a file, emit events, run a definition by hand.

    apply({"nightly": {"command_name": "rebuild_index", "daily_at": "02:30", "time_zone": "Europe/Berlin"}}, source="settings")
    apply(read_file(Path("definitions.toml")), source="definitions.toml")
    emit("order.paid", {"order": 17}, dedupe_key="order-17")          # in the caller's transaction
    run_id = run_now(JobDefinition.objects.get(name="nightly"))       # the leader makes the run a moment later

An entry has the columns of `JobDefinition` by their names; its schedule is `schedule_type` and `schedule_value`, or one key with
the name of the type (`every_n_minutes = 5`, `daily_at = "02:30"`); an entry with `event_type` is of type event. A file has them
below `[definitions.NAME]`.

Nothing here decides when anything is run: the leader reads these tables (`stores/sql/fire.py`). `JobDefinition.full_clean()`
checks one row, `JobDefinition.preview(n)` returns its next times.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import connections, transaction

from tasuki.core.cluster_messages import Hint
from tasuki.core.job import check_text, event_run_id, type_name
from tasuki.core.scheduler.firing import (
    SKIP_LATE_RUNS_AFTER_MAX_S,
    SKIP_LATE_RUNS_AFTER_S,
    Definition,
    DefinitionType,
    check_event,
    problem_of,
)
from tasuki.core.scheduler.schedule import ScheduleType
from tasuki.django.conf import project_settings
from tasuki.django.enqueueing import hint_after_commit
from tasuki.django.fields import project_time_zone
from tasuki.django.models import Event, JobDefinition, SchedulerSettings
from tasuki.errors import ConfigError, InvalidInput, NotFound, WrongType, quoted

DEDUPE_KEY_MAX_CHARS = 255
RUN_NOW = "definition.run"
_FIELDS = tuple(name for name in Definition.__struct_fields__ if name not in ("id", "name", "changed_at"))


class Applied(msgspec.Struct, kw_only=True):
    """The names of the definitions by what `apply` did to them."""

    created: list[str] = msgspec.field(default_factory=list)
    changed: list[str] = msgspec.field(default_factory=list)
    unchanged: list[str] = msgspec.field(default_factory=list)
    deleted: list[str] = msgspec.field(default_factory=list)


def read_file(path: Path) -> dict[str, Any]:
    """Return the entries of a TOML file by name."""
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read definitions from {path}: {error}") from None
    entries = found.pop("definitions", None)
    if found or not isinstance(entries, dict):
        raise ConfigError(f"{path} must have tables [definitions.NAME] and nothing else; it has {', '.join(found) or 'none'}")
    return entries


def apply(entries: Mapping[str, Any], *, source: str, using: str | None = None, dry_run: bool = False) -> Applied:
    """Make the definitions of this source those of `entries`, all or none: create, change, and delete those that are gone.

    Definitions of other sources, and those made by hand, are left alone; InvalidInput if one of them has such a name. An entry
    without `enabled` leaves a definition as enabled as it is. Errors name the definition and the field.
    """
    if not isinstance(entries, Mapping):
        raise WrongType(f"definitions must be a dict of entries by name, got {type_name(entries)}")
    check_text("source", source)
    alias = using or project_settings().database
    wanted = {name: _columns(name, entry) for name, entry in entries.items()}
    done = Applied()
    with transaction.atomic(using=alias):
        rows = {row.name: row for row in JobDefinition.objects.using(alias).select_for_update().order_by("id")}
        for name, columns in wanted.items():
            _apply_one(name, columns, rows.get(name), source, alias, done)
        gone = [row for row in rows.values() if row.managed_by == source and row.name not in wanted]
        for row in gone:
            done.deleted.append(row.name)
            row.delete(using=alias)
        transaction.set_rollback(dry_run, using=alias)
    return done


def _apply_one(name: str, columns: dict[str, Any], row: JobDefinition | None, source: str, alias: str, done: Applied) -> None:
    if row is not None and row.managed_by != source:
        owner = f"belongs to {row.managed_by}" if row.managed_by else "was made by hand"
        raise InvalidInput(f"definition {quoted(name)} {owner}; rename one of the two, or delete that one")
    before = {field: getattr(row, field) for field in columns} if row is not None else None
    if before == columns:
        done.unchanged.append(name)
        return
    (done.created if row is None else done.changed).append(name)
    row = row or JobDefinition(name=name, managed_by=source)
    for field, value in columns.items():
        setattr(row, field, value)
    try:
        row.full_clean(validate_unique=False, validate_constraints=False)
    except ValidationError as error:
        said = {field: " ".join(texts) for field, texts in error.message_dict.items()}
        problems = "; ".join(text if text.startswith(field) else f"{field}: {text}" for field, text in said.items())
        raise InvalidInput(f"definition {quoted(name)}: {problems}") from None
    row.save(using=alias)


def _columns(name: str, entry: Any) -> dict[str, Any]:
    """Return the columns that an entry sets; all others have their defaults, but `enabled` stays as it is."""
    check_text("the name of a definition", name)
    if not isinstance(entry, Mapping):
        raise InvalidInput(f"definition {quoted(name)} must be a table of columns, not {type(entry).__name__}")
    given = dict(entry)
    forms = [form.value for form in ScheduleType if form.value in given]
    if len(forms) > 1 or (forms and ("schedule_type" in given or "schedule_value" in given)):
        raise InvalidInput(f"definition {quoted(name)} has more than one schedule: {', '.join(forms)}; give one")
    for form in forms:
        given |= {"schedule_type": form, "schedule_value": str(given.pop(form))}
    if unknown := sorted(set(given) - set(_FIELDS)):
        raise InvalidInput(f"definition {quoted(name)} has unknown columns: {', '.join(unknown)}; known are {', '.join(_FIELDS)}")
    if "command_name" not in given:
        raise InvalidInput(f"definition {quoted(name)} has no command_name")
    if given.get("event_type") and given.get("schedule_type"):
        raise InvalidInput(f"definition {quoted(name)} has an event_type and a schedule ({given['schedule_type']}); give one")
    given.setdefault("type", (DefinitionType.EVENT if "event_type" in given else DefinitionType.TIME).value)
    plain = Definition(name=name, command_name="", type=given["type"])
    defaults = {field: getattr(plain, field) for field in _FIELDS if field != "enabled"}
    columns = {**defaults, "concurrency_policy": plain.policy, "time_zone": project_time_zone(), **given}
    if (problem := problem_of(Definition(name=name, **columns))) is not None:  # before Django converts values: 2.5 would be 2
        raise InvalidInput(f"definition {quoted(name)}: {problem[1]}")
    return columns


def emit(event_type: str, payload: Any = None, *, dedupe_key: str | None = None, using: str | None = None) -> Event:
    """Store an event in the caller's transaction; the leader makes one run of it for each definition whose pattern matches.

    The payload, any JSON up to 64 KiB, reaches the command as `--event=<json>`. A second event with the same `dedupe_key` is not
    stored: the first one is returned.
    """
    payload = msgspec.json.decode(check_event(event_type, payload))  # as the command will see it, and any database can store it
    if dedupe_key is not None and not 0 < len(check_text("dedupe_key", dedupe_key)) <= DEDUPE_KEY_MAX_CHARS:
        raise InvalidInput(f"dedupe_key {quoted(dedupe_key)} must have 1 to {DEDUPE_KEY_MAX_CHARS} characters")
    alias = using or project_settings().database
    event = Event(event_type=event_type, payload_json=payload, dedupe_key=dedupe_key)
    if dedupe_key is None:
        event.save(using=alias)
    elif not _insert_if_new(event, alias):
        return Event.objects.using(alias).get(dedupe_key=dedupe_key)
    hint_after_commit(alias, Hint(everything=True))
    return event


def _insert_if_new(event: Event, alias: str) -> bool:
    """Insert an event in one statement unless there is one with its key, and return whether it was inserted."""
    connection = connections[alias]
    columns = {
        str(field.column): field.get_db_prep_save(field.pre_save(event, True), connection)
        for field in Event._meta.concrete_fields
        if not field.primary_key
    }
    statement = (
        f"INSERT INTO {Event._meta.db_table} ({', '.join(columns)}) VALUES ({', '.join(['%s'] * len(columns))}) "  # noqa: S608
        "ON CONFLICT (dedupe_key) DO NOTHING RETURNING id"
    )
    with connection.cursor() as cursor:
        cursor.execute(statement, list(columns.values()))
        row = cursor.fetchone()
    if row is None:
        return False
    event.pk, event._state.db, event._state.adding = row[0], alias, False
    return True


def process_again(event_ids: Sequence[int], *, using: str | None = None) -> None:
    """Have the leader process events again that a definition could not be run upon; definitions that had a run of one get no
    second. NotFound names those that have no problem: all or none."""
    alias = using or project_settings().database
    with transaction.atomic(using=alias):
        rows = Event.objects.using(alias).select_for_update().exclude(problem="").filter(pk__in=event_ids).order_by("pk")
        if unknown := sorted(set(event_ids) - set(rows.values_list("pk", flat=True))):
            raise NotFound(f"events without a problem: {', '.join(map(str, unknown))}; tasuki_events list --problems shows those")
        Event.objects.using(alias).filter(pk__in=event_ids).update(processed_at=None, problem="")
        hint_after_commit(alias, Hint(everything=True))


def run_now(definition: JobDefinition, payload: Any = None, *, using: str | None = None) -> str:
    """Ask for one run of a definition, whether or not it is enabled, and return its job_id. Its concurrency_policy holds.

    A payload reaches the command as that of an event.
    """
    if not isinstance(definition, JobDefinition) or definition.pk is None:
        raise WrongType(f"definition must be a JobDefinition that was saved, got {type_name(definition)}")
    payload = msgspec.json.decode(check_event(RUN_NOW, payload))
    alias = using or project_settings().database
    event = Event.objects.using(alias).create(event_type=RUN_NOW, payload_json=payload, job_definition=definition)
    hint_after_commit(alias, Hint(everything=True))
    return event_run_id(event.pk, definition.pk)


def scheduler_settings(using: str | None = None) -> SchedulerSettings:
    """Return the row of settings; the first call writes it, with SCHEDULER_SKIP_LATE_RUNS_AFTER_SECONDS of the project."""
    window_s = float(getattr(settings, "SCHEDULER_SKIP_LATE_RUNS_AFTER_SECONDS", SKIP_LATE_RUNS_AFTER_S))
    if not 0 <= window_s <= SKIP_LATE_RUNS_AFTER_MAX_S:
        raise ConfigError(
            f"SCHEDULER_SKIP_LATE_RUNS_AFTER_SECONDS is {window_s}; it must be 0 to {SKIP_LATE_RUNS_AFTER_MAX_S:.0f} seconds"
        )
    rows = SchedulerSettings.objects.using(using or project_settings().database)
    return rows.get_or_create(id=1, defaults={"skip_late_runs_after_seconds": window_s})[0]
