"""An upload on its way into the store of inputs. Its hash is known only at its end: a folder can wait for that, a bucket cannot.

So what goes to a bucket lies in a nameless temporary file first. What was stored stays there, whatever becomes of the request.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from typing import IO

from tasuki.blobs.blob import CHUNK_BYTES, BlobRef, BlobStore, BlobWriter
from tasuki.blobs.files import disk_full_as_error
from tasuki.blobs.folder import FolderBlobs
from tasuki.core.failover.agent_protocol import InputRecord


class InputWriter:
    """Of one file, whose name in the store is not known yet."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by abort
        self._digest = hashlib.sha256()
        self._size_bytes = 0
        self.was_there = False

    def write(self, chunk: bytes) -> int:
        with disk_full_as_error(tempfile.gettempdir()):
            self._file.write(chunk)
        self._digest.update(chunk)
        self._size_bytes += len(chunk)
        return len(chunk)

    def commit(self) -> BlobRef:
        """What is there already is not sent again; `was_there` tells."""
        ref = BlobRef(self._digest.hexdigest(), self._size_bytes)
        try:
            self.was_there = self._blobs.has(ref.sha256)
            if not self.was_there:
                self._file.seek(0)
                with self._blobs.begin(ref.sha256, ref.size_bytes) as writer:
                    while chunk := self._file.read(CHUNK_BYTES):
                        writer.write(chunk)
                    writer.commit()
        finally:
            self.abort()
        return ref

    def abort(self) -> None:
        self._file.close()


class StoredFiles:
    """The files of one upload, each a blob. See `doors.agent.intake.Files`."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self.made = False
        self.records: list[InputRecord] = []
        self.known: list[str] = []
        """Those that were there already, and are as old as they were."""
        self._name = ""
        self._writer: BlobWriter | InputWriter | None = None

    def carry_out(self, orders: Sequence[str | bytes | None]) -> None:
        for order in orders:
            if isinstance(order, str):
                self.made = True
                self._name = order
                direct = isinstance(self._blobs, FolderBlobs)
                self._writer = self._blobs.begin() if direct else InputWriter(self._blobs)
                continue
            assert self._writer is not None
            if order is not None:
                self._writer.write(order)
            else:
                ref = self._writer.commit()
                if isinstance(self._writer, InputWriter) and self._writer.was_there:
                    self.known.append(ref.sha256)
                self._writer = None
                self.records.append(InputRecord(self._name, ref.sha256, ref.size_bytes))

    def remove(self) -> None:
        if self._writer is not None:
            self._writer.abort()
            self._writer = None
