"""The certificate that a server shows: read and checked at the start, and read again while it runs.

A certificate lives for weeks, a server for months: `renew` takes the files as they are now, for connections from then on.
"""

from __future__ import annotations

import logging
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tasuki.errors import ConfigError
from tasuki.net.tls import validity_of

SOON = timedelta(days=14)

logger = logging.getLogger("tasuki.server")


class ServerCertificate:
    """Two files. Listeners are given `context`, which stays the same when the certificate is renewed."""

    def __init__(self, cert: str, key: str) -> None:
        self._cert, self._key = cert, key
        self.context = self._current = server_tls(cert, key)
        # Called for every handshake, with or without a name. To load new files into the old context would not do: it keeps one
        # certificate of each kind of key, and could go on to show the old one.
        self.context.sni_callback = self._choose
        self._warn()

    def renew(self) -> datetime:
        """Read the files again; until when the certificate counts. ConfigError: they cannot be used, and the old one stays."""
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
    """TLS for a listener; ConfigError that names the file that cannot be used."""
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
    """What a person should know about the dates of a certificate; empty if there is nothing."""
    begins, ends = validity_of(cert)
    if ends <= now:
        return f"the certificate {cert!r} has expired on {ends:%Y-%m-%d %H:%M} UTC: nobody who verifies it will connect; renew it"
    if begins > now:
        return f"the certificate {cert!r} is not valid before {begins:%Y-%m-%d %H:%M} UTC: check the clock of this machine"
    if ends - now < SOON:
        return f"the certificate {cert!r} expires on {ends:%Y-%m-%d %H:%M} UTC; renew it, then send this process SIGHUP"
    return ""
