"""Large blobs straight to and from a bucket: a real server, a real bucket, and between us and the bucket a line that can fail."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import io
import itertools
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasuki.blobs.s3 import presign
from tasuki.blobs.s3.presign import LINK_S, S3Presign
from tasuki.blobs.s3.requests import S3Address, S3Requests
from tasuki.core.address import Address
from tasuki.core.job import BlobRef, InputFile, JobSpec
from tasuki.core.presigned import BlobDownload, BlobLink
from tasuki.core.protocol import SubmitJobs
from tasuki.errors import Corrupt, NotFound
from tasuki.net.blob_transfer import BlobClient
from tasuki.net.http import blobs
from tasuki.net.http.blobs import BucketUnusable, HttpBlobs, PresignedBlobs, _trusting
from tasuki.net.http.transport import HttpTransport
from tasuki.server.assembly import open_presigned
from tasuki.wire.messages import encode
from tests.doors.http.stage import Stage
from tests.net.counting_relay import Relay
from tests.support.certificates import TestAuthority
from tests.support.s3_service import BUCKET, S3Service

PART_BYTES = 5 * 1024 * 1024
SMALL_BYTES, LARGE_BYTES = 300_000, 2 * PART_BYTES + 1000
OVERHEAD = 1.05  # headers, and what the system had in its buffers
DEADLINE_S = 20.0

numbers = itertools.count()


@pytest.fixture(scope="module")
def relay(s3: S3Service) -> Iterator[Relay]:
    with Relay(s3.endpoint) as relay:
        yield relay


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, s3: S3Service, relay: Relay) -> Iterator[Stage]:
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in s3.environment.items():
            patch.setenv(variable, value)
        patch.setattr(presign, "PART_BYTES", PART_BYTES)
        patch.setattr(presign, "WHOLE_MAX_BYTES", 1024 * 1024)
        patch.setattr(blobs, "DIRECT_MIN_BYTES", SMALL_BYTES)
        patch.setattr(blobs, "PARTS_AT_ONCE", 1)
        url = s3.url()
        direct = open_presigned(url, relay.endpoint)
        with Stage(tmp_path_factory.mktemp("direct"), blobs=url, presigned=direct) as stage:
            stage.run(direct.check())
            yield stage
        direct.close()


class Peer:
    """A client with a connection of its own."""

    def __init__(self, stage: Stage) -> None:
        self.transport = HttpTransport(Address("http", "127.0.0.1", stage.address.port), None, 5.0)
        self.transport.token = stage.client
        self.blobs = HttpBlobs(self.transport)
        self.line = BlobClient()
        self.line.carried_by(self.blobs)

    async def put(self, blob: Blob, progress: Callable[[int], None] | None = None) -> None:
        await self.line.put(io.BytesIO(blob.data), blob.ref, progress)

    async def get(self, blob: Blob) -> bytes:
        found = bytearray()
        await self.line.get(blob.ref, blob.ref.sha256, found.extend)
        return bytes(found)


class Blob:
    """Bytes that no other test has."""

    def __init__(self, size_bytes: int) -> None:
        self.data = (f"{next(numbers):032}".encode() * (size_bytes // 32 + 1))[:size_bytes]
        self.ref = BlobRef(hashlib.sha256(self.data).hexdigest(), size_bytes)

    def submit(self, stage: Stage) -> None:
        """A job with this input, whose id is the blob's."""
        file = InputFile("in.bin", sha256=self.ref.sha256, size_bytes=self.ref.size_bytes)
        spec = JobSpec(job_id=self.ref.sha256, subject="direct.here", files=(file,))
        assert stage.call("POST", "/v1/frames", stage.client, content=encode(SubmitJobs(1, [spec]))).status_code == 200


def run(stage: Stage, relay: Relay, test: Callable[[Peer], Awaitable[None]]) -> None:
    async def main() -> None:
        peer = Peer(stage)
        relay.reset()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test(peer)
        finally:
            await peer.transport.close()

    asyncio.run(main())


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tasuki.blobs" and record.levelname == "WARNING"]


def sign_for(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's links lead there now."""
    signer = S3Requests(S3Address(BUCKET, "", endpoint, None))
    presigned = signer.presigned
    monkeypatch.setattr(S3Requests, "presigned", lambda self, *args, **rest: presigned(*args, **rest))


@pytest.mark.parametrize("size_bytes", [SMALL_BYTES, LARGE_BYTES])
def test_the_bytes_go_straight_to_the_bucket_and_back(stage: Stage, relay: Relay, size_bytes: int) -> None:
    async def test(peer: Peer) -> None:
        blob, told = Blob(size_bytes), list[int]()
        await peer.put(blob, told.append)
        blob.submit(stage)
        assert await peer.get(blob) == blob.data
        assert told[-1] == size_bytes
        for carried in (relay.sent_bytes, relay.received_bytes):
            assert size_bytes <= carried <= OVERHEAD * size_bytes

    run(stage, relay, test)


def test_a_blob_that_is_there_is_not_sent(stage: Stage, relay: Relay) -> None:
    async def test(peer: Peer) -> None:
        blob = Blob(SMALL_BYTES)
        await peer.put(blob)
        relay.reset()
        await peer.put(blob)
        assert relay.sent_bytes == 0

    run(stage, relay, test)


def test_small_blobs_go_through_the_server(stage: Stage, relay: Relay) -> None:
    async def test(peer: Peer) -> None:
        blob = Blob(SMALL_BYTES - 1)
        await peer.put(blob)
        blob.submit(stage)
        assert await peer.get(blob) == blob.data
        assert (relay.sent_bytes, relay.received_bytes) == (0, 0)

    run(stage, relay, test)


def test_a_sender_that_was_killed_in_the_middle_goes_on_with_what_is_missing(stage: Stage, relay: Relay) -> None:
    async def test(peer: Peer) -> None:
        # given: a process that has sent two parts of three, and is no more
        blob = Blob(LARGE_BYTES)

        def die_at_the_second(sent_bytes: int) -> None:
            if sent_bytes == 2 * PART_BYTES:
                raise KeyError("killed")

        with pytest.raises(KeyError):
            await peer.put(blob, die_at_the_second)

        # when: another one sends the same
        again = Peer(stage)
        await again.put(blob)
        await again.transport.close()

        # then: both together have sent it once
        assert relay.sent_bytes <= OVERHEAD * LARGE_BYTES

    run(stage, relay, test)


def test_a_download_that_is_cut_goes_on_where_it_was(stage: Stage, relay: Relay) -> None:
    async def test(peer: Peer) -> None:
        blob = Blob(LARGE_BYTES)
        await peer.put(blob)
        blob.submit(stage)
        relay.reset()
        relay.cut_after_bytes = PART_BYTES
        assert await peer.get(blob) == blob.data
        assert relay.cut_after_bytes is None
        assert LARGE_BYTES <= relay.received_bytes <= OVERHEAD * LARGE_BYTES

    run(stage, relay, test)


def test_a_link_that_has_ended_is_asked_for_anew(
    stage: Stage, relay: Relay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = itertools.count()
    download = S3Presign.download
    long_ago = datetime.datetime.now(datetime.UTC).replace(tzinfo=None) - datetime.timedelta(seconds=LINK_S + 5)

    def first_too_old(self: S3Presign, *args: Any) -> Any:
        with monkeypatch.context() as patch:
            if not next(made):
                patch.setattr("botocore.auth.get_current_datetime", lambda remove_tzinfo=True: long_ago)
            return download(self, *args)

    async def test(peer: Peer) -> None:
        blob = Blob(SMALL_BYTES)
        await peer.put(blob)
        blob.submit(stage)
        relay.reset()
        monkeypatch.setattr(S3Presign, "download", first_too_old)
        assert await peer.get(blob) == blob.data
        assert relay.received_bytes > SMALL_BYTES
        assert next(made) == 2

    run(stage, relay, test)
    assert not warnings(caplog)


def test_where_the_bucket_cannot_be_reached_blobs_go_through_the_server(
    stage: Stage, relay: Relay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sign_for("http://127.0.0.1:1", monkeypatch)  # nobody listens there

    async def test(peer: Peer) -> None:
        for blob in (Blob(SMALL_BYTES), Blob(LARGE_BYTES)):
            await peer.put(blob)
            blob.submit(stage)
            assert await peer.get(blob) == blob.data
        assert (relay.sent_bytes, relay.received_bytes) == (0, 0)

    run(stage, relay, test)
    [told] = warnings(caplog)
    assert "127.0.0.1:1 cannot be reached" in told
    assert "Signature" not in told


def test_the_proxy_of_the_environment_leads_to_the_bucket(stage: Stage, relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    # given: a bucket whose name only the proxy knows
    sign_for("http://bucket.invalid:9000", monkeypatch)
    monkeypatch.setenv("HTTP_PROXY", relay.endpoint)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    async def test(peer: Peer) -> None:
        blob = Blob(SMALL_BYTES)
        await peer.put(blob)
        blob.submit(stage)
        assert await peer.get(blob) == blob.data
        assert min(relay.sent_bytes, relay.received_bytes) > SMALL_BYTES

    run(stage, relay, test)


def test_a_bucket_that_refuses_every_link_is_left_alone(
    stage: Stage, relay: Relay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    presigned = S3Requests.presigned
    monkeypatch.setattr(S3Requests, "presigned", lambda self, *args, **rest: presigned(self, *args, **rest) + "0")

    async def test(peer: Peer) -> None:
        blob = Blob(SMALL_BYTES)
        await peer.put(blob)
        blob.submit(stage)
        assert await peer.get(blob) == blob.data

    run(stage, relay, test)
    [told] = warnings(caplog)
    assert "answered 403" in told


def test_bytes_that_the_bucket_has_changed_are_not_taken(stage: Stage, relay: Relay, s3: S3Service) -> None:
    async def test(peer: Peer) -> None:
        blob = Blob(SMALL_BYTES)
        await peer.put(blob)
        blob.submit(stage)
        listed = s3.client().list_objects_v2(Bucket=BUCKET)["Contents"]
        [key] = [entry["Key"] for entry in listed if blob.ref.sha256 in entry["Key"]]
        s3.client().put_object(Bucket=BUCKET, Key=key, Body=bytes(SMALL_BYTES))
        with pytest.raises(Corrupt):
            await peer.get(blob)

    run(stage, relay, test)


def test_a_file_that_changes_while_it_is_sent_is_not_kept(stage: Stage, relay: Relay) -> None:
    async def test(peer: Peer) -> None:
        blob = Blob(LARGE_BYTES)
        with pytest.raises(Corrupt):
            await peer.line.put(io.BytesIO(blob.data[:-1]), blob.ref)
        with pytest.raises(Corrupt):
            await peer.line.put(io.BytesIO(bytes(LARGE_BYTES)), blob.ref)

    run(stage, relay, test)


def test_what_may_not_be_read_is_refused_in_the_servers_words(stage: Stage, relay: Relay) -> None:
    async def test(peer: Peer) -> None:
        with pytest.raises(NotFound, match="that you may read"):
            await peer.get(Blob(SMALL_BYTES))

    run(stage, relay, test)


def test_no_link_and_no_token_of_ours_is_told_to_anybody_else(
    stage: Stage, relay: Relay, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    stream = blobs.httpx.AsyncClient.stream

    def noted(self: Any, method: str, url: str, **options: Any) -> Any:
        asked.append((url, options["headers"]))
        return stream(self, method, url, **options)

    monkeypatch.setattr(blobs.httpx.AsyncClient, "stream", noted)
    caplog.set_level(logging.INFO)

    async def test(peer: Peer) -> None:
        blob = Blob(SMALL_BYTES)
        await peer.put(blob)
        blob.submit(stage)
        await peer.get(blob)

    run(stage, relay, test)
    to_the_bucket = [headers for url, headers in asked if url.startswith(relay.endpoint)]
    assert len(to_the_bucket) == 2
    assert not [headers for headers in to_the_bucket if "Authorization" in headers or stage.client in str(headers)]
    assert "/v1/blobs/" in caplog.text
    assert "X-Amz-Signature" not in caplog.text


# ---------------------------------------------------------------------------------------------------- TLS


def test_a_bucket_in_the_clear_behind_a_server_with_tls_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def link(self: PresignedBlobs, path: str, body: Any, kind: Any) -> BlobDownload:
        return BlobDownload(BlobLink("http://127.0.0.1:1/bucket/key?X-Amz-Signature=0", 900, 0, LARGE_BYTES))

    monkeypatch.setattr(PresignedBlobs, "_ask", link)

    async def main() -> None:
        transport = HttpTransport(Address("https", "127.0.0.1", 1), None, 1.0)
        direct = PresignedBlobs(transport, dict)
        with pytest.raises(BucketUnusable):
            await anext(direct.pieces(BlobRef("0" * 64, LARGE_BYTES), "job", 0))
        assert not direct.wanted(BlobRef("0" * 64, 2**30))
        await transport.close()

    asyncio.run(main())


def test_the_ca_that_was_given_is_trusted_beside_the_systems(tmp_path: Path) -> None:
    given = TestAuthority(tmp_path).trusted()

    trusted = _trusting(given).get_ca_certs(binary_form=True)

    assert given.get_ca_certs(binary_form=True)[0] in trusted
    assert set(ssl.create_default_context().get_ca_certs(binary_form=True)) <= set(trusted)
