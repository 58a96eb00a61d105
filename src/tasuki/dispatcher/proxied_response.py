"""A node's answer on its way to the client: streamed, with the headers that the contract of agents knows and no others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tasuki.agent.correlation import on_behalf_of
from tasuki.client.agent_download import ETAG, ZIP_TYPE
from tasuki.core.failover.events import Refusal
from tasuki.doors.http.uvicorn_server import while_connected
from tasuki.errors import TasukiError, Unavailable
from tasuki.net.http.transport import ERROR_MAX_BYTES, ErrorBody

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger("tasuki.dispatcher")
PASSED_HEADERS = (
    "content-type", "content-length", "content-range", "content-disposition", "accept-ranges", "etag", "retry-after",
    "tasuki-cache", "tasuki-outcome",
)  # fmt: skip
NODE_HEADER = "Tasuki-Node"
LINGER_S = 2.0


class _NodeEnvelope(msgspec.Struct):
    error: ErrorBody


class NodeRefusal(msgspec.Struct, frozen=True):
    """An answer that is no result, read to its end."""

    refusal: Refusal
    body: bytes
    headers: dict[str, str]

    def answer(self, node: str) -> Response:
        """As it was given."""
        return Response(self.body, self.refusal.status, {**self.headers, NODE_HEADER: node})


def passed_headers(response: httpx.Response) -> dict[str, str]:
    return {name: response.headers[name] for name in PASSED_HEADERS if name in response.headers}


def check_result(response: httpx.Response, *statuses: int) -> None:
    """A 2xx answer is the result that was asked for; else Unavailable. Whatever answers there, it is not to be taken for one."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if response.status_code not in statuses or kind != ZIP_TYPE or not ETAG(response.headers.get("etag", "")):
        raise Unavailable(f"answered {response.status_code} without a ZIP and its ETag; is this a node agent?")


async def read_refusal(response: httpx.Response) -> NodeRefusal:
    body = b""
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > ERROR_MAX_BYTES:
            break
    headers = passed_headers(response)
    headers.pop("content-length", None)
    retry_after = headers.get("retry-after", "")
    retry_after_s = float(retry_after) if retry_after.isdecimal() and len(retry_after) < 6 else None
    try:
        said = msgspec.json.decode(body, type=_NodeEnvelope).error
    except msgspec.DecodeError:
        return NodeRefusal(Refusal(response.status_code, "", "", retry_after_s), body, headers)
    return NodeRefusal(Refusal(response.status_code, said.code, said.message, retry_after_s), body, headers)


class PassedAnswer(Response):
    """A result from a node. `stack` holds the connection to it, and is closed at the end."""

    def __init__(
        self,
        job_id: str,
        node: str,
        response: httpx.Response,
        stack: AsyncExitStack,
        *,
        on_cut: Callable[[], None],
        unread: bool = False,
        more: dict[str, str] | None = None,
    ) -> None:
        """`unread`: the client may still be sending, to no avail. `more`: headers of our own."""
        super().__init__(status_code=response.status_code)
        for name in ("content-length", "content-type"):
            if name in self.headers:
                del self.headers[name]
        self.headers.update({**passed_headers(response), NODE_HEADER: node, **(more or {})})
        self._unread = unread
        if unread:
            self.headers["Connection"] = "close"
        self._job_id = job_id
        self._node = node
        self._response = response
        self._stack = stack
        self._on_cut = on_cut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with on_behalf_of(self._job_id):
            try:
                async with self._stack:
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    if not await while_connected(self._noting(receive), self._pass_on(send)):
                        logger.info("job %s: whoever asked has left before the end of the result", self._job_id)
                        return
            except TasukiError as error:
                # Without the end of the body the server cuts the connection: the client sees that it is not whole.
                logger.warning("job %s: its result broke off: %s", self._job_id, error.message)
                self._on_cut()
                return
            if self._unread:
                await drain(receive)
            await send({"type": "http.response.body", "body": b""})

    def _noting(self, receive: Receive) -> Receive:
        """The same; the end of the request is not to be waited for once more."""

        async def noting() -> Message:
            message = await receive()
            self._unread = self._unread and bool(message.get("more_body"))
            return message

        return noting

    async def _pass_on(self, send: Send) -> None:
        async for piece in self._response.aiter_raw():
            await send({"type": "http.response.body", "body": piece, "more_body": True})


async def drain(receive: Receive) -> None:
    """Throw away what still comes, for a moment: a peer that is cut off while it sends may never look at the answer."""
    try:
        async with asyncio.timeout(LINGER_S):
            while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                """The rest of the body."""
    except TimeoutError:
        return
