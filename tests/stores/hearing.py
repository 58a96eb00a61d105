"""Hints that servers hear of each other, whatever carries them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import uvloop

from tasuki.core.cluster_messages import Hint, decode, everything
from tasuki.stores.wakeups import Wakeups
from tests.support.waiting import Watched

TIMEOUT_S = 25.0
LISTENING = decode(everything())
RUNNERS: dict[str, Callable[[Coroutine[Any, Any, None]], None]] = {"asyncio": asyncio.run, "uvloop": uvloop.run}

W = TypeVar("W", bound=Wakeups)


class Ear(Watched):
    """The hints that one server heard."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Hint] = []

    def __call__(self, piece: bytes) -> None:
        self.heard.append(decode(piece))
        self.changed()

    async def hears(self, condition: Callable[[list[Hint]], bool], timeout_s: float = TIMEOUT_S) -> None:
        await self.until(lambda: condition(self.heard), timeout_s)


@asynccontextmanager
async def listening(wakeups: W) -> AsyncIterator[tuple[W, Ear]]:
    """A server's wakeups while it listens."""
    ear = Ear()
    await wakeups.start(ear)
    try:
        await ear.hears(lambda heard: LISTENING in heard)
        yield wakeups, ear
    finally:
        await wakeups.close()


def hint(name: str, *job_ids: str) -> Hint:
    return Hint(server_id=name, ended=job_ids)
