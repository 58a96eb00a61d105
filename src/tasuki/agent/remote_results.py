"""Results that lie at another node or among the blobs, on their way through this one: streamed, and verified as they pass.

Whoever got all bytes of a whole result got the right ones: the last piece is held back until the hash is known, and the
connection is cut if it is another. A part of a result cannot be verified here; its reader has the `ETag`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from tasuki.agent import refusals
from tasuki.agent.result_response import ResultResponse
from tasuki.blobs.blob import BlobStore
from tasuki.core.address import parse_url
from tasuki.core.failover.agent_protocol import EndedMarker
from tasuki.core.ranges import range_headers
from tasuki.core.store_messages import BlobPlace
from tasuki.errors import Corrupt, NotFound, TasukiError, Unavailable
from tasuki.net.streams import pieces_from

if TYPE_CHECKING:
    from tasuki.net.http.transport import HttpTransport

logger = logging.getLogger("tasuki.agent")
CONNECT_TIMEOUT_S = 2.0
READ_S = 30.0

Pieces = AsyncIterator[bytes]


class ResultSource(Protocol):
    """Where a result can be read."""

    async def open(self, stack: AsyncExitStack, offset: int) -> Pieces:
        """From there on. NotFound: it is not there any more; Unavailable: it cannot be had now."""


class BlobSource:
    """Among the blobs."""

    def __init__(self, blobs: BlobStore, place: BlobPlace) -> None:
        self._blobs = blobs
        self._place = place

    async def open(self, stack: AsyncExitStack, offset: int) -> Pieces:
        place = self._place
        try:
            reader = await asyncio.to_thread(self._blobs.open, place.sha256, offset, place.generation)
        except OSError as error:
            raise Unavailable(f"blob {place.sha256} cannot be read: {error}") from error
        stack.push_async_callback(asyncio.to_thread, reader.close)
        return pieces_from(iter(reader))


class Peers:
    """The other nodes. They have the same tokens as this one."""

    def __init__(self, token: str, tls: ssl.SSLContext | None) -> None:
        self._token = token
        self._tls = tls
        self._transports: dict[str, HttpTransport] = {}

    def at(self, address: str) -> HttpTransport:
        from tasuki.net.http.transport import HttpTransport

        if address not in self._transports:
            [place] = parse_url(address)
            transport = HttpTransport(place, self._tls, CONNECT_TIMEOUT_S, stop_when_answered=True)
            transport.token = self._token
            self._transports[address] = transport
        return self._transports[address]

    async def remove(self, address: str, job_id: str) -> None:
        """Have it removed there. Unavailable: it may still be there."""
        async with self.at(address).answer("DELETE", f"/jobs/{job_id}", answer_s=READ_S) as response:
            if not response.is_success and response.status_code != 404:
                raise Unavailable(f"{address} answered {response.status_code}")

    async def close(self) -> None:
        for transport in self._transports.values():
            await transport.close()


class PeerSource:
    """At the node where the job ran."""

    def __init__(self, peers: Peers, address: str, ended: EndedMarker) -> None:
        self._peers = peers
        self._address = address
        self._ended = ended

    async def open(self, stack: AsyncExitStack, offset: int) -> Pieces:
        ended = self._ended
        etag = f'"{ended.result_sha256}"'
        asking = self._peers.at(self._address).answer(
            "GET", f"/result/{ended.job_id}", headers=range_headers(offset, etag), answer_s=READ_S
        )
        response = await stack.enter_async_context(asking)
        if response.status_code == 404 or (response.is_success and response.headers.get("etag") != etag):
            raise NotFound(f"node {ended.node} does not have the result of job {ended.job_id} any more")
        if response.status_code != (206 if offset else 200):
            raise Unavailable(f"node {ended.node} at {self._address} answered {response.status_code}")
        return response.aiter_bytes()


class RemoteResultResponse(ResultResponse):
    """One result from a source."""

    def __init__(self, ended: EndedMarker, source: ResultSource, sent: Callable[[int], None], cache: str | None = None) -> None:
        super().__init__(ended, b"", sent, cache)
        self._ended = ended
        self._from = source
        self._opened: tuple[AsyncExitStack, Pieces] | None = None
        self._left: Pieces | None = None

    async def open(self) -> None:
        """Be sure that it is there, before this becomes an answer; NotFound, Unavailable."""
        stack = AsyncExitStack()
        try:
            self._opened = stack, await self._from.open(stack, 0)
        except BaseException:
            await stack.aclose()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start, stop = self._asked_range(scope["method"], Headers(scope=scope)) or (0, 0)
        first = start if start < stop else 0
        async with self._source_at(first) as opened:
            if isinstance(opened, TasukiError):
                refusal = refusals.result_away(self._ended.job_id, self._ended.node, opened)
                await refusals.refusal_answer(refusal)(scope, receive, send)
                return
            self._left = opened
            try:
                await super().__call__(scope, receive, send)
            except TasukiError as error:  # in mid-air: what was announced does not come, and the connection is cut
                logger.warning("job %s: %s", self._ended.job_id, error.message)

    @asynccontextmanager
    async def _source_at(self, first: int) -> AsyncIterator[Pieces | TasukiError]:
        stack, pieces = self._opened or (AsyncExitStack(), None)
        self._opened = None
        async with stack:
            try:
                opened: Pieces | TasukiError = pieces if pieces is not None and not first else await self._from.open(stack, first)
            except TasukiError as error:
                opened = error
            yield opened

    def _pieces(self, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        assert self._left is not None
        whole = start == 0 and stop == self._ended.result_bytes
        return _verified(self._left, self._ended if whole else None, stop - start)


async def _verified(pieces: Pieces, ended: EndedMarker | None, left_bytes: int) -> AsyncGenerator[bytes]:
    """So many bytes of them. With `ended` the last piece comes only if all of them have its hash."""
    digest = hashlib.sha256()
    if not left_bytes:
        return
    async for piece in pieces:
        passed = piece[:left_bytes]
        left_bytes -= len(passed)
        if ended is not None:
            digest.update(passed)
        if not left_bytes and ended is not None and digest.hexdigest() != ended.result_sha256:
            raise Corrupt(f"the result of job {ended.job_id} from elsewhere has another sha256 than {ended.result_sha256}")
        yield passed
        if not left_bytes:
            return
    raise Unavailable(f"a result broke off {left_bytes} bytes before its end")
