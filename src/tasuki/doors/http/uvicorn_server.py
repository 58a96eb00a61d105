"""uvicorn inside this process, shared by all HTTP doors; free of the server, so that node agents and dispatchers use it too.

    server = UvicornServer(application(Starlette(), routes), tls, close_timeout_s)
    await server.open(sock); server.hurry(2); await server.close()

`LimitedProtocol` is uvicorn's h11 protocol with limits. While no request is handled, the connection has one deadline: for request
line and headers, and for the rest of a body that was answered before its end. A peer that reads nothing of its answer for a
minute is disconnected; a slow one is not: a download over a bad connection may take hours, but a program that hangs must not
hold its connection, a file and a request for ever. `FastRouter` leads a request to its endpoint without the framework's
middlewares.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeAlias

import h11
import msgspec
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from tasuki.doors.http.exchange import CODES, EarlyResponse, envelope, error_answer, json_answer, until_disconnected
from tasuki.doors.listening import AcceptedSocket, Connections, ListeningSocket
from tasuki.errors import InvalidInput, Overloaded

logger = logging.getLogger("tasuki.http")
HEADERS_MAX_BYTES = 16 * 1024
HEADERS_MAX = 128
HEADERS_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 65  # a worker that polls twice a minute keeps its connection
STALLED_S = 60.0
CHECKS = 4  # of a stalled reader in that time
_ACKED = slice(120, 128)  # tcpi_bytes_acked in Linux' struct tcp_info
_LENGTHS = {b"content-length", b"transfer-encoding"}
_encoded_slash = re.compile(rb"%(?:25)*(?:2f|5c)", re.IGNORECASE).search  # encoded twice too: a proxy may decode once

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


# ---------------------------------------------------------------------------------------------------- application


def application(app: Starlette, routes: Iterable[tuple[str, str, Handler]]) -> Starlette:
    """Return the application, with routes of (method, path, handler). Parameters and bodies are the handlers' business."""
    app.router.redirect_slashes = False
    for method, path, handler in routes:
        app.router.add_route(path, handler, methods=[method])
    app.add_exception_handler(HTTPException, _framework_error)
    return app


async def _framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code if error.status_code in CODES else 400
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    headers = {"Allow": _methods_of(request)} if status == 405 else dict(error.headers or {})
    return json_answer(envelope(CODES[status], message), status, headers)


def _methods_of(request: Request) -> str:
    """Return the methods of this path; the framework names those of the first route only."""
    routes = [route for route in request.app.router.routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in routes for method in route.methods}))


class FastRouter:
    """The ASGI application that uvicorn calls: the framework's routes without its middlewares.

    Those cost as much as a short request itself and handle errors, which these endpoints never raise. A request that fits no
    route is left to the framework.
    """

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self._routes: dict[tuple[str, int], list[Route]] = {}
        """By method and number of slashes, in the framework's order."""
        for route in app.router.routes:
            assert isinstance(route, Route)
            for method in route.methods or ():
                self._routes.setdefault((method, route.path.count("/")), []).append(route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._answer(scope, receive, send)
        if scope["state"]["connection"].conn.their_state is h11.SEND_BODY and not isinstance(answer, EarlyResponse):
            answer = EarlyResponse(answer)
        await answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> ASGIApp:
        if _encoded_slash(scope["raw_path"]):
            return error_answer(InvalidInput("the path has an encoded slash or backslash, which no name here may have"))
        path = scope["path"]
        for route in self._routes.get((scope["method"], path.count("/")), ()):
            if found := route.path_regex.match(path):
                scope["path_params"] = found.groupdict()
                endpoint: Handler = route.endpoint
                return await endpoint(Request(scope, receive, send))
        return self._app


# ---------------------------------------------------------------------------------------------------- connections


class _StrictBuffer(ReceiveBuffer):
    """h11's buffer, without its tolerance for headers that a proxy could read in another way, and with a strict limit."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        before = len(self)
        lines = super().maybe_extract_lines()
        if lines:
            size_bytes = before - len(self)
            if size_bytes > HEADERS_MAX_BYTES or len(lines) > HEADERS_MAX:
                raise h11.RemoteProtocolError("the headers are too large")
            if size_bytes != sum(map(len, lines)) + 2 * len(lines) + 2:
                raise h11.RemoteProtocolError("a line ends with a bare LF")
            if any(line.startswith((b" ", b"\t")) for line in lines):
                raise h11.RemoteProtocolError("a header is folded")
        return lines


class _Connection(h11.Connection):
    """h11's connection, without bodies of two lengths: a proxy could see their end elsewhere, and a request could be smuggled."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEADERS_MAX_BYTES)
        self._receive_buffer = _StrictBuffer()

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if type(event) is h11.Request:
            names = {name for name, _ in event.headers}
            if names >= _LENGTHS or (event.http_version < b"1.1" and b"transfer-encoding" in names):
                raise h11.RemoteProtocolError("Transfer-Encoding beside Content-Length, or in HTTP/1.0")
        return event


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with deadlines, for requests and for stalled readers, and with JSON answers to malformed requests."""

    stalled_s = STALLED_S
    _deadline: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _progress: tuple[int, bytes] | None = None
    _progress_at = 0.0

    def __init__(self, accepted: AcceptedSocket, config: uvicorn.Config, server_state: ServerState) -> None:
        super().__init__(config, server_state, {"connection": self})
        self.accepted = accepted
        self.conn = _Connection()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        # No reference cycle: the buffers of TLS, 256 KiB, would stay until the garbage collector comes.
        self.app_state = {}
        self.scope = self.cycle = None  # type: ignore[assignment]

    def _watch(self) -> None:
        """Set the deadline if no request is handled and one is expected or under way; it is not put off by further bytes."""
        if self._expects():
            if self._deadline is None:
                self._deadline = self.loop.call_later(HEADERS_TIMEOUT_S, self.transport.abort)
        elif self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expects(self) -> bool:
        if self.cycle is None or self.transport.is_closing() or not self.cycle.response_complete:
            return self.cycle is None
        return self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])  # else uvicorn's keep-alive counts

    def send_400_response(self, msg: str) -> None:
        body = msgspec.json.encode(envelope("INVALID_PAYLOAD", "this is not a valid HTTP request, or its headers are too large"))
        headers = [(b"content-type", b"application/json"), (b"connection", b"close"), (b"content-length", b"%d" % len(body))]
        try:
            output = self.conn.send(h11.Response(status_code=400, headers=headers, reason=b"Bad Request"))
            self.transport.write(output or b"")
            self.transport.write(self.conn.send(h11.Data(data=body)) or b"")
            self.transport.write(self.conn.send(h11.EndOfMessage()) or b"")
        except h11.LocalProtocolError:  # an answer is under way: there is no place for another one
            logger.debug("a malformed request came behind another one")
        self.transport.close()

    # ------------------------------------------------------------------------------------------------ stalled readers

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def on_response_complete(self) -> None:
        if self.accepted.owner is None and self.conn.trailing_data[0].count(b" HTTP/1.") > 1:
            self.transport.close()  # a stranger sends no queue of requests, which would delay all others
        super().on_response_complete()
        if self.transport.get_write_buffer_size():  # also a transport that is closing waits for the peer to read this
            self._watch_reader()
        self._watch()

    def _watch_reader(self) -> None:
        if self._stall_timer is None:
            self._progress = None
            self._check_reader()

    def _check_reader(self) -> None:
        self._stall_timer = None
        if not (self.flow.write_paused or self.transport.get_write_buffer_size()):
            return
        now, progress = self.loop.time(), self._read_so_far()
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
        elif now - self._progress_at >= self.stalled_s:
            who = f"{self.client[0]}:{self.client[1]}" if self.client else "a peer"
            logger.warning("%s read nothing of its answer for %g s, and is disconnected", who, self.stalled_s)
            sock = self.transport.get_extra_info("socket")
            if sock is not None:  # else the kernel would keep offering what it has buffered
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
            return
        self._stall_timer = self.loop.call_later(self.stalled_s / CHECKS, self._check_reader)

    def _read_so_far(self) -> tuple[int, bytes]:
        """Return a value that changes with every byte that the peer reads.

        The transport's buffer is not enough: it shrinks only when a large part of the kernel's buffer is free again, which may
        take a slow peer more than a minute.
        """
        acked = b""
        sock = self.transport.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_INFO"):
            try:
                acked = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED.stop)[_ACKED]
            except OSError:
                acked = b""  # not TCP
        return self.transport.get_write_buffer_size(), acked


async def while_connected(receive: Receive, sending: Coroutine[Any, Any, None]) -> bool:
    """Send until everything is sent or the peer has left, and return if everything was sent.

    uvicorn itself would continue sending to a peer that is gone. The rest of the request is discarded.
    """
    work, leaving = asyncio.ensure_future(sending), asyncio.ensure_future(until_disconnected(receive))
    try:
        await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return False
        work.result()
        return True
    finally:
        for task in (work, leaving):
            task.cancel()
        await asyncio.gather(work, leaving, return_exceptions=True)


# ---------------------------------------------------------------------------------------------------- the server


class UvicornServer:
    """One application on one socket. Event loop and signals belong to the caller."""

    def __init__(
        self, app: Starlette, tls: ssl.SSLContext | None, close_timeout_s: int, connections: Connections | None = None
    ) -> None:
        """`close_timeout_s`: time that requests under way have at the end. `connections` are those of the process."""
        config = uvicorn.Config(
            FastRouter(app),
            http=LimitedProtocol,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            headers=[("Cache-Control", "no-store")],  # jobs, results, logs and tokens are nobody else's
            h11_max_incomplete_event_size=HEADERS_MAX_BYTES,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=close_timeout_s,
        )
        config.load()
        self._server = uvicorn.Server(config)
        self._tls, self._connections = tls, Connections() if connections is None else connections
        self._listening: ListeningSocket | None = None
        self._serving: asyncio.Task[None] | None = None

    async def open(self, sock: socket.socket) -> None:
        """Serve requests from a bound socket."""
        self._server.lifespan = self._server.config.lifespan_class(self._server.config)
        await self._server.startup(sockets=[])
        busy = error_answer(Overloaded("this server has no room for a connection more; try again later"))
        refusal = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n%b\r\n\r\n%b" % (
            b"\r\n".join(b"%b: %b" % header for header in busy.raw_headers),
            bytes(busy.body),
        )
        self._listening = ListeningSocket(sock, self._connections, self._make_protocol, self._tls, refusal)
        self._serving = asyncio.create_task(self._serve())

    def _make_protocol(self, accepted: AcceptedSocket) -> LimitedProtocol:
        return LimitedProtocol(accepted, self._server.config, self._server.server_state)

    async def _serve(self) -> None:
        await self._server.main_loop()
        if self._listening is not None:
            self._listening.close()
        await self._server.shutdown()

    def hurry(self, close_timeout_s: int) -> None:
        """Shorten the time that requests under way have at the end."""
        self._server.config.timeout_graceful_shutdown = close_timeout_s

    async def close(self) -> None:
        """Stop listening, and wait for the requests under way."""
        if self._serving is not None:
            self._server.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
