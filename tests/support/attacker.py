"""Hostile connections, in a process of their own: `python tests/support/attacker.py OPTIONS`.

The options are JSON: the ports `http` and `tcp`, whether they have `tls`, the `token` of a client, the `job_id` of a job that
does not end, `kinds` with the number of connections of each, and the file `all_opened`, which is made when there were so many.
One that the server ends is opened again. When standard input is closed, the number that was opened of each kind is printed.

The server is to be measured, and not the attacker: this is one loop over epoll, with the least work for each connection. It opens
OPENED_PER_S until all kinds are there and AGAIN_PER_S afterwards, and gives way to the others (NICE).
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import resource
import select
import socket
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OPENED_PER_S = 1000
AGAIN_PER_S = 200
NICE = 5
HELD_S = 10.0  # a connection that reads nothing does not notice its end

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
LEAVES_AFTER_S = {"long poll that left": 0.5, "half-read answer": HELD_S}


def _request(options: Options, method: str, path: str, headers: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {options['token']}\r\n{headers}\r\n".encode()


class Connection:
    """One hostile connection, not connected yet. `advance` is called when its socket can be read or written."""

    def __init__(self, kind: str, first: bytes, port: int, tls: ssl.SSLContext | None) -> None:
        self.kind, self._first, self._tls = kind, first, tls
        self.sock = socket.socket()
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.sock.connect_ex(("127.0.0.1", port))
        self.is_open = False
        """The first bytes are sent."""

    def advance(self) -> int:
        """Return the events to wait for next; OSError if the connection has ended."""
        try:
            if self._tls is not None:
                self.sock, self._tls = self._tls.wrap_socket(self.sock, do_handshake_on_connect=False), None
            if not self.is_open:
                if isinstance(self.sock, ssl.SSLSocket):
                    self.sock.do_handshake()
                self.sock.sendall(self._first)
                self.is_open = True
            elif not self.sock.recv(4096):
                raise ConnectionResetError
        except (ssl.SSLWantReadError, BlockingIOError):
            return select.EPOLLIN
        except ssl.SSLWantWriteError:
            return select.EPOLLOUT
        return 0 if self.kind == "half-read answer" else select.EPOLLIN

    def drip(self) -> None:
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            self.sock.send(b"x")


class Attack:
    """All connections, and the count of those that were opened, by kind."""

    def __init__(self, options: Options) -> None:
        self._options, self._kinds = options, options["kinds"]
        self._tls = ssl._create_unverified_context() if options["tls"] else None
        self.opened = dict.fromkeys(self._kinds, 0)
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        wanted = sorted((number, kind) for kind, count in self._kinds.items() for number in range(count))
        self._closed = [kind for _, kind in reversed(wanted)]
        """Kinds of the connections that are to be opened, the next one last."""
        self._timers: list[tuple[float, int, Connection]] = []

    def run(self) -> None:
        self._epoll.register(sys.stdin, select.EPOLLIN)
        last = time.monotonic()
        due = 0.0
        while True:
            for number, _ in self._epoll.poll(0.01):
                if number == sys.stdin.fileno():
                    return
                self._advance(number)
            now = time.monotonic()
            due = min(due + (now - last) * (AGAIN_PER_S if self._is_all() else OPENED_PER_S), 100.0)
            last = now
            while self._closed and due >= 1.0:
                due -= 1.0
                self._open(self._closed.pop())
            while self._timers and self._timers[0][0] <= now:
                _, number, connection = heapq.heappop(self._timers)
                if self._connections.get(number) is connection:
                    self._wake(number, connection, now)

    def _is_all(self) -> bool:
        return all(self.opened[kind] >= count for kind, count in self._kinds.items())

    def _open(self, kind: str) -> None:
        bare = kind in ("silent", "half TLS")
        port = self._options["tcp" if bare and self.opened[kind] % 2 else "http"]
        connection = Connection(kind, FIRST[kind](self._options), port, None if bare else self._tls)
        number = connection.sock.fileno()
        self._connections[number] = connection
        self._epoll.register(number, select.EPOLLOUT)
        self.opened[kind] += 1
        if self._is_all():
            Path(self._options["all_opened"]).touch()

    def _advance(self, number: int) -> None:
        connection = self._connections[number]
        was_open = connection.is_open
        try:
            self._epoll.modify(number, connection.advance())
        except OSError:
            self._end(number, connection)
            return
        if connection.is_open and not was_open and (connection.kind.startswith("slow") or connection.kind in LEAVES_AFTER_S):
            self._set_timer(number, connection, LEAVES_AFTER_S.get(connection.kind, 1.0))

    def _set_timer(self, number: int, connection: Connection, delay_s: float) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, number, connection))

    def _wake(self, number: int, connection: Connection, now: float) -> None:
        if connection.kind in LEAVES_AFTER_S:
            self._end(number, connection)
            return
        try:
            connection.drip()
        except OSError:
            self._end(number, connection)
        else:
            self._set_timer(number, connection, 1.0)

    def _end(self, number: int, connection: Connection) -> None:
        self._epoll.unregister(number)
        del self._connections[number]
        connection.sock.close()
        self._closed.insert(0, connection.kind)


if __name__ == "__main__":
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attack = Attack(json.loads(sys.argv[1]))
    attack.run()
    print(json.dumps(attack.opened), flush=True)
