"""Django 6 on a newer Python than that of the other tests: the same project, tasks by `django.tasks` itself. Real processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Require
from tests.django.test_tasks import *  # noqa: F403  # the whole contract again: its `python` is the one below
from tests.shape.source import ROOT
from tests.support.django_site import DjangoSite
from tests.support.postgres_service import PostgresService
from tests.support.processes import SOURCE

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

PLACES = {">=6.1": ROOT / ".venv" / "newer-django", "~=6.0.2": ROOT / ".venv" / "newer-django-6.0"}
NAMES = ("python3.14", "python3.13", "python3.12")
USABLE = "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))"


def candidates() -> Iterator[str]:
    """Yield this Python, those on the PATH, and those of pyenv."""
    yield sys.executable
    yield from (found for name in NAMES if (found := shutil.which(name)) is not None)
    yield from sorted(map(str, Path.home().glob(".pyenv/versions/3.1[2-9]*/bin/python3")), reverse=True)


def newer_python() -> str | None:
    for candidate in candidates():
        if subprocess.run([candidate, "-c", USABLE], capture_output=True).returncode == 0:
            return candidate
    return None


@pytest.fixture(scope="module", params=[">=6.1", pytest.param("~=6.0.2", marks=pytest.mark.soak)])
def python(request: pytest.FixtureRequest, require: Require) -> str:
    """A Python with Django 6 and what tasuki needs of others, made once."""
    place = PLACES[request.param]
    found = newer_python()
    require("Python 3.12", found is not None, "Django 6 needs it; install one, or pyenv install 3.13")
    assert found is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = "\n".join([*project["dependencies"], *project["optional-dependencies"]["django"], f"Django{request.param}"])
    made = place / "made-for"
    program = os.fspath(place / "bin" / "python")
    if not made.exists() or made.read_text("utf-8") != wanted:
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([found, "-m", "venv", "--without-pip", place], check=True)
        install = [sys.executable, "-m", "pip", "--python", program, "install", "--quiet"]
        subprocess.run([*install, *wanted.split("\n")], check=True)
        subprocess.run([program, "-m", "compileall", "-q", SOURCE], check=True)  # else each process of the tests does it
        made.write_text(wanted, "utf-8")
    return program


def test_the_project_works_with_django_6_as_with_5(tmp_path: Path, python: str) -> None:
    site = DjangoSite(tmp_path, python=python)
    site.manage("makemigrations", "--check", "--dry-run")
    site.manage("migrate", "-v0")
    ran = site.manage("test", "shop")
    with site.worker() as worker:
        worker.wait_for_output("is warm")
        found = site.ask("""
import django
from tasuki.django import enqueue_command
from tasuki.django.logs import read_log
with transaction.atomic():
    order = Order.objects.create(customer="Sato", total=300)
    invoice = send_invoice.enqueue(order.pk)
retried, failed = fail_until.enqueue(3), fail.using(max_retries=1, backoff_s=0).enqueue("no")
job_id = enqueue_command("daily_report")
values = [finished(invoice).return_value["text"], finished(retried).return_value, finished(greet.enqueue("Sato")).return_value]
finished(failed)
while not (log := b"".join(part.data for part in read_log(job_id, "stdout")).decode()):
    time.sleep(0.05)
print(json.dumps([django.VERSION[0], type(add).__mro__[1].__module__, values, failed.status, len(failed.errors), log]))
""")
    version, home, values, status, errors, log = found

    assert "Ran 8 tests" in ran.stderr
    assert (version, home) == (6, "django.tasks.base")
    assert values == ["Sato: 300 yen", 3, "Sato, attempt 1"]
    assert (status, errors) == ("FAILED", 2)
    assert log.startswith("1 orders, 300 yen")


def test_on_postgresql_a_task_of_a_transaction_starts_with_its_commit_and_never_without(
    tmp_path: Path, python: str, postgres: PostgresService
) -> None:
    url = postgres.empty_database()
    site = DjangoSite(tmp_path, postgres_url=url, python=python)
    site.migrate()
    with site.worker("--slots", "1"):
        value, left, orders = site.ask("""
from tasuki.django.models import JobRun
try:
    with transaction.atomic():
        Order.objects.create(customer="nobody", total=1)
        gone = add.enqueue(1)
        raise ZeroDivisionError
except ZeroDivisionError:
    pass
with transaction.atomic():
    Order.objects.create(customer="Sato", total=300)
    kept = add.enqueue(20, b=22)
value = finished(kept).return_value
runs = [run.idempotency_key for run in JobRun.objects.all()]
print(json.dumps([value, runs == [kept.id], list(Order.objects.values_list("customer", flat=True))]))
""")
    postgres.drop(url)

    assert (value, left, orders) == (42, True, ["Sato"])
