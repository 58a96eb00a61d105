"""How hints travel between servers on one store: the contract, and the way for a store that has one user.

A carrier promises little, because a hint is never the only way to learn something (`core/hints.py`): what is published reaches
the others soon, or not at all. What it does promise: `publish` neither blocks nor raises nor grows without bound, and whoever
may have missed something is told to look at everything. It belongs to one event loop, and is used on its thread alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class Wakeups(Protocol):
    """See the module's docstring."""

    async def start(self, on_hint: Callable[[bytes], None]) -> None:
        """Listen, and call `on_hint` with every piece that comes, also with our own. Returns at once, and never raises; while the
        carrier is away it is tried again and again. Each time that listening begins, `on_hint` gets an `everything`."""
        ...

    def publish(self, pieces: Sequence[bytes]) -> None:
        """Send these pieces (of `hints.split`) to all servers. What cannot be sent in time becomes one `everything`."""
        ...

    async def close(self) -> None:
        """End it. What was not sent yet is lost."""
        ...


class NoWakeups:
    """There is nobody else to tell."""

    async def start(self, on_hint: Callable[[bytes], None]) -> None:
        pass

    def publish(self, pieces: Sequence[bytes]) -> None:
        pass

    async def close(self) -> None:
        pass
