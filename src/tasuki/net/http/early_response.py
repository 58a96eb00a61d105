"""A transport for httpx that stops sending a body as soon as its response comes (docs/decisions/0042).

A server may know its response before it has read the body: the result is stored already, the name is taken, there is no room.
httpx would send the rest first. Here every connection is read from while a body is sent: incoming bytes make the next write fail,
and httpcore, which expects that of servers that hang up early, reads the response. Such a connection is not used again.

A proxy is used only by callers that pass one (`proxy_of`); machines that speak to each other do not.
"""

from __future__ import annotations

import asyncio
import ssl
import urllib.request
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

from tasuki.core.address import Address
from tasuki.errors import ConfigError

READ_BYTES = 64 * 1024
EARLY_KEPT_S = 2.0  # an unused connection; a request on one that its server is just closing would look like the server's death
LISTEN_BYTES = 64 * 1024  # a smaller write is over before a server could respond to it


class _HttpStream(httpcore.AsyncNetworkStream):
    """One connection, which is read from while it is written to."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._reading: asyncio.Task[bytes] | None = None
        self._received = b""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._received:
            piece, self._received = self._received[:max_bytes], self._received[max_bytes:]
            return piece
        if self._reading is None:
            return await self._stream.read(max_bytes, timeout)
        await asyncio.wait({self._reading}, timeout=timeout)
        if not self._reading.done():
            raise httpcore.ReadTimeout
        reading, self._reading = self._reading, None
        self._received = await reading
        return await self.read(max_bytes, timeout) if self._received else b""

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if len(buffer) < LISTEN_BYTES:
            await self._stream.write(buffer, timeout)
            return
        if self._reading is None:
            self._reading = asyncio.create_task(self._stream.read(READ_BYTES))
        writing = asyncio.create_task(self._stream.write(buffer, timeout))
        try:
            await asyncio.wait({writing, self._reading}, return_when=asyncio.FIRST_COMPLETED)
            if not self._reading.done():
                await writing
                return
        finally:
            await _end(writing)
        raise httpcore.WriteError("the response came before the body was sent")

    async def aclose(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            await _end(reading)
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _HttpStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end; its result does not matter."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class _Backend(httpcore.AsyncNetworkBackend):
    def __init__(self) -> None:
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return _HttpStream(await self._backend.connect_tcp(host, port, timeout, local_address, socket_options))

    async def sleep(self, seconds: float) -> None:
        await self._backend.sleep(seconds)


def proxy_of(address: Address) -> httpx.Proxy | None:
    """Return the proxy of HTTP_PROXY, HTTPS_PROXY and ALL_PROXY, or of the system, unless NO_PROXY names the host."""
    found = urllib.request.getproxies()
    text = found.get(address.scheme) or found.get("all")
    if not text or urllib.request.proxy_bypass(f"{address.host}:{address.port}"):
        return None
    url = text if "://" in text else f"http://{text}"
    try:
        if url.startswith(("http://", "https://")):
            return httpx.Proxy(url)
    except httpx.InvalidURL:
        pass
    raise ConfigError(
        f"the proxy for {address} must be http://HOST:PORT or https://HOST:PORT; or name {address.host} in NO_PROXY"
    )


class EarlyResponseTransport(httpx.AsyncHTTPTransport):
    """The transport: `httpx.AsyncClient(transport=EarlyResponseTransport(context, limits))`."""

    def __init__(self, context: ssl.SSLContext, limits: httpx.Limits, proxy: httpx.Proxy | None = None) -> None:
        super().__init__(verify=context, limits=limits, proxy=proxy)
        # httpcore's parameter for this is public, but httpx does not pass it on.
        self._pool._network_backend = _Backend()
