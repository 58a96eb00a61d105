"""The helpers for a project's own tests, by the tests of the example; and the system checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.django_site import DjangoSite
from tests.support.postgres_service import PostgresService

pytestmark = pytest.mark.e2e


def test_the_example_passes_its_own_tests_on_sqlite(tmp_path: Path) -> None:
    done = DjangoSite(tmp_path).manage("test", "shop")

    assert "Ran 8 tests" in done.stderr
    assert "OK" in done.stderr


def test_the_example_passes_its_own_tests_on_postgresql(tmp_path: Path, postgres: PostgresService) -> None:
    url = postgres.empty_database()
    done = DjangoSite(tmp_path, postgres_url=url).manage("test", "shop", "--noinput")
    postgres.drop(url)

    assert "Ran 8 tests" in done.stderr


def test_commands_that_may_not_run_or_do_not_take_their_arguments_fail_as_in_a_node(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.migrate()
    found = site.ask("""
from tasuki.core.job import JobSpec
from tasuki.django.enqueueing import enqueue_job
from tasuki.django.testing import run_enqueued
calls = ("flush --no-input", "daily_report --minimum=many", "probe fail", "probe say --settings=x")
specs = [JobSpec(job_id=f"job-{n}", subject="a.x", exec="django", args=tuple(calls[n].split()), max_retries=1) for n in range(4)]
for spec in specs:
    enqueue_job(spec)
print(json.dumps({job.job_id: [str(job.state), job.outcome.error_code, job.outcome.exit_code] for job in run_enqueued()}))
""")

    assert found == {
        "job-0": ["FAILED", "COMMAND_NOT_ALLOWED", None],
        "job-1": ["FAILED", "EXIT_CODE", 2],
        "job-2": ["PENDING", "EXIT_CODE", 7],
        "job-3": ["FAILED", "EXIT_CODE", 2],
    }


CHECKS = """
import pathlib
import threading
from django.conf import settings
from django.core.checks import run_checks
from django.db import connections

def found(**changed):
    before = {name: getattr(settings, name, None) for name in changed}
    for name, value in changed.items():
        setattr(settings, name, value)
    try:
        return [one.id for one in run_checks() if one.id.startswith("tasuki.")]
    finally:
        for name, value in before.items():
            setattr(settings, name, value if value is not None else {})

def message(**tasuki):
    settings.TASUKI = tasuki
    try:
        return [f"{one.msg}" for one in run_checks() if one.id == "tasuki.E001"][0]
    finally:
        settings.TASUKI = {}
"""


def test_system_checks_name_what_will_not_work(tmp_path: Path) -> None:
    found = DjangoSite(tmp_path).ask(
        CHECKS
        + """
fine = found()
no_debug, no_zones = found(DEBUG=False), found(USE_TZ=False)
options = connections["default"].settings_dict["OPTIONS"]
mode = options.pop("transaction_mode")
deferred = found()
options["transaction_mode"] = mode
project = [found(TASUKI={"blobs": "results"}), found(TASUKI={"commands": ["reindex"]})]
(folder := pathlib.Path("tls")).mkdir()
files = {f"tls_{name}": str(folder / name) for name in ("cert", "key", "ca")}
grpc = [found(TASUKI={"grpc": one}) for one in ({"advertise": "n1:50051"}, {"authentication": "mtls"}, files)]
for name in ("cert", "ca"):
    (folder / name).touch()
(folder / "key").mkdir()
settings.TASUKI = {"grpc": files}
grpc.append([one.msg for one in run_checks() if one.id == "tasuki.W011"])
settings.TASUKI = {}
(folder / "key").rmdir()
(folder / "key").touch()
grpc.append(found(TASUKI={"grpc": files}))
sys.modules["grpc"] = None
grpc += [found(), found(TASUKI={"grpc": files})]
messages = [message(databse="default"), message(database="other"), message(commands="migrate")]
thread = threading.Thread(target=time.sleep, args=[60.0], daemon=True)
thread.start()
threads = found()
print(json.dumps([fine, no_debug, no_zones, deferred, [*project, threads], grpc, messages]))
"""
    )
    fine, no_debug, no_zones, deferred, of_project, grpc, messages = found

    assert (fine, no_debug, no_zones, deferred) == ([], ["tasuki.W002"], ["tasuki.W003"], ["tasuki.W001"])
    assert of_project == [["tasuki.W005"], ["tasuki.W006"], ["tasuki.W007"]]
    *ids, unreadable, readable, without_grpc, without_grpcio = grpc
    assert ids == [[], ["tasuki.W011"], ["tasuki.W011"]]
    assert unreadable == [
        'TASUKI["grpc"] names TLS files that cannot be read here: tls_key tls/key: Is a directory.',
    ]
    assert (readable, without_grpc, without_grpcio) == ([], [], ["tasuki.W010"])
    assert "unknown field `databse`; its keys are database, worker_database" in messages[0]
    assert "the database 'other', which is not in DATABASES (default)" in messages[1]
    assert "Expected `array`, got `str`" in messages[2]


def test_the_database_check_names_missing_tables_and_definitions_that_cannot_be_run(tmp_path: Path) -> None:
    found = DjangoSite(tmp_path).ask(
        CHECKS
        + """
from django.core.management import call_command
from tasuki.django.models import JobDefinition

def of_database():
    return [(one.id, one.msg) for one in run_checks(databases=["default"]) if one.id.startswith("tasuki.")]

missing = of_database()
call_command("migrate", verbosity=0)
fine = of_database()
common = {"schedule_type": "daily_at", "schedule_value": "02:30"}
refused = []
for name in ("reindex", "flush", "daily_report"):
    try:
        JobDefinition(name="x", command_name=name, **common).full_clean()
    except Exception as error:
        refused.append(error.message_dict)
JobDefinition.objects.create(name="gone", command_name="reindex", **common)
JobDefinition.objects.create(name="off", command_name="reindex", enabled=False, **common)
JobDefinition.objects.create(name="good", command_name="daily_report", **common)
JobDefinition.objects.create(name="wrong", command_name="daily_report", schedule_type="cron", schedule_value="x")
print(json.dumps([missing, fine, of_database(), refused]))
"""
    )
    [[id_, text]], fine, definitions, refused = found

    assert [list(one) for one in refused] == [["command_name"]] * 2
    assert "'reindex' is not a management command of this project" in refused[0]["command_name"][0]
    assert "'flush' may not be run by jobs" in refused[1]["command_name"][0]
    assert (id_, fine) == ("tasuki.W008", [])
    assert "run: python manage.py migrate" in text
    assert [(id_, text.split(":")[0]) for id_, text in definitions] == [
        ("tasuki.W009", "definition 'gone'"),
        ("tasuki.W009", "definition 'wrong'"),
    ]


def test_a_pooler_without_a_direct_address_is_told(tmp_path: Path, postgres: PostgresService) -> None:
    site = DjangoSite(tmp_path, postgres_url=postgres.url("postgres"))
    found = site.ask(
        CHECKS
        + """
pooled = connections["default"].settings_dict
pooled["DISABLE_SERVER_SIDE_CURSORS"] = True
print(json.dumps(found()))
"""
    )

    assert found == ["tasuki.W004"]


def test_postgresql_without_psycopg_3_is_an_error(tmp_path: Path, postgres: PostgresService) -> None:
    site = DjangoSite(tmp_path, postgres_url=postgres.url("postgres"))
    found = site.ask(
        CHECKS
        + """
from django.db.backends.postgresql import psycopg_any
psycopg_any.is_psycopg3 = False
print(json.dumps(found()))
"""
    )

    assert found == ["tasuki.E002"]


def test_a_second_worker_on_the_same_sqlite_file_is_refused(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path, SITE_TASUKI=json.dumps({}))
    site.migrate()
    with site.worker():
        refused = site.manage("tasuki_worker", check=False)

    assert refused.returncode == 1
    assert "is in use by another process" in refused.stderr
