"""Node agents of the test's own: a small HTTP server each, which answers as it is told, early, late, half, or not at all."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import ssl
import zipfile
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from tests.support.waiting import Watched

Reply = bytes | None
"""The bytes of an answer; None: hang up."""


class Asked(NamedTuple):
    """One request; its body is read only if somebody asks for it."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def body(self) -> bytes:
        return await self.reader.readexactly(int(self.headers.get("content-length", 0)))


def http(status: int, body: bytes = b"", **headers: str) -> bytes:
    lines = {"Content-Length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    return (
        f"HTTP/1.1 {status} X\r\n{''.join(f'{name}: {value}{chr(13)}{chr(10)}' for name, value in lines.items())}\r\n".encode()
        + body
    )


def refusal(status: int, code: str, message: str = "so it is", retry_after: str = "", **details: Any) -> bytes:
    body = json.dumps({"error": {"code": code, "message": message, "details": details}}).encode()
    return http(status, body, **({"Retry_After": retry_after} if retry_after else {}))


def result_zip(stdout: bytes = b"hello\n", stderr: bytes = b"", size_bytes: int = 0) -> bytes:
    members = {"stdout.log": stdout, "stderr.log": stderr, "result.json": b"{}"}
    if size_bytes:
        members["out/large.bin"] = bytes(size_bytes)
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # of 1980: the same bytes, whenever it is made
    return into.getvalue()


def result(data: bytes, status: int = 200, outcome: str = "succeeded", **headers: str) -> bytes:
    etag = f'"{hashlib.sha256(data).hexdigest()}"'
    return http(status, data, ETag=etag, Tasuki_Outcome=outcome, Content_Type="application/zip", **headers)


class StandIn(Watched):
    """`async with StandIn() as node:`. `on_post` and `on_result` are what it does; `frozen`: it accepts and says nothing."""

    def __init__(self, running: int = 0, limit: int = 4, tls: ssl.SSLContext | None = None) -> None:
        super().__init__()
        self._tls = tls
        self.data = result_zip()
        self.running, self.limit = running, limit
        self.frozen = False
        self.well = True
        self.posts: list[bytes] = []
        self.asked: list[str] = []
        self.removed: list[str] = []
        self.removal_queries: list[str] = []
        self.job: dict[str, Any] | None = None
        self.inputs: dict[str, bytes] | None = None
        """Inputs that are kept, as a dispatcher does."""
        self.on_post: Callable[[Asked], Awaitable[Reply]] = self.take
        self.on_result: Callable[[Asked], Awaitable[Reply]] = self.stored
        self._writers: set[asyncio.StreamWriter] = set()

    async def take(self, asked: Asked) -> Reply:
        """Reads all of it, and has the result."""
        self.posts.append(await asked.body())
        return result(self.data)

    async def stored(self, asked: Asked) -> Reply:
        begin = int(asked.headers.get("range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        if not begin:
            return result(self.data)
        whole = hashlib.sha256(self.data).hexdigest()
        return http(206, self.data[begin:], ETag=f'"{whole}"', Content_Type="application/zip")

    async def __aenter__(self) -> StandIn:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self.die()

    def die(self) -> None:
        """Die as of SIGKILL: the port is closed, and connections are reset."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")) and not self.frozen:
                first, *lines = head.decode().split("\r\n")
                method, target, _ = first.split(" ")
                path, _, query = target.partition("?")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
                self.asked.append(f"{method} {path}")
                self.changed()
                answer = await self._answer(Asked(method, path, query, headers, reader, writer))
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()
                if b"Connection: close" in answer:
                    break
            await reader.read()  # whatever still comes
        except (ConnectionError, asyncio.IncompleteReadError):
            """The asker has left."""
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, asked: Asked) -> Reply:
        match asked.method, asked.path.split("/")[1]:
            case "GET", "health":
                return http(200, b'"ok"') if self.well else refusal(503, "DRAINING")
            case "GET", "capacity":
                keeps = {"inputs": True} if self.inputs is not None else {}
                return http(200, json.dumps({"running": self.running, "limit": self.limit, **keeps}).encode())
            case "GET", "jobs":
                return http(200, json.dumps(self.job).encode()) if self.job is not None else refusal(404, "NOT_FOUND")
            case "DELETE", "jobs":
                self.removed.append(asked.path)
                self.removal_queries.append(asked.query)
                return http(200, b"{}")
            case "GET", "result":
                return await self.on_result(asked)
            case "HEAD", "inputs":
                return http(200 if asked.path.rpartition("/")[2] in (self.inputs or {}) else 404)
            case "PUT", "inputs":
                assert self.inputs is not None
                self.inputs[asked.path.rpartition("/")[2]] = await asked.body()
                return http(201, b"{}")
            case _:
                return await self.on_post(asked)
