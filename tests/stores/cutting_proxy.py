"""A TCP proxy in front of PostgreSQL that cuts a connection at the worst moment: when COMMIT is under way.

`proxy.arm(cut)` chooses what happens to the next COMMIT that a client sends:
    "before"    it never reaches the server
    "after"     the server gets it and commits, and the client never hears of it
    "late"      the client is cut off, and the server gets it only when the test says `proxy.deliver()`
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self
from urllib.parse import urlsplit, urlunsplit

COMMIT = b"COMMIT\x00"
DELIVER_TIMEOUT_S = 30.0


class CuttingProxy:
    """Listens on a free port until the `with` block ends. `url` leads to the database through it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "", parts.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._cut = ""
        self._deliver = threading.Event()
        self.cuts = 0
        self.url = self._url(url, self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _url(self, url: str, port: int) -> str:
        parts = urlsplit(url)
        address = f"{parts.username}:{parts.password}@127.0.0.1:{port}"
        return urlunsplit((parts.scheme, address, parts.path, "sslmode=disable", ""))

    def arm(self, cut: str) -> None:
        assert cut in ("before", "after", "late")
        self._cut = cut

    def deliver(self) -> None:
        self._deliver.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._deliver.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed: the test is over
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
                threading.Thread(target=self._back, args=(server, client), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self._cut and data.endswith(COMMIT):
                    cut, self._cut = self._cut, ""
                    self._cut_off(cut, data, client, server)
                    return
                server.sendall(data)
        shut(server)

    def _cut_off(self, cut: str, data: bytes, client: socket.socket, server: socket.socket) -> None:
        self.cuts += 1
        if cut == "after":
            # The way back is shut first, so that the answer has no way to the client.
            shut(client)
            server.sendall(data)
            return
        shut(client)
        if cut == "late":
            self._deliver.wait(DELIVER_TIMEOUT_S)
            server.sendall(data)
        else:
            shut(server)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)
        shut(client)


def shut(side: socket.socket) -> None:
    with contextlib.suppress(OSError):
        side.shutdown(socket.SHUT_RDWR)
