"""/v1/blobs: large inputs and results, streamed both ways, or moved with presigned URLs straight to and from the bucket.

Each transfer has a virtual connection of its own, so that a slow or abandoned one disturbs no other request. The server decides
who may have a presigned URL as it does for the bytes themselves; a URL is given to its caller, and never logged.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tasuki.core.access import Identity
from tasuki.core.job import BlobRef, check_sha256
from tasuki.core.presigned import BlobCommitted, BlobDownload, BlobUpload
from tasuki.core.ranges import body_range, content_range, parse_range
from tasuki.doors.http.context import RequestContext
from tasuki.doors.http.exchange import BODY_TIMEOUT_S, StreamedResponse
from tasuki.doors.http.v1 import stream
from tasuki.errors import BlobMismatch, Corrupt, InvalidInput, NotFound, OffsetConflict, Unavailable

COMMIT_WAIT_S = 20.0  # for one answer; a longer verification is asked for again


def _sha256(context: RequestContext) -> str:
    return str(context.request.path_params["sha256"])


@contextmanager
def _mismatch_is_input() -> Iterator[None]:
    """Raise Corrupt as BlobMismatch: the bytes that were sent are wrong, not the stored ones."""
    try:
        yield
    except Corrupt as error:
        raise BlobMismatch(error.message) from None


# ---------------------------------------------------------------------------------------------------- upload


class BlobOffer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A blob that the caller is about to send."""

    size_bytes: Annotated[int, Meta(ge=0, le=2**53)]


class BlobStatus(msgspec.Struct):
    """`have`: the blob is stored. If not, send it from `offset` on; earlier bytes came in an upload that was cut off."""

    have: bool
    offset: int = 0


class BlobStored(msgspec.Struct):
    """The blob is durable. A job that names it must follow within the hour."""

    sha256: str
    size_bytes: int


class BlobPart(msgspec.Struct):
    """The bytes before `offset` are kept for a day; continue there."""

    sha256: str
    size_bytes: int
    offset: int


async def offer(context: RequestContext, body: BlobOffer) -> BlobStatus:
    """Ask if a blob is stored. It is then kept for the job that will name it; else the answer says where to begin."""
    async with context.transfer() as connection:
        offset = await connection.offer(BlobRef(_sha256(context), body.size_bytes))
    return BlobStatus(True, body.size_bytes) if offset is None else BlobStatus(False, offset)


async def put(context: RequestContext) -> BlobStored | BlobPart:
    """Send the bytes of a blob; hash and size (Content-Length) are checked. Durable when answered.

    With the header Content-Range: bytes N-M/SIZE, send a part, from the offset that the last answer named.
    """
    headers = context.request.headers
    is_part = "content-range" in headers
    start, stop, size_bytes = body_range(headers.get("content-length", ""), headers.get("content-range"))
    if is_part and start == stop:
        raise InvalidInput("Content-Range: the part has no bytes; send bytes FIRST-LAST/SIZE")
    ref = BlobRef(_sha256(context), size_bytes)
    async with context.transfer() as connection, aclosing(_pieces(context.request)) as pieces:
        with _mismatch_is_input():
            offset = await connection.put_part(ref, start, pieces, last=stop == size_bytes)
            if offset is not None and not is_part:
                # A part came earlier and was cut off; this sender does not know, and sends all of it.
                await connection.put_pieces(ref, pieces)
                offset = None
    if offset is None:
        return BlobStored(ref.sha256, size_bytes)
    if offset != stop:
        raise OffsetConflict(f"blob {ref.sha256} continues at byte {offset}, not at {start}", offset=offset)
    return BlobPart(ref.sha256, size_bytes, offset)


async def _pieces(request: Request) -> AsyncGenerator[bytes, None]:
    """Yield the body as it comes; no pause may be longer than another request's whole body may take."""
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


# ---------------------------------------------------------------------------------------------------- download


async def get(context: RequestContext) -> Response:
    """Return the bytes of a job's input or result; with the header Range: bytes=N- from there on."""
    job_id = context.request.query_params.get("job_id")
    if job_id is None:
        raise InvalidInput("which job's blob? Add ?job_id=")
    sha256, offset, last = _sha256(context), *_range_of(context.request)
    stack = AsyncExitStack()
    try:
        connection = await stack.enter_async_context(context.transfer())
        pieces = await stack.enter_async_context(aclosing(connection.blob(sha256, job_id, offset)))
        first = await anext(pieces, b"")  # a blob that cannot or may not be read is an error instead of half an answer
        [place] = await context.http.server.ask(lambda reader: reader.blob_places([sha256]))
        if place is None:
            raise NotFound(f"blob {sha256} of job {job_id[:128]!r} is not stored any more")
        stop = place.size_bytes if last is None else min(last + 1, place.size_bytes)
        if offset and offset >= stop:
            raise InvalidInput(f"the range begins at byte {offset}, the blob has {place.size_bytes}")
        headers = {"Content-Length": str(stop - offset), "Accept-Ranges": "bytes", "X-Content-Type-Options": "nosniff"}
        if offset or last is not None:
            headers["Content-Range"] = content_range(offset, stop, place.size_bytes)
        body = _cut(stream(first, pieces), stop - offset)
        status = 206 if "Content-Range" in headers else 200
        return StreamedResponse(body, stack.pop_all(), status, headers, "application/octet-stream")
    finally:
        await stack.aclose()


def _range_of(request: Request) -> tuple[int, int | None]:
    """Return the (first, last) byte; a range that counts from the end asks for everything: the size is not known yet."""
    first, last = parse_range(request.headers.get("range", "")) or (None, None)
    return (0, None) if first is None else (first, last)


async def _cut(pieces: AsyncGenerator[bytes, None], size_bytes: int) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece[:size_bytes]
            size_bytes -= len(piece)
            if size_bytes <= 0:
                return


# ---------------------------------------------------------------------------------------------------- presigned URLs


class BlobRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A blob that the caller is about to read."""

    job_id: Annotated[str, Meta(min_length=1, max_length=1200)]
    """The job whose input or result the blob is; or `cache:ID/NAME`, a file of a cache."""


async def download(context: RequestContext, body: BlobRequest) -> BlobDownload:
    """Return a URL to read a job's input or result from the bucket, if this server gives such URLs."""
    presigned, sha256 = context.http.config.presigned, check_sha256(_sha256(context))
    if presigned is None:
        return BlobDownload()
    [place] = await context.http.server.ask(lambda reader: reader.blob_places([sha256]))
    if place is None:
        raise NotFound(f"job {body.job_id!r} has no blob {sha256} that you may read")
    # A read from its end on is judged like a read of all of it, and moves no bytes.
    async with context.transfer() as connection, aclosing(connection.blob(sha256, body.job_id, place.size_bytes)) as pieces:
        async for _ in pieces:
            raise Corrupt(f"blob {sha256} has more than its {place.size_bytes} bytes in the bucket")
    return BlobDownload(await presigned.download(place))


async def upload(context: RequestContext, body: BlobOffer) -> BlobUpload:
    """Return URLs to send a blob to the bucket, if this server gives such URLs. Asked again: the parts still missing."""
    presigned, ref = context.http.config.presigned, BlobRef(check_sha256(_sha256(context)), body.size_bytes)
    if presigned is None:
        return BlobUpload()
    async with context.transfer() as connection:
        place = await connection.place_of(ref)
    with _mismatch_is_input():
        plan = await presigned.upload(place, owner_of(context.caller.identity))
    if place.stored and not plan.links:
        return BlobUpload(have=True)
    return BlobUpload(direct=True, links=list(plan.links), missing_bytes=plan.missing_bytes)


async def commit(context: RequestContext, body: BlobOffer) -> BlobCommitted:
    """Have the bytes that were sent to the bucket verified and recorded."""
    presigned, ref = context.http.config.presigned, BlobRef(check_sha256(_sha256(context)), body.size_bytes)
    if presigned is None:
        raise InvalidInput("this server gives no links; send the blob itself: PUT it here")
    async with context.transfer() as connection:
        place = await connection.place_of(ref)
        with _mismatch_is_input():
            taken = await presigned.take(place, owner_of(context.caller.identity), COMMIT_WAIT_S)
        if taken:
            await connection.record_presigned(place)
        return BlobCommitted(taken)


def owner_of(identity: Identity) -> str:
    """Return the owner of an unfinished upload: the worker, whichever token it has by now; else the token."""
    name = f"worker:{identity.worker_id}" if identity.worker_id else identity.name
    return hashlib.sha256(name.encode()).hexdigest()[:16]
