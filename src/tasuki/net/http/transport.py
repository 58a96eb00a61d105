"""Requests to one HTTP address: connections, TLS, proxies, errors that say what to do, and the form that starts a run.

All HTTP clients here use it; it knows nothing of jobs and frames. httpx is slow to import: this module is imported only where an
address is http or https.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import ssl
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
import msgspec

from tasuki.core.address import Address, shown_address
from tasuki.core.decoding import decodable
from tasuki.errors import (
    InvalidInput,
    NoConnection,
    NotFound,
    NotTasuki,
    Overloaded,
    ResponseLost,
    TasukiError,
    TooLarge,
    Unauthorized,
    UntrustedCertificate,
    from_wire,
)
from tasuki.net.http.early_response import EARLY_KEPT_S, EarlyResponseTransport, proxy_of
from tasuki.net.tcp_link import system_words
from tasuki.net.tls import handshake_words, warn_of_clear_text

ANSWER_S = 35.0  # for a request that does not wait for an event: the server gives its store 30
WRITE_S = 30.0  # for each piece of a body
KEPT_CONNECTIONS = 16
KEPT_S = 30.0  # an unused connection; shorter than servers and balancers on the way keep one
RETRY_AFTER_MAX_S = 30.0
ERROR_MAX_BYTES = 64 * 1024

_HTTP_CODES: dict[str, type[TasukiError]] = {  # of errors that have other codes over TCP
    "INVALID_PAYLOAD": InvalidInput,
    "TOKEN_REVOKED": Unauthorized,
    "TOO_MANY_REQUESTS": Overloaded,
    "METHOD_NOT_ALLOWED": NotFound,
}
_seconds = re.compile(r"\d{1,6}").fullmatch


class ErrorBody(msgspec.Struct):
    """The error in a response of a tasuki server."""

    code: str
    message: str
    details: dict[str, object] = {}


@decodable
class ErrorResponse(msgspec.Struct):
    """Every response of a tasuki server that is not 2xx."""

    error: ErrorBody


class HttpTransport:
    """One address. `token` is sent with every request; `close` ends the requests under way."""

    def __init__(
        self,
        address: Address,
        tls: ssl.SSLContext | None,
        connect_timeout_s: float,
        *,
        stop_when_answered: bool = False,
        proxies: bool = False,
    ) -> None:
        """With `stop_when_answered` sending stops once the response comes; a proxy is then used only with `proxies`."""
        self.address = address
        self.token = ""
        self._connect_timeout_s = connect_timeout_s
        self._quiet_until = 0.0
        self._closed = False
        self.tls = tls
        """Context of the CA that was given; None: the system's CAs count."""
        self._answered = False
        # Without a context, httpx would load the CAs of certifi, for plain HTTP too. This one trusts nobody.
        context = tls or (ssl.create_default_context() if address.scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        kept_s = EARLY_KEPT_S if stop_when_answered else KEPT_S
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS, keepalive_expiry=kept_s)
        early = EarlyResponseTransport(context, limits, proxy_of(address) if proxies else None) if stop_when_answered else None
        self._client = httpx.AsyncClient(verify=context, headers={"Accept-Encoding": "identity"}, limits=limits, transport=early)

    async def close(self) -> None:
        self._closed = True
        await self._client.aclose()

    @asynccontextmanager
    async def exchange(self, method: str, path: str, **options: Any) -> AsyncIterator[httpx.Response]:
        """Yield a 2xx response as `answer` does, with the same options; raise the error that another response means."""
        if (wait_s := self._quiet_until - asyncio.get_running_loop().time()) > 0:  # the server asked for it by Retry-After
            await asyncio.sleep(wait_s)
        async with self.answer(method, path, **options) as response:
            if not response.is_success:
                raise await self._refusal(response)
            yield response

    @asynccontextmanager
    async def answer(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | AsyncIterable[bytes] | None = None,
        answer_s: float = ANSWER_S,
    ) -> AsyncIterator[httpx.Response]:
        """Send a request and yield its response, also a refusal, whose body is still to be read; raise only if there is none."""
        if self._closed:
            raise NoConnection("the connection is closed")
        timeout = httpx.Timeout(connect=self._connect_timeout_s, write=WRITE_S, read=answer_s, pool=None)
        bearer = {}
        if self.token:
            warn_of_clear_text(self.address)
            bearer = {"Authorization": f"Bearer {self.token}"}
        url = f"{self.address}{path}"
        try:
            async with self._client.stream(
                method, url, params=params, headers={**bearer, **(headers or {})}, content=content, timeout=timeout
            ) as response:
                self._answered = True
                yield response
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
            raise self._problem(error, answer_s) from error

    # ------------------------------------------------------------------------------------------------ errors

    async def _refusal(self, response: httpx.Response) -> TasukiError:
        status = response.status_code
        if 300 <= status < 400:
            where = shown_address(response.headers.get("location", "(nowhere)"))
            return NotTasuki(f"{self.address} redirects to {where}; give the address itself with --to")
        retry_after = response.headers.get("retry-after", "")
        if _seconds(retry_after):
            self._quiet_until = asyncio.get_running_loop().time() + min(RETRY_AFTER_MAX_S, float(retry_after))
        try:
            body = msgspec.json.decode(await read_body(response, ERROR_MAX_BYTES), type=ErrorResponse).error
        except msgspec.DecodeError:
            return self._foreign_error(status)
        if kind := _HTTP_CODES.get(body.code):
            return kind(body.message)
        error = from_wire(body.code, body.message, body.details)
        return ResponseLost(body.message) if type(error) is TasukiError and status >= 500 else error

    def _foreign_error(self, status: int) -> TasukiError:
        """Return the error for a response that no tasuki server sent: a proxy on the way, or another service."""
        answered = f"{self.address} answered {status}"
        if status in (404, 405):
            return NotTasuki(f"{answered}: is this a tasuki server with --http?")
        if status == 407:
            return NotTasuki(f"{answered}: the proxy of HTTP_PROXY or HTTPS_PROXY asks for a login")
        if status == 413:
            return TooLarge(f"{answered}: a proxy before the server refuses a request that large; raise its limit for bodies")
        if status == 429 or status >= 500:
            return ResponseLost(f"{answered}, and not as a tasuki server does: what is before it may not reach it")
        if status == 400 and self.address.scheme == "http":  # the answer of nginx and others to plain HTTP at a port for TLS
            return NotTasuki(f"{answered}, and not as a tasuki server does: is it https://?")
        return NotTasuki(f"{answered}, and not as a tasuki server does: is there a proxy or a firewall before it?")

    def _problem(self, error: Exception, answer_s: float) -> TasukiError:
        match error:
            case httpx.ConnectTimeout():
                return NoConnection(f"{self.address} did not answer within {self._connect_timeout_s:g} s")
            case httpx.ProxyError():
                return NoConnection(f"the proxy of HTTP_PROXY or HTTPS_PROXY does not lead to {self.address}: {error}")
            case httpx.ConnectError() | httpx.InvalidURL() | httpx.UnsupportedProtocol():
                return self._not_connected(error)
            case httpx.LocalProtocolError():
                return InvalidInput(f"the request to {self.address} cannot be sent: {error}")
            case httpx.TimeoutException():
                return ResponseLost(f"{self.address} has not answered within {answer_s:g} s")
            case httpx.RemoteProtocolError() | httpx.ReadError() if not self._answered and self.address.scheme == "http":
                return ResponseLost(f"{self.address} hung up without an answer in HTTP; is it tcp://, or with TLS https://?")
            case _:
                return ResponseLost(f"the connection to {self.address} was lost: {str(error) or type(error).__name__}")

    def _not_connected(self, error: Exception) -> NoConnection:
        for cause in _causes(error):
            if isinstance(cause, ssl.SSLError):
                why = handshake_words(cause, self.address.host, plain="http", own_ca=self.tls is not None)
                kind = UntrustedCertificate if isinstance(cause, ssl.SSLCertVerificationError) else NoConnection
                return kind(f"no TLS connection to {self.address}: {why}")
            if isinstance(cause, OSError) and cause.errno is not None and cause.strerror:
                return NoConnection(f"no connection to {self.address}: {system_words(cause)}")
        return NoConnection(f"no connection to {self.address}: {error}")


async def read_body(response: httpx.Response, max_bytes: int) -> bytes:
    """Return the body of a response, cut off when it passes `max_bytes`: no tasuki server sends more."""
    body = b""
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > max_bytes:
            break
    return body


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, those in exception groups included."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]


# ---------------------------------------------------------------------------------------------------- forms


def run_fields(
    exec_: str | None, args: Sequence[str], timeout_s: float | None, inputs: Iterable[str] = ()
) -> list[tuple[str, str]]:
    """Return the fields of the form that starts a run. Without `exec_` the agent chooses; it fetches `inputs` itself."""
    fields = [("args", msgspec.json.encode(args).decode())]
    if exec_:
        fields.append(("exec", exec_))
    if timeout_s is not None:
        fields.append(("timeout_s", repr(timeout_s).removesuffix(".0")))
    return fields + [("input", name) for name in inputs]


class MultipartForm:
    """A multipart/form-data body of a known length: fields, then files, whose contents are given to `pieces`."""

    def __init__(self, fields: Iterable[tuple[str, str]], files: Sequence[tuple[str, int]]) -> None:
        boundary = secrets.token_hex(16)
        start = f"--{boundary}\r\nContent-Disposition: form-data; name="
        self._fields = "".join(f'{start}"{name}"\r\n\r\n{value}\r\n' for name, value in fields).encode()
        plain_names = [name.replace('"', '\\"') for name, _ in files]  # names have no backslash
        kind = "Content-Type: application/octet-stream"
        self._heads = [f'{start}"file"; filename="{name}"\r\n{kind}\r\n\r\n'.encode() for name in plain_names]
        self._end = f"--{boundary}--\r\n".encode()
        size_bytes = len(self._fields) + len(self._end)
        size_bytes += sum(len(head) + size + len(b"\r\n") for head, (_, size) in zip(self._heads, files, strict=True))
        self.headers = {"Content-Type": f"multipart/form-data; boundary={boundary}", "Content-Length": str(size_bytes)}

    async def pieces(self, contents: Iterable[AsyncGenerator[bytes, None]]) -> AsyncGenerator[bytes, None]:
        """Yield the body; `contents` has the bytes of each file, in their order."""
        before = self._fields
        for head, content in zip(self._heads, contents, strict=True):
            before += head
            async with aclosing(content):
                async for piece in content:
                    yield before + piece if before else piece
                    before = b""
            before += b"\r\n"
        yield before + self._end
