"""Large things in S3, which all servers share: seen from any of them, patient when it is away, and never wrong."""

from __future__ import annotations

import hashlib
import io
import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from tasuki.core.job import InputFile
from tasuki.errors import Conflict, Corrupt
from tests.e2e.stage import SOON_S, Ledger, in_background, jobs_worker, wait_until_met
from tests.support.postgres_service import PostgresService
from tests.support.processes import ServerProcess, WorkerProcess, start_server, start_servers, start_worker
from tests.support.s3_service import BUCKET, S3Service
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

MIB = 1 << 20
LARGE_BYTES = 30 * MIB
AWAY_S = 2.0  # how long S3 is away; tests/soak has the twenty seconds
BACK_WITHIN_S = 30.0  # whoever waits for S3 asks again every 5 s at the latest
GRACE_S = 0.5


class Places(NamedTuple):
    """Two servers, and where they keep everything."""

    servers: list[ServerProcess]
    store_url: str
    s3: S3Service
    prefix: str

    def objects(self) -> dict[str, int]:
        """key → size of all that lies in S3 for these servers."""
        return objects_in(self.s3, self.prefix)


def objects_in(s3: S3Service, prefix: str) -> dict[str, int]:
    found: dict[str, Any] = s3.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    return {item["Key"]: item["Size"] for item in found.get("Contents", ())}


def prefix_of(url: str) -> str:
    return urlsplit(url).path.lstrip("/")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, postgres: PostgresService, s3: S3Service) -> Iterator[Places]:
    """For all tests of this file that leave them as they were."""
    store_url, blobs_url = postgres.database(), s3.url()
    with start_servers(tmp_path_factory.mktemp("places"), 2, store=store_url, blobs=blobs_url, env=s3.environment) as servers:
        wait_until_met(servers)
        yield Places(servers, store_url, s3, prefix_of(blobs_url))
        assert all(server.running for server in servers), [server.output() for server in servers]
    postgres.drop(store_url)


def copying_worker(server: ServerProcess, tmp_path: Path) -> WorkerProcess:
    """A worker whose exec `copy` gives its input back."""
    copy = ("--subject", "copy.>", "--exec", "copy=/bin/cp {file} out/copy.bin", "--data", str(tmp_path / "worker"))
    return start_worker(server, *copy, command=True)


def file_of(tmp_path: Path, size_bytes: int = LARGE_BYTES) -> tuple[Path, bytes]:
    path, data = tmp_path / "input.bin", os.urandom(size_bytes)
    path.write_bytes(data)
    return path, data


def copy_in(result: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(result)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("copy.bin")))


def test_a_large_input_and_its_result_go_in_at_one_server_and_come_out_at_the_other(places: Places, tmp_path: Path) -> None:
    # given: a client at one server, the worker at the other
    here, there = places.servers
    path, data = file_of(tmp_path)
    with copying_worker(there, tmp_path), here.client() as client, there.client() as other:
        # when
        job = client.submit(subject="copy.1", exec="copy", files=[path], job_id="across")

        # then: the result can be had at both, and lies in S3 only
        assert copy_in(job.result(3 * SOON_S)) == data
        assert copy_in(other.job("across").result(3 * SOON_S)) == data
        assert sorted(places.objects().values())[-2:] >= [LARGE_BYTES, LARGE_BYTES]
        assert not [found for server in places.servers for found in server.folder.blobs.rglob("*") if found.is_file()]


def test_an_upload_waits_for_s3_and_goes_on(places: Places, tmp_path: Path) -> None:
    wait_for_s3_in_the_middle_of_an_upload(places, tmp_path, AWAY_S)


def wait_for_s3_in_the_middle_of_an_upload(places: Places, tmp_path: Path, away_s: float) -> None:
    # given: an upload of which a part has arrived
    path, data = file_of(tmp_path)
    halfway, go_on = threading.Event(), threading.Event()

    def progress(sent_bytes: int) -> None:
        if sent_bytes > LARGE_BYTES // 2 and not halfway.is_set():
            halfway.set()
            go_on.wait(SOON_S)

    here, there = places.servers
    with copying_worker(there, tmp_path), here.client() as client:
        with in_background(lambda: client.wait(client.aio.put_file(path, progress))) as upload:
            assert halfway.wait(SOON_S)
            assert until(lambda: uploads(places), SOON_S, "a part of it is in S3")

            # when: S3 dies and is away for a while
            places.s3.kill()
            go_on.set()
            threading.Event().wait(away_s)  # the time is the test's subject
            assert not upload.done()
            places.s3.start()

            # then: the upload ends well, and the job that needs it runs, once
            ref = upload.result(BACK_WITHIN_S + away_s)
        assert ref.sha256 == hashlib.sha256(data).hexdigest()
        file = InputFile("input.bin", sha256=ref.sha256, size_bytes=ref.size_bytes)
        job = client.submit(subject="copy.2", exec="copy", files=[file], job_id=f"waited-{away_s:g}", retries=0)
        assert copy_in(job.result(3 * SOON_S)) == data
        assert client.status(job.job_id).attempt == 1


def test_a_result_waits_for_s3_and_its_job_runs_once(places: Places, tmp_path: Path, ledger: Ledger) -> None:
    bring_a_result_while_s3_is_away(places, tmp_path, ledger, AWAY_S)


def bring_a_result_while_s3_is_away(places: Places, tmp_path: Path, ledger: Ledger, away_s: float) -> None:
    # given: S3 is away when a job ends that has a large result
    here, there = places.servers
    with jobs_worker(there, ledger, "--subject", "large.>"), here.client() as client:
        places.s3.kill()
        try:
            job = client.submit(subject="large.1", payload=f"large {MIB}".encode(), job_id=f"large-{away_s:g}", retries=0)
            ledger.wait_for(job.job_id)
            threading.Event().wait(away_s)  # the time is the test's subject
            assert not job.done
        finally:
            places.s3.start()

        # then: it is reported when its result is safe, from its only run
        assert job.result(BACK_WITHIN_S + away_s) == b"1".ljust(MIB, b".")
        assert ledger.attempts(job.job_id) == [1]


def test_bytes_that_were_changed_in_s3_are_never_handed_out(places: Places, tmp_path: Path) -> None:
    # given: a job with a large input and a large result
    here, there = places.servers
    path, _ = file_of(tmp_path, MIB)
    before = places.objects()
    with copying_worker(here, tmp_path), here.client() as client, there.client() as other:
        job = client.submit(subject="copy.3", exec="copy", files=[path], job_id="damaged")
        job.result(SOON_S)
        for key, size_bytes in places.objects().items():
            if key not in before:
                places.s3.client().put_object(Bucket=BUCKET, Key=key, Body=os.urandom(size_bytes))

        # when: somebody asks for the result, at whichever server
        for one in (client, other):
            with pytest.raises(Corrupt):
                one.job("damaged").result(SOON_S)

        # then: a job that needs that input fails, with a reason that says why, and does not run on wrong bytes
        ref = InputFile("input.bin", sha256=hashlib.sha256(path.read_bytes()).hexdigest(), size_bytes=MIB)
        ended = client.submit(subject="copy.4", exec="copy", files=[ref], job_id="misled", retries=0).outcome(SOON_S)
        assert ended.state == "FAILED"
        assert "sha256" in ended.outcome.message


def test_what_no_job_needs_any_more_is_deleted_from_s3(
    tmp_path: Path, postgres: PostgresService, postgres_url: str, s3: S3Service, s3_url: str, ledger: Ledger
) -> None:
    # given: a server that keeps ended jobs for a second, and blobs that no job needs for less
    keep = ("--retention", "1s", "--blob-grace", str(GRACE_S), "--lead-ttl", "1")
    prefix = prefix_of(s3_url)
    path, _ = file_of(tmp_path, MIB)
    with start_server(tmp_path, *keep, store=postgres_url, blobs=s3_url, env=s3.environment) as server, server.client() as client:
        # when: one job needs a blob and waits, one has ended, and one was refused after its file had been brought
        waiting = client.wait(client.aio.put_file(path))
        client.submit(subject="nobody.1", exec="copy", files=[path], job_id="waiting", watch=False)
        with jobs_worker(server, ledger, "--subject", "large.>"):
            client.submit(subject="large.1", payload=f"large {MIB}".encode(), job_id="ended").result(SOON_S)
        path.write_bytes(os.urandom(MIB))
        with pytest.raises(Conflict):
            client.submit(subject="nobody.1", exec="other", files=[path], job_id="waiting")
        assert len(objects_in(s3, prefix)) == 3
        touched = "SELECT extract(epoch FROM clock_timestamp()) - max(touched_at) FROM tasuki_blob"
        until(lambda: postgres.execute(touched, url=postgres_url)[0][0] > max(GRACE_S, 1.0), SOON_S, "all times are over")
        server.stop()
        server.restart()  # whoever begins to lead looks at once

        # then: only what a job needs is left, in S3 as in the store
        def left() -> list[str]:
            return [key.removeprefix(f"{prefix}/") for key in objects_in(s3, prefix)]

        until(lambda: len(left()) == 1, 4 * SOON_S, "two of the three objects are deleted")
        assert left()[0].startswith(f"{waiting.sha256[:2]}/{waiting.sha256}")
        rows = "SELECT sha256 FROM tasuki_blob"
        until(lambda: postgres.execute(rows, url=postgres_url) == [(waiting.sha256,)], SOON_S, "their rows too")
        assert client.status("waiting").state == "PENDING"


def uploads(places: Places) -> int:
    found = places.s3.client().list_multipart_uploads(Bucket=BUCKET, Prefix=places.prefix)
    return len(found.get("Uploads", ()))
