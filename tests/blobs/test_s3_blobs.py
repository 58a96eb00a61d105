"""Blobs in S3: addresses, clear refusals, outages in mid-transfer, what abandoned uploads leave, bounded memory."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tasuki.blobs.s3 import requests
from tasuki.blobs.s3 import store as s3_store
from tasuki.blobs.s3.requests import S3Address, parse_s3_url
from tasuki.blobs.s3.store import PROBE, S3Blobs
from tasuki.errors import ConfigError, InvalidInput, NotFound, Unavailable
from tests.support.s3_service import BUCKET, READER_KEY_ID, SECRET, S3Service
from tests.support.waiting import until

MIB = 1024 * 1024
PART_BYTES = 5 * MIB  # the least that a bucket accepts: bytes cost time
LARGE = bytes(range(256)) * (5 * PART_BYTES // 512)  # two parts and a half
LARGE_SHA256 = hashlib.sha256(LARGE).hexdigest()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_store, "PART_BYTES", PART_BYTES)


@pytest.fixture
def blobs(s3_url: str) -> Iterator[S3Blobs]:
    store = S3Blobs(s3_url, max_blob_bytes=2**30)
    yield store
    store.close()


@pytest.fixture
def own_s3(s3_url: str, s3: S3Service) -> Iterator[S3Service]:
    """The shared server, running again when the test is over."""
    yield s3
    if not s3.running:
        s3.start()


def keys_under(s3: S3Service, blobs: S3Blobs) -> list[str]:
    found = s3.client().list_objects_v2(Bucket=BUCKET, Prefix=blobs.address.prefix)
    return [entry["Key"].removeprefix(blobs.address.prefix) for entry in found.get("Contents", ())]


def uploads_under(s3: S3Service, blobs: S3Blobs) -> list[str]:
    found = s3.client().list_multipart_uploads(Bucket=BUCKET, Prefix=blobs.address.prefix)
    return [entry["Key"].removeprefix(blobs.address.prefix) for entry in found.get("Uploads", ())]


def write_large(blobs: S3Blobs, *, before_commit: Callable[[], None] = lambda: None) -> None:
    with blobs.begin(LARGE_SHA256, len(LARGE)) as writer:
        for start in range(0, len(LARGE), MIB):
            writer.write(LARGE[start : start + MIB])
        before_commit()
        writer.commit()


# Addresses


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("s3://bucket", S3Address("bucket", "", None, None)),
        ("s3://bucket/", S3Address("bucket", "", None, None)),
        ("s3://bucket/a/b/", S3Address("bucket", "a/b/", None, None)),
        (
            "s3://bucket/a?endpoint=https://h:9000&region=eu-1",
            S3Address("bucket", "a/", "https://h:9000", "eu-1"),
        ),
    ],
)
def test_an_address_is_a_bucket_a_prefix_and_where(url: str, address: S3Address) -> None:
    assert parse_s3_url(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hidden@bucket/a",
        "s3://bucket/a?endpoint=https://key:hidden@host",
        "s3://bucket/a?secret=hidden",
        "s3://bucket/a?aws_secret_access_key=hidden",
    ],
)
def test_credentials_in_an_address_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_s3_url(url)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://", "s3:///prefix", "http://bucket/a", "s3://b/a?endpoint=host:9000", "s3://b?endpoint="])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        parse_s3_url(url)


def test_blobs_lie_below_the_prefix_by_hash_and_generation(blobs: S3Blobs, s3: S3Service) -> None:
    sha256 = blobs.put_bytes(b"data").sha256
    blobs.put_bytes(b"data", generation=3)
    assert sorted(keys_under(s3, blobs)) == [f"{sha256[:2]}/{sha256}", f"{sha256[:2]}/{sha256}.3"]


# Start-up, and what cannot work


def test_the_check_leaves_nothing_behind(blobs: S3Blobs, s3: S3Service) -> None:
    blobs.check()
    assert PROBE not in keys_under(s3, blobs)


def test_a_bucket_that_is_not_there_is_named(s3: S3Service, s3_url: str) -> None:
    with pytest.raises(ConfigError, match=r"'no-such-bucket' at http://127\.0\.0\.1:\d+.*create the bucket"):
        S3Blobs(s3.url(bucket="no-such-bucket"), max_blob_bytes=MIB).check()


@pytest.mark.parametrize(
    ("name", "way_out"),
    [("AWS_ACCESS_KEY_ID", "check AWS_ACCESS_KEY_ID"), ("AWS_SECRET_ACCESS_KEY", "check AWS_SECRET_ACCESS_KEY")],
)
def test_wrong_credentials_are_refused_at_once(s3_url: str, monkeypatch: pytest.MonkeyPatch, name: str, way_out: str) -> None:
    monkeypatch.setenv(name, "wrong")
    with pytest.raises(ConfigError, match=rf"{BUCKET!r} at .*{way_out}") as caught:
        S3Blobs(s3_url, max_blob_bytes=MIB).check()
    assert SECRET not in str(caught.value)


def test_credentials_that_may_only_read_are_found_out_at_the_start(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_KEY_ID)
    with pytest.raises(ConfigError, match=rf"{BUCKET!r} at .*AccessDenied.*give these credentials the right"):
        S3Blobs(s3_url, max_blob_bytes=MIB).check()


def test_an_endpoint_that_is_no_s3_server_is_named(s3: S3Service, s3_url: str) -> None:
    master = f"http://127.0.0.1:{s3._ports['master']}"
    with pytest.raises(ConfigError, match=rf"{master}.*check the endpoint"):
        S3Blobs(s3.url(endpoint=master), max_blob_bytes=MIB).check()


def test_https_to_a_server_without_it_is_named(s3: S3Service, s3_url: str) -> None:
    with pytest.raises(ConfigError, match="http or https"):
        S3Blobs(s3.url(endpoint=s3.endpoint.replace("http:", "https:")), max_blob_bytes=MIB).check()


def test_a_server_that_is_away_is_unavailable_when_time_is_up(s3: S3Service, s3_url: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        blobs = S3Blobs(s3.url(endpoint=endpoint), max_blob_bytes=MIB, retry_s=0.5)
        before = time.monotonic()
        with pytest.raises(Unavailable, match=rf"{BUCKET!r} at {endpoint}"):
            blobs.put_bytes(b"data")
    assert 0.4 < time.monotonic() - before < 10


def test_more_than_a_part_without_an_announced_hash_is_refused(blobs: S3Blobs, s3: S3Service) -> None:
    with blobs.begin() as writer:
        writer.write(b"x" * PART_BYTES)
        with pytest.raises(InvalidInput, match="announce"):
            writer.write(b"x")
    assert uploads_under(s3, blobs) == []


# Uploads


def test_a_large_blob_goes_in_parts_and_is_seen_only_when_it_is_whole(blobs: S3Blobs, s3: S3Service) -> None:
    seen: list[object] = []
    write_large(blobs, before_commit=lambda: seen.extend([uploads_under(s3, blobs), blobs.has(LARGE_SHA256)]))
    assert seen == [[f"{LARGE_SHA256[:2]}/{LARGE_SHA256}"], False]
    assert blobs.read_bytes(LARGE_SHA256, len(LARGE)) == LARGE
    assert uploads_under(s3, blobs) == []


def test_an_aborted_upload_leaves_nothing(blobs: S3Blobs, s3: S3Service) -> None:
    with blobs.begin(LARGE_SHA256, len(LARGE)) as writer:
        writer.write(LARGE[: PART_BYTES + 1])
        assert len(uploads_under(s3, blobs)) == 1
    assert uploads_under(s3, blobs) == []
    assert keys_under(s3, blobs) == []


def test_deleting_ends_the_uploads_that_were_abandoned_of_this_generation_only(blobs: S3Blobs, s3: S3Service) -> None:
    writers = [blobs.begin(LARGE_SHA256, len(LARGE), generation) for generation in (0, 0, 7)]
    for writer in writers:
        writer.write(LARGE[: PART_BYTES + 1])
    assert blobs.delete(LARGE_SHA256) is False
    assert uploads_under(s3, blobs) == [f"{LARGE_SHA256[:2]}/{LARGE_SHA256}.7"]
    writers[0].write(LARGE[PART_BYTES + 1 : 2 * PART_BYTES])
    with pytest.raises(Unavailable, match="send the blob again"):
        writers[0].write(LARGE[2 * PART_BYTES :])
    writers[2].abort()


def test_an_upload_needs_memory_for_two_parts_at_most(blobs: S3Blobs) -> None:
    tracemalloc.start()
    try:
        write_large(blobs)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2.5 * PART_BYTES


# Outages


def tries_failed(caplog: pytest.LogCaptureFixture) -> int:
    return sum("trying again" in record.message for record in caplog.records)


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    threads = ThreadPoolExecutor(1)
    future = threads.submit(work)
    threads.shutdown(wait=False)
    return future


def test_an_upload_waits_for_a_server_that_was_killed_and_finishes(
    blobs: S3Blobs, own_s3: S3Service, caplog: pytest.LogCaptureFixture
) -> None:
    with blobs.begin(LARGE_SHA256, len(LARGE)) as writer:
        writer.write(LARGE[: PART_BYTES + MIB])
        own_s3.kill()
        rest = in_thread(lambda: writer.write(LARGE[PART_BYTES + MIB :]))
        until(lambda: tries_failed(caplog) >= 5, 30, "the upload has knocked five times")
        assert not rest.done()
        own_s3.start()
        rest.result(60)
        writer.commit()
    assert blobs.read_bytes(LARGE_SHA256, len(LARGE)) == LARGE


def test_a_read_goes_on_where_it_was_cut_off(blobs: S3Blobs, own_s3: S3Service, caplog: pytest.LogCaptureFixture) -> None:
    data = LARGE * 2  # more than the sockets on the way hold
    with blobs.begin(hashlib.sha256(data).hexdigest(), len(data)) as writer:
        writer.write(data)
        ref = writer.commit()
    with blobs.open(ref) as reader:
        chunks = iter(reader)
        first = next(chunks)
        own_s3.kill()
        rest = in_thread(lambda: b"".join(chunks))
        until(lambda: tries_failed(caplog) >= 2, 30, "the read has knocked twice")
        own_s3.start()
        assert first + rest.result(60) == data


def test_closing_ends_those_who_wait(blobs: S3Blobs, own_s3: S3Service, caplog: pytest.LogCaptureFixture) -> None:
    own_s3.kill()
    waiting = [in_thread(lambda: blobs.put_bytes(b"data")) for _ in range(3)]
    until(lambda: tries_failed(caplog) >= 12, 30, "they have knocked for a while")
    before = time.monotonic()
    blobs.close()
    for future in waiting:
        with pytest.raises(Unavailable, match="going down"):
            future.result(30)
    assert time.monotonic() - before < 1.0


def test_a_server_that_is_overloaded_is_asked_again(blobs: S3Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """SlowDown and 5xx, told by a server in front of the real one."""
    refusals = [b"HTTP/1.1 503 Slow Down", b"HTTP/1.1 500 Internal Server Error", b"HTTP/1.1 429 Too Many Requests"]
    with socket.create_server(("127.0.0.1", 0)) as door:
        endpoint = f"http://127.0.0.1:{door.getsockname()[1]}"
        away = S3Blobs(f"s3://{BUCKET}/x?endpoint={endpoint}", max_blob_bytes=MIB, retry_s=30)
        heard: list[bytes] = []

        def answer() -> None:
            for line in [*refusals, b"HTTP/1.1 200 OK"]:
                connection, _ = door.accept()
                with connection:
                    heard.append(connection.recv(65536))
                    connection.sendall(line + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        server = threading.Thread(target=answer)
        server.start()
        away.put_bytes(b"")
        server.join(10)
    assert len(heard) == 4
    assert all(request.startswith(b"PUT /" + BUCKET.encode()) for request in heard)


def test_a_missing_blob_is_not_waited_for(blobs: S3Blobs) -> None:
    before = time.monotonic()
    with pytest.raises(NotFound):
        blobs.open("0" * 64)
    assert time.monotonic() - before < requests.CONNECT_TIMEOUT_S
