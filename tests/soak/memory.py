"""The memory that a process takes while something happens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.processes import rss_bytes

ALLOWED_BYTES = 100 * 10**6
LOOK_S = 0.02


class Peak:
    """The most memory that the process had so far."""

    def __init__(self, pid: int) -> None:
        self.before = self.most = rss_bytes(pid)

    @property
    def grown(self) -> int:
        return self.most - self.before


@contextmanager
def watched(pid: int) -> Iterator[Peak]:
    peak, over = Peak(pid), threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            peak.most = max(peak.most, rss_bytes(pid))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield peak
    finally:
        over.set()
        looking.join()
