"""Results on their way out: streamed from an open file, whole or from a byte on, so that a download that was cut goes on.

One range is understood; of several, and of what is no range, the whole file is the answer, as HTTP allows.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from io import FileIO
from typing import TYPE_CHECKING, Protocol

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tasuki.agent import refusals
from tasuki.blobs.blob import BlobStore
from tasuki.core.address import parse_url
from tasuki.core.failover.agent_protocol import EndedMarker
from tasuki.core.ranges import content_range, range_headers, requested_range
from tasuki.core.store_messages import BlobPlace
from tasuki.doors.http.exchange import envelope, json_answer
from tasuki.doors.http.uvicorn_server import while_connected
from tasuki.errors import Corrupt, NotFound, TasukiError, Unavailable
from tasuki.net.streams import FileSource, pieces_from

if TYPE_CHECKING:
    from tasuki.net.http.transport import HttpTransport


AT_ONCE_MAX_BYTES = 512 * 1024  # what is longer ends when its reader leaves


class ResultResponse(Response):
    """One result."""

    media_type = "application/zip"

    def __init__(self, ended: EndedMarker, source: FileIO | bytes, sent: Callable[[int], None], cache: str | None = None) -> None:
        """`sent` hears how many bytes go out. `cache`: whether a POST was answered with what was stored."""
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = Headers(scope=scope)
            start, stop = 0, self._size_bytes
            asked = self._asked_range(scope["method"], headers)
            if asked is not None:
                start, stop = asked
                if start >= stop:
                    await self._not_satisfiable()(scope, receive, send)
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

    def _not_satisfiable(self) -> Response:
        body = envelope("RANGE_NOT_SATISFIABLE", f"the result has {self._size_bytes} bytes; ask for some of them, or for all")
        return json_answer(body, 416, {"Content-Range": content_range(0, 0, self._size_bytes)})

    async def _send_bytes(self, send: Send, start: int, stop: int) -> None:
        more = True
        async with aclosing(self._pieces(start, stop)) as pieces:
            async for piece in pieces:
                start += len(piece)
                more = start < stop
                self._sent(len(piece))
                await send({"type": "http.response.body", "body": piece, "more_body": more})
        if more:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pieces(self, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        if isinstance(self._source, bytes):
            yield self._source[start:stop]
            return
        async with FileSource(self._source) as source, aclosing(source.pieces(start, stop)) as pieces:
            async for piece in pieces:
                yield piece


class EarlyResponse(Response):
    """An answer to a request whose body was not read. What still comes is thrown away for a moment before the connection ends:
    a peer that is cut off while it sends may never look at the answer."""

    def __init__(self, answer: Response, linger_s: float) -> None:
        super().__init__(answer.body, answer.status_code, dict(answer.headers))
        self.headers["Connection"] = "close"
        self._linger_s = linger_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(self._linger_s):
                while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                    """The rest of the body."""
        except TimeoutError:
            """It has had time enough to read the answer."""
        await send({"type": "http.response.body", "body": b""})


# ----------------------------------------------------------------------------------------------------
# Results that lie at another node or among the blobs, on their way through this one: streamed, and verified as they pass.

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
