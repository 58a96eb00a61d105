"""How much one peer may send, and how long it may take: bodies, headers, time, requests at once. And JSON in."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from typing import Any, TypeVar

import h11
import msgspec
from starlette.requests import ClientDisconnect, Request

from tasuki.doors.http.answers import envelope
from tasuki.doors.http.stalled_readers import StalledReaderProtocol
from tasuki.doors.listening import connections_max
from tasuki.errors import InvalidInput, Overloaded, TooLarge

BODY_MAX_BYTES = 16 * 1024 * 1024
BODIES_MAX_BYTES = 256 * 1024 * 1024  # of all requests at once
REFUSED_MAX_BYTES = 4 * BODY_MAX_BYTES  # what is larger is not read at all
DROP_TIMEOUT_S = 5.0
HEADERS_MAX_BYTES = 16 * 1024
HEADERS_TIMEOUT_S = 10.0
BODY_TIMEOUT_S = 30.0
KEEP_ALIVE_S = 65  # a worker that polls twice a minute keeps its connection
REQUESTS_MAX = 4096  # at once, those that wait included
WAIT_MAX_S = 60.0

T = TypeVar("T")
_LENGTHS = {b"content-length", b"transfer-encoding"}
_digits = re.compile(r"[0-9]{1,16}").fullmatch
_missing = re.compile(r"Object missing required field `([^`]+)`(?: - at `\$\.?(.*)`)?").fullmatch


class _Connection(h11.Connection):
    """h11's own, which takes no body with two lengths: two readers would not agree where it ends, and one request could be hidden
    in another one's body."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if type(event) is h11.Request and {name for name, _ in event.headers} >= _LENGTHS:
            raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding at once")
        return event


class LimitedProtocol(StalledReaderProtocol):
    """uvicorn's own, with a time limit for the first line and headers, and with our answer to what is no HTTP."""

    _impatience: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Connection(h11.SERVER, HEADERS_MAX_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > connections_max() // 2:  # the other half is for TCP
            transport.close()
            return
        self._impatience = self.loop.call_later(HEADERS_TIMEOUT_S, self._lose_patience)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._impatience is None and self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._impatience = self.loop.call_later(HEADERS_TIMEOUT_S, self._lose_patience)
        elif self._impatience is not None and self.conn.their_state is not h11.IDLE:
            self._impatience.cancel()
            self._impatience = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._impatience is not None:
            self._impatience.cancel()
        super().connection_lost(exc)

    def _lose_patience(self) -> None:
        self._impatience = None
        if self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        body = msgspec.json.encode(envelope("INVALID_PAYLOAD", "this is not a valid HTTP request, or its headers are too large"))
        headers = [(b"content-type", b"application/json"), (b"connection", b"close"), (b"content-length", b"%d" % len(body))]
        try:
            output = self.conn.send(h11.Response(status_code=400, headers=headers, reason=b"Bad Request"))
            self.transport.write(output or b"")
            self.transport.write(self.conn.send(h11.Data(data=body)) or b"")
            self.transport.write(self.conn.send(h11.EndOfMessage()) or b"")
        except h11.LocalProtocolError:  # it was answering already: there is no place for another answer
            logging.getLogger("tasuki.http").debug("a broken request came behind another one")
        self.transport.close()


class BodyBudget:
    """How much all bodies that are being worked on may take together."""

    def __init__(self, max_bytes: int = BODIES_MAX_BYTES) -> None:
        self._free_bytes = max_bytes

    def share(self) -> BodyAllowance:
        """`with intake.share() as share:` for one request; it is given back at its end."""
        return BodyAllowance(self)

    def take(self, size: int) -> None:
        if size > self._free_bytes:
            raise Overloaded("too many large requests at once; try again")
        self._free_bytes -= size

    def give_back(self, size: int) -> None:
        self._free_bytes += size


class BodyAllowance:
    """What one request has of the intake."""

    def __init__(self, intake: BodyBudget) -> None:
        self._intake = intake
        self._size = 0

    def take(self, size: int) -> None:
        self._intake.take(size)
        self._size += size

    def __enter__(self) -> BodyAllowance:
        return self

    def __exit__(self, *error: object) -> None:
        self._intake.give_back(self._size)


async def read_body(request: Request, share: BodyAllowance) -> bytes:
    """All of the body, or TooLarge before more than the limit is read."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > BODY_MAX_BYTES:
        if int(declared) <= REFUSED_MAX_BYTES:
            await _drop(request)
        raise TooLarge(f"a body of {declared[:20]} bytes is too large, the limit is {BODY_MAX_BYTES}")
    pieces, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                size += len(piece)
                if size > BODY_MAX_BYTES:
                    raise TooLarge(f"the body is larger than the limit of {BODY_MAX_BYTES} bytes")
                share.take(len(piece))
                pieces.append(piece)
    except TimeoutError:
        raise InvalidInput(f"the body did not come within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise InvalidInput("the body ended before it was whole") from None
    return b"".join(pieces)


async def _drop(request: Request) -> None:
    """Read what is refused anyway, for a while: a proxy that is hung up on while it sends tells its peer 502, and not why."""
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(DROP_TIMEOUT_S):
            async for _ in request.stream():
                """Kept nowhere."""


def decode(body: bytes, kind: type[T]) -> T:
    """The JSON body as what it should be; InvalidInput says which field is wrong."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        found = _missing(str(error))
        if found is None:
            raise InvalidInput(str(error)[:300]) from None
        name, where = found.groups()
        raise InvalidInput(f"Missing required field: {where + '.' if where else ''}{name}") from None
    except msgspec.DecodeError as error:
        raise InvalidInput(f"the body is not JSON: {str(error)[:200]}") from None
    except RecursionError:
        raise InvalidInput("the body is nested too deep") from None
    except UnicodeDecodeError:
        raise InvalidInput("the body is not UTF-8") from None


def number(request: Request, name: str, default: float, most: float, *, least: float = 0.0) -> float:
    """A number of the query."""
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise InvalidInput(f"{name} must be a number from {least:g} to {most:g}, got {text[:40]!r}") from None
    if not least <= value <= most:
        raise InvalidInput(f"{name} must be a number from {least:g} to {most:g}, got {text[:40]!r}")
    return value


def whole_number(request: Request, name: str, default: int, most: int, *, least: int = 0) -> int:
    """A whole number of the query."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not _digits(text) or not least <= int(text) <= most:
        raise InvalidInput(f"{name} must be a whole number from {least} to {most}, got {text[:40]!r}")
    return int(text)


def wait_of(request: Request) -> float:
    """?wait=25: how long the answer may take, if there is nothing to tell sooner."""
    return number(request, "wait", 0.0, WAIT_MAX_S)


def gone(request: Request) -> asyncio.Future[Any]:
    """Done when the one who asked has left. After the body was read."""
    return asyncio.ensure_future(_until_gone(request))


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        """What came was the end of the body."""
