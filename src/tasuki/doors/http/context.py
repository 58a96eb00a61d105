"""Authenticated requests: each token is looked up in the store; a handler gets the caller and the state of the door."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from starlette.requests import Request

from tasuki.core.access import PeerKind, identify, token_sha256
from tasuki.core.apps import AppLimits
from tasuki.core.job import TIME_END, IdMaker
from tasuki.core.lifecycle import HTTP_LEASE_TTL_S
from tasuki.core.store_messages import TokenRow
from tasuki.core.subject import app_subject
from tasuki.doors.http.exchange import secret_of
from tasuki.doors.http.metrics import Metrics
from tasuki.doors.http.payload_checks import PayloadCheck
from tasuki.doors.http.virtual_connection import Caller, Clients, TokenConnection, VirtualConnection, dedicated_connection
from tasuki.doors.http.worker_sessions import WorkerSessions
from tasuki.doors.http.workers import HttpWorker, Workers
from tasuki.errors import Forbidden, TasukiError, TokenRevoked, Unavailable
from tasuki.server.server import Server
from tasuki.server.transfers import PresignedTransfers

STORE_TIMEOUT_S = 2.0  # for those who ask how the store is
KNOWN_S = 86_400.0  # as long as an outage may last before scrapes fail; a token that was revoked meanwhile shows no job
KNOWN_MAX = 16


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the HTTP door."""

    apps: tuple[str, ...] = ()
    """Names of calculation apps, served below /calc."""
    host_names: tuple[str, ...] = ()
    """Names by which the listener is called, of --host-name; none: those of loopback, or any if it is not on loopback."""
    lease_ttl_s: float = HTTP_LEASE_TTL_S
    limits: AppLimits = AppLimits()
    payload_checks: Mapping[str, PayloadCheck] = {}
    """By app; those without accept any payload."""
    presigned: PresignedTransfers | None = None
    """Makes presigned URLs, where peers may use the bucket themselves."""


class HttpContext(msgspec.Struct):
    """State that all requests of the door share."""

    server: Server
    config: HttpConfig
    clients: Clients
    workers: Workers
    sessions: WorkerSessions
    new_id: IdMaker
    metrics: Metrics


class RequestContext(msgspec.Struct):
    """One authenticated request."""

    http: HttpContext
    request: Request
    caller: Caller
    reserve: Callable[[int], None]
    """Takes memory of the caller's share until the request is answered; an error if there is none left."""

    @property
    def app(self) -> str:
        return str(self.request.path_params["app"])

    @property
    def subject(self) -> str:
        return app_subject(self.app)

    @property
    def job_id(self) -> str:
        return str(self.request.path_params["job_id"])

    @property
    def worker_id(self) -> str:
        """The calling worker by its token, never by what the request says."""
        identity = self.caller.identity
        if not identity.worker_id:
            raise Forbidden("this worker token belongs to no worker in particular; register with an enrol token")
        identity.check_patterns((self.subject,))
        return identity.worker_id

    def client(self) -> AbstractAsyncContextManager[TokenConnection]:
        """Return the connection of the caller's token, to be used in `async with`."""
        return self.http.clients.use(self.caller)

    async def ask(self, verb: str, **params: Any) -> Any:
        """Send one request of the caller to the server, and return the body of its Reply."""
        async with self.client() as client:
            return await client.request(verb, **params)

    def worker(self) -> HttpWorker:
        """Return the calling worker of this app, to be used in `with`."""
        return self.http.workers.of(self.worker_id, self.subject)

    def transfer(self) -> AbstractAsyncContextManager[VirtualConnection]:
        """Return a connection for one transfer; the query of a worker's request says which process asks."""
        query = self.request.query_params
        return dedicated_connection(self.http.server, self.caller, query.get("worker_id", ""), query.get("incarnation", ""))


# ---------------------------------------------------------------------------------------------------- authentication


class Authenticator:
    """Looks up tokens in batches: requests that arrive during one query share the next one.

    Each request is judged by a query that began after it arrived.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._wanted: dict[str, asyncio.Future[TokenRow | None]] = {}
        self._asking: asyncio.Task[None] | None = None
        self._known: dict[str, tuple[Caller, float]] = {}
        """Callers of routes that work without the store, and until when they are let in without it; the latest last."""

    async def admit(self, request: Request, kinds: Collection[PeerKind]) -> Caller:
        """Return the caller; unknown and expired tokens are 401, revoked and used ones and those of another kind 403."""
        secret = secret_of(request)
        sha256 = token_sha256(secret)
        row = await self._row(sha256)
        if row is not None and row.revoked_at is not None:
            what = "was used" if row.kind == PeerKind.ENROL else "was revoked"
            raise TokenRevoked(f"token {row.token_id} {what}; ask for another one")
        identity = identify(row, self._server.now().wall)
        if identity.kind not in kinds:
            wanted = " or ".join(sorted(kinds))
            raise Forbidden(f"a token of kind {identity.kind} may not do this; it takes one of kind {wanted}")
        client = request.client
        return Caller(identity, sha256, secret, f"{client.host}:{client.port}" if client is not None else "")

    async def admit_without_store(self, request: Request, kinds: Collection[PeerKind]) -> Caller:
        """Return the caller; while the store does not answer, one whose token was good when the store was last asked for it."""
        sha256, now = token_sha256(secret_of(request)), self._server.now()
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                caller = await self.admit(request, kinds)
        except (TimeoutError, Unavailable):
            known = self._known.get(sha256)
            if known is None or known[1] < now.wall:
                raise Unavailable("the store does not answer, and this token was not looked up lately; try again") from None
            return known[0]
        except TasukiError:
            self._known.pop(sha256, None)
            raise
        self._known.pop(sha256, None)
        self._known[sha256] = caller, min(now.wall + KNOWN_S, caller.identity.expires_at or TIME_END)
        if len(self._known) > KNOWN_MAX:
            self._known.pop(next(iter(self._known)))
        return caller

    async def _row(self, sha256: str) -> TokenRow | None:
        row = self._wanted.get(sha256)
        if row is None:
            row = self._wanted[sha256] = asyncio.get_running_loop().create_future()
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._ask())
        return await asyncio.shield(row)

    async def _ask(self) -> None:
        try:
            while wanted := self._wanted:
                self._wanted = {}
                await self._answer(wanted)
        finally:
            self._asking = None

    async def _answer(self, wanted: dict[str, asyncio.Future[TokenRow | None]]) -> None:
        try:
            rows = await self._server.ask_tokens(lambda reader: [reader.token(sha256) for sha256 in wanted])
        except Exception as error:  # noqa: BLE001 - raised again in each request
            for future in wanted.values():
                future.set_exception(error)
                future.exception()  # its request may be gone
        else:
            for future, row in zip(wanted.values(), rows, strict=True):
                future.set_result(row)


# ---------------------------------------------------------------------------------------------------- what handlers share


def message_of(view: dict[str, Any]) -> str:
    """Return the reason for which a job was canceled, and the message of its outcome; the error code if there is neither."""
    outcome = view["outcome"] or {"message": "", "error_code": None}
    return "; ".join(filter(None, (view["cancel_reason"], outcome["message"]))) or outcome["error_code"] or ""


def iso(unix: float | None) -> str:
    """Return a time in ISO 8601, UTC, to the millisecond."""
    moment = datetime.datetime.fromtimestamp(unix if unix and 0 <= unix < TIME_END else 0.0, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
