"""Results on their way out: streamed from an open file, whole or from a byte on, so that a download that was cut goes on.

One range is understood; of several, and of what is no range, the whole file is the answer, as HTTP allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from io import FileIO

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tasuki.core.failover.agent_protocol import EndedMarker
from tasuki.core.ranges import content_range, requested_range
from tasuki.doors.http.exchange import envelope, json_answer
from tasuki.doors.http.uvicorn_server import while_connected
from tasuki.net.streams import FileSource

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
