"""Links to the bucket over HTTP: who is given one, what becomes of what was sent with it, and that nobody else hears of it."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tasuki.blobs.s3 import presign
from tasuki.core.job import InputFile, JobSpec
from tasuki.core.protocol import FRAME_MAX_BYTES, Accepted, AssignJobs, GiveCredit, HelloWorker, Message, SubmitJobs
from tasuki.doors.http import blobs
from tasuki.doors.http.virtual_connection import VirtualConnection
from tasuki.server.assembly import open_presigned
from tasuki.server.transfers import PresignedTransfers
from tasuki.wire.messages import FrameDecoder, decode, encode
from tests.doors.http.stage import Stage
from tests.support.s3_service import S3Service

PART_BYTES = 5 * 1024 * 1024

numbers = itertools.count()


@pytest.fixture(scope="module")
def bucket(s3: S3Service) -> Iterator[tuple[str, PresignedTransfers]]:
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in s3.environment.items():
            patch.setenv(variable, value)
        patch.setattr(presign, "PART_BYTES", PART_BYTES)
        patch.setattr(presign, "WHOLE_MAX_BYTES", 1024 * 1024)
        url = s3.url()
        presigned = open_presigned(url)
        yield url, presigned
        presigned.close()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, bucket: tuple[str, PresignedTransfers]) -> Iterator[Stage]:
    url, presigned = bucket
    with Stage(tmp_path_factory.mktemp("direct"), blobs=url, presigned=presigned) as stage:
        stage.run(presigned.check())
        yield stage


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("without")) as stage:
        yield stage


class Blob:
    """Bytes that no other test has."""

    def __init__(self, size_bytes: int) -> None:
        self.data = f"{next(numbers):032}".encode() * (size_bytes // 32 + 1)
        self.sha256 = hashlib.sha256(self.data).hexdigest()
        self.path = f"/v1/blobs/{self.sha256}"
        self.offer = {"size_bytes": len(self.data)}

    def part(self, link: dict[str, Any]) -> bytes:
        return self.data[link["offset"] : link["offset"] + link["size_bytes"]]

    def upload(self, stage: Stage, token: str = "") -> dict[str, Any]:
        answer = stage.post(f"{self.path}/upload", self.offer, token)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def send(self, links: list[dict[str, Any]]) -> None:
        for link in links:
            answer = httpx.put(link["url"], content=self.part(link), headers=link.get("headers", {}))
            assert answer.status_code == 200, answer.text

    def commit(self, stage: Stage, token: str = "") -> httpx.Response:
        return stage.post(f"{self.path}/commit", self.offer, token)

    def bring(self, stage: Stage) -> None:
        self.send(self.upload(stage)["links"])
        assert self.commit(stage).json() == {"stored": True}

    def submit(self, stage: Stage, subject: str = "direct.here") -> str:
        """A job with this input, whose id is the blob's; the code with which it was refused, if it was."""
        file = InputFile("in.bin", sha256=self.sha256, size_bytes=len(self.data))
        spec = JobSpec(job_id=self.sha256, subject=subject, files=(file,))
        answer = stage.call("POST", "/v1/frames", stage.client, content=encode(SubmitJobs(1, [spec])))
        [frame] = FrameDecoder(FRAME_MAX_BYTES).feed(answer.content)
        accepted = decode(frame, FRAME_MAX_BYTES)
        assert isinstance(accepted, Accepted)
        return accepted.exceptions[0].code if accepted.exceptions else ""

    def download(self, stage: Stage, token: str = "", query: str = "") -> httpx.Response:
        return stage.post(f"{self.path}/download{query}", {"job_id": self.sha256}, token)


@pytest.mark.parametrize("size_bytes", [100_000, PART_BYTES + 100_000])
def test_what_was_sent_to_the_bucket_is_an_input_like_any_other(stage: Stage, size_bytes: int) -> None:
    # given: a blob that no server has carried
    blob = Blob(size_bytes)
    blob.bring(stage)

    # when: a job names it
    assert not blob.submit(stage)

    # then: it is read from the bucket and through the server alike
    link = blob.download(stage).json()["link"]
    assert link["size_bytes"] == len(blob.data)
    assert httpx.get(link["url"]).content == blob.data
    assert stage.get(f"{blob.path}?job_id={blob.sha256}").content == blob.data
    assert blob.upload(stage) == {"have": True}


def test_a_job_cannot_name_what_was_sent_and_not_committed(stage: Stage) -> None:
    blob = Blob(100_000)
    blob.send(blob.upload(stage)["links"])

    assert blob.submit(stage) == "NOT_FOUND"
    assert blob.upload(stage) == {"direct": True}
    assert blob.commit(stage).json() == {"stored": True}


def test_nothing_can_be_committed_that_was_not_sent(stage: Stage) -> None:
    blob = Blob(100_000)
    blob.upload(stage)

    answer = blob.commit(stage)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "UNAVAILABLE")
    assert blob.submit(stage) == "NOT_FOUND"


def test_other_bytes_are_refused_and_not_recorded(stage: Stage) -> None:
    blob = Blob(PART_BYTES + 100_000)
    for link in blob.upload(stage)["links"]:
        assert httpx.put(link["url"], content=bytes(link["size_bytes"])).status_code == 200

    answer = blob.commit(stage)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "CORRUPT")
    assert blob.submit(stage) == "NOT_FOUND"
    blob.bring(stage)


def test_an_upload_goes_on_where_it_was_for_its_owner_alone(stage: Stage) -> None:
    blob = Blob(PART_BYTES + 100_000)
    blob.send(blob.upload(stage)["links"][:1])

    mine, theirs = blob.upload(stage), blob.upload(stage, stage.create_token("client"))

    assert [link["offset"] for link in mine["links"]] == [PART_BYTES]
    assert theirs["missing_bytes"] == len(blob.data)


def test_a_commit_that_takes_long_is_asked_for_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = Blob(PART_BYTES + 100_000)
    blob.send(blob.upload(stage)["links"])
    with monkeypatch.context() as patch:
        patch.setattr(blobs, "COMMIT_WAIT_S", 0.0)
        first = blob.commit(stage).json()

    again = blob.commit(stage).json()

    assert (first, again) == ({"stored": False}, {"stored": True})


def test_links_to_read_are_for_those_who_may_read(stage: Stage) -> None:
    blob = Blob(100_000)
    blob.bring(stage)
    blob.submit(stage)
    tokens = {"owner": stage.client, "admin": stage.admin}
    tokens["in scope"] = stage.create_token("client", scope=["direct.>"])
    tokens["stranger"] = stage.create_token("client")
    tokens["out of scope"] = stage.create_token("client", scope=["other.>"])

    statuses = {who: blob.download(stage, token).status_code for who, token in tokens.items()}

    assert statuses == {"owner": 200, "admin": 200, "in scope": 200, "stranger": 404, "out of scope": 404}


def test_a_worker_is_given_the_inputs_of_the_job_that_it_holds_and_no_other(stage: Stage) -> None:
    held, other = Blob(100_000), Blob(100_000)
    for blob, subject in ((held, "held.job"), (other, "other.job")):
        blob.bring(stage)
        assert not blob.submit(stage, subject)
    token = stage.create_token("worker")
    connection = stage.run(_lease(stage, token, "held.job"))
    query = "?worker_id=w-held&incarnation=i-1"

    answers = [blob.download(stage, token, query).status_code for blob in (held, other)]
    elsewhere = held.download(stage, token, "?worker_id=w-held&incarnation=i-2").status_code
    stage.run(_leave(connection))

    assert (answers, elsewhere) == ([200, 404], 404)


async def _lease(stage: Stage, token: str, subject: str) -> VirtualConnection:
    """A worker that takes one job of that subject."""
    assigned = asyncio.Event()

    def hear(message: Message) -> None:
        if isinstance(message, AssignJobs):
            assigned.set()

    connection = VirtualConnection(stage.server, "test", hear)
    await connection.ask(
        HelloWorker(msg_id=connection.next_id(), worker_id="w-held", incarnation="i-1", token=token, patterns=(subject,))
    )
    connection.tell(GiveCredit(1))
    async with asyncio.timeout(10):
        await assigned.wait()
    return connection


async def _leave(connection: VirtualConnection) -> None:
    connection.leave()


def test_a_server_that_gives_no_links_says_so(without: Stage) -> None:
    blob = Blob(100_000)

    assert without.post(f"{blob.path}/upload", blob.offer).json() == {}
    assert without.post(f"{blob.path}/download", {"job_id": "any"}).json() == {}
    assert blob.commit(without).status_code == 400


@pytest.mark.parametrize("what", ["upload", "download", "commit"])
def test_a_name_that_is_no_sha256_is_refused(stage: Stage, what: str) -> None:
    body = {"job_id": "any"} if what == "download" else {"size_bytes": 5}

    answer = stage.post(f"/v1/blobs/nonsense/{what}", body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_PAYLOAD")


def test_no_link_is_ever_logged(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tasuki")
    caplog.set_level(logging.DEBUG, "uvicorn")
    blob = Blob(100_000)
    blob.bring(stage)
    blob.submit(stage)
    url = blob.download(stage).json()["link"]["url"]
    signature = url.partition("X-Amz-Signature=")[2]

    assert len(signature) == 64
    assert signature not in caplog.text
