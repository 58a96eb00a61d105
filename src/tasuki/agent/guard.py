"""How agents and dispatchers answer a request, whatever becomes of it: no token, no entry; and no error gets out as it is."""

from __future__ import annotations

import logging
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from tasuki.agent import refusals
from tasuki.agent.settings import Tokens
from tasuki.doors.http.exchange import discreet, secret_of
from tasuki.doors.http.uvicorn_server import Handler
from tasuki.errors import AgentRefusal, InternalError, TasukiError, Unauthorized

DRAINED_BODY_BYTES = 1024 * 1024
"""A body that nobody wanted, up to this, is read by uvicorn, and the connection stays."""
BODY_OVER = "tasuki.body_over"
"""In a request's scope: its body was read to the end, though not through the request."""


class GuardedResponse(NamedTuple):
    """An answer; the code of a refusal."""

    response: Response
    code: str | None = None


async def surely_answered(
    handler: Handler, request: Request, tokens: Tokens, who: str, logger: logging.Logger
) -> GuardedResponse:
    """`who` asks for the token, in words."""
    try:
        if tokens and not tokens.admit(secret_of(request)):
            raise Unauthorized(f"this token is not one of this {who}'s")
        return GuardedResponse(await handler(request))
    except TasukiError as error:
        told = error if isinstance(error, AgentRefusal) else discreet(error)
        if told is not error:
            logger.warning("%s %s: %s", request.method, request.url.path[:200], error.message)
    except Exception:
        logger.exception("%s %s failed", request.method, request.url.path[:200])
        told = discreet(InternalError(""))
    return GuardedResponse(refusals.refusal_answer(told), refusals.code_of(told))


def is_over(request: Request) -> bool:
    """Whether the body was read, or is so small that the connection may stay open for the rest of it."""
    if request._stream_consumed or request.scope.get(BODY_OVER):  # nothing else tells
        return True
    length = request.headers.get("content-length", "0")
    small = length.isdecimal() and len(length) < 8 and int(length) <= DRAINED_BODY_BYTES
    return small and "transfer-encoding" not in request.headers
