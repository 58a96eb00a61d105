"""Transfers between this client and a node agent or dispatcher: the run request, stored inputs, the download of a result.

Input files are read while they are sent. A dispatcher that has a store of inputs is asked for files by their hashes, so that only
missing ones are sent. A result is downloaded into a part file beside the output, and verified while it arrives.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import itertools
import os
import re
import secrets
import zipfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

import msgspec

from tasuki.blobs.files import PartFile
from tasuki.clocks import now
from tasuki.core.decoding import decodable
from tasuki.core.failover import events
from tasuki.core.failover.agent_protocol import InputRecord, input_hash
from tasuki.core.failover.events import JobEnded, Refusal
from tasuki.core.failover.nodes import InputRef
from tasuki.core.job import check_file_name
from tasuki.core.ranges import content_range, is_number, parse_content_range, range_headers
from tasuki.errors import InvalidInput, ResponseLost, quoted
from tasuki.net.http.transport import ERROR_MAX_BYTES, ErrorResponse, HttpTransport, MultipartForm, read_body, run_fields
from tasuki.net.streams import FileSink, FileSource

if TYPE_CHECKING:
    import httpx

REPORT_EVERY_S = 0.25


class RunRequest(msgspec.Struct, frozen=True):
    """Request to run an exec with files; the same for every node."""

    exec: str
    args: tuple[str, ...]
    files: tuple[tuple[Path, InputRecord], ...]
    timeout_s: float | None = None

    @property
    def input(self) -> str:
        """Input hash; empty if the agent chooses the exec."""
        return input_hash(self.exec, self.args, [record for _, record in self.files]) if self.exec else ""

    @property
    def size_bytes(self) -> int:
        return sum(record.size_bytes for _, record in self.files)


def read_upload(
    exec_: str, args: Sequence[str], files: Sequence[str | os.PathLike[str]], timeout_s: float | None = None
) -> RunRequest:
    """Make a request. Reads every file once, for its sha256; blocks, so call it in a thread."""
    if not files:
        raise InvalidInput("a node agent needs at least one input file; give it with --file")
    found: list[tuple[Path, InputRecord]] = []
    for file in files:
        path = Path(file)
        name = check_file_name(path.name)
        if any(record.name == name for _, record in found):
            raise InvalidInput(f"two input files have the name {quoted(name)}; rename one of them")
        found.append((path, _record(path, name)))
    return RunRequest(exec_, tuple(args), tuple(found), timeout_s)


def _record(path: Path, name: str) -> InputRecord:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return InputRecord(name, digest, file.tell())
    except OSError as error:
        raise InvalidInput(f"the input file {str(path)!r} cannot be read: {error.strerror or error}") from None


async def _pieces_of(
    path: Path, size_bytes: int, sent: Callable[[int], None], before_bytes: int, start: int = 0
) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a file from `start` to the size that it had when it was hashed; InvalidInput if it became shorter.
    `sent` is called with the number of bytes so far, `before_bytes` of the files before included."""
    with await asyncio.to_thread(path.open, "rb") as file:
        async with FileSource(file) as source, aclosing(source.pieces(start, size_bytes)) as pieces:
            async for piece in pieces:
                yield piece
                start += len(piece)
                sent(before_bytes + start)
    if start < size_bytes:
        raise InvalidInput(f"the input file {str(path)!r} became shorter while it was sent")


class RunProgress(msgspec.Struct, frozen=True):
    """Progress of a job: in bytes for an upload or download, as reported by the program for a run."""

    stage: str
    """upload, run or download"""
    node: str
    done_bytes: int = 0
    total_bytes: int | None = None
    fraction: float | None = None
    message: str = ""


class TransferListener:
    """Receiver of the progress of one request: makes events for the plan, and reports for the caller."""

    def __init__(
        self,
        ticket: int,
        node: str,
        size_bytes: int,
        notify: Callable[[events.Event], None],
        progress: Callable[[RunProgress], None],
    ) -> None:
        self._ticket = ticket
        self._where = node
        self._size_bytes = size_bytes
        self._notify = notify
        self._progress = progress
        self.is_redirected = False
        self._reported_at = 0.0

    def sent(self, done_bytes: int) -> None:
        """Note that the node has this many bytes of the files, sent now or earlier."""
        self._progress(RunProgress("upload", self._where, done_bytes, self._size_bytes))

    def uploaded(self) -> None:
        """Note that the node has the whole request."""
        self._notify(events.Uploaded(self._ticket))

    def received(self, done_bytes: int, total_bytes: int | None) -> None:
        if now().monotonic - self._reported_at >= REPORT_EVERY_S or done_bytes == total_bytes:
            self._reported_at = now().monotonic
            self._notify(events.ResultPieceReceived(self._ticket))
            self._progress(RunProgress("download", self._where, done_bytes, total_bytes))

    def redirected(self, to: str) -> None:
        """Note that a dispatcher redirected the request to this node."""
        self._where, self.is_redirected = to, True
        self._notify(events.Redirected(self._ticket, to))


class RunForm:
    """Body of one request, sent once. With `by_name` the node has the files, and is sent their hashes."""

    def __init__(self, upload: RunRequest, listener: TransferListener, *, by_name: bool = False) -> None:
        self._listener = listener
        self._files = () if by_name else upload.files
        self._size_bytes = upload.size_bytes
        names = [str(InputRef(record.sha256, record.name)) for _, record in upload.files] if by_name else []
        self._form = MultipartForm(
            run_fields(upload.exec, upload.args, upload.timeout_s, names),
            [(record.name, record.size_bytes) for _, record in self._files],
        )
        self.headers = self._form.headers

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body, and report the progress."""
        ends = itertools.accumulate(record.size_bytes for _, record in self._files)
        contents = (
            _pieces_of(path, record.size_bytes, self._listener.sent, end - record.size_bytes)
            for (path, record), end in zip(self._files, ends, strict=True)
        )
        async with aclosing(self._form.pieces(contents)) as pieces:
            async for piece in pieces:
                yield piece
        self._listener.sent(self._size_bytes)
        self._listener.uploaded()


# ------------------------------------------------------------------------------------------------ refusals

_seconds = re.compile(r"\d{1,6}").fullmatch


class NodeRefused(Exception):
    """A response that is not a result."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.words())
        self.refusal = refusal


class TokenRefused(NodeRefused):
    """The node is healthy, and does not accept our token."""


class NodeRedirect(NodeRefused):
    """A dispatcher redirects the request to another node."""

    def __init__(self, refusal: Refusal, location: str) -> None:
        super().__init__(refusal)
        self.location = location


async def read_refusal(response: httpx.Response) -> tuple[Refusal, bytes]:
    """Read a response that is not 2xx; return what it says, and its body."""
    body = await read_body(response, ERROR_MAX_BYTES)
    return _refusal_in(response, body), body


def _refusal_in(response: httpx.Response, body: bytes) -> Refusal:
    retry_after = response.headers.get("retry-after", "")
    retry_after_s = float(retry_after) if _seconds(retry_after) else None
    try:
        error = msgspec.json.decode(body, type=ErrorResponse).error
    except msgspec.DecodeError:
        where = response.headers.get("location", "")[:200]
        return Refusal(response.status_code, "", f"it redirects to {where}" if where else "", retry_after_s)
    exit_code, error_code, differs = (error.details.get(name) for name in ("exit_code", "error_code", "differs"))
    return Refusal(
        response.status_code,
        error.code,
        error.message,
        retry_after_s,
        exit_code if isinstance(exit_code, int) else None,
        error_code if isinstance(error_code, str) else None,
        tuple(str(field) for field in differs) if isinstance(differs, list) else (),
    )


# ------------------------------------------------------------------------------------------------ stored inputs

LARGE_BYTES = 1024 * 1024  # to send a smaller file takes less time than to ask for it
RESUMED_BYTES = 16 * 1024 * 1024
"""A file of this size is stored before the job is sent: an upload that was cut can be resumed, also at another dispatcher."""
HEAD_S = 5.0
HEADS_AT_ONCE = 8


async def found_inputs(transport: HttpTransport, upload: RunRequest, from_bytes: int) -> set[str]:
    """Return the hashes of the stored files of at least `from_bytes`; none if the node has no store. Unavailable."""
    turn = asyncio.Semaphore(HEADS_AT_ONCE)

    async def is_there(sha256: str) -> bool:
        async with turn, transport.answer("HEAD", f"/inputs/{sha256}", answer_s=HEAD_S) as response:
            return response.is_success

    asked = list({record.sha256 for _, record in upload.files if record.size_bytes >= from_bytes})
    there = await asyncio.gather(*(is_there(sha256) for sha256 in asked), return_exceptions=True)
    for error in there:
        if isinstance(error, BaseException):
            raise error
    return {sha256 for sha256, found in zip(asked, there, strict=True) if found}


async def put_missing(
    transport: HttpTransport, upload: RunRequest, found: set[str], listener: TransferListener, limit_s: float
) -> None:
    """Store the other files; an upload of a large one that was cut is resumed. NodeRefused, Unavailable."""
    stored = set(found)
    done = 0
    for path, record in upload.files:
        if record.sha256 not in stored:
            await _Putting(transport, path, record, listener, done, limit_s).put()
            stored.add(record.sha256)
        done += record.size_bytes
        listener.sent(done)


class _Putting(NamedTuple):
    """Upload of one file into the store of inputs."""

    transport: HttpTransport
    path: Path
    record: InputRecord
    listener: TransferListener
    before_bytes: int
    limit_s: float

    async def put(self) -> None:
        start = await self._stored_bytes() if self.record.size_bytes >= RESUMED_BYTES else 0
        if start == self.record.size_bytes:
            return
        refusal = await self._send(start)
        if refusal is not None and start:  # the stored part is of no use, or another client resumes it
            refusal = await self._send(0)
        if refusal is not None:
            raise NodeRefused(refusal)

    async def _stored_bytes(self) -> int:
        """Return how many bytes are stored; 0 if the node does not answer that."""
        headers = {"Content-Range": content_range(0, 0, self.record.size_bytes), "Content-Length": "0"}
        async with self.transport.answer("PUT", f"/inputs/{self.record.sha256}", headers=headers, answer_s=HEAD_S) as response:
            if not response.is_success:
                return 0
            try:
                offset = msgspec.json.decode(await response.aread(), type=_Offset).offset
            except msgspec.MsgspecError:
                return 0
        return offset if 0 <= offset <= self.record.size_bytes else 0

    async def _send(self, start: int) -> Refusal | None:
        size = self.record.size_bytes
        headers = {"Content-Length": str(size - start), "Content-Type": "application/octet-stream"}
        if start:
            headers["Content-Range"] = content_range(start, size, size)
        async with (
            aclosing(_pieces_of(self.path, size, self.listener.sent, self.before_bytes, start)) as pieces,
            self.transport.answer(
                "PUT", f"/inputs/{self.record.sha256}", headers=headers, content=pieces, answer_s=self.limit_s
            ) as response,
        ):
            return None if response.is_success else (await read_refusal(response))[0]


@decodable
class _Offset(msgspec.Struct):
    offset: int


# ------------------------------------------------------------------------------------------------ results

ZIP_TYPE = "application/zip"
NO_LOCKS_ERRNOS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})  # of flock on some file systems
NAME_MAX_CHARS = 100  # of the output's name in the name of the part file; file systems allow 255 bytes in all

ETAG = re.compile(r'(?:W/)?"?([0-9a-f]{64})"?').fullmatch


def part_path(target: Path, job_id: str) -> Path:
    """Return the part file for the result of a job."""
    name = target.name if len(target.name) <= NAME_MAX_CHARS else _short(target.name)
    return target.with_name(f".{name}.{_short(job_id)}.part")


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_part(target: Path, job_id: str) -> PartFile | None:
    """Return the file that an earlier process left, if it is dead."""
    return _claim(part_path(target, job_id), create=False)


def make_part(target: Path, job_id: str) -> PartFile:
    """Return the file of this job, or a file of its own while another process writes to it and where there are no locks."""
    path = part_path(target, job_id)
    part = _claim(path, create=True)
    if part is None:
        part = PartFile.create(path.with_name(f"{path.name.removesuffix('.part')}.{secrets.token_hex(4)}.part"), mode=0o666)
    return part


def _claim(path: Path, *, create: bool) -> PartFile | None:
    try:
        return PartFile.claim(path, create=create, mode=0o666)
    except OSError as error:
        if error.errno not in NO_LOCKS_ERRNOS:
            raise
        return None


class DownloadedResult(msgspec.Struct, frozen=True):
    """Complete and verified result in its part file."""

    ended: JobEnded
    sha256: str
    size_bytes: int
    cached: bool
    left_out: int
    node: str
    """Node that ran the job, if the one that was asked is a dispatcher; else empty."""
    part: PartFile


class Download:
    """Download of one result, over as many responses as needed. No part file exists before the first byte, or after an error."""

    def __init__(self, target: Path, job_id: str, received: Callable[[int, int | None], None]) -> None:
        """`received` is called with the number of bytes so far, and in total if that is known."""
        self.have = 0
        self._target = target
        self._job_id = job_id
        self._part: PartFile | None = None
        self._received = received
        self._hash = hashlib.sha256()
        self._answered = False
        self._total: int | None = None
        self._sha256 = ""
        self._ended = JobEnded("succeeded", 0)
        self._cached = False
        self._left_out = 0
        self._node = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None and self._part is not None:
            self._part.discard()

    @property
    def begun(self) -> bool:
        return self._part is not None

    def take_up(self) -> None:
        """Continue the part file of an earlier process; blocks. The hash shows in the end if it is of the same result."""
        self._part = find_part(self._target, self._job_id)
        if self._part is not None:
            self.have = self._part.read_into(self._hash.update)

    def range_headers(self) -> dict[str, str]:
        """Return the headers that ask for the rest; none without an ETag, as the rest could be of another result."""
        if not self.have or (self._answered and not self._sha256):
            return {}
        return range_headers(self.have, f'"{self._sha256}"' if self._sha256 else "")

    async def take(self, response: httpx.Response) -> None:
        if response.status_code == 416 and self.have:
            self.have = 0
            raise ResponseLost("the part file of an earlier process is of another result")
        if not response.is_success:
            refusal, _ = await read_refusal(response)
            is_redirect = response.status_code == 307
            raise NodeRedirect(refusal, response.headers.get("location", "")) if is_redirect else NodeRefused(refusal)
        if response.status_code == 206:
            self._go_on(response)
        else:
            self._start_over(response)
        self._received(self.have, self._total)
        assert self._part is not None
        received = self.have
        async with FileSink(self._write, self._hash) as sink:
            try:
                async for piece in response.aiter_raw():
                    await sink.add(piece)
                    received += len(piece)
                    self._received(received, self._total)
            finally:  # also if the response was cut: the bytes that arrived are kept
                await sink.flush()

    def _write(self, piece: bytes) -> None:
        assert self._part is not None
        self.have += self._part.write(piece)

    def _go_on(self, response: httpx.Response) -> None:
        found = parse_content_range(response.headers.get("content-range", ""))
        if self._part is None or (found is not None and found.start != self.have):
            raise NodeRefused(
                Refusal(response.status_code, "", "but not with the part that was asked for; is this a node agent?")
            )
        if not self._answered:
            self._note(response)
            self._total = found.size_bytes if found is not None else None
        if not self._sha256:
            raise ResponseLost("without an ETag this may not be the rest of the part file of an earlier process")

    def _start_over(self, response: httpx.Response) -> None:
        if ZIP_TYPE not in response.headers.get("content-type", ""):
            raise NodeRefused(Refusal(response.status_code, "", "but with no ZIP; is this a node agent?"))
        if response.status_code != 200 or not ETAG(response.headers.get("etag", "")):
            raise NodeRefused(
                Refusal(response.status_code, "", "with a ZIP, but without its sha256 as ETag; is this a node agent?")
            )
        if self._part is None:
            self._part = make_part(self._target, self._job_id)
        self._part.truncate()
        self.have = 0
        self._hash = hashlib.sha256()
        self._note(response)
        length = response.headers.get("content-length", "")
        self._total = int(length) if is_number(length) else None

    def _note(self, response: httpx.Response) -> None:
        self._answered = True
        found = ETAG(response.headers.get("etag", ""))
        self._sha256 = found[1] if found else ""
        self._cached = response.headers.get("tasuki-cache") == "hit"
        outcome = response.headers.get("tasuki-outcome", "succeeded")
        self._ended = JobEnded(outcome, 0 if outcome == "succeeded" else None)
        left_out = response.headers.get("tasuki-left-out", "")
        self._left_out = int(left_out) if is_number(left_out) else 0
        self._node = response.headers.get("tasuki-node", "")

    def whole(self, node: str) -> DownloadedResult:
        """Return the result if it is what was announced; ResponseLost, NodeRefused."""
        assert self._part is not None
        digest = self._hash.hexdigest()
        if self._total is not None and self.have != self._total:
            raise ResponseLost(f"the result from {node} ended after {self.have} of {self._total} bytes")
        if self._sha256 and digest != self._sha256:
            self.have = 0  # nothing of it can be used
            raise ResponseLost(f"the result from {node} has the sha256 {digest}, not {self._sha256} as announced")
        if not zipfile.is_zipfile(self._part.path):
            raise NodeRefused(Refusal(200, "", "with a result that is no ZIP; is this a node agent?"))
        return DownloadedResult(self._ended, digest, self.have, self._cached, self._left_out, self._node, self._part)
