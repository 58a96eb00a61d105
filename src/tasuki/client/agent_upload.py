"""What is sent to a node agent: input files as multipart/form-data, read from disk as they are sent. Touches only these files."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
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

PIECE_BYTES = 1024 * 1024


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
    """A file as it was when it was read first, from a byte on, or InvalidInput."""
    loop = asyncio.get_running_loop()
    left = size_bytes - start
    file = await loop.run_in_executor(None, path.open, "rb")
    with file:
        file.seek(start)
        while left:
            piece = await loop.run_in_executor(None, file.read, min(PIECE_BYTES, left))
            if not piece:
                raise InvalidInput(f"the input file {str(path)!r} became shorter while it was sent")
            yield piece
            left -= len(piece)


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
    """The body of one request. `pieces` can be used once. With `by_name` the node has the files, and gets their hashes."""

    def __init__(self, upload: Upload, telling: Telling, *, by_name: bool = False) -> None:
        boundary = secrets.token_hex(16)
        self.content_type = f"multipart/form-data; boundary={boundary}"
        self._telling = telling
        self._kept_bytes = upload.size_bytes if by_name else 0
        self._end = f"--{boundary}--\r\n".encode()
        self._fields = b"".join(_field(boundary, name, value) for name, value in _values(upload, by_name=by_name))
        sent = () if by_name else upload.files
        self._parts = [(path, record, _file_head(boundary, record.name)) for path, record in sent]
        sizes = sum(len(head) + record.size_bytes + len(b"\r\n") for _, record, head in self._parts)
        self.size_bytes = len(self._fields) + sizes + len(self._end)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        sent = self._kept_bytes
        before = self._fields
        for path, record, head in self._parts:
            before += head
            async with aclosing(pieces_of(path, record.size_bytes)) as pieces:
                async for piece in pieces:
                    yield before + piece if before else piece
                    before = b""
                    sent += len(piece)
                    self._telling.sent(sent)
            before += b"\r\n"
        yield before + self._end
        self._telling.sent(sent)
        self._telling.uploaded()


def _values(upload: Upload, *, by_name: bool) -> list[tuple[str, str]]:
    values = [("args", msgspec.json.encode(upload.args).decode())]
    if upload.exec:
        values.append(("exec", upload.exec))
    if upload.timeout_s is not None:
        values.append(("timeout_s", f"{upload.timeout_s:g}"))
    return values + ([("input", str(InputRef(record.sha256, record.name))) for _, record in upload.files] if by_name else [])


def _field(boundary: str, name: str, value: str) -> bytes:
    return f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


def _file_head(boundary: str, name: str) -> bytes:
    plain = name.replace('"', '\\"')  # names have no backslash
    disposition = f'Content-Disposition: form-data; name="file"; filename="{plain}"'
    return f"--{boundary}\r\n{disposition}\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
