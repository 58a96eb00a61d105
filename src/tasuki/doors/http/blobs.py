"""/v1/blobs: large inputs and results, streamed both ways. Each transfer has a virtual connection of its own, so that one that is
slow, or left in the middle, is nobody else's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from tasuki.core.job import BlobRef
from tasuki.core.ranges import BodyRange, body_range, content_range, parse_range
from tasuki.doors.http.context import RequestContext, transfer_talk
from tasuki.doors.http.exchange import BODY_TIMEOUT_S
from tasuki.doors.http.response_schemas import BlobHad, BlobKept, BlobPart
from tasuki.doors.http.v1 import stream
from tasuki.errors import BlobMismatch, Corrupt, InvalidInput, NotFound, OffsetConflict, Unavailable


def _sha256(call: RequestContext) -> str:
    return str(call.request.path_params["sha256"])


async def offer(call: RequestContext) -> BlobHad:
    """Is a blob of this hash here? Then it need not be sent, and is kept for the job that will name it. Else: from where on?"""
    async with transfer_talk(call) as talk:
        offset = await talk.offer(BlobRef(_sha256(call), call.body.size_bytes))
    return BlobHad(True, call.body.size_bytes) if offset is None else BlobHad(False, offset)


async def put(call: RequestContext) -> BlobKept | BlobPart:
    """The bytes of a blob; its hash and its size (Content-Length) are checked. Durable when this is answered.

    With the header Content-Range: bytes N-M/SIZE a piece of it, from where the answer to the offer, or to the last piece, said.
    """
    headers = call.request.headers
    part = body_range(headers.get("content-length", ""), headers.get("content-range"))
    if "content-range" in headers:
        return await _put_part(call, part)
    ref = BlobRef(_sha256(call), part.size_bytes)
    async with transfer_talk(call) as talk, aclosing(_pieces(call.request)) as pieces:
        with _told_as_input():
            if await talk.put_part(ref, 0, pieces, last=True) is not None:
                # A part of it came earlier and was cut off. This is all of it nevertheless, from a sender that does not know.
                await talk.put_pieces(ref, pieces)
    return BlobKept(ref.sha256, ref.size_bytes)


async def _put_part(call: RequestContext, part: BodyRange) -> BlobKept | BlobPart:
    start, stop, size_bytes = part
    if start == stop:
        raise InvalidInput("Content-Range: the part has no bytes; send bytes FIRST-LAST/SIZE")
    ref = BlobRef(_sha256(call), size_bytes)
    async with transfer_talk(call) as talk, aclosing(_pieces(call.request)) as pieces:
        with _told_as_input():
            offset = await talk.put_part(ref, start, pieces, last=stop == size_bytes)
    if offset is None:
        return BlobKept(ref.sha256, size_bytes)
    if offset != stop:
        raise OffsetConflict(f"blob {ref.sha256} goes on at byte {offset}, not at {start}", offset=offset)
    return BlobPart(ref.sha256, size_bytes, offset)


@contextmanager
def _told_as_input() -> Iterator[None]:
    """What was sent is wrong, not what is kept here."""
    try:
        yield
    except Corrupt as error:
        raise BlobMismatch(error.message) from None


async def _pieces(request: Request) -> AsyncGenerator[bytes, None]:
    """The body as it comes; no pause in it may be longer than a whole other body."""
    body = aiter(request.stream())
    try:
        while True:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                piece = await anext(body, None)
            if piece is None:
                return
            if piece:
                yield piece
    except TimeoutError:
        raise Unavailable(f"nothing more of the blob came within {BODY_TIMEOUT_S:g} s; send the rest") from None
    except ClientDisconnect:
        raise InvalidInput("the blob ended before it was whole") from None


async def get(call: RequestContext) -> Response:
    """The bytes of a job's input or result. With the header Range: bytes=N- from there on."""
    job_id = call.request.query_params.get("job_id")
    if job_id is None:
        raise InvalidInput("which job's blob? Add ?job_id=")
    sha256, offset, last = _sha256(call), *_range_of(call.request)
    stack = AsyncExitStack()
    try:
        talk = await stack.enter_async_context(transfer_talk(call))
        pieces = await stack.enter_async_context(aclosing(talk.blob(sha256, job_id, offset)))
        first = await anext(pieces, b"")  # what cannot be read, or may not, is an error and no half answer
        [place] = await call.house.server.ask(lambda reader: reader.blob_places([sha256]))
        if place is None:
            raise NotFound(f"blob {sha256} of job {job_id[:128]!r} is not stored any more")
        stop = place.size_bytes if last is None else min(last + 1, place.size_bytes)
        if offset and offset >= stop:
            raise InvalidInput(f"the range begins at byte {offset}, the blob has {place.size_bytes}")
        headers = {"Content-Length": str(stop - offset), "Accept-Ranges": "bytes", "X-Content-Type-Options": "nosniff"}
        if offset or last is not None:
            headers["Content-Range"] = content_range(offset, stop, place.size_bytes)
        body = _cut(stream(stack.pop_all(), first, pieces), stop - offset)
        return StreamingResponse(body, 206 if "Content-Range" in headers else 200, headers, "application/octet-stream")
    finally:
        await stack.aclose()


def _range_of(request: Request) -> tuple[int, int | None]:
    """Return the (first, last) byte; a range that counts from the end asks for everything: the size is not known yet."""
    first, last = parse_range(request.headers.get("range", "")) or (None, None)
    return (0, None) if first is None else (first, last)


async def _cut(pieces: AsyncGenerator[bytes, None], size_bytes: int) -> AsyncGenerator[bytes, None]:
    """The first so many bytes."""
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece[:size_bytes]
            size_bytes -= len(piece)
            if size_bytes <= 0:
                return
