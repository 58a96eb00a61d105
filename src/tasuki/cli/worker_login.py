"""How `tasuki worker` gets in: with a token that was given to it, with the credential that it keeps, or by enrolling first.

Reads the enrol token, registers over HTTP, and keeps what it gets in the data folder before anything else is done with it. No
secret is ever an argument, a part of a message or of the log.
"""

from __future__ import annotations

import asyncio
import getpass
import logging
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tasuki.cli.connect import STDIN, read_token
from tasuki.config import enrol_variable
from tasuki.core.access import TOKEN_PREFIXES, PeerKind, covers
from tasuki.core.address import Address
from tasuki.core.subject import app_subject
from tasuki.errors import ConfigError, Unauthorized, Unavailable
from tasuki.worker.credentials import Credential, CredentialFile, CredentialToken
from tasuki.worker.outbox import OUTBOX_FOLDER as ENDINGS_FOLDER

SECRET_MAX_CHARS = 512
HOST_MAX_CHARS = 40
WAYS = "TASUKI_ENROLL or --enroll-file for an enrol token (tasuki token enroll), --token-file for a worker token"

logger = logging.getLogger("tasuki.worker")


class LoginOptions(NamedTuple):
    """What the command line says of who the worker is."""

    data: Path
    token_file: str | None = None
    enroll_file: str | None = None
    worker_id: str | None = None
    tls_ca: str | None = None
    patterns: tuple[str, ...] = ()
    """What it is to take; none: whatever its credential is for."""


class WorkerLogin(NamedTuple):
    """As whom it comes in. With a `seat` that has a credential, the token is renewed in time."""

    token: str = ""
    worker_id: str | None = None
    seat: CredentialFile | None = None
    patterns: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Admission({self.worker_id})"

    @contextmanager
    def way_back(self) -> Iterator[None]:
        """If the worker is sent away while it works: what somebody has to do so that it is let in again."""
        try:
            yield
        except Unauthorized as error:
            if self.seat is None:
                raise
            credential = self.seat.credential
            if credential is None:
                way = "make another token at the server with: tasuki token create --kind worker"
            else:
                again = f"tasuki token enroll {_scope_flags(credential.scope)} --worker-id {credential.worker_id}"
                way = f"at the server make an enrol token with: {again}; then start it again with TASUKI_ENROLL"
            raise Unauthorized(f"this worker may not work any more, and stops its jobs: {error.message}; {way}") from None


def _scope_flags(scope: Sequence[str]) -> str:
    flags = (f"--scope {shlex.quote(pattern)}" for pattern in scope or (">",))
    last = scope[0].rpartition(".")[2] if len(scope) == 1 else ""
    return f"--app {last}" if last not in ("", "*", ">") and scope[0] == app_subject(last) else " ".join(flags)


@contextmanager
def admitted(addresses: Sequence[Address], wish: LoginOptions) -> Iterator[WorkerLogin]:
    """For as long as the worker runs: nobody else on this data folder is the same worker meanwhile."""
    with ExitStack() as stack:
        if not addresses:  # straight from a store, which asks for no token
            yield WorkerLogin("", wish.worker_id, None, wish.patterns)
            return
        token = read_token(wish.token_file)
        if not addresses[0].http:
            by_variable = enrol_variable() and not token and addresses[0].scheme != "unix"  # there nobody needs a token
            if wish.enroll_file is not None or by_variable:
                raise ConfigError(f"a worker enrols over http:// or https://, not over {addresses[0].scheme}://; use {WAYS}")
            yield WorkerLogin(token, wish.worker_id, None, wish.patterns)
            return
        enrol_token = _enrol_token(wish.enroll_file)
        if token and enrol_token:
            raise ConfigError("there are an enrol token and a worker token; give one: an enrolled worker gets a token of its own")
        if token and wish.worker_id:
            yield WorkerLogin(token, wish.worker_id, None, wish.patterns)
            return
        seat = stack.enter_context(CredentialFile(wish.data, addresses[0]))
        yield _by_hand(seat, token, wish) if token else _enrolled(seat, enrol_token, addresses, wish)


@contextmanager
def unadmitted(wish: LoginOptions) -> Iterator[WorkerLogin]:
    """For a worker that is not going to run: no token is looked for, and none is spent."""
    yield WorkerLogin("", wish.worker_id, None, wish.patterns)


def _by_hand(seat: CredentialFile, token: str, wish: LoginOptions) -> WorkerLogin:
    """Its results that wait on disk are offered by its next start: so its id lasts, though nobody has chosen one."""
    if seat.path.exists():
        logger.warning("the token of TASUKI_TOKEN or --token-file is used, and not the credential in %s", seat.path)
    return WorkerLogin(token, seat.worker_id(_host()), seat, wish.patterns)


def _host() -> str:
    return socket.gethostname().split(".")[0][:HOST_MAX_CHARS]


# ---------------------------------------------------------------------------------------------------- enrolled


def _enrolled(seat: CredentialFile, enrol_token: str, addresses: Sequence[Address], wish: LoginOptions) -> WorkerLogin:
    credential = seat.load()
    if credential is None:
        credential = _enrol(seat, enrol_token or _asked(addresses[0]), addresses, wish)
    elif enrol_token and _is_over(credential, addresses, wish):
        _miss_results(wish.data, credential.worker_id)
        credential = _enrol(seat, enrol_token, addresses, wish)
    elif enrol_token:
        logger.warning("the enrol token is not used: this worker is enrolled already, as %s", credential.worker_id)
    if wish.worker_id not in (None, credential.worker_id):
        raise ConfigError(
            f"--worker-id {wish.worker_id} is not the worker of {seat.path}, which is {credential.worker_id}; "
            "leave --worker-id out, or give that worker a folder of its own with --data"
        )
    _check_scope(seat, credential, wish.patterns)
    return WorkerLogin(credential.token.secret, credential.worker_id, seat, wish.patterns or credential.scope)


def _enrol(seat: CredentialFile, enrol_token: str, addresses: Sequence[Address], wish: LoginOptions) -> Credential:
    """Spend the enrol token; what comes of it is on disk when this returns."""
    from tasuki.net import client_tls
    from tasuki.net.enrol import register

    _check_kind(enrol_token)
    asked_at = time.time()
    told = asyncio.run(register(addresses, client_tls(wish.tls_ca), enrol_token, socket.gethostname()[:200]))
    expires_at = asked_at + told.ttl_seconds
    token = CredentialToken(secret=told.worker_token, token_id=told.token_id, issued_at=asked_at, expires_at=expires_at)
    credential = Credential(server=str(seat.address), worker_id=told.worker_id, scope=told.scope, token=token)
    try:
        seat.save(credential)
    except OSError as error:
        raise ConfigError(
            f"the token of worker {told.worker_id} cannot be kept in {seat.path}: {error.strerror}; "
            f"the enrol token is spent: ask for another one, with tasuki token enroll --worker-id {told.worker_id}"
        ) from None
    logger.info("enrolled at %s as %s; the credential is in %s", seat.address, told.worker_id, seat.path)
    return credential


def _is_over(credential: Credential, addresses: Sequence[Address], wish: LoginOptions) -> bool:
    """Whether none of its tokens is good any more. If nobody can be asked, it stays what it is."""
    from tasuki.net import client_tls
    from tasuki.net.enrol import is_good

    async def any_good() -> bool:
        for token in credential.candidates:
            if await is_good(addresses, client_tls(wish.tls_ca), token.secret):
                return True
        return False

    try:
        return not asyncio.run(any_good())
    except Unavailable as error:
        logger.warning("%s", error.message)
        return False


def _miss_results(data: Path, worker_id: str) -> None:
    folder = data / ENDINGS_FOLDER / worker_id
    if folder.is_dir() and any(folder.iterdir()):
        logger.warning(
            "results of %s wait in %s, and only that worker can bring them: enrol it again as the same, "
            "with a token of tasuki token enroll --worker-id %s",
            worker_id,
            folder,
            worker_id,
        )


def _check_scope(seat: CredentialFile, credential: Credential, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        if credential.scope and not any(covers(allowed, pattern) for allowed in credential.scope):
            raise ConfigError(
                f"worker {credential.worker_id} was enrolled for {', '.join(credential.scope)}, not for {pattern}; "
                f"for that, enrol another worker with a folder of its own (--data), or remove {seat.path} and enrol again"
            )


# ---------------------------------------------------------------------------------------------------- the enrol token


def _enrol_token(enroll_file: str | None) -> str:
    """--enroll-file (- for stdin), else TASUKI_ENROLL, else nothing."""
    if enroll_file is None:
        return enrol_variable()
    try:
        text = sys.stdin.readline() if enroll_file == STDIN else Path(enroll_file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--enroll-file {enroll_file!r} cannot be read: {error}") from None
    token = text.strip()
    if not token:
        raise ConfigError(f"there is no enrol token in --enroll-file {enroll_file!r}")
    return token


def _asked(address: Address) -> str:
    """From a person at a terminal; the answer is not shown."""
    if not sys.stdin.isatty():
        raise Unauthorized(f"this worker has no token for {address}; give one: {WAYS}")
    try:
        return getpass.getpass(f"Enrol token for {address} (made there with tasuki token enroll): ").strip()
    except EOFError:
        raise Unauthorized(f"no enrol token was given for {address}; use {WAYS}") from None


def _check_kind(enrol_token: str) -> None:
    if len(enrol_token) > SECRET_MAX_CHARS or not enrol_token.isascii() or not enrol_token.isprintable():
        raise ConfigError("what was given as an enrol token is none; make one at the server with: tasuki token enroll")
    prefix = TOKEN_PREFIXES[PeerKind.ENROL]
    if not enrol_token.startswith(prefix):
        other = next((kind for kind, start in TOKEN_PREFIXES.items() if enrol_token.startswith(start)), "unknown")
        raise ConfigError(f"an enrol token begins with {prefix}, and this is one of kind {other}; use {WAYS}")
