"""The screens of a Django project alone: its definitions, events and settings."""

from __future__ import annotations

import json
from typing import Any

from django.forms import modelform_factory
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _

from tasuki.core.scheduler.thresholds import RANGES, Thresholds
from tasuki.django import operations
from tasuki.django.commands import allowed_commands
from tasuki.django.conf import project_settings
from tasuki.django.definitions import scheduler_settings
from tasuki.django.enqueueing import project_store
from tasuki.django.models import Event, JobDefinition, JobRun, SchedulerSettings
from tasuki.django.ops.screens import Button, Table, back, screen
from tasuki.django.ops.views import PAGE, job_columns, job_row
from tasuki.errors import InvalidInput, NotFound, quoted
from tasuki.server.queries import describe

PREVIEWED = 10
DEFAULTS = Thresholds()


def _alias() -> str:
    return project_settings().database


@screen("definitions", change=operations.OPERATE, needs="definitions")
def definitions(request: HttpRequest) -> HttpResponse | dict[str, Any]:
    """List definitions with their next times; run one now."""
    if request.method == "POST":
        chosen = _definition(request.POST.get("id", ""))
        run = operations.run_now(chosen, actor=request.user)
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
    row = JobDefinition.objects.using(_alias()).filter(pk=pk).first() if str(pk).isdigit() else None
    if row is None:
        raise NotFound(f"there is no definition {quoted(str(pk))}")
    return row


DefinitionForm = modelform_factory(JobDefinition, exclude=["managed_by", "changed_at"])


@screen("definition", change=operations.DEFINE, needs="definitions")
def definition(request: HttpRequest, pk: int | None = None) -> HttpResponse | dict[str, Any]:
    """Show a definition, its next times and its last runs; change it, or make a new one."""
    row = _definition(pk) if pk is not None else JobDefinition()
    form = DefinitionForm(request.POST or None, instance=row)
    if request.method == "POST" and form.is_valid():
        saved = form.save(commit=False)
        operations.save_definition(saved, actor=request.user)
        return back("definition", saved.pk, done=_("Saved."))
    runs: list[dict[str, Any]] = []
    if pk is not None:
        newest = JobRun.objects.using(_alias()).filter(idempotency_key__gte=f"d{pk}-", idempotency_key__lt=f"d{pk}.")
        ids = list(newest.order_by("-idempotency_key").values_list("idempotency_key", flat=True)[:PREVIEWED])
        runs = [job_row(describe(found, in_list=True)) for found in project_store().get(ids) if found is not None]
    return {
        "row": row,
        "form": form,
        "times": _next_times(row) if pk is not None and not form.errors else [],
        "table": Table(job_columns(), runs, {"job_id": "job"}, empty=_("No run by its schedule is kept.")),
        "commands": sorted(allowed_commands()),
    }


def _next_times(row: JobDefinition) -> list[dict[str, Any]]:
    """Return the next nominal times; each that follows a change of the clock is marked."""
    if row.event_type or not row.schedule_type:
        return []
    times = row.preview(PREVIEWED)
    shifts = [time.utcoffset() for time in times]
    return [{"at": time, "shown": time.isoformat(" ", "minutes"), "changed": shift != before}
            for time, shift, before in zip(times, shifts, [*shifts[:1], *shifts], strict=False)]  # fmt: skip


@screen("events", change=operations.OPERATE, needs="events")
def events(request: HttpRequest) -> HttpResponse | dict[str, Any]:
    """List events, the newest first; emit one to try definitions."""
    if request.method == "POST":
        try:
            payload = json.loads(request.POST.get("payload") or "null")
        except ValueError as error:
            raise InvalidInput(f"payload is not JSON: {error}") from error
        event_type, dedupe_key = request.POST.get("event_type", ""), request.POST.get("dedupe_key") or None
        event = operations.emit_event(event_type, payload, dedupe_key=dedupe_key, actor=request.user)
        return back("events", done=_("Event %d is stored.") % event.pk)
    before = request.GET.get("cursor", "")
    found = Event.objects.using(_alias()).order_by("-id")
    page = list((found.filter(id__lt=before) if before.isdigit() else found)[:PAGE])
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
    return {"table": Table(columns, rows, cursor=cursor, empty=_("No event yet.")), "title": _("Events")}


SettingsForm = modelform_factory(SchedulerSettings, exclude=["id"])


@screen("settings", change=operations.CONFIGURE, needs="settings")
def settings(request: HttpRequest) -> HttpResponse | dict[str, Any]:
    """Show and change the settings that are in force without a restart."""
    row = scheduler_settings()
    form = SettingsForm(request.POST or None, instance=row)
    if request.method == "POST" and form.is_valid():
        changes = {name: form.cleaned_data[name] for name in form.changed_data}
        operations.change_settings(changes, actor=request.user)
        return back("settings", done=_("Saved. In force within two ticks."))
    for name, effect in _effects().items():
        least, most = RANGES[name]
        values = {"default": f"{getattr(DEFAULTS, name):g}", "least": f"{least:g}", "most": f"{most:g}"}
        form.fields[name].help_text = effect + " " + _("Default %(default)s, from %(least)s to %(most)s.") % values
    return {"form": form}


def _effects() -> dict[str, str]:
    """Return the effect of each setting."""
    return {
        "skip_late_runs_after_seconds": _("A run that has not started so long after its nominal time is skipped."),
        "log_retention_days_db": _("Logs are rows of the database for so many days."),
        "leader_tick_seconds": _("The leader looks for changes so often, and every node for changed settings."),
        "assign_ahead_seconds": _("A run is given to a worker so long before its time."),
        "heartbeat_interval_seconds": _("Each process is heard of so often."),
        "heartbeat_ttl_seconds": _("A process that was not heard of for so long is taken to be dead."),
        "worker_detach_grace_seconds": _("A worker that does not answer is detached no sooner."),
        "leader_stale_seconds": _("A leader that was not seen for so long is suspected."),
        "leader_lock_ttl_seconds": _("The leader's lock ends so long after its last renewal."),
        "subleader_check_seconds": _("Sub-leaders look after the leader so often."),
        "reassign_after_seconds": _("A run that its worker has not started for so long goes to another."),
        "max_jobs_per_worker": _("No worker runs more jobs at once; 0: as many as it has slots."),
        "continuation_retry_count": _("A worker that was cut off asks so often whether it may go on."),
        "continuation_retry_interval_seconds": _("It waits so long between two such questions."),
        "grpc_ping_timeout_seconds": _("A worker has so long to answer a call."),
        "grpc_ping_failures": _("A worker that did not answer so many calls in a row is suspected."),
    }
