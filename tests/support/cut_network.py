"""A network of one machine that a test can cut: TCP connections of some processes to some places.

with CutNetwork() as network:
    port = network.carry("redis", "127.0.0.1", 6379)      # others connect to this port instead
    network.cut(node.pid, "redis")                        # nothing is carried any more; connections stay open
    network.heal()                                        # what was held up arrives late
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class CutNetwork:
    """Relays in a thread of their own. A connection belongs to the process that opened it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._cut: set[tuple[int, str]] = set()
        self._changed = asyncio.Event()
        self._owners: dict[int, int] = {}
        """Processes by the ports from which they connected."""
        self._onward: dict[int, int] = {}
        """The ports of these processes, by the ports from which the network itself connected to the place."""
        self._spared: set[int] = set()
        """Ports of connections that are carried all the same."""
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[Any] | None] = set()

    def carry(self, name: str, host: str, port: int) -> int:
        """Return a port whose connections go to this address, under this name."""
        return int(self._run(self._listen(name, host, port)))

    def cut(self, pid: int, *names: str, spare: Iterable[int] = ()) -> None:
        """Carry nothing between the process and these places, in either direction, but on connections that come to the place
        from the ports `spare`."""
        self._spared |= {self._onward[port] for port in spare if port in self._onward}
        self._run(self._change(self._cut | {(pid, name) for name in names}))

    def _find_owners(self) -> None:
        """Note which connections are those of processes that are cut off. Reading it from /proc is too slow to be done often, and
        on a busy machine too slow for the loop that carries everything else."""
        ports = _ports()
        for pid in {pid for pid, _ in self._cut}:
            self._owners |= dict.fromkeys((ports[inode] for inode in _sockets_of(pid) if inode in ports), pid)

    def heal(self) -> None:
        self._spared.clear()
        self._run(self._change(set()))

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _change(self, cut: set[tuple[int, str]]) -> None:
        self._cut = cut
        await asyncio.to_thread(self._find_owners)
        self._changed.set()
        self._changed = asyncio.Event()

    async def _listen(self, name: str, host: str, port: int) -> int:
        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            end = (int(writer.get_extra_info("peername")[1]), name)
            self._owners.pop(end[0], None)
            self._tasks.add(asyncio.current_task())
            if any(name == place for _, place in self._cut):
                await asyncio.to_thread(self._find_owners)
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._passage(end)
                there_reader, there_writer = await asyncio.open_connection(host, port)
                self._onward[int(there_writer.get_extra_info("sockname")[1])] = end[0]
                await asyncio.gather(self._pump(end, reader, there_writer), self._pump(end, there_reader, writer))
            writer.close()

        server = await asyncio.start_server(carry, "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _passage(self, end: tuple[int, str]) -> None:
        port, name = end
        while port not in self._spared and (self._owners.get(port, 0), name) in self._cut:
            await self._changed.wait()

    async def _pump(self, end: tuple[int, str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await self._passage(end)
                writer.write(data)
                await writer.drain()
            await self._passage(end)
        writer.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        tasks = [task for task in self._tasks if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_ROW = re.compile(r"^ *\d+: [0F]*0100007F:([0-9A-F]{4}) \S+ 01(?: +\S+){5} +(\d+)", re.MULTILINE)


def _ports() -> dict[str, int]:
    """Return the local ports of open connections on the loopback, by their inodes."""
    tables = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # the second: gRPC's sockets are for both
    return {inode: int(port, 16) for table in tables for port, inode in _ROW.findall(table.read_text())}


def _sockets_of(pid: int) -> Iterator[str]:
    """Yield the inodes of the sockets of a process."""
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    yield target[8:-1]
