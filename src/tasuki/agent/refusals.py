"""Answers of agents and dispatchers to requests that fail: refusals with a status, the guard of every request, the log context.

The refusals are the table of the contract (docs/operate/agents.md). The guard admits only requests with a token, and lets no
error out as it is. The log context puts `job_id` into every line that is logged for a job, also in threads.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import hmac
import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from tasuki.core.failover import agent_protocol
from tasuki.doors.http import exchange as http_answers
from tasuki.doors.http.exchange import discreet, envelope, error_answer, json_answer, secret_of
from tasuki.doors.http.uvicorn_server import Handler
from tasuki.errors import AgentRefusal, InternalError, NotFound, RegistryUnavailable, TasukiError, Unauthorized

RETRY_AFTER_S = 1
LOCKED = 423


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


def has_no_folder() -> AgentRefusal:
    message = "the data folder of this agent cannot be used any more; put it in order, and start the agent again"
    return AgentRefusal(503, "UNAVAILABLE", message, retry=True)


def other_input(job_id: str) -> AgentRefusal:
    message = f"job {job_id} exists with another input; use a new job_id, or send exactly the same files, exec and args"
    return AgentRefusal(409, "CONFLICT", message, job_id=job_id)


def was_canceled(job_id: str) -> AgentRefusal:
    return AgentRefusal(409, agent_protocol.CANCELED, f"job {job_id} was removed meanwhile", job_id=job_id)


def still_stopping(job_id: str, node: str) -> AgentRefusal:
    message = f"job {job_id} is being stopped at {node}, and has not ended yet; ask again later"
    return AgentRefusal(503, "UNAVAILABLE", message, retry=True, job_id=job_id, node=node)


def claim_lost(job_id: str) -> AgentRefusal:
    message = f"job {job_id} was stopped here, because this node could not renew its claim to it; ask again"
    return AgentRefusal(503, "UNAVAILABLE", message, retry=True, job_id=job_id)


def registry_away() -> RegistryUnavailable:
    message = "the registry of this agent does not answer; jobs that run go on, new ones are not taken: try again later"
    return RegistryUnavailable(503, "UNAVAILABLE", message, retry=True)


def result_away(job_id: str, node: str, why: TasukiError) -> AgentRefusal:
    if isinstance(why, NotFound):
        return AgentRefusal(404, NotFound.code, f"the result of job {job_id} is not kept any more; send the job again to run it")
    message = f"the result of job {job_id} is at {node}, which cannot be asked now; try again later"
    return AgentRefusal(503, "UNAVAILABLE", message, retry=True, job_id=job_id, node=node)


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


class GuardedResponse(NamedTuple):
    """Response, and the code if it is a refusal."""

    response: Response
    code: str | None = None


async def guarded(handler: Handler, request: Request, tokens: Tokens, who: str, logger: logging.Logger) -> GuardedResponse:
    """Return the response of a handler, or the refusal for its error. `who`: the process, in words."""
    try:
        if tokens and not tokens.admit(secret_of(request)):
            raise Unauthorized(f"this token is not one of this {who}'s")
        return GuardedResponse(await handler(request))
    except TasukiError as error:
        shown = error if isinstance(error, AgentRefusal) else discreet(error)
        if shown is not error:
            logger.warning("%s %s: %s", request.method, request.url.path[:200], error.message)
    except Exception:
        logger.exception("%s %s failed", request.method, request.url.path[:200])
        shown = discreet(InternalError(""))
    return GuardedResponse(refusal_answer(shown), code_of(shown))


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


class WithJobId(logging.Filter):
    """Filter that gives each log record its `job_id`; empty if it is about no job."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.job_id = _job_id.get()
        return True
