"""`python relay.py HOST PORT`: passes TCP connections on to that address, and says where it listens.

SIGSTOP makes it a network that carries nothing any more while every connection stays open; SIGCONT ends that. SIGUSR1 cuts all
connections, as a router does that forgets them; new ones are carried.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def main(host: str, port: int) -> None:
    connections: set[asyncio.StreamWriter] = set()

    def cut() -> None:
        for writer in list(connections):
            writer.transport.abort()

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, cut)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(host, port)
        except OSError:  # the server is away
            writer.close()
            return
        carried = {writer, there_writer}
        connections.update(carried)
        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))
        connections.difference_update(carried)

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    print(f"listening {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
