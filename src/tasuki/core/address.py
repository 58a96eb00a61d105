"""Addresses of servers, node agents and PostgreSQL: how they are written, read and judged. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

import msgspec

from tasuki.errors import ConfigError

DEFAULT_PORT = 7000
DEFAULT_PORTS = {"tcp": DEFAULT_PORT, "tls": DEFAULT_PORT, "http": 7080, "https": 443}
HOST_MAX_CHARS = 253  # of a name in DNS
HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
UNIX_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*@")
AGENTS = "agents:"
AGENT_PORT = 7090
_HOST = re.compile(r"[^\s=@/?#]+").fullmatch  # names, numbers, and nothing in which a password may stand
_PLACE = re.compile(r"((http|https|tcp|tls)://)?(\[[^\]]*\]|[^:/]*)(:[0-9]{1,5})?(/(?!/).*)?", re.DOTALL).fullmatch
HTTP_PLACE = re.compile(r"[A-Za-z0-9._~/:\[\]-]*")


class Address(msgspec.Struct, frozen=True):
    """An address to connect to or to listen on."""

    scheme: str
    """tcp, tls, unix, http or https"""
    host: str = ""
    port: int = 0
    path: str = ""
    """Path of a unix socket; for http and https the prefix before the server's own paths: nothing, or /prefix."""
    user: str = ""
    """Name or number of the user whose server on a unix socket is trusted, beside this user's own and root's."""

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix://{self.user}{'@' if self.user else ''}{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    @property
    def http(self) -> bool:
        return self.scheme in ("http", "https")

    @property
    def loopback(self) -> bool:
        if self.scheme == "unix" or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name: it may lead anywhere
            return False

    @property
    def reachable(self) -> bool:
        """True unless the host is a wildcard to listen on, or the system chooses the port."""
        if self.scheme == "unix" or not self.port:
            return False
        try:
            return not ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return len(self.host) <= HOST_MAX_CHARS and HOST_NAME.fullmatch(self.host) is not None


def shown_place(text: str) -> str:
    """Return hosts, ports and paths as messages show them, cut where a port should be and is none.

    The text behind such a colon may be the password of an address whose host was forgotten.
    """
    parts = text.split(",")
    for number, part in enumerate(parts):
        if _PLACE(part) is None:
            return ",".join([*parts[:number], f"{part.partition(':')[0]}:…"])
    return text


def shown_address(url: str) -> str:
    """Return an address as messages show it: the scheme, and the place behind the last @. Nothing in it can be a password."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    place, question, query = rest.partition("?")
    if "@" in query or "=" in scheme + place:  # a ? in the password, one in the query, or libpq's `password=… host=…`
        return f"{scheme if scheme.replace('+', '').isalnum() else ''}{separator}…"
    return f"{scheme[:40]}{separator}{shown_place(place.rpartition('@')[2])[:200]}{question and '?…'}"


def parse_url(url: str, default_port: int | None = None, given: str | None = None) -> list[Address]:
    """Parse `tcp://a:7000,b:7000`, `tls://a:7000`, `unix:///path`, `unix://user@/path`, `http://a:7080` or `https://a/prefix`.

    `given` is the text that an error quotes, where the caller has built `url` from it.
    """
    given = shown_address(given or url)
    if url.startswith(AGENTS):
        takers = "tasuki run, nodes, status, list, result, logs, cancel and doctor"
        raise ConfigError(f"address {given!r} names node agents, which have no server; only {takers} take it")
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in (*DEFAULT_PORTS, "unix"):
        raise ConfigError(
            f"address {given!r} is not understood; use tcp://host:7000[,host2:7000], tls://host:7000, http://host:7080, "
            "https://host or unix:///path"
        )
    if scheme == "unix":
        user, slash, path = rest.partition("/")
        if not slash or (user and UNIX_USER.fullmatch(user) is None):
            raise ConfigError(
                f"address {given!r}: a unix socket needs an absolute path, as in unix:///run/tasuki/socket, or with the "
                "user whose server it is, as in unix://tasuki@/run/tasuki/socket"
            )
        return [Address("unix", path=slash + path, user=user.removesuffix("@"))]
    if "@" in rest:  # what stands before it may be a password, which is not repeated here
        raise ConfigError(f"an address such as {scheme}://host has no user or password in it; give the token with --token-file")
    if scheme in ("http", "https"):
        return [_place(scheme, part, given, default_port) for part in rest.split(",")]
    return [_host_port(scheme, part, given, default_port) for part in rest.rstrip("/").split(",")]


def parse_agents(url: str) -> list[Address]:
    """Parse `agents:http://n1:7090,http://n2:7090`. An address without a scheme has that of the one before it."""
    places: dict[Address, None] = {}
    scheme = "http"
    for part in url.removeprefix(AGENTS).split(","):
        own, separator, rest = part.strip().partition("://")
        place = rest if separator else own
        scheme = own if separator else scheme
        if scheme not in ("http", "https") or not place or "@" in place:
            shown = shown_address(part)
            raise ConfigError(f"address of node agents is not understood at {shown!r}; use agents:http://n1:7090,https://n2:7090")
        places[_place(scheme, place, shown_address(url), AGENT_PORT)] = None
    return list(places)


def _place(scheme: str, text: str, url: str, default_port: int | None = None) -> Address:
    """Parse one http or https address: host, port and prefix; each of several may repeat the scheme. Errors quote `url`."""
    own, separator, rest = text.partition("://")
    if separator and own != scheme:
        raise ConfigError(f"address {url!r} mixes {scheme} with {own[:20]!r}; give servers of one kind")
    place = rest if separator else text
    if not HTTP_PLACE.fullmatch(place):
        raise ConfigError(f"address {url!r}: {shown_address(text)!r} has more than a host, a port and a path")
    host_port, slash, path = place.partition("/")
    address = _host_port(scheme, host_port, url, default_port)
    return Address(scheme, address.host, address.port, (slash + path).rstrip("/"))


def _host_port(scheme: str, text: str, url: str, default_port: int | None = None) -> Address:
    host, separator, port = text.rpartition(":")
    if not separator or host.endswith(":") or (":" in host and not host.startswith("[")):
        host, port = text, str(default_port or DEFAULT_PORTS[scheme])
    host = host.removeprefix("[").removesuffix("]")
    if not _HOST(host) or not (port.isascii() and port.isdigit()) or not 0 <= int(port) <= 65535:
        shown = shown_address(text)
        which = repr(url) if url in (text, shown) else f"{url!r}: {shown!r}"
        raise ConfigError(f"address {which} is not host:port with a port from 0 to 65535")
    return Address(scheme, host, int(port))


# ---------------------------------------------------------------------------------------------------- PostgreSQL

KEEPALIVE_IDLE_S = 5
KEEPALIVE_INTERVAL_S = 2
KEEPALIVE_COUNT = 3
CONNECT_TIMEOUT_MIN_S = 2  # libpq takes no less

_SECRETS = ("password", "sslpassword")


def with_deadlines(given: Mapping[str, object], timeout_s: float) -> dict[str, object]:
    """Return libpq parameters that make a dead peer known within `timeout_s` (idle: a little later); `given` ones win."""
    return {
        "application_name": "tasuki",
        "connect_timeout": max(CONNECT_TIMEOUT_MIN_S, int(timeout_s)),
        "keepalives": 1,
        "keepalives_idle": KEEPALIVE_IDLE_S,
        "keepalives_interval": KEEPALIVE_INTERVAL_S,
        "keepalives_count": KEEPALIVE_COUNT,
        "tcp_user_timeout": int(timeout_s * 1000),
        **given,
    }


def without_secrets(text: str, given: Mapping[str, object]) -> str:
    """Return an error's text as one line, with the passwords of these parameters crossed out."""
    for name in _SECRETS:
        if secret := given.get(name):
            text = text.replace(str(secret), "***")
    return " ".join(text.split())
