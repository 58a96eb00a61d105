"""Responses that carry a result: from a file of this node, from another node, or from the blob store.

A download that was cut continues with a Range request. One range is supported; several, or an invalid one, get the whole file, as
HTTP allows. A result from elsewhere is verified while it is streamed: the last piece is held back until the hash is known; if it
differs, the connection is cut. A part of a result cannot be verified here; its reader has the `ETag`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from io import FileIO
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tasuki.agent import refusals
from tasuki.blobs.blob import BlobStore
from tasuki.config import is_listener_ours
from tasuki.core.address import Address, parse_url
from tasuki.core.failover.agent_protocol import EndedMarker
from tasuki.core.failover.registry_records import ResultLocation
from tasuki.core.protocol import LogPiece
from tasuki.core.ranges import content_range, range_headers, requested_range
from tasuki.core.store_messages import BlobPlace
from tasuki.doors.http.exchange import envelope, json_answer
from tasuki.doors.http.uvicorn_server import while_connected
from tasuki.errors import AgentRefusal, ConfigError, Corrupt, NotFound, TasukiError, Unavailable
from tasuki.net.streams import FileSource, pieces_from
from tasuki.server.refusal_log import RefusalLog

if TYPE_CHECKING:
    from tasuki.net.http.transport import HttpTransport

logger = logging.getLogger("tasuki.agent")
AT_ONCE_MAX_BYTES = 512 * 1024  # a longer response is stopped when its reader disconnects
CONNECT_TIMEOUT_S = 2.0
READ_S = 30.0

Pieces = AsyncIterator[bytes]


class ResultResponse(Response):
    """Response with a result of this node."""

    media_type = "application/zip"

    def __init__(self, ended: EndedMarker, source: FileIO | bytes, sent: Callable[[int], None], cache: str | None = None) -> None:
        """`sent` is called with the number of bytes sent. `cache`: hit or miss, for the response to a POST."""
        super().__init__()
        self._source = source
        self._size_bytes = ended.result_bytes
        self._sent = sent
        self._etag = f'"{ended.result_sha256}"'
        self.headers.update(
            {
                "Content-Disposition": f'attachment; filename="result-{ended.job_id}.zip"',
                "Content-Length": str(self._size_bytes),
                "Accept-Ranges": "bytes",
                "ETag": self._etag,
                "Tasuki-Outcome": ended.outcome.value,
            }
        )
        if cache is not None:
            self.headers["Tasuki-Cache"] = cache
        if ended.left_out:
            self.headers["Tasuki-Left-Out"] = str(ended.left_out)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = Headers(scope=scope)
            start, stop = 0, self._size_bytes
            asked = self._asked_range(scope["method"], headers)
            if asked is not None:
                start, stop = asked
                if start >= stop:
                    words = f"the result has {self._size_bytes} bytes; ask for some of them, or for all"
                    none = {"Content-Range": content_range(0, 0, self._size_bytes)}
                    await json_answer(envelope("RANGE_NOT_SATISFIABLE", words), 416, none)(scope, receive, send)
                    return
                self.status_code = 206
                self.headers["Content-Range"] = content_range(start, stop, self._size_bytes)
                self.headers["Content-Length"] = str(stop - start)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            sending = self._send_bytes(send, start, stop if scope["method"] != "HEAD" else start)
            if stop - start <= AT_ONCE_MAX_BYTES:
                await sending
            else:
                await while_connected(receive, sending)
        finally:
            if isinstance(self._source, FileIO):
                self._source.close()

    def _asked_range(self, method: str, headers: Headers) -> tuple[int, int] | None:
        """Return the (start, stop) that is asked for; None: everything. Without any bytes start >= stop."""
        if method != "GET" or headers.get("if-range", self._etag) != self._etag:
            return None
        return requested_range(headers.get("range", ""), self._size_bytes)

    async def _send_bytes(self, send: Send, start: int, stop: int) -> None:
        more = True
        async with aclosing(self._pieces(start, stop)) as pieces:
            async for piece in pieces:
                start += len(piece)
                more = start < stop
                await send({"type": "http.response.body", "body": piece, "more_body": more})
                self._sent(len(piece))
        if more:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pieces(self, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        if isinstance(self._source, bytes):
            yield self._source[start:stop]
            return
        async with FileSource(self._source) as source, aclosing(source.pieces(start, stop)) as pieces:
            async for piece in pieces:
                yield piece


def log_response(piece: LogPiece, attempt: int) -> Response:
    """Return the response with a piece of a running program's output. The headers say where it lies in the stream."""
    headers = {
        "Tasuki-Attempt": str(attempt),
        "Tasuki-Offset": str(piece.offset),
        "Tasuki-Cut-Bytes": str(piece.cut_bytes),
        "Tasuki-End": str(piece.end),
        "Tasuki-Ended": str(piece.ended).lower(),
    }
    return Response(piece.data, headers=headers, media_type="application/octet-stream")


# ------------------------------------------------------------------------------------------------ results from elsewhere


class ResultElsewhere(Exception):
    """Another node has the result: this is the response to the request, and nothing is run."""

    def __init__(self, answer: Response) -> None:
        super().__init__("done at another node")
        self.answer = answer


ResultSource = Callable[[AsyncExitStack, int], Awaitable[Pieces]]
"""Opens a result, and returns its bytes from an offset on. NotFound: the result is gone; Unavailable: it cannot be read now."""


def blob_source(blobs: BlobStore, place: BlobPlace) -> ResultSource:
    """Return the source of a result in the blob store."""

    async def open_at(stack: AsyncExitStack, offset: int) -> Pieces:
        try:
            reader = await asyncio.to_thread(blobs.open, place.sha256, offset, place.generation)
        except OSError as error:
            raise Unavailable(f"blob {place.sha256} cannot be read: {error}") from error
        stack.push_async_callback(asyncio.to_thread, reader.close)
        return pieces_from(iter(reader))

    return open_at


class Peers:
    """Connections to the other nodes, which have the same tokens as this one.

    The registry says where a node is, but a node is sent the token only if the operator named it (`told`), or if it has proven
    that it knows the token already and nobody can listen on the way.
    """

    def __init__(self, tokens: Sequence[str], tls: ssl.SSLContext | None, told: Iterable[Address] = ()) -> None:
        self._tokens = tokens
        self._tls = tls
        self._told = frozenset(told)
        self._transports: dict[Address, HttpTransport] = {}
        self._refusals = RefusalLog(logger)

    def location(self, ended: EndedMarker, address: str) -> ResultLocation:
        """Return the record of a result at this node, with the proof for the others."""
        place = ResultLocation(ended, address)
        return place.proven(self._tokens[0]) if self._tokens else place

    def at(self, place: ResultLocation) -> HttpTransport:
        """Return the connection to the node that has a result; AgentRefusal if it may not be sent the token."""
        from tasuki.net.http.transport import HttpTransport

        try:
            address = self._checked(place)
        except AgentRefusal as refusal:
            self._refusals.write(place.address[:80], refusal.code, refusal.message, place.ended.job_id)
            raise
        if address not in self._transports:
            transport = HttpTransport(address, self._tls, CONNECT_TIMEOUT_S, stop_when_answered=True)
            transport.token = self._tokens[0] if self._tokens else ""
            self._transports[address] = transport
        return self._transports[address]

    def _checked(self, place: ResultLocation) -> Address:
        try:
            [address] = parse_url(place.address)
        except (ConfigError, ValueError):
            raise refusals.no_peer(place, "is not the address of an agent") from None
        if not address.http or address.path:
            raise refusals.no_peer(place, "is not the address of an agent")
        if address in self._told:
            return address
        if self._tokens and not any(place.proves(token) for token in self._tokens):
            raise refusals.no_peer(place, "has not proven that it knows a token of this agent")
        if address.scheme != "https" and not (address.loopback and is_listener_ours(address.port)):
            raise refusals.no_peer(place, "would be sent the token without TLS")
        return address

    async def remove(self, place: ResultLocation) -> None:
        """Remove a job at the node that has its result. Unavailable: it may still be there."""
        async with self.at(place).answer("DELETE", f"/jobs/{quote(place.ended.job_id)}", answer_s=READ_S) as response:
            if not response.is_success and response.status_code != 404:
                raise Unavailable(f"{place.address} answered {response.status_code}")

    def source(self, place: ResultLocation) -> ResultSource:
        """Return the source of a result at the node where the job ran."""
        ended = place.ended
        etag = f'"{ended.result_sha256}"'

        async def open_at(stack: AsyncExitStack, offset: int) -> Pieces:
            headers = range_headers(offset, etag)
            asking = self.at(place).answer("GET", f"/result/{quote(ended.job_id)}", headers=headers, answer_s=READ_S)
            response = await stack.enter_async_context(asking)
            if response.status_code == 404 or (response.is_success and response.headers.get("etag") != etag):
                raise NotFound(f"node {ended.node} does not have the result of job {ended.job_id} any more")
            if response.status_code != (206 if offset else 200):
                raise Unavailable(f"node {ended.node} at {place.address} answered {response.status_code}")
            return response.aiter_bytes()

        return open_at

    async def close(self) -> None:
        for transport in self._transports.values():
            await transport.close()


class RemoteResultResponse(ResultResponse):
    """Response with a result from a source elsewhere."""

    def __init__(self, ended: EndedMarker, source: ResultSource, sent: Callable[[int], None], cache: str | None = None) -> None:
        super().__init__(ended, b"", sent, cache)
        self._ended = ended
        self._from = source
        self._opened: tuple[AsyncExitStack, Pieces] | None = None
        self._left: Pieces | None = None

    async def open(self) -> None:
        """Open the source before this is used as a response; NotFound, Unavailable."""
        stack = AsyncExitStack()
        try:
            self._opened = stack, await self._from(stack, 0)
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
            except TasukiError as error:  # the announced bytes do not follow, and the connection is cut
                logger.warning("job %s: %s", self._ended.job_id, error.message)

    @asynccontextmanager
    async def _source_at(self, first: int) -> AsyncIterator[Pieces | TasukiError]:
        stack, pieces = self._opened or (AsyncExitStack(), None)
        self._opened = None
        async with stack:
            try:
                opened: Pieces | TasukiError = pieces if pieces is not None and not first else await self._from(stack, first)
            except TasukiError as error:
                opened = error
            yield opened

    def _pieces(self, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        assert self._left is not None
        whole = start == 0 and stop == self._ended.result_bytes
        return _verified(self._left, self._ended if whole else None, stop - start)


async def _verified(pieces: Pieces, ended: EndedMarker | None, left_bytes: int) -> AsyncGenerator[bytes]:
    """Yield the next `left_bytes` bytes. With `ended`, yield the last piece only if all bytes together have its hash."""
    digest = hashlib.sha256()
    if not left_bytes:
        return
    async for piece in pieces:
        passed = piece[:left_bytes]
        left_bytes -= len(passed)
        if ended is not None:
            digest.update(passed)
        if not left_bytes and ended is not None and digest.hexdigest() != ended.result_sha256:
            raise Corrupt(f"the result of job {ended.job_id} was fetched with another sha256 than {ended.result_sha256}")
        yield passed
        if not left_bytes:
            return
    raise Unavailable(f"a result ended {left_bytes} bytes too early")
