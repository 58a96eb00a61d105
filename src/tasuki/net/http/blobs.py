"""Blobs over HTTP, streamed: a request to read one, some to send one, each of which goes on where the last was taken to.

`blobs.py` is the other way to carry them, and decides what is tried again.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from tasuki.core.job import BlobRef
from tasuki.core.protocol import BLOBS_PATH
from tasuki.core.ranges import content_range, range_headers
from tasuki.errors import Conflict, Corrupt, ResponseLost, TasukiError, TooLarge, Unavailable
from tasuki.net.http.transport import HttpTransport
from tasuki.net.streams import FileSource

# ----------------------------------------------------------------------------------------------------
# Large blobs straight to and from the bucket, by links that the server gives. `http_blobs.py` is the way through the server.

logger = logging.getLogger("tasuki.blobs")

DIRECT_MIN_BYTES = 8 * 1024 * 1024  # below, one request to the server costs less than the three that this takes
PARTS_AT_ONCE = 4
AGAIN_S = 600.0  # after the bucket could not be used
STRIKES_MAX = 2  # failures without a byte between them
CONNECT_S, SILENT_S = 10.0, 30.0
ANSWER_MAX_BYTES = 1024 * 1024

T = TypeVar("T")


class NotDirect(Exception):
    """It has to go through the server."""


class _Failed(Exception):
    """The bucket did not do it. `off`: nor will it soon."""

    def __init__(self, link: _Link, why: str, *, off: bool = False) -> None:
        super().__init__(f"the bucket at {urlsplit(link.url).netloc} {why}")
        self.off = off


class _Link(msgspec.Struct):
    url: str
    expires_s: float
    offset: int
    size_bytes: int
    headers: dict[str, str] = {}


class _Download(msgspec.Struct):
    link: _Link | None = None


class _Upload(msgspec.Struct):
    have: bool = False
    direct: bool = False
    links: list[_Link] = []
    missing_bytes: int = 0


class _Taken(msgspec.Struct):
    stored: bool


class _Discreet(logging.Filter):
    """httpx logs the url of every request."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "X-Amz-Signature" not in record.getMessage()


_discreet = _Discreet()


class DirectBlobs:
    """The bucket behind one server. What `params` gives goes with every request to the server."""

    def __init__(self, transport: HttpTransport, params: Callable[[], dict[str, str]]) -> None:
        self._transport = transport
        self._params = params
        self._off_until = 0.0
        self._strikes = 0
        self._tls: ssl.SSLContext | None = None

    def wanted(self, ref: BlobRef) -> bool:
        """Whether it is worth trying."""
        return ref.size_bytes >= DIRECT_MIN_BYTES and asyncio.get_running_loop().time() >= self._off_until

    # ------------------------------------------------------------------------------------------------ out of the bucket

    async def pieces(self, ref: BlobRef, job_id: str, offset: int) -> AsyncGenerator[bytes, None]:
        """The bytes from an offset on; NotDirect, perhaps behind some of them. They are not verified here."""
        found = await self._ask(f"{ref.sha256}/download", {"job_id": job_id}, _Download)
        if found.link is None:
            raise self._not_here()
        left = ref.size_bytes - offset
        try:
            async with self._bucket() as bucket, self._exchange(bucket, "GET", found.link, range_headers(offset)) as response:
                if response.status_code != (206 if offset else 200):
                    raise _Failed(found.link, f"answered {response.status_code}")
                async for piece in response.aiter_bytes():
                    self._strikes = 0
                    left -= len(piece)
                    if left < 0:
                        raise Corrupt(f"blob {ref.sha256} came with more than {ref.size_bytes} bytes from the bucket; try again")
                    yield piece
        except _Failed as failed:
            raise self._judged(failed) from failed
        if left:
            raise ResponseLost(f"a blob ended {left} bytes before its end")

    # ------------------------------------------------------------------------------------------------ into the bucket

    async def put(self, source: FileSource, ref: BlobRef, progress: Callable[[int], None] | None) -> None:
        """Have the blob kept; only what is not in the bucket is sent. NotDirect: it is not kept."""
        way = await self._way(ref)
        if way.links:
            async with self._bucket() as bucket:
                while way.links:
                    await self._send_all(bucket, source, way.links, ref.size_bytes - way.missing_bytes, progress)
                    before, way = way, await self._way(ref)
                    if way.missing_bytes >= before.missing_bytes:
                        raise self._judged(_Failed(before.links[0], "takes parts and does not have them", off=True))
        while not way.have:
            # It is being read and compared; each answer comes after some seconds.
            way.have = (await self._ask(f"{ref.sha256}/commit", {"size_bytes": ref.size_bytes}, _Taken)).stored

    async def _way(self, ref: BlobRef) -> _Upload:
        way = await self._ask(f"{ref.sha256}/upload", {"size_bytes": ref.size_bytes}, _Upload)
        if not way.have and not way.direct:
            raise self._not_here()
        return way

    async def _send_all(
        self,
        bucket: httpx.AsyncClient,
        source: FileSource,
        links: list[_Link],
        sent_bytes: int,
        progress: Callable[[int], None] | None,
    ) -> None:
        async def send(link: _Link) -> None:
            nonlocal sent_bytes
            await self._send(bucket, link, source)
            sent_bytes += link.size_bytes
            if progress is not None:
                progress(sent_bytes)

        try:
            await _all(send, links)
        except _Failed as failed:
            raise self._judged(failed) from failed

    async def _send(self, bucket: httpx.AsyncClient, link: _Link, source: FileSource) -> None:
        # The bucket refuses what was damaged on its way. MD5 is what all of them know; the sha256 of the whole is compared later.
        own = {"Content-MD5": await _md5(source, link), "Content-Length": str(link.size_bytes)}
        data = source.pieces(link.offset, link.offset + link.size_bytes)
        async with aclosing(data), self._exchange(bucket, "PUT", link, {**link.headers, **own}, data) as response:
            if not response.is_success:
                raise _Failed(link, f"answered {response.status_code}")
        self._strikes = 0

    # ------------------------------------------------------------------------------------------------ requests

    async def _ask(self, path: str, body: Mapping[str, str | int], kind: type[T]) -> T:
        """Of the server. What it refuses here it says again, in its own words, on the other way."""
        content = msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._transport.exchange(
                "POST", f"{BLOBS_PATH}/{path}", params=self._params(), headers=headers, content=content
            ) as response:
                answer = b""
                async for piece in response.aiter_bytes():
                    answer += piece
                    if len(answer) > ANSWER_MAX_BYTES:
                        break
            return msgspec.json.decode(answer, type=kind)
        except (Unavailable, Corrupt):
            raise
        except (TasukiError, msgspec.DecodeError) as error:
            raise NotDirect from error

    @asynccontextmanager
    async def _bucket(self) -> AsyncIterator[httpx.AsyncClient]:
        logging.getLogger("httpx").addFilter(_discreet)
        if self._tls is None:
            self._tls = await asyncio.get_running_loop().run_in_executor(None, _trusting, self._transport.tls)
        timeout = httpx.Timeout(SILENT_S, connect=CONNECT_S, pool=None)
        async with httpx.AsyncClient(verify=self._tls, timeout=timeout, headers={"Accept-Encoding": "identity"}) as bucket:
            yield bucket

    @asynccontextmanager
    async def _exchange(
        self,
        bucket: httpx.AsyncClient,
        method: str,
        link: _Link,
        headers: Mapping[str, str],
        data: AsyncIterable[bytes] | None = None,
    ) -> AsyncIterator[httpx.Response]:
        if self._transport.address.scheme == "https" and not link.url.startswith("https://"):
            raise _Failed(link, "is not at an https address, as the server is", off=True)
        try:
            async with bucket.stream(method, link.url, headers=dict(headers), content=data) as response:
                yield response
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise _Failed(link, f"cannot be reached: {error or type(error).__name__}", off=True) from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise _Failed(link, f"was lost: {error or type(error).__name__}") from error

    # ------------------------------------------------------------------------------------------------ what went wrong

    def _judged(self, failed: _Failed) -> Exception:
        """A link that has ended, a bucket that restarts: with new links it may work. Not for ever."""
        self._strikes += 1
        if not failed.off and self._strikes < STRIKES_MAX:
            return ResponseLost(str(failed))
        logger.warning("%s; blobs go through the server for the next %g minutes", failed, AGAIN_S / 60)
        return self._not_here()

    def _not_here(self) -> NotDirect:
        self._strikes = 0
        self._off_until = asyncio.get_running_loop().time() + AGAIN_S
        return NotDirect()


async def _md5(source: FileSource, link: _Link) -> str:
    """Of the bytes that a link is for. They are read twice, and never all in memory."""
    loop = asyncio.get_running_loop()
    digest, left = hashlib.md5(usedforsecurity=False), link.size_bytes
    async with aclosing(source.pieces(link.offset, link.offset + link.size_bytes)) as pieces:
        async for piece in pieces:
            await loop.run_in_executor(None, digest.update, piece)
            left -= len(piece)
    if left:
        raise Corrupt(f"the file changed while it was sent: it has no {link.size_bytes} bytes at {link.offset} any more")
    return base64.b64encode(digest.digest()).decode()


async def _all(send: Callable[[_Link], Awaitable[None]], links: list[_Link]) -> None:
    """All of them, some at once; the first error ends it."""
    waiting = deque(links)

    async def one_after_the_other() -> None:
        while waiting:
            await send(waiting.popleft())

    tasks = [asyncio.ensure_future(one_after_the_other()) for _ in range(min(PARTS_AT_ONCE, len(links)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _trusting(tls: ssl.SSLContext | None) -> ssl.SSLContext:
    """The system's CAs, and the one that was given: the bucket may be known to either."""
    context = ssl.create_default_context()
    for certificate in tls.get_ca_certs(binary_form=True) if tls is not None else ():
        context.load_verify_locations(cadata=certificate)
    return context


OFFER_MAX_BYTES = 64 * 1024
PIECE_FIRST_BYTES = 8 * 1024 * 1024
PIECE_MAX_BYTES = 128 * 1024 * 1024  # a proxy that keeps a request until it is whole loses no more of it when it is cut
PIECE_MIN_BYTES = 1024 * 1024  # what proxies let through unless told otherwise


class _Had(msgspec.Struct):
    have: bool
    offset: int | None = None
    """Where to go on; None: an older server, which takes blobs in one piece."""


class HttpBlobs:
    """The blobs of one address."""

    def __init__(self, transport: HttpTransport) -> None:
        self._transport = transport
        self._piece_bytes = PIECE_FIRST_BYTES
        self._piece_max_bytes = PIECE_MAX_BYTES
        self.params: dict[str, str] = {}
        """What goes with every request: a worker says which one it is."""
        self._direct = DirectBlobs(transport, lambda: self.params)

    async def put(self, source: FileSource, ref: BlobRef, progress: Callable[[int], None] | None) -> None:
        """Make sure that the server has this blob; nothing is sent if it does, and only the rest if it has a part."""
        if self._direct.wanted(ref):
            with suppress(NotDirect):
                await self._direct.put(source, ref, progress)
                return
        offered = await self._offer(ref)
        if offered.have:
            return
        try:
            if offered.offset is None or ref.size_bytes <= PIECE_MIN_BYTES:
                await self._put(source, ref, 0, ref.size_bytes, {}, progress)
            else:
                await self._put_pieces(source, ref, offered.offset, progress)
        except Corrupt:
            if not offered.offset:
                raise
            # What the server had of it was not what we would have sent. It has none of it now.
            await self.put(source, ref, progress)

    async def _put_pieces(self, source: FileSource, ref: BlobRef, offset: int, progress: Callable[[int], None] | None) -> None:
        """From there to the end, in pieces that grow until something on the way finds one too large."""
        while offset < ref.size_bytes:
            stop = min(offset + self._piece_bytes, ref.size_bytes)
            headers = {"Content-Range": content_range(offset, stop, ref.size_bytes)}
            try:
                await self._put(source, ref, offset, stop, headers, progress)
            except TooLarge:
                if stop - offset <= PIECE_MIN_BYTES:
                    raise
                self._piece_bytes = self._piece_max_bytes = max(PIECE_MIN_BYTES, (stop - offset) // 2)
            except ResponseLost:  # perhaps something on the way has a limit for time, or hangs up on what is too large
                self._piece_bytes = max(PIECE_MIN_BYTES, (stop - offset) // 2)
                self._piece_max_bytes = max(PIECE_FIRST_BYTES, self._piece_bytes)
                raise
            except Conflict:
                raise ResponseLost(f"another upload of blob {ref.sha256} came between this one and its end") from None
            else:
                offset = stop
                self._piece_bytes = min(2 * self._piece_bytes, self._piece_max_bytes)

    async def _put(
        self,
        source: FileSource,
        ref: BlobRef,
        start: int,
        stop: int,
        headers: Mapping[str, str],
        progress: Callable[[int], None] | None,
    ) -> None:
        headers = {**headers, "Content-Type": "application/octet-stream", "Content-Length": str(stop - start)}
        content = _read(source, start, stop, progress)
        async with self._transport.exchange("PUT", _path(ref), params=self.params, headers=headers, content=content):
            """The status says it all."""

    async def _offer(self, ref: BlobRef) -> _Had:
        body = msgspec.json.encode({"size_bytes": ref.size_bytes})
        headers = {"Content-Type": "application/json"}
        async with self._transport.exchange("POST", _path(ref), params=self.params, content=body, headers=headers) as response:
            answer = b""
            async for piece in response.aiter_bytes():
                answer += piece
                if len(answer) > OFFER_MAX_BYTES:
                    break
        try:
            return msgspec.json.decode(answer, type=_Had)
        except msgspec.DecodeError as error:
            raise ResponseLost(f"the answer to the offer of a blob cannot be read: {error}") from None

    async def pieces(self, ref: BlobRef, job_id: str, offset: int) -> AsyncGenerator[bytes, None]:
        """The bytes from an offset on. More than there should be is Corrupt."""
        if offset and offset == ref.size_bytes:
            return
        if self._direct.wanted(ref):
            with suppress(NotDirect):
                async with aclosing(self._direct.pieces(ref, job_id, offset)) as pieces:
                    async for piece in pieces:
                        offset += len(piece)
                        yield piece
                return
        async with self._transport.exchange(
            "GET", _path(ref), params={"job_id": job_id, **self.params}, headers=range_headers(offset)
        ) as response:
            skip = offset if response.status_code == 200 else 0  # something on the way knows no ranges: all of it comes again
            left = ref.size_bytes - offset
            async for piece in response.aiter_bytes():
                fresh = piece[skip:]
                skip = max(0, skip - len(piece))
                left -= len(fresh)
                if left < 0:
                    raise Corrupt(f"blob {ref.sha256} of job {job_id!r} came with more than {ref.size_bytes} bytes; try again")
                if fresh:
                    yield fresh
            if left:
                raise ResponseLost(f"a blob ended {left} bytes before its end")


def _path(ref: BlobRef) -> str:
    return f"{BLOBS_PATH}/{ref.sha256}"


async def _read(source: FileSource, start: int, stop: int, progress: Callable[[int], None] | None) -> AsyncGenerator[bytes, None]:
    async for data in source.pieces(start, stop):
        yield data
        start += len(data)
        if progress is not None:
            progress(start)
    if start < stop:
        raise Corrupt(f"the file changed while it was sent: it has {start} bytes, and no {stop}")
