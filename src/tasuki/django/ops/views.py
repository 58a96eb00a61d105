"""The screens that every backend has. Each function returns the values of its template; the backend does what it changes."""

from __future__ import annotations

import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from tasuki.core.broker.worker_messages import SILENT_SHARE
from tasuki.core.explain import takers
from tasuki.core.job import DEAD, TERMINAL, State
from tasuki.core.routing import PREFIX_BYTES
from tasuki.core.scheduler.schedule import zone_of
from tasuki.core.subject import check_pattern, check_subject
from tasuki.django import operations
from tasuki.django.ops.backend import Backend, View, backend_of
from tasuki.django.ops.charts import SPANS, charts, shown_seconds, totals
from tasuki.django.ops.reasons import KINDS, reasons, taker_reason
from tasuki.django.ops.screens import (
    EXPORT_MAX,
    PAGE,
    Button,
    Table,
    back,
    job_columns,
    job_row,
    lacks,
    moment,
    number_of,
    screen,
)
from tasuki.errors import InvalidInput, NotFound, quoted
from tasuki.stores.sql.store import FIND_SCAN_MAX

FIND_STEP = 100
EXPORT_FINDS_MAX = 200  # some 4 s where nothing is found
AUDIT_STEP = 1_000
AUDIT_SCAN_MAX = 20_000  # entries that one look at a filtered audit reads
DEAD_NEW_S = 3_600
DEAD_NEW_MAX = 20
DEAD_LOOKED_AT = 500
DEAD_FINDS_MAX = 10  # jobs that were canceled or skipped are looked at too
REFUSED_SHOWN = 10
INPUTS_SHOWN = 100
RESULT_LISTED_MAX_BYTES = 4 * 1024 * 1024  # a page reads all of it
LOG_SHOWN_BYTES = 64 * 1024
LINE_SHOWN_CHARS = 2_000
ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-Z\\^_])")
"""An escape sequence of a terminal: a colour, a move of the cursor, the title or link of an OSC."""


# ---------------------------------------------------------------------------------------------------- overview, subjects


@screen("overview", filters=("span",))
def overview(request: HttpRequest) -> dict[str, Any]:
    """Show the queues, the leader, and what needs somebody's attention."""
    backend = backend_of(request)
    workers, counts = backend.workers(), backend.counts()
    queues: list[View] = [{"queue": queue, **numbers} for queue, numbers in sorted(counts.items())]
    leader, epoch = backend.leader()
    subleaders = sorted(worker["worker_id"] for worker in workers if worker.get("role") == "subleader")
    span = _span_of(request, "span") or "1h"
    failed = sum(one["failed"] + one["timed_out"] for one in queues)
    return {
        "title": _("Overview"),
        "table": _queues(queues),
        "figures": [
            ("jobs", "?state=PENDING", _("Waiting"), sum(one["pending"] + one["orphaned"] for one in queues)),
            ("jobs", "?state=RUNNING", _("Running"), sum(one["active"] for one in queues)),
            ("jobs", "?state=SUCCEEDED", _("Succeeded"), sum(one["succeeded"] for one in queues)),
            ("dead", "", _("Failed"), failed),
            ("workers", "", _("Workers"), len(workers)),
            ("workers", "", _("Slots"), sum(worker["slots"] for worker in workers)),
        ],
        "leader": leader,
        "epoch": epoch,
        "subleaders": subleaders,
        "alerts": [*_alerts(backend, workers, leader), *backend.alerts()],
        "first": not queues,
        "charts": charts(backend, span),
        "span": span,
        "spans": list(SPANS),
        "may_run": _may_operate(request),
    }


def _queues(rows: list[View]) -> Table:
    columns = {
        "queue": _("Queue"),
        "pending": _("Waiting"),
        "active": _("Running"),
        "succeeded": _("Succeeded"),
        "failed": _("Failed"),
        "timed_out": _("Timed out"),
        "skipped": _("Skipped"),
        "canceled": _("Canceled"),
    }
    return Table(columns, rows, empty=_("No job yet."))


def _alerts(backend: Backend, workers: list[View], leader: str) -> Iterator[str]:
    if not workers:
        yield _("No worker runs. Start one with: %s") % backend.start_worker
    elif not leader:
        yield _("There is no leader: until one is elected, no schedule is fired, and lost jobs are not given to other workers.")
    if workers and all(worker.get("detached") for worker in workers):
        yield _("All workers are detached: no job starts.")
    for worker in workers:
        if "heartbeat_age_s" in worker and worker["heartbeat_age_s"] > worker["ttl_s"] * SILENT_SHARE:
            named = {"worker": worker["worker_id"], "age": worker["heartbeat_age_s"]}
            yield _("Worker %(worker)s was not heard of for %(age)d s.") % named
    newest, _cursor = backend.find(states=sorted(DEAD), limit=DEAD_NEW_MAX)
    if dead := sum((view["finished_at"] or 0.0) > time.time() - DEAD_NEW_S for view in newest):
        number = f"{dead}+" if dead == DEAD_NEW_MAX else str(dead)
        yield _("Jobs that failed for good within the last hour: %s. See the dead letters.") % number


def _may_operate(request: Any) -> bool:
    return bool(request.user.has_perm(operations.OPERATE))


@screen("subjects", change=operations.MANAGE, filters=("span", "subject", "exec"))
def subjects(request: HttpRequest) -> HttpResponse | dict[str, Any]:
    """Show the groups of subjects; tell which workers would take a subject, and why not the others; pause and resume subjects."""
    backend = backend_of(request)
    if request.method == "POST":
        return _pause(request, backend)
    wanted, exec_ = request.GET.get("subject", "").strip(), request.GET.get("exec", "").strip()
    found: list[View] = []
    if wanted:
        check_subject(wanted)
        workers = backend.workers()
        judged = zip(takers(wanted, exec_, request.user.get_username(), workers), workers, strict=True)
        found = [{**one, "because": taker_reason(one, worker)} for one, worker in judged]
        found.sort(key=lambda one: (not one["takes"], one["worker_id"]))
    span = _span_of(request, "span") or "1h"
    columns = {
        "queue": _("Queue"),
        "pending": _("Waiting"),
        "active": _("Running"),
        "per_minute": _("Ended per minute"),
        "p50": _("Delivery p50"),
        "p99": _("Delivery p99"),
        "redelivered": _("Delivered again"),
        "retried": _("Retried"),
        "dead": _("Failed for good"),
    }
    table = Table(columns, _group_rows(backend, span), empty=_("No job yet."))
    columns = {"worker_id": _("Worker"), "takes": _("Takes it"), "because": _("Because")}
    return {
        "title": _("Subjects"),
        "table": table,
        "span": span,
        "spans": list(SPANS),
        "tested": Table(columns, found, empty=_("No worker runs. Start one with: %s") % backend.start_worker) if wanted else None,
        "wanted": {"subject": wanted, "exec": exec_},
        "paused": _paused(backend),
    }


def _group_rows(backend: Backend, span: str) -> list[View]:
    """Return the rows of the groups: jobs by state, and what happened over the span."""
    counts, happened = backend.counts(), totals(backend, span)
    rows = []
    for group in sorted(counts.keys() | happened.keys()):
        of = happened.get(group, {})
        latencies = {name: of.get(f"latency_{name}_s") for name in ("p50", "p99")}
        rows.append(
            {
                "queue": group,
                **counts.get(group, {}),
                "per_minute": f"{of.get('finished', 0) * 60 / SPANS[span][0]:.2f}",
                **{name: "" if value is None else shown_seconds(value) for name, value in latencies.items()},
                "redelivered": of.get("redelivered", 0),
                "retried": of.get("retried_failed", 0) + of.get("retried_lost", 0),
                "dead": of.get("dead", 0),
            }
        )
    return rows


def _paused(backend: Backend) -> Table:
    rows = [{**one, "id": one["pattern"], "since": moment(one["since"])} for one in backend.pauses()]
    columns = {"pattern": _("Pattern"), "since": _("Paused since"), "actor": _("Who"), "reason": _("Reason")}
    button = Button("resume", _("Resume"), _("Resume? Its jobs that wait start at once, where a worker has room."))
    return Table(columns, rows, empty=_("Nothing is paused."), buttons=[button])


def _pause(request: HttpRequest, backend: Backend) -> HttpResponse:
    action = request.POST.get("action", "")
    if action not in ("pause", "resume"):
        raise InvalidInput(f"action must be one of pause, resume, got {quoted(action)}")
    pattern = check_pattern(request.POST.get("id", "").strip())
    reason = (request.POST.get("reason") or "on the screen of subjects")[:1000]
    backend.set_paused(pattern, action == "pause", reason)
    said = _("%s is paused: its jobs wait.") if action == "pause" else _("%s is resumed.")
    return back("subjects", done=said % pattern)


# ---------------------------------------------------------------------------------------------------- workers


def _worker_buttons() -> dict[str, tuple[str, str, str]]:
    """Return the label of each action on a worker, the question that is asked before it, and what is said after it."""
    return {
        "detach": (
            _("Detach"),
            _("Detach? It finishes the jobs that it has, and gets no more until it is attached again."),
            _("%s gets no more jobs."),
        ),
        "attach": (_("Attach"), _("Attach? It gets jobs again at once."), _("%s gets jobs again.")),
        "drain": (_("Drain"), _("Drain? It takes no new jobs until it is told otherwise, or ends."), _("%s takes no new jobs.")),
        "undrain": (_("End drain"), _("End the drain? It takes new jobs again."), _("%s takes new jobs again.")),
        "degrade": (
            _("Step down"),
            _("Let the leader step down? Another node is elected within seconds; running jobs go on."),
            _("%s steps down."),
        ),
    }


@screen("workers", change=operations.MANAGE)
def workers(request: HttpRequest) -> HttpResponse | dict[str, Any]:
    """List the workers that are alive; detach, attach or drain one, or let the leader step down."""
    backend, buttons = backend_of(request), _worker_buttons()
    if request.method == "POST":
        worker_id, action = request.POST.get("id", ""), request.POST.get("action", "")
        if action not in buttons:
            raise InvalidInput(f"action must be one of {', '.join(buttons)}, got {quoted(action)}")
        reason = (request.POST.get("reason") or "on the screen of workers")[:1000]
        backend.steer(worker_id, action, reason)
        return back("workers", done=buttons[action][2] % worker_id)
    rows = [
        {
            **worker,
            "id": worker["worker_id"],
            "offers": worker.get("execs") or worker.get("takes", ""),
            "role": worker.get("role") or "worker",
            "cpu": f"{worker['cpu']:.0%}" if worker.get("agent") else "",
            "agent": worker.get("agent", "").partition(" (")[0],
            "containment": worker.get("agent", "").partition(" (")[2].removesuffix(")"),
            "caches": len(worker.get("held", "")) // (2 * PREFIX_BYTES) or "",
            **{f"may_{action}": True for action in worker["actions"]},
        }
        for worker in backend.workers()
    ]
    columns = {
        "worker_id": _("Worker"),
        "role": _("Role"),
        "detached": _("Detached"),
        "host": _("Host"),
        "running": _("Running"),
        "slots": _("Slots"),
        "patterns": _("Takes"),
        "offers": _("Offers"),
        "cpu": _("CPU"),
        "caches": _("Cached files"),
        "heartbeat_age_s": _("Heartbeat, s ago"),
        "containment": _("Containment"),
        "agent": _("Version"),
        "server_id": _("Server"),
    }
    unknown = [name for name in columns if rows and all(row.get(name) in (None, "", [], ()) for row in rows)]
    columns = {name: label for name, label in columns.items() if name not in unknown}
    shown = [Button(action, label, question, f"may_{action}") for action, (label, question, _done) in buttons.items()]
    empty = _("No worker runs. Start one with: %s") % backend.start_worker
    table = Table(columns, rows, empty=empty, buttons=shown)
    return {"title": _("Workers"), "table": table, "servers": _servers(backend, [shown[-1]])}


def _servers(backend: Backend, buttons: list[Button]) -> Table:
    """Return the servers; the leader can be told to step down if there is another one."""
    found = backend.servers()
    rows = [{**one, "id": one["server_id"], "may_degrade": one["leads"] and len(found) > 1} for one in found]
    columns = {
        "server_id": _("Server"),
        "leads": _("Leads"),
        "epoch": _("Epoch"),
        "workers": _("Workers"),
        "addresses": _("Addresses"),
        "problem": _("Problem"),
    }
    return Table(columns, rows, buttons=buttons)


@screen("list", needs="agents")
def agents(request: HttpRequest) -> dict[str, Any]:
    """List the node agents that TASUKI_URL names. Each look is a health check, as each of `tasuki nodes`: it is not repeated."""
    columns = {
        "node": _("Node"),
        "standing": _("Standing"),
        "running": _("Running"),
        "limit": _("Slots"),
        "breaker": _("Breaker"),
        "left_out_s": _("Left out for, s"),
        "good_checks": _("Good checks"),
        "said": _("Last answer"),
    }
    return {"title": _("Agents"), "table": Table(columns, backend_of(request).agents()), "ended": True}


# ---------------------------------------------------------------------------------------------------- jobs


_JOB_FILTERS = ("state", "subject", "definition", "worker", "text", "within", "from", "until", "zone")


def _span_of(request: HttpRequest, name: str) -> str:
    """Return the key of SPANS that was chosen, or ""."""
    span = request.GET.get(name, "")
    if span and span not in SPANS:
        raise InvalidInput(f"{name} must be one of {', '.join(SPANS)}, got {quoted(span)}")
    return span


def _moment_of(request: HttpRequest, name: str) -> float | None:
    """Return the Unix time of a field for date and time; it is of the viewer's zone, which the script adds to the form."""
    text = request.GET.get(name, "").strip()
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(_("%s is not a time; write it as 2026-03-29T02:30") % quoted(text)) from error
    zone = zone_of(request.GET["zone"]) if request.GET.get("zone") else timezone.get_current_timezone()
    return (found if found.tzinfo is not None else found.replace(tzinfo=zone)).timestamp()


@screen("jobs", change=operations.OPERATE, filters=_JOB_FILTERS)
def jobs(request: HttpRequest) -> HttpResponse | dict[str, Any]:
    """List jobs, the newest first; cancel those that were chosen, or run them again."""
    if request.method == "POST":
        return _act_on_jobs(request)
    backend = backend_of(request)
    wanted = {name: request.GET.get(name, "").strip() for name in _JOB_FILTERS}
    if wanted["state"] and wanted["state"] not in State.__members__:
        raise InvalidInput(f"state must be one of {', '.join(State.__members__)}, got {quoted(wanted['state'])}")
    within = _span_of(request, "within")
    filters: dict[str, Any] = {
        "states": [wanted["state"]] if wanted["state"] else [],
        "subject": wanted["subject"] or None,
        "worker_id": wanted["worker"] or None,
        "text": wanted["text"] or None,
        "definition": wanted["definition"] or None,
        "created_from": time.time() - SPANS[within][0] if within else _moment_of(request, "from"),
        "created_until": _moment_of(request, "until"),
    }
    cursor = request.GET.get("cursor") or None
    if "format" in request.GET:
        rows, more = _all_found(backend, EXPORT_MAX, EXPORT_FINDS_MAX, filters, cursor)
        if more and len(rows) < EXPORT_MAX:
            problem = _("an export looks at the newest %s jobs at most; narrow it by the time of the submit")
            raise InvalidInput(problem % f"{EXPORT_FINDS_MAX * FIND_SCAN_MAX:,}")
        return {"table": Table(job_columns(), rows)}
    page, cursor = backend.find(**filters, limit=PAGE, cursor=cursor)
    looked_at = f"{FIND_SCAN_MAX:,}"
    empty = _("No such job.")
    if cursor:
        empty = _("No match among the %s jobs that were looked at; continue with older ones.") % looked_at
    note = _("Only %s jobs were looked at; continue with older ones.") % looked_at if cursor and 0 < len(page) < PAGE else ""
    table = Table(job_columns(), [job_row(view) for view in page], {"job_id": "job"}, cursor, empty=empty, note=note)
    return {
        "title": _("Jobs"),
        "table": table,
        "wanted": wanted,
        "states": list(State.__members__),
        "spans": list(SPANS),
        "choices": True,
    }


def _all_found(
    backend: Backend, limit: int, finds_max: int, filters: dict[str, Any], cursor: str | None = None
) -> tuple[list[View], bool]:
    """Return up to `limit` jobs, and whether there are older ones that no find has looked at."""
    found: list[View] = []
    for _find in range(finds_max):
        page, cursor = backend.find(**filters, limit=min(FIND_STEP, limit - len(found)), cursor=cursor)
        found += page
        if cursor is None or len(found) == limit:
            break
    return found, cursor is not None


def _act_on_jobs(request: HttpRequest) -> HttpResponse:
    backend, chosen, action = backend_of(request), request.POST.getlist("job_id"), request.POST.get("action", "")
    if not chosen:
        raise InvalidInput(_("no job was chosen; tick some first"))
    reason = (request.POST.get("reason") or "on the screen of jobs")[:1000]
    if action == "cancel":
        states = backend.cancel(chosen, reason)
        ended = sum(state.terminal for state in states)
        done = _("Canceled: %(ended)d. Being stopped: %(others)d.") % {"ended": ended, "others": len(states) - ended}
    elif action == "rerun":
        done = _rerun(backend, chosen, reason)
    else:
        raise InvalidInput(f"action must be one of cancel, rerun, got {quoted(action)}")
    return back("job", chosen[0], done=done) if "one" in request.POST else back("jobs", done=done)


def _rerun(backend: Backend, job_ids: list[str], reason: str) -> str:
    """Run jobs again, and return what is to be said; InvalidInput if none of them can."""
    refused = backend.rerun(job_ids, reason)
    if len(refused) == len(job_ids):
        raise InvalidInput(refused[0])
    done = _("Run again: %d.") % (len(job_ids) - len(refused))
    more = [_("and %d more") % (len(refused) - REFUSED_SHOWN)] if len(refused) > REFUSED_SHOWN else []
    return " ".join([done, _("Refused: %d:") % len(refused), "; ".join([*refused[:REFUSED_SHOWN], *more])]) if refused else done


@screen("dead", change=operations.OPERATE)
def dead(request: HttpRequest) -> HttpResponse | dict[str, Any]:
    """Show jobs that failed for good, by reason; run those of a reason again."""
    backend = backend_of(request)
    found, more = _all_found(backend, DEAD_LOOKED_AT, DEAD_FINDS_MAX, {"states": sorted(DEAD)})
    groups: dict[str, list[View]] = {}
    for view in found:
        outcome = view["outcome"] or {}
        groups.setdefault(outcome.get("error_code") or view["state"], []).append(view)
    if request.method == "POST":
        chosen = [view["job_id"] for view in groups.get(request.POST.get("id", ""), [])]
        if request.POST.get("action") == "rerun_one":
            chosen = [request.POST.get("id", "")]
        if not chosen:
            raise InvalidInput(_("no dead letter has this reason any more"))
        return back("dead", done=_rerun(backend, chosen, "replayed on the screen of dead letters"))
    rows = [
        {
            "id": reason,
            "reason": reason,
            "jobs": len(views),
            "message": Counter((view["outcome"] or {}).get("message", "") for view in views).most_common(1)[0][0],
            "subjects": sorted({view["subject"] for view in views})[:5],
            "newest": moment(max(view["finished_at"] or 0.0 for view in views)),
        }
        for reason, views in sorted(groups.items(), key=lambda group: -len(group[1]))
    ]
    columns = {
        "reason": _("Reason"),
        "jobs": _("Jobs"),
        "message": _("Message"),
        "subjects": _("Subjects"),
        "newest": _("Newest"),
    }
    question = _("Run all jobs of this reason again, with fresh budgets of retries?")
    if len(found) == DEAD_LOOKED_AT:
        question += " " + _("There are more than %d dead letters: only those among the newest are run again.") % DEAD_LOOKED_AT
    button = Button("rerun", _("Run all again"), question)
    one = Button("rerun_one", _("Run again"), _("Run this job again, under its id?"))
    looked = ngettext("%d dead letter", "%d dead letters", len(found)) % len(found)
    of_job = {name: label for name, label in job_columns().items() if name != "created"} | {"message": _("Message")}
    shown = found if "format" in request.GET else found[:PAGE]
    letters = Table(of_job, [_dead_row(view) for view in shown], {"job_id": "job"}, buttons=[one])
    return {
        "title": _("Dead letters"),
        "table": Table(columns, rows, empty=_("No dead letter: every job that failed has succeeded since."), buttons=[button]),
        "letters": letters,
        "looked": looked + (_(", the newest of them") if more else ""),
    }


def _dead_row(view: View) -> View:
    return {**job_row(view), "message": (view["outcome"] or {}).get("message", "")}


@screen("job")
def job(request: HttpRequest, job_id: str) -> dict[str, Any]:
    """Show one job: its attempts, the reason of its state, its output."""
    backend = backend_of(request)
    view, explained = backend.job(job_id), backend.explain(job_id)
    times = {
        _("submitted"): view["created_at"],
        _("given to a worker"): view["assigned_at"],
        _("started"): view["started_at"],
        _("ended"): view["finished_at"],
    }
    who = view["assigned_worker_id"] or ""
    timeline = [
        {"at": moment(at), "kind": kind, "attempt": view["attempt"] or "", "who": who} for kind, at in times.items() if at
    ]
    timeline[0] |= {"attempt": "", "who": view["submitter"]}
    incidents = [
        {**one, "at": moment(one["at"]), "kind": KINDS.get(one["kind"], one["kind"]), "who": one["actor"] or one["worker_id"]}
        for one in explained["story"]
    ]
    find, ended = request.GET.get("find", ""), State(view["state"]) in TERMINAL
    result_bytes = (view["outcome"] or {}).get("result_bytes") if ended and "result" in backend.screens else 0
    logs = [shown for stream in backend.streams if (shown := _shown_log(backend, job_id, stream, find))["text"]]
    return {
        "title": _("Job %s") % job_id,
        "view": view,
        "command": job_row(view)["command"],
        "facts": _facts(view),
        "inputs": [(name, view["file_hashes"].get(name, "")) for name in view["files"][:INPUTS_SHOWN]],
        "because": reasons(explained, view, backend.start_worker),
        "timeline": sorted(timeline + incidents, key=lambda one: one["at"]),
        "logs": logs,
        "log_address": address if (address := view.get("log_ref", "")).startswith(("http://", "https://")) else "",
        "find": find,
        "ended": ended,
        "has_result": bool(result_bytes),
        "outputs": _outputs(backend, view) if result_bytes and result_bytes <= RESULT_LISTED_MAX_BYTES else [],
        "may": _may_operate(request),
    }


def _outputs(backend: Any, view: View) -> list[tuple[str, int]]:
    """Return names and sizes of files in the result of a program."""
    found: list[tuple[str, int]] = backend.result_files(view["job_id"]) if view["exec"] else []
    return found[:INPUTS_SHOWN]


def _facts(view: View) -> dict[str, Any]:
    """Return what a job's description says, without what is empty or shown elsewhere on its page."""
    known = {**view, **(view["outcome"] or {})}
    elsewhere = ("state", "outcome", "job_id", "meta", "args", "exec", "files", "file_hashes")
    shown = {name: moment(value) if name.endswith(("_at", "not_before", "not_after")) else value for name, value in known.items()}
    return {name.replace("_", " "): value for name, value in shown.items() if name not in elsewhere and value}


def _shown_log(backend: Backend, job_id: str, stream: str, find: str) -> dict[str, Any]:
    """Return the end of a stream, or its lines with a text; gaps, where output was not kept, are marked. Colours are left out."""
    if not find:
        data, cut = backend.log_tail(job_id, stream, LOG_SHOWN_BYTES)
        return {"stream": stream, "text": ESCAPE_SEQUENCE.sub("", data.decode("utf-8", "replace")), "cut": cut}
    text = ESCAPE_SEQUENCE.sub("", b"".join(backend.log_lines(job_id, stream)).decode("utf-8", "replace"))
    lines = "\n".join(line[:LINE_SHOWN_CHARS] for line in text.splitlines() if find in line)
    return {"stream": stream, "text": lines[-LOG_SHOWN_BYTES:], "cut": len(lines) > LOG_SHOWN_BYTES}


@screen("problem")
def log(request: HttpRequest, job_id: str, stream: str) -> StreamingHttpResponse:
    """Return all that is kept of a stream, as a file of text."""
    backend = backend_of(request)
    if stream not in backend.streams:
        raise NotFound(f"stream must be one of {', '.join(backend.streams)}, got {quoted(stream)}")
    name = backend.job(job_id)["job_id"]
    headers = {"Content-Disposition": f'attachment; filename="{name}.{stream}.txt"'}
    return StreamingHttpResponse(backend.log(job_id, stream), content_type="text/plain; charset=utf-8", headers=headers)


@screen("problem", needs="result")
def result(request: HttpRequest, job_id: str) -> StreamingHttpResponse:
    """Return the result of a job as a file: of a command a ZIP with its logs and output files."""
    backend: Any = backend_of(request)
    view = backend.job(job_id)
    headers = {"Content-Disposition": f'attachment; filename="{view["job_id"]}.{"zip" if view["exec"] else "bin"}"'}
    return StreamingHttpResponse(backend.result(job_id), content_type="application/octet-stream", headers=headers)


@screen("run", change=operations.OPERATE)
def run(request: HttpRequest) -> HttpResponse | dict[str, Any]:
    """Submit a job."""
    backend = backend_of(request)
    if request.method == "POST":
        try:
            words = shlex.split(request.POST.get("arguments", ""))
        except ValueError as error:
            raise InvalidInput(_("the arguments cannot be read: %s") % error) from error
        program = request.POST.get("program", "").strip()
        if not program:
            raise InvalidInput(_("no program was named; write one, as in: echo"))
        made = backend.submit(program, words, request.POST.get("subject", "").strip())
        return back("job", made, done=_("Submitted."))
    if not _may_operate(request):
        raise lacks(request, operations.OPERATE)
    return {"title": _("Run a job"), "programs": backend.programs()}


# ---------------------------------------------------------------------------------------------------- audit


_AUDIT_FILTERS = ("actor", "action", "target", "from", "until", "zone")


@screen("audit", filters=_AUDIT_FILTERS)
def audit(request: HttpRequest) -> dict[str, Any]:
    """List what people did, the newest first."""
    wanted = {name: request.GET.get(name, "").strip() for name in _AUDIT_FILTERS}
    since, until = _moment_of(request, "from"), _moment_of(request, "until")
    is_filtered = any(wanted[name] for name in wanted if name != "zone")

    def is_wanted(row: View) -> bool:
        at = row["at"].timestamp()
        named = all(wanted[name].lower() in row[name].lower() for name in ("actor", "action", "target"))
        return named and (since is None or at >= since) and (until is None or at < until)

    step = AUDIT_STEP if is_filtered or "format" in request.GET else PAGE
    entries = _audit_entries(backend_of(request), number_of(request), step)
    columns = {"at": _("Time"), "actor": _("Who"), "action": _("What"), "target": _("To"), "detail": _("Reason")}
    if "format" in request.GET:
        return {"table": Table(columns, filter(is_wanted, entries), export_max=None)}
    rows, cursor = [], None
    for looked_at, row in enumerate(entries, 1):
        if is_wanted(row):
            rows.append(row)
        if len(rows) == PAGE or looked_at == AUDIT_SCAN_MAX:
            cursor = str(row["number"])
            break
    empty = _("No such entry.") if is_filtered else _("No entry yet.")
    if cursor:
        empty = _("No match among the %s entries that were looked at; continue with older ones.") % f"{AUDIT_SCAN_MAX:,}"
    return {
        "title": _("Audit"),
        "table": Table(columns, rows, cursor=cursor, empty=empty),
        "wanted": wanted,
        "ended": is_filtered,
    }


def _audit_entries(backend: Backend, before: int | None, step: int) -> Iterator[View]:
    """Yield the entries of the audit, the newest first."""
    while page := backend.audit(before=before, limit=step):
        for row in page:
            yield {**row, "at": moment(row["at"]) if isinstance(row["at"], float) else row["at"]}
        before = page[-1]["number"]
