"""A way between a client and a server that counts, and carries only as much as the test wants: an upload stands still at half."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Self

PIECE_BYTES = 256 * 1024


class Metered:
    """`with Metered(port) as way:`; the client connects to `way.port`. `sent` counts what clients have sent through it."""

    def __init__(self, target: int) -> None:
        self.target = target
        """The server's port, which may change."""
        self.sent = 0
        self._limit = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._moved = asyncio.Condition()
        self._connections: set[asyncio.StreamWriter] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30.0)
        return self

    def __exit__(self, *error: object) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    def hold_at(self, total: int) -> None:
        """Carry no more than so many bytes of clients; 0: carry everything."""

        async def change() -> None:
            async with self._moved:
                self._limit = total
                self._moved.notify_all()

        asyncio.run_coroutine_threadsafe(change(), self._loop).result(30.0)

    @property
    def holds(self) -> bool:
        """The proxy has carried all that it may."""
        return bool(self._limit) and self.sent >= self._limit

    def cut(self) -> None:
        """Cut all connections."""

        async def abort() -> None:
            for writer in list(self._connections):
                writer.transport.abort()

        asyncio.run_coroutine_threadsafe(abort(), self._loop).result(30.0)

    async def _start(self) -> None:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0, limit=PIECE_BYTES)
        self.port = server.sockets[0].getsockname()[1]

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target, limit=PIECE_BYTES)
        except OSError:  # the server is away
            writer.close()
            return
        ends = {writer, there_writer}
        self._connections |= ends
        await asyncio.gather(self._up(reader, there_writer), self._down(there_reader, writer))
        self._connections -= ends

    async def _up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(PIECE_BYTES):
                async with self._moved:
                    await self._moved.wait_for(lambda: not self.holds)
                self.sent += len(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(PIECE_BYTES):
                writer.write(data)
                await writer.drain()
        writer.close()
