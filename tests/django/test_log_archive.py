"""Old logs of a project become objects of the blob store: nothing is lost or doubled, whoever is killed, whatever is away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.django_site import DjangoSite
from tests.support.s3_service import S3Service
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

LOGS = """
import io, os, signal
from django.core.management import call_command
from tasuki.django import enqueue_command
from tasuki.django.enqueueing import project_store
from tasuki.django.log_archive import LogArchive
from tasuki.django.logs import log_bytes, write_log
from tasuki.django.models import Blob, JobBlob, JobRun, LogChunk
from tasuki.errors import TasukiError

def ended(*parts, days=8, **columns):
    job_id = enqueue_command("daily_report")
    for attempt, stream, offset, data in parts:
        write_log(job_id, attempt, stream, data, offset)
    old = time.time() - days * 86400
    rows = JobRun.objects.filter(idempotency_key=job_id)
    rows.update(**{"state": "SUCCEEDED", "ready": 0, "finished_at": old, **columns})
    LogChunk.objects.filter(job__idempotency_key=job_id).update(at=old)
    return job_id

def led():
    store = project_store()
    epoch = store.epoch()[0] + 1
    store.take_over("leader", epoch)
    return epoch

def shown(job_id):
    out = io.StringIO()
    call_command("tasuki_runs", "logs", job_id, stdout=out)
    return [b"".join(log_bytes(job_id, stream)).decode() for stream in ("stdout", "stderr")] + [out.getvalue()]

def kept(job_id):
    row = JobRun.objects.get(idempotency_key=job_id)
    return [LogChunk.objects.filter(job=row).count(), JobBlob.objects.filter(job=row, role="log").count(), row.log_ref[:5]]

PARTS = (1, "stdout", 0, b"first "), (1, "stdout", 6, b"second\\n"), (1, "stdout", 20, b"tail\\n"), (2, "stderr", 0, b"oh\\n")
"""
FAULT_POINTS = (
    *("archive.packed", "archive.placed", "archive.written", "archive.stored", "archive.referred"),
    *("turn.before_commit", "archive.recorded"),
)
SHOWN = ["first second\n\n── 7 bytes were not kept ──\ntail\n", "oh\n", "first second\ntail\noh\n"]


@pytest.fixture
def migrated(site: DjangoSite, tmp_path: Path) -> DjangoSite:
    site.env["SITE_TASUKI"] = json.dumps({"log_archive": str(tmp_path / "logs")})
    site.migrate()
    return site


def objects_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "tmp"]


def ask(site: DjangoSite, code: str) -> Any:
    return site.ask(LOGS + code)


def test_a_log_that_is_old_is_one_object_and_reads_as_before(migrated: DjangoSite, tmp_path: Path) -> None:
    before, after, left, young, running, url = ask(
        migrated,
        """
job_id, young = ended(*PARTS), ended(*PARTS, days=6)
running = ended(*PARTS, state="RUNNING", finished_at=None)
url = ended(*PARTS, log_ref="https://logs.example.org/7")
before = shown(job_id)
archive, epoch = LogArchive("default"), led()
assert archive.step(days=7, epoch=epoch) == (2, False)
assert archive.step(days=7, epoch=epoch) == (0, False)
print(json.dumps([before, shown(job_id), kept(job_id), kept(young), kept(running), kept(url) + [shown(url)]]))
""",
    )

    assert before == after == SHOWN
    assert left == [0, 1, "blob:"]
    assert young == running == [4, 0, ""]
    assert url == [0, 1, "https", SHOWN]
    assert len(objects_in(tmp_path / "logs")) == 2


def test_a_run_that_ran_again_has_one_object_with_both_logs(migrated: DjangoSite) -> None:
    shown, kept, blobs, left = ask(
        migrated,
        """
from tasuki.django import log_archive
job_id = ended((1, "stdout", 0, b"one\\n"))
archive, epoch = LogArchive("default"), led()
archive.step(days=7, epoch=epoch)
write_log(job_id, 2, "stdout", b"two\\n")
between = shown(job_id)[0]
archive.step(days=0, epoch=epoch)
after = [between, shown(job_id)[0]], kept(job_id), Blob.objects.count()
Blob.objects.update(touched_at=1.0)
assert archive.collect(epoch=epoch) == 1
call_command("tasuki_prune", "--days", "0", stdout=io.StringIO())
assert archive.collect(epoch=epoch) == 1
print(json.dumps([*after, Blob.objects.count()]))
""",
    )

    assert shown == ["one\n── attempt 2 ──\ntwo\n"] * 2
    assert (kept, blobs, left) == ([0, 1, "blob:"], 2, 0)


@pytest.mark.parametrize("point", FAULT_POINTS)
def test_a_leader_killed_at_any_step_loses_and_doubles_nothing(migrated: DjangoSite, tmp_path: Path, point: str) -> None:
    kill = f"""
armed = False
def fault(passed):
    if armed and passed == {point!r} and JobBlob.objects.exists() == ({point!r} in AFTER):
        os.kill(os.getpid(), signal.SIGKILL)
AFTER = ("archive.referred", "turn.before_commit", "archive.recorded")
ended(*PARTS)
archive, epoch, armed = LogArchive("default", fault), led(), True
archive.step(days=7, epoch=epoch)
print("not killed")
"""
    assert migrated.run(LOGS + kill, check=False) == ""
    points, between, after, kept = ask(
        migrated,
        """
job_id = JobRun.objects.get().job_id
between = shown(job_id)
LogArchive("default").step(days=7, epoch=led())
from tasuki.django.log_archive import FAULT_POINTS
print(json.dumps([FAULT_POINTS, between, shown(job_id), kept(job_id)]))
""",
    )

    assert points == list(FAULT_POINTS)
    assert between == after == SHOWN
    assert kept == [0, 1, "blob:"]
    assert len(objects_in(tmp_path / "logs")) == 1


def test_a_node_that_leads_no_more_archives_nothing(migrated: DjangoSite) -> None:
    refused, kept = ask(
        migrated,
        """
job_id, epoch = ended(*PARTS), led()
led()
try:
    LogArchive("default").step(days=7, epoch=epoch)
except TasukiError as error:
    print(json.dumps([error.code, kept(job_id)]))
""",
    )

    assert refused == "STALE_EPOCH"
    assert kept == [4, 0, ""]


def test_while_s3_is_away_logs_stay_in_the_database_and_go_there_when_it_is_back(
    tmp_path: Path, s3: S3Service, s3_url: str
) -> None:
    site = DjangoSite(tmp_path, SITE_TASUKI=json.dumps({"blobs": s3_url}), **s3.environment)
    site.migrate()
    step = """
job_id = JobRun.objects.first().job_id if JobRun.objects.exists() else ended(*PARTS)
problem = ""
try:
    LogArchive("default").step(days=7, epoch=led())
except TasukiError as error:
    problem = error.code
print(json.dumps([problem, shown(job_id) if not GONE else b"".join(log_bytes(job_id, "stdout")).decode(), kept(job_id)]))
"""
    s3.kill()
    try:
        away = ask(site, "GONE = False\n" + step)
    finally:
        s3.start()
    back = ask(site, "GONE = False\n" + step)
    s3.kill()
    try:
        problem, unreadable, kept = ask(site, "GONE = True\n" + step)
    finally:
        s3.start()

    assert away == ["UNAVAILABLE", SHOWN, [4, 0, ""]]
    assert back == ["", SHOWN, [0, 1, "blob:"]]
    assert "the archived log cannot be read now" in unreadable
    assert (problem, kept) == ("", [0, 1, "blob:"])


def test_the_worker_that_leads_archives_by_itself(migrated: DjangoSite, tmp_path: Path) -> None:
    ask(migrated, "print(json.dumps(ended(*PARTS)))")
    with migrated.worker() as worker:
        until(lambda: "logs of 1 runs were archived" in worker.output(), 30.0, "the log is archived")

    assert len(objects_in(tmp_path / "logs")) == 1


def test_an_address_in_log_ref_is_a_link_and_a_script_is_none(migrated: DjangoSite) -> None:
    pages = ask(
        migrated,
        """
from django.contrib.auth.models import User
from django.test import Client
browser = Client(headers={"host": "localhost"})
browser.force_login(User.objects.create_superuser("admin"))
refs = ["https://logs.example.org/7?a=1&b=2", "javascript:alert(1)"]
print(json.dumps([browser.get(f"/ops/jobs/{ended(*PARTS, log_ref=ref)}/").content.decode() for ref in refs]))
""",
    )

    assert '<a href="https://logs.example.org/7?a=1&amp;b=2" rel="noopener noreferrer">' in pages[0]
    assert 'href="javascript:' not in pages[1]
