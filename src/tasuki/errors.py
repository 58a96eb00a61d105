"""All errors that tasuki raises on purpose, in one tree; each has one stable code, the same on every door.

    TasukiError                  ERROR               a code of a newer peer becomes this one
    ├── InvalidInput             INVALID             the request can never work as it is
    │   ├── TooLarge             TOO_LARGE           a size limit was exceeded
    │   ├── BlobMismatch         CORRUPT           * an upload whose size or sha256 is not the announced one
    │   └── ProtocolError        PROTOCOL            bytes that are not the protocol
    │       ├── UnknownFrame     UNKNOWN_FRAME       a frame type that this side does not know
    │       └── VersionMismatch  VERSION             no common protocol version
    ├── Unauthorized             UNAUTHORIZED        no token, or one that is not valid
    ├── Forbidden                FORBIDDEN           a valid token that may not do this
    │   └── TokenRevoked         TOKEN_REVOKED     * a token that was valid once
    ├── NotFound                 NOT_FOUND           no job, blob or token of that name
    │   └── UnknownSession                           no worker session of that name at this server
    ├── Conflict                 CONFLICT            the same job_id with another body
    ├── ResultConflict           CONFLICT          * the job has another result already
    ├── OffsetConflict           CONFLICT          * a part of a blob that does not begin where the server is
    ├── Fenced                   FENCED              the lease is no longer the current one; final
    ├── StaleEpoch               STALE_EPOCH         a newer leader is registered; step down
    ├── InvalidTransition        TRANSITION          a state change that the table does not have
    ├── OutOfTurn                OUT_OF_TURN       * a request that does not continue its worker session
    ├── Corrupt                  CORRUPT             bytes whose sha256 or size is not the announced one
    ├── ConfigError              CONFIG              a setting that cannot work
    │   └── NotTasuki                                something else answers at the configured address
    ├── JobFailed                JOB_FAILED          the job ended in another state than SUCCEEDED
    ├── NoResult                 JOB_FAILED        * the job ended without a result
    ├── NotFinished              NOT_FINISHED      * the job has no result yet
    ├── PreloadFailed            PRELOAD_FAILED    * a preforked interpreter could not be prepared
    ├── Unavailable              UNAVAILABLE         try again: connection lost, server going down, store busy
    │   ├── DiskFull             DISK_FULL           try again when there is space
    │   ├── Overloaded           OVERLOADED          a bounded queue is full
    │   │   └── TooManyRequests  TOO_MANY_REQUESTS * one caller has too many requests open
    │   ├── NoConnection                             nothing was sent
    │   │   └── UntrustedCertificate                 the peer's certificate is not trusted
    │   ├── ResponseLost                             the request may have been carried out
    │   ├── UploadCutOff                             an upload that ended before it was complete
    │   ├── KeeperLost                               the worker's keeper process is gone
    │   └── TurnInterrupted                          a store turn was interrupted
    ├── InternalError            INTERNAL            a defect of tasuki; the same request would fail again
    ├── DeadlineExceeded         DEADLINE            the caller's own time ran out; the operation may still happen
    └── AgentRefusal             (given)           * the answer of a node agent or dispatcher that is no result
        └── RegistryUnavailable                      the registry of agents or dispatchers does not answer

A class without a code has its parent's. A star marks codes that only HTTP answers and job outcomes carry: an Error frame
never does, and `from_wire` never returns such a class. `retryable` says if the same request may be sent again. Messages name
the value and what to do, and never contain tokens or environment values.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar


class TasukiError(Exception):
    """Base of all errors that tasuki raises on purpose. `details` are facts for programs, sent beside code and message."""

    code: str = "ERROR"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self._details = details

    def details(self) -> dict[str, Any]:
        """Return the facts that every door sends beside code and message."""
        return self._details


class InvalidInput(TasukiError):
    """The request can never work as it is."""

    code = "INVALID"


class TooLarge(InvalidInput):
    """A size limit was exceeded."""

    code = "TOO_LARGE"


class BlobMismatch(InvalidInput):
    """An upload over HTTP whose size or sha256 is not the announced one."""

    code = "CORRUPT"


class ProtocolError(InvalidInput):
    """Bytes that are not the protocol."""

    code = "PROTOCOL"


class UnknownFrame(ProtocolError):
    """A frame type that this side does not know. Its sender expects an answer to `msg_id`; 0: it expects none."""

    code = "UNKNOWN_FRAME"

    def __init__(self, message: str, msg_id: int = 0) -> None:
        super().__init__(message)
        self.msg_id = msg_id


class VersionMismatch(ProtocolError):
    """The two sides share no protocol version."""

    code = "VERSION"


class Unauthorized(TasukiError):
    """No token, or one that is not valid."""

    code = "UNAUTHORIZED"


class Forbidden(TasukiError):
    """A valid token that may not do this."""

    code = "FORBIDDEN"


class TokenRevoked(Forbidden):
    """A token that was valid once."""

    code = "TOKEN_REVOKED"


class NotFound(TasukiError):
    """There is no job, blob or token of that name."""

    code = "NOT_FOUND"


class UnknownSession(NotFound):
    """A worker session that this server does not know; another server may."""


class Conflict(TasukiError):
    """The same job_id was submitted with another body; `differs` names the fields, never their contents.

    `owner` is (submitter, subject) of the job that was there first: a door tells only peers who may see that job what differs.
    """

    code = "CONFLICT"

    def __init__(self, job_id: str, differs: Sequence[str], owner: tuple[str, str] | None = None) -> None:
        fields = ", ".join(differs)
        super().__init__(
            f"job {job_id!r} exists with another body (differs in: {fields}); "
            "use a new job_id, or send exactly the same job to get its result",
            job_id=job_id,
            differs=list(differs),
        )
        self.job_id = job_id
        self.differs = tuple(differs)
        self.owner = owner


class ResultConflict(TasukiError):
    """The job has another result already."""

    code = "CONFLICT"


class OffsetConflict(TasukiError):
    """A part of a blob that does not begin where the server is; the detail `offset` says where that is."""

    code = "CONFLICT"


class Fenced(TasukiError):
    """The lease is no longer the current one. Final: never retry, never re-acquire and resend."""

    code = "FENCED"


class StaleEpoch(TasukiError):
    """A newer leader is registered; the server that gets this error steps down."""

    code = "STALE_EPOCH"


class InvalidTransition(TasukiError):
    """A state change that the transition table does not have."""

    code = "TRANSITION"


class OutOfTurn(TasukiError):
    """A request of a worker session that does not follow on what the server has."""

    code = "OUT_OF_TURN"


class Corrupt(TasukiError):
    """Bytes whose sha256 or size is not the announced one."""

    code = "CORRUPT"


class ConfigError(TasukiError):
    """A setting that cannot work."""

    code = "CONFIG"


class NotTasuki(ConfigError):
    """Something else than a tasuki server answers at the configured address."""


class JobFailed(TasukiError):
    """The job ended in another state than SUCCEEDED. `outcome` is the wire's description of the end."""

    code = "JOB_FAILED"

    def __init__(self, message: str, outcome: Any = None) -> None:
        super().__init__(message)
        self.outcome = outcome


class NoResult(TasukiError):
    """The job ended without a result: it failed or was canceled."""

    code = "JOB_FAILED"


class NotFinished(TasukiError):
    """The job has no result yet."""

    code = "NOT_FINISHED"


class PreloadFailed(TasukiError):
    """The preforked interpreter of an exec could not import its modules, or ended before it could fork."""

    code = "PRELOAD_FAILED"


class InternalError(TasukiError):
    """A defect of tasuki itself. The same request would meet it again."""

    code = "INTERNAL"


class Unavailable(TasukiError):
    """Not now: connection lost, server going down, store busy. The same request may be sent again."""

    code = "UNAVAILABLE"
    retryable = True


class DiskFull(Unavailable):
    """There is too little space to keep a promise; try again when there is more."""

    code = "DISK_FULL"


class Overloaded(Unavailable):
    """A bounded queue is full."""

    code = "OVERLOADED"


class TooManyRequests(Overloaded):
    """One caller has too many requests open."""

    code = "TOO_MANY_REQUESTS"


class NoConnection(Unavailable):
    """Nothing was sent: no server answers, or its certificate is not trusted."""


class UntrustedCertificate(NoConnection):
    """A server answers with a certificate that is not trusted; a setting of this side, such as --tls-ca, may be wrong."""


class ResponseLost(Unavailable):
    """The request may have been carried out: its answer did not come, or not whole."""


class UploadCutOff(Unavailable):
    """An upload ended before it was complete."""


class KeeperLost(Unavailable):
    """The keeper process is gone, and with it control of its attempts. The worker ends; its next start cleans up."""


class InterruptCause(enum.Enum):
    """Cause of an interrupted store turn."""

    CONFLICT = "conflict"
    """Another server's turn was in the way: a deadlock, a serialization failure."""
    CONNECTION = "connection"
    TIMEOUT = "timeout"


class TurnInterrupted(Unavailable):
    """Nothing of the turn was stored, unless the connection broke during its commit: then `was_stored` finds out."""

    def __init__(self, message: str, why: InterruptCause, was_stored: Callable[[], bool] | None = None) -> None:
        super().__init__(message)
        self.why = why
        self.was_stored = was_stored


class DeadlineExceeded(TasukiError):
    """The caller's own time ran out; the operation may still happen."""

    code = "DEADLINE"
    retryable = True


class AgentRefusal(TasukiError):
    """An answer of a node agent or dispatcher that is no result: an error code and the HTTP status that goes with it."""

    def __init__(self, status: int, code: str, message: str, *, retry: bool = False, **details: Any) -> None:
        super().__init__(message, **details)
        self.status = status
        self.code = code
        self.retry = retry


class RegistryUnavailable(AgentRefusal):
    """The registry that agents or dispatchers share does not answer."""


NOT_ON_WIRE: frozenset[type[TasukiError]] = frozenset(
    {
        BlobMismatch,
        TokenRevoked,
        ResultConflict,
        OffsetConflict,
        OutOfTurn,
        NoResult,
        NotFinished,
        PreloadFailed,
        TooManyRequests,
    }
)
"""Classes with a code of their own that an Error frame never carries."""


def _tree(root: type[TasukiError]) -> Iterator[type[TasukiError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


BY_CODE = {kind.code: kind for kind in _tree(TasukiError) if "code" in vars(kind) and kind not in NOT_ON_WIRE}
"""The class of each code that an Error frame carries."""


def from_wire(code: str, message: str, details: dict[str, Any] | None = None) -> TasukiError:
    """Return the error that a peer described; an unknown code (a newer peer) becomes a plain TasukiError that keeps the text."""
    details = details or {}
    kind = BY_CODE.get(code)
    if kind is Conflict:
        return Conflict(str(details.get("job_id", "?")), [str(field) for field in details.get("differs", ())])
    if kind is None:
        return TasukiError(f"{code}: {message}")
    return kind(message)


def discreet(error: TasukiError) -> TasukiError:
    """Return the error without the words that could name a folder, a host or a database behind the server."""
    if isinstance(error, DiskFull):
        return DiskFull("there is too little space for this now; try again later")
    if isinstance(error, Unavailable) and not isinstance(error, Overloaded):
        return Unavailable("the server cannot do this now, because its store does not answer; try again")
    if isinstance(error, InternalError):
        return InternalError("this failed inside the server; please report it: the server's log has the rest")
    return error
