"""A project with tasuki in INSTALLED_APPS: tasks commit with the caller's rows, and a node runs them. Real processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.django_site import DjangoSite
from tests.support.postgres_service import PostgresService
from tests.support.waiting import until

pytestmark = pytest.mark.e2e


@pytest.fixture
def migrated(site: DjangoSite) -> DjangoSite:
    site.migrate()
    return site


def test_tasks_of_a_transaction_run_once_it_is_committed_and_their_results_can_be_read(migrated: DjangoSite) -> None:
    with migrated.worker():
        found = migrated.ask("""
with transaction.atomic():
    order = Order.objects.create(customer="Sato", total=300)
    invoice = send_invoice.enqueue(order.pk)
greeting = greet.enqueue("Sato")
try:
    with transaction.atomic():
        lost = add.enqueue(1, b=2)
        raise ZeroDivisionError
except ZeroDivisionError:
    pass
kept = add.enqueue(3, b=4)
for result in (invoice, greeting, kept):
    finished(result)
try:
    add.get_result(lost.id)
except Exception as error:
    gone = type(error).__name__
print(json.dumps([invoice.return_value, greeting.return_value, kept.return_value, gone, Invoice.objects.get().text]))
""")

    assert found == [
        {"invoice": 1, "text": "Sato: 300 yen"}, "Sato, attempt 1", 7, "TaskResultDoesNotExist", "Sato: 300 yen",
    ]  # fmt: skip


def test_many_tasks_and_commands_are_inserted_together_or_not_at_all(migrated: DjangoSite) -> None:
    found = migrated.ask("""
from functools import partial
from tasuki.django import enqueue_command, enqueue_many
from tasuki.django.models import JobRun
from tasuki.errors import Conflict
from probes.tasks import signals

told = []
is_stored = lambda task_result, **_: told.append(JobRun.objects.filter(idempotency_key=task_result.id).exists())
signals.task_enqueued.connect(is_stored)
statements = []
store = __import__("tasuki.stores.sql.store", fromlist=["SqlStore"]).SqlStore
insert = store.enqueue
store.enqueue = lambda self, submissions: statements.append(len(submissions)) or insert(self, submissions)

calls = [partial(add.enqueue, number) for number in range(50)]
results = enqueue_many([*calls, partial(enqueue_command, "probe", "say", job_id="known")])
rows = {row.idempotency_key: row for row in JobRun.objects.all()}
in_order = [results[number].args for number in range(50)] == [[number] for number in range(50)]
stored = {result.id for result in results[:50]} | {"known"} == rows.keys()

failed = []
for last in (partial(enqueue_command, "probe", "fail", job_id="known"), partial(enqueue_command, "none")):
    try:
        enqueue_many([*calls, last])
    except Exception as error:
        failed.append(type(error).__name__)
add.enqueue(1)
print(json.dumps([statements, in_order, stored, all(told), len(told), failed, JobRun.objects.count(), enqueue_many([])]))
""")

    assert found == [[51, 51, 1], True, True, True, 51, ["Conflict", "InvalidInput"], 52, []]


def test_a_worker_without_tables_says_what_to_run(site: DjangoSite) -> None:
    refused = site.manage("tasuki_worker", check=False)

    assert refused.returncode == 1
    assert "python manage.py migrate" in refused.stderr


def test_sigterm_lets_running_tasks_finish(migrated: DjangoSite, tmp_path: Path) -> None:
    with migrated.worker() as worker:
        job_id = migrated.run(f"print(hold.enqueue({str(tmp_path)!r}).id)").strip()
        until((tmp_path / "running").exists, 20.0, "the task runs")
        worker.signal(signal.SIGTERM)
        worker.wait_for_output("draining")
        (tmp_path / "go").touch()
        assert worker.wait(20.0) == 0

    assert migrated.ask(f"print(json.dumps(hold.get_result({job_id!r}).return_value))") == "done"


def test_several_worker_processes_share_one_sqlite_file_and_end_with_the_first(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.migrate()

    def hold_two(name: str) -> tuple[list[Path], list[str]]:
        """Return the folders and ids of two tasks that run at the same time: each worker process has one slot."""
        folders = [tmp_path / f"{name}{number}" for number in range(2)]
        for folder in folders:
            folder.mkdir()
        ids = site.ask(f"print(json.dumps([hold.enqueue(folder).id for folder in {list(map(str, folders))}]))")
        until(lambda: all((folder / "running").exists() for folder in folders), 30.0, "both tasks run")
        return folders, ids

    with site.worker("--workers", "2", "--slots", "1") as worker:
        folders, ids = hold_two("a")
        worker.signal(signal.SIGTERM)
        worker.wait_for_output("draining")
        for folder in folders:
            (folder / "go").touch()
        assert worker.wait(30.0) == 0
    results = site.ask(f"print(json.dumps([[one.status, *one.worker_ids] for one in map(hold.get_result, {ids})]))")
    with site.worker("--workers", "2", "--slots", "1") as worker:
        hold_two("b")
        children = [pid for file in Path("/proc").glob(f"{worker.pid}/task/*/children") for pid in file.read_text().split()]
        [other] = [pid for pid in children if b"--guest-url" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        worker.kill()
        until(lambda: not Path(f"/proc/{other}").exists(), 30.0, "the other worker process has ended")

    assert [status for status, _ in results] == ["SUCCESSFUL", "SUCCESSFUL"]
    assert len({worker_id for _, worker_id in results}) == 2


def test_a_worker_process_beside_the_first_one_follows_the_settings(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.migrate()
    site.manage("tasuki_ops", "settings", "set", "max_jobs_per_worker=1", "leader_tick_seconds=0.2")
    folders = [tmp_path / str(number) for number in range(2)]
    for folder in folders:
        folder.mkdir()

    def enqueue() -> list[str]:
        found: list[str] = site.ask(f"print(json.dumps([hold.enqueue(folder).id for folder in {list(map(str, folders))}]))")
        return found

    def running() -> int:
        return sum((folder / "running").exists() for folder in folders)

    with site.worker("--workers", "2", "--slots", "2") as worker:
        # Given two tasks for the second process, which may run one: the first one leads, and leaves them to it
        until(lambda: worker.output().count("connected to unix socket as") == 2, 30.0, "both processes work")
        ids = enqueue()
        until(running, 30.0, "a task runs")
        for folder in folders:
            (folder / "go").touch()
        (one, began, ended), (other, then_began, then_ended) = site.ask(f"""
found = [finished(hold.get_result(one)) or hold.get_result(one) for one in {ids}]
print(json.dumps([[one.worker_ids[0], one.started_at.timestamp(), one.finished_at.timestamp()] for one in found]))
""")
        assert one == other
        assert ended <= then_began or then_ended <= began, "one after the other"

        # When it may run two, it does
        site.manage("tasuki_ops", "settings", "set", "max_jobs_per_worker=0")
        until(lambda: worker.output().count("the settings have changed") == 2, 30.0, "both know")
        for folder in folders:
            (folder / "go").unlink()
            (folder / "running").unlink()
        enqueue()
        until(lambda: running() == 2, 30.0, "both tasks run")
        for folder in folders:
            (folder / "go").touch()


def test_on_sqlite_whose_transactions_begin_as_readers_all_works_but_what_the_check_says(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path, SITE_DEFERRED="1")
    site.manage("migrate", "-v0")
    checked = site.manage("check")
    with site.worker():
        value, report = site.ask("""
from tasuki.django import enqueue_command
from tasuki.django.models import JobRun

with transaction.atomic():
    kept = add.enqueue(20, b=22)
value = finished(kept).return_value
report = JobRun.objects.get(idempotency_key=enqueue_command("daily_report"))
until = time.monotonic() + 20
while report.finished_at is None:
    assert time.monotonic() < until
    time.sleep(0.01)
    report.refresh_from_db()
print(json.dumps([value, report.state]))
""")
    error, waited_s = site.ask("""
import sqlite3
from tasuki.errors import Unavailable

other = sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None)
try:
    with transaction.atomic():
        Order.objects.count()
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        add.enqueue(1)
except Unavailable as locked:
    print(json.dumps([locked.message, time.monotonic() - began]))
""")

    assert "tasuki.W001" in checked.stderr
    assert "fails at once with 'database is locked'" in checked.stderr
    assert (value, report) == (42, "SUCCEEDED")
    assert error.startswith("the database is locked by another process")
    assert waited_s < 4.0  # a writer waits for 5 s


def test_the_router_keeps_the_tables_in_a_database_of_their_own(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path, SITE_JOBS=str(tmp_path / "jobs.sqlite3"))
    site.manage("migrate", "-v0")
    site.manage("migrate", "-v0", "--database", "jobs")
    with site.worker():
        value, report, rows, tables, warned, checked = site.ask("""
import warnings
from django.core.checks import run_checks
from django.db import connections, router
from tasuki.django import enqueue_command
from tasuki.django.logs import read_log
from tasuki.django.models import JobRun

order = Order.objects.create(customer="Sato", total=300)
with transaction.atomic(using="jobs"):
    invoice, report = send_invoice.enqueue(order.pk), enqueue_command("daily_report")
try:
    with transaction.atomic(using="jobs"):
        add.enqueue(1)
        raise ZeroDivisionError
except ZeroDivisionError:
    pass
value = finished(invoice).return_value["text"]
until = time.monotonic() + 20
while not (log := read_log(report, "stdout")):
    assert time.monotonic() < until
    time.sleep(0.01)
tables = [[name for name in connections[alias].introspection.table_names() if name in ("tasuki_jobrun", "shop_order")]
          for alias in ("default", "jobs")]
rows = JobRun.objects.count()
with warnings.catch_warnings(record=True) as warned, transaction.atomic():
    warnings.simplefilter("always")
    add.enqueue(1, b=2)
checked = [[one.id for one in run_checks()]]
router.routers = []
checked.append([one.id for one in run_checks()])
print(json.dumps([value, log[0].data.decode(), rows, tables, [str(one.filename) for one in warned], checked]))
""")

    assert (value, rows) == ("Sato: 300 yen", 2)
    assert report.startswith("1 orders, 300 yen")
    assert tables == [["shop_order"], ["shop_order", "tasuki_jobrun"]]
    assert warned == ["<string>"], "the line of the project that enqueued"
    assert checked == [[], ["tasuki.W012"]]


def test_the_tables_of_a_project_have_their_version(migrated: DjangoSite) -> None:
    found = migrated.ask("""
from tasuki.django.models import Schema
from tasuki.django.standalone import SCHEMA_VERSION
print(json.dumps([Schema.objects.get().version, SCHEMA_VERSION]))
""")

    assert found[0] == found[1]


def test_a_process_killed_before_its_commit_leaves_no_job_and_one_killed_after_it_leaves_one_that_runs(
    migrated: DjangoSite,
) -> None:
    die = "__import__('os').kill(__import__('os').getpid(), 9)"
    with migrated.worker():
        before = migrated.run(f"""
with transaction.atomic():
    Order.objects.create(customer="Sato", total=300)
    print(add.enqueue(1).id, flush=True)
    {die}
""", check=False)  # fmt: skip
        after = migrated.run(f"""
with transaction.atomic():
    transaction.on_commit(lambda: {die})  # comes before the hint
    print(add.enqueue(41, b=1).id, flush=True)
""", check=False)  # fmt: skip
        value, orders, gone = migrated.ask(f"""
value = finished(add.get_result({after.strip()!r})).return_value
try:
    add.get_result({before.strip()!r})
except Exception as error:
    gone = type(error).__name__
print(json.dumps([value, Order.objects.count(), gone]))
""")

    assert len(before.strip()) == len(after.strip()) == 36
    assert (value, orders, gone) == (42, 0, "TaskResultDoesNotExist")


def test_all_jobs_of_a_transaction_are_one_hint_which_a_savepoint_can_take_back(
    tmp_path: Path, postgres: PostgresService
) -> None:
    url = postgres.empty_database()
    site = DjangoSite(tmp_path, postgres_url=url)
    site.migrate()
    hints = site.ask("""
import psycopg
listening = psycopg.connect(os.environ["DATABASE_URL"], autocommit=True)
listening.execute("LISTEN tasuki_hint")
with transaction.atomic():
    add.enqueue(1)
    with transaction.atomic():
        greet.enqueue("x")
        add.enqueue(2)
with transaction.atomic():
    try:
        with transaction.atomic():
            add.enqueue(3)
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
print(json.dumps([json.loads(one.payload) for one in listening.notifies(timeout=2.0)]))
""")
    postgres.drop(url)

    [hint] = hints
    assert sorted(hint["ready"]) == ["default.task.probes.tasks.add", "mail.task.shop.tasks.greet"]


def test_an_idle_node_holds_one_connection_and_the_leader_two(tmp_path: Path, postgres: PostgresService) -> None:
    url = postgres.empty_database()
    site = DjangoSite(tmp_path, postgres_url=url)
    site.migrate()

    def connections() -> int:
        mine = "datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        return len(postgres.execute(f"SELECT pid FROM pg_stat_activity WHERE {mine}", url=url))

    with site.worker() as first:
        first.wait_for_output("leads, under epoch")
        with site.worker(log="second.log"):
            value = site.ask("print(json.dumps(finished(add.enqueue(1, b=2)).return_value))")
            until(lambda: connections() == 2 + 1, 60.0, "both nodes are idle")
            again = site.ask("print(json.dumps(finished(add.enqueue(3, b=4)).return_value))")
        until(lambda: connections() == 2, 60.0, "one node is left")

    assert (value, again) == (3, 7)
    postgres.drop(url)
