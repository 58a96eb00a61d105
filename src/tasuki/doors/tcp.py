"""The TCP and unix door: listens, turns links into the server's connections. Holds sockets only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import ssl
from pathlib import Path
from typing import Any

from tasuki.config import Address
from tasuki.core.protocol import HANDSHAKE_TIMEOUT_S, Message
from tasuki.errors import ConfigError, Overloaded
from tasuki.net import Link
from tasuki.server.app import Server

CONNECTIONS_MAX = 10_000
DESCRIPTORS_KEPT = 128  # of the process's limit: for the store, blobs on their way, and the refusal of one connection more
BACKLOG = 1024


def check_listener(address: Address, *, tls: bool, tokens: bool, insecure: bool) -> None:
    """A listener that others can reach needs TLS and tokens, or a person who says that it is meant so."""
    if address.loopback or insecure or (tls and tokens):
        return
    missing = " and ".join(name for name, there in (("--tls-cert/--tls-key", tls), ("tokens", tokens)) if not there)
    raise ConfigError(
        f"{address} can be reached from other machines, but {missing} is missing; "
        "give it, listen on 127.0.0.1, or say --insecure if the network is trusted"
    )


def server_tls(cert: str, key: str) -> ssl.SSLContext:
    """TLS for the listener; ConfigError that names the file that cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the certificate {cert!r} with key {key!r} cannot be used: {error}") from None
    return context


def connections_max() -> int:
    """How many connections this process can hold; without descriptors left, the store could not open a file either."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(CONNECTIONS_MAX, descriptors - DESCRIPTORS_KEPT))


class TcpDoor:
    """One or more listeners on one server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._listeners: list[asyncio.AbstractServer] = []
        self._links: set[Link] = set()
        self._links_max = connections_max()
        self._socket: Path | None = None

    async def listen_tcp(self, address: Address, tls: ssl.SSLContext | None = None) -> Address:
        """Listen; the address with the port that was really taken."""
        loop = asyncio.get_running_loop()
        try:
            listener = await loop.create_server(
                self._make,
                address.host,
                address.port,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S if tls is not None else None,  # asyncio's own is a minute
                backlog=BACKLOG,
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address}: {error.strerror or error}; is another server running there?"
            ) from None
        self._listeners.append(listener)
        port = listener.sockets[0].getsockname()[1]
        return Address("tls" if tls is not None else "tcp", address.host, port)

    async def listen_unix(self, path: Path) -> Address:
        """Listen on a socket that only this user can open. The data folder's lock already says that we are its one owner."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            before = os.umask(0o177)
            try:
                sock.bind(os.fspath(path))
            finally:
                os.umask(before)
            listener = await loop.create_unix_server(self._make, sock=sock, backlog=BACKLOG)
        except OSError as error:
            sock.close()
            raise ConfigError(f"cannot listen on unix socket {path}: {error.strerror or error}") from None
        self._listeners.append(listener)
        self._socket = path
        return Address("unix", path=os.fspath(path))

    async def close(self) -> None:
        """Take no more connections; the socket file goes away."""
        for listener in self._listeners:
            listener.close()
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)

    def _make(self) -> Link:
        return Link(self._message, self._closed, self._opened, on_read=self._server.read)

    def _opened(self, link: Link) -> None:
        if len(self._links) >= self._links_max:
            link.close(Overloaded(f"this server has {self._links_max} connections already; try again later"))
            return
        self._links.add(link)
        link.tag = self._server.opened(link)

    def _message(self, link: Link, message: Message) -> None:
        self._server.received(link.tag, message)

    def _closed(self, link: Link, reason: str) -> None:
        self._links.discard(link)
        tag: Any = link.tag
        if tag is not None:
            self._server.closed(tag, reason)
