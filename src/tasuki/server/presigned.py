"""Blobs that do not travel through the server: it gives links to the bucket, and takes over what was brought there.

What may block (the bucket) happens on threads of its own. Verifying what came in parts takes as long as reading it; so it goes
on by itself, and whoever asked looks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tasuki.blobs.s3.presign import PresignedUrl, S3Presign, UploadPlan
from tasuki.core.store_messages import BlobPlace

LINK_THREADS = 4
TAKEN_AT_ONCE = 4  # each reads a blob and hashes it

T = TypeVar("T")
_Whose = tuple[str, int, str]


class PresignedTransfers:
    """The links of one server. Whoever asks here was let in, and may read or bring this blob."""

    def __init__(self, presign: S3Presign) -> None:
        self._presign = presign
        self._links = ThreadPoolExecutor(LINK_THREADS, thread_name_prefix="tasuki-blobs-links")
        self._takers = ThreadPoolExecutor(TAKEN_AT_ONCE, thread_name_prefix="tasuki-blobs-taken")
        self._taking: dict[_Whose, asyncio.Future[None]] = {}

    async def check(self) -> None:
        """Whether the bucket can be used so; errors are for the operator."""
        await self._on_thread(self._presign.check)

    async def download(self, place: BlobPlace) -> PresignedUrl:
        return await self._on_thread(lambda: self._presign.download(place.sha256, place.size_bytes, place.generation))

    async def upload(self, place: BlobPlace, owner: str) -> UploadPlan:
        return await self._on_thread(lambda: self._presign.upload(place.sha256, place.size_bytes, place.generation, owner))

    async def take(self, place: BlobPlace, owner: str, wait_s: float) -> bool:
        """Whether the blob is in its place, verified; False if that takes longer than `wait_s`."""
        whose = (place.sha256, place.generation, owner)
        taking = self._taking.get(whose)
        if taking is None:
            taking = asyncio.get_running_loop().run_in_executor(
                self._takers, self._presign.take, place.sha256, place.size_bytes, place.generation, owner
            )
            self._taking[whose] = taking
            taking.add_done_callback(lambda done: self._taken(whose, done))
        await asyncio.wait([taking], timeout=wait_s)
        if not taking.done():
            return False
        taking.result()
        return True

    def _taken(self, whose: _Whose, done: asyncio.Future[None]) -> None:
        """If nobody waits any more: who looks again finds it in its place, or begins again."""
        del self._taking[whose]
        if not done.cancelled():
            done.exception()

    def close(self) -> None:
        """What is being verified is left as it is, for another server or another time."""
        self._presign.close()
        self._links.shutdown(wait=False)
        self._takers.shutdown(wait=False, cancel_futures=True)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._links, work)
