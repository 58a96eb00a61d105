"""What all links over HTTP share: one address, the tasks that work for it, and its end."""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from tasuki.core.address import Address
from tasuki.core.machine import Peer
from tasuki.core.protocol import Message
from tasuki.errors import TasukiError
from tasuki.event_loop import BackgroundTasks
from tasuki.net.http.blobs import HttpBlobs
from tasuki.net.http.frame_bodies import REQUEST_MAX_BYTES
from tasuki.net.http.transport import HttpTransport


class BaseHttpLink(ABC):
    """One address, for as long as it answers. `on_message` gets every message, `on_closed` the end, once."""

    def __init__(
        self,
        address: Address,
        on_message: Callable[[Any, Message], None],
        on_closed: Callable[[Any, str], None],
        *,
        tls: ssl.SSLContext | None,
        timeout_s: float,
    ) -> None:
        self.codec: str | None = None
        self.tag: Any = None
        self.peer = Peer("http", None, f"{address.host}:{address.port}")
        self._address = address
        self._on_message, self._on_closed = on_message, on_closed
        self._transport = HttpTransport(address, tls, timeout_s)
        self.blobs = self._make_blobs(self._transport)
        self._loop = asyncio.get_running_loop()
        self._request_max_bytes = REQUEST_MAX_BYTES
        self._closed = False
        self._tasks = BackgroundTasks(self._ended)

    def _make_blobs(self, transport: HttpTransport) -> HttpBlobs:
        return HttpBlobs(transport)

    def send(self, message: Message) -> None:
        """It leaves at the end of this turn of the loop."""
        self.say(message)

    def send_together(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.say(message)

    @abstractmethod
    def say(self, message: Message) -> None:
        """Send it, or InvalidInput if no frame can hold it."""

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self, error: TasukiError | None = None) -> None:
        """There is nothing to say at the end, unless a link knows better."""
        self.abort(error.message if error is not None else "closed")

    def abort(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        self._stop()
        self._tasks.cancel()
        self._on_closed(self, reason)

    @abstractmethod
    def _stop(self) -> None:
        """Nothing more is to be said or asked."""

    async def wait_closed(self) -> None:
        """After `close` or `abort`: until nothing of it is left."""
        await self._tasks.wait()
        await self._transport.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:  # a defect, or the owner's: like one in a callback of a transport
            self._loop.call_exception_handler({"message": "an answer could not be taken", "exception": error, "task": task})
            self.abort(f"an answer could not be taken: {error}")
