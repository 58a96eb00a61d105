"""The HTTP API of one node agent, as requests: look, ask, post, fetch, remove. Decides nothing; see docs/operate/agents.md.

A result is written to a file that its caller names, hashed as it comes, and asked for from where it was when a connection is cut.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar
from urllib.parse import quote

import msgspec

from tasuki.client.agent_upload import Form, Upload
from tasuki.config import Address, parse_url
from tasuki.core.failover_events import Ended, JobSays, Refusal
from tasuki.core.nodes import Capacity
from tasuki.errors import ConfigError, Unavailable
from tasuki.net.http_transport import CutOff, HttpTransport, said_in

if TYPE_CHECKING:
    import ssl

    import httpx

T = TypeVar("T")
Heard = Callable[[int, int | None], None]
"""How many bytes of a result are here, and how many there will be."""
Answer = AbstractAsyncContextManager["httpx.Response"]

CONNECT_TIMEOUT_S = 1.0
LOOK_S = 2.0
ASK_S = 2.0
REMOVE_S = 1.0
READ_S = 30.0  # without a byte of a result; the plan notices silence sooner
RESUMES_IN_VAIN = 2
ZIP_TYPE = "application/zip"
SMALL_MAX_BYTES = 64 * 1024
WRITE_BYTES = 1024 * 1024  # a visit to the thread that writes costs as much as hashing 64 KiB

_etag = re.compile(r'(?:W/)?"?([0-9a-f]{64})"?').fullmatch
_seconds = re.compile(r"\d{1,6}").fullmatch


class Refusing(Exception):
    """The node answered something else than a result."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.words())
        self.refusal = refusal


class Elsewhere(Refusing):
    """A dispatcher answered that another node is to be asked the same."""

    def __init__(self, refusal: Refusal, location: str) -> None:
        super().__init__(refusal)
        self.location = location


class JobView(msgspec.Struct, frozen=True):
    """`GET /jobs/{job_id}`: what the plan needs, and how far it is."""

    says: JobSays
    fraction: float | None = None
    message: str = ""


class Result(msgspec.Struct, frozen=True):
    """A result that lies in a file, whole and verified."""

    ended: Ended
    sha256: str
    size_bytes: int
    cached: bool


class _Progress(msgspec.Struct):
    fraction: float | None = None
    message: str | None = None


class _Job(msgspec.Struct):
    state: str
    input: str | None = None
    exit_code: int | None = None
    progress: _Progress | None = None


class AgentNode:
    """One node. Errors: Unavailable where there was no answer, Refusing where it was no result."""

    def __init__(self, address: Address, token: str, tls: ssl.SSLContext | None) -> None:
        self.name = str(address)
        self._transport = HttpTransport(address, tls, CONNECT_TIMEOUT_S, stop_when_answered=True)
        self._transport.token = token

    async def close(self) -> None:
        await self._transport.close()

    def answer(self, method: str, path: str, **options: Any) -> Answer:
        """Whatever the node answers, for those who pass it on; see HttpTransport.answer."""
        return self._transport.answer(method, path, **options)

    # ------------------------------------------------------------------------------------------------ small questions

    async def look(self) -> Capacity | None:
        """Health and capacity, asked at once. Raises if it is not well; None if it does not tell its capacity."""
        asked = (self._small("GET", path, LOOK_S) for path in ("/health", "/capacity"))
        try:
            async with asyncio.timeout(LOOK_S):
                health, capacity = await asyncio.gather(*asked)
        except TimeoutError:
            raise CutOff(f"{self.name} did not answer within {LOOK_S:g} s") from None
        if isinstance(health, Refusal):
            raise Refusing(health)
        return _read(capacity, Capacity)

    async def ask(self, job_id: str) -> JobView | None:
        """How the job stands; None: it is not known here."""
        answer = await self._small("GET", f"/jobs/{quote(job_id)}", ASK_S)
        if isinstance(answer, Refusal):
            if answer.status == 404:
                return None
            raise Refusing(answer)
        job = _read(answer, _Job)
        if job is None:
            raise Unavailable(f"{self.name} answered something that is no job")
        progress = job.progress or _Progress()
        return JobView(JobSays(job.state, job.input or "", job.exit_code), progress.fraction, progress.message or "")

    async def remove(self, job_id: str) -> bool:
        """Cancel or remove it; whether it was there."""
        answer = await self._small("DELETE", f"/jobs/{quote(job_id)}", REMOVE_S)
        if isinstance(answer, Refusal) and answer.status != 404:
            raise Refusing(answer)
        return not isinstance(answer, Refusal)

    async def _small(self, method: str, path: str, answer_s: float) -> bytes | Refusal:
        async with self._transport.answer(method, path, answer_s=answer_s) as response:
            if not response.is_success:
                return await _refusal(response)
            body = b""
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > SMALL_MAX_BYTES:
                    raise Unavailable(f"{self.name} answered {method} {path} with more than {SMALL_MAX_BYTES} bytes")
            return body

    # ------------------------------------------------------------------------------------------------ results

    async def post(
        self, job_id: str, upload: Upload, part: Path, *, limit_s: float, sent: Callable[[int], None], heard: Heard
    ) -> Result:
        """Run it there and save its result; `limit_s` is how long the answer may take. A redirect is followed, once."""
        try:
            return await self._post(job_id, upload, part, limit_s, sent, heard)
        except Elsewhere as led:
            async with self._led_by(led, f"/run/{quote(job_id)}") as node:
                return await node._post(job_id, upload, part, limit_s, sent, heard)

    async def _post(
        self, job_id: str, upload: Upload, part: Path, limit_s: float, sent: Callable[[int], None], heard: Heard
    ) -> Result:
        form = Form(upload, sent)
        headers = {"Content-Type": form.content_type, "Content-Length": str(form.size_bytes)}
        params = {"input": upload.input} if upload.input else {}
        async with aclosing(form.pieces()) as pieces:
            posting = self._transport.answer(
                "POST", f"/run/{quote(job_id)}", params=params, headers=headers, content=pieces, answer_s=limit_s
            )
            return await self._save(job_id, part, heard, posting)

    async def fetch(self, job_id: str, part: Path, *, heard: Heard) -> Result:
        """Save the result that is there. A redirect is followed, once."""
        try:
            return await self._save(job_id, part, heard, self._stored(job_id, {}))
        except Elsewhere as led:
            async with self._led_by(led, f"/result/{quote(job_id)}") as node:
                return await node._save(job_id, part, heard, node._stored(job_id, {}))

    @asynccontextmanager
    async def _led_by(self, led: Elsewhere, path: str) -> AsyncIterator[AgentNode]:
        """The node that a redirect names. It gets our token, as whoever redirects has had it; never in the clear after TLS."""
        try:
            place, found, _ = led.location.partition(path)
            (address,) = parse_url(place)
        except ConfigError:
            raise led from None
        if not found or not address.http or (self._transport.address.scheme == "https" and address.scheme != "https"):
            raise led
        node = AgentNode(address, self._transport.token, self._transport.tls)
        try:
            yield node
        finally:
            await node.close()

    def _stored(self, job_id: str, headers: dict[str, str]) -> Answer:
        return self._transport.answer("GET", f"/result/{quote(job_id)}", headers=headers, answer_s=READ_S)

    async def _save(self, job_id: str, part: Path, heard: Heard, asking: Answer) -> Result:
        """A result that was cut off goes on where it was, as long as there is more of it each time."""
        in_vain = 0
        with _Download(part, heard) as download:
            while True:
                before = download.have
                try:
                    async with asking as response:
                        await download.take(response)
                    return download.whole(self.name)
                except CutOff:
                    in_vain = 0 if download.have > before else in_vain + 1
                    if not download.begun or in_vain >= RESUMES_IN_VAIN:
                        raise
                asking = self._stored(job_id, download.range_headers())


class _Download:
    """A result on its way into a file, over as many answers as it takes. There is no file before the first byte."""

    def __init__(self, part: Path, heard: Heard) -> None:
        self.have = 0
        self._part = part
        self._file: BinaryIO | None = None
        self._heard = heard
        self._hash = hashlib.sha256()
        self._total: int | None = None
        self._sha256 = ""
        self._ended = Ended("succeeded", 0)
        self._cached = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def begun(self) -> bool:
        return self._file is not None

    def range_headers(self) -> dict[str, str]:
        """For the rest of it. Without its ETag nobody could say whether the rest is of the same."""
        if not self.have or not self._sha256:
            return {}
        return {"Range": f"bytes={self.have}-", "If-Range": f'"{self._sha256}"'}

    async def take(self, response: httpx.Response) -> None:
        if not response.is_success:
            refusal, location = await _refusal(response), response.headers.get("location", "")
            raise Elsewhere(refusal, location) if response.status_code == 307 else Refusing(refusal)
        if response.status_code != 206:
            if ZIP_TYPE not in response.headers.get("content-type", ""):
                raise Refusing(Refusal(response.status_code, "", "but with no ZIP; is this a node agent?"))
            self._start_over(response)
        self._heard(self.have, self._total)
        loop = asyncio.get_running_loop()
        waiting = bytearray()
        try:
            async for piece in response.aiter_raw():
                waiting += piece
                if len(waiting) >= WRITE_BYTES:
                    full, waiting = waiting, bytearray()
                    await loop.run_in_executor(None, self._write, full)
                self._heard(self.have + len(waiting), self._total)
        finally:  # also of an answer that was cut: what came need not come again
            self._write(waiting)

    def _write(self, data: bytearray) -> None:
        assert self._file is not None
        self._hash.update(data)
        self._file.write(data)
        self.have += len(data)

    def _start_over(self, response: httpx.Response) -> None:
        self.have = 0
        self.__exit__()
        self._file = self._part.open("wb")
        self._hash = hashlib.sha256()
        found = _etag(response.headers.get("etag", ""))
        self._sha256 = found[1] if found else ""
        length = response.headers.get("content-length", "")
        self._total = int(length) if length.isascii() and length.isdigit() else None
        self._cached = response.headers.get("tasuki-cache") == "hit"
        outcome = response.headers.get("tasuki-outcome", "succeeded")
        self._ended = Ended(outcome, 0 if outcome == "succeeded" else None)

    def whole(self, node: str) -> Result:
        """All answers are over: is it what was announced?"""
        digest = self._hash.hexdigest()
        if self._total is not None and self.have != self._total:
            raise CutOff(f"the result from {node} ended after {self.have} of {self._total} bytes")
        if self._sha256 and digest != self._sha256:
            self.have = 0  # nothing of it can be used
            raise CutOff(f"the result from {node} has the sha256 {digest}, not {self._sha256} as announced")
        return Result(self._ended, digest, self.have, self._cached)


async def _refusal(response: httpx.Response) -> Refusal:
    said = await said_in(response)
    retry_after = response.headers.get("retry-after", "")
    retry_after_s = float(retry_after) if _seconds(retry_after) else None
    if said is None:
        where = response.headers.get("location", "")[:200]
        return Refusal(response.status_code, "", f"it leads to {where}" if where else "", retry_after_s)
    details: dict[str, Any] = said.details
    exit_code, error_code, differs = (details.get(name) for name in ("exit_code", "error_code", "differs"))
    return Refusal(
        response.status_code,
        said.code,
        said.message,
        retry_after_s,
        exit_code if isinstance(exit_code, int) else None,
        error_code if isinstance(error_code, str) else None,
        tuple(str(field) for field in differs) if isinstance(differs, list) else (),
    )


def _read(body: bytes | Refusal, kind: type[T]) -> T | None:
    """A small answer; None if it is not one of its kind."""
    if isinstance(body, Refusal):
        return None
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError:
        return None
