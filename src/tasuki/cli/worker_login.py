"""The login of `tasuki worker`: with a token that it is given, with the credential that it keeps, or by enrolling first.

To enrol, a worker registers over HTTP with an enrol token. The credential that it gets is saved in the data folder before
anything else is done with it. No secret is ever an argument, a part of a message or of the log.
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
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tasuki.cli.command import STDIN
from tasuki.cli.connect import read_token
from tasuki.config import enrol_variable, is_sendable_token
from tasuki.core.access import TOKEN_PREFIXES, PeerKind, covers
from tasuki.core.address import Address
from tasuki.core.subject import app_subject
from tasuki.errors import ConfigError, Forbidden, Unauthorized, Unavailable
from tasuki.net.tls import client_tls
from tasuki.worker.credentials import Credential, CredentialFile, CredentialToken
from tasuki.worker.outbox import OUTBOX_FOLDER

HOST_MAX_CHARS = 40
WAYS = "TASUKI_ENROLL or --enroll-file for an enrol token (tasuki token enroll), --token-file for a worker token"

logger = logging.getLogger("tasuki.worker")


class LoginOptions(NamedTuple):
    """The options of a worker that say who it is."""

    data: Path
    token_file: str | None = None
    enroll_file: str | None = None
    worker_id: str | None = None
    tls_ca: str | None = None
    patterns: tuple[str, ...] = ()
    """Subjects that it is to take; none: those of its credential."""


class WorkerLogin(NamedTuple):
    """The identity of a worker, as arguments of `Worker`. With a credential in `credential_file` the token is renewed in time."""

    token: str = ""
    worker_id: str | None = None
    credential_file: CredentialFile | None = None
    subjects: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"WorkerLogin({self.worker_id})"

    @contextmanager
    def explaining_refusal(self) -> Iterator[None]:
        """Add to an Unauthorized error of the running worker what has to be done so that it is accepted again."""
        try:
            yield
        except Unauthorized as error:
            if self.credential_file is None:
                raise
            credential = self.credential_file.credential
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
def logged_in(addresses: Sequence[Address], chosen: LoginOptions) -> Iterator[WorkerLogin]:
    """Log in while the worker runs; no other process on this data folder is the same worker meanwhile.

    Without addresses (straight from a store, or a worker that is only checked) no token is read, and none is spent.
    """
    token = read_token(chosen.token_file) if addresses else ""
    over_http = bool(addresses) and addresses[0].http
    if addresses and not over_http:
        by_variable = enrol_variable() and not token and addresses[0].scheme != "unix"  # there nobody needs a token
        if chosen.enroll_file is not None or by_variable:
            raise ConfigError(f"a worker enrols over http:// or https://, not over {addresses[0].scheme}://; use {WAYS}")
    enrol_token = _enrol_token(chosen.enroll_file) if over_http else ""
    if token and enrol_token:
        raise ConfigError("there are an enrol token and a worker token; give one: an enrolled worker gets a token of its own")
    if not over_http or (token and chosen.worker_id):
        yield WorkerLogin(token, chosen.worker_id, None, chosen.patterns)
        return
    with CredentialFile(chosen.data, addresses[0]) as file:
        yield _with_token(file, token, chosen) if token else _with_credential(file, enrol_token, addresses, chosen)


def _with_token(file: CredentialFile, token: str, chosen: LoginOptions) -> WorkerLogin:
    """Log in with a token. The worker's id is kept, so that its next start offers the results that wait on disk."""
    if file.path.exists():
        logger.warning("the token of TASUKI_TOKEN or --token-file is used, and not the credential in %s", file.path)
    host = socket.gethostname().split(".")[0][:HOST_MAX_CHARS]
    return WorkerLogin(token, file.worker_id(host), file, chosen.patterns)


# ---------------------------------------------------------------------------------------------------- enrolled


def _with_credential(file: CredentialFile, enrol_token: str, addresses: Sequence[Address], chosen: LoginOptions) -> WorkerLogin:
    credential = file.load()
    if credential is None:
        credential = _enrol(file, enrol_token or _ask_enrol_token(addresses[0]), addresses, chosen)
    elif enrol_token and _is_expired(credential, addresses, chosen):
        waiting = chosen.data / OUTBOX_FOLDER / credential.worker_id
        if waiting.is_dir() and any(waiting.iterdir()):
            logger.warning(
                "results of %s wait in %s, and only that worker can bring them: enrol it again as the same, "
                "with a token of tasuki token enroll --worker-id %s",
                credential.worker_id,
                waiting,
                credential.worker_id,
            )
        credential = _enrol(file, enrol_token, addresses, chosen)
    elif enrol_token:
        logger.warning("the enrol token is not used: this worker is enrolled already, as %s", credential.worker_id)
    if chosen.worker_id not in (None, credential.worker_id):
        raise ConfigError(
            f"--worker-id {chosen.worker_id} is not the worker of {file.path}, which is {credential.worker_id}; "
            "leave --worker-id out, or give that worker a folder of its own with --data"
        )
    for pattern in chosen.patterns:
        if credential.scope and not any(covers(allowed, pattern) for allowed in credential.scope):
            raise ConfigError(
                f"worker {credential.worker_id} was enrolled for {', '.join(credential.scope)}, not for {pattern}; "
                f"for that, enrol another worker with a folder of its own (--data), or remove {file.path} and enrol again"
            )
    return WorkerLogin(credential.token.secret, credential.worker_id, file, chosen.patterns or credential.scope)


def _enrol(file: CredentialFile, enrol_token: str, addresses: Sequence[Address], chosen: LoginOptions) -> Credential:
    """Register with the enrol token; the credential is on disk when this returns."""
    from tasuki.net.enrol import register

    _check_kind(enrol_token)
    asked_at = time.time()
    host = socket.gethostname()[:200]
    try:
        answer = asyncio.run(register(addresses, client_tls(chosen.tls_ca), enrol_token, host, chosen.patterns))
    except Forbidden as error:
        raise Forbidden(f"{error.message}; the enrol token is for another --app or --subject, and is not spent") from None
    expires_at = asked_at + answer.ttl_seconds
    token = CredentialToken(secret=answer.worker_token, token_id=answer.token_id, issued_at=asked_at, expires_at=expires_at)
    credential = Credential(server=str(file.address), worker_id=answer.worker_id, scope=answer.scope, token=token)
    try:
        file.save(credential)
    except OSError as error:
        raise ConfigError(
            f"the token of worker {answer.worker_id} cannot be kept in {file.path}: {error.strerror}; "
            f"the enrol token is spent: ask for another one, with tasuki token enroll --worker-id {answer.worker_id}"
        ) from None
    logger.info("enrolled at %s as %s; the credential is in %s", file.address, answer.worker_id, file.path)
    return credential


def _is_expired(credential: Credential, addresses: Sequence[Address], chosen: LoginOptions) -> bool:
    """Return whether no token of the credential is valid any more; False if no server can be reached."""
    from tasuki.net.enrol import is_good

    async def any_good() -> bool:
        for token in credential.candidates:
            if await is_good(addresses, client_tls(chosen.tls_ca), token.secret):
                return True
        return False

    try:
        return not asyncio.run(any_good())
    except Unavailable as error:
        logger.warning("%s", error.message)
        return False


# ---------------------------------------------------------------------------------------------------- the enrol token


def _enrol_token(enroll_file: str | None) -> str:
    """Return the enrol token of --enroll-file (- for stdin), else of TASUKI_ENROLL, else ""."""
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


def _ask_enrol_token(address: Address) -> str:
    """Ask a person at a terminal for the enrol token; the answer is not shown."""
    if not sys.stdin.isatty():
        raise Unauthorized(f"this worker has no token for {address}; give one: {WAYS}")
    try:
        return getpass.getpass(f"Enrol token for {address} (made there with tasuki token enroll): ").strip()
    except EOFError:
        raise Unauthorized(f"no enrol token was given for {address}; use {WAYS}") from None


def _check_kind(enrol_token: str) -> None:
    if enrol_token and not is_sendable_token(enrol_token):
        raise ConfigError("the enrol token must be one line of printable ASCII; make one at the server with: tasuki token enroll")
    prefix = TOKEN_PREFIXES[PeerKind.ENROL]
    if not enrol_token.startswith(prefix):
        other = next((kind for kind, start in TOKEN_PREFIXES.items() if enrol_token.startswith(start)), "unknown")
        raise ConfigError(f"an enrol token begins with {prefix}, and this is one of kind {other}; use {WAYS}")
