"""The HTTP door: builds the application, listens inside the server's event loop, closes in order."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from tasuki.config import check_app
from tasuki.core.address import Address
from tasuki.core.job import IdMaker
from tasuki.core.shares import Shares
from tasuki.doors.http import exchange
from tasuki.doors.http.context import Authenticator, HttpConfig, HttpContext, RequestContext
from tasuki.doors.http.exchange import discreet, error_answer, json_answer
from tasuki.doors.http.metrics import Metrics
from tasuki.doors.http.openapi import document_text
from tasuki.doors.http.routes import ROUTES, Route
from tasuki.doors.http.uvicorn_server import Handler, UvicornServer, application
from tasuki.doors.http.virtual_connection import Clients
from tasuki.doors.http.worker_sessions import WorkerSessions
from tasuki.doors.http.workers import Workers
from tasuki.doors.listening import Connections, bound
from tasuki.errors import (
    InternalError,
    InvalidInput,
    NotFound,
    Overloaded,
    TasukiError,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from tasuki.server.server import Server

logger = logging.getLogger("tasuki.http")
TICK_S = 1.0
CLOSE_TIMEOUT_S = 3
TOKEN_SHARE = 4  # one in so many requests under way may be of one token


class HttpDoor:
    """One listener. `listen`, then `close`; it may listen again after that."""

    def __init__(
        self, server: Server, config: HttpConfig, connections: Connections | None = None, screens: Handler | None = None
    ) -> None:
        """`screens` answers all requests below /ops/, also those without a token: it has a login of its own."""
        for app in config.apps:
            check_app(app)
        workers = Workers(server, config.lease_ttl_s)
        new_id = IdMaker(lambda: time.time_ns() // 1_000_000, os.urandom)
        self._http = HttpContext(server, config, Clients(server), workers, WorkerSessions(server), new_id, Metrics())
        server.on_turn = self._http.metrics.turn
        self._authenticator = Authenticator(server)
        self._bodies = exchange.BodyBudget()
        self._connections = Connections() if connections is None else connections
        self._shares = Shares(exchange.REQUESTS_MAX // TOKEN_SHARE, "requests under way", TooManyRequests)
        self._under_way = 0
        self._closing = self._loopback = False
        self._uvicorn: UvicornServer | None = None
        self._ticking: asyncio.Task[None] | None = None
        self.asgi_app = self._application(screens)

    # ------------------------------------------------------------------------------------------------ life

    async def listen(self, address: Address, tls: ssl.SSLContext | None = None) -> Address:
        """Listen, and return the address with the port that was really taken."""
        sock = bound(address)
        self._loopback = address.loopback
        self._closing = False
        self._uvicorn = UvicornServer(self.asgi_app, tls, CLOSE_TIMEOUT_S, self._connections)
        await self._uvicorn.open(sock)
        self._ticking = asyncio.ensure_future(self._tick())
        return Address("https" if tls is not None else "http", address.host, sock.getsockname()[1])

    async def close(self) -> None:
        """Answer all waiting requests, and close the virtual connections and the listener."""
        self._closing = True
        self._http.workers.close()
        self._http.sessions.close()
        self._http.clients.close()
        if self._uvicorn is not None and self._ticking is not None:
            self._ticking.cancel()
            await self._uvicorn.close()
            await asyncio.gather(self._ticking, return_exceptions=True)
            self._uvicorn = self._ticking = None
        for check in self._http.config.payload_checks.values():
            await check.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(min(TICK_S, self._http.config.lease_ttl_s / 4))
            self._http.workers.tick()
            self._http.sessions.tick()
            self._http.clients.tick()

    # ------------------------------------------------------------------------------------------------ the application

    def _application(self, screens: Handler | None) -> Starlette:
        async def openapi(request: Request) -> Response:
            return Response(document_text(), media_type="application/json")

        routes = [(route.method, route.path, self._endpoint(route)) for route in ROUTES]
        routes.append(("GET", "/openapi.json", openapi))
        if screens is not None:
            routes += [(method, "/ops/{path:path}", self._screens_endpoint(screens)) for method in ("GET", "POST")]
        app = FastAPI(title="tasuki", openapi_url=None, docs_url=None, redoc_url=None)
        return application(app, routes)

    def _screens_endpoint(self, screens: Handler) -> Handler:
        async def endpoint(request: Request) -> Response:
            try:
                if self._closing:
                    raise Overloaded("this server is going down; try again")
                exchange.check_site(request, self._http.config.host_names, loopback=self._loopback)
                return await screens(request)
            except TasukiError as error:
                self._http.server.refusals.error(exchange.peer_of(request), error)
                return error_answer(discreet(error))

        return endpoint

    def _endpoint(self, route: Route) -> Handler:
        async def endpoint(request: Request) -> Response:
            counted = bool(route.kinds)  # health is asked without a token, and answered also when the door is busy
            if self._closing or (counted and self._under_way >= exchange.REQUESTS_MAX):
                why = "going down" if self._closing else f"busy with {self._under_way} requests"
                busy = Overloaded(f"this server is {why}; try again")
                self._http.server.refusals.error(exchange.peer_of(request), busy)
                return error_answer(busy)
            began, status = time.monotonic(), exchange.CLIENT_GONE
            self._under_way += counted
            self._http.metrics.began()
            try:
                answer = await self._answer_or_error(route, request)
                status = answer.status_code
                if route.streamed:
                    answer.headers["Connection"] = "close"  # the unread rest of a body must not be taken for the next request
                return answer
            finally:
                self._under_way -= counted
                self._http.metrics.answered(route.method, route.path, status, time.monotonic() - began)

        return endpoint

    async def _answer_or_error(self, route: Route, request: Request) -> Response:
        try:
            return await self._answer(route, request)
        except TasukiError as error:
            return self._refusal(route, request, error)
        except Exception:
            logger.exception("%s %s failed", route.method, route.path)
            return error_answer(discreet(InternalError("")))

    def _refusal(self, route: Route, request: Request, error: TasukiError) -> Response:
        shown = discreet(error)  # on every route: the caller may not be authenticated yet
        if shown is not error:
            logger.warning("%s %s: %s", route.method, route.path, error.message)
        self._http.server.refusals.error(exchange.peer_of(request), error, str(request.path_params.get("job_id", "")))
        return error_answer(shown)

    async def _answer(self, route: Route, request: Request) -> Response:
        if not route.kinds:
            return _encoded(await route.handle(self._http))
        exchange.check_site(request, self._http.config.host_names, loopback=self._loopback)
        admit = self._authenticator.admit_without_store if route.without_store else self._authenticator.admit
        caller = await admit(request, route.kinds)
        app = request.path_params.get("app")
        if app is not None and app not in self._http.config.apps:
            raise NotFound(f"there is no app {app[:64]!r} here")
        owner = caller.identity.name
        exchange.note_token(request, owner)
        self._shares.take(owner)
        try:
            with self._bodies.share(owner) as reserve:
                answer = await self._read_and_handle(route, RequestContext(self._http, request, caller, reserve))
                answer = await exchange.compressed(request, answer)
            return self._bodies.counted(answer, owner, beyond=route.unrepeatable)
        finally:
            self._shares.give_back(owner)

    async def _read_and_handle(self, route: Route, context: RequestContext) -> Response:
        if route.streamed:
            exchange.encoding_of(context.request)  # the bytes are what is stored: they come as they are
            return await self._handled(route, context)
        body = await exchange.read_body(context.request, context.reserve)
        if route.body is not None:
            context.reserve(exchange.decoded_bytes(body))
            return await self._handled(route, context, _decoded(route, body))
        return await self._handled(route, context, *((body,) if route.content else ()))

    async def _handled(self, route: Route, context: RequestContext, *body: Any) -> Response:
        try:
            return _encoded(await route.handle(context, *body))
        except Unauthorized:
            # The server closed a virtual connection: the token has ended meanwhile, and the store knows how.
            await self._authenticator.admit(context.request, route.kinds)
            raise Unavailable("the connection was renewed; try again") from None


def _decoded(route: Route, body: bytes) -> Any:
    if route.needs_body and not body:
        raise InvalidInput('the body is empty; send the job as a JSON object, and an empty one as "{}"')
    if route.batch is not None and "jobs" in exchange.decode(body, dict[str, msgspec.Raw]):
        return exchange.decode(body, route.batch)
    return exchange.decode(body, route.body)


def _encoded(answer: Any) -> Response:
    return answer if isinstance(answer, Response) else json_answer(answer)
