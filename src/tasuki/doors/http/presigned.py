"""/v1/blobs/{sha256}/…: links with which a peer moves the bytes straight to and from the bucket. Who may have one is asked of the
server as for the bytes themselves. A link is told to whoever asked for it, and to no log.
"""

from __future__ import annotations

import hashlib
from contextlib import aclosing
from typing import TYPE_CHECKING

from tasuki.core.job import BlobRef, is_sha256
from tasuki.doors.http.context import RequestContext, transfer_talk
from tasuki.doors.http.response_schemas import BlobDownload, BlobLink, BlobTaken, BlobUpload
from tasuki.errors import BlobMismatch, Corrupt, InvalidInput, NotFound

if TYPE_CHECKING:
    from tasuki.core.access import Identity
    from tasuki.server.presigned import PresignedUrl

COMMIT_WAIT_S = 20.0  # for one answer; what takes longer is asked for again


async def download(call: RequestContext) -> BlobDownload:
    """A link to read a job's input or result from the bucket, if this server gives such links."""
    direct, sha256, job_id = call.house.config.direct, _sha256(call), call.body.job_id
    if direct is None:
        return BlobDownload()
    [place] = await call.house.server.ask(lambda reader: reader.blob_places([sha256]))
    if place is None:
        raise NotFound(f"job {job_id!r} has no blob {sha256} that you may read")
    # To ask for what is behind its end is judged as to ask for all of it, and moves no bytes.
    async with transfer_talk(call) as talk, aclosing(talk.blob(sha256, job_id, place.size_bytes)) as pieces:
        async for _ in pieces:
            raise Corrupt(f"blob {sha256} has more than its {place.size_bytes} bytes in the bucket")
    return BlobDownload(_told(await direct.download(place)))


async def upload(call: RequestContext) -> BlobUpload:
    """Links to send a blob to the bucket, if this server gives such links. Asked again: what is still missing."""
    direct, ref = call.house.config.direct, BlobRef(_sha256(call), call.body.size_bytes)
    if direct is None:
        return BlobUpload()
    async with transfer_talk(call) as talk:
        place = await talk.place_of(ref)
    try:
        way = await direct.upload(place, owner_of(call.caller.identity))
    except Corrupt as error:
        raise BlobMismatch(error.message) from None
    if place.stored and not way.links:
        return BlobUpload(have=True)
    return BlobUpload(direct=True, links=[_told(link) for link in way.links], missing_bytes=way.missing_bytes)


async def commit(call: RequestContext) -> BlobTaken:
    """All bytes of a blob were sent to the bucket: have them verified and recorded."""
    direct, ref = call.house.config.direct, BlobRef(_sha256(call), call.body.size_bytes)
    if direct is None:
        raise InvalidInput("this server gives no links; send the blob itself: PUT it here")
    async with transfer_talk(call) as talk:
        place = await talk.place_of(ref)
        try:
            taken = await direct.take(place, owner_of(call.caller.identity), COMMIT_WAIT_S)
        except Corrupt as error:
            raise BlobMismatch(error.message) from None
        if taken:
            await talk.brought(place)
        return BlobTaken(taken)


def owner_of(identity: Identity) -> str:
    """Whose an unfinished upload is: a worker's own, whichever token it has by now; else this token's."""
    name = f"worker:{identity.worker_id}" if identity.worker_id else identity.name
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _sha256(call: RequestContext) -> str:
    sha256 = str(call.request.path_params["sha256"])
    if not is_sha256(sha256):
        raise InvalidInput(f"not a sha256: {sha256[:80]!r}; it must be 64 lower-case hex digits")
    return sha256


def _told(link: PresignedUrl) -> BlobLink:
    return BlobLink(link.url, link.expires_s, link.offset, link.size_bytes, link.headers)
