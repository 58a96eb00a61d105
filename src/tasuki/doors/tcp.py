"""The TCP and unix door: listens, and turns links into connections of the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from pathlib import Path
from typing import Any

from tasuki.core.address import Address
from tasuki.core.protocol import HANDSHAKE_TIMEOUT_S, Message
from tasuki.doors.listening import connections_max
from tasuki.errors import ConfigError, Overloaded
from tasuki.net import TcpLink
from tasuki.server.server import Server

BACKLOG = 1024


class TcpDoor:
    """One or more listeners on one server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._listeners: list[asyncio.AbstractServer] = []
        self._links: set[TcpLink] = set()
        self._links_max = connections_max()
        self._socket: Path | None = None

    async def listen_tcp(self, address: Address, tls: ssl.SSLContext | None = None) -> Address:
        """Listen, and return the address with the port that was really taken."""
        loop = asyncio.get_running_loop()
        try:
            listener = await loop.create_server(
                self._make_link,
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
        """Listen on a socket that only this user can open. The lock of the data folder excludes another owner."""
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
            listener = await loop.create_unix_server(self._make_link, sock=sock, backlog=BACKLOG)
        except OSError as error:
            sock.close()
            raise ConfigError(f"cannot listen on unix socket {path}: {error.strerror or error}") from None
        self._listeners.append(listener)
        self._socket = path
        return Address("unix", path=os.fspath(path))

    async def close(self) -> None:
        """Accept no more connections, and remove the socket file."""
        for listener in self._listeners:
            listener.close()
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)

    def _make_link(self) -> TcpLink:
        return TcpLink(self._message, self._closed, self._opened, on_read=self._server.read)

    def _opened(self, link: TcpLink) -> None:
        if len(self._links) >= self._links_max:
            error = Overloaded(f"this server has {self._links_max} connections already; try again later")
            self._server.refusals.error(link.peer.address, error)
            link.close(error)
            return
        self._links.add(link)
        link.tag = self._server.opened(link)

    def _message(self, link: TcpLink, message: Message) -> None:
        self._server.received(link.tag, message)

    def _closed(self, link: TcpLink, reason: str) -> None:
        self._links.discard(link)
        tag: Any = link.tag
        if tag is not None:
            self._server.closed(tag, reason, link.error)
