"""Reads beside the store's own thread: each reader is a connection of its own, used by a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tasuki.server.queries import Reader

T = TypeVar("T")


class _Thread:
    def __init__(self, open_reader: Callable[[], Reader]) -> None:
        self._open = open_reader
        self._reader: Reader | None = None
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="tasuki-reader")
        self.asked = 0

    def answer(self, question: Callable[[Reader], T]) -> T:
        if self._reader is None:
            self._reader = self._open()
        return question(self._reader)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


class Readers:
    """`await ask(lambda reader: reader.get(...))`: by whichever thread has the least to do. Readers open when first asked."""

    def __init__(self, open_reader: Callable[[], Reader], threads: int = 1) -> None:
        self._threads = [_Thread(open_reader) for _ in range(threads)]

    async def ask(self, question: Callable[[Reader], T]) -> T:
        thread = min(self._threads, key=lambda one: one.asked)
        thread.asked += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(thread.pool, thread.answer, question)
        finally:
            thread.asked -= 1

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        for thread in self._threads:
            await loop.run_in_executor(thread.pool, thread.close)
            thread.pool.shutdown()
