"""Presigned URLs: a peer moves the bytes of a large blob straight to and from the bucket, without credentials for it.

Theory of operation. A URL is for one object, one method and some minutes. Its holder may use it as often as it likes until then,
so no use of it may do harm:

* *Download.* A URL to read one object. The peer compares the hash.
* *Upload, up to WHOLE_MAX_BYTES.* One PUT to the blob's own place. Its sha256 is part of the signature: the bucket refuses other
  bytes. The start of a server tests this (`check`); if the bucket does not refuse them, every upload goes in parts.
* *Upload, larger.* Parts of a multipart upload to a key beside the blob's place, made for this upload alone. S3 has no sha256 of
  a whole that came in parts, so at the end (`take`) the upload is completed, which ends all its URLs, read once, and if its hash
  is right, copied to its place inside the bucket. Parts that are there are not sent again.

So an object at a blob's place always has that blob's bytes, and nobody can disturb the upload of another peer: the keys of
unfinished uploads contain their owner. Abandoned uploads go with the blob's row (`S3Blobs.delete`). All methods block on I/O.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Any

import msgspec

from tasuki.blobs.s3.requests import S3Requests, parse_s3_url, s3_digest
from tasuki.blobs.s3.store import BESIDE, CHECK_RETRY_S, PART_BYTES, PROBE, S3Reader
from tasuki.core.job import check_sha256
from tasuki.core.presigned import BlobLink
from tasuki.errors import Corrupt, InvalidInput, NotFound, TooLarge, Unavailable

LINK_S = 900.0
WHOLE_LINK_S = 240.0  # a PUT to a blob's place: shorter than the shortest grace of unused blobs, so that none comes after its row
WHOLE_MAX_BYTES = 32 * 1024 * 1024  # a larger upload is worth resuming after a cut
LINKS_AT_ONCE = 32
COPY_BYTES = 256 * 1024 * 1024  # inside the bucket, by one request: a few seconds


class UploadPlan(msgspec.Struct, frozen=True):
    """The missing parts of an upload: the next URLs, and all missing bytes. Without URLs, `take` it."""

    links: tuple[BlobLink, ...]
    missing_bytes: int


class _MultipartUpload(msgspec.Struct, frozen=True):
    """An unfinished multipart upload."""

    key: str
    upload_id: str


class S3Presign:
    """Presigned URLs for the blobs in a bucket. `endpoint`: where peers reach it, if not where the server does."""

    def __init__(self, url: str, *, max_blob_bytes: int, endpoint: str | None = None, link_s: float = LINK_S) -> None:
        self._address = parse_s3_url(url)
        self._requests = S3Requests(self._address)
        self._signer = S3Requests(self._address._replace(endpoint=endpoint)) if endpoint else self._requests
        self._max_blob_bytes = max_blob_bytes
        self._link_s = link_s
        self._whole_max_bytes = 0

    def check(self) -> None:
        """Find out whether the bucket refuses bytes of another sha256 than the one that came with them."""
        key = self._address.prefix + PROBE
        refused = self._requests.refuses("put_object", CHECK_RETRY_S, Key=key, Body=b"1", ChecksumSHA256=s3_digest("0" * 64))
        self._whole_max_bytes = WHOLE_MAX_BYTES if refused else 0
        if not refused:
            self._requests.send("delete_object", Key=key)

    def close(self) -> None:
        """End calls that wait for a bucket that does not answer."""
        self._requests.close()
        self._signer.close()

    # ------------------------------------------------------------------------------------------------ downloads

    def download(self, sha256: str, size_bytes: int, generation: int) -> BlobLink:
        """Return a URL to read a stored blob. Its holder may read it for that long, whatever becomes of the job."""
        url = self._signer.presigned("get_object", self._link_s, Key=self._address.key(sha256, generation))
        return BlobLink(url, self._link_s, 0, size_bytes)

    # ------------------------------------------------------------------------------------------------ uploads

    def upload(self, sha256: str, size_bytes: int, generation: int, owner: str) -> UploadPlan:
        """Return how to upload this blob; for an upload under way, the parts that are still missing."""
        check_sha256(sha256)
        if size_bytes > self._max_blob_bytes:
            raise TooLarge(f"a blob of {size_bytes} bytes passes the limit of {self._max_blob_bytes}; split it")
        if size_bytes <= 0:
            raise InvalidInput(f"a blob of {size_bytes} bytes needs no link")
        if self._is_in_place(sha256, size_bytes, generation):
            return UploadPlan((), 0)
        if size_bytes <= self._whole_max_bytes:
            return UploadPlan((self._whole_link(sha256, size_bytes, generation),), size_bytes)
        beside = self._beside(sha256, generation, owner)
        upload = self._find(beside)
        if upload is None:
            if self._staged(beside) is not None:  # completed, and not taken: a server was killed in between
                return UploadPlan((), 0)
            key = beside + secrets.token_hex(8)
            upload = _MultipartUpload(key, self._requests.send("create_multipart_upload", Key=key)["UploadId"])
        parts = self._parts(upload)
        missing = [number for number in _numbers(size_bytes) if not _is_there(parts.get(number), number, size_bytes)]
        links = tuple(self._part_link(upload, number, size_bytes) for number in missing[:LINKS_AT_ONCE])
        return UploadPlan(links, sum(_length(number, size_bytes) for number in missing))

    def take(self, sha256: str, size_bytes: int, generation: int, owner: str) -> None:
        """Verify an upload whose bytes were all sent, and put it in its place. Harmless when repeated.

        Unavailable if parts are missing (ask for the upload plan again), Corrupt if the hash is wrong: then it is dropped.
        """
        if self._is_in_place(sha256, size_bytes, generation):
            return
        beside = self._beside(sha256, generation, owner)
        try:
            staged = self._completed(beside, sha256, size_bytes)
            self._verify(staged, sha256, size_bytes)
            self._copy(staged, self._address.key(sha256, generation), size_bytes)
            self._requests.send("delete_object", Key=staged)
        except NotFound as error:
            # Another server may have taken it at this moment.
            if not self._is_in_place(sha256, size_bytes, generation):
                raise Unavailable(f"blob {sha256} is not in the bucket; send it again") from error

    def _is_in_place(self, sha256: str, size_bytes: int, generation: int) -> bool:
        """Return whether the blob is in its place, where only verified bytes get."""
        try:
            found_bytes = int(self._requests.send("head_object", Key=self._address.key(sha256, generation))["ContentLength"])
        except NotFound:
            return False
        if found_bytes != size_bytes:
            raise Corrupt(f"a blob announced with {size_bytes} bytes has {found_bytes}")
        return True

    def _whole_link(self, sha256: str, size_bytes: int, generation: int) -> BlobLink:
        digest, link_s = s3_digest(sha256), min(WHOLE_LINK_S, self._link_s)
        url = self._signer.presigned(
            "put_object", link_s, Key=self._address.key(sha256, generation), ChecksumSHA256=digest, ContentLength=size_bytes
        )
        return BlobLink(url, link_s, 0, size_bytes, {"x-amz-checksum-sha256": digest})

    def _part_link(self, upload: _MultipartUpload, number: int, size_bytes: int) -> BlobLink:
        length = _length(number, size_bytes)
        url = self._signer.presigned(
            "upload_part", self._link_s, Key=upload.key, UploadId=upload.upload_id, PartNumber=number, ContentLength=length
        )
        return BlobLink(url, self._link_s, (number - 1) * PART_BYTES, length)

    # ------------------------------------------------------------------------------------------------ unfinished uploads

    def _beside(self, sha256: str, generation: int, owner: str) -> str:
        """Return the prefix of the keys of this owner's uploads of this blob."""
        if not owner.isalnum():
            raise InvalidInput("the owner of an upload is named by letters and digits")
        return f"{self._address.key(sha256, generation)}{BESIDE}{owner}."

    def _find(self, beside: str) -> _MultipartUpload | None:
        """Return the unfinished upload to use: the same one for all calls at the same time."""
        found = self._requests.send("list_multipart_uploads", Prefix=beside).get("Uploads", ())
        return min((_MultipartUpload(one["Key"], one["UploadId"]) for one in found), key=lambda one: one.key, default=None)

    def _staged(self, beside: str) -> str | None:
        """Return the key of an upload that was completed, if there is one."""
        found = self._requests.send("list_objects_v2", Prefix=beside).get("Contents", ())
        return min((str(one["Key"]) for one in found), default=None)

    def _parts(self, upload: _MultipartUpload) -> dict[int, dict[str, Any]]:
        parts: dict[int, dict[str, Any]] = {}
        marker = 0
        try:
            while True:
                answer = self._requests.send(
                    "list_parts", Key=upload.key, UploadId=upload.upload_id, PartNumberMarker=marker, MaxParts=1000
                )
                parts |= {int(part["PartNumber"]): part for part in answer.get("Parts", ())}
                marker = int(answer.get("NextPartNumberMarker") or 0)
                if not answer.get("IsTruncated") or not marker:
                    return parts
        except NotFound as error:
            raise Unavailable("the upload has just ended; ask again") from error

    def _completed(self, beside: str, sha256: str, size_bytes: int) -> str:
        """Complete the upload and return its key. From here on no URL can change it."""
        upload = self._find(beside)
        if upload is None:
            staged = self._staged(beside)
            if staged is None:
                raise NotFound(f"there is no upload of {sha256}")
            return staged
        parts = self._parts(upload)
        wanted = _numbers(size_bytes)
        if any(not _is_there(parts.get(number), number, size_bytes) for number in wanted):
            raise Unavailable(f"parts of blob {sha256} are missing; send them first")
        together = [{"PartNumber": number, "ETag": parts[number]["ETag"]} for number in wanted]
        with suppress(NotFound):  # an earlier try completed it, or another server: the object is found by its key
            self._requests.complete_upload(upload.key, upload.upload_id, together)
        return upload.key

    def _verify(self, staged: str, sha256: str, size_bytes: int) -> None:
        with S3Reader(self._requests, staged, sha256, 0) as reader:
            try:
                if reader.size_bytes != size_bytes:
                    raise Corrupt(f"a blob announced with {size_bytes} bytes has {reader.size_bytes}")
                for _ in reader:
                    pass  # the reader compares the hash before it yields the last chunk
            except Corrupt as error:
                self._requests.send("delete_object", Key=staged)
                raise Corrupt(f"what was sent is not blob {sha256}: {error.message}") from error

    def _copy(self, staged: str, key: str, size_bytes: int) -> None:
        source = {"Bucket": self._address.bucket, "Key": staged}
        if size_bytes <= COPY_BYTES:
            self._requests.send("copy_object", Key=key, CopySource=source)
            return
        upload_id = self._requests.send("create_multipart_upload", Key=key)["UploadId"]
        parts = []
        for number, first in enumerate(range(0, size_bytes, COPY_BYTES), 1):
            span = f"bytes={first}-{min(first + COPY_BYTES, size_bytes) - 1}"
            answer = self._requests.send(
                "upload_part_copy", Key=key, UploadId=upload_id, PartNumber=number, CopySource=source, CopySourceRange=span
            )
            parts.append({"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]})
        self._requests.complete_upload(key, upload_id, parts)


def _numbers(size_bytes: int) -> range:
    """Return the numbers of the parts, which count from 1."""
    return range(1, -(-size_bytes // PART_BYTES) + 1)


def _length(number: int, size_bytes: int) -> int:
    return min(PART_BYTES, size_bytes - (number - 1) * PART_BYTES)


def _is_there(part: dict[str, Any] | None, number: int, size_bytes: int) -> bool:
    return part is not None and int(part["Size"]) == _length(number, size_bytes)
