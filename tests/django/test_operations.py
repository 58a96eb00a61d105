"""Management commands for people: list, show, explain, logs, cancel, rerun, prune, doctor. On SQLite and PostgreSQL."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.django_site import DjangoSite

pytestmark = pytest.mark.e2e

IMPORTS = """
import io
from django.core.management import CommandError, call_command
from tasuki.django import enqueue_command
from tasuki.django.models import Event, JobRun, LogChunk

def said(*arguments):
    out = io.StringIO()
    try:
        call_command(*arguments, stdout=out)
    except CommandError as error:
        return f"{out.getvalue()}CommandError: {error}"
    return out.getvalue()

def data(*arguments):
    return json.loads(said(*arguments, "--json"))
"""


def test_waiting_jobs_are_listed_explained_and_canceled(site: DjangoSite) -> None:
    site.migrate()
    found = site.ask(
        IMPORTS
        + """
waiting = enqueue_command("daily_report", queue="night")
task = add.enqueue(1).id
listed = said("tasuki_runs", "list")
of_queue = [one["job_id"] for one in data("tasuki_runs", "list", "--queue", "night", "--state", "PENDING")]
why = said("tasuki_runs", "explain", waiting)
canceled = data("tasuki_runs", "cancel", waiting, "--reason", "not today")
shown = data("tasuki_runs", "show", waiting)
again = said("tasuki_runs", "rerun", task)
rerun = said("tasuki_runs", "rerun", waiting)
refused = [said("tasuki_runs", "show", "nobody"), said("tasuki_runs", "list", "--state", "GONE")]
JobRun.objects.update(created_at=time.time() - 3600)
late = said("tasuki_doctor")
JobRun.objects.update(not_before=time.time() - 1)
event = Event.objects.create(event_type="order.paid", processed_at=time.time(), problem="definition mail: it is wrong")
doctor = said("tasuki_doctor")
problems = [[one["id"] for one in data("tasuki_events", "list", "--problems")], said("tasuki_events", "retry", str(event.pk))]
problems += [said("tasuki_events", "retry", str(event.pk)), Event.objects.get().processed_at, event.pk]
print(json.dumps([waiting, task, listed, of_queue, why, canceled, shown, again, rerun, refused, late, doctor, problems]))
"""
    )
    waiting, task, listed, of_queue, why, canceled, shown, again, rerun, refused, late, doctor, problems = found

    assert waiting in listed
    assert "default.task.probes.tasks.add" in listed
    assert of_queue == [waiting]
    assert "No worker is connected. Start one with: python manage.py tasuki_worker" in why
    assert canceled == {"job_id": waiting, "state": "CANCELED"}
    assert shown["outcome"]["message"] == "not today"
    assert f"job {task!r} is PENDING, not ended" in again
    assert rerun == f"{waiting}: PENDING\n"
    assert "there is no job 'nobody' in this project" in refused[0]
    assert "state must be one of PENDING" in refused[1]
    assert "BAD  workers: none runs; start one with: python manage.py tasuki_worker" in doctor
    assert "commands for jobs: daily_report, probe" in doctor
    assert "ok   tasks: of the entries default" in doctor
    assert re.search(r"waits for 36\d\d s", late)
    assert "oldest job" not in doctor  # a delayed job waits since its time
    *problems, number = problems
    assert f"BAD  events: 1 with a definition that could not be run; the latest is {number}: definition mail: it is" in doctor
    assert problems[:2] == [[number], f"event {number} will be processed again\n"]
    assert f"CommandError: events without a problem: {number}" in problems[2]
    assert problems[3] is None


def test_the_log_of_a_worker_is_json_for_programs(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.migrate()
    with site.worker("--json") as worker:
        result = site.ask("print(json.dumps(finished(fail.enqueue('broken')).status))")
        assert worker.stop(20.0) == 0
        lines = [json.loads(line) for line in worker.output().splitlines()]

    assert result == "FAILED"
    assert {"at", "level", "logger", "message"} <= set.intersection(*map(set, lines))
    told = [one["message"] for one in lines]
    assert any(message.startswith("connected to ") for message in told)
    assert any("(default.task.probes.tasks.fail) failed" in message for message in told)


def test_running_jobs_are_followed_and_stopped_and_old_ones_pruned(site: DjangoSite, tmp_path: Path) -> None:
    site.migrate()
    with site.worker() as worker:
        found = site.ask(
            IMPORTS
            + f"""
import re
from pathlib import Path
folder = Path({str(tmp_path)!r})
job_id = enqueue_command("probe", "hold", str(folder))
until = time.monotonic() + 20
while not (folder / "running").exists():
    assert time.monotonic() < until
    time.sleep(0.01)
why, doctor = said("tasuki_runs", "explain", job_id), said("tasuki_doctor")
canceled = data("tasuki_runs", "cancel", job_id)
followed = said("tasuki_runs", "logs", job_id, "--follow")
failed = finished(fail.enqueue("broken"))
traceback = said("tasuki_runs", "logs", failed.id)
state = data("tasuki_runs", "show", job_id)["state"]
kept = data("tasuki_prune")
pruned = data("tasuki_prune", "--days", "0", "--logs-days", "0")
left = [JobRun.objects.count(), LogChunk.objects.count()]
print(json.dumps([why, doctor, canceled, followed, traceback, state, kept, pruned, left]))
"""
        )
    why, doctor, canceled, followed, traceback, state, kept, pruned, left = found

    assert "which is connected." in why
    assert "(default.probe) started, attempt 1" in worker.output()
    assert "(default.probe) failed in " in worker.output()
    assert "ok   workers: " in doctor
    assert "BAD" not in doctor
    assert canceled["state"] in ("RUNNING", "ASSIGNED")
    assert followed == "begun\n"
    assert traceback.endswith("LookupError: broken\n")
    assert state == "CANCELED"
    assert kept == {"runs": 0, "events": 0, "archived_logs": 0}
    assert pruned["runs"] == 2
    assert left == [0, 0]
