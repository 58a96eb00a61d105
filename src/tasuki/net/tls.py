"""TLS contexts, the validity of certificates, and error messages that say what is wrong with TLS and what to do.

For both ends and both protocols. Reads files of certificates, and no socket. The error that OpenSSL raises for one problem
depends on its version: errors are told apart by number where there is one, else by OpenSSL's own name for the reason.
"""

from __future__ import annotations

import logging
import re
import ssl
from datetime import UTC, datetime
from typing import NamedTuple

from tasuki.core.address import Address
from tasuki.errors import ConfigError

logger = logging.getLogger("tasuki.net")

EXPIRED, NOT_YET_VALID = 10, 9  # numbers of OpenSSL's X509_V_ERR_…
UNKNOWN_CA = frozenset({2, 18, 19, 20, 21, 27})
OTHER_HOST = frozenset({62, 64})
NOT_TLS = frozenset(
    {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNKNOWN_PROTOCOL"}
)
TOO_OLD = frozenset(
    {"UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION", "NO_PROTOCOLS_AVAILABLE", "VERSION_TOO_LOW", "DH_KEY_TOO_SMALL"}
)
NO_AGREEMENT = frozenset({"SSLV3_ALERT_HANDSHAKE_FAILURE", "NO_SHARED_CIPHER", "NO_CIPHERS_AVAILABLE"})
WANTS_OURS = frozenset({"TLSV13_ALERT_CERTIFICATE_REQUIRED", "TLSV1_ALERT_UNKNOWN_CA", "SSLV3_ALERT_BAD_CERTIFICATE"})
CUT_SHORT = "it hung up in the middle of the handshake: a firewall or a proxy on the way, or another service on that port"

_warned: set[str] = set()
_pem = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


def warn_of_clear_text(address: Address) -> None:
    """Warn, once in a process, that a token is about to be sent to another host without TLS."""
    if not _warned and address.scheme in ("tcp", "http") and not address.loopback:
        _warned.add(str(address))
        secure = {"tcp": "tls", "http": "https"}[address.scheme]
        logger.warning("the token and all jobs go to %s in clear text, without TLS: use %s://", address, secure)


def client_tls(ca_file: str | None) -> ssl.SSLContext | None:
    """Return a context that trusts one CA file; None if none is given (then the system's CAs count)."""
    if not ca_file:
        return None
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise ConfigError(f"the CA file {ca_file!r} has no certificate in it ({error.reason or error}): it must be PEM") from None
    except OSError as error:
        raise ConfigError(f"the CA file {ca_file!r} cannot be read: {error.strerror or error}") from None


def handshake_words(error: ssl.SSLError, host: str, *, plain: str, own_ca: bool) -> str:
    """Return why there is no TLS with `host`. `plain` is the scheme without TLS; `own_ca`: --tls-ca was given."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate_words(error, host, own_ca=own_ca)
    reason = error.reason or ""
    if reason in NOT_TLS:
        return f"what answers there does not speak TLS; is it {plain}://?"
    if reason in TOO_OLD:
        return f"the two sides have no version of TLS in common ({reason}); this one speaks 1.2 and newer"
    if reason in NO_AGREEMENT:
        return f"the two sides have no cipher in common, or it wants a certificate of ours ({reason})"
    if reason in WANTS_OURS:
        return (
            f"it refuses us ({reason}): it seems to want a certificate from those who connect, and tasuki shows a token instead"
        )
    if isinstance(error, ssl.SSLEOFError) or "EOF" in reason:
        return CUT_SHORT
    return reason or str(error)


def _certificate_words(error: ssl.SSLCertVerificationError, host: str, *, own_ca: bool) -> str:
    said = error.verify_message
    if error.verify_code in UNKNOWN_CA:
        if own_ca:
            return (
                f"its certificate is not of the CA given with --tls-ca ({said}); "
                "ask for the server's CA file, or if a proxy on the way opens TLS, for that proxy's"
            )
        return (
            f"its certificate is of a CA that is not known here ({said}); give the CA with --tls-ca "
            "(where a proxy or virus scanner on the way opens TLS: that one's CA)"
        )
    if error.verify_code in OTHER_HOST:
        return f"its certificate is not for {host} ({said}); use a name that is in it, or have one made for this name"
    here = f"here it is {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    if error.verify_code == EXPIRED:
        return f"its certificate, or its CA's, has expired ({here}); it must be renewed at the server"
    if error.verify_code == NOT_YET_VALID:
        return f"its certificate is not valid yet ({here}); check the clocks of both machines"
    return f"its certificate is not valid ({said})"


class Validity(NamedTuple):
    """First and last moment of a certificate's validity."""

    begins: datetime
    ends: datetime


def validity_of(pem_file: str) -> Validity:
    """Return the validity of the first certificate in the file, which is the server's own."""
    try:
        with open(pem_file, encoding="ascii", errors="replace") as file:  # noqa: PTH123 - a name from the command line
            found = _pem.search(file.read())
        if found is None:
            raise ValueError("there is no certificate in it")
        return _validity(ssl.PEM_cert_to_DER_cert(found.group()))
    except OSError as error:
        raise ConfigError(f"the certificate {pem_file!r} cannot be read: {error.strerror or error}") from None
    except (ValueError, IndexError) as error:
        raise ConfigError(f"the certificate {pem_file!r} cannot be understood: {error}") from None


def _validity(der: bytes) -> Validity:
    """Parse the dates out of a certificate: Python's ssl tells them only for certificates that it verified.

    Certificate ::= { to be signed ::= { [0] version?, serial, algorithm, issuer, validity ::= { begins, ends }, … }, … }
    """
    _, certificate, _ = _element(der)
    _, signed, _ = _element(certificate)
    tag, _, rest = _element(signed)
    if tag == 0xA0:
        _, _, rest = _element(rest)
    for _ in range(2):
        _, _, rest = _element(rest)
    _, dates, _ = _element(rest)
    begins_tag, begins, rest = _element(dates)
    ends_tag, ends, _ = _element(rest)
    return Validity(_time(begins_tag, begins), _time(ends_tag, ends))


def _element(der: bytes) -> tuple[int, bytes, bytes]:
    """Return (tag, content, rest) of one element of DER."""
    size, start = der[1], 2
    if size & 0x80:
        start += size & 0x7F
        size = int.from_bytes(der[2:start])
    return der[0], der[start : start + size], der[start + size :]


def _time(tag: int, content: bytes) -> datetime:
    text = content.decode("ascii")
    if tag == 0x17:  # UTCTime, two digits for the year
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
