"""The HTTP API of one node agent, as requests: look, ask, post, fetch, remove. Decides nothing; see docs/operate/agents.md.

A result is collected in a file beside the output, and asked for from where it was when a connection is cut. A file that the node
keeps already is named instead of sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from tasuki.client.agents.transfer import (
    RESUMED_BYTES,
    Download,
    DownloadedResult,
    Elsewhere,
    NotOurs,
    Refusing,
    RunForm,
    RunRequest,
    Telling,
    found_inputs,
    put_missing,
    refusal_of,
)
from tasuki.config import Address, parse_url
from tasuki.core.failover.events import TOKEN_STATUSES, JobSays, Refusal
from tasuki.core.failover.nodes import Capacity
from tasuki.errors import ConfigError, ResponseLost, Unavailable
from tasuki.net.http.transport import HttpTransport

if TYPE_CHECKING:
    import ssl

    import httpx

T = TypeVar("T")
Answer = AbstractAsyncContextManager["httpx.Response"]

CONNECT_TIMEOUT_S = 1.0
LOOK_S = 2.0
ASK_S = 2.0
REMOVE_S = 1.0
READ_S = 30.0  # without a byte of a result; the plan notices silence sooner
RESUMES_IN_VAIN = 2
SMALL_MAX_BYTES = 64 * 1024
INPUT_NOT_FOUND = "INPUT_NOT_FOUND"


class JobView(msgspec.Struct, frozen=True):
    """`GET /jobs/{job_id}`: what the plan needs, and how far it is."""

    says: JobSays
    fraction: float | None = None
    message: str = ""


class _Progress(msgspec.Struct):
    fraction: float | None = None
    message: str | None = None


class _Job(msgspec.Struct):
    state: str
    input: str | None = None
    exit_code: int | None = None
    progress: _Progress | None = None


class _Sending(NamedTuple):
    """One job, as it is sent to whomever it takes."""

    job_id: str
    upload: RunRequest
    target: Path
    telling: Telling
    limit_s: float


class AgentNode:
    """One node. Errors: Unavailable where there was no answer, Refusing where it was no result."""

    def __init__(self, address: Address, token: str, tls: ssl.SSLContext | None, *, proxies: bool = False) -> None:
        """`proxies`: those of the environment are used."""
        self.name = str(address)
        self._proxies = proxies
        self._transport = HttpTransport(address, tls, CONNECT_TIMEOUT_S, stop_when_answered=True, proxies=proxies)
        self._transport.token = token

    async def close(self) -> None:
        await self._transport.close()

    def answer(self, method: str, path: str, **options: Any) -> Answer:
        """Whatever the node answers, for those who pass it on; see HttpTransport.answer."""
        return self._transport.answer(method, path, **options)

    # ------------------------------------------------------------------------------------------------ small questions

    async def look(self) -> Capacity | None:
        """Health and capacity, asked at once. Raises if it is not well, NotOurs if it is; None: it does not tell its capacity."""
        asked = (self._small("GET", path, LOOK_S) for path in ("/health", "/capacity"))
        try:
            async with asyncio.timeout(LOOK_S):
                health, capacity = await asyncio.gather(*asked)
        except TimeoutError:
            raise ResponseLost(f"{self.name} did not answer within {LOOK_S:g} s") from None
        if isinstance(health, Refusal):
            raise Refusing(health)
        if isinstance(capacity, Refusal) and capacity.status in TOKEN_STATUSES:
            raise NotOurs(capacity)
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

    async def remove(self, job_id: str, *, only_running: bool = False) -> bool:
        """Cancel or remove it; whether it was there. `only_running`: what has ended stays."""
        which = "?state=running" if only_running else ""
        answer = await self._small("DELETE", f"/jobs/{quote(job_id)}{which}", REMOVE_S)
        if isinstance(answer, Refusal) and answer.status != 404:
            raise Refusing(answer)
        return not isinstance(answer, Refusal)

    async def _small(self, method: str, path: str, answer_s: float) -> bytes | Refusal:
        async with self._transport.answer(method, path, answer_s=answer_s) as response:
            if not response.is_success:
                return await refusal_of(response)
            body = b""
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > SMALL_MAX_BYTES:
                    raise Unavailable(f"{self.name} answered {method} {path} with more than {SMALL_MAX_BYTES} bytes")
            return body

    # ------------------------------------------------------------------------------------------------ results

    async def post(
        self, job_id: str, upload: RunRequest, target: Path, telling: Telling, *, limit_s: float, ask_from_bytes: int | None
    ) -> DownloadedResult:
        """Run it there and collect its result; `limit_s` is how long the answer may take. A redirect is followed, once.

        Files from `ask_from_bytes` on are asked for first, and not sent if they are there; None: it keeps none. Large ones are
        stored there first.
        """
        sending = _Sending(job_id, upload, target, telling, limit_s)
        by_name = False
        found: set[str] = set()
        if ask_from_bytes is not None:
            found = await found_inputs(self._transport, upload, ask_from_bytes)
            by_name = bool(found) or upload.size_bytes >= RESUMED_BYTES
        try:
            if by_name:
                return await self._post_names(sending, found)
            return await self._post(sending)
        except Elsewhere as led:
            async with self._led_by(led, f"/run/{quote(job_id)}", telling) as node:
                return await node._post(sending)

    async def _post_names(self, sending: _Sending, found: set[str]) -> DownloadedResult:
        await put_missing(self._transport, sending.upload, found, sending.telling, sending.limit_s)
        try:
            return await self._post(sending, by_name=True)
        except Refusing as error:
            if error.refusal.code != INPUT_NOT_FOUND:
                raise
        return await self._post(sending)  # it was cleaned away just now

    async def _post(self, sending: _Sending, *, by_name: bool = False) -> DownloadedResult:
        form = RunForm(sending.upload, sending.telling, by_name=by_name)
        params = {"input": sending.upload.input} if sending.upload.input else {}
        path = f"/run/{quote(sending.job_id)}"
        async with aclosing(form.pieces()) as pieces:
            posting = self._transport.answer(
                "POST", path, params=params, headers=form.headers, content=pieces, answer_s=sending.limit_s
            )
            with Download(sending.target, sending.job_id, sending.telling.heard) as download:
                return await self._save(sending.job_id, download, posting)

    async def fetch(self, job_id: str, target: Path, telling: Telling) -> DownloadedResult:
        """Collect the result that is there, from where an earlier process was with it. A redirect is followed, once."""
        with Download(target, job_id, telling.heard) as download:
            await asyncio.to_thread(download.take_up)
            try:
                return await self._save(job_id, download, self._stored(job_id, download.range_headers()))
            except Elsewhere as led:
                async with self._led_by(led, f"/result/{quote(job_id)}", telling) as node:
                    return await node._save(job_id, download, node._stored(job_id, download.range_headers()))

    @asynccontextmanager
    async def _led_by(self, led: Elsewhere, path: str, telling: Telling) -> AsyncIterator[AgentNode]:
        """The node that a redirect names. It gets our token, as whoever redirects has had it; never in the clear after TLS."""
        try:
            place, found, _ = led.location.partition(path)
            (address,) = parse_url(place)
        except ConfigError:
            raise led from None
        if not found or not address.http or (self._transport.address.scheme == "https" and address.scheme != "https"):
            raise led
        node = AgentNode(address, self._transport.token, self._transport.tls, proxies=self._proxies)
        telling.led(node.name)
        try:
            yield node
        finally:
            await node.close()

    def _stored(self, job_id: str, headers: dict[str, str]) -> Answer:
        return self._transport.answer("GET", f"/result/{quote(job_id)}", headers=headers, answer_s=READ_S)

    async def _save(self, job_id: str, download: Download, asking: Answer) -> DownloadedResult:
        """A result that was cut off goes on where it was, as long as there is more of it each time."""
        in_vain = 0
        while True:
            before = download.have
            try:
                async with asking as response:
                    await download.take(response)
                return download.whole(self.name)
            except ResponseLost:
                in_vain = 0 if download.have > before else in_vain + 1
                if not download.begun or in_vain >= RESUMES_IN_VAIN:
                    raise
            asking = self._stored(job_id, download.range_headers())


def _read(body: bytes | Refusal, kind: type[T]) -> T | None:
    """A small answer; None if it is not one of its kind."""
    if isinstance(body, Refusal):
        return None
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError:
        return None
