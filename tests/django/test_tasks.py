"""The contract of Django's Tasks, as its documentation has it, on tasuki. Real processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.django_site import DjangoSite
from tests.support.processes import ChildProcess

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def python() -> str:
    return sys.executable


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, python: str) -> DjangoSite:
    folder = tmp_path_factory.mktemp("site")
    (folder / "signals").mkdir()
    site = DjangoSite(folder, python=python, SITE_SIGNALS=str(folder / "signals"))
    site.migrate()
    return site


@pytest.fixture(scope="module")
def worker(site: DjangoSite) -> Iterator[ChildProcess]:
    with site.worker("--slots", "2") as worker:
        yield worker


def test_all_four_features_are_supported(site: DjangoSite) -> None:
    flags = site.ask("""
backend = add.get_backend()
print(json.dumps([backend.supports_defer, backend.supports_async_task, backend.supports_get_result, backend.supports_priority]))
""")

    assert flags == [True] * 4


def test_a_task_that_raises_has_failed_with_its_traceback(site: DjangoSite, worker: ChildProcess) -> None:
    status, errors, attempts, finished, message = site.ask("""
result = finished(fail.enqueue("no such order"))
try:
    result.return_value
except ValueError as error:
    message = str(error)
errors = [[one.exception_class_path, one.exception_class.__name__, one.traceback] for one in result.errors]
print(json.dumps([result.status, errors, result.attempts, result.finished_at is not None, message]))
""")

    assert (status, attempts, finished, message) == ("FAILED", 1, True, "Task failed")
    [[path, name, traceback]] = errors
    assert (path, name) == ("builtins.LookupError", "LookupError")
    assert "raise LookupError(text)\nLookupError: no such order" in traceback


def test_each_failed_attempt_is_told_and_the_context_counts_them(site: DjangoSite, worker: ChildProcess) -> None:
    value, lines, attempts, workers = site.ask("""
result = finished(fail_until.enqueue(3))
lines = [one.traceback.splitlines()[-1] for one in result.errors]
print(json.dumps([result.return_value, lines, result.attempts, result.worker_ids]))
""")

    assert (value, attempts) == (3, 3)
    assert lines == ["LookupError: attempt 1", "LookupError: attempt 2"]
    assert len(set(workers)) == 1


def test_the_options_of_a_task_stand_at_its_function(site: DjangoSite, worker: ChildProcess) -> None:
    status, attempts, lines = site.ask("""
result = finished(fail_twice.enqueue())
print(json.dumps([result.status, result.attempts, [one.traceback.splitlines()[-1] for one in result.errors]]))
""")

    assert (status, attempts, lines) == ("FAILED", 2, ["LookupError: once more"] * 2)


def test_a_task_whose_process_dies_runs_again(site: DjangoSite, worker: ChildProcess, tmp_path: Path) -> None:
    assert site.ask(f"print(json.dumps(finished(die_once.enqueue({str(tmp_path)!r})).return_value))") == "alive"


def test_a_task_past_its_time_limit_is_killed_and_has_failed(site: DjangoSite, worker: ChildProcess, tmp_path: Path) -> None:
    status, kinds = site.ask(f"""
result = finished(hold.using(timeout_s=0.3).enqueue({str(tmp_path)!r}))
print(json.dumps([result.status, [one.exception_class.__name__ for one in result.errors]]))
""")

    assert (status, kinds) == ("FAILED", ["TimeoutError"])


def test_a_value_that_is_no_json_fails_the_task_and_arguments_that_are_none_are_refused(
    site: DjangoSite, worker: ChildProcess
) -> None:
    status, kinds, refused, found, pair = site.ask("""
result = finished(unjsonable.enqueue())
try:
    add.enqueue(object())
except TypeError as error:
    refused = str(error)
from tasuki.django.models import JobRun
found = JobRun.objects.filter(subject="default.task.probes.tasks.add").count()
pair = add.enqueue((1, 2), b=[3])
print(json.dumps([result.status, [one.exception_class.__name__ for one in result.errors], refused, found, pair.args]))
""")

    assert (status, kinds) == ("FAILED", ["TypeError"])
    assert "Unsupported type" in refused
    assert found == 0
    assert pair == [[1, 2]]


def test_results_are_found_by_id_from_sync_and_async_code(site: DjangoSite, worker: ChildProcess) -> None:
    found = site.ask("""
import asyncio

async def main():
    result = await add.aenqueue(20, b=22)
    while not result.is_finished:
        await asyncio.sleep(0.01)
        await result.arefresh()
    again = await add.aget_result(result.id)
    errors = []
    for call in (lambda: fail.aget_result(result.id), lambda: add.aget_result("unknown")):
        try:
            await call()
        except Exception as error:
            errors.append(type(error).__name__)
    return [again.return_value, len(result.id) < 64, again == result, errors]

print(json.dumps(asyncio.run(main())))
""")

    assert found == [42, True, True, ["TaskResultMismatch", "TaskResultDoesNotExist"]]


def test_tasks_wait_for_their_time_and_for_more_urgent_ones(tmp_path: Path, python: str) -> None:
    site = DjangoSite(tmp_path, python=python)
    site.migrate()
    ids = site.ask("""
from datetime import timedelta
from django.utils import timezone
tasks = [stamp.using(priority=one) for one in (-100, 0, 100)]
tasks += [stamp.using(run_after=timezone.now() + timedelta(seconds=one)) for one in (2, 3600)]
print(json.dumps([task.enqueue().id for task in tasks]))
""")
    with site.worker("--slots", "1"):
        status, priority, times, due = site.ask(f"""
*three, soon, later = [stamp.get_result(one) for one in {ids!r}]
times = [finished(one).return_value for one in three]
waited = finished(soon).return_value - soon.task.run_after.timestamp()
later.refresh()
print(json.dumps([later.status, three[0].task.priority, times, waited]))
""")

    low, usual, high = times
    assert (status, priority) == ("READY", -100)
    assert high < usual < low
    assert due > 0


def test_processes_of_tasks_are_reused_and_share_no_connection(site: DjangoSite, worker: ChildProcess) -> None:
    seen = site.ask("""
results = [finished(surroundings.enqueue()) for _ in range(6)]
print(json.dumps([result.return_value for result in results]))
""")

    assert len({one["pid"] for one in seen}) <= 2
    assert not any(one["connected"] for one in seen)


def test_signals_are_sent_in_the_worker(site: DjangoSite, worker: ChildProcess) -> None:
    good, bad, enqueued = site.ask("""
seen = []
try:
    from django.tasks import signals
except ImportError:
    from django_tasks import signals
signals.task_enqueued.connect(lambda task_result, **_: seen.append(task_result.task.name), weak=False)
good, bad = finished(add.enqueue(1)), finished(fail_until.enqueue(9))
print(json.dumps([good.id, bad.id, seen]))
""")

    def told(job_id: str) -> list[str]:
        return (site.folder / "signals" / job_id).read_text().splitlines()

    assert enqueued == ["add", "fail_until"]
    assert told(good) == ["RUNNING add", "SUCCESSFUL add"]
    assert told(bad) == ["RUNNING fail_until"] * 3 + ["FAILED fail_until"]


REFUSED = {
    "add.using(priority=101)": "InvalidTask: priority must be a whole number between",
    "add.using(priority='high')": "InvalidTask: priority of task probes.tasks.add must be int, got str",
    "add.using(priority=True)": "InvalidTask: priority of task probes.tasks.add must be int, got bool",
    "add.using(queue_name='other')": "InvalidTask: Queue 'other' is not valid for backend",
    "add.using(queue_name=['mail'])": "InvalidTask: queue_name of task probes.tasks.add must be str, got list",
    "add.using(run_after=datetime(2030, 1, 1))": "InvalidTask: run_after must be an aware datetime",
    "add.using(run_after='2030-01-01')": "InvalidTask: run_after of task probes.tasks.add must be datetime",
    "add.using(run_after=datetime.max.replace(tzinfo=UTC))": "9999-12-31 23:59:59.999999+00:00 must be a time from 1970",
    "add.using(max_retries='3')": "InvalidTask: task probes.tasks.add: max_retries must be int, got str",
    "add.using(max_retries=2.0)": "max_retries must be int, got float",
    "add.using(timeout_s=timedelta(1))": "timeout_s must be float | None, got timedelta",
    "add.using(backoff_s=Decimal(1))": "backoff_s must be float | None, got Decimal",
    "add.using(timeout_s=0)": "timeout_s must be above 0",
    "add.using(unknown=1)": "unexpected keyword argument 'unknown'",
    "add.enqueue(1, b=object())": "WrongType: argument 'b' of task probes.tasks.add is not JSON: Unsupported type",
    "add.enqueue(1, timezone.now())": "argument 2 of task probes.tasks.add is not JSON: Unsupported type: <class 'datetime",
    "add.enqueue('\\ud800')": "argument 1 of task probes.tasks.add is not JSON: 'utf-8' codec can't encode",
    "add.enqueue({'a': {1: 2}})": "argument 1 of task probes.tasks.add would become \"{'a': {'1': 2}}\", given \"{'a': {1: 2}}\"",
    "add.enqueue(float('nan'))": "argument 1 of task probes.tasks.add would become 'None', given 'nan'",
    "add.enqueue(10**5000)": "argument 1 of task probes.tasks.add is not JSON: Exceeds the limit (4300 digits)",
    "add.enqueue(nested(101))": "InvalidInput: an argument of task probes.tasks.add has lists or objects more than 100 deep",
    "add.enqueue(nested(100_000))": "WrongType: argument 1 of task probes.tasks.add is not JSON: maximum recursion depth",
    "add.enqueue('x' * 70_000)": "TooLarge: the arguments of task probes.tasks.add have 70043 bytes as JSON, the limit is 65536",
    "add.get_result(None)": "TaskResultDoesNotExist: None",
    "add.get_result('a\\0')": "TaskResultDoesNotExist",
    "add.get_result('\\ud800')": "TaskResultDoesNotExist",
    "TasukiBackend('mail', {'OPTIONS': {'max_retries': '3'}})": "TASKS['mail'][\"OPTIONS\"]: max_retries must be int",
    "enqueue_many([add.enqueue(1)])": "takes calls, as in partial(send_invoice.enqueue, 1); number 0 is TasukiResult",
}


def test_a_task_that_cannot_run_is_refused_before_anything_is_written(site: DjangoSite) -> None:
    refused, kept = site.ask(f"""
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from django.utils import timezone
from tasuki.django import TasukiBackend, enqueue_many
from tasuki.django.models import JobRun

def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value

refused, before = [], JobRun.objects.count()
for text in {list(REFUSED)}:
    try:
        with transaction.atomic():
            eval(text)
        refused.append("taken")
    except Exception as error:
        refused.append(f"{{type(error).__name__.replace('TaskError', 'Task')}}: {{error}}".encode("ascii", "replace").decode())
print(json.dumps([refused, JobRun.objects.count() - before]))
""")

    for call, message, found in zip(REFUSED, REFUSED.values(), refused, strict=True):
        assert message in found, call
    assert kept == 0


def test_a_large_return_value_without_a_place_for_blobs_names_the_setting(tmp_path: Path) -> None:
    from tasuki.errors import TooLarge
    from tasuki.server.assembly import NoBlobs

    with pytest.raises(TooLarge, match=r'100000 bytes are too much .* in a Django project set TASUKI\["blobs"\]'):
        NoBlobs(tmp_path, max_blob_bytes=0, floor_free_bytes=0).begin(size_bytes=100_000)


def test_a_large_return_value_is_read_from_where_blobs_are(tmp_path: Path, python: str) -> None:
    site = DjangoSite(tmp_path, python=python, SITE_TASUKI=json.dumps({"blobs": str(tmp_path / "blobs")}))
    site.migrate()
    with site.worker("--slots", "1"):
        size, job_id = site.ask("""
result = finished(repeat.enqueue("x", 100_000))
print(json.dumps([len(result.return_value), result.id]))
""")

    assert size == 100_000
    read = f"""
from tasuki.errors import ConfigError
try:
    repeat.get_result({job_id!r})
except ConfigError as error:
    print(error.message)
"""
    assert 'set TASUKI["blobs"]' in site.run(read, env={"SITE_TASUKI": "{}"})
