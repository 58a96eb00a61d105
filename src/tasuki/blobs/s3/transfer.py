"""Writers and readers of blobs in an S3 bucket: streams, bounded memory, nothing visible before it is whole and verified."""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

from tasuki.blobs.blob import BlobRef, BlobWriter, StreamCheck, VerifyingReader
from tasuki.blobs.s3.requests import S3Requests
from tasuki.core.ranges import range_headers
from tasuki.errors import Corrupt, InvalidInput, NotFound, TasukiError, Unavailable

__all__ = ["PART_BYTES", "S3Reader", "S3Writer"]

PART_BYTES = 8 * 1024 * 1024  # 10,000 parts, the most that S3 takes, are 80 GB


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
        self._requests = requests
        self._check = check
        self._key_of = key_of
        self._on_suspend = on_suspend
        self._buffer = bytearray()
        self._upload_id: str | None = None
        self._parts: list[dict[str, Any]] = []
        self._is_open = True

    @property
    def size_bytes(self) -> int:
        return self._check.size_bytes

    @property
    def announced_bytes(self) -> int | None:
        return self._check.announced_bytes

    def write(self, chunk: bytes | bytearray | memoryview) -> int:
        self._check_open()
        view = memoryview(chunk).cast("B")
        try:
            self._check.check_growth(view.nbytes)
            self._check.add(view)
            taken = 0
            while taken < view.nbytes:
                if len(self._buffer) == PART_BYTES:  # only now is it sure that more follows
                    self._send_part()
                piece = view[taken : taken + PART_BYTES - len(self._buffer)]
                self._buffer += piece
                taken += piece.nbytes
        except BaseException:
            self.abort()
            raise
        return view.nbytes

    def commit(self) -> BlobRef:
        self._check_open()
        try:
            ref = self._check.verify()
            if self._upload_id is None:
                self._put(ref)
            else:
                self._send_part()
                self._complete(ref)
        except BaseException:
            self.abort()
            raise
        self._is_open = False
        return ref

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

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError("this blob writer was committed or aborted; begin a new one")

    @property
    def _key(self) -> str:
        """Key of a multipart upload, which is named from the start."""
        if self._check.sha256 is None:
            raise InvalidInput(f"a blob of more than {PART_BYTES} bytes cannot go to S3 before its sha256 is known; announce it")
        return self._key_of(self._check.sha256)

    def _put(self, ref: BlobRef) -> None:
        digest = base64.b64encode(bytes.fromhex(ref.sha256)).decode()
        body = bytes(self._buffer)
        self._buffer.clear()
        self._requests.send("put_object", Key=self._key_of(ref.sha256), Body=body, ChecksumSHA256=digest)

    def _send_part(self) -> None:
        if self._upload_id is None:
            self._upload_id = self._requests.send("create_multipart_upload", Key=self._key)["UploadId"]
        number = len(self._parts) + 1
        body = bytes(self._buffer)
        self._buffer.clear()
        # The server refuses a damaged part. All servers know MD5; the sha256 of the whole is checked here.
        digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        arguments: dict[str, Any] = {
            "Key": self._key,
            "UploadId": self._upload_id,
            "PartNumber": number,
            "Body": body,
            "ContentMD5": digest,
        }
        try:
            answer = self._requests.send("upload_part", **arguments)
        except NotFound as error:
            raise self._lost() from error
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"]})

    def _complete(self, ref: BlobRef) -> None:
        key = self._key
        arguments: dict[str, Any] = {"Key": key, "UploadId": self._upload_id, "MultipartUpload": {"Parts": self._parts}}
        try:
            # NotFound: the answer to an earlier try was lost and the upload is complete, or it is gone. The size tells.
            with contextlib.suppress(NotFound):
                self._requests.send("complete_multipart_upload", **arguments)
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


class S3Reader(VerifyingReader):
    """A `BlobReader` over GET requests: a connection that breaks is made anew where it broke."""

    def __init__(self, requests: S3Requests, key: str, sha256: str, offset: int) -> None:
        super().__init__(sha256, 0, offset, str(requests.address))
        self._requests = requests
        self._key = key
        self._body: Any = None
        self._open()

    def close(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.close()

    def _open(self) -> None:
        """Send the first request, whose answer tells the size."""
        if self._offset > 0:
            self._size_bytes = int(self._requests.send("head_object", Key=self._key)["ContentLength"])
            return
        answer = self._requests.send("get_object", Key=self._key)
        self._body = answer["Body"]
        self._size_bytes = int(answer["ContentLength"])

    def _read(self, position: int, wanted_bytes: int) -> bytes:
        """Return exactly so many bytes."""
        pieces: list[bytes] = []
        while wanted_bytes > 0:
            piece = self._requests.patiently(partial(self._piece, position, wanted_bytes), "get_object")
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
            if size_bytes != self._size_bytes:
                raise Corrupt(f"blob {self._sha256} had {self._size_bytes} bytes in {self._requests.address}, now {size_bytes}")
        try:
            piece: bytes = self._body.read(wanted_bytes)
            if not piece:
                raise self._requests.cut_short(position, self._size_bytes)
        except BaseException:
            self.close()
            raise
        return piece
