"""What the plan of one job over several nodes hears, says and remembers. Data only; `failover.py` decides."""

from __future__ import annotations

from enum import Enum

import msgspec

from tasuki.core.failover.agent_protocol import TIMEOUT_S
from tasuki.errors import Conflict, Forbidden, InvalidInput, JobFailed, TasukiError, TooLarge, Unauthorized, Unavailable

LONGER_THAN_THE_JOB_S = 60.0  # so that a node that stops a job at its limit can still say so, and another one be tried
LIMIT_S = TIMEOUT_S + LONGER_THAN_THE_JOB_S
PATIENCE_S = 5.0
SILENT_S = 10.0
FOLLOW_FIRST_S = 0.1  # between two questions to a node that somebody else's request runs at
FINAL_STATUSES = frozenset({400, 409})
NOT_TRUSTED = "NOT_TRUSTED"
NOT_HERE_CODES = frozenset(
    {"EXEC_NOT_ALLOWED", "PROGRAM_NOT_FOUND", "PROGRAM_NOT_STARTED", "SECRET_MISSING", "DISK_FULL", NOT_TRUSTED}
)
"""What only this node lacks, for this job: the exec, its program, the room, our trust."""
TOKEN_STATUSES = frozenset({401, 403})
WAY_IN = "give one of its tokens with --token-file or TASUKI_TOKEN"


class FailoverJob(msgspec.Struct, frozen=True):
    """What is to be run, as far as the plan must know."""

    job_id: str
    input: str = ""
    """The input hash; empty: not known."""
    known: bool = False
    """The id was chosen by the caller: a node may have the job already."""
    limit_s: float = LIMIT_S
    hedge_s: float | None = None
    patience_s: float = PATIENCE_S
    silent_s: float = SILENT_S


class JobStatus(msgspec.Struct, frozen=True):
    """What `GET /jobs/{job_id}` says; only what the plan needs of it."""

    state: str
    """queued (at a dispatcher, for a node), running, done, failed, timed_out or interrupted"""
    input: str = ""
    exit_code: int | None = None


class Refusal(msgspec.Struct, frozen=True):
    """An answer that is not the result."""

    status: int
    """0: it was not asked, as we do not trust its certificate."""
    code: str = ""
    """Empty: it was not a node that answered, but something before it."""
    message: str = ""
    retry_after_s: float | None = None
    exit_code: int | None = None
    error_code: str | None = None
    differs: tuple[str, ...] = ()

    def words(self) -> str:
        """For people."""
        if not self.status:
            return self.message
        return f"answered {self.status} {self.code}".rstrip() + (f": {self.message}" if self.message else "")


def not_trusted(message: str) -> Refusal:
    """A node whose certificate we do not trust. That is no failure of it: the CA may be missing here."""
    return Refusal(0, NOT_TRUSTED, message)


class RefusalMeaning(Enum):
    """What a refusal means for the plan."""

    RUNNING = "the job runs there"
    FULL = "no place now; not a failure"
    TIMED_OUT = "an outcome; another node may be quicker"
    PROGRAM_FAILED = "an outcome, and final"
    CANCELED = "somebody removed it; another node may have the result"
    NOT_HERE = "it cannot run this job, and is well; another one may"
    FINAL = "no node would answer otherwise"
    FAILED = "no outcome; the next node"


def meaning_of(refusal: Refusal) -> RefusalMeaning:
    """By status and code; an answer without a code is no node's own, so that only its status counts."""
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
            return RefusalMeaning.NOT_HERE  # limits and tokens, too, differ from node to node
        case status, code if code and status in FINAL_STATUSES:
            return RefusalMeaning.FINAL
        case _:
            return RefusalMeaning.FAILED


def error_of(refusal: Refusal, job_id: str, message: str) -> TasukiError:
    """A refusal as the error that the caller gets."""
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
    """What a node said. Words of the transport name the address themselves; a redirect's name where it leads."""
    return words if node in words and not words.startswith("answered ") else f"{node}: {words}"


class JobEnded(msgspec.Struct, frozen=True):
    """How the job ended."""

    outcome: str
    """succeeded, failed or timed_out"""
    exit_code: int | None = None
    error_code: str | None = None
    message: str = ""


# ---------------------------------------------------------------------------------------------------- events


class Begin(msgspec.Struct, frozen=True):
    """Find a node for the job."""


class JobStatusReceived(msgspec.Struct, frozen=True):
    """A node answered how the job stands; None: it does not know it."""

    ticket: int
    status: JobStatus | None


class JobStatusMissing(msgspec.Struct, frozen=True):
    """A node did not say how the job stands. `gone`: nobody is there. `alive`: it answered that it cannot say now."""

    ticket: int
    reason: str
    gone: bool = False
    alive: bool = False


class Redirected(msgspec.Struct, frozen=True):
    """The node is a dispatcher, and leads to another one, which is asked now; what comes of that is not its doing."""

    ticket: int
    to: str


class Uploaded(msgspec.Struct, frozen=True):
    """The node has all of the input."""

    ticket: int


class ResultPieceReceived(msgspec.Struct, frozen=True):
    """A piece of the result came."""

    ticket: int


class Saved(msgspec.Struct, frozen=True):
    """The result is here, whole and verified."""

    ticket: int
    ended: JobEnded


class Refused(msgspec.Struct, frozen=True):
    """The node answered something else than the result."""

    ticket: int
    refusal: Refusal


class RequestLost(msgspec.Struct, frozen=True):
    """The request ended without an answer."""

    ticket: int
    reason: str


class TimePassed(msgspec.Struct, frozen=True):
    """Time has passed, or a node was looked at."""


Event = (
    Begin
    | JobStatusReceived
    | JobStatusMissing
    | Redirected
    | Uploaded
    | ResultPieceReceived
    | Saved
    | Refused
    | RequestLost
    | TimePassed
)


# ---------------------------------------------------------------------------------------------------- commands


class CheckNode(msgspec.Struct, frozen=True):
    """Ask this node for its health and capacity, and tell `Nodes`; then say Ticked."""

    node: str


class Ask(msgspec.Struct, frozen=True):
    """Ask this node how the job stands: Told or Untold."""

    ticket: int
    node: str


class Post(msgspec.Struct, frozen=True):
    """Send the job there, and save its result: Uploaded, Heard, then one of Saved, Refused, Lost."""

    ticket: int
    node: str


class Fetch(msgspec.Struct, frozen=True):
    """Save the result that is there: Heard, then one of Saved, Refused, Lost."""

    ticket: int
    node: str


class Drop(msgspec.Struct, frozen=True):
    """End the request of this ticket; nothing more is to be heard of it."""

    ticket: int


class Remove(msgspec.Struct, frozen=True):
    """Cancel the job there if it runs; nobody waits for the answer."""

    node: str


class Notify(msgspec.Struct, frozen=True):
    """A word about what goes on, for people and logs."""

    text: str


class Finish(msgspec.Struct, frozen=True):
    """The job has ended. `ticket` is the one that saved the result; None: there is none to be had."""

    node: str
    ended: JobEnded
    ticket: int | None = None


class GiveUp(msgspec.Struct, frozen=True):
    """No node gives a result."""

    error: TasukiError


Command = CheckNode | Ask | Post | Fetch | Drop | Remove | Notify | Finish | GiveUp


# ---------------------------------------------------------------------------------------------------- what is under way


class RequestKind(Enum):
    """What is wanted of a node."""

    POST = "posted"
    FOLLOW = "followed"
    FETCH = "fetched"


class NodeRequest(msgspec.Struct):
    """What is under way at one node. The plan's own record."""

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
    """The result is coming."""
    odd: int = 0
    ended: JobEnded | None = None
    """Of a fetch: how the job ended, if that is known without the result."""
    led_to: str = ""
    """The node that a dispatcher sent us to."""

    @property
    def where(self) -> str:
        """Who answers, or does not."""
        return self.led_to or self.node
