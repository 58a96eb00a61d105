"""The door itself: builds the application, listens inside the server's event loop, ends in order."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from tasuki.config import check_app
from tasuki.core.address import Address
from tasuki.core.ids import IdMaker
from tasuki.doors.http import exchange
from tasuki.doors.http.authentication import Authenticator
from tasuki.doors.http.clients import Clients
from tasuki.doors.http.context import HttpConfig, HttpContext, RequestContext
from tasuki.doors.http.exchange import discreet, error_answer, json_answer
from tasuki.doors.http.metrics import Metrics
from tasuki.doors.http.openapi import document
from tasuki.doors.http.routes import ROUTES, Route
from tasuki.doors.http.uvicorn_server import Handler, UvicornServer, application
from tasuki.doors.http.worker_sessions import Lines
from tasuki.doors.http.workers import Workers
from tasuki.doors.listening import bound
from tasuki.errors import InternalError, NotFound, Overloaded, TasukiError, Unauthorized, Unavailable
from tasuki.server.server import Server

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
        self._house = HttpContext(server, config, Clients(server), workers, Lines(server), new_id, Metrics())
        server.on_turn = self._house.metrics.turn
        self._gate = Authenticator(server)
        self._intake = exchange.BodyBudget()
        self._under_way = 0
        self._closing = False
        self._serving: UvicornServer | None = None
        self._ticking: asyncio.Task[None] | None = None
        self.app = self._application()

    # ------------------------------------------------------------------------------------------------ life

    async def listen(self, address: Address, tls: ssl.SSLContext | None = None) -> Address:
        """Listen; the address with the port that was really taken."""
        sock = bound(address)
        self._closing = False
        self._serving = UvicornServer(self.app, tls, CLOSE_TIMEOUT_S)
        await self._serving.open(sock)
        self._ticking = asyncio.ensure_future(self._tick())
        return Address("https" if tls is not None else "http", address.host, sock.getsockname()[1])

    async def close(self) -> None:
        """Those who wait are told that there is nothing; then the listener ends, and with it the virtual connections."""
        self._closing = True
        self._house.workers.close()
        self._house.lines.close()
        self._house.clients.close()
        if self._serving is not None and self._ticking is not None:
            self._ticking.cancel()
            await self._serving.close()
            await asyncio.gather(self._ticking, return_exceptions=True)
            self._serving = self._ticking = None

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(min(TICK_S, self._house.config.lease_ttl_s / 4))
            self._house.workers.tick()
            self._house.lines.tick()
            self._house.clients.tick()

    # ------------------------------------------------------------------------------------------------ the application

    def _application(self) -> FastAPI:
        text = msgspec.json.encode(document())

        async def openapi(request: Request) -> Response:
            return Response(text, media_type="application/json")

        routes = [(route.method, route.path, self._endpoint(route)) for route in ROUTES]
        return application("tasuki", [*routes, ("GET", "/openapi.json", openapi)])

    def _endpoint(self, route: Route) -> Handler:
        async def endpoint(request: Request) -> Response:
            if self._under_way >= exchange.REQUESTS_MAX or self._closing:
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
        call = RequestContext(self._house, request, caller)
        if route.streamed:
            return await self._handled(route, call)
        with self._intake.share() as share:
            body = await exchange.read_body(request, share)
            if route.body is not None:
                call.body = _decoded(route, body)
            elif route.content:
                call.body = body
            return await self._handled(route, call)

    async def _handled(self, route: Route, call: RequestContext) -> Response:
        try:
            return _encoded(await route.handle(call))
        except Unauthorized:
            # A virtual connection was hung up on: the token has ended meanwhile, and the store knows how.
            await self._gate.admit(call.request, route.kinds)
            raise Unavailable("the connection was renewed; try again") from None


def _decoded(route: Route, body: bytes) -> Any:
    if route.batch is not None and "jobs" in exchange.decode(body, dict[str, msgspec.Raw]):
        return exchange.decode(body, route.batch)
    return exchange.decode(body, route.body)


def _encoded(answer: Any) -> Response:
    return answer if isinstance(answer, Response) else json_answer(answer)
