"""The listener of the gRPC door: TLS, the certificates of both sides, and a relay to the gRPC server's private socket.

Why not TLS by gRPC itself: it tells nobody which handshakes failed and why, knows no revoked certificates in Python, and waits
two minutes for a peer that says nothing. Here connections are counted, limited and logged as at every other door. A connection is
relayed over a unix socket of its own in a private folder; by the path of its end a handler finds the peer's certificate.

Certificates live for weeks, nodes for months: the files are looked at every RELOAD_S. New connections see new files; if those
cannot be used, the old ones stay. When the list of revoked certificates changes, open connections are ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

from tasuki.doors.listening import AcceptedSocket, Connections, ListeningSocket, date_problem, server_tls
from tasuki.errors import ConfigError
from tasuki.event_loop import BackgroundTasks

RELOAD_S = 1.0
NO_USABLE_CRL = (3, 8, 11, 12)
"""OpenSSL's codes for a list of revoked certificates that is of another CA, forged, not valid yet, or has expired."""
ALPN = ["h2"]  # without it gRPC's clients hang up
logger = logging.getLogger("tasuki.grpc")


class TlsFiles(NamedTuple):
    """Files of TLS between nodes, PEM."""

    cert: str
    key: str
    ca: str
    """The CA that signed the certificates of all nodes."""
    revoked: str = ""
    """List of revoked certificates (CRL); used if the file is there."""

    def state(self) -> tuple[Any, ...]:
        """Return what changes when one of the files does; a file that is not there counts too."""
        return tuple(_state_of(path) for path in self)


def _state_of(path: str) -> tuple[int, int, int] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class NodeTls:
    """TLS of this node, from files that may be replaced at any time."""

    def __init__(self, files: TlsFiles, *, asks_for_certificate: bool = True) -> None:
        self.files = files
        self._asks = asks_for_certificate
        self._state = files.state()
        self._problem = ""
        self._load()
        self.loaded = 1
        """Grows each time that the files are loaded."""

    def _load(self) -> None:
        """Set `context`, of the listener, and `pem`, for calls: CA, key and certificate. ConfigError: both stay as they were."""
        files = self.files
        context = server_tls(files.cert, files.key)
        context.set_alpn_protocols(ALPN)
        if self._asks:
            context.verify_mode = ssl.CERT_REQUIRED
            _load_pem(context, files.ca, "the CA file")
            if files.revoked and Path(files.revoked).exists():
                _load_pem(context, files.revoked, "the list of revoked certificates")
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        pem = _read(files.ca, "the CA file"), _read(files.key, "the key"), _read(files.cert, "the certificate")
        if warning := date_problem(files.cert, datetime.now(UTC)):
            logger.warning("%s", warning)
        self.context, self.pem = context, pem

    def reload(self) -> bool:
        """Load the files if they have changed, and return whether they were. Files that do not fit together are tried again."""
        state = self.files.state()
        if state == self._state:
            return False
        try:
            self._load()
        except ConfigError as error:
            if error.message != self._problem:
                logger.warning("the certificate that was loaded before stays in use: %s", error.message)
            self._problem = error.message
            return False
        self._state, self._problem = state, ""
        self.loaded += 1
        logger.info("the certificate %s was loaded again", self.files.cert)
        return True


def _load_pem(context: ssl.SSLContext, path: str, what: str) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{what} {path!r} cannot be used: {error.reason or error}; it must be PEM") from None
    except OSError as error:
        raise _unreadable(path, what, error) from None


def _read(path: str, what: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _unreadable(path, what, error) from None


def _unreadable(path: str, what: str, error: OSError) -> ConfigError:
    return ConfigError(f"{what} {path!r} cannot be read: {error.strerror or error}")


class PeerConnection:
    """One connection of a caller, from its handshake to its end."""

    def __init__(self, sock: AcceptedSocket) -> None:
        self._sock = sock
        self.address = sock.group
        self.names: frozenset[str] = frozenset()
        """Names in its certificate, in lower case; none without TLS."""
        self.expires_at = float("inf")
        """End of its certificate, Unix time: a connection may outlive it."""
        self.outer, self.inner = _RelayEnd(), _RelayEnd()
        self.outer.other, self.inner.other = self.inner, self.outer

    def read_certificate(self, certificate: dict[str, Any]) -> None:
        self.names = frozenset(str(name).lower() for _, name in certificate.get("subjectAltName", ()))
        self.expires_at = ssl.cert_time_to_seconds(certificate["notAfter"])

    def trust(self, owner: str) -> None:
        """Note that the caller has shown who it is: it does not give way to strangers any more."""
        if self._sock.owner is None:
            self._sock.trust(owner)

    def close(self) -> None:
        self.outer.close()
        self.inner.close()


class _RelayEnd(asyncio.Protocol):
    """One end of a relayed connection. Received bytes go to the other end, which slows this one down when it cannot keep up."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _RelayEnd
        self._early = b""
        """Received before there was another end."""
        self.on_made: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.on_made()

    def data_received(self, data: bytes) -> None:
        if self.other.transport is not None:
            self.other.transport.write(data)
        elif self.transport is not None:
            self._early += data
            self.transport.pause_reading()  # here and not in connection_made: after that uvloop reads all the same

    def begin(self) -> None:
        """Send on what came before there was another end."""
        if self._early and self.other.transport is not None:
            self.other.transport.write(self._early)
            self._early = b""
            if self.transport is not None:
                self.transport.resume_reading()

    def pause_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.other.close()
        self.on_lost()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()


class NodeListener:
    """Accepts connections on a bound socket and relays them to `server`, the gRPC server's socket in a private folder.

    `on_refused` gets address, code and reason of each connection that was not let in.
    """

    def __init__(
        self, sock: socket.socket, server: Path, tls: NodeTls | None, on_refused: Callable[[str, str, str], None]
    ) -> None:
        self.peers: dict[str, PeerConnection] = {}
        """Connections by the path of their end of the relay."""
        self._server, self._tls, self._on_refused = server, tls, on_refused
        self._numbers = itertools.count(1)
        self._tasks = BackgroundTasks()
        self._loop = asyncio.get_running_loop()
        connections = Connections(lambda address: on_refused(address, "OVERLOADED", "there are too many connections"))
        context = tls.context if tls is not None else None
        self._warned_at = 0
        self._listening = ListeningSocket(sock, connections, self._accepted, context, on_failed=self._not_made)
        if tls is not None:
            self._revoked = _state_of(tls.files.revoked)
            self._tasks.spawn(self._watch(tls))

    async def close(self) -> None:
        self._listening.close()
        for peer in list(self.peers.values()):
            peer.close()
        await self._tasks.close()

    async def _watch(self, tls: NodeTls) -> None:
        while True:
            await asyncio.sleep(RELOAD_S)
            if tls.reload():
                self._listening.tls = tls.context
                was, self._revoked = self._revoked, _state_of(tls.files.revoked)
                if was != self._revoked:
                    for peer in list(self.peers.values()):
                        peer.close()

    def _not_made(self, address: str, error: OSError) -> None:
        if isinstance(error, ssl.SSLCertVerificationError):
            self._on_refused(address, "CERTIFICATE", f"its certificate was refused: {error.verify_message}")
            self._warn_of_list(error)
        elif isinstance(error, ssl.SSLError):
            self._on_refused(address, "TLS", f"there is no TLS with it: {error.reason or error}")
        elif not isinstance(error, ConnectionResetError):  # whoever hangs up was not refused: probes of the port do
            self._on_refused(address, "TLS", f"the connection ended in the handshake: {error or type(error).__name__}")

    def _warn_of_list(self, error: ssl.SSLCertVerificationError) -> None:
        """Warn once of each list of revoked certificates by which nobody is let in."""
        if (tls := self._tls) is not None and error.verify_code in NO_USABLE_CRL and self._warned_at != tls.loaded:
            self._warned_at = tls.loaded
            path = tls.files.revoked
            logger.warning("all callers are refused until the list %s is replaced: %s", path, error.verify_message)

    def _accepted(self, sock: AcceptedSocket) -> asyncio.Protocol:
        peer = PeerConnection(sock)
        path = self._server.with_name(f"peer-{next(self._numbers)}")
        peer.outer.on_made, peer.inner.on_made = lambda: self._made(peer, path), peer.outer.begin
        peer.outer.on_lost = peer.inner.on_lost = lambda: self._lost(path)
        return peer.outer

    def _made(self, peer: PeerConnection, path: Path) -> None:
        transport = peer.outer.transport
        assert transport is not None
        if (tls := transport.get_extra_info("ssl_object")) is not None and (certificate := tls.getpeercert()):
            peer.read_certificate(certificate)
            peer.trust(min(peer.names, default=""))
        self.peers[str(path)] = peer
        self._tasks.spawn(self._relay(peer, path))

    async def _relay(self, peer: PeerConnection, path: Path) -> None:
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        inner.setblocking(False)
        try:
            inner.bind(os.fspath(path))
            await self._loop.sock_connect(inner, os.fspath(self._server))
            await self._loop.create_unix_connection(lambda: peer.inner, sock=inner)
        except OSError as error:
            logger.warning("%s: its connection cannot be relayed: %s", peer.address, error.strerror or error)
            inner.close()
            peer.close()
            self._lost(path)
            return
        if peer.outer.transport is None or peer.outer.transport.is_closing():
            peer.close()

    def _lost(self, path: Path) -> None:
        self.peers.pop(str(path), None)
        with suppress(OSError):
            path.unlink()
