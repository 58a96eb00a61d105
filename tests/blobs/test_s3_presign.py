"""Presigned urls: what their holder can do with them, and what not; uploads in parts go on, are verified, and leave nothing."""

from __future__ import annotations

import base64
import datetime
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import Mock

import httpx
import pytest
from botocore.exceptions import ClientError

from tasuki.blobs.s3 import presign as presign_module
from tasuki.blobs.s3.presign import LINK_S, S3Presign, UploadPlan
from tasuki.blobs.s3.store import PROBE, S3Blobs
from tasuki.core.job import BlobRef
from tasuki.core.presigned import BlobLink
from tasuki.errors import Corrupt, TooLarge, Unavailable
from tests.support.s3_service import BUCKET, S3Service

SMALL = b"abcd" * 20_000
PART_BYTES = 5 * 1024 * 1024  # the least that a bucket takes
LARGE = bytes(range(256)) * (PART_BYTES // 256 + 400)  # a part and a bit
OTHER = bytes(len(LARGE))
ME, SOMEBODY_ELSE = "me0", "you0"

generations = itertools.count(7)


def name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def environment(s3: S3Service) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in s3.environment.items():
            patch.setenv(variable, value)
        patch.setattr(presign_module, "WHOLE_MAX_BYTES", 200 * 1024)
        patch.setattr(presign_module, "PART_BYTES", PART_BYTES)
        yield patch


@pytest.fixture(scope="module")
def url(s3: S3Service) -> str:
    return s3.url()


@pytest.fixture(scope="module")
def blobs(environment: pytest.MonkeyPatch, url: str) -> Iterator[S3Blobs]:
    store = S3Blobs(url, max_blob_bytes=2**30)
    yield store
    store.close()


@pytest.fixture(scope="module")
def presign(environment: pytest.MonkeyPatch, url: str) -> Iterator[S3Presign]:
    """Blobs of more than 200 KiB go in parts."""
    found = S3Presign(url, max_blob_bytes=2**30)
    found.check()
    yield found
    found.close()


@pytest.fixture
def generation() -> int:
    """All tests share two blobs and a prefix; each has a place of its own for them."""
    return next(generations)


@pytest.fixture
def bench(presign: S3Presign, blobs: S3Blobs, s3: S3Service, generation: int) -> Bench:
    return Bench(presign, blobs, s3, generation)


class Bench(NamedTuple):
    """One test's place in the bucket."""

    presign: S3Presign
    blobs: S3Blobs
    s3: S3Service
    generation: int

    def way(self, data: bytes, owner: str = ME) -> UploadPlan:
        return self.presign.upload(name(data), len(data), self.generation, owner)

    def take(self, data: bytes, owner: str = ME) -> None:
        self.presign.take(name(data), len(data), self.generation, owner)

    def die_while_taking(self, data: bytes, owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Behind the moment when all parts were put together."""
        with monkeypatch.context() as patch:
            patch.setattr(S3Presign, "_verify", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                self.take(data, owner)

    def put(self, data: bytes) -> BlobRef:
        with self.blobs.begin(name(data), len(data), self.generation) as writer:
            writer.write(data)
            return writer.commit()

    def link_to(self, ref: BlobRef) -> BlobLink:
        return self.presign.download(ref.sha256, ref.size_bytes, self.generation)

    def has(self, data: bytes) -> bool:
        return self.blobs.has(name(data), self.generation)

    def read(self, data: bytes) -> bytes:
        return self.blobs.read_bytes(name(data), len(data), self.generation)

    def keys(self) -> list[str]:
        found = self.s3.client().list_objects_v2(Bucket=BUCKET, Prefix=self._prefix).get("Contents", ())
        return [entry["Key"] for entry in found]

    def uploads(self) -> list[str]:
        found = self.s3.client().list_multipart_uploads(Bucket=BUCKET, Prefix=self._prefix).get("Uploads", ())
        return [entry["Key"] for entry in found]

    @property
    def _prefix(self) -> str:
        return self.blobs.address.key(name(LARGE), self.generation)


def send(link: BlobLink, data: bytes, **headers: str) -> int:
    return httpx.put(link.url, content=data, headers={**link.headers, **headers}, timeout=20.0).status_code


def part(link: BlobLink, data: bytes) -> bytes:
    return data[link.offset : link.offset + link.size_bytes]


def send_all(links: tuple[BlobLink, ...], data: bytes) -> None:
    assert [send(link, part(link, data)) for link in links] == [200] * len(links)


# ---------------------------------------------------------------------------------------------------- download


def test_a_link_reads_one_blob_from_any_byte_on(bench: Bench) -> None:
    link = bench.link_to(bench.put(SMALL))

    assert httpx.get(link.url).content == SMALL
    assert httpx.get(link.url, headers={"Range": "bytes=100-"}).content == SMALL[100:]


def test_a_link_to_read_neither_writes_nor_deletes_nor_opens_another_blob(bench: Bench) -> None:
    ref, other = bench.put(SMALL), bench.put(b"other")
    url = bench.link_to(ref).url

    refused = [httpx.put(url, content=b"x"), httpx.delete(url), httpx.get(url.replace(ref.sha256, other.sha256))]

    assert [answer.status_code for answer in refused] == [403, 403, 403]
    assert bench.read(SMALL) == SMALL


@pytest.mark.parametrize(("age_s", "status"), [(0.9 * LINK_S, 200), (LINK_S + 5, 403)])
def test_a_link_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch, age_s: float, status: int) -> None:
    ref = bench.put(SMALL)
    made_at = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age_s)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda remove_tzinfo=True: made_at.replace(tzinfo=None))

    assert httpx.get(bench.link_to(ref).url).status_code == status


def test_a_link_does_not_show_its_url_when_it_is_printed(bench: Bench) -> None:
    link = bench.presign.download(name(SMALL), 1, 0)

    assert "X-Amz-Signature" in link.url
    assert "http" not in repr(link)


def test_links_name_the_endpoint_that_peers_know(environment: pytest.MonkeyPatch, url: str) -> None:
    presign = S3Presign(url, max_blob_bytes=1, endpoint="https://s3.example:9000")

    assert presign.download(name(SMALL), 1, 0).url.startswith(f"https://s3.example:9000/{BUCKET}/")


@pytest.mark.parametrize(
    ("url", "begins"),
    [
        ("s3://bucket/p?region=eu-central-1", "https://bucket.s3.eu-central-1.amazonaws.com/p/"),
        ("s3://buck.et/p?region=eu-central-1", "https://s3.eu-central-1.amazonaws.com/buck.et/p/"),
        ("s3://bucket/p?endpoint=https://minio.example:9000", "https://minio.example:9000/bucket/p/"),
    ],
)
def test_a_link_leads_to_the_region_of_the_bucket_without_a_redirect(
    environment: pytest.MonkeyPatch, url: str, begins: str
) -> None:
    assert S3Presign(url, max_blob_bytes=1).download(name(SMALL), 1, 0).url.startswith(begins)


# ---------------------------------------------------------------------------------------------------- upload in one piece


def test_the_holder_of_a_link_can_bring_that_blob_and_nothing_else(bench: Bench) -> None:
    # given: a link for one blob, to its own place
    [link] = bench.way(SMALL).links
    forged = bytes(len(SMALL))
    as_if_right = base64.b64encode(hashlib.sha256(forged).digest()).decode()

    # when: its holder sends other bytes with it, also as if they were right, and before and after the right ones
    tries = [
        send(link, forged),
        send(link, forged, **{"x-amz-checksum-sha256": as_if_right}),
        httpx.put(link.url, content=forged).status_code,
        send(link, forged, **{"x-amz-content-sha256": "UNSIGNED-PAYLOAD"}),
        send(link, SMALL + b"more"),
        send(link, SMALL),
        send(link, forged),
        send(link, b""),
    ]

    # then: the bucket takes the right ones only, and keeps them
    assert [status // 100 for status in tries] == [4, 4, 4, 4, 4, 2, 4, 4]
    assert bench.read(SMALL) == SMALL
    bench.take(SMALL)


def test_what_was_never_sent_cannot_be_taken(bench: Bench) -> None:
    bench.way(SMALL)

    with pytest.raises(Unavailable, match="send it again"):
        bench.take(SMALL)


def test_what_is_in_its_place_is_not_asked_for(bench: Bench) -> None:
    bench.put(SMALL)

    assert bench.way(SMALL) == UploadPlan((), 0)
    bench.take(SMALL)


def test_a_bucket_that_compares_nothing_gets_everything_in_parts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # given: a bucket that takes any bytes with any checksum
    monkeypatch.setattr("tasuki.blobs.s3.requests.S3Requests.refuses", lambda self, operation, retry_s, **arguments: False)
    bench.presign.check()

    try:
        [link] = bench.way(SMALL).links
    finally:
        monkeypatch.undo()
        bench.presign.check()

    assert "x-amz-checksum-sha256" not in link.headers
    assert "partNumber=1" in link.url


def test_the_check_leaves_nothing_behind(bench: Bench) -> None:
    with pytest.raises(ClientError, match="404"):
        bench.s3.client().head_object(Bucket=BUCKET, Key=bench.blobs.address.prefix + PROBE)


# ---------------------------------------------------------------------------------------------------- upload in parts


def test_parts_become_a_blob_only_when_they_are_taken(bench: Bench) -> None:
    found = bench.way(LARGE)
    assert (len(found.links), found.missing_bytes) == (2, len(LARGE))
    send_all(found.links, LARGE)
    assert not bench.has(LARGE)

    bench.take(LARGE)

    assert bench.read(LARGE) == LARGE
    assert (len(bench.keys()), bench.uploads()) == (1, [])


def test_parts_that_are_there_are_not_sent_again(bench: Bench) -> None:
    send_all(bench.way(LARGE).links[1:], LARGE)

    again = bench.way(LARGE)

    assert [link.offset for link in again.links] == [0]
    assert again.missing_bytes == PART_BYTES


def test_parts_that_are_missing_are_told_and_nothing_is_taken(bench: Bench) -> None:
    send_all(bench.way(LARGE).links[1:], LARGE)

    with pytest.raises(Unavailable, match="missing"):
        bench.take(LARGE)

    assert not bench.has(LARGE)


def test_other_bytes_in_parts_are_dropped_and_never_become_the_blob(bench: Bench) -> None:
    send_all(bench.way(LARGE).links, OTHER)

    with pytest.raises(Corrupt, match=name(LARGE)):
        bench.take(LARGE)

    assert bench.keys() == []
    assert bench.way(LARGE).missing_bytes == len(LARGE)


def test_a_link_to_a_part_takes_no_other_size(bench: Bench) -> None:
    link = bench.way(LARGE).links[1]

    assert send(link, part(link, LARGE) + b"more") == 403


def test_links_to_parts_end_when_the_blob_is_taken(bench: Bench) -> None:
    found = bench.way(LARGE)
    send_all(found.links, LARGE)
    bench.take(LARGE)

    late = [send(link, part(link, OTHER)) for link in found.links]

    assert late == [404, 404]
    assert bench.read(LARGE) == LARGE


def test_wrong_bytes_of_one_owner_do_not_touch_what_another_brings_meanwhile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given: somebody's wrong bytes for a blob are being verified
    send_all(bench.way(LARGE, SOMEBODY_ELSE).links, OTHER)
    verify = S3Presign._verify

    def slowly(self: S3Presign, *args: Any) -> None:
        # when: the right ones come, another way
        bench.put(LARGE)
        verify(self, *args)

    monkeypatch.setattr(S3Presign, "_verify", slowly)
    with pytest.raises(Corrupt):
        bench.take(LARGE, SOMEBODY_ELSE)

    # then: they stay
    assert bench.read(LARGE) == LARGE


def test_each_owner_has_an_upload_of_its_own(bench: Bench) -> None:
    send_all(bench.way(LARGE, SOMEBODY_ELSE).links[1:], LARGE)

    assert bench.way(LARGE).missing_bytes == len(LARGE)


def test_a_taker_that_was_killed_in_the_middle_is_gone_on_with(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # given: all parts were put together, and then the server died
    send_all(bench.way(LARGE).links, LARGE)
    bench.die_while_taking(LARGE, ME, monkeypatch)

    # when: its owner asks again
    assert bench.way(LARGE) == UploadPlan((), 0)
    bench.take(LARGE)
    bench.take(LARGE)

    # then: nothing had to be sent
    assert bench.has(LARGE)


def test_a_large_blob_is_copied_to_its_place_piece_by_piece(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presign_module, "COPY_BYTES", PART_BYTES)
    send_all(bench.way(LARGE).links, LARGE)

    bench.take(LARGE)

    assert bench.read(LARGE) == LARGE


def test_links_come_some_at_a_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presign_module, "LINKS_AT_ONCE", 1)

    found = bench.way(LARGE)

    assert (len(found.links), found.missing_bytes) == (1, len(LARGE))


def test_an_abandoned_upload_goes_with_its_blob(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # given: one owner stopped in the middle, another when its parts were together; an upload of another generation goes on
    send_all(bench.way(LARGE, SOMEBODY_ELSE).links, LARGE)
    bench.die_while_taking(LARGE, SOMEBODY_ELSE, monkeypatch)
    bench.way(LARGE)
    other = bench._replace(generation=10 * bench.generation)
    other.way(LARGE)
    assert (len(bench.keys()), len(bench.uploads())) == (1, 2)

    bench.blobs.delete(name(LARGE), bench.generation)

    assert bench.keys() == []
    assert bench.uploads() == other.uploads() != []


def test_a_blob_above_the_limit_gets_no_link(bench: Bench) -> None:
    with pytest.raises(TooLarge, match="limit"):
        bench.presign.upload(name(SMALL), 2**30 + 1, 0, ME)


def test_a_blob_of_another_size_is_refused(bench: Bench) -> None:
    bench.put(SMALL)

    with pytest.raises(Corrupt, match=str(len(SMALL))):
        bench.presign.upload(name(SMALL), len(SMALL) - 1, bench.generation, ME)
