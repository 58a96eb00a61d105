"""Management commands as jobs: run in forks of a warm interpreter, with their log in the database. Real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.django_site import PROJECT, DjangoSite
from tests.support.processes import ChildProcess
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

IMPORTS = """
from tasuki.django import enqueue_command
from tasuki.django.logs import read_log
from tasuki.django.models import JobRun
from tasuki.errors import TasukiError

def ended(job_id, timeout=20.0):
    until = time.monotonic() + timeout
    while True:
        row = JobRun.objects.get(idempotency_key=job_id)
        if row.finished_at is not None:
            return row
        assert time.monotonic() < until, f"{row} did not end"
        time.sleep(0.01)

def log(job_id, stream="stdout"):
    return b"".join(part.data for part in read_log(job_id, stream)).decode()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> DjangoSite:
    site = DjangoSite(tmp_path_factory.mktemp("site"), SITE_TASUKI=json.dumps({"commands": ["showmigrations"]}))
    site.migrate()
    return site


@pytest.fixture(scope="module")
def worker(site: DjangoSite) -> Iterator[ChildProcess]:
    with site.worker() as worker:
        worker.wait_for_output("is warm")
        yield worker


def test_a_command_runs_as_by_manage_py_and_its_output_is_in_the_database(site: DjangoSite, worker: ChildProcess) -> None:
    state, code, out, shown = site.ask(
        IMPORTS
        + """
Order.objects.create(customer="Sato", total=300)
with transaction.atomic():
    job_id = enqueue_command("daily_report", "--minimum=100", job_id="report-1")
row = ended(job_id)
other = enqueue_command("showmigrations", "tasuki")
ended(other)
print(json.dumps([row.state, row.exit_code, log(job_id), log(other)]))
"""
    )

    assert (state, code, out) == ("SUCCEEDED", 0, "1 orders, 300 yen (report-1, attempt 1)\n")
    assert "[X] 0001_initial" in shown


def test_commands_are_forked_from_one_warm_interpreter_and_failures_say_why(site: DjangoSite, worker: ChildProcess) -> None:
    one, two, errors, failed, code, summary = site.ask(
        IMPORTS
        + """
one, two = enqueue_command("probe", "say"), enqueue_command("probe", "say")
ended(one), ended(two)
failed = ended(enqueue_command("probe", "fail", max_retries=0))
texts = [log(one), log(two), log(one, "stderr"), log(failed.idempotency_key, "stderr"), failed.exit_code, failed.error_summary]
print(json.dumps(texts))
"""
    )

    found = [re.search(r"pid (\d+) parent (\d+) fresh (\w+)", text) for text in (one, two)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0][1] != found[1][1]  # a process each
    assert found[0][2] == found[1][2]  # the keeper is their parent
    assert found[0][3] == "False"
    assert errors == "to stderr\n"
    assert "as wanted" in failed
    assert code == 7
    assert "code 7" in summary


def test_the_first_node_writes_the_window_of_the_settings(site: DjangoSite, worker: ChildProcess) -> None:
    code = "from tasuki.django.models import SchedulerSettings\n"
    code += "print(json.dumps(list(SchedulerSettings.objects.values_list('skip_late_runs_after_seconds', flat=True))))"

    assert site.ask(code) == [240.0]


REFUSED = {
    'enqueue_command("nothing")': "command 'nothing' is not a management command of this project",
    'enqueue_command("flush")': "command 'flush' may not be run by jobs",
    'enqueue_command("migrate")': "command 'migrate' may not be run by jobs",
    'enqueue_command("tasuki_worker")': "command 'tasuki_worker' may not be run by jobs",
    'enqueue_command("daily_report", "--minimum=many")': "arguments of command 'daily_report': Error: argument --minimum",
    'enqueue_command("probe", "say", "--pythonp=/tmp")': "'probe': --pythonpath=/tmp is not for jobs",
    'enqueue_command("probe", "--help")': "arguments of command 'probe': with --help or --version it does not run",
    'enqueue_command("daily_report", queue="a b")': "queue 'a b' must be 1 to 64 characters",
    'enqueue_command("daily_report", priority=11)': "priority must be 0 to 9, got 11",
    'enqueue_command("daily_report", job_id="d7-1767225600")': "job_id 'd7-1767225600' has the form of",
    'enqueue_command("probe", "x" * 140000)': "an argument has 140000 characters",
    "enqueue_command(None)": "command must be str, got NoneType",
    'enqueue_command("probe", "say", queue=["a"])': "queue must be str, got list",
    'enqueue_command("probe", "say", job_id=3)': "job_id must be str, got int",
    'enqueue_command("probe", "say", job_id="")': "job_id '' must be 1 to 128 characters",
    'enqueue_command("probe", "say", None)': "argument 2 of command 'probe' must be a text or a number, got NoneType",
    'enqueue_command("probe", ["say"])': "argument 1 of command 'probe' must be a text or a number, got list",
    'enqueue_command("probe", "say", "a\\0")': "argument 2 of command 'probe' has a NUL character",
    'enqueue_command("probe", "say", "\\ud800")': "argument 2 of command 'probe' has a lone surrogate",
    'enqueue_command("probe", "say", priority="high")': "priority must be int, got str",
    'enqueue_command("probe", "say", priority=5.0)': "priority must be int, got float",
    'enqueue_command("probe", "say", priority=True)': "priority must be int, got bool",
    'enqueue_command("probe", "say", max_retries=None)': "max_retries must be int, got NoneType",
    'enqueue_command("probe", "say", timeout_s=timedelta(1))': "timeout_s must be float | None",
    'enqueue_command("probe", "say", backoff_s=Decimal(1))': "backoff_s must be float | None, got Decimal",
    'enqueue_command("probe", "say", not_before=datetime(2030, 1, 1))': "not_before 2030-01-01 00:00:00 has no time zone",
    'enqueue_command("probe", "say", not_before="2030-01-01")': "not_before must be an aware datetime, got str",
    'enqueue_command("probe", "say", not_before=datetime(1960, 1, 1, tzinfo=UTC))': "must be a time from 1970 to 5138",
}


def test_what_cannot_run_is_refused_before_anything_is_written(site: DjangoSite) -> None:
    refused, kept = site.ask(
        IMPORTS
        + f"""
from datetime import UTC, datetime, timedelta
from decimal import Decimal

refused, before = [], JobRun.objects.count()
for text in {list(REFUSED)}:
    try:
        eval(text)
        refused.append("taken")
    except TasukiError as error:
        refused.append(error.message)
print(json.dumps([refused, JobRun.objects.count() - before]))
"""
    )

    for call, message, found in zip(REFUSED, REFUSED.values(), refused, strict=True):
        assert message in found, call
    assert kept == 0


def test_a_parser_is_built_once_and_anew_before_arguments_are_refused(site: DjangoSite) -> None:
    built = site.ask(
        IMPORTS
        + """
from django.core.management.base import BaseCommand
built, create_parser = [], BaseCommand.create_parser
def counted(self, *names, **options):
    built.append(names[1])
    return create_parser(self, *names, **options)
BaseCommand.create_parser = counted
with transaction.atomic():
    for minimum in ("1", "2", "many", "3"):
        try:
            enqueue_command("daily_report", f"--minimum={minimum}")
        except TasukiError:
            pass
    transaction.set_rollback(True)
print(json.dumps(built))
"""
    )

    assert built == ["daily_report"] * 2


def test_a_row_that_names_another_command_or_settings_is_refused_by_the_node(site: DjangoSite, worker: ChildProcess) -> None:
    found = site.ask(
        IMPORTS
        + """
from tasuki.core.job import JobSpec
from tasuki.django.enqueueing import enqueue_job
enqueue_job(JobSpec(job_id="planted", subject="default.flush", exec="django", args=("flush", "--no-input")))
enqueue_job(JobSpec(job_id="settings", subject="default.probe", exec="django", args=("probe", "say", "--settings=other")))
rows = [ended("planted"), ended("settings")]
print(json.dumps([[[row.state, row.error_code, row.exit_code, row.attempt] for row in rows], log("settings", "stderr")]))
"""
    )

    (command, settings), errors = found
    assert command == ["FAILED", "COMMAND_NOT_ALLOWED", None, 1]
    assert settings == ["FAILED", "EXIT_CODE", 2, 1]
    assert errors == "arguments of command 'probe': --settings=other is not for jobs; the worker's own holds\n"


def test_a_command_is_enqueued_from_async_code_and_waits_for_its_time(site: DjangoSite, worker: ChildProcess) -> None:
    said, waited, starts = site.ask(
        IMPORTS
        + """
import asyncio
from datetime import timedelta
from django.utils import timezone
from tasuki.django import aenqueue_command

at = timezone.now() + timedelta(seconds=2)
later = enqueue_command("probe", "say", not_before=at)
job_id = asyncio.run(aenqueue_command("probe", "say"))
ended(job_id)
waited = [JobRun.objects.get(idempotency_key=later).state, timezone.now() < at]
starts = [row.started_at is not None and row.started_at >= at for row in (ended(later),)]
print(json.dumps([log(job_id), waited, starts]))
"""
    )

    assert said.startswith("first pid ")
    assert waited[0] == "PENDING" or not waited[1]
    assert starts == [True]


def test_a_run_by_time_is_told_its_definition_and_nominal_time(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path, SITE_SECONDS="1")
    site.migrate()
    with site.worker() as worker:
        worker.wait_for_output("is warm")
        times, said = site.ask(
            IMPORTS
            + """
from tasuki.django.definitions import apply
each_second = {"schedule_type": "every_n_minutes", "schedule_value": "1", "concurrency_policy": "allow"}
apply({"each second": {"command_name": "probe", "default_args_json": ["schedule"], **each_second}}, source="test")
until = time.monotonic() + 20
while len(rows := JobRun.objects.filter(state="SUCCEEDED").order_by("scheduled_for")) < 2:
    assert time.monotonic() < until
    time.sleep(0.05)
print(json.dumps([[row.scheduled_for.timestamp() for row in rows], [log(row.idempotency_key) for row in rows]]))
"""
        )

    assert len(times) >= 2
    assert all(at == int(at) for at in times)
    assert said == [f"each second {datetime.fromtimestamp(at, UTC).isoformat()}\n" for at in times]


def test_a_log_that_cannot_be_stored_is_warned_of_once_and_changes_no_outcome(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.migrate()
    with site.worker() as worker:
        worker.wait_for_output("is warm")
        ends = site.ask(
            IMPORTS
            + """
with connection.cursor() as cursor:
    cursor.execute("ALTER TABLE tasuki_logchunk RENAME TO elsewhere")
rows = [ended(enqueue_command("probe", "say")) for _ in range(2)] + [ended(enqueue_command("probe", "fail", max_retries=0))]
print(json.dumps([[row.state, row.exit_code, row.attempt] for row in rows]))
"""
        )
        warned = [line for line in worker.output().splitlines() if "logs cannot be stored" in line]

    assert ends == [["SUCCEEDED", 0, 1], ["SUCCEEDED", 0, 1], ["FAILED", 7, 1]]
    assert len(warned) == 1
    assert "tasuki_logchunk" in warned[0]


def test_the_log_can_be_read_while_the_command_runs_and_is_cut_in_the_middle(
    site: DjangoSite, worker: ChildProcess, tmp_path: Path
) -> None:
    early, late, size, first, last = site.ask(
        IMPORTS
        + f"""
from pathlib import Path
folder = Path({str(tmp_path)!r})
job_id = enqueue_command("probe", "hold", str(folder))
until = time.monotonic() + 20
while not (early := [log(job_id), JobRun.objects.get(idempotency_key=job_id).state])[0] or early[1] == "ASSIGNED":
    assert time.monotonic() < until  # its log and its start are recorded one by one
    time.sleep(0.05)
(folder / "go").touch()
ended(job_id)
flood = enqueue_command("probe", "flood")
ended(flood)
text = log(flood)
print(json.dumps([early, log(job_id), len(text), text[:6], text[-8007:][:5]]))
"""
    )

    assert early == ["begun\n", "RUNNING"]
    assert late == "begun\nended\n"
    assert size == 1024 * 1024 + 64 * 1024
    assert (first, last) == ("00000 ", "00299")


def test_a_time_limit_ends_the_whole_tree_also_if_it_ignores_sigterm(
    site: DjangoSite, worker: ChildProcess, tmp_path: Path
) -> None:
    state = site.ask(
        IMPORTS
        + f"""
row = ended(enqueue_command("probe", "stubborn", {str(tmp_path)!r}, timeout_s=1.0, max_retries=0), 40.0)
print(json.dumps(row.state))
"""
    )

    assert state == "TIMED_OUT"
    pids = (tmp_path / "pids").read_text().split()
    assert not [pid for pid in pids if Path("/proc", pid).exists()]


def test_source_that_changed_is_noticed_without_a_restart_and_commands_are_warm_again(tmp_path: Path) -> None:
    copy = tmp_path / "project"
    shutil.copytree(PROJECT, copy)
    (copy / "probes" / "management" / "commands" / "broken.py").write_text("1 / 0\n")  # keeps no other command from running
    site = DjangoSite(tmp_path)
    site.env["PYTHONPATH"] = site.env["PYTHONPATH"].replace(os.fspath(PROJECT), os.fspath(copy))
    site.migrate()
    say = IMPORTS + 'job_id = enqueue_command("probe", "say")\nended(job_id)\nprint(json.dumps(log(job_id)))'
    with site.worker() as worker:
        worker.wait_for_output("is warm")
        before = site.ask(say)
        (copy / "probes" / "words.py").write_text('WORD = "second"\n')
        after = site.ask(say)
        later: list[str] = []
        until(lambda: later.append(site.ask(say)) or later[-1].endswith("fresh False\n"), 60.0, "the new interpreter is warm")
        warm = [line for line in worker.output().splitlines() if "is warm" in line]

    assert before.startswith("first ")
    assert after.endswith("fresh True\n")
    assert all(said.startswith("second ") for said in (after, *later))
    assert len(warm) == 2


NEW_COMMAND = """
from django.core.management.base import BaseCommand


class Command(BaseCommand):
    def handle(self, *arguments, **options):
        self.stdout.write("new")
"""


def test_a_command_that_was_added_is_found_without_a_restart(tmp_path: Path) -> None:
    copy = tmp_path / "project"
    shutil.copytree(PROJECT, copy)
    site = DjangoSite(tmp_path)
    site.env["PYTHONPATH"] = site.env["PYTHONPATH"].replace(os.fspath(PROJECT), os.fspath(copy))
    site.manage("migrate", "-v0")
    with site.worker() as worker:
        worker.wait_for_output("is warm")
        (copy / "probes" / "management" / "commands" / "added.py").write_text(NEW_COMMAND)
        said = site.ask(IMPORTS + 'job_id = enqueue_command("added")\nended(job_id)\nprint(json.dumps(log(job_id)))')

    assert said == "new\n"


def test_a_project_that_starts_threads_at_its_import_runs_commands_cold(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path, SITE_THREADS="1")
    site.migrate()
    with site.worker() as worker:
        worker.wait_for_output("each job starts an interpreter of its own")
        said = site.ask(IMPORTS + 'job_id = enqueue_command("probe", "say")\nended(job_id)\nprint(json.dumps(log(job_id)))')

    assert said.startswith("first ")


def test_a_drained_node_leaves_nothing_behind(site: DjangoSite, tmp_path: Path) -> None:
    other = DjangoSite(tmp_path)
    other.migrate()
    with other.worker() as worker:
        worker.wait_for_output("is warm")
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        assert worker.stop(20.0) == 0

    assert children
    until(lambda: not [pid for pid in children if Path("/proc", pid).exists()], 30.0, "its processes are gone")
