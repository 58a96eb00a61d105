"""Receive one upload: parse its form in the event loop, hash and write its files in a thread, never hold it whole in memory.

    upload = Upload(boundary, place, max_bytes)
    form = await upload.receive(request.stream())      the fields; InvalidInput, TooLarge: `discard` removes what was written
    files = await upload.finish()                      everything is written

Up to WRITE_BYTES are written together with the folder that they go to; a small upload without a thread. A larger upload is
written piece by piece while more arrives. Without a place the files are hashed and not written.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote

import msgspec
from multipart import MultipartError, MultipartSegment, PushMultipartParser  # type: ignore[import-untyped]
from starlette.requests import ClientDisconnect

from tasuki.agent.refusals import input_not_found
from tasuki.blobs.files import disk_full_as_error
from tasuki.blobs.zip.reader import ArchiveNames
from tasuki.core.failover.agent_protocol import InputRecord, parse_args, parse_timeout
from tasuki.core.failover.nodes import InputRef, parse_input
from tasuki.core.job import check_file_name
from tasuki.errors import InvalidInput, NotFound, TooLarge, Unavailable, quoted

T = TypeVar("T")

# ------------------------------------------------------------------------------------------------ multipart/form-data

HEADERS_MAX_BYTES = 8 * 1024  # of one part
HEADERS_MAX = 32  # of one part
FILES_MAX = 1_000
PARTS_MAX = FILES_MAX + 8  # a dispatcher adds the fields that its client left out

_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]").fullmatch
_PARAMETER = re.compile(r""";[ \t]*([!#$%&'*+.^_`|~0-9A-Za-z-]+)=(?:"((?:[^"\\]|\\.)*)"|([^";\s]+))[ \t]*""", re.DOTALL)
_ESCAPED = re.compile(r"\\([\\\"])")
_EXTENDED = re.compile(r"utf-8'[A-Za-z0-9-]*'((?:[!#$&+.^_`|~0-9A-Za-z-]|%[0-9A-Fa-f]{2})+)", re.IGNORECASE).fullmatch
_CONTROL = re.compile(r"[\r\n\0]").search
_PLAIN_ENCODINGS = ("binary", "8bit", "7bit")


class Part(msgspec.Struct, frozen=True):
    """Start of a part: the name of the field, and the file name if the part is a file."""

    name: str
    filename: str | None


def boundary_of(content_type: str) -> bytes:
    """Return the boundary that a Content-Type of multipart/form-data names; InvalidInput for anything else."""
    kind, separator, parameters = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        raise InvalidInput(f"multipart/form-data is needed, with the field file; got Content-Type {quoted(content_type)}")
    boundary = _parameters(separator + parameters).get("boundary", "")
    if _BOUNDARY(boundary) is None:
        raise InvalidInput("the Content-Type names no usable boundary; it has 1 to 70 characters (RFC 2046)")
    return boundary.encode("ascii")


class FormParser:
    """Parser of one form (RFC 7578), without I/O. Stricter than the library: see `_check_begin`, `_check_end` and `_part_of`."""

    def __init__(self, boundary: bytes) -> None:
        self._parser = PushMultipartParser(
            boundary, max_header_size=HEADERS_MAX_BYTES, max_header_count=HEADERS_MAX, max_segment_count=PARTS_MAX, strict=True
        )
        # A boundary includes the line break before it. The first one has none, so it is given one.
        self._opening = b"\r\n--" + boundary
        self._closing = self._opening + b"--"
        self._begin = b"\r\n"
        self._tail = b"\r\n"
        self._is_complete = False

    def feed(self, piece: bytes) -> Iterator[Part | bytes | None]:
        """Yield the events that this piece completes: the start of a part, its bytes, None at its end."""
        self._check_begin(piece)
        if self._is_complete or not piece:
            self._check_trailer(piece)
            return
        event: MultipartSegment | bytes | None = None
        try:
            for event in self._parser.parse(piece):
                yield _part_of(event) if isinstance(event, MultipartSegment) else event
        except MultipartError as error:
            raise InvalidInput(f"the form is not valid multipart/form-data: {error}") from None
        self._check_end(piece, at_part_end=event is None)

    def finish(self) -> None:
        """Check that the form is complete; InvalidInput if its end is missing."""
        if len(self._begin) < len(self._opening):
            raise self._wrong_begin()
        try:
            self._parser.close()
        except MultipartError:
            raise InvalidInput("the form ended before its closing boundary; send all of it") from None

    def _check_begin(self, piece: bytes) -> None:
        """Refuse a preamble, which the library skips."""
        if len(self._begin) < len(self._opening):
            self._begin = (self._begin + piece)[: len(self._opening)]
            if not self._opening.startswith(self._begin):
                raise self._wrong_begin()

    def _wrong_begin(self) -> InvalidInput:
        return InvalidInput("the form does not begin with the boundary that its Content-Type names")

    def _check_end(self, piece: bytes, *, at_part_end: bool) -> None:
        """Notice the closing boundary, which follows the end of a part: the library takes anything for an epilogue."""
        if at_part_end:
            end = self._tail + piece
            at = end.find(self._closing)
            if at >= 0:
                self._is_complete = True
                self._check_trailer(end[at + len(self._closing) :])
        self._tail = (self._tail + piece[-len(self._closing) :])[-len(self._closing) :]

    def _check_trailer(self, trailer: bytes) -> None:
        if trailer.strip(b"\r\n"):
            raise InvalidInput("there is something behind the closing boundary of the form")


def _part_of(segment: MultipartSegment) -> Part:
    """Check the headers of a part. The parameters are read here: the library takes the last of two, and decodes %22."""
    if sum(len(name) + len(value) for name, value in segment.headerlist) > HEADERS_MAX_BYTES:
        raise InvalidInput(f"the headers of a part of the form are larger than {HEADERS_MAX_BYTES} bytes")
    headers: dict[str, str] = {}
    for name, value in segment.headerlist:
        if name in headers or _CONTROL(value):
            raise InvalidInput(f"a part of the form has the header {quoted(name)} twice, or with a control character")
        headers[name] = value
    if headers.get("Content-Transfer-Encoding", "binary").strip().lower() not in _PLAIN_ENCODINGS:
        raise InvalidInput("a part of the form has a Content-Transfer-Encoding; send the bytes as they are")
    _, separator, rest = headers["Content-Disposition"].partition(";")
    parameters = _parameters(separator + rest)
    if "name" not in parameters:
        raise InvalidInput("a part of the form has no name")
    filename = parameters.get("filename")
    if "filename*" in parameters:  # RFC 7578 forbids it, and .NET always sends it; only there a name beyond ASCII is readable
        filename = _extended_value(parameters["filename*"])
    return Part(parameters["name"], filename)


def _extended_value(text: str) -> str:
    """Decode a parameter value that names its character set (RFC 8187): `utf-8''b%C3%BCcher.csv`."""
    found = _EXTENDED(text)
    try:
        if found is not None:
            return unquote(found[1], errors="strict")
    except UnicodeDecodeError:
        """Bytes that are no UTF-8 are refused like every other value that cannot be read."""
    raise InvalidInput(
        f"the file name {quoted(text)} of a part of the form must be utf-8'' and the name, percent-encoded as UTF-8"
    )


def _parameters(text: str) -> dict[str, str]:
    """Parse all of `; name="value"; other=value`."""
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


# ------------------------------------------------------------------------------------------------ the upload

WRITE_BYTES = 1024 * 1024
SMALL_BYTES, SMALL_FILES = 64 * 1024, 4
"""Largest upload that is written in the loop: a few system calls, which take less time than to call a thread."""
FIELD_MAX_BYTES = 1024 * 1024
PATIENCE_S = 30.0
SLOWEST_BYTES_PER_S = 16 * 1024
"""An upload may take PATIENCE_S, and in addition as long as it takes at this pace."""
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Names that other systems do not allow; an upload must work on every node.
_RESERVED = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?", re.IGNORECASE).fullmatch


class UploadForm(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a form, without the files."""

    exec: str | None = None
    args: tuple[str, ...] = ()
    timeout_s: float | None = None
    inputs: tuple[InputRef, ...] = ()
    """Stored files that do not come with the form."""


class UploadFolder(NamedTuple):
    """Folder that does not exist yet, and the function that makes it, with `in` in it."""

    path: str
    make: Callable[[str], None]


class UploadFiles(Protocol):
    """Destination of the files of an upload. Called in threads, one call at a time."""

    made: bool
    """There is something to remove."""
    records: list[InputRecord]

    def write(self, steps: Sequence[str | bytes | None]) -> None:
        """Carry out steps: a text opens the file of that name, bytes are written to it, None closes it."""

    def remove(self) -> None: ...


class InputSource(Protocol):
    """Source from which an agent fetches stored inputs."""

    def pieces(self, sha256: str) -> AsyncGenerator[bytes, None]:
        """Yield the bytes; NotFound, Unavailable. The caller compares the hash."""

    async def close(self) -> None: ...


class UploadDeadline:
    """Deadline of a client that sends a body: PATIENCE_S, and in addition as long as its bytes take at the slowest pace. Only
    the time in which its bytes are awaited counts."""

    def __init__(self) -> None:
        self.received_bytes = 0
        self._waited_s = 0.0

    async def wait(self, piece: Awaitable[T]) -> T:
        """Wait for the next piece; InvalidInput if it does not come in time. The caller counts its bytes."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(PATIENCE_S + self.received_bytes / SLOWEST_BYTES_PER_S - self._waited_s):
                return await piece
        except TimeoutError:
            raise too_slow(self.received_bytes, self._waited_s + loop.time() - began) from None
        finally:
            self._waited_s += loop.time() - began


def too_slow(received_bytes: int, seconds: float) -> InvalidInput:
    return InvalidInput(
        f"the upload is too slow: {received_bytes} bytes in {seconds:.0f} s; it needs {SLOWEST_BYTES_PER_S} bytes a second"
    )


class Upload:
    """One upload. Belongs to one task."""

    def __init__(
        self,
        boundary: bytes,
        place: UploadFolder | None,
        max_bytes: int,
        *,
        source: InputSource | None = None,
        files: UploadFiles | None = None,
    ) -> None:
        """Take an upload. Without a place the files are only hashed. `source`: for stored inputs. `files`: another destination,
        which needs no source: stored inputs are there."""
        self._parser = FormParser(boundary)
        self._fetches = files is None
        self._source = source
        self._files: UploadFiles = files or _Files(place)
        self._max_bytes = max_bytes
        self.received_bytes = 0
        self._names = ArchiveNames()
        self._file_count = 0
        self._fetched: tuple[InputRef, ...] = ()
        self._fields: dict[str, bytearray] = {}
        self._inputs: list[bytearray] = []
        self._fields_bytes = 0
        self._open: bytearray | None = None
        """The field that is being read; None: a file is."""
        self._pending: list[str | bytes | None] = []
        self._pending_bytes = 0
        self._writing: asyncio.Future[Any] | None = None

    async def receive(self, stream: AsyncIterable[bytes]) -> UploadForm:
        """Read the form to its end, and fetch the stored inputs that it names."""
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
            raise too_slow(self.received_bytes, loop.time() - began) from None
        except ClientDisconnect:
            raise InvalidInput("the upload ended before it was whole") from None
        self._parser.finish()
        if not self._file_count and not self._inputs:
            raise InvalidInput("the form has no file; send one or more as the field file")
        form = self._form()
        if self._fetches:
            self._fetched = form.inputs
            for ref in form.inputs:
                await self._fetch(ref)
        return form

    async def _fetch(self, ref: InputRef) -> None:
        if self._source is None:
            raise InvalidInput("this agent fetches no inputs, it was started without --inputs; send the files as the field file")
        self._pending.append(ref.name)
        try:
            async with aclosing(self._source.pieces(ref.sha256)) as pieces:
                async for piece in pieces:
                    self._check_size(piece)
                    self._pending.append(piece)
                    self._pending_bytes += len(piece)
                    if self._pending_bytes >= WRITE_BYTES:
                        await self._write()
        except NotFound:
            raise input_not_found(ref.sha256) from None
        self._pending.append(None)

    async def finish(self) -> Sequence[InputRecord]:
        """Write everything; return the files."""
        is_small = self._writing is None and self._pending_bytes <= SMALL_BYTES and self._file_count <= SMALL_FILES
        if is_small and isinstance(self._files, _Files):
            self._files.write(self._pending)
        else:
            await self._write()
            await self._written()
        found = {file.name: file.sha256 for file in self._files.records}
        for ref in self._fetched:
            if found[ref.name] != ref.sha256:
                raise Unavailable(f"input {ref.sha256} was fetched with the sha256 {found[ref.name]}; ask again")
        return self._files.records

    async def discard(self) -> None:
        """Remove everything, after the thread that still writes has finished."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        if self._files.made:
            await asyncio.to_thread(self._files.remove)

    # ------------------------------------------------------------------------------------------------ in the loop

    def _check_size(self, piece: bytes) -> None:
        self.received_bytes += len(piece)
        if self.received_bytes > self._max_bytes:
            raise TooLarge(f"the upload is larger than the limit of {self._max_bytes} bytes")

    def _take(self, piece: bytes) -> None:
        self._check_size(piece)
        for event in self._parser.feed(piece):
            if isinstance(event, Part):
                self._begin(event)
            elif event is None:
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
            self._add_name(part.filename)
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

    def _add_name(self, name: str) -> None:
        """Check that a file name is allowed, and that no two files have one name."""
        check_file_name(name)
        if any(_RESERVED(part) for part in name.split("/")):
            raise InvalidInput(f"file name {quoted(name)} is reserved on some systems; rename the file")
        try:
            self._names.add(name, is_folder=False)
        except InvalidInput as error:
            raise InvalidInput(error.message.replace("archive entry", "file name", 1)) from None
        self._file_count += 1
        if self._file_count > FILES_MAX:
            raise InvalidInput(f"the form has more than {FILES_MAX} files; put them into archives")

    def _form(self) -> UploadForm:
        try:
            fields = {name: value.decode("utf-8") for name, value in self._fields.items()}
            inputs = tuple(parse_input(value.decode("utf-8")) for value in self._inputs)
        except UnicodeDecodeError:
            raise InvalidInput("a field of the form is not UTF-8") from None
        for ref in inputs:
            self._add_name(ref.name)
        return UploadForm(
            exec=fields.get("exec") or None,
            args=parse_args(fields["args"]) if "args" in fields else (),
            timeout_s=parse_timeout(fields["timeout_s"]) if "timeout_s" in fields else None,
            inputs=inputs,
        )

    async def _write(self) -> None:
        """Write in a thread, while more is read."""
        await self._written()
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        self._writing = asyncio.get_running_loop().run_in_executor(None, self._files.write, pending)

    async def _written(self) -> None:
        if self._writing is not None:
            await asyncio.shield(self._writing)


class _Files:
    """Files of one upload on disk. Called in threads, one call at a time."""

    def __init__(self, place: UploadFolder | None) -> None:
        self._place = place
        self.made = False
        self.records: list[InputRecord] = []
        self._name = ""
        self._digest = hashlib.sha256()
        self._size_bytes = 0
        self._descriptor = -1

    def write(self, steps: Sequence[str | bytes | None]) -> None:
        with disk_full_as_error(self._place.path if self._place is not None else ""):
            for step in steps:
                if isinstance(step, bytes):
                    self._digest.update(step)
                    self._size_bytes += len(step)
                    if self._descriptor >= 0:
                        _write_all(self._descriptor, step)
                elif step is not None:
                    self._begin(step)
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
            with contextlib.suppress(FileNotFoundError):  # it has become the folder of a job, which was removed
                shutil.rmtree(self._place.path)


def _write_all(descriptor: int, data: bytes) -> None:
    written = os.write(descriptor, data)
    while written < len(data):
        written += os.write(descriptor, memoryview(data)[written:])
