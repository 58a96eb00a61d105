"""Results on their way out: streamed from an open file, whole or from a byte on, so that a download that was cut goes on.

One range is understood; of several, and of what is no range, the whole file is the answer, as HTTP allows.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from io import FileIO

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tasuki.core.failover.agent_protocol import EndedMarker
from tasuki.doors.http.exchange import envelope, json_answer
from tasuki.doors.http.uvicorn_server import while_connected

READ_BYTES = 512 * 1024
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII).fullmatch


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
            first, last = 0, self._size_bytes - 1
            if scope["method"] == "GET" and (span := self._span(headers)) is not None:
                first, last = span
                if first > last:
                    await self._beyond()(scope, receive, send)
                    return
                self.status_code = 206
                self.headers["Content-Range"] = f"bytes {first}-{last}/{self._size_bytes}"
                self.headers["Content-Length"] = str(last - first + 1)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            sending = self._send_bytes(send, first, last + 1 if scope["method"] != "HEAD" else first)
            if last - first < READ_BYTES:
                await sending
            else:
                await while_connected(receive, sending)
        finally:
            if isinstance(self._source, FileIO):
                self._source.close()

    def _span(self, headers: Headers) -> tuple[int, int] | None:
        """(first, last) byte; None: all of them. Where first is behind last, there is nothing to send."""
        found = _RANGE(headers.get("range", ""))
        if found is None or found[0] == "bytes=-" or headers.get("if-range", self._etag) != self._etag:
            return None
        end = self._size_bytes - 1
        if not found[1]:
            return max(0, self._size_bytes - int(found[2])), end
        first, last = int(found[1]), min(int(found[2] or end), end)
        return None if found[2] and int(found[2]) < first else (first, last)

    def _beyond(self) -> Response:
        body = envelope("RANGE_NOT_SATISFIABLE", f"the result has {self._size_bytes} bytes; ask for some of them, or for all")
        return json_answer(body, 416, {"Content-Range": f"bytes */{self._size_bytes}"})

    async def _send_bytes(self, send: Send, at: int, stop: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if isinstance(self._source, bytes):
                piece = self._source[at:stop]
            else:
                size_bytes = min(READ_BYTES, stop - at)
                piece = await loop.run_in_executor(None, os.pread, self._source.fileno(), size_bytes, at) if size_bytes else b""
            at += len(piece)
            self._sent(len(piece))
            more = at < stop and bool(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": more})
            if not more:
                return


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
