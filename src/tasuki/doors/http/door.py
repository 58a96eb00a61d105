"""The door itself: builds the application, listens inside the server's event loop, ends in order."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from tasuki.config import check_app
from tasuki.core.address import Address
from tasuki.core.ids import IdMaker
from tasuki.doors.http import limits
from tasuki.doors.http.answers import CODES, discreet, envelope, error_answer, json_answer
from tasuki.doors.http.call import Call, House, HttpConfig
from tasuki.doors.http.clients import Clients
from tasuki.doors.http.gate import Gate
from tasuki.doors.http.lines import Lines
from tasuki.doors.http.metrics import Metrics
from tasuki.doors.http.openapi import document
from tasuki.doors.http.routes import ROUTES, Route
from tasuki.doors.http.shortcut import Shortcut
from tasuki.doors.http.workers import Workers
from tasuki.doors.listening import bound, listen, until_closed
from tasuki.errors import InternalError, NotFound, Overloaded, TasukiError, Unauthorized, Unavailable
from tasuki.server.app import Server

logger = logging.getLogger("tasuki.http")
TICK_S = 1.0
CLOSE_TIMEOUT_S = 3
CLIENT_GONE = 499  # only in the metrics: nobody was there to be answered


class HttpDoor:
    """One listener. `listen`, then `close`; it may listen again after that."""

    def __init__(self, server: Server, config: HttpConfig) -> None:
        for app in config.apps:
            check_app(app)
        workers = Workers(server, config.lease_ttl_s)
        new_id = IdMaker(lambda: time.time_ns() // 1_000_000, os.urandom)
        self._house = House(server, config, Clients(server), workers, Lines(server), new_id, Metrics())
        server.on_turn = self._house.metrics.turn
        self._gate = Gate(server)
        self._intake = limits.Intake()
        self._under_way = 0
        self._closing = False
        self._server: uvicorn.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.app = self._application()

    # ------------------------------------------------------------------------------------------------ life

    async def listen(self, address: Address, tls: ssl.SSLContext | None = None) -> Address:
        """Listen; the address with the port that was really taken."""
        sock = bound(address)
        config = uvicorn.Config(
            Shortcut(self.app),
            http=limits.LimitedProtocol,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=limits.HEADERS_MAX_BYTES,
            timeout_keep_alive=limits.KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
        config.load()
        config.ssl = tls
        self._closing = False
        self._server = uvicorn.Server(config)
        await listen(self._server, sock)
        self._tasks = [asyncio.ensure_future(until_closed(self._server)), asyncio.ensure_future(self._tick())]
        return Address("https" if tls is not None else "http", address.host, sock.getsockname()[1])

    async def close(self) -> None:
        """Those who wait are told that there is nothing; then the listener ends, and with it the virtual connections."""
        self._closing = True
        self._house.workers.close()
        self._house.lines.close()
        self._house.clients.close()
        if self._server is not None:
            self._server.should_exit = True
            serving, ticking = self._tasks
            ticking.cancel()
            await asyncio.gather(serving, ticking, return_exceptions=True)
            self._server = None

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(min(TICK_S, self._house.config.lease_ttl_s / 4))
            self._house.workers.tick()
            self._house.lines.tick()
            self._house.clients.tick()

    # ------------------------------------------------------------------------------------------------ the application

    def _application(self) -> FastAPI:
        app = FastAPI(title="tasuki", openapi_url=None, docs_url=None, redoc_url=None)
        app.router.redirect_slashes = False
        # Plain routes: what FastAPI would find out about parameters and bodies, `limits` does, after the gate.
        for route in ROUTES:
            app.router.add_route(route.path, self._endpoint(route), methods=[route.method])
        text = msgspec.json.encode(document())

        async def openapi(request: Request) -> Response:
            return Response(text, media_type="application/json")

        app.router.add_route("/openapi.json", openapi, methods=["GET"])
        app.add_exception_handler(HTTPException, _framework_error)
        return app

    def _endpoint(self, route: Route) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if self._under_way >= limits.REQUESTS_MAX or self._closing:
                why = "going down" if self._closing else f"busy with {self._under_way} requests"
                return error_answer(Overloaded(f"this server is {why}; try again"))
            began, status = time.monotonic(), CLIENT_GONE
            self._under_way += 1
            self._house.metrics.began()
            try:
                answer = await self._surely_answer(route, request)
                status = answer.status_code
                if route.streamed:
                    answer.headers["Connection"] = "close"  # what was not read of the body is none of the next request
                return answer
            finally:
                self._under_way -= 1
                self._house.metrics.answered(route.method, route.path, status, time.monotonic() - began)

        return endpoint

    async def _surely_answer(self, route: Route, request: Request) -> Response:
        try:
            return await self._answer(route, request)
        except TasukiError as error:
            told = discreet(error)  # whatever the route: who asks may not have been let in yet
            if told is not error:
                logger.warning("%s %s: %s", route.method, route.path, error.message)
            return error_answer(told)
        except Exception:
            logger.exception("%s %s failed", route.method, route.path)
            return error_answer(discreet(InternalError("")))

    async def _answer(self, route: Route, request: Request) -> Response:
        if not route.kinds:
            return _encoded(await route.handle(self._house))
        app = request.path_params.get("app")
        if app is not None and app not in self._house.config.apps:
            raise NotFound(f"there is no app {app[:64]!r} here")
        caller = await self._gate.admit(request, route.kinds)
        call = Call(self._house, request, caller)
        if route.streamed:
            return await self._handled(route, call)
        with self._intake.share() as share:
            body = await limits.read_body(request, share)
            if route.body is not None:
                call.body = _decoded(route, body)
            elif route.content:
                call.body = body
            return await self._handled(route, call)

    async def _handled(self, route: Route, call: Call) -> Response:
        try:
            return _encoded(await route.handle(call))
        except Unauthorized:
            # A virtual connection was hung up on: the token has ended meanwhile, and the store knows how.
            await self._gate.admit(call.request, route.kinds)
            raise Unavailable("the connection was renewed; try again") from None


def _decoded(route: Route, body: bytes) -> Any:
    if route.batch is not None and "jobs" in limits.decode(body, dict[str, msgspec.Raw]):
        return limits.decode(body, route.batch)
    return limits.decode(body, route.body)


def _encoded(answer: Any) -> Response:
    return answer if isinstance(answer, Response) else json_answer(answer)


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
