"""Events, commands and records of the failover plan, and the meaning of refusals. Data only; `plan.py` decides."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from tasuki.core.failover.agent_protocol import TIMEOUT_S
from tasuki.errors import Conflict, Forbidden, InvalidInput, JobFailed, TasukiError, TooLarge, Unauthorized, Unavailable

LONGER_THAN_THE_JOB_S = 60.0  # a node that stops a job at its limit can still answer, and another one be tried
LIMIT_S = TIMEOUT_S + LONGER_THAN_THE_JOB_S
PATIENCE_S = 5.0
SILENT_S = 10.0
FOLLOW_FIRST_S = 0.1  # between two questions to a node that runs the job for another client's request
FINAL_STATUSES = frozenset({400, 409})
NOT_TRUSTED = "NOT_TRUSTED"
NOT_HERE_CODES = frozenset(
    {"EXEC_NOT_ALLOWED", "PROGRAM_NOT_FOUND", "PROGRAM_NOT_STARTED", "SECRET_MISSING", "DISK_FULL", NOT_TRUSTED}
)
"""Codes of refusals that concern this node and this job: the exec, its program, the space, the certificate."""
TOKEN_STATUSES = frozenset({401, 403})
WAY_IN = "give one of its tokens with --token-file or TASUKI_TOKEN"


class FailoverJob(msgspec.Struct, frozen=True):
    """Job of a plan."""

    job_id: str
    input: str = ""
    """Input hash; empty: not known."""
    known: bool = False
    """The id was chosen by the caller: a node may have the job already."""
    limit_s: float = LIMIT_S
    hedge_s: float | None = None
    patience_s: float = PATIENCE_S
    silent_s: float = SILENT_S


class NodeJobStatus(msgspec.Struct, frozen=True):
    """Status of a job at a node: the part of `GET /jobs/{job_id}` that a plan needs."""

    state: str
    """queued (at a dispatcher), running, done, failed, timed_out or interrupted"""
    input: str = ""
    exit_code: int | None = None


class Refusal(msgspec.Struct, frozen=True):
    """Response that is not the result."""

    status: int
    """HTTP status; 0: the node was not asked, as its certificate is not trusted."""
    code: str = ""
    """Error code; empty: not a node answered, but something before it."""
    message: str = ""
    retry_after_s: float | None = None
    exit_code: int | None = None
    error_code: str | None = None
    differs: tuple[str, ...] = ()

    def words(self) -> str:
        """Return the refusal as text."""
        if not self.status:
            return self.message
        return f"answered {self.status} {self.code}".rstrip() + (f": {self.message}" if self.message else "")


def not_trusted(message: str) -> Refusal:
    """Return the refusal of a node whose certificate is not trusted. That is no failure of it: the CA may be missing here."""
    return Refusal(0, NOT_TRUSTED, message)


class RefusalMeaning(Enum):
    """Meaning of a refusal for the plan."""

    RUNNING = "the job runs there"
    FULL = "no place now; not a failure"
    TIMED_OUT = "an outcome; another node may be quicker"
    PROGRAM_FAILED = "an outcome, and final"
    CANCELED = "it was removed; another node may have the result"
    NOT_HERE = "it cannot run this job, and is well; another one may"
    FINAL = "no node would answer otherwise"
    FAILED = "no outcome; the next node"


def meaning_of(refusal: Refusal) -> RefusalMeaning:
    """Return the meaning by status and code. A response without a code is not a node's own: only its status counts."""
    match refusal.status, refusal.code:
        case 423, _:
            return RefusalMeaning.RUNNING
        case (503, "FULL") | (429, _):
            return RefusalMeaning.FULL
        case 504, "TIMED_OUT":
            return RefusalMeaning.TIMED_OUT
        case 500, "PROGRAM_FAILED":
            return RefusalMeaning.PROGRAM_FAILED
        case 409, "CANCELED":
            return RefusalMeaning.CANCELED
        case status, code if status == 413 or code in NOT_HERE_CODES or (code and status in TOKEN_STATUSES):
            return RefusalMeaning.NOT_HERE  # limits and tokens differ from node to node as well
        case status, code if code and status in FINAL_STATUSES:
            return RefusalMeaning.FINAL
        case _:
            return RefusalMeaning.FAILED


def error_of(refusal: Refusal, job_id: str, message: str) -> TasukiError:
    """Return the error that the caller gets."""
    match refusal.status:
        case 409 if refusal.code == "CONFLICT":
            return Conflict(job_id, refusal.differs or ("input",))
        case 409 if refusal.code == "CANCELED":
            return JobFailed(f"job {job_id} was canceled: {message}")
        case 401:
            return Unauthorized(f"{message}; {WAY_IN}")
        case 403:
            return Forbidden(message)
        case 413:
            return TooLarge(message)
        case status if status >= 500 or not status:
            return Unavailable(message)
        case _:
            return InvalidInput(message)


def about(node: str, words: str) -> str:
    """Return the words of a node with its name, unless they name it already. A redirect names another node."""
    return words if node in words and not words.startswith("answered ") else f"{node}: {words}"


def answers_in_words(answers: Mapping[str, str]) -> str:
    """Return the answers of several nodes as text; nodes that answered the same stand together."""
    nodes_by_words: dict[str, list[str]] = {}
    for node, words in answers.items():
        nodes_by_words.setdefault(words, []).append(node)
    return "; ".join(about(", ".join(nodes), words) for words, nodes in nodes_by_words.items())


class JobEnded(msgspec.Struct, frozen=True):
    """End of a job."""

    outcome: str
    """succeeded, failed or timed_out"""
    exit_code: int | None = None
    error_code: str | None = None
    message: str = ""


# ---------------------------------------------------------------------------------------------------- events


class RequestMessage(msgspec.Struct, frozen=True):
    """Event or command of the request with this ticket."""

    ticket: int


class Begin(msgspec.Struct, frozen=True):
    """Find a node for the job."""


class JobStatusReceived(RequestMessage, frozen=True):
    """A node answered with the status of the job; None: it does not know the job."""

    status: NodeJobStatus | None


class JobStatusMissing(RequestMessage, frozen=True):
    """A node did not report the status. `gone`: no connection. `alive`: the node answered that it cannot say now."""

    reason: str
    gone: bool = False
    alive: bool = False


class Redirected(RequestMessage, frozen=True):
    """A dispatcher redirected the request to another node; the outcome there does not count against the dispatcher."""

    to: str


class Uploaded(RequestMessage, frozen=True):
    """The node has the whole input."""


class ResultPieceReceived(RequestMessage, frozen=True):
    """A piece of the result arrived."""


class Saved(RequestMessage, frozen=True):
    """The result is complete and verified."""

    ended: JobEnded


class Refused(RequestMessage, frozen=True):
    """The node answered with something else than the result."""

    refusal: Refusal


class RequestLost(RequestMessage, frozen=True):
    """The request ended without an answer."""

    reason: str


class TimePassed(msgspec.Struct, frozen=True):
    """Time has passed, or a node was checked."""


JobReport = JobStatusReceived | JobStatusMissing
RequestEvent = Redirected | Uploaded | ResultPieceReceived | Saved | Refused | RequestLost
Event = Begin | JobReport | RequestEvent | TimePassed


# ---------------------------------------------------------------------------------------------------- commands


class CheckNode(msgspec.Struct, frozen=True):
    """Ask a node for health and capacity, record that in `Nodes`, and apply TimePassed."""

    node: str


class NodeCommand(RequestMessage, frozen=True):
    """Command to make a request."""

    node: str


class Ask(NodeCommand, frozen=True):
    """Ask a node for the status of the job: JobStatusReceived or JobStatusMissing."""


class Post(NodeCommand, frozen=True):
    """Send the job to a node and save its result: Uploaded, ResultPieceReceived, then one of Saved, Refused, RequestLost."""


class Fetch(NodeCommand, frozen=True):
    """Save the result of a node: ResultPieceReceived, then one of Saved, Refused, RequestLost."""


class Drop(RequestMessage, frozen=True):
    """End the request of this ticket; it makes no more events."""


class Remove(msgspec.Struct, frozen=True):
    """Cancel the job at a node if it runs there, without waiting for the answer."""

    node: str


class Notify(msgspec.Struct, frozen=True):
    """Log a message, and show it to the user."""

    text: str


class Finish(msgspec.Struct, frozen=True):
    """The job has ended. `ticket` is the request that saved the result; None: no result can be had."""

    node: str
    ended: JobEnded
    ticket: int | None = None


class GiveUp(msgspec.Struct, frozen=True):
    """End without a result."""

    error: TasukiError


Command = CheckNode | Ask | Post | Fetch | Drop | Remove | Notify | Finish | GiveUp


# ---------------------------------------------------------------------------------------------------- what is under way


class RequestKind(Enum):
    """Kind of a request to a node."""

    POST = "posted"
    FOLLOW = "followed"
    FETCH = "fetched"


class NodeRequest(msgspec.Struct):
    """Request that is under way at one node."""

    ticket: int
    node: str
    kind: RequestKind
    began: float
    heard_at: float
    ask_at: float
    asking: bool = False
    poll_s: float = FOLLOW_FIRST_S
    uploaded: bool = False
    answering: bool = False
    """The result is arriving."""
    odd: int = 0
    ended: JobEnded | None = None
    """End of the job, if it is known before a fetch."""
    led_to: str = ""
    """Node to which a dispatcher redirected the request."""

    @property
    def where(self) -> str:
        """The node that answers."""
        return self.led_to or self.node
