"""A result on its way into a file beside the output, verified as it comes. Touches that file, and the output when it is whole.

The same job and output always lead to the same file: a client that was killed in the middle left it there, and the next one goes
on behind it. Whoever writes to it holds a lock (flock), which the kernel gives back when the process dies; anybody else, and
systems without such locks, use a file of their own and begin anew.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from tasuki.blobs.files import PartFile
from tasuki.client.agent_answers import Elsewhere, Refusing, refusal_of
from tasuki.core.failover.events import JobEnded, Refusal
from tasuki.core.ranges import is_number, parse_content_range, range_headers
from tasuki.errors import ResponseLost
from tasuki.net.streams import FileSink

if TYPE_CHECKING:
    import httpx

Heard = Callable[[int, int | None], None]
"""How many bytes of a result are here, and how many there will be."""

ZIP_TYPE = "application/zip"
NAME_MAX_CHARS = 100  # of the output's name in the name of the file beside it; file systems allow 255 bytes in all

ETAG = re.compile(r'(?:W/)?"?([0-9a-f]{64})"?').fullmatch


# ---------------------------------------------------------------------------------------------------- the file


def part_path(target: Path, job_id: str) -> Path:
    """Where the result of this job is collected."""
    name = target.name if len(target.name) <= NAME_MAX_CHARS else _short(target.name)
    return target.with_name(f".{name}.{_short(job_id)}.part")


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_part(target: Path, job_id: str) -> PartFile | None:
    """Return the file that an earlier process left, if it is dead."""
    return PartFile.claim(part_path(target, job_id), create=False)


def make_part(target: Path, job_id: str) -> PartFile:
    """Return the file of this job, or a file of its own while another process writes to it and where there are no locks."""
    path = part_path(target, job_id)
    part = PartFile.claim(path, mode=0o666)
    if part is None:
        part = PartFile.create(path.with_name(f"{path.name.removesuffix('.part')}.{secrets.token_hex(4)}.part"), mode=0o666)
    return part


# ---------------------------------------------------------------------------------------------------- the download


class DownloadedResult(msgspec.Struct, frozen=True):
    """A result that lies in a file, whole and verified."""

    ended: JobEnded
    sha256: str
    size_bytes: int
    cached: bool
    part: PartFile


class Download:
    """A result on its way, over as many answers as it takes. There is no file before the first byte, and none after an error."""

    def __init__(self, target: Path, job_id: str, heard: Heard) -> None:
        self.have = 0
        self._target = target
        self._job_id = job_id
        self._part: PartFile | None = None
        self._heard = heard
        self._hash = hashlib.sha256()
        self._answered = False
        self._total: int | None = None
        self._sha256 = ""
        self._ended = JobEnded("succeeded", 0)
        self._cached = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None and self._part is not None:
            self._part.discard()

    @property
    def begun(self) -> bool:
        return self._part is not None

    def take_up(self) -> None:
        """Go on behind what an earlier process left. Blocks: for a thread. Whether it is of the same result shows in the end."""
        self._part = find_part(self._target, self._job_id)
        if self._part is not None:
            self.have = self._part.read_into(self._hash.update)

    def range_headers(self) -> dict[str, str]:
        """For the rest of it. Without its ETag nobody could say whether the rest is of the same."""
        if not self.have or (self._answered and not self._sha256):
            return {}
        return range_headers(self.have, f'"{self._sha256}"' if self._sha256 else "")

    async def take(self, response: httpx.Response) -> None:
        if response.status_code == 416 and self.have:
            self.have = 0
            raise ResponseLost("what an earlier process left is not of this result")
        if not response.is_success:
            refusal, location = await refusal_of(response), response.headers.get("location", "")
            raise Elsewhere(refusal, location) if response.status_code == 307 else Refusing(refusal)
        if response.status_code == 206:
            self._go_on(response)
        else:
            self._start_over(response)
        self._heard(self.have, self._total)
        assert self._part is not None
        received = self.have
        async with FileSink(self._write, self._hash) as sink:
            try:
                async for piece in response.aiter_raw():
                    await sink.add(piece)
                    received += len(piece)
                    self._heard(received, self._total)
            finally:  # also of an answer that was cut: what came need not come again
                await sink.flush()

    def _write(self, piece: bytes) -> None:
        assert self._part is not None
        self.have += self._part.write(piece)

    def _go_on(self, response: httpx.Response) -> None:
        found = parse_content_range(response.headers.get("content-range", ""))
        if self._part is None or (found is not None and found.start != self.have):
            raise Refusing(Refusal(response.status_code, "", "but not with the part that was asked for; is this a node agent?"))
        if not self._answered:
            self._note(response)
            self._total = found.size_bytes if found is not None else None
        if not self._sha256:
            raise ResponseLost("it cannot be known whether this is the rest of what an earlier process left")

    def _start_over(self, response: httpx.Response) -> None:
        if ZIP_TYPE not in response.headers.get("content-type", ""):
            raise Refusing(Refusal(response.status_code, "", "but with no ZIP; is this a node agent?"))
        if response.status_code != 200 or not ETAG(response.headers.get("etag", "")):
            raise Refusing(Refusal(response.status_code, "", "with a ZIP, but without its sha256 as ETag; is this a node agent?"))
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

    def whole(self, node: str) -> DownloadedResult:
        """All answers are over: is it what was announced?"""
        assert self._part is not None
        digest = self._hash.hexdigest()
        if self._total is not None and self.have != self._total:
            raise ResponseLost(f"the result from {node} ended after {self.have} of {self._total} bytes")
        if self._sha256 and digest != self._sha256:
            self.have = 0  # nothing of it can be used
            raise ResponseLost(f"the result from {node} has the sha256 {digest}, not {self._sha256} as announced")
        if not zipfile.is_zipfile(self._part.path):
            raise Refusing(Refusal(200, "", "with a result that is no ZIP; is this a node agent?"))
        return DownloadedResult(self._ended, digest, self.have, self._cached, self._part)
