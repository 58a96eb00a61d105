"""Who a worker is for a server, kept on disk: its worker_id and its tokens. Touches only `worker/` in its data folder.

    worker/<host>-<port>.json    the credential of an enrolled worker, for its user only (0600)
    worker/<host>-<port>.id      the worker_id of one whose token was made by hand
    worker/<host>-<port>.lock    held (flock) for as long as a process is this worker; its pid stands in it

A file is written beside its place, synced and renamed: it is whole or not there, and what was saved is there after a power cut.
While a token is being exchanged the file has both: whichever of them the server knows, the worker gets in.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Self

import msgspec

from tasuki.blobs.files import durable_write, sync_folder
from tasuki.core.address import Address
from tasuki.core.ids import check_name
from tasuki.errors import ConfigError, InvalidInput, Unavailable

FOLDER = "worker"
FILE_MAX_BYTES = 64 * 1024
NAME_MAX_CHARS = 100
ENROL_AGAIN = "ask for an enrol token at the server (tasuki token enroll) and start again with TASUKI_ENROLL"


class CredentialToken(msgspec.Struct, frozen=True, kw_only=True):
    """One secret. Both times are by this machine's clock: the server says how long a token is good, not until when."""

    secret: str
    token_id: str
    issued_at: float
    expires_at: float

    def __repr__(self) -> str:
        return f"Token({self.token_id})"

    @property
    def ttl_s(self) -> float:
        return self.expires_at - self.issued_at

    def left_s(self, wall: float) -> float:
        """How long it is still good; nothing, if the clock was set back behind its beginning: then nobody knows."""
        return self.expires_at - wall if wall >= self.issued_at else 0.0


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    """What an enrolled worker has in its hands."""

    server: str
    worker_id: str
    scope: tuple[str, ...] = ()
    token: CredentialToken
    pending: CredentialToken | None = None
    """The server is being asked to take it in place of `token`, and may have done so."""
    previous: CredentialToken | None = None
    """The server said that `token` has taken its place, and has not let us in with that one yet."""

    @property
    def candidates(self) -> tuple[CredentialToken, ...]:
        """All that may let us in, the likeliest first."""
        return tuple(token for token in (self.token, self.pending, self.previous) if token is not None)


def file_name(address: Address) -> str:
    """A name for files that are about this server; two addresses never have the same."""
    text = f"{address.host}-{address.port}{address.path}"
    name = re.sub(r"[^A-Za-z0-9.-]", "_", text)[:NAME_MAX_CHARS]
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


class CredentialFile:
    """The right to be the worker of one server on this data folder, for one process at a time. `close` gives it back."""

    def __init__(self, data: Path, address: Address) -> None:
        self.address = address
        self.credential: Credential | None = None
        """What was loaded or saved last."""
        self._folder = data / FOLDER
        name = file_name(address)
        self.path = self._folder / f"{name}.json"
        self._id_path = self._folder / f"{name}.id"
        lock_path = self._folder / f"{name}.lock"
        try:
            _make_private(self._folder)
            self._lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(
                f"the worker's credential cannot be kept in {self._folder}: {error.strerror}; choose another folder with --data"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._lock)
            raise Unavailable(
                f"another process (pid {holder}) is the worker of {address} on {data}; "
                "stop it, or give this one a folder of its own with --data"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """The lock file stays: were it removed, two processes could hold locks on two files of one name."""
        os.ftruncate(self._lock, 0)
        os.close(self._lock)

    # ------------------------------------------------------------------------------------------------ credential

    def load(self) -> Credential | None:
        """What was saved; None if nothing was. ConfigError for a file that cannot be trusted or read."""
        credential = read_credential(self.path)
        if credential is not None and credential.server != str(self.address):
            raise ConfigError(
                f"{self.path} is the credential for {credential.server}, not for {self.address}; remove it, and {ENROL_AGAIN}"
            )
        self.credential = credential
        return credential

    def save(self, credential: Credential) -> None:
        """Durable when it returns; OSError if it cannot be."""
        durable_write(self.path, msgspec.json.format(msgspec.json.encode(credential), indent=2) + b"\n")
        self.credential = credential

    def worker_id(self, new_name: str) -> str:
        """For a worker that has no credential: made once, from this name, and the same at every start on this folder."""
        try:
            found = self._id_path.read_text("ascii").strip()
        except FileNotFoundError:
            found = f"{new_name}-{secrets.token_hex(4)}"
            try:
                durable_write(self._id_path, f"{found}\n".encode())
            except OSError as error:
                raise ConfigError(
                    f"{self._id_path} cannot be written: {error.strerror}; choose another folder with --data"
                ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._id_path} cannot be read: {error}; remove it, or choose an id with --worker-id") from None
        try:
            return check_name(found, "worker_id")
        except InvalidInput as error:
            raise ConfigError(f"{self._id_path}: {error.message}; remove it, or choose an id with --worker-id") from None


def read_credential(path: Path) -> Credential | None:
    """For who only looks, too. None if there is none; ConfigError for a file that cannot be trusted or read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"the credential {path} cannot be read: {error.strerror}; is it this user's?") from None
    with os.fdopen(descriptor, "rb") as file:
        _check_private(path, os.fstat(descriptor))
        content = file.read(FILE_MAX_BYTES)
    try:
        return msgspec.json.decode(content, type=Credential)
    except msgspec.DecodeError:  # its words may hold a piece of what was read
        raise ConfigError(f"{path} is not a whole credential; remove it, and {ENROL_AGAIN}") from None


def _check_private(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"the credential {path} is not a plain file; remove it, and {ENROL_AGAIN}")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"the credential {path} belongs to uid {found.st_uid}, and this is uid {os.geteuid()}; run the worker as its owner, "
            "or give this one a folder of its own with --data"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"the credential {path} is open to other users (mode {mode:03o}); if nobody else can have read it, chmod 600 it; "
            "else remove it, revoke this worker at the server and enrol it again"
        )


def _make_private(folder: Path) -> None:
    if not folder.exists():
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.parent)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)
