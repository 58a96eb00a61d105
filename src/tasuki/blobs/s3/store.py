"""Blobs in an S3-compatible bucket: `<prefix>ab/abcdef…`, `<prefix>ab/abcdef….7` for generation 7.

Rows of the tasuki store list the blobs. The bucket is listed only for the unfinished uploads of one blob that is being deleted
and, where there are no rows, for old blobs (`remove_untouched`). The last use of a blob is the modification time of an empty
object beside it, `<prefix>ab/abcdef….used`. Copying the blob onto itself would renew its own time too, but moves all the bytes,
and S3 copies no more than 5 GiB at once.

A suspended upload waits in this process, and begins at 0 in the next one. Credentials come from the usual AWS environment and
files. Needs boto3, imported when the first store is opened.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tasuki.blobs.blob import RESUMED_MIN_BYTES, BlobReader, BlobStore, BlobWriter, StreamCheck
from tasuki.blobs.s3.requests import RETRY_S, S3Requests, parse_s3_url, s3_digest
from tasuki.core.job import BlobRef, is_sha256
from tasuki.core.ranges import range_headers
from tasuki.errors import Corrupt, InvalidInput, NotFound, TasukiError, Unavailable

PART_BYTES = 8 * 1024 * 1024  # S3 accepts at most 10,000 parts, which are 80 GB
CHECK_RETRY_S = 20.0  # how long the start of a server waits for a bucket that does not answer
PROBE = "tasuki-probe"
BESIDE = "-"  # behind a blob's key: an upload by presigned URLs that is not verified yet
USED = ".used"  # behind a blob's key: an object that is as old as the blob's last use
SUSPENDED_S = 300.0
SUSPENDED_MAX = 16  # each holds up to a part (8 MiB) in memory


class S3Writer(BlobWriter):
    """A `BlobWriter` that sends parts as they fill up. In memory: the part that is filling, and the one that is being sent.

    Up to PART_BYTES: one PUT, after the hash was verified. More: a multipart upload, which nobody can see before it is
    completed, and which is completed only if hash and size are right.
    """

    def __init__(
        self,
        requests: S3Requests,
        check: StreamCheck,
        key_of: Callable[[str], str],
        on_suspend: Callable[[S3Writer], None] | None = None,
    ) -> None:
        super().__init__(check)
        self._requests = requests
        self._key_of = key_of
        self._on_suspend = on_suspend
        self._buffer = bytearray()
        self._upload_id: str | None = None
        self._parts: list[dict[str, Any]] = []

    @property
    def announced_bytes(self) -> int | None:
        return self._check.announced_bytes

    def _add(self, piece: memoryview) -> None:
        while piece:
            if len(self._buffer) == PART_BYTES:  # only now is it sure that more follows
                self._send_part()
            room_bytes = PART_BYTES - len(self._buffer)
            self._buffer += piece[:room_bytes]
            piece = piece[room_bytes:]

    def _publish(self, ref: BlobRef) -> None:
        if self._upload_id is None:
            self._put(ref)
        else:
            self._send_part()
            self._complete(ref)

    def abort(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._buffer.clear()
        if self._upload_id is not None:
            # Best effort, once: `S3Blobs.delete` aborts the unfinished uploads of a blob.
            with contextlib.suppress(TasukiError):
                self._requests.send("abort_multipart_upload", retry_s=0.0, Key=self._key, UploadId=self._upload_id)

    def suspend(self) -> None:
        """Keep the upload open, its filling part in memory, for `S3Blobs.begin` to return again."""
        if self._on_suspend is None or not self._check.size_bytes:
            self.abort()
        elif self._is_open:
            successor = copy.copy(self)  # this writer ends, though a caller may still hold it
            self._is_open = False
            self._on_suspend(successor)

    @property
    def _key(self) -> str:
        """Key of a multipart upload, which is named from the start."""
        if self._check.sha256 is None:
            raise InvalidInput(f"a blob of more than {PART_BYTES} bytes cannot go to S3 before its sha256 is known; announce it")
        return self._key_of(self._check.sha256)

    def _put(self, ref: BlobRef) -> None:
        body = bytes(self._buffer)
        self._buffer.clear()
        self._requests.send("put_object", Key=self._key_of(ref.sha256), Body=body, ChecksumSHA256=s3_digest(ref.sha256))

    def _send_part(self) -> None:
        if self._upload_id is None:
            self._upload_id = self._requests.send("create_multipart_upload", Key=self._key)["UploadId"]
        number = len(self._parts) + 1
        body = bytes(self._buffer)
        self._buffer.clear()
        # The server refuses a damaged part. All servers know MD5; the sha256 of the whole is checked here.
        digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        try:
            answer = self._requests.send(
                "upload_part", Key=self._key, UploadId=self._upload_id, PartNumber=number, Body=body, ContentMD5=digest
            )
        except NotFound as error:
            raise self._lost() from error
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"]})

    def _complete(self, ref: BlobRef) -> None:
        key = self._key
        try:
            # NotFound: the answer to an earlier try was lost and the upload is complete, or it is gone. The size tells.
            with contextlib.suppress(NotFound):
                self._requests.complete_upload(key, self._upload_id, self._parts)
            found_bytes = self._requests.send("head_object", Key=key)["ContentLength"]
        except NotFound as error:
            raise self._lost() from error
        if found_bytes != ref.size_bytes:
            self._requests.send("delete_object", Key=key)
            raise Corrupt(
                f"blob {ref.sha256} has {found_bytes} bytes in {self._requests.address} after {ref.size_bytes} were sent"
            )

    def _lost(self) -> Unavailable:
        return Unavailable(f"{self._requests.address} dropped the unfinished upload of {self._key!r}; send the blob again")


class S3Reader(BlobReader):
    """A `BlobReader` over GET requests: a connection that breaks is made anew where it broke."""

    def __init__(self, requests: S3Requests, key: str, sha256: str, offset: int) -> None:
        super().__init__(sha256, 0, offset, str(requests.address))
        self._requests = requests
        self._key = key
        answer = requests.send("head_object" if offset > 0 else "get_object", Key=key)
        self.size_bytes = int(answer["ContentLength"])
        self._body: Any = answer.get("Body")

    def close(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.close()

    def _read(self, position: int, wanted_bytes: int) -> bytes:
        """Return exactly so many bytes."""
        pieces: list[bytes] = []
        while wanted_bytes > 0:
            piece = self._requests.with_retries(partial(self._piece, position, wanted_bytes), "get_object")
            pieces.append(piece)
            position += len(piece)
            wanted_bytes -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _piece(self, position: int, wanted_bytes: int) -> bytes:
        """Return some of the bytes from there on, over a new connection if there is none."""
        if self._body is None:
            answer = self._requests.once("get_object", Key=self._key, **range_headers(position))
            self._body = answer["Body"]
            size_bytes = position + int(answer["ContentLength"])
            if size_bytes != self.size_bytes:
                raise Corrupt(f"blob {self._sha256} had {self.size_bytes} bytes in {self._requests.address}, now {size_bytes}")
        try:
            piece: bytes = self._body.read(wanted_bytes)
            if not piece:
                raise self._requests.cut_short(position, self.size_bytes)
        except BaseException:
            self.close()
            raise
        return piece


class _Listed(NamedTuple):
    """A blob in the bucket, or the mark of its last use."""

    sha256: str
    key: str
    changed_at: float
    size_bytes: int


class S3Blobs(BlobStore):
    """A `BlobStore` in the bucket of an `s3://bucket/prefix?endpoint=…&region=…` url. Opening it sends nothing; see `check`."""

    threads = 8  # each may wait minutes for a request while the server is away

    def __init__(self, url: str, *, max_blob_bytes: int, retry_s: float = RETRY_S) -> None:
        self.address = parse_s3_url(url)
        self.where = str(self.address)
        self.max_blob_bytes = max_blob_bytes
        self._requests = S3Requests(self.address, retry_s=retry_s)
        self._lock = threading.Lock()  # for the table; never held over a request
        self._suspended: OrderedDict[tuple[str, str, int], tuple[float, S3Writer]] = OrderedDict()
        """By (resume_key, sha256, generation): the time of the suspension, and the writer; the oldest first."""

    def begin(
        self, sha256: str | None = None, size_bytes: int | None = None, generation: int = 0, resume_key: str = ""
    ) -> S3Writer:
        check = StreamCheck(sha256, size_bytes, self.max_blob_bytes)
        on_suspend = None
        if resume_key and sha256 is not None and (size_bytes or 0) >= RESUMED_MIN_BYTES:
            key = (resume_key, sha256, generation)
            with self._lock:
                _, writer = self._suspended.pop(key, (0.0, None))
            if writer is not None:
                if writer.announced_bytes == size_bytes:
                    return writer
                writer.abort()
            on_suspend = partial(self._suspend, key)
        return S3Writer(self._requests, check, lambda found: self._key(found, generation), on_suspend)

    def _suspend(self, key: tuple[str, str, int], writer: S3Writer) -> None:
        with self._lock:
            _, other = self._suspended.pop(key, (0.0, None))
            self._suspended[key] = (time.monotonic(), writer)
            _, oldest = self._suspended.popitem(last=False)[1] if len(self._suspended) > SUSPENDED_MAX else (0.0, None)
        for dropped in (other, oldest):
            if dropped is not None:
                dropped.abort()

    def sweep(self) -> None:
        with self._lock:
            old = [key for key, (since, _) in self._suspended.items() if since < time.monotonic() - SUSPENDED_S]
            dropped = [self._suspended.pop(key)[1] for key in old]
        for writer in dropped:
            writer.abort()

    def _open(self, sha256: str, offset: int, generation: int) -> S3Reader:
        try:
            return S3Reader(self._requests, self._key(sha256, generation), sha256, offset)
        except NotFound as error:
            raise self._not_found(sha256, generation) from error

    def size(self, sha256: str, generation: int = 0) -> int:
        try:
            return int(self._requests.send("head_object", Key=self._key(sha256, generation))["ContentLength"])
        except NotFound as error:
            raise self._not_found(sha256, generation) from error

    def delete(self, sha256: str, generation: int = 0) -> bool:
        key = self._key(sha256, generation)
        beside = f"{key}{BESIDE}"
        was_there = self.has(sha256, generation)
        if was_there:
            self._requests.send("delete_object", Key=key)
        for upload in self._requests.send("list_multipart_uploads", Prefix=key).get("Uploads", ()):
            if upload["Key"] == key or upload["Key"].startswith(beside):  # the prefix of generation 0 is also that of 7
                self._abort(upload["Key"], upload["UploadId"])
        for staged in self._requests.send("list_objects_v2", Prefix=beside).get("Contents", ()):
            self._requests.send("delete_object", Key=staged["Key"])
        return was_there

    def _abort(self, key: str, upload_id: str) -> None:
        with contextlib.suppress(NotFound):  # its writer has just ended it
            self._requests.send("abort_multipart_upload", Key=key, UploadId=upload_id)

    def touch(self, sha256: str) -> None:
        self._requests.send("put_object", retry_s=0.0, Key=self._key(sha256, 0) + USED, Body=b"")

    def remove_untouched(self, since: float, in_use: Callable[[str], bool]) -> Iterator[BlobRef]:
        for sha256, listed in itertools.groupby(self._listed(), lambda one: one.sha256):  # a blob and its mark are adjacent
            found = list(listed)
            if any(one.changed_at >= since for one in found) or in_use(sha256) or self._is_touched(sha256, since):
                continue
            for one in found:
                self._requests.send("delete_object", Key=one.key)
                if not one.key.endswith(USED):
                    yield BlobRef(sha256, one.size_bytes)
        for upload in self._requests.send("list_multipart_uploads", Prefix=self.address.prefix).get("Uploads", ()):
            if upload["Initiated"].timestamp() < since and is_sha256(upload["Key"].rpartition("/")[2]):
                self._abort(upload["Key"], upload["UploadId"])  # its process was killed, and would begin at 0

    def _listed(self) -> Iterator[_Listed]:
        """Yield the blobs of the bucket and their marks, in the order of their names."""
        further: dict[str, Any] = {}
        while True:
            page = self._requests.send("list_objects_v2", Prefix=self.address.prefix, **further)
            for entry in page.get("Contents", ()):
                key = str(entry["Key"])
                sha256 = key.rpartition("/")[2].removesuffix(USED)
                if is_sha256(sha256) and key.removesuffix(USED) == self._key(sha256, 0):
                    yield _Listed(sha256, key, entry["LastModified"].timestamp(), int(entry["Size"]))
            if not page.get("IsTruncated"):
                return
            further = {"ContinuationToken": page["NextContinuationToken"]}

    def _is_touched(self, sha256: str, since: float) -> bool:
        """Ask again for the age of one blob: a page of a listing may be minutes old."""
        for key in (self._key(sha256, 0) + USED, self._key(sha256, 0)):
            try:
                if self._requests.send("head_object", Key=key)["LastModified"].timestamp() >= since:
                    return True
            except NotFound:
                continue  # never used but once, or removed by another process
        return False

    def check_space(self, size_bytes: int = 0) -> None:
        """Do nothing: a bucket reports that it is full only when it refuses a write."""

    def local_path(self, sha256: str, generation: int = 0) -> Path | None:
        self.size(sha256, generation)
        return None

    def check(self) -> None:
        """Write, delete, read, and list uploads: a missing permission shows now, and not in the middle of a job."""
        key = self.address.prefix + PROBE
        self._requests.send("put_object", retry_s=CHECK_RETRY_S, Key=key, Body=b"")
        self._requests.send("delete_object", retry_s=CHECK_RETRY_S, Key=key)
        self._requests.send("list_multipart_uploads", retry_s=CHECK_RETRY_S, Prefix=key, MaxUploads=1)
        with contextlib.suppress(NotFound):  # as expected, unless another server checks at this moment
            self._requests.send("head_object", retry_s=CHECK_RETRY_S, Key=key)

    def close(self) -> None:
        self._requests.close()

    def _key(self, sha256: str, generation: int) -> str:
        return self.address.key(sha256, generation)
