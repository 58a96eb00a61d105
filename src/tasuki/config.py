"""Settings: addresses, folders, limits. The only module that reads the environment, and it does so when asked, not at import.

Nothing here opens anything; a `Config` is built once by whoever starts a process and passed down.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tasuki.errors import ConfigError

DEFAULT_PORT = 7000
SOCKET_PATH_MAX_BYTES = 107  # sun_path of Linux, without its NUL
DISK_FLOOR_BYTES = 64 * 1024 * 1024
DISK_FLOOR_INODES = 1000


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


def parse_url(url: str) -> list[Address]:
    """`tcp://a:7000,b:7000`, `tls://a:7000`, `unix:///path`: the places to try, in order."""
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
    if not host or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ConfigError(f"address {url!r}: {text!r} is not host:port with a port from 0 to 65535")
    return Address(scheme, host, int(port))


def parse_listen(text: str) -> Address:
    """`host:port` or `tcp://host:port`, for --tcp."""
    return parse_url(text if "://" in text else f"tcp://{text}")[0]


class DataFolder(msgspec.Struct, frozen=True):
    """Where a server keeps everything, and what lies where in it."""

    root: Path
    runtime: Path | None = None
    """$XDG_RUNTIME_DIR, for the socket when the folder's own path is too long for one."""

    @property
    def database(self) -> Path:
        return self.root / "tasuki.sqlite3"

    @property
    def blobs(self) -> Path:
        return self.root / "blobs"

    @property
    def token_file(self) -> Path:
        return self.root / "token"

    @property
    def socket(self) -> Path:
        path = self.root / "socket"
        if len(os.fsencode(path)) <= SOCKET_PATH_MAX_BYTES:
            return path
        import hashlib

        name = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:16]
        if self.runtime is None:
            raise ConfigError(
                f"the path of the socket {path} is longer than {SOCKET_PATH_MAX_BYTES} bytes; "
                "use a shorter --data folder, or set XDG_RUNTIME_DIR"
            )
        return self.runtime / f"tasuki-{name}.socket"


def data_folder(given: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> DataFolder:
    """--data, else TASUKI_DATA, else ./tasuki-data if it exists, else $XDG_DATA_HOME/tasuki."""
    environ = os.environ if environ is None else environ
    chosen = str(given) if given else environ.get("TASUKI_DATA")
    if chosen:
        root = Path(chosen)
    elif Path("tasuki-data").is_dir():
        root = Path("tasuki-data")
    else:
        root = Path(environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "tasuki"
    runtime = environ.get("XDG_RUNTIME_DIR")
    return DataFolder(root.absolute(), Path(runtime) if runtime else None)


def default_url(environ: Mapping[str, str] | None = None) -> str | None:
    """TASUKI_URL, if set."""
    return (os.environ if environ is None else environ).get("TASUKI_URL") or None


def find_token(token_file: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> str:
    """--token-file, else TASUKI_TOKEN, else none (a unix socket of the same user needs none)."""
    environ = os.environ if environ is None else environ
    if token_file is None:
        return environ.get("TASUKI_TOKEN", "").strip()
    try:
        token = Path(token_file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {os.fspath(token_file)!r} cannot be read: {error}") from None
    if not token or len(token) > 512 or not token.isprintable():
        raise ConfigError(f"the token file {os.fspath(token_file)!r} does not contain a token")
    return token


def fault_point(environ: Mapping[str, str] | None = None) -> str:
    """TASUKI_FAULT: where a server under test kills itself; see docs/decisions. Empty in every real life."""
    return (os.environ if environ is None else environ).get("TASUKI_FAULT", "")
