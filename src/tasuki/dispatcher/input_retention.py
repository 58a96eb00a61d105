"""How long inputs are kept: some days from their last use, whichever dispatcher it was that used them.

A use is noted in the store, at most once in a while for each input, so that a thousand runs of one input cost one note. Any
dispatcher removes what is old, several at once too. What it works with itself it never removes, and what another one has begun to
use has a fresh note. Agents that fetch inputs only read them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tasuki.blobs.blob import BlobStore
from tasuki.dispatcher.metrics import DispatcherMetrics
from tasuki.errors import TasukiError

logger = logging.getLogger("tasuki.dispatcher")
DAY_S = 86_400.0
SOON_S = 60.0  # after the start, and after that every day
AGAIN_S = 3600.0  # after a failure
NOTES_PER_KEPT_TIME = 4  # so that what is kept for a few hours is not taken for unused meanwhile
NOTED_MAX = 16_384  # inputs; of one that is forgotten a use is noted once more
TOLD_EVERY = 1000  # removed inputs


class InputRetention:
    """Of one dispatcher's store."""

    def __init__(
        self, blobs: BlobStore, keep_days: float, metrics: DispatcherMetrics, clock: Callable[[], float] = time.time
    ) -> None:
        """`keep_days` 0: for ever."""
        self._blobs = blobs
        self._keep_s = keep_days * DAY_S
        self._note_every_s = min(DAY_S, self._keep_s / NOTES_PER_KEPT_TIME) if keep_days else DAY_S
        self._metrics = metrics
        self._clock = clock
        self._noted: OrderedDict[str, float] = OrderedDict()
        """When uses of inputs were noted, the oldest first."""
        self._held: Counter[str] = Counter()
        self._closed = threading.Event()

    def close(self) -> None:
        """Nothing more is removed."""
        self._closed.set()

    # ------------------------------------------------------------------------------------------------ uses

    async def used(self, sha256: str) -> None:
        """It is used now. A store that cannot note it refuses nobody: the input is there, and will be for some days."""
        if not self._is_to_be_noted(sha256):
            return
        self.stored(sha256)  # before the note, so that those who come meanwhile make no other
        try:
            await asyncio.to_thread(self._blobs.touch, sha256)
        except (TasukiError, OSError) as error:
            self._noted.pop(sha256, None)
            logger.warning("the use of input %s could not be noted: %s", sha256, error)

    def stored(self, sha256: str) -> None:
        """It has just been put, which the store notes itself."""
        self._noted[sha256] = self._clock()
        self._noted.move_to_end(sha256)
        if len(self._noted) > NOTED_MAX:
            self._noted.popitem(last=False)

    def _is_to_be_noted(self, sha256: str) -> bool:
        noted_at = self._noted.get(sha256)
        return noted_at is None or not 0 <= self._clock() - noted_at < self._note_every_s

    @contextmanager
    def holding(self, hashes: Sequence[str]) -> Iterator[None]:
        """Not to be removed meanwhile."""
        self._held.update(hashes)
        try:
            yield
        finally:
            self._held.subtract(hashes)
            for sha256 in hashes:
                if not self._held[sha256]:
                    del self._held[sha256]

    # ------------------------------------------------------------------------------------------------ cleaning

    async def daily(self) -> None:
        """Until it is canceled. Not at the same time as others that were started with it."""
        if not self._keep_s:
            return
        wait_s = SOON_S
        while True:
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.5))  # noqa: S311 - no secret depends on it
            try:
                await self.clean()
                wait_s = DAY_S
            except (TasukiError, OSError) as error:
                logger.warning("old inputs could not be removed; another try in an hour: %s", error)
                wait_s = AGAIN_S

    async def clean(self) -> int:
        """Once; how many inputs were removed."""
        return await asyncio.to_thread(self._clean, self._clock() - self._keep_s)

    def _is_to_stay(self, sha256: str) -> bool:
        return sha256 in self._held or self._closed.is_set()

    def _clean(self, since: float) -> int:
        removed = removed_bytes = 0
        for ref in self._blobs.remove_untouched(since, self._is_to_stay):
            removed += 1
            removed_bytes += ref.size_bytes
            self._metrics.cleaned.inc()
            self._metrics.cleaned_bytes.inc(ref.size_bytes)
            if removed % TOLD_EVERY == 0:
                logger.info("removed %d inputs so far, %d bytes", removed, removed_bytes)
        days = self._keep_s / DAY_S
        if removed:
            logger.info("removed %d inputs, %d bytes, that nobody has used for %g days", removed, removed_bytes, days)
        return removed
