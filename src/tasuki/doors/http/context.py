"""One request on its way: what the door knows, who calls, and what was sent. And the parts that all requests share."""

from __future__ import annotations

import datetime
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request

from tasuki.core.access import PeerKind
from tasuki.core.apps import BACKOFF_S, MAX_RETRIES
from tasuki.core.ids import IdMaker
from tasuki.core.job import JobSpec
from tasuki.core.protocol import Acceptance, Accepted, SubmitJobs
from tasuki.core.subject import app_subject
from tasuki.doors.http.authentication import Caller
from tasuki.doors.http.clients import Clients, TokenConnection, own_talk
from tasuki.doors.http.exchange import code_of, status_of
from tasuki.doors.http.response_schemas import Error
from tasuki.doors.http.virtual_connection import VirtualConnection
from tasuki.doors.http.worker_sessions import Lines
from tasuki.doors.http.workers import Workers
from tasuki.errors import Forbidden, TasukiError, Unavailable, from_wire
from tasuki.server.presigned import PresignedTransfers
from tasuki.server.server import Server

if TYPE_CHECKING:
    from tasuki.doors.http.metrics import Metrics


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the door is started with."""

    apps: tuple[str, ...] = ()
    """Names below /calc."""
    lease_ttl_s: float = 60.0
    max_retries: int = MAX_RETRIES
    """Of the apps' jobs."""
    backoff_s: float = BACKOFF_S
    direct: PresignedTransfers | None = None
    """Gives links to the bucket, where peers may use it themselves."""


class HttpContext(msgspec.Struct):
    """What all requests share."""

    server: Server
    config: HttpConfig
    clients: Clients
    workers: Workers
    lines: Lines
    new_id: IdMaker
    metrics: Metrics


class RequestContext(msgspec.Struct):
    """One request that was let in."""

    house: HttpContext
    request: Request
    caller: Caller
    body: Any = None

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
        """Of the worker that calls: from its token, never from what it says."""
        identity = self.caller.identity
        if not identity.worker_id:
            raise Forbidden("this worker token belongs to no worker in particular; register with an enrol token")
        identity.check_patterns((self.subject,))
        return identity.worker_id


def told(error: TasukiError) -> Error:
    """An error inside an answer to a batch."""
    return Error(code_of(error), error.message, error.details())


def status_and_error(error: TasukiError) -> tuple[int, Error]:
    return status_of(error), told(error)


def transfer_talk(call: RequestContext) -> AbstractAsyncContextManager[VirtualConnection]:
    """A connection for one transfer of whoever calls; a worker says which of its processes it is."""
    if call.caller.identity.kind is not PeerKind.WORKER:
        return own_talk(call.house.server, call.caller)
    query = call.request.query_params
    return own_talk(call.house.server, call.caller, (query.get("worker_id", ""), query.get("incarnation", "")))


async def submit(client: TokenConnection, specs: list[JobSpec], on_failed: str = "return") -> list[Acceptance | None]:
    """For each job None if it is new and stored, else how it stands or what is wrong with it."""
    msg_id = client.talk.next_id()
    answer = await client.talk.ask(msg_id, SubmitJobs(msg_id, specs, watch=False, on_failed=on_failed))
    if not isinstance(answer, Accepted):
        raise Unavailable(f"the server answered with {type(answer).__name__}; try again")
    found: list[Acceptance | None] = [None] * len(specs)
    for acceptance in answer.exceptions:
        found[acceptance.index] = acceptance
    return found


def refusal_of(acceptance: Acceptance | None) -> TasukiError | None:
    if acceptance is None or not acceptance.code:
        return None
    return from_wire(acceptance.code, acceptance.message, acceptance.details)


def iso(unix: float | None) -> str:
    """A time as the apps write it."""
    moment = datetime.datetime.fromtimestamp(unix or 0.0, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
