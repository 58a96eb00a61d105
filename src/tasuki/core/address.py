"""Addresses: how they are written, read and judged. Pure; whoever connects or listens is elsewhere."""

from __future__ import annotations

import ipaddress
import re

import msgspec

from tasuki.errors import ConfigError

DEFAULT_PORT = 7000
HOST_MAX_CHARS = 253  # of a name in DNS
HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Address(msgspec.Struct, frozen=True):
    """One place to connect to or to listen on."""

    scheme: str
    """tcp, tls or unix"""
    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

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
        """It leads to one place from outside: not a wildcard to listen on, not a port that the system chooses."""
        if self.scheme == "unix" or not self.port:
            return False
        try:
            return not ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return len(self.host) <= HOST_MAX_CHARS and HOST_NAME.fullmatch(self.host) is not None


def parse_url(url: str) -> list[Address]:
    """`tcp://a:7000,b:7000`, `tls://a:7000`, `unix:///path`: the places to try."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("tcp", "tls", "unix"):
        raise ConfigError(f"address {url!r} is not understood; use tcp://host:7000[,host2:7000], tls://host:7000 or unix:///path")
    if scheme == "unix":
        if not rest.startswith("/"):
            raise ConfigError(f"address {url!r}: a unix socket needs an absolute path, as in unix:///run/tasuki/socket")
        return [Address("unix", path=rest)]
    return [_host_port(scheme, part, url) for part in rest.rstrip("/").split(",")]


def _host_port(scheme: str, text: str, url: str) -> Address:
    host, separator, port = text.rpartition(":")
    if not separator or host.endswith(":") or (":" in host and not host.startswith("[")):
        host, port = text, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or not 0 <= int(port) <= 65535:
        raise ConfigError(f"address {url!r}: {text!r} is not host:port with a port from 0 to 65535")
    return Address(scheme, host, int(port))
