"""One request on its way: the state of the door, the caller, and the parts of the path."""

from __future__ import annotations

import datetime
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from starlette.requests import Request

from tasuki.core.access import PeerKind
from tasuki.core.apps import BACKOFF_S, MAX_RETRIES
from tasuki.core.ids import IdMaker
from tasuki.core.subject import app_subject
from tasuki.doors.http.authentication import Caller
from tasuki.doors.http.clients import Clients, TokenConnection, dedicated_connection
from tasuki.doors.http.metrics import Metrics
from tasuki.doors.http.virtual_connection import VirtualConnection
from tasuki.doors.http.worker_sessions import WorkerSessions
from tasuki.doors.http.workers import HttpWorker, Workers
from tasuki.errors import Forbidden
from tasuki.server.presigned import PresignedTransfers
from tasuki.server.server import Server


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the HTTP door."""

    apps: tuple[str, ...] = ()
    """Names of calculation apps, served below /calc."""
    lease_ttl_s: float = 60.0
    max_retries: int = MAX_RETRIES
    """Of the apps' jobs."""
    backoff_s: float = BACKOFF_S
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

    def worker(self) -> HttpWorker:
        """Return the calling worker of this app, to be used in `with`."""
        return self.http.workers.of(self.worker_id, self.subject)

    def transfer(self) -> AbstractAsyncContextManager[VirtualConnection]:
        """Return a connection for one transfer; the query of a worker's request says which process asks."""
        if self.caller.identity.kind is not PeerKind.WORKER:
            return dedicated_connection(self.http.server, self.caller)
        query = self.request.query_params
        return dedicated_connection(self.http.server, self.caller, (query.get("worker_id", ""), query.get("incarnation", "")))


def detail_of(view: dict[str, Any]) -> str:
    """Return the message of a job's outcome, or its error code."""
    outcome = view["outcome"]
    return (outcome["message"] or outcome["error_code"] or "") if outcome is not None else ""


def iso(unix: float | None) -> str:
    """Return a time in ISO 8601, UTC, to the millisecond."""
    moment = datetime.datetime.fromtimestamp(unix or 0.0, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
