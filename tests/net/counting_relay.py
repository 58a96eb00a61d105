"""A way to a server, in a thread of the test's own process: it counts what it carries, and can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Self


class Relay:
    """`with Relay("http://host:port") as relay:`, and its own `endpoint` leads there."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.sent_bytes = self.received_bytes = 0
        self.cut_after_bytes: int | None = None
        """Of what comes from the bucket; once."""

    def __enter__(self) -> Self:
        self._thread.start()
        starting = asyncio.start_server(self._carry, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(30.0)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    def reset(self) -> None:
        self.sent_bytes = self.received_bytes = 0
        self.cut_after_bytes = None

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(*self._target)
        await asyncio.gather(
            self._pump(reader, there_writer, self._note_sent), self._pump(there_reader, writer, self._note_received)
        )

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: Callable[[int], bool]) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if note(len(data)):
                    break
                writer.write(data)
                await writer.drain()
        writer.close()

    def _note_sent(self, size_bytes: int) -> bool:
        self.sent_bytes += size_bytes
        return False

    def _note_received(self, size_bytes: int) -> bool:
        self.received_bytes += size_bytes
        if self.cut_after_bytes is None or self.received_bytes < self.cut_after_bytes:
            return False
        self.cut_after_bytes = None
        return True
