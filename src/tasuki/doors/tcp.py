"""The TCP and unix door: listens, and turns links into connections of the server."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from functools import partial
from pathlib import Path
from typing import Any

from tasuki.core.address import Address
from tasuki.core.protocol import error_message
from tasuki.doors.listening import AcceptedSocket, Connections, ListeningSocket, bound
from tasuki.errors import ConfigError, Overloaded
from tasuki.net.tcp_link import TcpLink
from tasuki.server.server import Server
from tasuki.wire.messages import encode


class TcpDoor:
    """One or more listeners on one server. `connections` are those of the process, if it has other doors too."""

    def __init__(self, server: Server, connections: Connections | None = None) -> None:
        self._server = server
        self._connections = Connections() if connections is None else connections
        self._listeners: list[ListeningSocket] = []
        self._socket: Path | None = None

    async def listen_tcp(self, address: Address, tls: ssl.SSLContext | None = None) -> Address:
        """Listen, and return the address with the port that was really taken."""
        sock = bound(address)
        self._accept(sock, tls)
        return Address("tls" if tls is not None else "tcp", address.host, sock.getsockname()[1])

    async def listen_unix(self, path: Path) -> Address:
        """Listen on a socket that only this user can open. The lock of the data folder excludes another owner."""
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            before = os.umask(0o177)
            try:
                sock.bind(os.fspath(path))
            finally:
                os.umask(before)
        except OSError as error:
            sock.close()
            raise ConfigError(f"cannot listen on unix socket {path}: {error.strerror or error}") from None
        self._accept(sock)
        self._socket = path
        return Address("unix", path=os.fspath(path))

    def _accept(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        limit = self._connections.limit
        refusal = error_message(0, Overloaded(f"this server has no room for a connection more, of {limit}; try again later"))
        self._listeners.append(ListeningSocket(sock, self._connections, self._make_link, tls, encode(refusal)))

    async def close(self) -> None:
        """Accept no more connections, and remove the socket file."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)

    def _make_link(self, sock: AcceptedSocket) -> TcpLink:
        return TcpLink(None, self._closed, self._opened, on_read=self._server.read, on_trusted=sock.trust)

    def _opened(self, link: TcpLink) -> None:
        link.tag = self._server.opened(link)
        link.on_message = partial(self._server.received, link.tag)

    def _closed(self, link: TcpLink, reason: str) -> None:
        tag: Any = link.tag
        if tag is not None:
            self._server.closed(tag, reason, link.error)
