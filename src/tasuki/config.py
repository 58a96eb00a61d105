"""Addresses, folders and limits from options and the environment.

Only this module and the commands read the environment, when asked, not at import. Nothing here opens anything. The configuration
of a process (`ServerConfig`, `AgentConfig`, `DispatcherConfig`) is built once by its command and passed down.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from tasuki.core.address import DEFAULT_PORT, DEFAULT_PORTS, Address, parse_url, shown_address
from tasuki.errors import ConfigError

SOCKET_PATH_MAX_BYTES = 107  # sun_path of Linux, without its NUL
DISK_FLOOR_BYTES = 64 * 1024 * 1024
DISK_FLOOR_INODES = 1000
TOKEN_MAX_CHARS = 512


def parse_listen(text: str, default_port: int = DEFAULT_PORT) -> Address:
    """Return the address of --tcp: `host:port` or `tcp://host:port`."""
    address = parse_url(text if "://" in text else f"tcp://{text}", default_port, text)[0]
    if address.http:
        raise ConfigError(f"--tcp {shown_address(text)!r} is an HTTP address; give it with --http")
    return address


def parse_http(text: str, default_port: int = DEFAULT_PORTS["http"]) -> Address:
    """Return the address of --http, or of --listen of agents and dispatchers: `host:port` or `http://host:port`."""
    place = re.sub(r"^(?:https?|tcp)://", "", text.rstrip("/"))
    if "://" in place:
        raise ConfigError(f"address {shown_address(text)!r} is not one for HTTP; write host:port, as in 127.0.0.1:{default_port}")
    address = parse_url(f"tcp://{place}", default_port, text)[0]
    return Address("http", address.host, address.port)


def check_app(app: str, option: str = "--app") -> str:
    """Return the name of an app. Raise ConfigError if it cannot be part of a path and one token of a subject."""
    if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", app) is None:
        raise ConfigError(f"{option} {app[:80]!r} must be 1 to 64 letters, digits, - and _")
    return app


def parse_size(text: str) -> int:
    """Return the number of bytes of `500GB`, `64MiB` or `1000`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?", text.strip())
    if found is None:
        raise ConfigError(f"size {text[:40]!r} is not understood; write 500GB, 64MiB or a number of bytes")
    number, letter, binary = found.groups()
    power = " KMGT".index(letter.upper() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


class DataFolder(msgspec.Struct, frozen=True):
    """The folder of a server, and the paths in it."""

    root: Path
    runtime: Path | None = None
    """$XDG_RUNTIME_DIR, for the socket if the folder's own path is too long for one."""

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


def data_folder(given: str | os.PathLike[str] | None = None) -> DataFolder:
    """Return the folder of --data, else TASUKI_DATA, else ./tasuki-data if it exists, else $XDG_DATA_HOME/tasuki."""
    chosen = str(given) if given else os.environ.get("TASUKI_DATA")
    if chosen:
        root = Path(chosen)
    elif Path("tasuki-data").is_dir():
        root = Path("tasuki-data")
    else:
        root = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "tasuki"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return DataFolder(root.absolute(), Path(runtime) if runtime else None)


def default_url() -> str | None:
    """Return TASUKI_URL, if set."""
    return os.environ.get("TASUKI_URL") or None


def find_token(token_file: str | os.PathLike[str] | None = None) -> str:
    """Return the token of --token-file, else TASUKI_TOKEN, else "" (a unix socket of the same user needs none)."""
    if token_file is None:
        return os.environ.get("TASUKI_TOKEN", "").strip()
    try:
        token = Path(token_file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {os.fspath(token_file)!r} cannot be read: {error}") from None
    if not token or len(token) > TOKEN_MAX_CHARS or not token.isprintable():
        lines = len(token.splitlines())
        has = f"it has {lines} lines" if lines != 1 else f"it has a line of {len(token)} characters"
        raise ConfigError(
            f"the token file {os.fspath(token_file)!r} must have exactly one token, "
            f"up to {TOKEN_MAX_CHARS} printable characters; {has}"
        )
    return token


def enrol_variable() -> str:
    """Return TASUKI_ENROLL, the enrol token of a new worker, or ""."""
    return os.environ.get("TASUKI_ENROLL", "").strip()


def fault_point() -> str:
    """Return TASUKI_FAULT, the point at which a server under test kills itself (see docs/decisions), or ""."""
    return os.environ.get("TASUKI_FAULT", "")
