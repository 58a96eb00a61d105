"""Waiting for a condition of the outside world: the one `until` of the tests.

    until(lambda: client.status("a").state == "RUNNING", 10.0, "job a runs")
    await until_async(lambda: len(server.connections) == 2, what="both are connected")

A stand-in that notices each of its events derives from `Watched`, and its waiters look again at each event instead of every few
milliseconds: `await stand_in.until(lambda: len(stand_in.requests) == 2)`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
TIMEOUT_S = 20.0
POLL_S = 0.01


def until(condition: Callable[[], T], timeout_s: float = TIMEOUT_S, what: str = "the condition holds") -> T:
    """Poll `condition` until its value is true, and return that value; AssertionError with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(POLL_S)
    return value


async def until_async(condition: Callable[[], T], timeout_s: float = TIMEOUT_S, what: str = "the condition holds") -> T:
    """Poll `condition` as `until` does, and let the event loop run in between."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(POLL_S)
    return value


class Watched:
    """Base of stand-ins that call `changed` at each of their events, so that a test can wait without polling."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def changed(self) -> None:
        """Let all waiters look at their conditions again."""
        self._event.set()

    async def until(self, condition: Callable[[], object], timeout_s: float = TIMEOUT_S, what: str = "an event") -> None:
        """Wait until `condition` is true, looking again at each event; AssertionError with `what` after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._event.clear()
                    await self._event.wait()
        except TimeoutError:
            raise AssertionError(f"not within {timeout_s:g} s: {what}") from None
