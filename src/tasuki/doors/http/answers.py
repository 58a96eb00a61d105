"""What goes out: JSON, and for every error, the framework's own included, {"error": {"code", "message", "details"}}."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from tasuki import errors
from tasuki.errors import (
    Conflict,
    DeadlineExceeded,
    Fenced,
    Forbidden,
    InternalError,
    InvalidInput,
    NoResult,
    NotFinished,
    NotFound,
    OffsetConflict,
    OutOfTurn,
    ResultConflict,
    StaleEpoch,
    TasukiError,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnknownSession,
    from_wire,
)

JSON = "application/json"
RETRY_AFTER_S = 1


_STATUSES: tuple[tuple[type[TasukiError], int], ...] = (
    (TooLarge, 413),
    (InvalidInput, 400),
    (Unauthorized, 401),
    (Forbidden, 403),
    (NotFound, 404),
    (Conflict, 409),
    (Fenced, 409),
    (StaleEpoch, 503),
    (NotFinished, 409),
    (ResultConflict, 409),
    (OffsetConflict, 409),
    (OutOfTurn, 409),
    (NoResult, 409),
    (Unavailable, 503),
    (DeadlineExceeded, 503),
)
CODES = {400: "INVALID_PAYLOAD", 404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED", 413: "TOO_LARGE"}
"""Of answers that the framework makes."""


def status_of(error: TasukiError) -> int:
    if error.code == "TOO_MANY_REQUESTS":
        return 429
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def code_of(error: TasukiError) -> str:
    """The code that every door has for it, but for bad input, which the contract of the apps calls by another name."""
    return "INVALID_PAYLOAD" if error.code in ("INVALID", "PROTOCOL") else error.code


def json_answer(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, JSON)


def envelope(code: str, message: str, details: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "details": details or {}}}


def discreet(error: TasukiError) -> TasukiError:
    """What is wrong behind the server is told with the code alone: the words may name a folder, a host, a database."""
    if status_of(error) == 500:  # whatever it is, who asked can do nothing about it
        return from_wire(error.code, errors.discreet(InternalError("")).message)
    return errors.discreet(error)


def error_answer(error: TasukiError) -> Response:
    status = status_of(error)
    headers = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    elif status == 413:
        headers["Connection"] = "close"  # what it sends besides is not read
    elif isinstance(error, UnknownSession):
        headers["Connection"] = "close"  # a balancer may lead the next one to the server that has it
    elif status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return json_answer(envelope(code_of(error), error.message, error.details()), status, headers)
