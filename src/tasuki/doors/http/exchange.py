"""One HTTP exchange: token, body and query of a request are read within limits; answers are JSON.

Every error, the framework's own included, is answered as {"error": {"code", "message", "details"}}. Free of the server, so that
node agents and dispatchers use this module too.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tasuki import errors
from tasuki.config import is_sendable_token
from tasuki.core.address import Address
from tasuki.core.protocol import CODECS
from tasuki.core.shares import Shares
from tasuki.errors import (
    InternalError,
    InvalidInput,
    Overloaded,
    TasukiError,
    TooLarge,
    TooManyRequests,
    Unauthorized,
    UnknownSession,
    from_wire,
)
from tasuki.wire.compression import COMPRESS_FROM_BYTES, FLAGS, compress, decompress

JSON = "application/json"
RETRY_AFTER_S = 1
BODY_MAX_BYTES = 16 * 1024 * 1024
DECODED_MAX_BYTES = 6 * BODY_MAX_BYTES  # values of a JSON body: enough for 16 MB of numbers in rows of three
BODIES_MAX_BYTES = 256 * 1024 * 1024  # of all requests at once, with the values of JSON ones; half of it for one token
UNREAD_MIN_BYTES = 64 * 1024  # of an answer; smaller ones are not counted
REFUSED_MAX_BYTES = 4 * BODY_MAX_BYTES  # a body that is declared larger is not read at all
ACCEPT_MAX_CHARS = 256
COMPRESS_ASIDE_BYTES = 64 * 1024  # an answer from this size on is compressed in a thread: gzip takes a second for 100 MB
DROP_TIMEOUT_S = 5.0
DISCARD_S = 2.0  # of a body that is still being sent when the answer is given
BODY_TIMEOUT_S = 30.0
REQUESTS_MAX = 4096  # at once, waiting ones included
WAIT_MAX_S = 60.0
BATCH_MAX = 512  # items of one request
CLIENT_GONE = 499  # only in the metrics: there was nobody to answer

JobId = Annotated[str, Meta(min_length=1, max_length=128)]

T = TypeVar("T")
_digits = re.compile(r"[0-9]{1,16}").fullmatch
_missing = re.compile(r"Object missing required field `([^`]+)`(?: - at `\$\.?(.*)`)?").fullmatch

_STATUSES: dict[int, tuple[type[TasukiError], ...]] = {
    413: (TooLarge,),
    415: (errors.UnsupportedEncoding,),
    400: (InvalidInput,),
    401: (Unauthorized,),
    403: (errors.Forbidden,),
    404: (errors.NotFound,),
    409: (
        errors.Conflict,
        errors.Fenced,
        errors.NotFinished,
        errors.ResultConflict,
        errors.OffsetConflict,
        errors.OutOfTurn,
        errors.NoResult,
    ),
    429: (errors.TooManyRequests,),
    503: (errors.Unavailable, errors.BlobUnavailable, errors.DeadlineExceeded, errors.StaleEpoch),
}
"""Status of each error; the first that fits counts, and 500 if none does."""
CODES = {400: "INVALID_PAYLOAD", 404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED", 413: "TOO_LARGE"}
"""Error codes of answers that the framework makes."""


# ---------------------------------------------------------------------------------------------------- answers


class Error(msgspec.Struct):
    """An error. `code` is stable, `message` is for people."""

    code: str
    message: str
    details: dict[str, Any] = {}


class ErrorReply(msgspec.Struct):
    """The body of every answer that is not 2xx."""

    error: Error


def status_of(error: TasukiError) -> int:
    return next((status for status, kinds in _STATUSES.items() if isinstance(error, kinds)), 500)


def code_of(error: TasukiError) -> str:
    """Return the error's code; bad input has another one over HTTP, fixed by the contract of the apps."""
    return "INVALID_PAYLOAD" if error.code in ("INVALID", "PROTOCOL") else error.code


def json_answer(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, JSON)


def envelope(code: str, message: str, details: dict[str, Any] | None = None) -> ErrorReply:
    """Return the body of an answer that is an error."""
    return ErrorReply(Error(code, message, details or {}))


def error_of(error: TasukiError) -> Error:
    """Return the description of an error, as it stands in every answer."""
    return Error(code_of(error), error.message, error.details())


def discreet(error: TasukiError) -> TasukiError:
    """Return the error as peers may see it; of an unexpected one only that it is one."""
    if status_of(error) == 500:  # nothing that the peer could act upon
        return from_wire(error.code, errors.discreet(InternalError("")).message)
    return errors.discreet(error)


def error_answer(error: TasukiError) -> Response:
    status = status_of(error)
    headers = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    elif status == 415:
        headers["Accept-Encoding"] = ", ".join(CODECS)
    elif status == 413:
        headers["Connection"] = "close"  # the rest of the body is not read
    elif isinstance(error, UnknownSession):
        headers["Connection"] = "close"  # a balancer may route the next connection to the server that has the session
    elif status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return json_answer(ErrorReply(error_of(error)), status, headers)


class EarlyResponse(Response):
    """Response to a client that may still be sending. The rest of the body is discarded for a moment before the connection is
    closed: a peer whose connection is cut while it sends may never read the response."""

    def __init__(self, answer: ASGIApp) -> None:
        super().__init__(status_code=getattr(answer, "status_code", 200))
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_unread = True

        async def note_end() -> Message:
            nonlocal is_unread
            message = await receive()
            is_unread = is_unread and bool(message.get("more_body"))  # the end must not be waited for again
            return message

        async def hold_back(message: Message) -> None:
            if message["type"] == "http.response.start":
                others = [header for header in message["headers"] if header[0].lower() != b"connection"]
                message = {**message, "headers": [*others, (b"connection", b"close")]}
            elif not message.get("more_body"):
                await send({**message, "more_body": True})
                with suppress(TimeoutError):
                    async with asyncio.timeout(DISCARD_S):
                        while is_unread:
                            await note_end()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        await self._answer(scope, note_end, hold_back)


# ---------------------------------------------------------------------------------------------------- requests


def note_token(request: Request, owner: str) -> None:
    """Note that the peer of this connection has shown a token: the connection is not closed to make room for others."""
    if (connection := request.scope.get("state", {}).get("connection")) is not None:
        connection.accepted.trust(owner)


def secret_of(request: Request) -> str:
    """Return the token of the header `Authorization: Bearer TOKEN`; Unauthorized if there is none."""
    given = request.headers.getlist("authorization")
    if len(given) > 1:
        raise Unauthorized("there are several Authorization headers; send one")
    scheme, _, secret = (given[0] if given else "").partition(" ")
    secret = secret.strip()
    if scheme.lower() != "bearer" or not secret:
        raise Unauthorized("a token is needed: send the header Authorization: Bearer TOKEN")
    if not is_sendable_token(secret):
        raise Unauthorized("what the Authorization header has is not a token")
    return secret


def peer_of(request: Request) -> str:
    return f"{request.client.host}:{request.client.port}" if request.client is not None else "http"


def check_site(request: Request, names: tuple[str, ...], *, loopback: bool) -> None:
    """Raise Forbidden for a request that a web page of another site caused, or whose Host is no name of this listener.

    A browser sends such requests without asking anybody; by a name that leads to 127.0.0.1 its page reads the answers too. A
    listener that is not on loopback may have any name, unless `names` are given (--host-name).
    """
    host = origin = site = b""
    for name, value in request.scope["headers"]:
        if name == b"host":
            host = value
        elif name == b"origin":
            origin = value
        elif name == b"sec-fetch-site":
            site = value
    if problem := _site_problem(host.decode("latin-1"), origin.decode("latin-1"), site.decode("latin-1"), names, loopback):
        raise errors.Forbidden(problem)


@functools.lru_cache
def _site_problem(host: str, origin: str, site: str, names: tuple[str, ...], loopback: bool) -> str:
    own, names = _name_of(host), tuple(map(str.lower, names))
    if host and (loopback or names) and not (Address("http", own).loopback or own in names):
        return f"the Host {errors.quoted(host)} is no name of this listener; use its address, or start it with --host-name NAME"
    place = origin.lower().partition("://")[2]
    if site not in ("", "same-origin", "none") or (origin and place != host.lower() and _name_of(place) not in names):
        return f"this request comes from a web page of another site ({errors.quoted(origin or site)}), which may not ask here"
    return ""


def _name_of(place: str) -> str:
    """Return the host of `host:port`."""
    name, colon, port = place.rpartition(":")
    return (name if colon and port.isdecimal() else place).removeprefix("[").removesuffix("]").removesuffix(".").lower()


class BodyBudget:
    """Memory that bodies of requests under way and unread answers may take together; those of one token half of it at most."""

    def __init__(self, max_bytes: int = BODIES_MAX_BYTES) -> None:
        self._free_bytes = max_bytes
        self._shares = Shares(max_bytes // 2, "bytes of requests and unread answers", TooManyRequests)

    def take(self, owner: str, size_bytes: int, *, beyond: bool = False) -> None:
        """Reserve bytes; TooManyRequests if the owner has too many, Overloaded if others take the room, unless `beyond`."""
        if size_bytes > self._free_bytes and not beyond:
            raise Overloaded("too many large requests at once; try again")
        self._shares.take(owner, size_bytes, beyond=beyond)
        self._free_bytes -= size_bytes

    def give_back(self, owner: str, size_bytes: int) -> None:
        self._free_bytes += size_bytes
        self._shares.give_back(owner, size_bytes)

    @contextmanager
    def share(self, owner: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves bytes for one request of the owner; they are free again at the end."""
        taken_bytes = 0

        def reserve(size_bytes: int) -> None:
            nonlocal taken_bytes
            self.take(owner, size_bytes)
            taken_bytes += size_bytes

        try:
            yield reserve
        finally:
            self.give_back(owner, taken_bytes)

    def counted(self, answer: Response, owner: str, *, beyond: bool) -> Response:
        """Return the answer so that its bytes are counted until the peer has read them, if they are many."""
        size_bytes = len(getattr(answer, "body", b""))
        if size_bytes < UNREAD_MIN_BYTES:
            return answer
        self.take(owner, size_bytes, beyond=beyond)
        return UnreadResponse(answer, lambda: self.give_back(owner, size_bytes))


class StreamedResponse(StreamingResponse):
    """Response whose body is made piece by piece. `stack` holds what that needs, and is closed at the end, or when the peer has
    left: also before the first piece, so that the body was never begun."""

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], stack: AsyncExitStack, status: int, headers: dict[str, str], media_type: str
    ) -> None:
        super().__init__(pieces, status, headers, media_type)
        self._pieces, self._stack = pieces, stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack, aclosing(self._pieces):
            await super().__call__(scope, receive, send)


class UnreadResponse(Response):
    """A large response; `release` is called when the peer has read nearly all of it, or has left."""

    def __init__(self, answer: Response, release: Callable[[], None]) -> None:
        super().__init__(status_code=answer.status_code)
        self.raw_headers = answer.raw_headers
        self._answer, self._release = answer, release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
            await scope["state"]["connection"].flow.drain()
        finally:
            self._release()


async def read_body(request: Request, reserve: Callable[[int], None]) -> bytes:
    """Return the whole body; TooLarge before more than the limit is read."""
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
                reserve(len(piece))
                pieces.append(piece)
    except TimeoutError:
        raise InvalidInput(f"the body did not come within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise InvalidInput("the body ended before it was whole") from None
    return _plain(request, b"".join(pieces), reserve)


def encoding_of(request: Request, known: tuple[str, ...] = ()) -> str:
    """Return the Content-Encoding of a request, empty for a plain body; UnsupportedEncoding if it is none of these."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return ""
    if encoding not in known:
        others = f", or compressed by one of {', '.join(known)}" if known else ""
        raise errors.UnsupportedEncoding(
            f"the Content-Encoding {errors.quoted(encoding)} is not taken here; send it plain{others}"
        )
    return encoding


def _plain(request: Request, body: bytes, reserve: Callable[[int], None]) -> bytes:
    """Return the body decompressed; TooLarge before it is larger than a plain one may be."""
    if not (encoding := encoding_of(request, CODECS)):
        return body
    plain = decompress(body, FLAGS[encoding], BODY_MAX_BYTES)
    reserve(len(plain))
    return plain


@functools.lru_cache
def accepted_codec(accept_encoding: str) -> str | None:
    """Return the codec that an Accept-Encoding wants most, of those that we have; None: plain."""
    wanted: dict[str, float] = {}
    for part in accept_encoding.lower().split(","):
        name, _, parameter = part.partition(";")
        weight = parameter.partition("q=")[2].strip()
        try:
            wanted[name.strip()] = float(weight or 1.0)
        except ValueError:
            continue
    known = [codec for codec in CODECS if wanted.get(codec, 0.0) > 0.0]
    return max(known, key=lambda codec: wanted[codec], default=None)


async def compressed(request: Request, answer: Response) -> Response:
    """Return the answer compressed, if its client takes that, it gets smaller, and it is no stream."""
    body, codec = getattr(answer, "body", b""), accepted_codec(request.headers.get("accept-encoding", "")[:ACCEPT_MAX_CHARS])
    if codec is None or len(body) < COMPRESS_FROM_BYTES:
        return answer
    if len(body) < COMPRESS_ASIDE_BYTES:
        smaller, flags = compress(body, codec)
    else:
        smaller, flags = await asyncio.to_thread(compress, body, codec)
    answer.headers["Vary"] = "Accept-Encoding"
    if flags:
        answer.body = smaller
        answer.headers["Content-Encoding"], answer.headers["Content-Length"] = codec, str(len(smaller))
    return answer


async def _drop(request: Request) -> None:
    """Read a refused body for a while: a proxy whose connection is closed while it sends reports 502 instead of the reason."""
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(DROP_TIMEOUT_S):
            async for _ in request.stream():
                """Kept nowhere."""


def decoded_bytes(body: bytes) -> int:
    """Return about how much memory the values of a JSON body take; TooLarge if that is too much.

    Counting marks bounds the number of values before one of them is made: 16 MB of `{}` would become 400 MB.
    """
    size = 64 * (body.count(b"{") + body.count(b"[")) + 32 * (body.count(b",") + body.count(b'"'))
    if size > DECODED_MAX_BYTES:
        raise TooLarge(
            f"the JSON of {len(body)} bytes has too many values: about {size} bytes in memory, the limit is {DECODED_MAX_BYTES}"
        )
    return size


def decode(body: bytes, kind: type[T]) -> T:
    """Decode a JSON body as `kind`; InvalidInput names the field that is wrong."""
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
    """Return a number of the query."""
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")  # within no limits
    if not least <= value <= most:
        raise InvalidInput(f"{name} must be a number from {least:g} to {most:g}, got {text[:40]!r}")
    return value


def whole_number(request: Request, name: str, default: int, most: int, *, least: int = 0) -> int:
    """Return a whole number of the query."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not _digits(text) or not least <= int(text) <= most:
        raise InvalidInput(f"{name} must be a whole number from {least} to {most}, got {text[:40]!r}")
    return int(text)


def wait_of(request: Request) -> float:
    """Return the seconds of `?wait=25`: how long the answer may wait for an event."""
    return number(request, "wait", 0.0, WAIT_MAX_S)


@contextmanager
def disconnected(request: Request) -> Iterator[asyncio.Future[None]]:
    """Yield a future that is done when the peer has left. Only after the body was read."""
    left = asyncio.ensure_future(until_disconnected(request.receive))
    try:
        yield left
    finally:
        left.cancel()


async def unless_left(request: Request, answer: Coroutine[Any, Any, T]) -> T | None:
    """Return the answer, or None if the peer leaves before there is one. Only after the body was read."""
    work = asyncio.ensure_future(answer)
    try:
        with disconnected(request) as left:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()


async def until_disconnected(receive: Receive) -> None:
    """Discard the rest of the request, and return when the peer has left."""
    while (await receive())["type"] != "http.disconnect":
        """A part of the request."""
