"""The screens of a Django project alone: its definitions, events and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import available_timezones

import msgspec
from django import forms
from django.core.exceptions import ValidationError
from django.forms.utils import flatatt
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy as lazy

from tasuki.core.scheduler.firing import (
    EVENT_ARGUMENT,
    ConcurrencyPolicy,
    DefinitionType,
    EventRow,
    arguments_of,
    is_for,
)
from tasuki.core.scheduler.schedule import DAY_MINUTES, WEEKDAYS, ScheduleType, parse_schedule, preview, zone_of
from tasuki.core.scheduler.thresholds import RANGES, Thresholds
from tasuki.core.store_messages import Filter
from tasuki.core.subject import check_subject
from tasuki.django import operations
from tasuki.django.commands import allowed_commands, check_arguments
from tasuki.django.conf import project_settings
from tasuki.django.definitions import scheduler_settings
from tasuki.django.enqueueing import project_store
from tasuki.django.models import Event, JobDefinition, JobRun, SchedulerSettings
from tasuki.django.ops.screens import EXPORT_MAX, PAGE, Button, Table, back, job_columns, job_row, lacks, number_of, screen
from tasuki.errors import InvalidInput, NotFound, TasukiError, quoted
from tasuki.server.queries import describe

PREVIEWED = 10
NO_TIME, MINUTE = timedelta(), timedelta(minutes=1)
DEFAULTS = Thresholds()


def _alias() -> str:
    return project_settings().database


@screen("definitions", change=operations.OPERATE, needs="definitions")
def definitions(request: HttpRequest) -> HttpResponse | dict[str, Any]:
    """List definitions with their next times; run one now, which a payload reaches as that of an event."""
    if request.method == "POST":
        chosen = _definition(request.POST.get("id", ""))
        run = operations.run_now(chosen, payload=_payload(request), actor=request.user)
        return back("definition", chosen.pk, done=_("Run %s was asked for; it is there when the leader has looked.") % run)
    found = JobDefinition.objects.using(_alias()).order_by("name").select_related("state")
    columns = {
        "name": _("Definition"),
        "enabled": _("Enabled"),
        "command": _("Command"),
        "schedule": _("Schedule"),
        "next": _("Next"),
        "last_run": _("Last run"),
        "problem": _("Problem"),
    }
    rows = [_definition_row(one) for one in found]
    button = Button("run", _("Run now"), _("Run it now? Its schedule goes on as before."))
    table = Table(columns, rows, {"name": "definition"}, empty=_("No definition yet."), buttons=[button])
    return {"table": table, "title": _("Definitions"), "may_define": _may(request, operations.DEFINE)}


def _may(request: Any, permission: str) -> bool:
    return bool(request.user.has_perm(permission))


def _disable(form: forms.BaseForm, *, unless: bool) -> None:
    """Let a person read a form, who may not send it."""
    for field in form.fields.values():
        field.disabled = not unless


def _definition_row(row: JobDefinition) -> dict[str, Any]:
    state = getattr(row, "state", None)
    by_time = f"{row.schedule_type} {row.schedule_value} ({row.time_zone})"
    return {
        "id": row.pk,
        "name": row.name,
        "enabled": row.enabled,
        "command": row.command_name,
        "schedule": f"event {row.event_type}" if row.event_type else by_time,
        "next": state.next_at if state is not None and row.enabled else None,
        "last_run": state.last_run_id if state is not None else "",
        "problem": state.problem if state is not None else "",
    }


def _definition(pk: Any) -> JobDefinition:
    row = JobDefinition.objects.using(_alias()).filter(pk=pk).first() if str(pk).isdecimal() else None
    if row is None:
        raise NotFound(f"there is no definition {quoted(str(pk))}")
    return row


_FIELDS_OF: dict[str, tuple[str, ...]] = {
    ScheduleType.EVERY_N_MINUTES.value: ("every",),
    ScheduleType.HOURLY_AT_MINUTE.value: ("minute",),
    ScheduleType.DAILY_AT.value: ("at",),
    ScheduleType.WEEKLY.value: ("days", "at"),
    ScheduleType.CRON.value: ("cron",),
    DefinitionType.EVENT.value: ("event_type",),
}
"""Fields that each kind of definition needs; the others are not shown."""
_BY_TIME = " ".join(ScheduleType)
_SHOWN_FOR = {
    **{
        name: " ".join(kind for kind, names in _FIELDS_OF.items() if name in names)
        for names in _FIELDS_OF.values()
        for name in names
    },
    "time_zone": _BY_TIME,
}


class ManyNames(forms.Select):
    """A choice among hundreds: Django renders a template for each option, which takes 25 ms for all zones."""

    def render(self, name: str, value: Any, attrs: Any = None, renderer: Any = None) -> SafeString:
        del renderer
        chosen = SafeString(" selected")
        rows = ((key, chosen if str(key) == str(value) else "", label) for key, label in self.choices)
        options = format_html_join("", '<option value="{}"{}>{}</option>', rows)
        return format_html('<select name="{}"{}>{}</select>', name, flatatt(self.build_attrs(self.attrs, attrs)), options)


class DefinitionForm(forms.Form):
    """A definition, with fields for its schedule in which only what can be fired can be written."""

    name = forms.CharField(label=lazy("Name"), max_length=200)
    kind = forms.ChoiceField(
        label=lazy("When"),
        choices=[
            (ScheduleType.DAILY_AT.value, lazy("every day at a time")),
            (ScheduleType.WEEKLY.value, lazy("on days of the week at a time")),
            (ScheduleType.HOURLY_AT_MINUTE.value, lazy("every hour at a minute")),
            (ScheduleType.EVERY_N_MINUTES.value, lazy("every so many minutes from midnight on")),
            (ScheduleType.CRON.value, lazy("as cron says")),
            (DefinitionType.EVENT.value, lazy("upon an event")),
        ],
    )
    every = forms.ChoiceField(
        label=lazy("Minutes"), choices=[(n, n) for n in range(1, DAY_MINUTES + 1) if DAY_MINUTES % n == 0], required=False
    )
    minute = forms.IntegerField(label=lazy("Minute of the hour"), min_value=0, max_value=59, required=False)
    days = forms.MultipleChoiceField(
        label=lazy("Days"),
        widget=forms.CheckboxSelectMultiple,
        required=False,
        choices=list(
            zip(
                WEEKDAYS,
                (lazy("Mon"), lazy("Tue"), lazy("Wed"), lazy("Thu"), lazy("Fri"), lazy("Sat"), lazy("Sun")),
                strict=True,
            )
        ),
    )
    at = forms.TimeField(label=lazy("Time"), widget=forms.TimeInput({"type": "time"}, "%H:%M"), required=False)
    cron = forms.CharField(
        label=lazy("Cron"), max_length=255, required=False, help_text=lazy("Minute, hour, day of month, month, day of week.")
    )
    event_type = forms.CharField(
        label=lazy("Type of event"),
        max_length=255,
        required=False,
        help_text=lazy("A pattern: * is one word, > all that follow, as in order.>"),
    )
    time_zone = forms.ChoiceField(label=lazy("Time zone"), widget=ManyNames)
    command_name = forms.ChoiceField(label=lazy("Command"))
    default_args_json = forms.JSONField(
        label=lazy("Arguments"),
        widget=forms.Textarea({"rows": 2}),
        required=False,
        help_text=lazy('As JSON: a list is the command line, ["--days", "7"]; an object is options, {"days": 7}.'),
    )
    queue = forms.CharField(label=lazy("Queue"), max_length=64)
    timeout_seconds = forms.IntegerField(
        label=lazy("Time limit, s"), min_value=1, required=False, help_text=lazy("Empty: none of its own.")
    )
    max_retries = forms.IntegerField(label=lazy("Retries"), min_value=0)
    retry_backoff_seconds = forms.IntegerField(label=lazy("Pause before a retry, s"), min_value=0)
    concurrency_policy = forms.ChoiceField(
        label=lazy("While an earlier run goes on"),
        choices=[
            ("", lazy("the usual: by time forbid, upon an event allow")),
            (ConcurrencyPolicy.FORBID.value, lazy("forbid: the new one is skipped")),
            (ConcurrencyPolicy.ALLOW.value, lazy("allow: both run")),
            (ConcurrencyPolicy.REPLACE.value, lazy("replace: the earlier one is canceled")),
        ],
        required=False,
    )
    enabled = forms.BooleanField(label=lazy("Enabled"), required=False)

    def __init__(self, data: Mapping[str, Any] | None, row: JobDefinition) -> None:
        super().__init__(data, initial=_initial_of(row))
        self._row = row
        self.schedule: tuple[str, str] | None = None
        """Type and value of the schedule, if they are valid."""
        zones = {name for name in available_timezones() if "/" in name}  # not those of the machine, or of days gone by
        for field, names in (("command_name", {*allowed_commands()}), ("time_zone", {"UTC", *zones})):
            known = sorted({*names, *filter(None, [getattr(row, field)])})
            self.fields[field].choices = [(name, name) for name in known]  # type: ignore[attr-defined]
        for name, kinds in _SHOWN_FOR.items():
            self.fields[name].shown_for = kinds  # type: ignore[attr-defined]

    def clean(self) -> None:
        super().clean()
        given, kind = self.cleaned_data, self.cleaned_data.get("kind", "")
        names = _FIELDS_OF.get(kind, ())
        for name in names:
            if name not in self.errors and given.get(name) in (None, "", []):
                self.add_error(name, forms.Field.default_error_messages["required"])
        if any(name in self.errors for name in ("kind", *names)):
            return
        value = " ".join(_text_of(given[name]) for name in names)
        by_time = kind != DefinitionType.EVENT
        columns = {name: given[name] for name in given if name in _COLUMNS} | {
            "type": (DefinitionType.TIME if by_time else DefinitionType.EVENT).value,
            "schedule_type": kind if by_time else "",
            "schedule_value": value if by_time else "",
            "event_type": "" if by_time else value,
        }
        for name, text in columns.items():
            setattr(self._row, name, text)
        try:
            if by_time:
                parse_schedule(kind, value)
                self.schedule = kind, value
            if not self.errors:
                self._row.full_clean()
                of_event = () if by_time else (f"{EVENT_ARGUMENT}null",)
                check_arguments(given["command_name"], (*arguments_of(given["default_args_json"]), *of_event))
        except ValidationError as error:
            for name, texts in error.message_dict.items():
                place = name if name in self.fields else names[-1] if name == "schedule_value" else None
                self.add_error(place, [_unusable(text) for text in texts])
        except TasukiError as error:
            self.add_error(names[-1] if self.schedule is None and by_time else "default_args_json", _unusable(error.message))


def _unusable(text: str) -> str:
    return _("This cannot be used: %s") % text


_COLUMNS = frozenset(field.name for field in JobDefinition._meta.fields)


def _text_of(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else value.strftime("%H:%M") if hasattr(value, "strftime") else str(value)


def _initial_of(row: JobDefinition) -> dict[str, Any]:
    """Return the values of the form's fields for a definition."""
    found = {name: getattr(row, name) for name in _COLUMNS if getattr(row, name) is not None}
    kind = DefinitionType.EVENT.value if row.type == DefinitionType.EVENT else row.schedule_type or ScheduleType.DAILY_AT.value
    days, _space, at = row.schedule_value.rpartition(" ")
    of_kind = {ScheduleType.WEEKLY.value: {"days": [day.strip().lower() for day in days.split(",")], "at": at}}
    one = dict.fromkeys(_FIELDS_OF.get(row.schedule_type, ()), row.schedule_value)
    found.setdefault("default_args_json", forms.fields.InvalidJSONInput(""))  # shown as it is, not as null
    return {**found, "kind": kind, **of_kind.get(row.schedule_type, one)}


@screen("definition", change=operations.DEFINE, needs="definitions")
def definition(request: HttpRequest, pk: int | None = None) -> HttpResponse | dict[str, Any]:
    """Show a definition, its next times and its last runs; change it, pause, resume or delete it, or make a new one.

    Values of the form in the query: show the next times that they would have.
    """
    row = _definition(pk) if pk is not None else JobDefinition()
    if request.method == "POST" and pk is not None and (action := request.POST.get("action")):
        return _steer_definition(request, row, action)
    if pk is None and not _may(request, operations.DEFINE):
        raise lacks(request, operations.DEFINE)
    asked = request.POST if request.method == "POST" else request.GET if "kind" in request.GET else None
    form = DefinitionForm(asked, row)
    _disable(form, unless=_may(request, operations.DEFINE))
    if asked is not None and form.is_valid() and request.method == "POST":
        operations.save_definition(row, actor=request.user)
        return back("definition", row.pk, done=_("Saved."))
    runs = _last_runs(pk) if pk is not None else []
    saved = (row.schedule_type, row.schedule_value) if pk is not None and row.schedule_type else None
    schedule = saved if asked is None else form.schedule
    return {
        "title": row.name if pk is not None else _("New definition"),
        "row": row,
        "form": form,
        "times": next_times(schedule, row.time_zone) if schedule is not None else [],
        "mistakes": [text for name in (*_SHOWN_FOR, "kind") for text in form.errors.get(name, [])],
        "table": Table(job_columns(), runs, {"job_id": "job"}, empty=_("No run of it is kept.")),
        "may_run": _may(request, operations.OPERATE),
    }


def _last_runs(pk: int) -> list[dict[str, Any]]:
    """Return the last runs, the newest first: of the schedule however old, others if they are among the newest jobs."""
    scheduled = JobRun.objects.using(_alias()).filter(idempotency_key__gte=f"d{pk}-", idempotency_key__lt=f"d{pk}.")
    ids = list(scheduled.order_by("-idempotency_key").values_list("idempotency_key", flat=True)[:PREVIEWED])
    newest = project_store().find(Filter(definition_id=pk), limit=PREVIEWED).jobs
    known = {job.job_id: job for job in (*newest, *project_store().get(ids)) if job is not None}
    last = sorted(known.values(), key=lambda job: job.created_at, reverse=True)[:PREVIEWED]
    return [job_row(describe(job, in_list=True)) for job in last]


def _steer_definition(request: HttpRequest, row: JobDefinition, action: str) -> HttpResponse:
    if action == "delete":
        operations.delete_definition(row, actor=request.user)
        return back("definitions", done=_("Definition %s is deleted.") % row.name)
    if action not in ("pause", "resume"):
        raise InvalidInput(f"action must be one of pause, resume, delete, got {quoted(action)}")
    operations.set_enabled(row, action == "resume", actor=request.user)
    return back("definition", row.pk, done=_("It is fired again.") if action == "resume" else _("It is not fired any more."))


def next_times(schedule: tuple[str, str], time_zone: str, after: datetime | None = None) -> list[dict[str, Any]]:
    """Return the next nominal times of a schedule (type and value), each with what is to be said of a change of the clock."""
    zone, start = zone_of(time_zone), after or timezone.now()
    found = preview(parse_schedule(*schedule), start.timestamp(), zone, PREVIEWED)
    times = [start.astimezone(zone), *(datetime.fromtimestamp(at, zone) for at in found)]
    return [
        {"shown": f"{date_format(time, 'D')} {time.isoformat(' ', 'minutes')}", "change": _clock_change(before, time)}
        for before, time in pairwise(times)
    ]


def _clock_change(before: datetime, time: datetime) -> str:
    minutes = ((time.utcoffset() or NO_TIME) - (before.utcoffset() or NO_TIME)) // MINUTE
    if not minutes:
        return ""
    return (_("clock set forward by %d min") if minutes > 0 else _("clock set back by %d min")) % abs(minutes)


def _payload(request: HttpRequest) -> Any:
    try:
        return json.loads(request.POST.get("payload") or "null")
    except (ValueError, RecursionError) as error:
        raise InvalidInput(_("the payload is not JSON: %s") % error) from error


@screen("events", change=operations.OPERATE, needs="events", filters=("event_type",))
def events(request: HttpRequest) -> HttpResponse | dict[str, Any]:
    """List events, the newest first; tell which definitions match a type; emit one to try definitions."""
    if request.method == "POST":
        payload = _payload(request)
        event_type, dedupe_key = request.POST.get("event_type", ""), request.POST.get("dedupe_key") or None
        event = operations.emit_event(event_type, payload, dedupe_key=dedupe_key, actor=request.user)
        return back("events", done=_("Event %d is stored.") % event.pk)
    before, size = number_of(request), EXPORT_MAX if "format" in request.GET else PAGE
    found = Event.objects.using(_alias()).order_by("-id")
    page = list((found if before is None else found.filter(id__lt=before))[:size])
    rows = [
        {
            "id": row.pk,
            "event_type": row.event_type,
            "payload": json.dumps(row.payload_json, ensure_ascii=False),
            "dedupe_key": row.dedupe_key,
            "created": row.created_at,
            "processed": row.processed_at,
            "problem": row.problem,
        }
        for row in page
    ]
    columns = {
        "id": _("Event"),
        "event_type": _("Type"),
        "payload": _("Payload"),
        "created": _("Created"),
        "processed": _("Processed"),
        "problem": _("Problem"),
    }
    cursor = str(page[-1].pk) if len(page) == PAGE else None
    wanted = request.GET.get("event_type", "").strip()
    return {
        "table": Table(columns, rows, cursor=cursor, empty=_("No event yet.")),
        "title": _("Events"),
        "wanted": wanted,
        "matching": _matching(wanted) if wanted else None,
    }


def _matching(event_type: str) -> Table:
    """Return the definitions that an event of this type would give a run, and those that would if they were not paused."""
    event = EventRow(id=0, event_type=check_subject(event_type), created_at=0.0)
    found = JobDefinition.objects.using(_alias()).filter(type=DefinitionType.EVENT).order_by("name")
    known = [(row, msgspec.structs.replace(row.definition(), enabled=True)) for row in found]
    rows = [
        {"id": row.pk, "name": row.name, "event_type": row.event_type, "command": row.command_name, "enabled": row.enabled}
        for row, definition in known
        if is_for(event, definition)
    ]
    columns = {"name": _("Definition"), "event_type": _("Type"), "command": _("Command"), "enabled": _("Enabled")}
    return Table(columns, rows, {"name": "definition"}, empty=_("No definition matches: an event of this type has no run."))


_EFFECTS = {
    "skip_late_runs_after_seconds": (
        lazy("Skip late runs after seconds"),
        lazy("A run that has not started so long after its nominal time is skipped."),
    ),
    "log_retention_days_db": (
        lazy("Log retention days db"),
        lazy("Logs are rows of the database for so many days."),
    ),
    "leader_tick_seconds": (
        lazy("Leader tick seconds"),
        lazy("The leader looks for changes so often, and every node for changed settings."),
    ),
    "assign_ahead_seconds": (
        lazy("Assign ahead seconds"),
        lazy("A run is given to a worker so long before its time."),
    ),
    "heartbeat_interval_seconds": (
        lazy("Heartbeat interval seconds"),
        lazy("Each process is heard of so often."),
    ),
    "heartbeat_ttl_seconds": (
        lazy("Heartbeat TTL seconds"),
        lazy("A process that was not heard of for so long is taken to be dead."),
    ),
    "worker_detach_grace_seconds": (
        lazy("Worker detach grace seconds"),
        lazy("A worker that does not answer is detached no sooner."),
    ),
    "leader_stale_seconds": (
        lazy("Leader stale seconds"),
        lazy("A leader that was not seen for so long is suspected."),
    ),
    "leader_lock_ttl_seconds": (
        lazy("Leader lock TTL seconds"),
        lazy("The leader's lock ends so long after its last renewal."),
    ),
    "subleader_check_seconds": (
        lazy("Subleader check seconds"),
        lazy("Sub-leaders look after the leader so often."),
    ),
    "reassign_after_seconds": (
        lazy("Reassign after seconds"),
        lazy("A run that its worker has not started for so long goes to another."),
    ),
    "max_jobs_per_worker": (
        lazy("Max jobs per worker"),
        lazy("No worker runs more jobs at once; 0: as many as it has slots."),
    ),
    "continuation_retry_count": (
        lazy("Continuation retry count"),
        lazy("A worker that was cut off asks so often whether it may go on."),
    ),
    "continuation_retry_interval_seconds": (
        lazy("Continuation retry interval seconds"),
        lazy("It waits so long between two such questions."),
    ),
    "grpc_ping_timeout_seconds": (
        lazy("gRPC ping timeout seconds"),
        lazy("A worker has so long to answer a call."),
    ),
    "grpc_ping_failures": (
        lazy("gRPC ping failures"),
        lazy("A worker that did not answer so many calls in a row is suspected."),
    ),
}
"""The label of each setting, and its effect."""

SettingsForm = forms.modelform_factory(SchedulerSettings, exclude=["id"])


@screen("settings", change=operations.CONFIGURE, needs="settings")
def settings(request: HttpRequest) -> HttpResponse | dict[str, Any]:
    """Show and change the settings that are in force without a restart."""
    row = scheduler_settings()
    form = SettingsForm(request.POST or None, instance=row)
    _disable(form, unless=_may(request, operations.CONFIGURE))
    if request.method == "POST" and form.is_valid():
        changes = {name: form.cleaned_data[name] for name in form.changed_data}
        operations.change_settings(changes, actor=request.user)
        return back("settings", done=_("Saved. In force within two ticks."))
    for name, (label, effect) in _EFFECTS.items():
        least, most = RANGES[name]
        values = {"default": f"{getattr(DEFAULTS, name):,g}", "least": f"{least:g}", "most": f"{most:,.12g}"}
        form.fields[name].label = label
        form.fields[name].help_text = f"{effect} " + _("Default %(default)s, from %(least)s to %(most)s.") % values
    return {"form": form}
