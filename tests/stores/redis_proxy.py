"""A TCP proxy in front of Redis that cuts a connection while a turn is under way.

`proxy.arm(cut)` chooses what happens to the next script call that a client sends:
    "before"    it never reaches Redis
    "after"     Redis does it, and the client never hears of it
    "late"      the client is cut off, and Redis gets the call only when the test says `proxy.deliver()`
"""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit

from tests.stores.cutting_proxy import DELIVER_TIMEOUT_S, CuttingProxy, shut


class RedisProxy(CuttingProxy):
    """Listens on a free port until the `with` block ends. `url` leads to the database through it."""

    def __init__(self, url: str) -> None:
        self.delivered = threading.Event()
        super().__init__(url)

    def _url(self, url: str, port: int) -> str:
        return f"redis://127.0.0.1:{port}{urlsplit(url).path}"

    def deliver(self) -> None:
        """Redis gets the late call; returns when it has answered."""
        super().deliver()
        assert self.delivered.wait(DELIVER_TIMEOUT_S)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                if self._cut and b"EVAL" in data:
                    cut, self._cut = self._cut, ""
                    self._cut_off(cut, data, client, server)
                    break
                server.sendall(data)
        shut(client)
        shut(server)

    def _cut_off(self, cut: str, data: bytes, client: socket.socket, server: socket.socket) -> None:
        self.cuts += 1
        # The way back is shut first, so that the answer has no way to the client; what comes is only noted.
        client.shutdown(socket.SHUT_WR)
        if cut == "late":
            shut(client)
            self._deliver.wait(DELIVER_TIMEOUT_S)
        if cut != "before":
            server.sendall(data)
            self.delivered.wait(DELIVER_TIMEOUT_S)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        is_open = True
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                try:
                    if is_open:
                        client.sendall(data)
                except OSError:  # it was cut off: this is the answer that it does not get
                    is_open = False
                    self.delivered.set()
        shut(client)
