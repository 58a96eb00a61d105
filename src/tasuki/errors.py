"""Every error that tasuki raises on purpose, in one tree, each with one stable code that is the same on every door.

    TasukiError
    ├── InvalidInput        INVALID            the request can never work as it is
    │   ├── TooLarge        TOO_LARGE          a size limit was passed
    │   └── ProtocolError   PROTOCOL           bytes that are not the protocol
    │       ├── UnknownFrame    UNKNOWN_FRAME      a frame type this side does not know
    │       └── VersionMismatch VERSION            no common protocol version
    ├── Unauthorized        UNAUTHORIZED       no token, or one that is not valid
    ├── Forbidden           FORBIDDEN          a valid token that may not do this
    ├── NotFound            NOT_FOUND          no job, blob or token of that name
    ├── Conflict            CONFLICT           the same id with another body
    ├── Fenced              FENCED             the lease is no longer the current one; final
    ├── StaleEpoch          STALE_EPOCH        a newer leader is registered; step down
    ├── InvalidTransition   TRANSITION         a state change that the table does not have
    ├── Corrupt             CORRUPT            bytes whose sha256 or size is not the announced one
    ├── ConfigError         CONFIG             a setting that cannot work
    ├── JobFailed           JOB_FAILED         the job ended in another state than SUCCEEDED
    ├── Unavailable         UNAVAILABLE        try again: connection lost, server going down, store busy
    │   ├── DiskFull        DISK_FULL          try again when there is space
    │   └── Overloaded      OVERLOADED         a bounded queue is full
    ├── InternalError       INTERNAL           a defect of ours; saying it again would be no better
    └── DeadlineExceeded    DEADLINE           the caller's own time ran out; the operation may still happen

Whether a caller may simply try again is the type's business (`retryable`). Messages name the value and the way out,
and never contain tokens or environment values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class TasukiError(Exception):
    """Base of all errors that tasuki raises on purpose."""

    code: ClassVar[str] = "ERROR"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def details(self) -> dict[str, Any]:
        """What else a program may want to know; sent beside code and message on every door."""
        return {}


class InvalidInput(TasukiError):
    """The request can never work as it is."""

    code = "INVALID"


class TooLarge(InvalidInput):
    """A size limit was passed."""

    code = "TOO_LARGE"


class ProtocolError(InvalidInput):
    """Bytes that are not the protocol."""

    code = "PROTOCOL"


class UnknownFrame(ProtocolError):
    """A frame type that this side does not know. `msg_id` is what its sender expects an answer to; 0: it expects none."""

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


class NotFound(TasukiError):
    """There is no job, blob or token of that name."""

    code = "NOT_FOUND"


class Conflict(TasukiError):
    """The same job_id was submitted with another body; `differs` names the fields, never their contents.

    `owner` is (submitter, subject) of the job that was there first: a door tells only those who may see it what differs.
    """

    code = "CONFLICT"

    def __init__(self, job_id: str, differs: Sequence[str], owner: tuple[str, str] | None = None) -> None:
        fields = ", ".join(differs)
        super().__init__(
            f"job {job_id!r} exists with another body (differs in: {fields}); "
            "use a new job_id, or send exactly the same job to get its result"
        )
        self.job_id = job_id
        self.differs = tuple(differs)
        self.owner = owner

    def details(self) -> dict[str, Any]:
        return {"job_id": self.job_id, "differs": list(self.differs)}


class Fenced(TasukiError):
    """The lease is no longer the current one. Final: never retry, never re-acquire and resend."""

    code = "FENCED"


class StaleEpoch(TasukiError):
    """A newer leader is registered; whoever gets this steps down."""

    code = "STALE_EPOCH"


class InvalidTransition(TasukiError):
    """A state change that the transition table does not have."""

    code = "TRANSITION"


class Corrupt(TasukiError):
    """Bytes whose sha256 or size is not the announced one."""

    code = "CORRUPT"


class ConfigError(TasukiError):
    """A setting that cannot work."""

    code = "CONFIG"


class JobFailed(TasukiError):
    """The job ended in another state than SUCCEEDED. `outcome` is the wire's description of how."""

    code = "JOB_FAILED"

    def __init__(self, message: str, outcome: Any = None) -> None:
        super().__init__(message)
        self.outcome = outcome


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


class DeadlineExceeded(TasukiError):
    """The caller's own time ran out; the operation may still happen."""

    code = "DEADLINE"
    retryable = True


def discreet(error: TasukiError) -> TasukiError:
    """The same for peers who are not to know what is behind the server: the words may name a folder, a host, a database."""
    if isinstance(error, DiskFull):
        return DiskFull("there is too little space for this now; try again later")
    if isinstance(error, Unavailable) and not isinstance(error, Overloaded):
        return Unavailable("the server cannot do this now, because its store does not answer; try again")
    if isinstance(error, InternalError):
        return InternalError("this failed inside the server; please report it: the server's log has the rest")
    return error


def _tree(root: type[TasukiError]) -> dict[str, type[TasukiError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE: dict[str, type[TasukiError]] = _tree(TasukiError)


def from_wire(code: str, message: str, details: dict[str, Any] | None = None) -> TasukiError:
    """The error that a peer described; an unknown code (a newer peer) becomes a plain TasukiError that keeps the text."""
    details = details or {}
    kind = BY_CODE.get(code)
    if kind is Conflict:
        return Conflict(str(details.get("job_id", "?")), [str(field) for field in details.get("differs", ())])
    if kind is None:
        return TasukiError(f"{code}: {message}")
    return kind(message)
