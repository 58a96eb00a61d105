"""Blobs over HTTP, streamed: a request to read one, some to send one, each of which goes on where the last was taken to.

`blobs.py` is the other way to carry them, and decides what is tried again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress

import msgspec

from tasuki.core.job import BlobRef
from tasuki.core.ranges import content_range, range_headers
from tasuki.errors import Conflict, Corrupt, ResponseLost, TooLarge
from tasuki.net.http.names import BLOBS_PATH
from tasuki.net.http.presigned import DirectBlobs, NotDirect
from tasuki.net.http.transport import HttpTransport
from tasuki.net.streams import FileSource

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
