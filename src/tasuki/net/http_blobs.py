"""Blobs over HTTP: a request each, streamed. `blobs.py` is the other way to carry them, and decides what is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import BinaryIO

import msgspec

from tasuki.core.job import BlobRef
from tasuki.core.protocol import CHUNK_BYTES
from tasuki.errors import Corrupt, InvalidInput
from tasuki.net.http_names import BLOBS_PATH
from tasuki.net.http_transport import CutOff, HttpTransport

OFFER_MAX_BYTES = 64 * 1024


class _Had(msgspec.Struct):
    have: bool


class HttpBlobs:
    """The blobs of one address."""

    def __init__(self, transport: HttpTransport) -> None:
        self._transport = transport

    async def put(self, file: BinaryIO, ref: BlobRef, progress: Callable[[int], None] | None) -> None:
        """Make sure that the server has this blob; nothing is sent if it does."""
        path = f"{BLOBS_PATH}/{ref.sha256}"
        if await self._is_there(path, ref):
            return
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(ref.size_bytes)}
        try:
            async with self._transport.exchange("PUT", path, headers=headers, content=_read(file, ref, progress)):
                """The status says it all."""
        except InvalidInput as error:
            if "Content-Length" in error.message:  # less came than was announced
                raise Corrupt(f"the file changed while it was sent: it has no longer {ref.size_bytes} bytes") from None
            raise

    async def _is_there(self, path: str, ref: BlobRef) -> bool:
        body = msgspec.json.encode({"size_bytes": ref.size_bytes})
        async with self._transport.exchange("POST", path, content=body, headers={"Content-Type": "application/json"}) as response:
            answer = b""
            async for piece in response.aiter_bytes():
                answer += piece
                if len(answer) > OFFER_MAX_BYTES:
                    break
        try:
            return msgspec.json.decode(answer, type=_Had).have
        except msgspec.DecodeError as error:
            raise CutOff(f"the answer to the offer of a blob cannot be read: {error}") from None

    async def pieces(self, ref: BlobRef, job_id: str, offset: int) -> AsyncGenerator[bytes, None]:
        """The bytes from an offset on. More than there should be is Corrupt."""
        if offset and offset == ref.size_bytes:
            return
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        path = f"{BLOBS_PATH}/{ref.sha256}"
        async with self._transport.exchange("GET", path, params={"job_id": job_id}, headers=headers) as response:
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
                raise CutOff(f"a blob ended {left} bytes before its end")


async def _read(file: BinaryIO, ref: BlobRef, progress: Callable[[int], None] | None) -> AsyncGenerator[bytes, None]:
    file.seek(0)
    sent = 0
    loop = asyncio.get_running_loop()
    while data := await loop.run_in_executor(None, file.read, min(CHUNK_BYTES, ref.size_bytes - sent)):
        yield data
        sent += len(data)
        if progress is not None:
            progress(sent)
