"""A project with tasuki in INSTALLED_APPS: tasks commit with the caller's rows, and a node runs them. Real processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.django_site import DjangoSite
from tests.support.postgres_service import PostgresService
from tests.support.waiting import until

pytestmark = pytest.mark.e2e


@pytest.fixture(params=["sqlite", "postgresql"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DjangoSite]:
    if request.param == "sqlite":
        yield DjangoSite(tmp_path)
        return
    postgres: PostgresService = request.getfixturevalue("postgres")
    url = postgres.empty_database()
    yield DjangoSite(tmp_path, postgres_url=url)
    postgres.drop(url)


@pytest.fixture
def migrated(site: DjangoSite) -> DjangoSite:
    site.manage("migrate", "-v0")
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


def test_the_tables_of_a_project_have_their_version(migrated: DjangoSite) -> None:
    found = migrated.ask("""
from tasuki.django.models import Schema
from tasuki.django.standalone import SCHEMA_VERSION
print(json.dumps([Schema.objects.get().version, SCHEMA_VERSION]))
""")

    assert found[0] == found[1]
