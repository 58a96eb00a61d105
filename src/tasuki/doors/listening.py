"""Listeners: may it listen here, how many connections can it hold, a bound socket, and the certificate that it shows.

A certificate lives for weeks, a server for months: `ServerCertificate.renew` reads the files again, for connections from then on.
Free of the server, so that node agents and dispatchers use this module too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tasuki.core.address import Address
from tasuki.errors import ConfigError
from tasuki.net.tls import validity_of

CONNECTIONS_MAX = 10_000
DESCRIPTORS_KEPT = 128  # of the process's limit: for the store, transfers, and the refusal of one connection more
_LISTENS = "0A"  # TCP_LISTEN in /proc/net/tcp
EXPIRES_SOON = timedelta(days=14)

logger = logging.getLogger("tasuki.server")


def check_listener(address: Address, *, tls: bool, tokens: bool, insecure: bool) -> None:
    """Raise ConfigError if other machines can reach the listener and TLS or tokens are missing, unless `insecure` is given."""
    if address.loopback or insecure or (tls and tokens):
        return
    missing = " and ".join(name for name, there in (("--tls-cert/--tls-key", tls), ("tokens", tokens)) if not there)
    raise ConfigError(
        f"{address} can be reached from other machines, but {missing} is missing; "
        "give it, listen on 127.0.0.1, or say --insecure if the network is trusted"
    )


def connections_max() -> int:
    """Return how many connections this process can hold; without descriptors left, the store could not open a file either."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(CONNECTIONS_MAX, descriptors - DESCRIPTORS_KEPT))


def is_listener_ours(port: int) -> bool:
    """Return whether every listener on this port of this machine belongs to the user of this process; False if unknown."""
    uids = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # not Linux, or without IPv6
            for line in Path(f"/proc/net/{name}").read_text("ascii").splitlines()[1:]:
                _, local, _, state, _, _, _, uid, *_ = line.split()
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    uids.add(int(uid))
    return uids == {os.geteuid()}


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


class ServerCertificate:
    """A certificate and its key. Listeners are given `context`, which stays the same when the certificate is renewed."""

    def __init__(self, cert: str, key: str) -> None:
        self._cert, self._key = cert, key
        self.context = self._current = server_tls(cert, key)
        # Called for every handshake, with or without a name. New files cannot be loaded into the old context: it keeps one
        # certificate for each kind of key, and could go on showing the old one.
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
    for kind, path in (("certificate", cert), ("key", key)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"the {kind} {path!r} cannot be read: {error.strerror or error}") from None
    validity_of(cert)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)

    def password() -> str:  # without it OpenSSL would ask on the terminal, and a service has none
        raise ConfigError(
            f"the key {key!r} is encrypted, and there is nobody to ask: save it without (openssl pkey -in … -out …)"
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
        return f"the certificate {cert!r} has expired on {ends:%Y-%m-%d %H:%M} UTC: nobody who verifies it will connect; renew it"
    if begins > now:
        return f"the certificate {cert!r} is not valid before {begins:%Y-%m-%d %H:%M} UTC: check the clock of this machine"
    if ends - now < EXPIRES_SOON:
        return f"the certificate {cert!r} expires on {ends:%Y-%m-%d %H:%M} UTC; renew it, then send this process SIGHUP"
    return ""
