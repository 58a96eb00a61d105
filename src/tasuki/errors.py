"""All errors that tasuki raises on purpose, in one tree; each has one stable code, the same on every door.

    TasukiError                  ERROR               a code of a newer peer becomes this one
    ├── InvalidInput             INVALID             the request can never work as it is
    │   ├── TooLarge             TOO_LARGE           a size limit was exceeded
    │   ├── UnsupportedEncoding  UNSUPPORTED_ENCODING * a body that is compressed in another way than gzip or zstd
    │   ├── BlobMismatch         CORRUPT           * an upload whose size or sha256 is not the announced one
    │   ├── WrongType            INVALID             an argument of the wrong type (also a TypeError)
    │   ├── RefusedRequest       (given)             a request that cannot be read
    │   └── ProtocolError        PROTOCOL            bytes that are not the protocol
    │       ├── UnknownFrame     UNKNOWN_FRAME       a frame type that this side does not know
    │       └── VersionMismatch  VERSION             no common protocol version
    ├── Unauthorized             UNAUTHORIZED        no token, or one that is not valid
    ├── Forbidden                FORBIDDEN           a valid token that may not do this
    │   └── TokenRevoked         TOKEN_REVOKED     * a token that was valid once
    ├── NotFound                 NOT_FOUND           no job, blob or token of that name
    │   └── UnknownSession                           no worker session of that name at this server
    ├── BlobUnavailable          BLOB_UNAVAILABLE    the bytes of a blob are not at this server
    ├── Conflict                 CONFLICT            the same job_id with another body
    ├── CacheConflict            CACHE_CONFLICT      a file of a cache with other bytes; what is there stays
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
    ├── DeadlineExceeded         DEADLINE            the caller's own time ran out (also a TimeoutError)
    └── AgentRefusal             (given)           * the answer of a node agent or dispatcher that is no result
        └── RegistryUnavailable                      the registry of agents or dispatchers does not answer

A class without a code has its parent's. A star marks codes that only HTTP answers and job outcomes carry: an Error frame
never does, and `from_wire` never returns such a class. `retryable` says if the same request may be sent again. Messages name
the value and what to do, and never contain tokens or environment values.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

QUOTED_MAX_CHARS = 40
BY_CODE: dict[str, type[TasukiError]] = {}
"""The class of each code that an Error frame carries."""


class TasukiError(Exception):
    """Base of all errors that tasuki raises on purpose. `details` are facts for programs, sent beside code and message."""

    code: str = "ERROR"
    retryable: ClassVar[bool] = False

    def __init_subclass__(cls, code: str = "", on_wire: bool = True) -> None:
        """Set the code of a class; without `on_wire` no Error frame carries it."""
        if code:
            cls.code = code
            if on_wire:
                BY_CODE[code] = cls

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self._details = details

    def details(self) -> dict[str, Any]:
        """Return the facts that every door sends beside code and message."""
        return self._details


BY_CODE[TasukiError.code] = TasukiError


class InvalidInput(TasukiError, code="INVALID"):
    """The request can never work as it is."""


class WrongType(InvalidInput, TypeError):
    """An argument of a call has the wrong type. Nothing was sent."""


class TooLarge(InvalidInput, code="TOO_LARGE"):
    """A size limit was exceeded."""


class UnsupportedEncoding(InvalidInput, code="UNSUPPORTED_ENCODING", on_wire=False):
    """A body over HTTP with a Content-Encoding that its route does not take."""


class BlobMismatch(InvalidInput, code="CORRUPT", on_wire=False):
    """An upload over HTTP whose size or sha256 is not the announced one."""


class ProtocolError(InvalidInput, code="PROTOCOL"):
    """Bytes that are not the protocol."""


class UnknownFrame(ProtocolError, code="UNKNOWN_FRAME"):
    """A frame type that this side does not know. Its sender expects an answer to `msg_id`; 0: it expects none."""

    def __init__(self, message: str, msg_id: int = 0) -> None:
        super().__init__(message)
        self.msg_id = msg_id


class RefusedRequest(InvalidInput):
    """A request that cannot be read. Its sender expects an answer to `msg_id`, and the connection continues."""

    def __init__(self, message: str, msg_id: int, code: str = InvalidInput.code) -> None:
        super().__init__(message)
        self.msg_id = msg_id
        self.code = code


class VersionMismatch(ProtocolError, code="VERSION"):
    """The two sides share no protocol version."""


class Unauthorized(TasukiError, code="UNAUTHORIZED"):
    """No token, or one that is not valid."""


class Forbidden(TasukiError, code="FORBIDDEN"):
    """A valid token that may not do this."""


class TokenRevoked(Forbidden, code="TOKEN_REVOKED", on_wire=False):
    """A token that was valid once."""


class NotFound(TasukiError, code="NOT_FOUND"):
    """There is no job, blob or token of that name."""


class UnknownSession(NotFound):
    """A worker session that this server does not know; another server may."""


class BlobUnavailable(TasukiError, code="BLOB_UNAVAILABLE"):
    """A blob that the store knows, whose bytes are not at this server's place; another server may have them."""


class Conflict(TasukiError, code="CONFLICT"):
    """A known job_id was submitted with another body; `differs` names the fields, never their contents.

    `owner` is (submitter, subject) of the job that was there first: a door tells only peers who may see that job what differs.
    """

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


class CacheConflict(TasukiError, code="CACHE_CONFLICT"):
    """A cache has another file of this name, or is for other workers. Nothing was changed."""


class ResultConflict(TasukiError, code="CONFLICT", on_wire=False):
    """The job has another result already."""


class OffsetConflict(TasukiError, code="CONFLICT", on_wire=False):
    """A part of a blob that does not begin where the server is; the detail `offset` says where that is."""


class Fenced(TasukiError, code="FENCED"):
    """The lease is no longer the current one. Final: never retry, never re-acquire and resend."""


class StaleEpoch(TasukiError, code="STALE_EPOCH"):
    """A newer leader is registered; the server that gets this error steps down."""


class InvalidTransition(TasukiError, code="TRANSITION"):
    """A state change that the transition table does not have."""


class OutOfTurn(TasukiError, code="OUT_OF_TURN", on_wire=False):
    """A request of a worker session that does not follow on what the server has."""


class Corrupt(TasukiError, code="CORRUPT"):
    """Bytes whose sha256 or size is not the announced one."""


class ConfigError(TasukiError, code="CONFIG"):
    """A setting that cannot work."""


class NotTasuki(ConfigError):
    """Something else than a tasuki server answers at the configured address."""


class JobFailed(TasukiError, code="JOB_FAILED"):
    """The job ended in another state than SUCCEEDED. `outcome` is its JobResult; None if only the message is known.

    The traceback of a handler, or the end of a command's stderr, is a note of the exception.
    """

    def __init__(self, message: str, outcome: Any = None) -> None:
        super().__init__(message)
        self.outcome = outcome


class NoResult(TasukiError, code="JOB_FAILED", on_wire=False):
    """The job ended without a result: it failed or was canceled."""


class NotFinished(TasukiError, code="NOT_FINISHED", on_wire=False):
    """The job has no result yet."""


class PreloadFailed(TasukiError, code="PRELOAD_FAILED", on_wire=False):
    """The preforked interpreter of an exec could not import its modules, or ended before it could fork."""


class InternalError(TasukiError, code="INTERNAL"):
    """A defect of tasuki itself. The same request would meet it again."""


class Unavailable(TasukiError, code="UNAVAILABLE"):
    """Not now: connection lost, server going down, store busy. The same request may be sent again."""

    retryable = True


class DiskFull(Unavailable, code="DISK_FULL"):
    """There is too little space to keep a promise; try again when there is more."""


class Overloaded(Unavailable, code="OVERLOADED"):
    """A bounded queue is full."""


class TooManyRequests(Overloaded, code="TOO_MANY_REQUESTS", on_wire=False):
    """One caller has too many requests open."""


class NoConnection(Unavailable):
    """The request was not sent: no server answers, or its certificate is not trusted."""


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
    """The turn was not stored, unless the connection broke during its commit: then `was_stored` finds out."""

    def __init__(self, message: str, why: InterruptCause, was_stored: Callable[[], bool] | None = None) -> None:
        super().__init__(message)
        self.why = why
        self.was_stored = was_stored


class DeadlineExceeded(TasukiError, TimeoutError, code="DEADLINE"):
    """The caller's own time ran out; the operation may still happen. Also a TimeoutError."""

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


class Retry(Exception):
    """Raised by a handler or a task: this attempt failed, and the next one begins `in_s` seconds later (None: as the job says).

    raise Retry("the service is busy", in_s=30)
    """

    def __init__(self, message: str = "", *, in_s: float | None = None) -> None:
        if in_s is not None and not 0 <= in_s < float("inf"):
            raise ValueError(f"in_s must be 0 or more seconds, got {in_s}")
        super().__init__(message or "another attempt is wanted")
        self.in_s = in_s


def quoted(value: str) -> str:
    """Return the value as an error message may show it: escaped, and never longer than 40 characters."""
    text = repr(value[:QUOTED_MAX_CHARS])  # cut before escaping: the value may be as long as a frame
    return text if len(text) <= QUOTED_MAX_CHARS else text[: QUOTED_MAX_CHARS - 1] + "…"


def from_wire(code: str, message: str, details: dict[str, Any] | None = None) -> TasukiError:
    """Return the error that a peer described; an unknown code (a newer peer) becomes a plain TasukiError that keeps the text."""
    details = details or {}
    kind = BY_CODE.get(code)
    if kind is Conflict:
        return Conflict(str(details.get("job_id", "?")), [str(field) for field in details.get("differs", ())])
    if kind is None:
        return TasukiError(f"{code}: {message}")
    return kind(message, **details) if kind in (NotFound, CacheConflict) else kind(message)


def unknown_job(job_id: str) -> NotFound:
    """Return the error for a job that does not exist, or that the asker may not see: nobody learns which of both."""
    return NotFound(f"there is no job {job_id[:128]!r}, or it is not yours")


def discreet(error: TasukiError) -> TasukiError:
    """Return the error without the words that could name a folder, a host or a database behind the server."""
    if isinstance(error, DiskFull):
        return DiskFull("there is too little space for this now; try again later")
    if isinstance(error, Unavailable) and not isinstance(error, Overloaded):
        return Unavailable("the server cannot do this now, because its store does not answer; try again")
    if isinstance(error, InternalError):
        return InternalError("this failed inside the server; please report it: the server's log has the rest")
    return error
