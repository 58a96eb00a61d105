"""What blob stores share: holding a stream against what was announced, and the verbs for bytes that fit in memory. No I/O."""

from __future__ import annotations

import hashlib

from tasuki.blobs.blob import BlobReader, BlobRef, BlobWriter, check_sha256
from tasuki.errors import Corrupt, InvalidInput, TooLarge

__all__ = ["StreamCheck", "WholeBlobs"]


class StreamCheck:
    """Counts and hashes what comes in, and holds it against the announcement and the limit."""

    def __init__(self, sha256: str | None, size_bytes: int | None, max_blob_bytes: int) -> None:
        if sha256 is not None:
            check_sha256(sha256)
        if size_bytes is not None and size_bytes < 0:
            raise InvalidInput(f"a blob cannot have {size_bytes} bytes; announce 0 or more")
        self.sha256 = sha256
        self.announced_bytes = size_bytes
        self.size_bytes = 0
        self._max_blob_bytes = max_blob_bytes
        self._hash = hashlib.sha256()
        self._check_size(size_bytes or 0)

    def check_growth(self, more_bytes: int) -> None:
        """TooLarge, or Corrupt, if that many more would be too many."""
        size_bytes = self.size_bytes + more_bytes
        self._check_size(size_bytes)
        if self.announced_bytes is not None and size_bytes > self.announced_bytes:
            raise Corrupt(f"a blob announced with {self.announced_bytes} bytes has {size_bytes} or more")

    def go_on(self, before: StreamCheck) -> None:
        """From where another one was, of the same bytes."""
        self.size_bytes = before.size_bytes
        self._hash = before._hash

    def take(self, view: memoryview) -> None:
        self._hash.update(view)
        self.size_bytes += view.nbytes

    def verify(self) -> BlobRef:
        """What came in; Corrupt, naming both values, if something else was announced."""
        ref = BlobRef(self._hash.hexdigest(), self.size_bytes)
        if self.announced_bytes not in (None, ref.size_bytes):
            raise Corrupt(f"a blob announced with {self.announced_bytes} bytes has {ref.size_bytes}")
        if self.sha256 not in (None, ref.sha256):
            raise Corrupt(f"a blob announced with sha256 {self.sha256} has sha256 {ref.sha256}")
        return ref

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._max_blob_bytes:
            raise TooLarge(
                f"a blob of {size_bytes} bytes or more passes the limit of {self._max_blob_bytes}; "
                "split it, or raise max_blob_bytes"
            )


class WholeBlobs:
    """`put_bytes` and `read_bytes` of a blob store, by its `begin` and `open`."""

    def begin(
        self, sha256: str | None = None, size_bytes: int | None = None, generation: int = 0, resume_key: str = ""
    ) -> BlobWriter:
        raise NotImplementedError

    def open(self, blob: BlobRef | str, offset: int = 0, generation: int = 0) -> BlobReader:
        raise NotImplementedError

    def put_bytes(self, data: bytes, generation: int = 0) -> BlobRef:
        with self.begin(size_bytes=len(data), generation=generation) as writer:
            writer.write(data)
            return writer.commit()

    def read_bytes(self, sha256: str, max_bytes: int, generation: int = 0) -> bytes:
        with self.open(sha256, generation=generation) as reader:
            if reader.size_bytes > max_bytes:
                raise TooLarge(
                    f"blob {sha256} has {reader.size_bytes} bytes, more than max_bytes = {max_bytes}; read it in chunks"
                )
            return b"".join(reader)
