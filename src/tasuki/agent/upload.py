"""An upload on its way: parsed in the loop, hashed and written in a thread, never whole in memory.

    intake = Intake(boundary, place, max_bytes)
    form = await intake.receive(request.stream())      the fields; InvalidInput, TooLarge: nothing is left behind by `discard`
    files = await intake.finish()                      all is written

What fits into WRITE_BYTES is written together with the folder it goes to; if it is small, without a thread. Larger uploads are
written piece by piece while more comes in. Without a place nothing is written, only hashed.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import os
import re
import shutil
from collections.abc import AsyncIterable, Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.requests import ClientDisconnect

from tasuki.blobs.files import disk_full_as_error
from tasuki.blobs.zip.names import NameBook
from tasuki.core.failover.agent_protocol import InputRecord, parse_args, parse_timeout
from tasuki.core.failover.nodes import InputRef, parse_input
from tasuki.core.ids import quoted
from tasuki.core.job import check_file_name
from tasuki.errors import InvalidInput, TooLarge

# ----------------------------------------------------------------------------------------------------
# multipart/form-data (RFC 7578) as it comes in, piece by piece. Without I/O, strict, and bounded in all that a peer decides.

HEADERS_MAX_BYTES = 8 * 1024  # of one part
PARTS_MAX = 1_000

_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]").fullmatch
_PARAMETER = re.compile(r""";[ \t]*([!#$%&'*+.^_`|~0-9A-Za-z-]+)=(?:"((?:[^"\\]|\\.)*)"|([^";\s]+))[ \t]*""", re.DOTALL)
_ESCAPED = re.compile(r"\\([\\\"])")
_PLAIN_ENCODINGS = ("binary", "8bit", "7bit")


class Part(msgspec.Struct, frozen=True):
    """The begin of a part: the field's name, and the file's name if it is a file."""

    name: str
    filename: str | None


class PartEnded(enum.Enum):
    PART_ENDED = enum.auto()


PART_ENDED = PartEnded.PART_ENDED
Event = Part | bytes | PartEnded


class _State(enum.Enum):
    BOUNDARY = enum.auto()
    """Right behind a boundary: another part or the end."""
    HEADERS = enum.auto()
    BODY = enum.auto()
    END = enum.auto()


def boundary_of(content_type: str) -> bytes:
    """The boundary that a Content-Type of multipart/form-data names; InvalidInput for anything else."""
    kind, separator, parameters = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        raise InvalidInput(f"multipart/form-data is needed, with the field file; got Content-Type {quoted(content_type)}")
    boundary = _parameters(separator + parameters).get("boundary", "")
    if _BOUNDARY(boundary) is None:
        raise InvalidInput("the Content-Type names no usable boundary; it has 1 to 70 characters (RFC 2046)")
    return boundary.encode("ascii")


class MultipartParser:
    """One body."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        # A boundary belongs to the line break before it. The first one has none, so it is given one.
        self._buffer = bytearray(b"\r\n")
        self._state: _State | None = None
        self._parts = 0

    def feed(self, piece: bytes) -> Iterator[Event]:
        """What this piece completes. To be used up before the next one."""
        self._buffer += piece
        while (event := self._next()) is not None:
            if event:  # a part may have no bytes to tell
                yield event

    def finish(self) -> None:
        """The body is over."""
        if self._state is None:
            raise self._wrong_begin()
        if self._state is not _State.END:
            raise InvalidInput("the form ended before its closing boundary; send all of it")

    def _next(self) -> Event | None:
        """The next event; None: more is needed. b"": look again."""
        match self._state:
            case None:
                return self._begin()
            case _State.BOUNDARY:
                return self._behind_boundary()
            case _State.HEADERS:
                return self._headers()
            case _State.BODY:
                return self._body()
            case _State.END:
                if self._buffer.strip(b"\r\n"):
                    raise InvalidInput("there is something behind the closing boundary of the form")
                self._buffer.clear()
                return None

    def _begin(self) -> Event | None:
        have = min(len(self._buffer), len(self._delimiter))
        if self._buffer[:have] != self._delimiter[:have]:
            raise self._wrong_begin()
        if have < len(self._delimiter):
            return None
        del self._buffer[:have]
        self._state = _State.BOUNDARY
        return b""

    def _wrong_begin(self) -> InvalidInput:
        return InvalidInput("the form does not begin with the boundary that its Content-Type names")

    def _behind_boundary(self) -> Event | None:
        if len(self._buffer) < 2:
            return None
        two = bytes(self._buffer[:2])
        del self._buffer[:2]
        if two == b"--":
            self._state = _State.END
        elif two == b"\r\n":
            self._state = _State.HEADERS
            self._parts += 1
            if self._parts > PARTS_MAX:
                raise InvalidInput(f"the form has more than {PARTS_MAX} parts")
        else:
            raise InvalidInput("a boundary of the form is not followed by a line break")
        return b""

    def _headers(self) -> Event | None:
        end = self._buffer.find(b"\r\n\r\n", 0, HEADERS_MAX_BYTES)
        if end < 0:
            if len(self._buffer) >= HEADERS_MAX_BYTES:
                raise InvalidInput(f"the headers of part {self._parts} of the form are larger than {HEADERS_MAX_BYTES} bytes")
            return None
        part = _part_of(bytes(self._buffer[:end]))
        del self._buffer[: end + 4]
        self._state = _State.BODY
        return part

    def _body(self) -> Event | None:
        end = self._buffer.find(self._delimiter)
        if end == 0:
            del self._buffer[: len(self._delimiter)]
            self._state = _State.BOUNDARY
            return PART_ENDED
        if end < 0:
            end = len(self._buffer) - len(self._delimiter) + 1
        if end <= 0:
            return None
        data = bytes(self._buffer[:end])
        del self._buffer[:end]
        return data


def _part_of(headers: bytes) -> Part:
    try:
        lines = headers.decode("utf-8").split("\r\n")
    except UnicodeDecodeError:
        raise InvalidInput("the headers of a part of the form are not UTF-8") from None
    found: dict[str, str] = {}
    for line in lines:
        name, separator, value = line.partition(":")
        if not separator or name != name.strip() or name.lower() in found or "\r" in line or "\n" in line or "\0" in line:
            raise InvalidInput(f"a part of the form has the header line {quoted(line)}, which is none")
        found[name.lower()] = value.strip()
    if found.get("content-transfer-encoding", "binary").lower() not in _PLAIN_ENCODINGS:
        raise InvalidInput("a part of the form has a Content-Transfer-Encoding; send the bytes as they are")
    kind, separator, rest = found.get("content-disposition", "").partition(";")
    if kind.strip().lower() != "form-data":
        raise InvalidInput("a part of the form has no Content-Disposition: form-data")
    parameters = _parameters(separator + rest)
    if "filename*" in parameters:
        raise InvalidInput("a part of the form has filename*, which RFC 7578 forbids; write the name as UTF-8 in filename")
    if "name" not in parameters:
        raise InvalidInput("a part of the form has no name")
    return Part(parameters["name"], parameters.get("filename"))


def _parameters(text: str) -> dict[str, str]:
    """`; name="value"; other=value`, all of it."""
    found: dict[str, str] = {}
    at = 0
    text = text.rstrip()
    while at < len(text):
        parameter = _PARAMETER.match(text, at)
        if parameter is None or parameter[1].lower() in found:
            raise InvalidInput(f"the parameters {quoted(text)} of a header of the form cannot be read")
        value = parameter[3] if parameter[2] is None else _ESCAPED.sub(r"\1", parameter[2])
        found[parameter[1].lower()] = value
        at = parameter.end()
    return found


WRITE_BYTES = 1024 * 1024
SMALL_BYTES, SMALL_FILES = 64 * 1024, 4
"""An upload up to this is written in the loop: a few system calls, which take less than the hop into a thread."""
FIELD_MAX_BYTES = 1024 * 1024
PATIENCE_S = 30.0
SLOWEST_BYTES_PER_S = 16 * 1024
"""An upload may take PATIENCE_S, and as long besides as it would take at this pace."""
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# What other systems cannot have as a name; the same upload must work on every node.
_RESERVED = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?", re.IGNORECASE).fullmatch


class UploadForm(msgspec.Struct, frozen=True, kw_only=True):
    """What the fields say besides the files."""

    exec: str | None = None
    args: tuple[str, ...] = ()
    timeout_s: float | None = None
    inputs: tuple[InputRef, ...] = ()
    """Files that do not come with the form."""


class UploadFolder(NamedTuple):
    """A folder that does not exist yet, and what makes it, with `in` in it."""

    path: str
    make: Callable[[str], None]


class UploadFiles(Protocol):
    """Where the files of an upload go. In threads, one at a time."""

    made: bool
    """There is something to remove."""
    records: list[InputRecord]

    def carry_out(self, orders: Sequence[str | bytes | None]) -> None:
        """A text opens the file of that name, bytes are written to it, None closes it."""

    def remove(self) -> None: ...


class Upload:
    """One upload. Belongs to one task."""

    def __init__(self, boundary: bytes, place: UploadFolder | None, max_bytes: int, files: UploadFiles | None = None) -> None:
        """Without a place the files are only hashed. `files`: they go elsewhere."""
        self._parser = MultipartParser(boundary)
        self._files: UploadFiles = files or _Files(place)
        self._max_bytes = max_bytes
        self.received_bytes = 0
        self._names = _Names()
        self._fields: dict[str, bytearray] = {}
        self._inputs: list[bytearray] = []
        self._fields_bytes = 0
        self._open: bytearray | None = None
        """The field that is being read; None: it is a file."""
        self._pending: list[str | bytes | None] = []
        self._pending_bytes = 0
        self._writing: asyncio.Future[Any] | None = None

    async def receive(self, stream: AsyncIterable[bytes]) -> UploadForm:
        """Read to the end."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(PATIENCE_S) as patience:
                async for piece in stream:
                    self._take(piece)
                    if self._pending_bytes >= WRITE_BYTES:
                        await self._write()
                    patience.reschedule(began + PATIENCE_S + self.received_bytes / SLOWEST_BYTES_PER_S)
        except TimeoutError:
            raise InvalidInput(
                f"the upload is too slow: {self.received_bytes} bytes in {loop.time() - began:.0f} s; "
                f"it needs {SLOWEST_BYTES_PER_S} bytes a second"
            ) from None
        except ClientDisconnect:
            raise InvalidInput("the upload ended before it was whole") from None
        self._parser.finish()
        if not self._names.count and not self._inputs:
            raise InvalidInput("the form has no file; send one or more as the field file")
        return self._form()

    async def add(self, name: str, stream: AsyncIterable[bytes]) -> None:
        """A file that comes from elsewhere. After `receive`."""
        self._pending.append(name)
        async for piece in stream:
            self._count(piece)
            self._pending.append(piece)
            self._pending_bytes += len(piece)
            if self._pending_bytes >= WRITE_BYTES:
                await self._write()
        self._pending.append(None)

    async def finish(self) -> Sequence[InputRecord]:
        """Write what is left."""
        is_small = self._writing is None and self._pending_bytes <= SMALL_BYTES and self._names.count <= SMALL_FILES
        if is_small and isinstance(self._files, _Files):
            self._files.carry_out(self._pending)
        else:
            await self._write()
            await self._written()
        return self._files.records

    async def discard(self) -> None:
        """Nothing of it is needed; waits for the thread that still writes."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        if self._files.made:
            await asyncio.to_thread(self._files.remove)

    # ------------------------------------------------------------------------------------------------ in the loop

    def _count(self, piece: bytes) -> None:
        self.received_bytes += len(piece)
        if self.received_bytes > self._max_bytes:
            raise TooLarge(f"the upload is larger than the limit of {self._max_bytes} bytes")

    def _take(self, piece: bytes) -> None:
        self._count(piece)
        for event in self._parser.feed(piece):
            if isinstance(event, Part):
                self._begin(event)
            elif isinstance(event, PartEnded):
                if self._open is None:
                    self._pending.append(None)
            elif self._open is not None:
                self._open += event
                self._fields_bytes += len(event)
                if self._fields_bytes > FIELD_MAX_BYTES:
                    raise TooLarge(f"the fields of the form are larger than {FIELD_MAX_BYTES} bytes")
            else:
                self._pending.append(event)
                self._pending_bytes += len(event)

    def _begin(self, part: Part) -> None:
        if part.name == "file":
            if part.filename is None:
                raise InvalidInput("the field file has no filename; send it as a file (curl -F file=@book.csv)")
            self._names.add(part.filename)
            self._open = None
            self._pending.append(part.filename)
            return
        if part.name == "input" and part.filename is None:
            self._open = bytearray()
            self._inputs.append(self._open)
            return
        if part.name not in ("exec", "args", "timeout_s"):
            raise InvalidInput(f"the form has the field {quoted(part.name)}; there are file, input, exec, args and timeout_s")
        if part.name in self._fields or part.filename is not None:
            raise InvalidInput(f"the field {part.name} must be there once, and not as a file")
        self._open = self._fields[part.name] = bytearray()

    def _form(self) -> UploadForm:
        try:
            fields = {name: value.decode("utf-8") for name, value in self._fields.items()}
            inputs = tuple(parse_input(value.decode("utf-8")) for value in self._inputs)
        except UnicodeDecodeError:
            raise InvalidInput("a field of the form is not UTF-8") from None
        for ref in inputs:
            self._names.add(ref.name)
        return UploadForm(
            exec=fields.get("exec") or None,
            args=parse_args(fields["args"]) if "args" in fields else (),
            timeout_s=parse_timeout(fields["timeout_s"]) if "timeout_s" in fields else None,
            inputs=inputs,
        )

    async def _write(self) -> None:
        """Let a thread write what is there, while more is read."""
        await self._written()
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        self._writing = asyncio.get_running_loop().run_in_executor(None, self._files.carry_out, pending)

    async def _written(self) -> None:
        if self._writing is not None:
            await asyncio.shield(self._writing)


class _Names:
    """The names of one upload: each by itself as a worker takes it, and no two for the same file."""

    def __init__(self) -> None:
        self.count = 0
        self._book = NameBook()

    def add(self, name: str) -> None:
        check_file_name(name)
        if any(_RESERVED(part) for part in name.split("/")):
            raise InvalidInput(f"file name {quoted(name)} is reserved on some systems; rename the file")
        try:
            self._book.add(name, is_folder=False)
        except InvalidInput as error:
            raise InvalidInput(error.message.replace("archive entry", "file name", 1)) from None
        self.count += 1


class _Files:
    """The files of one upload on disk. In threads, one at a time."""

    def __init__(self, place: UploadFolder | None) -> None:
        self._place = place
        self.made = False
        self.records: list[InputRecord] = []
        self._name = ""
        self._digest = hashlib.sha256()
        self._size_bytes = 0
        self._descriptor = -1

    def carry_out(self, orders: Sequence[str | bytes | None]) -> None:
        """A text opens the file of that name, bytes are written to it, None closes it."""
        with disk_full_as_error(self._place.path if self._place is not None else ""):
            for order in orders:
                if isinstance(order, bytes):
                    self._digest.update(order)
                    self._size_bytes += len(order)
                    if self._descriptor >= 0:
                        _write_all(self._descriptor, order)
                elif order is not None:
                    self._begin(order)
                else:
                    self._close()
                    self.records.append(InputRecord(self._name, self._digest.hexdigest(), self._size_bytes))

    def _begin(self, name: str) -> None:
        self._name, self._digest, self._size_bytes = name, hashlib.sha256(), 0
        if self._place is None:
            return
        if not self.made:
            self._place.make(self._place.path)
            self.made = True
        path = f"{self._place.path}/in/{name}"
        if "/" in name:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)  # noqa: PTH103, PTH120
        self._descriptor = os.open(path, _NEW_FILE, 0o600)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        self._close()
        if self._place is not None:
            with contextlib.suppress(FileNotFoundError):  # it has become a job's folder, and went with that
                shutil.rmtree(self._place.path)


def _write_all(descriptor: int, data: bytes) -> None:
    written = os.write(descriptor, data)
    while written < len(data):
        written += os.write(descriptor, memoryview(data)[written:])
