"""Blobs over HTTP: through the server in resumable pieces, or straight to and from its bucket by presigned URLs.

Large blobs try the bucket first. Nothing depends on it: where the server gives no presigned URLs, or the bucket cannot be reached
from here (a firewall, DNS, TLS), or does not work as it should, blobs go through the server, and the bucket is tried again some
minutes later. Presigned URLs are secrets: they are never part of a message or a log, and requests to the bucket carry no token.

`blob_transfer.py` decides what is tried again.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from tasuki.core.decoding import decodable
from tasuki.core.job import BlobRef
from tasuki.core.presigned import BlobCommitted, BlobDownload, BlobLink, BlobUpload
from tasuki.core.protocol import BLOBS_PATH
from tasuki.core.ranges import content_range, range_headers
from tasuki.errors import Conflict, Corrupt, ResponseLost, TasukiError, TooLarge, Unauthorized, Unavailable
from tasuki.net.http.transport import HttpTransport, read_body
from tasuki.net.streams import FileSource, OnProgress

logger = logging.getLogger("tasuki.blobs")

DIRECT_MIN_BYTES = 8 * 1024 * 1024  # below, one request to the server costs less than the three of a presigned transfer
PARTS_AT_ONCE = 4
RETRY_BUCKET_S = 600.0  # after the bucket could not be used
STRIKES_MAX = 2  # failures without a byte between them
CONNECT_S, SILENT_S = 10.0, 30.0
PIECE_FIRST_BYTES = 8 * 1024 * 1024
PIECE_MAX_BYTES = 128 * 1024 * 1024  # the most that is lost with a request that a proxy buffers whole
PIECE_MIN_BYTES = 1024 * 1024  # the usual limit of proxies
ANSWER_MAX_BYTES = 1024 * 1024
JSON = {"Content-Type": "application/json"}

T = TypeVar("T")


class BucketUnusable(Exception):
    """The blob has to go through the server."""


class _BucketFailed(Exception):
    """A request to the bucket failed. `off`: another try soon would fail too."""

    def __init__(self, url: BlobLink, why: str, *, off: bool = False) -> None:
        super().__init__(f"the bucket at {urlsplit(url.url).netloc} {why}")
        self.off = off


def _is_no_presigned_url(record: logging.LogRecord) -> bool:
    """Keep presigned URLs out of httpx's log, which has the URL of every request."""
    return "X-Amz-Signature" not in record.getMessage()


class PresignedBlobs:
    """The bucket behind one server. `params` returns query parameters for every request to the server."""

    def __init__(self, transport: HttpTransport, params: Callable[[], dict[str, str]]) -> None:
        self._transport = transport
        self._params = params
        self._off_until = 0.0
        self._strikes = 0
        self._tls: ssl.SSLContext | None = None

    def wanted(self, ref: BlobRef) -> bool:
        """Return whether the bucket is worth trying for this blob."""
        return ref.size_bytes >= DIRECT_MIN_BYTES and asyncio.get_running_loop().time() >= self._off_until

    # ------------------------------------------------------------------------------------------------ out of the bucket

    async def pieces(self, ref: BlobRef, job_id: str, offset: int) -> AsyncGenerator[bytes, None]:
        """Yield the bytes from an offset on, unverified; BucketUnusable, perhaps after some of them."""
        found = await self._ask(f"{ref.sha256}/download", {"job_id": job_id}, BlobDownload)
        if found.link is None:
            raise self._unusable()
        left = ref.size_bytes - offset
        try:
            async with self._bucket() as bucket, self._exchange(bucket, "GET", found.link, range_headers(offset)) as response:
                if response.status_code != (206 if offset else 200):
                    raise _BucketFailed(found.link, f"answered {response.status_code}")
                async for piece in response.aiter_bytes():
                    self._strikes = 0
                    left -= len(piece)
                    if left < 0:
                        raise Corrupt(f"blob {ref.sha256} came with more than {ref.size_bytes} bytes from the bucket; try again")
                    yield piece
        except _BucketFailed as failed:
            raise self._error_after(failed) from failed
        if left:
            raise ResponseLost(f"a blob ended {left} bytes before its end")

    # ------------------------------------------------------------------------------------------------ into the bucket

    async def put(self, source: FileSource, ref: BlobRef, progress: OnProgress) -> None:
        """Upload the blob; only the parts that the bucket does not have are sent. BucketUnusable: the blob is not stored."""
        plan = await self._plan(ref)
        if plan.links:
            async with self._bucket() as bucket:
                while plan.links:
                    await self._send_all(bucket, source, plan.links, ref.size_bytes - plan.missing_bytes, progress)
                    before, plan = plan, await self._plan(ref)
                    if plan.missing_bytes >= before.missing_bytes:
                        raise self._error_after(_BucketFailed(before.links[0], "accepts parts and does not have them", off=True))
        while not plan.have:
            # The server reads and verifies the blob; each answer comes after some seconds.
            plan.have = (await self._ask(f"{ref.sha256}/commit", {"size_bytes": ref.size_bytes}, BlobCommitted)).stored

    async def _plan(self, ref: BlobRef) -> BlobUpload:
        plan = await self._ask(f"{ref.sha256}/upload", {"size_bytes": ref.size_bytes}, BlobUpload)
        if not plan.have and not plan.direct:
            raise self._unusable()
        return plan

    async def _send_all(
        self, bucket: httpx.AsyncClient, source: FileSource, urls: list[BlobLink], sent_bytes: int, progress: OnProgress
    ) -> None:
        waiting = deque(urls)

        async def send_next() -> None:
            nonlocal sent_bytes
            while waiting:
                url = waiting.popleft()
                await self._send(bucket, url, source)
                sent_bytes += url.size_bytes
                if progress is not None:
                    progress(sent_bytes)

        tasks = [asyncio.ensure_future(send_next()) for _ in range(min(PARTS_AT_ONCE, len(urls)))]
        try:
            await asyncio.gather(*tasks)  # the first error ends it
        except _BucketFailed as failed:
            raise self._error_after(failed) from failed
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, bucket: httpx.AsyncClient, url: BlobLink, source: FileSource) -> None:
        # The bucket refuses a damaged part. All buckets know MD5; the server compares the sha256 of the whole later.
        own = {"Content-MD5": await _md5(source, url), "Content-Length": str(url.size_bytes)}
        data = source.pieces(url.offset, url.offset + url.size_bytes)
        async with aclosing(data), self._exchange(bucket, "PUT", url, {**url.headers, **own}, data) as response:
            if not response.is_success:
                raise _BucketFailed(url, f"answered {response.status_code}")
        self._strikes = 0

    # ------------------------------------------------------------------------------------------------ requests

    async def _ask(self, path: str, body: Mapping[str, str | int], kind: type[T]) -> T:
        """Ask the server. An error that it refuses with comes again when the blob goes through the server."""
        content = msgspec.json.encode(body)
        try:
            async with self._transport.exchange(
                "POST", f"{BLOBS_PATH}/{path}", params=self._params(), headers=JSON, content=content
            ) as response:
                return msgspec.json.decode(await read_body(response, ANSWER_MAX_BYTES), type=kind)
        except (Unavailable, Corrupt):
            raise
        except (TasukiError, msgspec.DecodeError) as error:
            raise BucketUnusable from error

    @asynccontextmanager
    async def _bucket(self) -> AsyncIterator[httpx.AsyncClient]:
        logging.getLogger("httpx").addFilter(_is_no_presigned_url)
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
        url: BlobLink,
        headers: Mapping[str, str],
        data: AsyncIterable[bytes] | None = None,
    ) -> AsyncIterator[httpx.Response]:
        if self._transport.address.scheme == "https" and not url.url.startswith("https://"):
            raise _BucketFailed(url, "is not at an https address, as the server is", off=True)
        try:
            async with bucket.stream(method, url.url, headers=dict(headers), content=data) as response:
                yield response
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise _BucketFailed(url, f"cannot be reached: {error or type(error).__name__}", off=True) from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise _BucketFailed(url, f"was lost: {str(error) or type(error).__name__}") from error

    # ------------------------------------------------------------------------------------------------ errors

    def _error_after(self, failed: _BucketFailed) -> Exception:
        """Return the error to raise: a URL may have expired, a bucket may restart, so the first failure is tried again."""
        self._strikes += 1
        if not failed.off and self._strikes < STRIKES_MAX:
            return ResponseLost(str(failed))
        logger.warning("%s; blobs go through the server for the next %g minutes", failed, RETRY_BUCKET_S / 60)
        return self._unusable()

    def _unusable(self) -> BucketUnusable:
        self._strikes = 0
        self._off_until = asyncio.get_running_loop().time() + RETRY_BUCKET_S
        return BucketUnusable()


async def _md5(source: FileSource, url: BlobLink) -> str:
    """Return the MD5 of the bytes that a URL is for. They are read twice, and never all in memory."""
    loop = asyncio.get_running_loop()
    digest, left = hashlib.md5(usedforsecurity=False), url.size_bytes
    async with aclosing(source.pieces(url.offset, url.offset + url.size_bytes)) as pieces:
        async for piece in pieces:
            await loop.run_in_executor(None, digest.update, piece)
            left -= len(piece)
    if left:
        raise Corrupt(f"the file changed while it was sent: it ends before {url.size_bytes} bytes at offset {url.offset}")
    return base64.b64encode(digest.digest()).decode()


def _trusting(tls: ssl.SSLContext | None) -> ssl.SSLContext:
    """Return a context with the system's CAs and the one that was given: the bucket may be known to either."""
    context = ssl.create_default_context()
    for certificate in tls.get_ca_certs(binary_form=True) if tls is not None else ():
        context.load_verify_locations(cadata=certificate)
    return context


@decodable
class _Had(msgspec.Struct):
    have: bool
    offset: int | None = None
    """Place to continue at; None: an older server, which takes blobs in one piece."""


class HttpBlobs:
    """The `BlobTransport` of one address."""

    def __init__(self, transport: HttpTransport) -> None:
        self._transport = transport
        self._piece_bytes = PIECE_FIRST_BYTES
        self._piece_max_bytes = PIECE_MAX_BYTES
        self.params: dict[str, str] = {}
        """Query parameters of every request: the id of a worker."""
        self.retries_unauthorized = False
        """True for a worker, whose token may be rotated during a transfer: a refused token is tried again, the link decides."""
        self._bucket = PresignedBlobs(transport, lambda: self.params)

    async def put(self, source: FileSource, ref: BlobRef, progress: OnProgress) -> None:
        """Make sure that the server has this blob; nothing is sent if it does, and only the rest if it has a part."""
        if self._bucket.wanted(ref):
            with suppress(BucketUnusable):
                await self._bucket.put(source, ref, progress)
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
            # The part that the server had was of other bytes. The server has dropped it now.
            await self.put(source, ref, progress)

    async def _put_pieces(self, source: FileSource, ref: BlobRef, offset: int, progress: OnProgress) -> None:
        """Send the rest in pieces that grow until something on the way refuses one as too large."""
        while offset < ref.size_bytes:
            stop = min(offset + self._piece_bytes, ref.size_bytes)
            headers = {"Content-Range": content_range(offset, stop, ref.size_bytes)}
            try:
                await self._put(source, ref, offset, stop, headers, progress)
            except TooLarge:
                if stop - offset <= PIECE_MIN_BYTES:
                    raise
                self._piece_bytes = self._piece_max_bytes = max(PIECE_MIN_BYTES, (stop - offset) // 2)
            except ResponseLost:  # perhaps something on the way has a time limit, or hangs up on large requests
                self._piece_bytes = max(PIECE_MIN_BYTES, (stop - offset) // 2)
                self._piece_max_bytes = max(PIECE_FIRST_BYTES, self._piece_bytes)
                raise
            except Conflict:
                raise ResponseLost(f"another upload of blob {ref.sha256} came between this one and its end") from None
            else:
                offset = stop
                self._piece_bytes = min(2 * self._piece_bytes, self._piece_max_bytes)

    async def _put(
        self, source: FileSource, ref: BlobRef, start: int, stop: int, headers: Mapping[str, str], progress: OnProgress
    ) -> None:
        headers = {**headers, "Content-Type": "application/octet-stream", "Content-Length": str(stop - start)}
        async with self._exchange("PUT", ref, headers=headers, content=_read(source, start, stop, progress)):
            pass  # the status is the whole answer

    async def _offer(self, ref: BlobRef) -> _Had:
        body = msgspec.json.encode({"size_bytes": ref.size_bytes})
        async with self._exchange("POST", ref, content=body, headers=JSON) as response:
            answer = await read_body(response, ANSWER_MAX_BYTES)
        try:
            return msgspec.json.decode(answer, type=_Had)
        except msgspec.DecodeError as error:
            raise ResponseLost(f"the answer to the offer of a blob cannot be read: {error}") from None

    @asynccontextmanager
    async def _exchange(
        self, method: str, ref: BlobRef, params: Mapping[str, str] | None = None, **options: Any
    ) -> AsyncIterator[httpx.Response]:
        params = {**(params or {}), **self.params}
        try:
            async with self._transport.exchange(method, f"{BLOBS_PATH}/{ref.sha256}", params=params, **options) as response:
                yield response
        except Unauthorized as error:
            if not self.retries_unauthorized:
                raise
            raise ResponseLost(error.message) from error

    async def pieces(self, ref: BlobRef, job_id: str, offset: int) -> AsyncGenerator[bytes, None]:
        """Yield the bytes from an offset on; Corrupt if there are too many."""
        if offset and offset == ref.size_bytes:
            return
        if self._bucket.wanted(ref):
            with suppress(BucketUnusable):
                async with aclosing(self._bucket.pieces(ref, job_id, offset)) as pieces:
                    async for piece in pieces:
                        offset += len(piece)
                        yield piece
                return
        async with self._exchange("GET", ref, {"job_id": job_id}, headers=range_headers(offset)) as response:
            skip = offset if response.status_code == 200 else 0  # a proxy without ranges: everything comes again
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


async def _read(source: FileSource, start: int, stop: int, progress: OnProgress) -> AsyncGenerator[bytes, None]:
    async for data in source.pieces(start, stop):
        yield data
        start += len(data)
        if progress is not None:
            progress(start)
    if start < stop:
        raise Corrupt(f"the file changed while it was sent: it has {start} bytes now, {stop} were announced")
