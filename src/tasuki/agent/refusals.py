"""Answers of agents and dispatchers to requests that fail: refusals with a status, the guard of every request, the log context.

The refusals are the table of the contract (docs/operate/agents.md). The guard admits only requests with a token, and lets no
error out as it is. The log context puts `job_id` into every line that is logged for a job, also in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import hmac
import logging
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from tasuki import errors
from tasuki.core.address import Address
from tasuki.core.failover import agent_protocol
from tasuki.core.failover.registry_records import ResultLocation
from tasuki.doors.http import exchange as http_answers
from tasuki.doors.http.exchange import (
    REQUESTS_MAX,
    EarlyResponse,
    check_site,
    discreet,
    envelope,
    error_answer,
    json_answer,
    peer_of,
    secret_of,
)
from tasuki.doors.http.uvicorn_server import Handler, UvicornServer, application
from tasuki.doors.listening import Connections
from tasuki.errors import AgentRefusal, InternalError, NotFound, Overloaded, RegistryUnavailable, TasukiError, Unauthorized
from tasuki.server.refusal_log import RefusalLog

RETRY_AFTER_S = 1
LOCKED = 423
LOGGED_STATUSES = {409, LOCKED, 503}  # of runs and removals; to those who read, "not ready yet" is an answer


def is_running(job_id: str, node: str, since: float | None, **details: Any) -> AgentRefusal:
    message = f"job {job_id} is running at {node}; ask again later for its result"
    return AgentRefusal(LOCKED, agent_protocol.RUNNING, message, retry=True, job_id=job_id, node=node, since=since, **details)


def is_queued(job_id: str, dispatcher: str, since: float) -> AgentRefusal:
    message = f"job {job_id} waits at {dispatcher} for a node; ask again later for its result"
    return AgentRefusal(
        LOCKED, agent_protocol.RUNNING, message, retry=True, job_id=job_id, node=dispatcher, since=since, state="queued"
    )


def is_full(running: int, limit: int) -> AgentRefusal:
    message = f"all {limit} slots are taken; try another node, or later"
    return AgentRefusal(503, agent_protocol.FULL, message, retry=True, running=running, limit=limit)


def is_draining() -> AgentRefusal:
    return AgentRefusal(
        503, agent_protocol.DRAINING, "this agent is going down and takes no new jobs; try another node", retry=True
    )


def was_interrupted(job_id: str) -> AgentRefusal:
    message = f"job {job_id} was stopped, because this agent is going down; send it again, or to another node"
    return AgentRefusal(503, agent_protocol.DRAINING, message, retry=True, job_id=job_id)


def unavailable(message: str, **details: Any) -> AgentRefusal:
    return AgentRefusal(503, "UNAVAILABLE", message, retry=True, **details)


def has_no_folder() -> AgentRefusal:
    return unavailable("the data folder of this agent cannot be used any more; put it in order, and start the agent again")


def other_input(job_id: str) -> AgentRefusal:
    message = f"job {job_id} exists with another input; use a new job_id, or send exactly the same files, exec and args"
    return AgentRefusal(409, "CONFLICT", message, job_id=job_id)


def was_canceled(job_id: str) -> AgentRefusal:
    return AgentRefusal(409, agent_protocol.CANCELED, f"job {job_id} was removed meanwhile", job_id=job_id)


def still_stopping(job_id: str, node: str) -> AgentRefusal:
    message = f"job {job_id} is being stopped at {node}, and has not ended yet; ask again later"
    return unavailable(message, job_id=job_id, node=node)


def claim_lost(job_id: str) -> AgentRefusal:
    message = f"job {job_id} was stopped here, because this node could not renew its claim to it; ask again"
    return unavailable(message, job_id=job_id)


def registry_away() -> RegistryUnavailable:
    message = "the registry of this agent does not answer; running jobs continue, new ones are refused: try again later"
    return RegistryUnavailable(503, "UNAVAILABLE", message, retry=True)


def no_peer(place: ResultLocation, why: str) -> AgentRefusal:
    message = f"the registry says that the result is at {errors.quoted(place.address)}, which {why}; if it is an agent of yours, "
    return unavailable(message + "name it with --peers URL", job_id=place.ended.job_id)


def result_away(job_id: str, node: str, why: TasukiError) -> AgentRefusal:
    if isinstance(why, AgentRefusal):
        return why
    if isinstance(why, NotFound):
        return AgentRefusal(404, NotFound.code, f"the result of job {job_id} is not kept any more; send the job again to run it")
    message = f"the result of job {job_id} is at {node}, which cannot be asked now; try again later"
    return unavailable(message, job_id=job_id, node=node)


def input_not_found(sha256: str) -> AgentRefusal:
    message = f"input {sha256} is not stored; PUT it to /inputs/{sha256} of a dispatcher first, or send it as the field file"
    return AgentRefusal(404, agent_protocol.INPUT_NOT_FOUND, message, sha256=sha256)


def program_failed(ended: agent_protocol.EndedMarker) -> AgentRefusal:
    """Return the refusal of a program that failed. Its ZIP is kept."""
    if ended.outcome is agent_protocol.AgentOutcome.TIMED_OUT:
        status, code = 504, agent_protocol.TIMED_OUT
    else:
        status, code = 500, agent_protocol.PROGRAM_FAILED
    facts: dict[str, Any] = {"job_id": ended.job_id, "exit_code": ended.exit_code, "error_code": ended.error_code}
    return AgentRefusal(status, code, f"{ended.message}; its logs and files are at /result/{ended.job_id}", **facts)


def code_of(error: TasukiError) -> str:
    return error.code if isinstance(error, AgentRefusal) else http_answers.code_of(error)


def refusal_answer(error: TasukiError) -> Response:
    """Return the response to an error that was raised on purpose."""
    if not isinstance(error, AgentRefusal):
        answer = error_answer(error)
        if "Connection" in answer.headers:
            del answer.headers["Connection"]  # a client that still sends must be able to read this: see `EarlyResponse`
        return answer
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.retry else {}
    return json_answer(envelope(error.code, error.message, error.details()), error.status, headers)


# ------------------------------------------------------------------------------------------------ the guard

DRAINED_BODY_BYTES = 1024 * 1024
"""An unread body up to this size is read by uvicorn, and the connection stays open."""
BODY_READ = "tasuki.body_over"
"""Key in a request's scope: the body was read to its end, though not through the request."""
CLOSE_TIMEOUT_S = 60  # for downloads that are under way at the end
HURRIED_CLOSE_S = 2


class Tokens:
    """Tokens that are accepted. Each is compared, in constant time: the delay of an answer tells nothing about them."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admit(self, secret: str) -> bool:
        """Return whether the secret is one of the tokens."""
        given = hashlib.sha256(secret.encode()).digest()
        return sum([hmac.compare_digest(given, digest) for digest in self._digests]) > 0


class GuardedServer:
    """HTTP server of an agent or a dispatcher: every request needs a token, and no error gets out as it is."""

    def __init__(
        self,
        who: str,
        tokens: Iterable[str],
        routes: Iterable[tuple[str, str, Handler]],
        health: Handler,
        on_answer: Callable[[str, Response, str | None], None],
        *,
        results_end_uploads: bool = False,
    ) -> None:
        """`who`: the process, in words. `on_answer` is called with the method of each request, its response, and the code of a
        refusal. `results_end_uploads`: not only a refusal is an EarlyResponse, but every response."""
        self._who = who
        self.tokens = Tokens(tokens)
        self._on_answer = on_answer
        self._results_end_uploads = results_end_uploads
        self._logger = logging.getLogger(f"tasuki.{who}")
        self._refusals = RefusalLog(self._logger)
        self._under_way = 0
        self.idle = asyncio.Event()
        self.idle.set()
        guarded = [(method, path, self._guarded(handler)) for method, path, handler in routes]
        self._app = application(Starlette(), [*guarded, ("GET", "/health", health)])
        self.serving: UvicornServer | None = None

    async def open(self, sock: socket.socket, tls: ssl.SSLContext | None, host_names: tuple[str, ...] = ()) -> None:
        """`host_names`: names by which it is called, beside those of loopback."""
        self._host_names, self._loopback = host_names, Address("http", sock.getsockname()[0]).loopback
        full = Overloaded(f"this {self._who} has no room for all connections; one was closed")
        connections = Connections(lambda address: self._refusals.error(address, full))
        self.serving = UvicornServer(self._app, tls, CLOSE_TIMEOUT_S, connections)
        await self.serving.open(sock)

    def hurry(self) -> None:
        """Cut downloads soon."""
        self.idle.set()
        if self.serving is not None:
            self.serving.hurry(HURRIED_CLOSE_S)

    async def close(self) -> None:
        if self.serving is not None:
            await self.serving.close()

    def _guarded(self, handler: Handler) -> Handler:
        async def endpoint(request: Request) -> Response:
            if self._under_way >= REQUESTS_MAX:
                busy = Overloaded(f"this {self._who} is busy with {self._under_way} requests; try again")
                self._refusals.error(peer_of(request), busy)
                return refusal_answer(busy)
            self._under_way += 1
            self.idle.clear()
            try:
                with log_context(request.path_params.get("job_id", "")):
                    answer, code = await self._answer(handler, request)
            finally:
                self._under_way -= 1
                if not self._under_way:
                    self.idle.set()
            self._on_answer(request.method, answer, code)
            may_be_early = request.method in ("POST", "PUT") and (code is not None or self._results_end_uploads)
            return EarlyResponse(answer) if may_be_early and not body_was_read(request) else answer

        return endpoint

    async def _answer(self, handler: Handler, request: Request) -> tuple[Response, str | None]:
        """Return the response of a handler, or the refusal for its error, with its code."""
        try:
            check_site(request, self._host_names, loopback=self._loopback)
            if self.tokens and not self.tokens.admit(secret_of(request)):
                raise Unauthorized(f"this token is not one of this {self._who}'s")
            if self.tokens and request.client is not None:
                http_answers.note_token(request, request.client.host)  # many hosts may have the same token
            return await handler(request), None
        except TasukiError as error:
            return self._refusal(request, error)
        except Exception:
            self._logger.exception("%s %s failed", request.method, request.url.path[:200])
            return self._refusal(request, InternalError(""))

    def _refusal(self, request: Request, error: TasukiError) -> tuple[Response, str]:
        peer, job_id = peer_of(request), str(request.path_params.get("job_id", ""))
        if isinstance(error, AgentRefusal) and error.status in LOGGED_STATUSES and request.method != "GET":
            self._refusals.write(peer, error.code, error.message, job_id)
        else:
            self._refusals.error(peer, error, job_id)
        shown = error if isinstance(error, AgentRefusal) else discreet(error)
        if shown is not error and error.message:
            self._logger.warning("%s %s: %s", request.method, request.url.path[:200], error.message)
        return refusal_answer(shown), code_of(shown)


def body_was_read(request: Request) -> bool:
    """Return whether the body was read, or is so small that the connection may stay open."""
    if request._stream_consumed or request.scope.get(BODY_READ):  # there is no public attribute
        return True
    length = request.headers.get("content-length", "0")
    small = length.isdecimal() and len(length) < 8 and int(length) <= DRAINED_BODY_BYTES
    return small and "transfer-encoding" not in request.headers


# ------------------------------------------------------------------------------------------------ the log context

_job_id: contextvars.ContextVar[str] = contextvars.ContextVar("job_id", default="")


@contextlib.contextmanager
def log_context(job_id: str) -> Iterator[None]:
    """Log everything inside, of this task and of those that it starts, with this job_id."""
    token = _job_id.set(job_id)
    try:
        yield
    finally:
        _job_id.reset(token)


class WithContext(logging.Filter):
    """Filter that gives each log record its `job_id`, empty if it is about no job, and the `node` that wrote it."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def filter(self, record: logging.LogRecord) -> bool:
        record.job_id, record.node = getattr(record, "job_id", "") or _job_id.get(), self._node
        return True
