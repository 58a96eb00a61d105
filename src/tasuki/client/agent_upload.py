"""What is sent to a node agent: input files as multipart/form-data, read from disk as they are sent. Touches only these files."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Protocol

import msgspec

from tasuki.core.failover.agent_protocol import InputRecord, input_hash
from tasuki.core.failover.dispatch_policy import InputRef
from tasuki.core.ids import quoted
from tasuki.core.job import check_file_name
from tasuki.errors import InvalidInput
from tasuki.net.http.multipart import MultipartForm, run_fields
from tasuki.net.streams import FileSource


class Upload(msgspec.Struct, frozen=True):
    """One request to run something, the same for every node."""

    exec: str
    args: tuple[str, ...]
    files: tuple[tuple[Path, InputRecord], ...]
    timeout_s: float | None = None

    @property
    def input(self) -> str:
        """The input hash; empty where the agent chooses the exec."""
        return input_hash(self.exec, self.args, [record for _, record in self.files]) if self.exec else ""

    @property
    def size_bytes(self) -> int:
        return sum(record.size_bytes for _, record in self.files)


def read_upload(
    exec_: str, args: Sequence[str], files: Sequence[str | os.PathLike[str]], timeout_s: float | None = None
) -> Upload:
    """Reads every file once, for its sha256. Blocks: for a thread."""
    if not files:
        raise InvalidInput("a node agent needs at least one input file; give it with --file")
    found: list[tuple[Path, InputRecord]] = []
    for file in files:
        path = Path(file)
        name = check_file_name(path.name)
        if any(record.name == name for _, record in found):
            raise InvalidInput(f"two input files have the name {quoted(name)}; rename one of them")
        found.append((path, _record(path, name)))
    return Upload(exec_, tuple(args), tuple(found), timeout_s)


def _record(path: Path, name: str) -> InputRecord:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return InputRecord(name, digest, file.tell())
    except OSError as error:
        raise InvalidInput(f"the input file {str(path)!r} cannot be read: {error.strerror or error}") from None


async def pieces_of(path: Path, size_bytes: int, start: int = 0) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a file from `start` to the size that it had when it was hashed; InvalidInput if it became shorter."""
    with await asyncio.to_thread(path.open, "rb") as file:
        async with FileSource(file) as source, aclosing(source.pieces(start, size_bytes)) as pieces:
            async for piece in pieces:
                yield piece
                start += len(piece)
    if start < size_bytes:
        raise InvalidInput(f"the input file {str(path)!r} became shorter while it was sent")


class Telling(Protocol):
    """Who hears how far a request is."""

    def sent(self, done_bytes: int) -> None:
        """So many bytes of the files are there, sent now or before."""
        ...

    def uploaded(self) -> None:
        """The node has the whole request."""
        ...

    def heard(self, done_bytes: int, total_bytes: int | None) -> None:
        """So many bytes of the result are here, of so many."""
        ...

    def led(self, to: str) -> None:
        """A dispatcher leads to this node."""
        ...


class RunForm:
    """The body of one request, to be sent once. With `by_name` the node has the files, and gets their hashes."""

    def __init__(self, upload: Upload, telling: Telling, *, by_name: bool = False) -> None:
        self._telling = telling
        self._files = () if by_name else upload.files
        self._sent_bytes = upload.size_bytes if by_name else 0
        names = [str(InputRef(record.sha256, record.name)) for _, record in upload.files] if by_name else []
        self._form = MultipartForm(
            run_fields(upload.exec, upload.args, upload.timeout_s, names),
            [(record.name, record.size_bytes) for _, record in self._files],
        )
        self.headers = self._form.headers

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body, and report the progress."""
        contents = (self._content(path, record.size_bytes) for path, record in self._files)
        async with aclosing(self._form.pieces(contents)) as pieces:
            async for piece in pieces:
                yield piece
        self._telling.sent(self._sent_bytes)
        self._telling.uploaded()

    async def _content(self, path: Path, size_bytes: int) -> AsyncGenerator[bytes, None]:
        async with aclosing(pieces_of(path, size_bytes)) as pieces:
            async for piece in pieces:
                yield piece
                self._sent_bytes += len(piece)
                self._telling.sent(self._sent_bytes)
