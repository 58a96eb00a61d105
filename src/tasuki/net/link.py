"""What a client or worker needs of its connection, over whatever it goes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from tasuki.core.machine import Peer
from tasuki.core.protocol import Message
from tasuki.errors import TasukiError
from tasuki.net.blob_transfer import BlobTransport


class Link(Protocol):
    """One connection to one server, until it is closed. Messages come by callback."""

    codec: str | None
    tag: Any
    """The owner's own mark."""

    @property
    def peer(self) -> Peer: ...
    @property
    def blobs(self) -> BlobTransport | None:
        """The way for blobs, if they do not travel as messages."""

    @property
    def closed(self) -> bool: ...

    def send(self, message: Message) -> None: ...
    def send_together(self, messages: Iterable[Message]) -> None: ...

    def say(self, message: Message) -> None:
        """Send it, or InvalidInput if no frame can hold it."""

    def forget(self, job_ids: Iterable[str]) -> None:
        """Nobody waits for the ends of these any more."""

    def close(self, error: TasukiError | None = None) -> None: ...
    def abort(self, reason: str) -> None: ...

    async def wait_closed(self) -> None:
        """After `close` or `abort`: until nothing of it is left."""
