"""Listeners: may it listen here, how many connections can it hold, a bound socket, and the certificate that it shows.

`ListeningSocket` accepts connections for every door, and `Connections` counts them from accept to the close of the descriptor: a
TLS handshake that never ends is counted too. A connection whose peer has shown no token is a *stranger*. When there is no room, a
stranger is closed for each connection that comes: the oldest one of the address that has most. So an address cannot take all,
peers behind one NAT or proxy are not limited, and a peer with a token needs only the moment to show it. Connections beyond the
share of their token give way to the first strangers.

A certificate lives for weeks, a server for months: `ServerCertificate.renew` reads the files again, for connections from then on.
Free of the server, so that node agents and dispatchers use this module too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tasuki.config import read_secret
from tasuki.core.address import Address
from tasuki.core.protocol import HANDSHAKE_TIMEOUT_S
from tasuki.core.shares import Shares
from tasuki.errors import ConfigError, Overloaded
from tasuki.event_loop import BackgroundTasks
from tasuki.net.tls import validity_of

CONNECTIONS_MAX = 10_000
DESCRIPTORS_KEPT = 128  # of the process's limit: for the store, transfers, and the refusal of one connection more
LOCAL_SHARE = 4  # one in so many connections is kept for the unix socket: the operator, and the workers of this machine
STRANGERS_MAX = 1024  # each may hold 64 KiB of a first frame: 70 MB in all
TOKEN_SHARE = 4  # one in so many connections may be of one token; others, and as many strangers, may take the place of more
BACKLOG = 1024
ACCEPTED_AT_ONCE = 32  # of one listener, in one turn of the loop: nobody waits long in the backlog
ACCEPTED_MAX = 256  # of one listener, not opened yet: beyond, a peer is told at once to try again, instead of waiting in vain
ACCEPT_AGAIN_S = 0.1  # when the descriptors are used up
TLS_CLOSE_TIMEOUT_S = 5.0  # for the peer's answer to the end of TLS; asyncio's own is 30 s
EXPIRES_SOON = timedelta(days=14)

logger = logging.getLogger("tasuki.server")


def check_listener(address: Address, *, tls: bool, tokens: bool, insecure: bool) -> None:
    """Raise ConfigError if other machines can reach the listener and TLS or tokens are missing, unless `insecure` is given."""
    if address.loopback or insecure or (tls and tokens):
        return
    missing = " and ".join(name for name, there in (("--tls-cert/--tls-key", tls), ("tokens", tokens)) if not there)
    raise ConfigError(
        f"{address} can be reached from other machines, but {missing} is missing; "
        "give it, listen on 127.0.0.1, or give --insecure if the network is trusted"
    )


def connections_max() -> int:
    """Return how many connections this process can hold; without descriptors left, the store could not open a file either."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(CONNECTIONS_MAX, descriptors - DESCRIPTORS_KEPT))


def raise_open_files() -> None:
    """Raise the soft limit of open files to what CONNECTIONS_MAX need, as far as the hard limit allows.

    Shells and systemd set it to 1,024, for programs that call select(). Children inherit it: not for processes that start jobs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS_MAX + DESCRIPTORS_KEPT
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def bound(address: Address) -> socket.socket:
    """Return a socket bound to the address, not listening yet; ConfigError if that fails."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # The protocol is named because asyncio sets TCP_NODELAY only then; without it each answer waits 40 ms for an acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address.host, address.port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {address}: {error.strerror or error}; is another server running there?") from None
    return sock


class AcceptedSocket(socket.socket):
    """A connection that is counted until its descriptor is closed, whoever closes it: asyncio, uvloop or a failed handshake."""

    def __init__(self, accepted: socket.socket, connections: Connections, group: str) -> None:
        super().__init__(accepted.family, accepted.type, accepted.proto, accepted.detach())
        self._connections = connections
        self.group = group
        """The address of a stranger, the token of a connection beyond the share of that token; empty for a unix socket."""
        self.is_opened = False
        """A transport is made, or its handshake is under way."""
        self.transport: asyncio.Transport | None = None
        self.owner: str | None = None
        """The token that was shown; None: a stranger, or a connection beyond the token's share."""

    def trust(self, owner: str) -> None:
        """Note that the peer has shown a token."""
        self._connections.trust(self, owner)

    def close(self) -> None:
        super().close()
        self._connections.remove(self)

    def detach(self) -> int:
        self._connections.remove(self)
        return super().detach()


class Connections:
    """All connections of this process. `on_refused` gets the address of a peer for whom there was no room, or no more."""

    def __init__(self, on_refused: Callable[[str], None] = lambda address: None) -> None:
        self._on_refused = on_refused
        self.limit = connections_max()
        self._network_max = self.limit - self.limit // LOCAL_SHARE
        self._strangers_max = min(STRANGERS_MAX, max(1, self.limit // 2))
        share = max(1, self._network_max // TOKEN_SHARE)
        self._strangers_min = min(share, self._strangers_max)
        self._shares = Shares(share, "connections")
        self._all: set[AcceptedSocket] = set()
        self._local = 0
        self._strangers: dict[str, dict[AcceptedSocket, None]] = {}
        """By address, oldest first."""
        self._beyond: dict[str, dict[AcceptedSocket, None]] = {}
        """Connections beyond the share of their token, by token."""

    def __len__(self) -> int:
        return len(self._all)

    def add(self, sock: AcceptedSocket) -> bool:
        """Count a connection, and close another one if there is no room; return False if that is not possible."""
        strangers = sum(map(len, self._strangers.values()))
        is_full = len(self._all) - self._local >= self._network_max
        crowd = self._beyond if strangers < self._strangers_min and self._beyond else self._strangers or self._beyond
        if sock.group and (strangers >= self._strangers_max or is_full) and crowd:
            largest = max(crowd, key=lambda group: len(crowd[group]))
            self.end(next(iter(crowd[largest])))
        elif sock.group and is_full:
            self._on_refused(sock.group)
            return False
        if len(self._all) >= self.limit:  # of some that were ended, the descriptor may not be closed yet
            return False
        if sock.group:
            self._strangers.setdefault(sock.group, {})[sock] = None
        else:
            self._local += 1
        self._all.add(sock)
        return True

    def trust(self, sock: AcceptedSocket, owner: str) -> None:
        if sock.group and sock.owner is None and sock in self._strangers.get(sock.group, ()):
            _leave(self._strangers, sock.group, sock)
            try:
                self._shares.take(owner)
                sock.owner = owner
            except Overloaded:
                sock.group = owner
                self._beyond.setdefault(owner, {})[sock] = None

    def remove(self, sock: AcceptedSocket) -> None:
        if sock in self._all:
            self._all.remove(sock)
            sock.transport = None  # no cycle: TLS keeps 256 KiB until its transport is freed
            self._local -= not sock.group
            _leave(self._strangers, sock.group, sock)
            _leave(self._beyond, sock.group, sock)
            if sock.owner is not None:
                self._shares.give_back(sock.owner)

    def end(self, sock: AcceptedSocket) -> None:
        """Close a connection; it counts until its descriptor is closed, in the next turn of the loop."""
        _leave(self._strangers, sock.group, sock)
        _leave(self._beyond, sock.group, sock)
        self._on_refused(sock.group)
        if sock.transport is not None:
            sock.transport.abort()
        elif sock.is_opened:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # ends the handshake
        else:
            sock.close()


def _leave(groups: dict[str, dict[AcceptedSocket, None]], key: str, sock: AcceptedSocket) -> None:
    if (group := groups.get(key)) is not None:
        group.pop(sock, None)
        if not group:
            del groups[key]


class ListeningSocket:
    """Accepts the connections of one bound socket. `make` returns the protocol of a connection."""

    def __init__(
        self,
        sock: socket.socket,
        connections: Connections,
        make: Callable[[AcceptedSocket], asyncio.Protocol],
        tls: ssl.SSLContext | None = None,
        refusal: bytes = b"",
        on_failed: Callable[[str, OSError], None] = lambda address, error: None,
    ) -> None:
        """`refusal` is sent, without TLS, to a peer for whom there is no room. `on_failed` gets the address of a peer whose
        handshake failed."""
        self.sock, self.tls = sock, tls
        self._connections, self._make, self._on_failed = connections, make, on_failed
        self._refusal = refusal if tls is None else b""
        self._accepted: deque[AcceptedSocket] = deque()
        """Connections that are not opened yet, oldest first."""
        self._opening = BackgroundTasks()
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        """Accept no more connections; open ones stay."""
        self._loop.remove_reader(self.sock)
        self.sock.close()
        for sock in self._accepted:
            sock.close()
        self._opening.cancel()

    def _resume(self) -> None:
        if self.sock.fileno() >= 0:
            self._loop.add_reader(self.sock, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, address = self.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.warning("connections cannot be accepted: %s", error.strerror or error)
                self._loop.remove_reader(self.sock)
                self._loop.call_later(ACCEPT_AGAIN_S, self._resume)
                return
            sock = AcceptedSocket(accepted, self._connections, _network_of(address[0]) if isinstance(address, tuple) else "")
            sock.setblocking(False)
            if self._connections.add(sock):
                if not self._accepted:
                    self._loop.call_soon(self._open_next)
                self._accepted.append(sock)
                if len(self._accepted) > ACCEPTED_MAX:
                    self._connections.end(self._accepted.popleft())
            else:
                with contextlib.suppress(OSError):
                    sock.send(self._refusal)
                sock.close()

    def _open_next(self) -> None:
        """Open one connection in each turn of the loop: after each handshake those who are connected are served again.

        The newest is first. When more come than can be opened, the others would all have waited until their peers gave up.
        """
        while self._accepted and (sock := self._accepted.pop()).fileno() < 0:
            """Closed, to make room for another one."""
        if sock.fileno() >= 0:
            sock.is_opened = True
            self._opening.spawn(self._open(sock))
        if self._accepted:
            self._loop.call_soon(self._open_next)

    async def _open(self, sock: AcceptedSocket) -> None:
        if sock.group:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        timeouts = (
            {}
            if self.tls is None
            else {"ssl_handshake_timeout": HANDSHAKE_TIMEOUT_S, "ssl_shutdown_timeout": TLS_CLOSE_TIMEOUT_S}
        )
        try:
            sock.transport, _ = await self._loop.connect_accepted_socket(lambda: self._make(sock), sock, ssl=self.tls, **timeouts)
        except OSError as error:  # of TLS too
            logger.debug("%s: the connection was not made: %s", sock.group, error)
            self._on_failed(sock.group, error)
            sock.close()


def _network_of(host: str) -> str:
    """Return an IPv4 address as it is, and of an IPv6 address the network of 64 bits, which one peer has for itself."""
    return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8].hex() if ":" in host else host


class ServerCertificate:
    """A certificate and its key. Listeners are given `context`, which stays the same when the certificate is renewed."""

    def __init__(self, cert: str, key: str) -> None:
        self._cert, self._key = cert, key
        self.context = self._current = server_tls(cert, key)
        # Called for every handshake, with or without a name. New files cannot be loaded into the old context: it keeps one
        # certificate for each kind of key, and could continue showing the old one.
        self.context.sni_callback = self._choose
        self._warn()

    def renew(self) -> datetime:
        """Read the files again and return when the certificate expires; ConfigError if they cannot be used: the old one stays."""
        self._current = server_tls(self._cert, self._key)
        self._warn()
        return validity_of(self._cert).ends

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        if self._current is not context:
            connection.context = self._current

    def _warn(self) -> None:
        if problem := date_problem(self._cert, datetime.now(UTC)):
            logger.warning("%s", problem)


def server_tls(cert: str, key: str) -> ssl.SSLContext:
    """Return TLS for a listener; ConfigError names the file that cannot be used."""
    try:
        Path(cert).read_bytes()
    except OSError as error:
        raise ConfigError(f"the certificate {cert!r} cannot be read: {error.strerror or error}") from None
    read_secret(key, "the key")
    validity_of(cert)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    def password() -> str:  # without it OpenSSL would ask on the terminal, and a service has none
        raise ConfigError(
            f"the key {key!r} needs a password, which a service cannot ask for: save it without one (openssl pkey -in … -out …)"
        )

    try:
        context.load_cert_chain(cert, key, password)
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            raise ConfigError(f"the certificate {cert!r} is not for the key {key!r}: give two that belong together") from None
        reason = error.reason or "there is no private key in it"
        raise ConfigError(f"the certificate {cert!r} with key {key!r} cannot be used: {reason}; both must be PEM") from None
    return context


def date_problem(cert: str, now: datetime) -> str:
    """Return a warning about the dates of a certificate; empty if there is none."""
    begins, ends = validity_of(cert)
    if ends <= now:
        return (
            f"the certificate {cert!r} has expired on {ends:%Y-%m-%d %H:%M} UTC: peers that verify it refuse to connect; renew it"
        )
    if begins > now:
        return f"the certificate {cert!r} is not valid before {begins:%Y-%m-%d %H:%M} UTC: check the clock of this machine"
    if ends - now < EXPIRES_SOON:
        return f"the certificate {cert!r} expires on {ends:%Y-%m-%d %H:%M} UTC; renew it, then send this process SIGHUP"
    return ""
