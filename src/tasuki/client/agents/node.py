"""Client of the HTTP API of one node agent or dispatcher (docs/operate/agents.md). Decides nothing.

A result is downloaded into a part file beside the output, and the download is resumed when a connection is cut. A file that the
node has stored already is named instead of sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from tasuki.client.agents import transfer
from tasuki.client.agents.transfer import Download, DownloadedResult, NodeRedirect, NodeRefused, RunRequest, TransferListener
from tasuki.clocks import now
from tasuki.core.address import Address, parse_url
from tasuki.core.decoding import decodable
from tasuki.core.failover.agent_protocol import INPUT_NOT_FOUND
from tasuki.core.failover.events import TOKEN_STATUSES, NodeJobStatus, Refusal, not_trusted
from tasuki.core.failover.nodes import Capacity, Nodes
from tasuki.core.protocol import LOG_PIECE_MAX_BYTES
from tasuki.errors import ConfigError, ResponseLost, TasukiError, Unavailable, UntrustedCertificate
from tasuki.net.http.transport import HttpTransport, read_body

if TYPE_CHECKING:
    import ssl

    import httpx

logger = logging.getLogger("tasuki.agents")
T = TypeVar("T")
Answer = AbstractAsyncContextManager["httpx.Response"]

CONNECT_TIMEOUT_S = 1.0
LOOK_S = 2.0
ASK_S = 2.0
REMOVE_S = 1.0
READ_S = 30.0  # without a byte of a result; the plan notices silence sooner
RESUMES_WITHOUT_PROGRESS = 2
SMALL_MAX_BYTES = 64 * 1024
LIST_S, LIST_MAX_BYTES = 10.0, 8 * 1024 * 1024


class JobView(msgspec.Struct, frozen=True):
    """Response to `GET /jobs/{job_id}`."""

    status: NodeJobStatus
    fraction: float | None = None
    message: str = ""
    started_at: float | None = None
    node: str = ""
    body: bytes = b""
    """The response as it was sent, for a dispatcher that forwards it."""

    @property
    def has_progress(self) -> bool:
        return self.fraction is not None or bool(self.message)


class _Progress(msgspec.Struct):
    fraction: float | None = None
    message: str | None = None


@decodable
class NodeJob(msgspec.Struct, kw_only=True):
    """Job in an answer of `GET /jobs` or `GET /jobs/{job_id}`."""

    job_id: str = ""
    state: str
    exec: str | None = None
    input: str | None = None
    attempt: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    error_code: str | None = None
    message: str | None = None
    result_sha256: str | None = None
    result_bytes: int | None = None
    left_out: int = 0
    node: str | None = None
    progress: _Progress | None = None


@decodable
class _JobList(msgspec.Struct):
    jobs: list[NodeJob]


class LogAnswer(NamedTuple):
    """Piece of a running program's output; see `GET /jobs/{job_id}/logs/{stream}`."""

    attempt: int
    offset: int
    cut_bytes: int
    end: int
    ended: bool
    data: bytes


class JobPost(NamedTuple):
    """Job to be posted, and the file for its result. `limit_s` bounds the wait for the response."""

    job_id: str
    upload: RunRequest
    target: Path
    listener: TransferListener
    limit_s: float


class AgentNode:
    """One node. Errors: Unavailable if there was no response, NodeRefused if the response was not the one asked for."""

    def __init__(self, address: Address, token: str, tls: ssl.SSLContext | None, *, proxies: bool = False) -> None:
        """`proxies`: use the HTTP proxies that the environment names."""
        self.name = str(address)
        self._proxies = proxies
        self._transport = HttpTransport(address, tls, CONNECT_TIMEOUT_S, stop_when_answered=True, proxies=proxies)
        self._transport.token = token

    async def close(self) -> None:
        await self._transport.close()

    def answer(self, method: str, path: str, **options: Any) -> Answer:
        """Send a request for a caller who forwards the response; see HttpTransport.answer."""
        return self._transport.answer(method, path, **options)

    # ------------------------------------------------------------------------------------------------ small questions

    async def check(self, nodes: Nodes, *, token_matters: bool) -> tuple[Capacity | None, str]:
        """Ask for health and capacity, and record the answers in `nodes`; return the capacity and the problem, "" if none.

        `token_matters`: a refused token or an untrusted certificate is recorded as a refusal, which is no failure of the node.
        """
        refusal: Refusal | None = None
        try:
            capacity = await self._capacity()
        except transfer.TokenRefused as error:
            problem, refusal = str(error), error.refusal
        except UntrustedCertificate as error:
            problem, refusal = error.message, not_trusted(error.message)
        except (TasukiError, NodeRefused) as error:
            problem = str(error)
        except Exception as error:  # a defect must not leave the node in the state of being checked
            logger.exception("%s could not be checked", self.name)
            problem = f"could not be checked: {error!r}"
        else:
            nodes.seen(self.name, capacity, now().monotonic)
            return capacity, ""
        if refusal is not None and token_matters:
            nodes.refused(self.name, refusal, now().monotonic)
        else:
            nodes.unwell(self.name, problem, now().monotonic)
        return None, problem

    async def _capacity(self) -> Capacity | None:
        """Return the capacity of a healthy node; None if it does not report one. TokenRefused if it refuses only that."""
        asked = (self._small("GET", path, LOOK_S) for path in ("/health", "/capacity"))
        try:
            async with asyncio.timeout(LOOK_S):
                health, capacity = await asyncio.gather(*asked)
        except TimeoutError:
            raise ResponseLost(f"{self.name} did not answer within {LOOK_S:g} s") from None
        if isinstance(health, Refusal):
            raise NodeRefused(health)
        if isinstance(capacity, Refusal) and capacity.status in TOKEN_STATUSES:
            raise transfer.TokenRefused(capacity)
        return _read(capacity, Capacity)

    async def ask(self, job_id: str) -> JobView | None:
        """Return the status of a job; None if the node does not know it."""
        answer = await self._small("GET", f"/jobs/{quote(job_id)}", ASK_S)
        if isinstance(answer, Refusal):
            if answer.status == 404:
                return None
            raise NodeRefused(answer)
        job = _read(answer, NodeJob)
        if job is None:
            raise Unavailable(f"the answer of {self.name} is not a job; is it a node agent of this version?")
        progress = job.progress or _Progress()
        status = NodeJobStatus(job.state, job.input or "", job.exit_code)
        return JobView(status, progress.fraction, progress.message or "", job.started_at, job.node or "", answer)

    async def jobs(self, query: str) -> list[NodeJob]:
        """Return the jobs of this node; see `GET /jobs`."""
        answer = await self._small("GET", f"/jobs{query}", LIST_S, LIST_MAX_BYTES)
        if isinstance(answer, Refusal):
            raise NodeRefused(answer)
        listed = _read(answer, _JobList)
        if listed is None:
            raise Unavailable(f"the answer of {self.name} is not a list of jobs; is it a node agent of this version?")
        return listed.jobs

    async def read_log(self, job_id: str, stream: str, offset: int, wait_s: float) -> LogAnswer:
        """Return what a running program has written to a stream since an offset."""
        path = f"/jobs/{quote(job_id)}/logs/{stream}?offset={offset}&wait_s={wait_s:g}"
        async with self._transport.answer("GET", path, answer_s=wait_s + ASK_S) as response:
            if not response.is_success:
                raise NodeRefused((await transfer.read_refusal(response))[0])
            found = {name: response.headers.get(f"tasuki-{name}", "") for name in ("attempt", "offset", "cut-bytes", "end")}
            if not all(map(transfer.is_number, found.values())):
                raise Unavailable(f"the answer of {self.name} is not a log; is it a node agent of this version?")
            attempt, start, cut_bytes, end = map(int, found.values())
            ended = response.headers.get("tasuki-ended") == "true"
            return LogAnswer(attempt, start, cut_bytes, end, ended, await read_body(response, LOG_PIECE_MAX_BYTES))

    async def remove(self, job_id: str, *, only_running: bool = False, answer_s: float = REMOVE_S) -> bool:
        """Cancel and remove a job; return whether it was there. `only_running`: keep a job that has ended."""
        which = "?state=running" if only_running else ""
        answer = await self._small("DELETE", f"/jobs/{quote(job_id)}{which}", answer_s)
        if isinstance(answer, Refusal) and answer.status != 404:
            raise NodeRefused(answer)
        return not isinstance(answer, Refusal)

    async def _small(self, method: str, path: str, answer_s: float, max_bytes: int = SMALL_MAX_BYTES) -> bytes | Refusal:
        async with self._transport.answer(method, path, answer_s=answer_s) as response:
            if not response.is_success:
                return (await transfer.read_refusal(response))[0]
            body = await read_body(response, max_bytes)
            if len(body) > max_bytes:
                raise Unavailable(f"{self.name} answered {method} {path} with more than {max_bytes} bytes")
            return body

    # ------------------------------------------------------------------------------------------------ results

    async def post(self, job: JobPost, ask_from_bytes: int | None) -> DownloadedResult:
        """Run a job there and download its result. One redirect is followed.

        Files of at least `ask_from_bytes` are asked for first, and not sent if they are stored; None: the node stores none. Large
        files are stored before the job is sent.
        """
        try:
            if ask_from_bytes is not None:
                found = await transfer.found_inputs(self._transport, job.upload, ask_from_bytes)
                if found or job.upload.size_bytes >= transfer.RESUMED_BYTES:
                    await transfer.put_missing(self._transport, job.upload, found, job.listener, job.limit_s)
                    try:
                        return await self._post(job, by_name=True)
                    except NodeRefused as error:
                        if error.refusal.code != INPUT_NOT_FOUND:
                            raise
                    # An input was removed just now: it is sent.
            return await self._post(job)
        except NodeRedirect as redirect:
            async with self._redirected_to(redirect, f"/run/{quote(job.job_id)}", job.listener) as node:
                return await node._post(job)

    async def _post(self, job: JobPost, *, by_name: bool = False) -> DownloadedResult:
        form = transfer.RunForm(job.upload, job.listener, by_name=by_name)
        params = {"input": job.upload.input} if job.upload.input else {}
        path = f"/run/{quote(job.job_id)}"
        async with aclosing(form.pieces()) as pieces:
            posting = self._transport.answer(
                "POST", path, params=params, headers=form.headers, content=pieces, answer_s=job.limit_s
            )
            with Download(job.target, job.job_id, job.listener.received) as download:
                return await self._save(job.job_id, download, posting)

    async def fetch(self, job_id: str, target: Path, listener: TransferListener) -> DownloadedResult:
        """Download a stored result, continuing the part file of an earlier process. One redirect is followed."""
        with Download(target, job_id, listener.received) as download:
            await asyncio.to_thread(download.take_up)
            try:
                return await self._save(job_id, download, self._stored(job_id, download.range_headers()))
            except NodeRedirect as redirect:
                async with self._redirected_to(redirect, f"/result/{quote(job_id)}", listener) as node:
                    return await node._save(job_id, download, node._stored(job_id, download.range_headers()))

    @asynccontextmanager
    async def _redirected_to(self, redirect: NodeRedirect, path: str, listener: TransferListener) -> AsyncIterator[AgentNode]:
        """Connect to the node that a redirect names. It is sent our token, but never in the clear after TLS."""
        try:
            place, found, _ = redirect.location.partition(path)
            (address,) = parse_url(place)
        except ConfigError:
            raise redirect from None
        if not found or not address.http or (self._transport.address.scheme == "https" and address.scheme != "https"):
            raise redirect
        node = AgentNode(address, self._transport.token, self._transport.tls, proxies=self._proxies)
        listener.redirected(node.name)
        try:
            yield node
        finally:
            await node.close()

    def _stored(self, job_id: str, headers: dict[str, str]) -> Answer:
        return self._transport.answer("GET", f"/result/{quote(job_id)}", headers=headers, answer_s=READ_S)

    async def _save(self, job_id: str, download: Download, asking: Answer) -> DownloadedResult:
        """Download a result; resume a download that was cut as long as resuming makes progress."""
        failures = 0
        while True:
            before = download.have
            try:
                async with asking as response:
                    await download.take(response)
                return download.whole(self.name)
            except ResponseLost:
                failures = 0 if download.have > before else failures + 1
                if not download.begun or failures >= RESUMES_WITHOUT_PROGRESS:
                    raise
            asking = self._stored(job_id, download.range_headers())


def _read(body: bytes | Refusal, kind: type[T]) -> T | None:
    """Decode a small response; None if it is not of that kind."""
    if isinstance(body, Refusal):
        return None
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError:
        return None
