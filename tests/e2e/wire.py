"""A line between two programs that the test holds: it can be cut, made to carry nothing, and mended; it counts what goes through.

with Wire("127.0.0.1", port) as wire: …wire.port…
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

_TLS_APPLICATION_DATA = 23
_TLS_HEADER_BYTES = 5


class _Records:
    """Counts the TLS records of one direction that carry what the program says: about one for each head or body."""

    def __init__(self) -> None:
        self.count = 0
        self._rest = b""

    def feed(self, data: bytes) -> None:
        self._rest += data
        while len(self._rest) >= _TLS_HEADER_BYTES:
            size = _TLS_HEADER_BYTES + int.from_bytes(self._rest[3:5])
            if len(self._rest) < size:
                return
            self.count += self._rest[0] == _TLS_APPLICATION_DATA
            self._rest = self._rest[size:]


class Wire:
    """A proxy in a thread of its own. `port` is where it listens; `target` may be changed while it runs."""

    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)
        self.port = 0
        self.carried_bytes = 0
        self.said_records = 0
        """The number of TLS records from the dialing side."""
        self.connections = 0
        self._refusing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30.0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    # ------------------------------------------------------------------------------------------------ what is done to it

    def snip(self) -> None:
        """Break all connections; new ones are carried."""
        self._do(self._snip)

    def cut(self) -> None:
        """Break all connections, and new ones too."""
        self._do(self._cut)

    def freeze(self) -> None:
        """Carry nothing any more; connections stay open and are made."""
        self._do(self._flowing.clear)

    def mend(self) -> None:
        self._do(self._mend)

    def _do(self, work: Callable[[], object]) -> None:
        async def done() -> None:
            work()

        asyncio.run_coroutine_threadsafe(done(), self._loop).result(30.0)

    def _snip(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def _cut(self) -> None:
        self._refusing = True
        self._snip()

    def _mend(self) -> None:
        self._refusing = False
        self._flowing.set()

    # ------------------------------------------------------------------------------------------------ what it does

    async def _start(self) -> None:
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._server.close()
        self._cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            if not self._refusing:
                await self._carry(reader, writer)
        except (OSError, asyncio.CancelledError):
            """The other end is away, or the test is over."""
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flowing.wait()
        there_reader, there_writer = await asyncio.open_connection(*self.target)
        self._writers.add(there_writer)
        try:
            await asyncio.gather(self._pump(reader, there_writer, _Records()), self._pump(there_reader, writer, None))
        finally:
            self._writers.discard(there_writer)
            there_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, records: _Records | None) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await self._flowing.wait()
                self.carried_bytes += len(data)
                if records is not None:
                    before = records.count
                    records.feed(data)
                    self.said_records += records.count - before
                writer.write(data)
                await writer.drain()
        writer.close()
