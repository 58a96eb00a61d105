"""An upload whose client, and then whose server, is killed on the way: how many bytes does it take in all?"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from tasuki.core.address import parse_url
from tests.e2e.metered import Metered
from tests.support.processes import ChildProcess, ServerProcess, start_server
from tests.support.waiting import until

SEND = """
import asyncio, sys
from tasuki import AsyncClient

async def main():
    async with AsyncClient(sys.argv[1]) as client:
        print("sent", (await client.put_file(sys.argv[2])).sha256, flush=True)

asyncio.run(main())
"""
MIB = 1024 * 1024


def make_file(path: Path, size_bytes: int) -> str:
    """Write random bytes, the same 16 MiB again and again with their number; return the sha256."""
    block, digest = os.urandom(min(size_bytes, 16 * MIB)), hashlib.sha256()
    with path.open("wb") as file:
        for number, start in enumerate(range(0, size_bytes, len(block))):
            piece = (number.to_bytes(8, "big") + block[8:])[: size_bytes - start]
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


def kept_bytes(server: ServerProcess) -> int:
    """Return the number of bytes that the server has on its disk of an upload under way."""
    return sum(path.stat().st_size for path in (server.folder.blobs / "tmp").iterdir())


def port_of(server: ServerProcess, door: str) -> int:
    return parse_url(server.http_url if door == "http" else server.url)[0].port


def send_with_deaths(tmp_path: Path, door: str, size_bytes: int, patience_s: float) -> int:
    """Kill the client at half, and the server at three quarters; return the number of bytes sent in all."""
    path = tmp_path / "large.bin"
    sha256 = make_file(path, size_bytes)
    with start_server(tmp_path, "--http", "127.0.0.1:0") as server, Metered(port_of(server, door)) as way:

        def client(log: str) -> ChildProcess:
            command = [sys.executable, "-c", SEND, f"{door}://127.0.0.1:{way.port}", str(path)]
            return ChildProcess(command, tmp_path / log, {"TASUKI_TOKEN": server.token})

        def stands_at(share: float) -> Callable[[], bool]:
            return lambda: way.holds and kept_bytes(server) >= share * size_bytes - MIB

        way.hold_at(size_bytes // 2)
        with client("first.log"):
            until(stands_at(0.5), patience_s, "half of it is on its way")
        way.cut()
        way.hold_at(size_bytes * 3 // 4)
        with client("second.log") as second:
            until(stands_at(0.75), patience_s, "three quarters of it are on their way")
            server.kill()
            server.restart()
            way.target = port_of(server, door)
            way.cut()
            way.hold_at(0)
            second.wait_for_output(f"sent {sha256}", patience_s)
        assert kept_bytes(server) == 0
        path.unlink()
        return way.sent
