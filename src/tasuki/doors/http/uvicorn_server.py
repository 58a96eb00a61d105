"""Every HTTP door has these: an application of plain routes whose refusals have one shape, and a uvicorn inside this process.

serving = Serving(application("tasuki agent", routes), tls, close_timeout_s)
await serving.open(sock); serving.hurry(2); await serving.close()

Free of the server, so that a node agent, which has none, can use it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from tasuki.doors.http.answers import CODES, envelope, json_answer
from tasuki.doors.http.fast_router import FastRouter
from tasuki.doors.http.limits import HEADERS_MAX_BYTES, KEEP_ALIVE_S, LimitedProtocol

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


def application(title: str, routes: Iterable[tuple[str, str, Handler]]) -> FastAPI:
    """Of (method, path, handler). Plain routes: what FastAPI would find out about parameters and bodies, the handlers do."""
    app = FastAPI(title=title, openapi_url=None, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    for method, path, handler in routes:
        app.router.add_route(path, handler, methods=[method])
    app.add_exception_handler(HTTPException, _framework_error)
    return app


class UvicornServer:
    """One application. The loop and the signals are its owner's."""

    def __init__(self, app: FastAPI, tls: ssl.SSLContext | None, close_timeout_s: int) -> None:
        """`close_timeout_s`: how long those who are being answered at the end may take."""
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
            h11_max_incomplete_event_size=HEADERS_MAX_BYTES,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=close_timeout_s,
        )
        config.load()
        config.ssl = tls
        self._server = uvicorn.Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def open(self, sock: socket.socket) -> None:
        self._server.lifespan = self._server.config.lifespan_class(self._server.config)
        await self._server.startup(sockets=[sock])
        self._serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        await self._server.main_loop()
        await self._server.shutdown()

    def hurry(self, close_timeout_s: int) -> None:
        self._server.config.timeout_graceful_shutdown = close_timeout_s

    async def close(self) -> None:
        if self._serving is not None:
            self._server.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)


async def _framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code if error.status_code in CODES else 400
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    headers = {"Allow": _methods_of(request)} if status == 405 else dict(error.headers or {})
    return json_answer(envelope(CODES[status], message), status, headers)


def _methods_of(request: Request) -> str:
    """What may be done at this path. The framework names the methods of the first route only."""
    routes = [route for route in request.app.router.routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in routes for method in route.methods}))
