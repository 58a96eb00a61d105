"""Addresses, folders, secrets and limits from options and the environment.

Only this module and the commands read the environment, when asked, not at import. The configuration of a process (`ServerConfig`,
`AgentConfig`, `DispatcherConfig`) is built once by its command and passed down.

Nothing is trusted because it lies in the folder where a user works: a clone, an archive or another user of the machine may have
put it there. A data folder counts only if this user owns it and nobody else can write to it (`check_folder`), a file with a
secret only if others cannot read it either (`read_secret`). Files of an archive belong to the user who unpacks it: the right to
run any program therefore hangs on a key that is in no data folder (`user_key`).
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from tasuki.core.address import DEFAULT_PORT, DEFAULT_PORTS, Address, parse_url, shown_address
from tasuki.errors import ConfigError

SOCKET_PATH_MAX_BYTES = 107  # sun_path of Linux, without its NUL
DISK_FLOOR_BYTES = 64 * 1024 * 1024
DISK_FLOOR_INODES = 1000
TOKEN_MAX_CHARS = 512
KEY_BYTES = 32
SECRET_FILE_MAX_BYTES = 1024 * 1024  # of a token file or a PEM file; a thousand tokens are half of it
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_READ = stat.S_IRGRP | stat.S_IROTH
TCP_LISTEN = "0A"  # in /proc/net/tcp
OWN_COMMAND = (sys.executable, "-P", "-m", "tasuki")
"""Starts this installation. With -P: Python would else look for modules in the current folder before any other."""


def host_name() -> str:
    """Return the first part of the host's name, without characters that an id may not have."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname().split(".")[0])[:40] or "server"


def node_name() -> str:
    """Return the name of this machine, container or Pod among the nodes of a project: TASUKI_NODE_ID, else the host's name."""
    return os.environ.get("TASUKI_NODE_ID", "") or host_name()


def parse_listen(text: str, default_port: int = DEFAULT_PORT) -> Address:
    """Return the address of --tcp: `host:port`, `tcp://host:port`, or a port of 127.0.0.1."""
    address = parse_url(text if "://" in text else f"tcp://{_with_host(text)}", default_port, text)[0]
    if address.http:
        raise ConfigError(f"--tcp {shown_address(text)!r} is an HTTP address; give it with --http")
    return address


def _with_host(place: str) -> str:
    return f"127.0.0.1:{place}" if place.isascii() and place.isdigit() else place


def parse_http(text: str, default_port: int = DEFAULT_PORTS["http"]) -> Address:
    """Return the address of --http, or of --listen of agents and dispatchers: as of --tcp, or `http://host:port`."""
    place = _with_host(re.sub(r"^(?:https?|tcp)://", "", text.rstrip("/")))
    if "://" in place:
        raise ConfigError(f"address {shown_address(text)!r} is not one for HTTP; write host:port, as in 127.0.0.1:{default_port}")
    address = parse_url(f"tcp://{place}", default_port, text)[0]
    return Address("http", address.host, address.port)


def check_app(app: str, option: str = "--app") -> str:
    """Return the name of an app. Raise ConfigError if it cannot be part of a path and one token of a subject."""
    if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", app) is None:
        raise ConfigError(f"{option} {app[:80]!r} must be 1 to 64 letters, digits, - and _")
    return app


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
    def agent_token_file(self) -> Path:
        """The token that agents and dispatchers of this folder make; not the server's, whose token may do more."""
        return self.root / "agent-token"

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

    def make(self) -> Self:
        """Make the folder, for this user only; ConfigError if that fails, or if one that is there cannot be trusted.

        An own one is closed to others. A folder of another name with files in it keeps its mode: it may be a home.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            check_folder(self.root)
            is_known = self.root.name.startswith("tasuki") or not any(self.root.iterdir())
            if is_known and self.root.stat().st_mode & 0o077:
                self.root.chmod(0o700)
        except OSError as error:
            raise ConfigError(
                f"the data folder {self.root} cannot be made or written to: {error.strerror or error}; "
                "choose another with --data or TASUKI_DATA"
            ) from None
        return self


def data_folder(given: str | os.PathLike[str] | None = None, default: Path | None = None) -> DataFolder:
    """Return the folder of --data, else TASUKI_DATA, else `default`, else ./tasuki-data if it exists, else $XDG_DATA_HOME/tasuki.

    One that is there must belong to this user, and be closed to others. A folder that was named may be a volume that belongs to
    a group or to root: then it is this user's own folder in it.
    """
    chosen = str(given) if given else os.environ.get("TASUKI_DATA")
    if chosen:
        root = _own_folder(Path(chosen).absolute())
    elif default is not None or Path("tasuki-data").is_dir():
        root = (default or Path("tasuki-data")).absolute()
    else:
        root = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share").absolute() / "tasuki"
    if os.path.lexists(root):
        check_folder(root)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return DataFolder(root, Path(runtime) if runtime else None)


def _own_folder(named: Path) -> Path:
    """Return a folder that was named; if others own it or can write to it, the folder in it that is this user's own."""
    root = named.resolve() if os.path.islink(named) else named  # noqa: PTH114 - Path raises for a folder that is closed to us
    own = root / f"tasuki-{_user()}"
    if os.path.lexists(own):
        return own
    if not os.path.isdir(root) or not _ownership_problem(root.stat()):  # noqa: PTH112
        return root
    if os.path.lexists(root / "tasuki.sqlite3"):  # not to be passed over in silence
        check_folder(root)
    return own


# ---------------------------------------------------------------------------------------------------- ownership


def _user() -> int | None:
    """Return the effective uid; None on Windows, where only clients run."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def _ownership_problem(found: os.stat_result, *, root_may_own: bool = False) -> str:
    """Return the reason why others decide what is in a file or folder, or ""."""
    mode, user = stat.S_IMODE(found.st_mode), _user()
    if user is None:
        return ""
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link, which may lead anywhere; put the file itself there"
    if found.st_uid != user and not (root_may_own and found.st_uid == 0):
        return f"belongs to user {found.st_uid} (mode {mode:04o}), and this process runs as user {user}"
    if mode & OTHERS_WRITE:
        return f"of user {found.st_uid} can be changed by others (mode {mode:04o}); chmod go-w it if it is unchanged"
    return ""


def check_folder(path: Path) -> None:
    """Raise ConfigError unless the folder belongs to this user, its files to this user or root, and others cannot write there."""
    try:
        problem = _ownership_problem(path.lstat()) or _problem_inside(path)
    except OSError as error:
        problem = f"cannot be used: {error.strerror or error}"
    if problem:
        raise ConfigError(f"the data folder {path} {problem}; use a folder of your own: --data FOLDER, or TASUKI_DATA")


def _problem_inside(folder: Path) -> str:
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # removed since it was listed
            if problem := _ownership_problem(path.lstat(), root_may_own=True):
                return f"cannot be trusted: {path.name!r} in it {problem}"
    return ""


def secret_problem(found: os.stat_result, user: int | None, readable: int) -> str:
    """Return the reason why a file must not hold a secret of this user, or "". `readable`: bits of reading that are too many."""
    mode = stat.S_IMODE(found.st_mode)
    if user is None:
        return ""
    if found.st_uid not in (user, 0):
        return f"belongs to user {found.st_uid}; it must belong to this process's user ({user}) or to root"
    if mode & OTHERS_WRITE:
        return f"can be changed by others (mode {mode:04o}); chmod 600 it"
    if mode & readable:
        return f"can be read by others (mode {mode:04o}); chmod 600 it"
    return ""


def read_secret(path: str | os.PathLike[str], what: str) -> bytes:
    """Return the contents of a file with a secret; ConfigError if it cannot be read, or others can read or change it.

    The group may read a file of root's: systemd, Kubernetes and the group ssl-cert hand secrets to one service that way.
    """
    try:
        with Path(path).open("rb") as file:
            found = os.fstat(file.fileno())
            if problem := secret_problem(found, _user(), OTHERS_READ if found.st_uid else stat.S_IROTH):
                raise ConfigError(f"{what} {os.fspath(path)!r} {problem}")
            return file.read(SECRET_FILE_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{what} {os.fspath(path)!r} cannot be read: {error.strerror or error}") from None


def user_key() -> bytes:
    """Return the key by which a server marks the commands of its own user, $XDG_STATE_HOME/tasuki/key; made at the first call."""
    try:
        folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "tasuki"
        path = DataFolder(folder.absolute()).make().root / "key"
        if not path.exists():
            _make_key(path, secrets.token_bytes(KEY_BYTES))
    except (OSError, RuntimeError, ConfigError) as error:  # RuntimeError: a user without a home
        raise ConfigError(
            f"the key by which this user's jobs may run any program cannot be kept: {error}; "
            "set XDG_STATE_HOME to a folder of your own"
        ) from None
    key = read_secret(path, "the key")
    if len(key) != KEY_BYTES:
        raise ConfigError(f"the key {str(path)!r} has {len(key)} bytes instead of {KEY_BYTES}; remove it, and a new one is made")
    return key


def ensure_agent_token(folder: DataFolder) -> str:
    """Return the token that agents and dispatchers of this folder share; it is made at the first start."""
    if not folder.make().agent_token_file.exists():
        _make_key(folder.agent_token_file, f"{secrets.token_hex(32)}\n".encode())
    return find_token(folder.agent_token_file)


def own_agent_token(agents: Iterable[Address], data: str | os.PathLike[str] | None = None) -> str:
    """Return the token that the data folder's agents made, if this user's processes listen on all the addresses, else ""."""
    if not all(address.loopback and not address.path and is_listener_ours(address.port) for address in agents):
        return ""
    file = data_folder(data).agent_token_file
    return find_token(file) if file.exists() else ""


def is_listener_ours(port: int) -> bool:
    """Return whether every listener on this port of this machine belongs to the user of this process; False if unknown."""
    uids = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError):  # not Linux, or without IPv6
            for line in Path(f"/proc/net/{name}").read_text("ascii").splitlines()[1:]:
                _, local, _, state, _, _, _, uid, *_ = line.split()
                if state == TCP_LISTEN and int(local.rpartition(":")[2], 16) == port:
                    uids.add(int(uid))
    return uids == {_user()}


def _make_key(path: Path, key: bytes) -> None:
    """Make the file of a key or a token, whole and durable or not at all; of several processes one wins."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        new.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None  # a write names no file
    with suppress(FileExistsError):
        os.link(new, path)
    new.unlink()
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)


def default_url() -> str | None:
    """Return TASUKI_URL, if set."""
    return os.environ.get("TASUKI_URL") or None


def is_sendable_token(text: str) -> bool:
    """Return whether a text may be a token that a header can carry; whether the server knows it is another question."""
    return 0 < len(text) <= TOKEN_MAX_CHARS and text.isascii() and text.isprintable()


def find_token(token_file: str | os.PathLike[str] | None = None) -> str:
    """Return the token of --token-file, else TASUKI_TOKEN, else "" (a unix socket of the same user needs none)."""
    if token_file is None:
        return os.environ.get("TASUKI_TOKEN", "").strip()
    try:
        token = read_secret(token_file, "the token file").decode().strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the token file {os.fspath(token_file)!r} cannot be read: {error}") from None
    if not token or len(token) > TOKEN_MAX_CHARS or not token.isprintable():
        lines = len(token.splitlines())
        has = f"it has {lines} lines" if lines != 1 else f"it has a line of {len(token)} characters"
        raise ConfigError(
            f"the token file {os.fspath(token_file)!r} must have exactly one token, "
            f"up to {TOKEN_MAX_CHARS} printable characters; {has}"
        )
    return token


def forget_tokens() -> tuple[str, ...]:
    """Remove the tokens from the environment, so that children do not inherit them; return the names of their variables."""
    names = ("TASUKI_TOKEN", "TASUKI_ENROLL")
    for name in names:
        os.environ.pop(name, None)
    return names


def enrol_variable() -> str:
    """Return TASUKI_ENROLL, the enrol token of a new worker, or ""."""
    return os.environ.get("TASUKI_ENROLL", "").strip()


def fault_hook() -> Callable[[str], None]:
    """Return the hook of TASUKI_FAULT, the point at which a process under test kills itself (see docs/decisions)."""
    return kill_at(os.environ.get("TASUKI_FAULT", ""))


def kill_at(points: str) -> Callable[[str], None]:
    """Return a fault hook, for tests, that kills the process at a named point, `name`, or the nth time there, `name:n`.

    `one,other` counts `other` only after `one`: `submit.written,turn.committed` is right after the commit of a submit.
    """
    ahead = [(name, int(count or 1)) for name, _, count in (point.partition(":") for point in points.split(",") if point)]

    def fault(name: str) -> None:
        if not ahead or ahead[0][0] != name:
            return
        wanted, count = ahead.pop(0)
        if count > 1:
            ahead.insert(0, (wanted, count - 1))
        elif not ahead:
            os.kill(os.getpid(), signal.SIGKILL)

    return fault
