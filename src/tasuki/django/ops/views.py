"""The screens. Each function returns the values of its template; what it changes is done by `operations` and `definitions`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from django.forms import modelform_factory
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.utils import timezone

from tasuki.core.job import Job, State
from tasuki.django import operations
from tasuki.django.commands import allowed_commands
from tasuki.django.conf import project_settings
from tasuki.django.definitions import emit, run_now, scheduler_settings
from tasuki.django.enqueueing import project_store
from tasuki.django.logs import ERRORS, read_log
from tasuki.django.models import AdminActionLog, DefinitionState, Event, JobDefinition, JobRun, SchedulerSettings
from tasuki.django.ops.screens import DEFINE, EXPORT_MAX, Table, back, moment, screen
from tasuki.errors import InvalidInput, NotFound, quoted
from tasuki.server.queries import describe

PAGE = 50
LOG_SHOWN_BYTES = 64 * 1024
LINE_SHOWN_CHARS = 2_000
LATE_S = 60.0
PREVIEWED = 10
STREAMS = ("stdout", "stderr", ERRORS)
JOB_COLUMNS = {
    "job_id": "Job",
    "state": "State",
    "subject": "Subject",
    "args": "Arguments",
    "created": "Created",
    "ended": "Ended",
}


def _alias() -> str:
    return project_settings().database


# ---------------------------------------------------------------------------------------------------- overview and workers


@screen("overview")
def overview(_request: HttpRequest) -> dict[str, Any]:
    """Show the queues, the leader, and what needs somebody's attention."""
    store, workers = project_store(), operations.live_workers()
    queues = [{"queue": queue, **msgspec.structs.asdict(counts)} for queue, counts in sorted(store.counts().items())]
    epoch, leader = store.epoch()
    columns = ("queue", "pending", "active", "succeeded", "failed", "timed_out", "skipped", "canceled")
    return {
        "title": "Overview",
        "table": Table({name: name.replace("_", " ").capitalize() for name in columns}, queues, empty="No job yet."),
        "figures": {
            "waiting": sum(one["pending"] + one["orphaned"] for one in queues),
            "running": sum(one["active"] for one in queues),
            "workers": len(workers),
            "slots": sum(worker.slots for _, worker in workers),
        },
        "leader": leader,
        "epoch": epoch,
        "alerts": list(_alerts(workers)),
    }


def _alerts(workers: list[Any]) -> Iterator[str]:
    if not workers:
        yield "No worker runs. Start one with: python manage.py tasuki_worker"
    oldest = JobRun.objects.using(_alias()).filter(ready=1).order_by("id").first()
    if oldest is not None:
        since = max(oldest.created_at, oldest.not_before or oldest.created_at)
        if (age_s := (timezone.now() - since).total_seconds()) > LATE_S:
            yield f"Job {oldest.job_id} has waited for {age_s:.0f} s."
    for state in DefinitionState.objects.using(_alias()).exclude(problem="").select_related("definition")[:10]:
        yield f"Definition {state.definition.name} cannot be run: {state.problem}"
    for event in Event.objects.using(_alias()).exclude(problem="").order_by("-id")[:10]:
        yield f"Event {event.pk} has no run of {event.problem}; mend it, then: python manage.py tasuki_events retry {event.pk}"


@screen("list")
def workers(_request: HttpRequest) -> dict[str, Any]:
    """List the workers that are alive."""
    rows = [{**worker.view(server_id), "id": worker.worker_id} for server_id, worker in operations.live_workers()]
    columns = {"worker_id": "Worker", "host": "Host", "running": "Running", "slots": "Slots", "patterns": "Takes"}
    return {"title": "Workers", "table": Table(columns, rows, empty="No worker runs. Start one: python manage.py tasuki_worker")}


# ---------------------------------------------------------------------------------------------------- jobs


@screen("jobs", change=operations.OPERATE)
def jobs(request: HttpRequest) -> HttpResponse | dict[str, Any]:
    """List jobs, the newest first; cancel those that were chosen, or run them again."""
    if request.method == "POST":
        return _act_on_jobs(request)
    wanted = {name: request.GET.get(name, "") for name in ("state", "subject", "worker", "text")}
    filters: dict[str, Any] = {
        "states": [wanted["state"]] if wanted["state"] else [],
        "subject": wanted["subject"] or None,
        "worker_id": wanted["worker"] or None,
        "text": wanted["text"] or None,
    }
    if "format" in request.GET:
        return {"table": Table(JOB_COLUMNS, operations.find_runs(**filters, limit=EXPORT_MAX))}
    page = operations.find_page(**filters, limit=PAGE, cursor=request.GET.get("cursor") or None)
    table = Table(JOB_COLUMNS, [_row(found) for found in page.jobs], {"job_id": "job"}, page.cursor, empty="No such job.")
    return {"title": "Jobs", "table": table, "wanted": wanted, "states": list(State.__members__), "choices": True}


def _act_on_jobs(request: HttpRequest) -> HttpResponse:
    chosen, action = request.POST.getlist("job_id"), request.POST.get("action", "")
    if not chosen:
        raise InvalidInput("no job was chosen; tick some first")
    reason = request.POST.get("reason", "")[:1000]
    if action == "cancel":
        states = operations.cancel_runs(chosen, actor=request.user, reason=reason)
        done = (
            f"Canceled: {sum(state.terminal for state in states)}. Being stopped: {sum(not state.terminal for state in states)}."
        )
    elif action == "rerun":
        operations.rerun(chosen, actor=request.user, reason=reason)
        done = f"Run again: {len(chosen)}."
    else:
        raise InvalidInput(f"action {quoted(action)} is none of cancel, rerun")
    return back("job", chosen[0], done=done) if "one" in request.POST else back("jobs", done=done)


def _row(job: Job) -> dict[str, Any]:
    return {
        "id": job.job_id,
        **{name: value for name, value in describe(job, in_list=True).items() if not name.endswith("_at")},
        "created": moment(job.created_at),
        "started": moment(job.started_at),
        "ended": moment(job.finished_at),
    }


@screen("job")
def job(request: Any, job_id: str) -> dict[str, Any]:
    """Show one job: its attempts, the reason of its state, its output."""
    found = operations.get_run(job_id)
    view, explained = describe(found), operations.explain_run(job_id)
    incidents = [{**msgspec.structs.asdict(one), "at": moment(one.at)} for one in project_store().incidents(job_id)]
    times = {"created": found.created_at, "assigned": found.assigned_at, "started": found.started_at, "ended": found.finished_at}
    timeline = [
        {"at": moment(at), "kind": kind, "attempt": "", "worker_id": "", "reason": ""} for kind, at in times.items() if at
    ]
    find = request.GET.get("find", "")
    return {
        "title": f"Job {job_id}",
        "job": found,
        "view": view,
        "facts": _facts(view),
        "because": explained["because"],
        "timeline": sorted(timeline + incidents, key=lambda one: one["at"]),
        "logs": [shown for stream in STREAMS if (shown := _shown_log(job_id, stream, find))["size"]],
        "find": find,
        "ended": found.state.terminal,
        "may": request.user.has_perm(operations.OPERATE),
    }


def _facts(view: dict[str, Any]) -> dict[str, Any]:
    """Return what a job's description says, without what is empty or shown elsewhere on its page."""
    known = {**view, **(view["outcome"] or {})}
    shown = {name: moment(value) if name.endswith(("_at", "not_before", "not_after")) else value for name, value in known.items()}
    return {
        name.replace("_", " "): value
        for name, value in shown.items()
        if name not in ("state", "outcome", "job_id", "meta")
        and value not in (None, "", 0, [], {})
        and value not in (None, "", 0, False)
        and value != []
        and value != {}
    }


def _shown_log(job_id: str, stream: str, find: str) -> dict[str, Any]:
    """Return the end of a stream, or its lines with a text; gaps, where output was not kept, are marked."""
    data = b"".join(_log_bytes(job_id, stream))
    if find:
        lines = (line[:LINE_SHOWN_CHARS] for line in data.decode("utf-8", "replace").splitlines() if find in line)
        text = "\n".join(lines)[-LOG_SHOWN_BYTES:]
    else:
        text = data[-LOG_SHOWN_BYTES:].decode("utf-8", "replace")
    return {"stream": stream, "size": len(data), "text": text, "cut": len(data) > LOG_SHOWN_BYTES}


def _log_bytes(job_id: str, stream: str) -> Iterator[bytes]:
    attempt, offset = None, 0
    for part in read_log(job_id, stream):
        if part.attempt != attempt:
            yield f"── attempt {part.attempt} ──\n".encode() if attempt is not None else b""
            attempt, offset = part.attempt, part.offset
        if part.offset > offset:
            yield f"\n── {part.offset - offset} bytes were not kept ──\n".encode()
        offset = part.offset + len(part.data)
        yield json.loads(part.data)[1].encode() if stream == ERRORS else part.data


@screen("problem")
def log(_request: HttpRequest, job_id: str, stream: str) -> StreamingHttpResponse:
    """Return all that is kept of a stream, as a file of text."""
    if stream not in STREAMS:
        raise NotFound(f"stream {quoted(stream)} is none of {', '.join(STREAMS)}")
    name = operations.get_run(job_id).job_id
    headers = {"Content-Disposition": f'attachment; filename="{name}.{stream}.txt"'}
    return StreamingHttpResponse(_log_bytes(job_id, stream), content_type="text/plain; charset=utf-8", headers=headers)


# ---------------------------------------------------------------------------------------------------- definitions and events


@screen("definitions", change=operations.OPERATE)
def definitions(request: HttpRequest) -> HttpResponse | dict[str, Any]:
    """List definitions with their next times; run one now."""
    if request.method == "POST":
        chosen = _definition(request.POST.get("id", ""))
        return back("job", run_now(chosen), done=f"A run of {chosen.name} was asked for.")
    found = JobDefinition.objects.using(_alias()).order_by("name").select_related("state")
    columns = {
        "name": "Definition",
        "enabled": "Enabled",
        "command": "Command",
        "schedule": "Schedule",
        "next": "Next",
        "last_run": "Last run",
        "problem": "Problem",
    }
    rows = [_definition_row(one) for one in found]
    return {"table": Table(columns, rows, {"name": "definition"}, empty="No definition yet."), "title": "Definitions"}


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


@screen("definition", change=DEFINE)
def definition(request: HttpRequest, pk: int | None = None) -> HttpResponse | dict[str, Any]:
    """Show a definition, its next times and its last runs; change it, or make a new one."""
    row = _definition(pk) if pk is not None else JobDefinition()
    form = DefinitionForm(request.POST or None, instance=row)
    if request.method == "POST" and form.is_valid():
        saved = form.save(commit=False)
        saved.save(using=_alias())
        return back("definition", saved.pk, done="Saved.")
    runs: list[dict[str, Any]] = []
    if pk is not None:
        newest = JobRun.objects.using(_alias()).filter(idempotency_key__gte=f"d{pk}-", idempotency_key__lt=f"d{pk}.")
        ids = list(newest.order_by("-idempotency_key").values_list("idempotency_key", flat=True)[:PREVIEWED])
        runs = [_row(found) for found in project_store().get(ids) if found is not None]
    return {
        "row": row,
        "form": form,
        "times": _next_times(row) if pk is not None and not form.errors else [],
        "table": Table(JOB_COLUMNS, runs, {"job_id": "job"}, empty="No run by its schedule is kept."),
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


@screen("events", change=operations.OPERATE)
def events(request: HttpRequest) -> HttpResponse | dict[str, Any]:
    """List events, the newest first; emit one to try definitions."""
    if request.method == "POST":
        try:
            payload = json.loads(request.POST.get("payload") or "null")
        except ValueError as error:
            raise InvalidInput(f"payload is not JSON: {error}") from error
        event = emit(request.POST.get("event_type", ""), payload, dedupe_key=request.POST.get("dedupe_key") or None)
        return back("events", done=f"Event {event.pk} is stored.")
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
    columns = {"id": "Event", "event_type": "Type", "payload": "Payload", "created": "Created", "processed": "Processed"}
    columns["problem"] = "Problem"
    cursor = str(page[-1].pk) if len(page) == PAGE else None
    return {"table": Table(columns, rows, cursor=cursor, empty="No event yet."), "title": "Events"}


SettingsForm = modelform_factory(SchedulerSettings, exclude=["id"])


@screen("settings", change=operations.CONFIGURE)
def settings(request: HttpRequest) -> HttpResponse | dict[str, Any]:
    """Show and change the settings that are in force without a restart."""
    row = scheduler_settings()
    form = SettingsForm(request.POST or None, instance=row)
    if request.method == "POST" and form.is_valid():
        changes = {name: form.cleaned_data[name] for name in form.changed_data}
        operations.change_settings(changes, actor=request.user)
        return back("settings", done="Saved. In force within two ticks.")
    return {"form": form}


@screen("list")
def audit(request: HttpRequest) -> dict[str, Any]:
    """List what people did, the newest first."""
    before = request.GET.get("cursor", "")
    found = AdminActionLog.objects.using(_alias()).order_by("-id")
    page = list((found.filter(id__lt=before) if before.isdigit() else found)[: EXPORT_MAX if "format" in request.GET else PAGE])
    columns = {"at": "Time", "actor": "Who", "action": "What", "target": "To", "detail": "Reason"}
    rows = [{name: getattr(row, name) for name in columns} for row in page]
    cursor = str(page[-1].pk) if len(page) == PAGE else None
    return {"title": "Audit", "table": Table(columns, rows, cursor=cursor, empty="Nobody has changed anything yet.")}
