"""The connection of a client or worker to a server, and the blob transfers on it; one at a time.

The state machine decides when to connect to which server. `ServerConnection` dials, and gives the machine the events `Opened`,
`Received` and `Closed`. `Link` is the protocol of a connection, whether over TCP (`tcp_link.py`) or HTTP (`http/`).
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import ssl
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from tasuki.core.machine import Closed, Opened, Peer, Received
from tasuki.core.protocol import Message, Welcome
from tasuki.core.reconnect import Connect
from tasuki.errors import TasukiError, Unavailable
from tasuki.event_loop import BackgroundTasks
from tasuki.net.blob_transfer import FIRST_MSG_ID, BlobClient, BlobTransport
from tasuki.net.tcp_link import TcpLink, connect


class Link(Protocol):
    """One connection to one server, until it is closed. Messages come by callback."""

    codec: str | None
    tag: Any
    """The owner's number for this connection."""

    @property
    def peer(self) -> Peer: ...
    @property
    def blobs(self) -> BlobTransport | None:
        """The transport of blobs, if they do not travel as messages."""

    @property
    def closed(self) -> bool: ...

    def send(self, message: Message) -> None: ...
    def send_together(self, messages: Iterable[Message]) -> None: ...

    def say(self, message: Message) -> None:
        """Send a message, or raise InvalidInput if it does not fit a frame; then nothing was sent."""

    def forget(self, job_ids: Iterable[str]) -> None:
        """Stop watching these jobs: nobody waits for their ends."""

    def close(self, error: TasukiError | None = None) -> None: ...
    def abort(self, reason: str) -> None: ...

    async def wait_closed(self) -> None:
        """Wait after `close` or `abort` until all resources are freed."""


class ServerConnection:
    """The current link. `tell` passes an event to the machine; Closed of connection 0 means that dialing failed."""

    def __init__(
        self, tell: Callable[[Opened | Received | Closed], None], tls: ssl.SSLContext | None, *, is_worker: bool = False
    ) -> None:
        self.link: Link | None = None
        self.blobs = BlobClient()
        self._tell = tell
        self._tls = tls
        self._http = (
            ("tasuki.net.http.worker_link", "HttpWorkerLink") if is_worker else ("tasuki.net.http.client_link", "HttpClientLink")
        )
        self._numbers = itertools.count(1)
        self._dialing: asyncio.Task[None] | None = None
        self._closed = False
        self._leaving = BackgroundTasks()
        """Links that are being taken down."""

    def dial(self, wanted: Connect) -> None:
        """Begin to connect; the machine gets Opened or Closed."""
        self._dialing = asyncio.ensure_future(self._dial(wanted))

    async def _dial(self, wanted: Connect) -> None:
        try:
            link = await self._connected(wanted)
        except Unavailable as error:
            self._tell(Closed(0, error.message))
            return
        if self._closed:
            link.abort("closed while connecting")
            return
        if link.closed:  # the server hung up meanwhile, and `_lost` has told the machine
            return
        link.tag = next(self._numbers)
        self.link = link
        self._tell(Opened(link.tag, link.peer))

    async def _connected(self, wanted: Connect) -> Link:
        if not wanted.address.http:
            return await connect(wanted.address, self._message, self._lost, tls=self._tls, timeout_s=wanted.timeout_s)
        # httpx is slow to import: only where it is needed, and on a thread.
        module, name = self._http
        kind = getattr(await asyncio.to_thread(importlib.import_module, module), name)
        link: Link = kind(wanted.address, self._message, self._lost, tls=self._tls, timeout_s=wanted.timeout_s)
        return link

    def _message(self, link: Link, message: Message) -> None:
        if getattr(message, "corr_id", 0) >= FIRST_MSG_ID:
            self.blobs.received(message)
            return
        if type(message) is Welcome:
            if message.codecs:
                link.codec = message.codecs[0]
            if isinstance(link, TcpLink):
                self.blobs.connected(link)
            elif link.blobs is not None:
                self.blobs.carried_by(link.blobs)
        self._tell(Received(link.tag, message))

    def _lost(self, link: Link, reason: str) -> None:
        self._leaving.spawn(link.wait_closed())
        if self._closed:
            return
        if self.link is link:
            self.link = None
            self.blobs.lost()
        self._tell(Closed(link.tag or 0, reason))

    def hang_up(self, error: TasukiError | None) -> None:
        """Abort the connection; the machine gets Closed."""
        if self.link is not None:
            self.link.abort(error.message if error is not None else "hung up")

    async def close(self) -> None:
        """Close for good: queued messages are still sent, and the machine gets no more events."""
        self._closed = True
        self.blobs.close()
        if self.link is not None:
            self.link.close()
        if self._dialing is not None:
            self._dialing.cancel()
            await asyncio.gather(self._dialing, return_exceptions=True)
        await self._leaving.wait()
