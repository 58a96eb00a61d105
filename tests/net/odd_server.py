"""An HTTP server of the test's own, which answers as it is told: with nonsense, late, half, or not at all."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from tasuki.core.address import Address
from tasuki.core.protocol import FRAME_MAX_BYTES, FRAMES_TYPE, HelloClient, Message, Welcome
from tasuki.wire.messages import FrameDecoder, decode, encode
from tests.support.waiting import Watched


class Asked(NamedTuple):
    """One request as it came."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    at: float

    @property
    def messages(self) -> list[Message]:
        return [decode(frame, FRAME_MAX_BYTES) for frame in FrameDecoder(FRAME_MAX_BYTES).feed(self.body)]

    @property
    def first(self) -> Message:
        return self.messages[0]


def http(status: int, body: bytes = b"", headers: Mapping[str, str] | None = None, kind: str = "text/html") -> bytes:
    """The bytes of an answer."""
    lines = {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + body


def envelope(status: int, code: str, message: str = "so it is", **headers: str) -> bytes:
    body = f'{{"error": {{"code": "{code}", "message": "{message}", "details": {{}}}}}}'.encode()
    return http(status, body, {name.replace("_", "-"): value for name, value in headers.items()}, "application/json")


def frames(*messages: Message) -> bytes:
    return http(200, b"".join(encode(message) for message in messages), kind=FRAMES_TYPE)


def welcome(asked: Asked) -> bytes:
    assert isinstance(asked.first, HelloClient)
    return frames(
        Welcome(
            corr_id=asked.first.msg_id,
            version=2,
            server_id="s",
            identity="me",
            kind="client",
            idle_timeout_s=60,
            features=("logs",),
        )
    )


Answer = bytes | Callable[[Asked], bytes] | Callable[[Asked], Awaitable[bytes]]


class OddServer(Watched):
    """`async with OddServer(answer) as server:`. `answer` gets each request and gives the bytes; empty: it hangs up."""

    def __init__(self, answer: Answer, tls: ssl.SSLContext | None = None) -> None:
        super().__init__()
        self.answer = answer
        self.asked: list[Asked] = []
        self.hung_up = 0
        """The number of requests that their sender left before they were answered."""
        self._tls = tls
        self._connections: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> OddServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        port = self._server.sockets[0].getsockname()[1]
        self.address = Address("https" if self._tls is not None else "http", "127.0.0.1", port)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for writer in self._connections:
            writer.transport.abort()

    async def hears(self, count: int) -> Asked:
        """The request of that number."""
        await self.until(lambda: len(self.asked) >= count)
        return self.asked[count - 1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while (asked := await self._read(reader)) is not None:
                self.asked.append(asked)
                self.changed()
                answer = await self._answer_to(asked, reader)
                writer.write(answer)
                if not answer or b"Connection: close" in answer:
                    break
                await writer.drain()
        except ValueError:
            writer.write(http(400, b"this is not HTTP"))
        except (ConnectionError, asyncio.IncompleteReadError):
            """The asker has left."""
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer_to(self, asked: Asked, reader: asyncio.StreamReader) -> bytes:
        if isinstance(self.answer, bytes):
            return self.answer
        answer = self.answer(asked)
        if isinstance(answer, bytes):
            return answer
        answering, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(reader.read(1))
        await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        if answering.done():
            return await answering
        self.hung_up += 1
        self.changed()
        answering.cancel()
        return b""

    async def _read(self, reader: asyncio.StreamReader) -> Asked | None:
        start = await reader.read(1)
        if not start:
            return None
        if not start.isalpha():
            raise ValueError("TLS, perhaps")
        head = start + await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Asked(method, target, headers, body, asyncio.get_running_loop().time())
