"""The share of the disk that one uploader may fill with blobs that no job refers to: never more than it leaves free.

Counted are the bytes that an uploader has brought and that no job has been seen to refer to, those of its half-sent uploads, and
those that it has announced. The first two are at most as many as stay free above the floor, so that whatever one uploader does,
another one can still bring its blobs. A bucket has no floor, and no shares.

Jobs may refer to a blob at any server, so references are looked up, some at a time, when a share seems to be used up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice

from tasuki.blobs.blob import BlobStore
from tasuki.clocks import now
from tasuki.core.job import BlobRef
from tasuki.errors import DiskFull

BLOB_COST_BYTES = 4096  # what a blob takes beside its bytes, of a block and an inode
BLOBS_MAX = 100_000  # of one uploader; each takes some 300 bytes of memory here
LOOKED_UP_MAX = 256  # at once, about 10 ms of a reader

Referenced = Callable[[Sequence[str]], Awaitable[set[str]]]
"""Returns those of the blobs to which jobs refer."""


class _Brought:
    """The blobs of one uploader that no job has been seen to refer to; those that were looked up longest ago come first."""

    def __init__(self) -> None:
        self.blobs: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """(size_bytes, when it was brought or offered last), by sha256."""
        self.size_bytes = 0

    def add(self, ref: BlobRef, at: float) -> None:
        self.drop(ref.sha256)
        self.blobs[ref.sha256] = (ref.size_bytes + BLOB_COST_BYTES, at)
        self.size_bytes += ref.size_bytes + BLOB_COST_BYTES

    def drop(self, sha256: str) -> None:
        size_bytes, _ = self.blobs.pop(sha256, (0, 0.0))
        self.size_bytes -= size_bytes


class UploadShares:
    """The shares of all uploaders of one server. `grace_s`: after it a blob that no job refers to is collected."""

    def __init__(self, blobs: BlobStore, referenced: Referenced, grace_s: float) -> None:
        self._blobs = blobs
        self._referenced = referenced
        self._grace_s = grace_s
        self._brought: dict[str, _Brought] = {}

    def add(self, owner: str, ref: BlobRef) -> None:
        """Count a blob that the uploader has brought."""
        brought = self._brought.setdefault(owner, _Brought())
        at = now().monotonic
        brought.add(ref, at)
        for sha256, (_, brought_at) in list(islice(brought.blobs.items(), 2)):
            if brought_at < at - self._grace_s:
                brought.drop(sha256)

    def has_brought(self, owner: str, sha256: str) -> bool:
        """Return whether the uploader has brought this blob; offered again, it is kept for the grace time again."""
        brought = self._brought.get(owner)
        if brought is None or sha256 not in brought.blobs:
            return False
        brought.blobs[sha256] = (brought.blobs[sha256][0], now().monotonic)
        return True

    async def check(self, owner: str, to_come_bytes: int, call: Callable[..., Awaitable[None]]) -> None:
        """Raise DiskFull if the bytes that are to come pass the share of their uploader. `call` runs a function on a thread."""
        brought = self._brought.get(owner, _Brought())
        while True:
            try:
                if len(brought.blobs) >= BLOBS_MAX:
                    raise DiskFull(f"{owner} has brought {BLOBS_MAX} blobs to which no job refers")
                await call(self._check_space, owner, brought.size_bytes, to_come_bytes)
                return
            except DiskFull as error:
                before_bytes = brought.size_bytes
                await self._look_up(owner, brought)
                if brought.size_bytes == before_bytes:
                    raise DiskFull(f"{error.message}. Submit the jobs that need the blobs that were uploaded before") from None

    def _check_space(self, owner: str, brought_bytes: int, to_come_bytes: int) -> None:
        # Twice what comes: by as much as its uploader then has, less is free.
        self._blobs.make_space(brought_bytes + self._blobs.resumable_bytes(owner) + 2 * to_come_bytes)

    async def _look_up(self, owner: str, brought: _Brought) -> None:
        """Drop the blobs that jobs refer to by now, and those that the collection may have; look at some of them only."""
        some = list(islice(brought.blobs.items(), LOOKED_UP_MAX))
        used = await self._referenced([sha256 for sha256, _ in some]) if some else set()
        oldest = now().monotonic - self._grace_s
        for sha256, (_, at) in some:
            if sha256 in used or at < oldest:
                brought.drop(sha256)
            elif sha256 in brought.blobs:
                brought.blobs.move_to_end(sha256)
        if not brought.blobs:
            self._brought.pop(owner, None)
