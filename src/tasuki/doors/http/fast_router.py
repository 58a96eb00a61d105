"""From the socket to an endpoint without the way through the framework, which is as long as the work of a short request.

Its middlewares are there for errors, and our endpoints raise none. What fits no route is the framework's to answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]


class FastRouter:
    """The application as uvicorn calls it."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._routes: dict[tuple[str, int], list[Route]] = {}
        """By method and number of slashes, in the framework's order."""
        for route in app.router.routes:
            assert isinstance(route, Route)
            for method in route.methods or ():
                self._routes.setdefault((method, route.path.count("/")), []).append(route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        for route in self._routes.get((scope["method"], path.count("/")), ()):
            if found := route.path_regex.match(path):
                scope["path_params"] = found.groupdict()
                endpoint: Endpoint = route.endpoint
                answer = await endpoint(Request(scope, receive, send))
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)
