"""Owner of a link, which hears what a machine would hear of it."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from tasuki.core.address import Address
from tasuki.core.protocol import Message
from tasuki.net.http.base_link import BaseHttpLink


class LinkOwner:
    """Of a link of one `kind`."""

    kind: type[BaseHttpLink]

    def __init__(self, address: Address, tls: ssl.SSLContext | None = None) -> None:
        self.heard: asyncio.Queue[Message] = asyncio.Queue()
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.link: Any = self.kind(
            address,
            lambda link, message: self.heard.put_nowait(message),
            lambda link, reason: self.closed.set_result(reason),
            tls=tls,
            timeout_s=3.0,
        )

    async def next(self) -> Message:
        return await self.heard.get()

    async def leave(self) -> None:
        self.link.close()
        await self.link.wait_closed()
