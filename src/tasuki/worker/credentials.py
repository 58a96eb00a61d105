"""A worker's identity for a server, on disk: its worker_id and its tokens, which are rotated while its jobs run.

    worker/<host>-<port>.json    the credential of an enrolled worker, for its user only (0600)
    worker/<host>-<port>.id      the worker_id of a worker whose token was made by hand
    worker/<host>-<port>.lock    locked (flock) while a process is this worker; contains its pid

Rotation. The worker makes the next secret, saves it as `pending`, and sends the server its hash. While a token is being exchanged
the file has both: whichever of them the server knows, the worker gets in. If the answer is lost, the next Hello finds out which
token is good. Jobs and leases do not notice: only the connection is made again, with the new token.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec.structs import replace

from tasuki.blobs.files import durable_write, sync_folder
from tasuki.clocks import now
from tasuki.core.access import TOKEN_PREFIXES, PeerKind, token_sha256
from tasuki.core.address import Address
from tasuki.core.backoff import Backoff
from tasuki.core.decoding import decodable
from tasuki.core.job import check_name
from tasuki.core.machine import Closed, Opened, Received
from tasuki.core.protocol import ErrorMessage, Message, Reply, Welcome
from tasuki.errors import ConfigError, InvalidInput, TasukiError, Unauthorized, Unavailable, from_wire

FOLDER = "worker"
FILE_MAX_BYTES = 64 * 1024
NAME_MAX_CHARS = 100
ENROL_AGAIN = "ask for an enrol token at the server (tasuki token enroll) and start again with TASUKI_ENROLL"
ROTATE = "worker.rotate"
DUE_AT_LEFT = 1 / 3  # of a token's life
JITTER = 0.1  # of its life, so that workers that were enrolled together do not rotate together
ANSWER_S = 40.0  # the server gives its store 30
RETRY_FIRST = 1 / 10_000  # of its life: a minute of a week
RETRY_MAX = 1 / 200
RETRY_MIN_S = 0.05
SLEEP_MAX_S = 600.0  # the clock may be set meanwhile

logger = logging.getLogger("tasuki.worker")


class CredentialToken(msgspec.Struct, frozen=True, kw_only=True):
    """One secret. Both times are by this machine's clock: the server names the life of a token, not its end."""

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
        """Return how long it is still good; 0 if the clock was set back behind its beginning, when that is not known."""
        return self.expires_at - wall if wall >= self.issued_at else 0.0


@decodable
class Credential(msgspec.Struct, frozen=True, kw_only=True):
    """The identity and the tokens of an enrolled worker."""

    server: str
    worker_id: str
    scope: tuple[str, ...] = ()
    token: CredentialToken
    pending: CredentialToken | None = None
    """The token that the server is asked to accept instead of `token`; it may have done so."""
    previous: CredentialToken | None = None
    """The token before `token`, until the server has accepted a Hello with the new one."""

    @property
    def candidates(self) -> tuple[CredentialToken, ...]:
        """All tokens that the server may accept, the likeliest first."""
        return tuple(token for token in (self.token, self.pending, self.previous) if token is not None)


def file_name(address: Address) -> str:
    """Return a file name for this server; two addresses never have the same."""
    text = f"{address.host}-{address.port}{address.path}"
    name = re.sub(r"[^A-Za-z0-9.-]", "_", text)[:NAME_MAX_CHARS]
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


class CredentialFile:
    """The credential of a data folder for one server, locked for one process until `close`."""

    def __init__(self, data: Path, address: Address) -> None:
        self.address = address
        self.credential: Credential | None = None  # the credential that was loaded or saved last
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
        """Release the lock. Its file stays: were it removed, two processes could hold locks on two files of one name."""
        os.ftruncate(self._lock, 0)
        os.close(self._lock)

    # ------------------------------------------------------------------------------------------------ credential

    def load(self) -> Credential | None:
        """Return the saved credential, None if there is none; ConfigError for a file that cannot be trusted or read."""
        credential = read_credential(self.path)
        if credential is not None and credential.server != str(self.address):
            raise ConfigError(
                f"{self.path} is the credential for {credential.server}, not for {self.address}; remove it, and {ENROL_AGAIN}"
            )
        self.credential = credential
        return credential

    def save(self, credential: Credential) -> None:
        """Write the credential durably, or raise OSError."""
        durable_write(self.path, msgspec.json.format(msgspec.json.encode(credential), indent=2) + b"\n")
        self.credential = credential

    def worker_id(self, new_name: str) -> str:
        """Return the id of a worker without a credential: made once, from this name, and the same at every start."""
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
    """Return the credential in a file, None if there is none; ConfigError for a file that cannot be trusted or read."""
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
    except msgspec.DecodeError:  # its message may have a piece of the secret
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
            f"the credential {path} is open to other users (mode {mode:03o}); if no other user can have read it, chmod 600 it; "
            "else remove it, revoke this worker at the server and enrol it again"
        )


def _make_private(folder: Path) -> None:
    if not folder.exists():
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.parent)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)


# ---------------------------------------------------------------------------------------------------- rotation


class Rotation:
    """Rotates the token of an enrolled worker. `ask` sends a request on its connection and returns the msg_id; `use` sets the
    token of the next Hello. Events of the connection pass through `heard` before the machine gets them."""

    def __init__(
        self,
        file: CredentialFile,
        *,
        ask: Callable[[str, dict[str, str]], int],
        use: Callable[[str], None],
        hang_up: Callable[[TasukiError], None],
        jitter: Callable[[], float],
    ) -> None:
        assert file.credential is not None
        self._file, self._kept = file, file.credential
        self._ask, self._use, self._hang_up, self._jitter = ask, use, hang_up, jitter
        self._spread = jitter()
        self._shown = self._chosen = self._kept.token  # the token of this connection, and that of the next
        self._refused: dict[str, ErrorMessage] = {}  # refusals since the last Welcome, by token_id
        self._online = False
        self._unsaved = False
        self._taken = False  # whether the server says that it has the pending token already
        self._asked = 0
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._backoff: Backoff | None = None
        self._retry_at = 0.0
        self._woken = asyncio.Event()

    # ------------------------------------------------------------------------------------------------ events

    def heard(self, event: Opened | Received | Closed) -> Opened | Received | Closed | None:
        """Return the event for the machine; None: the machine does not need it."""
        if type(event) is Opened:
            self._shown = self._chosen
        elif type(event) is Closed:
            self._online = False
            self._end(Unavailable(f"the connection was lost: {event.reason}"))
        elif type(event) is Received:
            message = self._received(event.message)
            return None if message is None else Received(event.conn, message)
        return event

    def _received(self, message: Message) -> Message | None:
        match message:
            case Welcome():
                self._welcomed()
            case Reply() if message.corr_id == self._asked and self._answer is not None:
                if not self._answer.done():
                    self._answer.set_result(message.body)
                return None
            case ErrorMessage() if message.corr_id and message.corr_id == self._asked:
                self._end(from_wire(message.code, message.message, message.details))
                return None
            case ErrorMessage() if not message.corr_id and message.code == Unauthorized.code:
                return self._unauthorized(message)
        return message

    def _end(self, error: TasukiError) -> None:
        """Fail the request that waits for an answer, if there is one."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _welcomed(self) -> None:
        self._online = True
        self._refused.clear()
        kept = self._kept
        if self._shown.token_id != kept.token.token_id:
            # The answer to the rotation was lost, but it was done. Or the server was restored from an older backup.
            logger.info("the server accepts token %s, which is used from now on", self._shown.token_id)
            kept = replace(kept, token=self._shown, pending=None)
        elif self._taken:  # the server has another token like the pending one
            kept = replace(kept, pending=None)
        self._taken = False
        self._keep(replace(kept, previous=None))
        self._woken.set()

    def _unauthorized(self, error: ErrorMessage) -> ErrorMessage | None:
        """Choose the next token for the next Hello and return None; if there is none, return the refusal of `token` itself: the
        reason for a token that the server may never have seen would mislead."""
        self._refused[self._shown.token_id] = error
        for token in self._kept.candidates:
            if token.token_id not in self._refused:
                logger.info("token %s is refused (%s); trying token %s", self._shown.token_id, error.message, token.token_id)
                self._choose(token)
                return None
        return self._refused[self._kept.token.token_id]

    def _choose(self, token: CredentialToken) -> None:
        self._chosen = token
        self._use(token.secret)

    def _keep(self, credential: Credential) -> None:
        if credential != self._kept:
            self._kept, self._unsaved = credential, True

    # ------------------------------------------------------------------------------------------------ the task

    async def run(self) -> None:
        """Save and rotate tokens while the worker lives. Nothing else writes the file."""
        while True:
            self._woken.clear()
            if self._unsaved:
                await self._save("the token that is in use")
            if self._online and self._wait_s() <= 0:
                await self._try_to_rotate()
                continue
            try:
                await asyncio.wait_for(self._woken.wait(), min(SLEEP_MAX_S, self._wait_s()) if self._online else SLEEP_MAX_S)
            except TimeoutError:
                continue

    def _wait_s(self) -> float:
        at = now()
        token = self._kept.token
        due_s = token.left_s(at.wall) - token.ttl_s * (DUE_AT_LEFT - JITTER * self._spread)
        if self._kept.pending is not None:  # a rotation was begun
            due_s = 0.0
        return max(due_s, self._retry_at - at.monotonic)

    async def _save(self, what: str) -> bool:
        credential = self._kept
        try:
            await asyncio.to_thread(self._file.save, credential)
        except OSError as error:
            logger.warning("%s cannot be saved in %s: %s", what, self._file.path, error)
            return False
        self._unsaved = credential != self._kept
        return True

    async def _try_to_rotate(self) -> None:
        try:
            await self._rotate()
        except TasukiError as error:
            if isinstance(error, InvalidInput):  # most likely an earlier request was done; the next Hello finds out
                self._taken = True
                self._hang_up(error)
            life_s = self._kept.token.ttl_s
            if self._backoff is None:
                self._backoff = Backoff(max(RETRY_MIN_S, life_s * RETRY_FIRST), life_s * RETRY_MAX, self._jitter)
            wait_s = self._backoff.next_s()
            self._retry_at = now().monotonic + wait_s
            logger.warning("the token was not rotated, trying again in %.0f s: %s", wait_s, error.message)

    async def _rotate(self) -> None:
        fresh = self._kept.pending
        if fresh is None:
            fresh = new_token(self._kept.token.ttl_s)
            self._kept = replace(self._kept, pending=fresh)
            if not await self._save("the next token"):  # a token that is not on disk must not be sent to the server
                self._kept = replace(self._kept, pending=None)
                raise Unavailable("the next token cannot be saved")
        if not self._online:
            raise Unavailable("the connection was lost")
        self._answer = asyncio.get_running_loop().create_future()
        params = {"token_id": fresh.token_id, "sha256": token_sha256(fresh.secret)}
        asked_at = now().wall
        self._asked = self._ask(ROTATE, params)
        try:
            body = await asyncio.wait_for(self._answer, ANSWER_S)
        except TimeoutError:
            raise Unavailable(f"the server has not answered within {ANSWER_S:g} s") from None
        finally:
            self._answer, self._asked = None, 0
        fresh = replace(fresh, issued_at=asked_at, expires_at=asked_at + float(body.get("ttl_s", fresh.ttl_s)))
        old = self._kept.token
        self._keep(replace(self._kept, token=fresh, pending=None, previous=old))
        await self._save("the new token")
        self._backoff, self._retry_at = None, 0.0
        self._choose(fresh)
        logger.info("the token was rotated: %s replaces %s", fresh.token_id, old.token_id)
        if self._shown.token_id == old.token_id:
            self._hang_up(Unavailable("the token was rotated; connecting again with the new one"))


def new_token(ttl_s: float) -> CredentialToken:
    """Return a token with a new secret, of which the server gets only the hash."""
    secret = TOKEN_PREFIXES[PeerKind.WORKER] + secrets.token_urlsafe(32)
    issued_at = now().wall
    return CredentialToken(secret=secret, token_id=secrets.token_hex(6), issued_at=issued_at, expires_at=issued_at + ttl_s)
