"""The models are the schema: migrations are complete, the columns of users are there, and Django is set up without a project."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, timedelta
from pathlib import Path

import pytest

from tasuki.django import standalone

standalone.configure()

from django.core.exceptions import FieldError  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.db import connections, models  # noqa: E402
from django.utils import timezone  # noqa: E402

from tasuki.core.statistics import COUNTED, GroupCounts  # noqa: E402
from tasuki.django.models import Counter, JobRun, Token  # noqa: E402
from tasuki.errors import ConfigError  # noqa: E402

CONTRACT_NAMES = {
    "scheduled_for", "assigned_at", "assigned_worker_id", "state", "attempt", "leader_epoch", "started_at", "finished_at",
    "exit_code", "error_summary", "log_ref", "idempotency_key", "version", "continuation_state",
    "continuation_check_started_at", "continuation_check_deadline_at", "job_definition_id",
}  # fmt: skip


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)


def test_migrations_are_complete() -> None:
    call_command("makemigrations", "tasuki", check=True, dry_run=True, verbosity=0)


def test_the_row_has_the_names_of_c5() -> None:
    assert {field.attname for field in JobRun._meta.concrete_fields} >= CONTRACT_NAMES


def test_counters_have_a_name_for_every_state() -> None:
    assert set(COUNTED.values()) == set(GroupCounts.__struct_fields__)
    assert max(map(len, COUNTED.values())) <= Counter._meta.get_field("state").max_length


def test_migrating_twice_changes_nothing(tmp_path: Path) -> None:
    alias = standalone.register(tmp_path / "one.sqlite3")
    try:
        first, second = standalone.migrate(alias), standalone.migrate(alias)
        tables = set(connections[alias].introspection.table_names())
    finally:
        connections[alias].close()
        standalone.forget(alias)

    assert first[:1] == ["0001_initial"]
    assert second == []
    assert {JobRun._meta.db_table, Token._meta.db_table} <= tables


def test_row_ids_are_the_plain_rowid_on_sqlite(tmp_path: Path) -> None:
    alias = standalone.register(tmp_path / "one.sqlite3")
    try:
        standalone.migrate(alias)
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT name FROM sqlite_master WHERE sql LIKE '%AUTOINCREMENT%' ORDER BY name")
            # Runs are named after these two, whose ids must not come again.
            assert cursor.fetchall() == [("tasuki_event",), ("tasuki_jobdefinition",)]
    finally:
        connections[alias].close()
        standalone.forget(alias)


def test_the_orm_reads_what_the_hot_statements_wrote(tmp_path: Path) -> None:
    from tasuki.core.job import JobSpec, body_hash
    from tasuki.core.store_messages import LeaseRequest, Submission
    from tasuki.stores.sql.store import SqlStore

    alias = standalone.register(tmp_path / "one.sqlite3")
    try:
        standalone.migrate(alias)
        store = SqlStore.in_django(alias)
        spec = JobSpec(job_id="a", subject="job.assign.eu.x", exec="render", priority=7)
        store.submit([Submission(spec, "alice", body_hash(spec))])
        store.lease([LeaseRequest(worker_id="w1", incarnation="w1/1", patterns=(">",))])

        row = JobRun.objects.using(alias).get(idempotency_key="a")

        assert (row.job_id, row.state, row.group, row.exec, row.priority, row.attempt) == ("a", "ASSIGNED", "eu", "render", 7, 1)
        assert (row.assigned_worker_id, row.continuation_state, row.finished_at) == ("w1", "NONE", None)
        assert (row.created_at.tzinfo, abs(timezone.now() - row.created_at) < timedelta(minutes=1)) == (UTC, True)
        older = JobRun.objects.using(alias).filter(created_at__lt=timezone.now() - timedelta(minutes=1))
        assert (older.exists(), JobRun.objects.using(alias).filter(created_at__gt=0.0).exists()) == (False, True)
        assert JobRun.objects.using(alias).aggregate(models.Max("created_at")) == {"created_at__max": row.created_at}
        with pytest.raises(FieldError, match="Unsupported lookup 'year'"):
            older.filter(created_at__year=2026)
    finally:
        connections[alias].close()
        standalone.forget(alias)


def test_a_project_keeps_its_own_settings(tmp_path: Path) -> None:
    script = """
import json, pathlib, sys
from django.conf import settings
settings.configure(INSTALLED_APPS=["django.contrib.contenttypes", "tasuki.django"], SECRET_KEY="project")
from tasuki.django import standalone
standalone.configure(pathlib.Path(sys.argv[1]))
from django.apps import apps
print(json.dumps([settings.SECRET_KEY, sorted(app.label for app in apps.get_app_configs()), settings.DATABASES]))
"""
    told = run(script, str(tmp_path / "x.sqlite3"))

    assert told.returncode == 0, told.stderr
    key, labels, databases = json.loads(told.stdout)
    assert (key, labels) == ("project", ["contenttypes", "tasuki"])
    assert "x.sqlite3" not in str(databases)


def test_a_project_without_our_app_is_told_what_to_add() -> None:
    script = """
from django.conf import settings
settings.configure(INSTALLED_APPS=[])
from tasuki.django import standalone
from tasuki.errors import ConfigError
try:
    standalone.configure()
except ConfigError as error:
    print(error)
"""
    assert 'add "tasuki.django" to INSTALLED_APPS' in run(script).stdout
    assert ConfigError.code == "CONFIG"


@pytest.mark.parametrize("module", ["tasuki.stores.sql.store", "tasuki.stores.store", "tasuki.stores.memory.store"])
def test_importing_a_store_does_not_import_django(module: str) -> None:
    script = "import importlib, sys; importlib.import_module(sys.argv[1]); print('django' in sys.modules)"

    assert run(script, module).stdout == "False\n"
