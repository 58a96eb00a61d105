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
import hashlib
import os
import re
import shutil
from collections.abc import AsyncIterable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.requests import ClientDisconnect

from tasuki.agent.multipart import MultipartParser, Part, PartEnded
from tasuki.blobs.files import disk_full_as_error
from tasuki.blobs.zip.names import NameBook
from tasuki.core.failover.agent_protocol import InputRecord, parse_args, parse_timeout
from tasuki.core.failover.dispatch_policy import InputRef, parse_input
from tasuki.core.ids import quoted
from tasuki.core.job import check_file_name
from tasuki.errors import InvalidInput, TooLarge

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
