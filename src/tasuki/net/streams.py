"""Both ends of a transfer: files and blob readers as streams of pieces, pieces into a file. All blocking calls run on threads.

A thread may be in the middle of a call when its transfer is given up. So a source or sink is closed (`async with`) before its
file is, which waits for that call. Nothing but the file is touched.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Executor
from typing import Any, BinaryIO, Self

from tasuki.event_loop import ignore_result

AT_ONCE_BYTES = 1024 * 1024  # of one call on a thread, which costs as much as hashing some 100 KiB
SMALL_BYTES = 16 * 1024  # a piece below this is written in place, which is faster than a call on a thread

OnProgress = Callable[[int], None] | None  # gets the number of bytes that were sent so far


class FileSource:
    """A file that is sent, from any offset, with the next piece read ahead."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._lock = threading.Lock()  # a read whose transfer was given up may still be under way
        self._reading: set[asyncio.Future[bytes]] = set()

    async def pieces(self, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        """Yield the bytes [start, stop); fewer if the file ends before."""
        ahead = self._read(start, stop)
        while data := await asyncio.shield(ahead):
            start += len(data)
            ahead = self._read(start, stop)
            yield data

    def _read(self, start: int, stop: int) -> asyncio.Future[bytes]:
        reading = asyncio.get_running_loop().run_in_executor(None, self._read_at, start, min(AT_ONCE_BYTES, stop - start))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        reading.add_done_callback(ignore_result)
        return reading

    def _read_at(self, offset: int, size_bytes: int) -> bytes:
        if not size_bytes:
            return b""
        with self._lock:
            self._file.seek(offset)
            return self._file.read(size_bytes)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._reading:
            await asyncio.wait(self._reading)


async def pieces_from(chunks: Iterator[bytes], threads: Executor | None = None) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a blocking iterator, which runs on a thread, in pieces of about AT_ONCE_BYTES."""
    loop = asyncio.get_running_loop()
    while True:
        reading = loop.run_in_executor(threads, _joined, chunks)
        try:
            piece = await asyncio.shield(reading)
        except asyncio.CancelledError:
            await asyncio.wait([reading])  # the caller closes what the thread reads from
            raise
        if not piece:
            return
        yield piece


def _joined(chunks: Iterator[bytes]) -> bytes:
    found: list[bytes] = []
    size_bytes = 0
    for chunk in chunks:
        found.append(chunk)
        size_bytes += len(chunk)
        if size_bytes >= AT_ONCE_BYTES:
            break
    return found[0] if len(found) == 1 else b"".join(found)


class FileSink:
    """Writes incoming pieces and adds them to a digest. All of them are written and hashed after `flush`."""

    def __init__(self, write: Callable[[bytes], Any], digest: Any) -> None:
        self._write = write
        self._digest = digest
        self._pieces: list[bytes] = []
        self._size_bytes = 0
        self._writing: asyncio.Future[None] | None = None

    async def add(self, piece: bytes) -> None:
        if len(piece) < SMALL_BYTES and not self._pieces and self._writing is None:
            self._write_all([piece])
            return
        self._pieces.append(piece)
        self._size_bytes += len(piece)
        if self._size_bytes >= AT_ONCE_BYTES:
            await self._hand_over()

    async def flush(self) -> None:
        if self._pieces:
            await self._hand_over()
        await self._written()

    async def _hand_over(self) -> None:
        await self._written()
        pieces, self._pieces, self._size_bytes = self._pieces, [], 0
        self._writing = asyncio.get_running_loop().run_in_executor(None, self._write_all, pieces)

    async def _written(self) -> None:
        if self._writing is not None:
            await asyncio.shield(self._writing)
            self._writing = None

    def _write_all(self, pieces: list[bytes]) -> None:
        for piece in pieces:
            self._digest.update(piece)
            self._write(piece)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])
