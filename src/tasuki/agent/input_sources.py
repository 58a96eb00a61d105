"""Sources of stored inputs that an agent fetches itself: the store that dispatchers share, or the dispatchers.

The source is configured at the start (--inputs), never by a request: a form names a hash, and no address.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from tasuki.agent.upload import InputSource
from tasuki.blobs.blob import BLOB_MAX_BYTES, BlobStore
from tasuki.blobs.open_blobs import open_blobs
from tasuki.core.address import Address, parse_url, shown_address
from tasuki.core.ranges import range_headers
from tasuki.errors import ConfigError, Unavailable
from tasuki.net.http.transport import HttpTransport
from tasuki.net.streams import pieces_from
from tasuki.net.tls import client_tls

CONNECT_TIMEOUT_S = 2.0
SILENT_S = 30.0
STORE_RETRY_S = 8.0  # a request waits, and can be repeated
PIECE_BYTES = 1024 * 1024
IN_VAIN_MAX = 2  # rounds over all dispatchers without a byte
FOLDER = "inputs"  # below the place that --inputs names: old inputs are removed, and nothing else there is touched

T = TypeVar("T")


def open_inputs(where: str, token: str, tls_ca: str | None) -> InputSource:
    """Open the source that --inputs names: dispatchers, which are sent the token, or the store that they share."""
    if where.startswith(("http://", "https://")):
        return DispatcherInputs(parse_url(where), token, client_tls(tls_ca))
    return StoredInputs(open_store(where, max_blob_bytes=BLOB_MAX_BYTES, floor_free_bytes=0))


def open_store(where: str, *, max_blob_bytes: int, floor_free_bytes: int) -> BlobStore:
    """Open the store of inputs in the folder or bucket that --inputs names."""
    if "://" in where:
        parts = urlsplit(where)
        if parts.scheme not in ("s3", "file"):
            raise ConfigError(
                f"--inputs {shown_address(where)!r} is not understood; use s3://bucket/prefix, a folder, or (agents) http://dispatcher:7091"
            )
        place = parts._replace(path=f"{parts.path.rstrip('/')}/{FOLDER}").geturl()
    else:
        place = str(Path(where, FOLDER))
    return open_blobs(place, max_blob_bytes=max_blob_bytes, floor_free_bytes=floor_free_bytes, retry_s=STORE_RETRY_S)


class StoredInputs:
    """Inputs in a folder or bucket that this node reaches itself."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._threads = ThreadPoolExecutor(blobs.threads, "tasuki-inputs")

    async def size(self, sha256: str) -> int:
        return await self._in_thread(lambda: self._blobs.size(sha256))

    async def pieces(self, sha256: str, offset: int = 0) -> AsyncGenerator[bytes, None]:
        reader = await self._in_thread(lambda: self._blobs.open(sha256, offset))
        try:
            async with aclosing(pieces_from(iter(reader), self._threads)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            await self._in_thread(reader.close)

    async def close(self) -> None:
        self._blobs.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, work))


class DispatcherInputs:
    """Inputs at any of several dispatchers; if one fails in the middle, the next one continues."""

    def __init__(self, addresses: Sequence[Address], token: str, tls: ssl.SSLContext | None) -> None:
        self._transports = [HttpTransport(address, tls, CONNECT_TIMEOUT_S) for address in addresses]
        for transport in self._transports:
            transport.token = token

    async def pieces(self, sha256: str) -> AsyncGenerator[bytes, None]:
        have, in_vain = 0, 0
        while True:
            before, problems = have, []
            for transport in self._transports:
                try:
                    asking = transport.exchange("GET", f"/inputs/{sha256}", headers=range_headers(have), answer_s=SILENT_S)
                    async with asking as response:
                        async for piece in response.aiter_raw(PIECE_BYTES):
                            have += len(piece)
                            yield piece
                    return
                except Unavailable as error:
                    problems.append(error.message)
            in_vain = 0 if have > before else in_vain + 1
            if in_vain >= IN_VAIN_MAX:
                raise Unavailable(f"input {sha256} could not be fetched: {'; '.join(problems)}")

    async def close(self) -> None:
        for transport in self._transports:
            await transport.close()
