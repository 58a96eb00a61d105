"""Hostile connections, in a process of their own: `python tests/support/attacker.py OPTIONS`.

The options are JSON: the ports `http` and `tcp`, whether they have `tls`, the `token` of a client, the `job_id` of a job that
does not end, `kinds` with the number of connections of each, and the file `all_opened`, which is made when there were so many.
One that the server ends is opened again. When standard input is closed, the number that was opened of each kind is printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

AGAIN_S = 1.0
OPENING_MAX = 256  # at once: the attacker itself must not become the bottleneck

Options = dict[str, Any]
FIRST: dict[str, Callable[[Options], bytes]] = {
    "silent": lambda options: b"",
    "half TLS": lambda options: b"\x16\x03\x01\x02\x00\x01\x00",
    "slow header": lambda options: b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ",
    "slow body": lambda options: _request(options, "POST", "/v1/jobs", "Content-Length: 100000\r\n") + b'{"exec": "',
    "half-read answer": lambda options: b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20,
    "long poll that left": lambda options: _request(options, "GET", f"/v1/jobs/{options['job_id']}?wait=60"),
}
"""The first bytes of each kind. Those of the slow kinds are followed by one more each second."""


def _request(options: Options, method: str, path: str, headers: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {options['token']}\r\n{headers}\r\n".encode()


class Connection(asyncio.Protocol):
    """One hostile connection."""

    def __init__(self, kind: str, options: Options, on_end: Callable[[], None]) -> None:
        self._kind, self._options, self._on_end = kind, options, on_end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._loop = transport, asyncio.get_running_loop()
        transport.write(FIRST[self._kind](self._options))
        if self._kind == "half-read answer":
            transport.pause_reading()
            self._loop.call_later(10.0, transport.abort)  # an end is not noticed without reading
        elif self._kind == "long poll that left":
            self._loop.call_later(0.5, transport.abort)
        elif self._kind.startswith("slow"):
            self._loop.call_later(1.0, self._drip)

    def _drip(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"x")
            self._loop.call_later(1.0, self._drip)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()


class Attack:
    """All connections, and the count of those that were opened, by kind."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options, self._kinds = options, options["kinds"]
        self._tls = ssl._create_unverified_context() if options["tls"] else None
        self._opened = dict.fromkeys(self._kinds, 0)
        self._gate = asyncio.Semaphore(OPENING_MAX)

    async def run(self) -> None:
        wanted = [(n, kind) for kind, count in self._kinds.items() for n in range(count)]
        holding = [asyncio.ensure_future(self._hold(kind, n)) for n, kind in sorted(wanted)]
        await asyncio.to_thread(sys.stdin.read)
        print(json.dumps(self._opened), flush=True)
        for task in holding:
            task.cancel()

    async def _hold(self, kind: str, number: int) -> None:
        """Keep one connection open for ever."""
        bare = kind in ("silent", "half TLS")
        port = self._options["tcp" if bare and number % 2 else "http"]
        tls = {} if bare or self._tls is None else {"ssl": self._tls, "server_hostname": ""}
        while True:
            ended = asyncio.Event()
            sock = socket.socket()
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with contextlib.suppress(OSError):
                async with self._gate:
                    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
                    self._count(kind)
                    make = functools.partial(Connection, kind, self._options, ended.set)
                    await asyncio.get_running_loop().create_connection(make, sock=sock, **tls)
                await ended.wait()
            sock.close()
            await asyncio.sleep(AGAIN_S)

    def _count(self, kind: str) -> None:
        self._opened[kind] += 1
        if all(self._opened[kind] >= count for kind, count in self._kinds.items()):
            Path(self._options["all_opened"]).touch()


if __name__ == "__main__":
    asyncio.run(Attack(json.loads(sys.argv[1])).run())
