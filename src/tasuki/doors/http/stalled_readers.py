"""Whether whoever asked takes the answer: one who reads nothing for long is cut off, and for one who has left nothing is read.

How slow a peer may be is not limited, only how long it may take nothing at all: a download over a bad line goes on for hours, one
to a program that hangs does not hold its connection, its file and a request for ever. For all doors over HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger("tasuki.http")
NOTHING_TAKEN_S = 60.0
LOOKS = 4  # in that time
_ACKED = slice(120, 128)  # tcpi_bytes_acked in Linux' struct tcp_info


class StalledReaderProtocol(H11Protocol):
    """uvicorn's own; a peer that takes nothing of what waits for it is cut off."""

    nothing_taken_s = NOTHING_TAKEN_S
    _looking: asyncio.TimerHandle | None = None
    _taken: tuple[int, bytes] | None = None
    _taken_at = 0.0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._begin_looking()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():  # its end; it would wait for the peer after a close too
            self._begin_looking()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)

    def _begin_looking(self) -> None:
        if self._looking is None:
            self._taken = None
            self._look()

    def _look(self) -> None:
        self._looking = None
        if not (self.flow.write_paused or self.transport.get_write_buffer_size()):
            return
        now, taken = self.loop.time(), self._how_far()
        if taken != self._taken:
            self._taken, self._taken_at = taken, now
        elif now - self._taken_at >= self.nothing_taken_s:
            who = f"{self.client[0]}:{self.client[1]}" if self.client else "a peer"
            logger.warning("%s took nothing of its answer for %g s, and is cut off", who, self.nothing_taken_s)
            self._cut_off()
            return
        self._looking = self.loop.call_later(self.nothing_taken_s / LOOKS, self._look)

    def _cut_off(self) -> None:
        sock = self.transport.get_extra_info("socket")
        if sock is not None:  # else the system would go on offering what it has taken over
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _how_far(self) -> tuple[int, bytes]:
        """What changes with every byte that the peer takes.

        What waits in this process is not enough: it shrinks only when a large part of the system's own buffer is free again, and
        a slow peer may need more than a minute for that.
        """
        acked = b""
        sock = self.transport.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_INFO"):
            try:
                acked = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED.stop)[_ACKED]
            except OSError:
                acked = b""  # not TCP
        return self.transport.get_write_buffer_size(), acked


async def while_there(receive: Receive, sending: Coroutine[Any, Any, None]) -> bool:
    """Send until all is sent, or whoever asked has left: to a peer that is gone, uvicorn sends as if nothing were the matter.

    Whether all was sent. What still comes of the request is thrown away.
    """
    work, leaving = asyncio.ensure_future(sending), asyncio.ensure_future(_until_left(receive))
    try:
        await asyncio.wait((work, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return False
        work.result()
        return True
    finally:
        for task in (work, leaving):
            task.cancel()
        await asyncio.gather(work, leaving, return_exceptions=True)


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        """What came was of the request."""
