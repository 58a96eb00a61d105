"""PgBouncer in transaction mode between web processes and PostgreSQL; workers have the direct address. Real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Require
from tests.support.django_site import DjangoSite
from tests.support.pgbouncer_service import PgBouncerService, pgbouncer_program
from tests.support.postgres_service import PostgresService

pytestmark = pytest.mark.e2e

# More threads than the pooler has connections: half of the transactions are rolled back while others use the same sessions.
WEB = """
from concurrent.futures import ThreadPoolExecutor
import psycopg
from django.core.management import call_command
from django.db import connections
from tasuki.django import emit, enqueue_command
from tasuki.django.models import Event, JobRun

listening = psycopg.connect(DIRECT, autocommit=True)
listening.execute("LISTEN tasuki_hint")

class Refused(Exception):
    pass

def view(number):
    try:
        with transaction.atomic():
            order = Order.objects.create(customer=f"customer {number}", total=number)
            results = [send_invoice.enqueue(order.pk), add.enqueue(number, b=1)]
            emit("order.paid", {"order": number}, dedupe_key=f"order-{number}")
            time.sleep(0.01)
            if number % 2:
                raise Refused
            return results
    except Refused:
        return []
    finally:
        connections.close_all()

with ThreadPoolExecutor(8) as threads:
    results = [result for found in threads.map(view, range(16)) for result in found]
values = [finished(result).status for result in results]
told = [json.loads(one.payload) for one in listening.notifies(timeout=5.0, stop_after=1)]
canceled = enqueue_command("probe", "hold", queue="nobody")
call_command("tasuki_runs", "cancel", canceled, stdout=sys.stderr)
call_command("tasuki_doctor", stdout=sys.stderr)
print(json.dumps([
    values, Order.objects.count(), Event.objects.count(), JobRun.objects.filter(exec="").count(), sorted(told[0]["ready"]),
    JobRun.objects.get(idempotency_key=canceled).state,
]))
"""


@pytest.fixture
def pooler(postgres: PostgresService, require: Require) -> Iterator[PgBouncerService]:
    require("PgBouncer", pgbouncer_program() is not None, "make system-deps")
    with PgBouncerService(postgres.port) as service:
        yield service


def test_web_processes_behind_a_pooler_enqueue_roll_back_and_hint(
    postgres: PostgresService, pooler: PgBouncerService, tmp_path: Path
) -> None:
    url = postgres.empty_database()
    site = DjangoSite(tmp_path, postgres_url=pooler.url(url), SITE_DIRECT_PORT=str(postgres.port))
    site.manage("migrate", "-v0")
    with site.worker():
        values, orders, events, tasks, hinted, state = site.ask(f"DIRECT = {url!r}\n{WEB}")
    postgres.drop(url)

    assert values == ["SUCCESSFUL"] * 16
    assert (orders, events, tasks) == (8, 8, 16)
    assert {"default.task.probes.tasks.add", "default.task.shop.tasks.send_invoice"} >= set(hinted) > set()
    assert state == "CANCELED"
