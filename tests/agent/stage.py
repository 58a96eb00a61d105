"""Stage of the tests of the agent: an agent in a thread of the test's own process, and raw bytes that no client would send."""

from __future__ import annotations

import asyncio
import io
import json
import secrets
import socket
import ssl
import threading
import zipfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from tasuki.agent.app import Agent
from tasuki.agent.settings import AgentConfig
from tasuki.core.address import Address
from tasuki.worker.execs import parse_exec_flag
from tests.support.waiting import until

T = TypeVar("T")
TIMEOUT_S = 20.0
EXECS = ("sh=/bin/sh {file}", "true=/bin/true", "echo=/bin/echo", "missing=/no/such/program")
BOUNDARY = "a-boundary-of-the-test"


class AgentStage:
    """`with AgentStage(folder) as stage:`; `stage.run(job_id, script)` is a POST with a shell script as its file."""

    def __init__(
        self,
        folder: Path,
        *,
        execs: Sequence[str] = EXECS,
        tls: ssl.SSLContext | None = None,
        verify: ssl.SSLContext | bool = True,
        **config: Any,
    ) -> None:
        self.data = folder / "data"
        programs = {exec_.name: exec_ for exec_ in map(parse_exec_flag, execs)}
        given = {"default_exec": "sh", "slots": 4, "node": "n1", **config}
        self._config = AgentConfig(data=self.data, execs=programs, **given)
        self._tls, self._verify = tls, verify
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.await_(self._start())
        headers = {"Authorization": f"Bearer {self._config.tokens[0]}"} if self._config.tokens else {}
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S, verify=self._verify, headers=headers)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.http.close()
        self.await_(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()

    async def _start(self) -> None:
        self.agent = Agent(self._config, secrets.token_hex(8))
        address = await self.agent.start(Address("http", "127.0.0.1", 0), self._tls)
        self.url, self.port = str(address), address.port

    async def _stop(self) -> None:
        self.agent.hurry()
        await self.agent.close()

    def await_(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    def call(self, function: Callable[[], T]) -> T:
        """In the agent's loop."""

        async def called() -> T:
            return function()

        return self.await_(called())

    # ------------------------------------------------------------------------------------------------ requests

    def run(self, job_id: str, script: str = "true", *, query: str = "", **fields: str) -> httpx.Response:
        return self.post(job_id, {"job.sh": script.encode()}, query=query, **fields)

    def post(self, job_id: str, files: Mapping[str, bytes], *, query: str = "", **fields: str) -> httpx.Response:
        parts = [("file", (name, data)) for name, data in files.items()]
        return self.http.post(f"/run/{job_id}{query}", files=parts, data=fields)

    def begin(self, job_id: str, script: str, **fields: str) -> Started:
        """Send a job in a thread, for one that goes on while the test looks at it."""
        return Started(lambda: self.run(job_id, script, **fields))

    def state(self, job_id: str) -> str | None:
        answer = self.http.get(f"/jobs/{job_id}")
        return answer.json()["state"] if answer.status_code == 200 else None

    def raw(self) -> socket.socket:
        """A connection for bytes that no client would send."""
        sock = socket.create_connection(("127.0.0.1", self.port), TIMEOUT_S)
        sock.settimeout(TIMEOUT_S)
        return sock

    def files(self) -> set[str]:
        """All that lies in the data folder, but for what belongs to the agent itself, once what ended jobs left is removed."""
        until(lambda: not any((self.data / "trash").iterdir()), what="the trash is empty")
        found = (path.relative_to(self.data) for path in self.data.rglob("*"))
        return {str(path) for path in found if path.parts[0] in ("jobs", "incoming", "trash") and len(path.parts) > 1}


class Started:
    """A request under way."""

    def __init__(self, request: Callable[[], httpx.Response]) -> None:
        self._answer: httpx.Response | None = None
        self._thread = threading.Thread(target=self._run, args=(request,), daemon=True)
        self._thread.start()

    def _run(self, request: Callable[[], httpx.Response]) -> None:
        self._answer = request()

    def answer(self) -> httpx.Response:
        self._thread.join(TIMEOUT_S)
        assert self._answer is not None, "no answer came"
        return self._answer


def code_of(answer: httpx.Response) -> tuple[int, str]:
    """(status, code) of an error, whose body has the shape that every error has."""
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "details"}, error
    return answer.status_code, error["code"]


def members(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def report(archive: bytes) -> dict[str, Any]:
    return dict(json.loads(members(archive)["result.json"]))


def part(name: str, data: bytes, filename: str | None = None) -> bytes:
    where = f'; filename="{filename}"' if filename is not None else ""
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{where}\r\n\r\n'.encode() + data + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


DOTNET_BOUNDARY = "0b9d7c1e-6a43-4a0e-8c55-3f0e6f1b2a77"
DOTNET_KIND = f'multipart/form-data; boundary="{DOTNET_BOUNDARY}"'


def dotnet_form(data: bytes, names: str) -> bytes:
    """Return what .NET's MultipartFormDataContent sends: `form.Add(content, "file", name)`, then a StringContent as exec."""
    between = f"--{DOTNET_BOUNDARY}\r\n"
    file = f"Content-Disposition: form-data; name=file; {names}\r\n\r\n".encode() + data
    exec_ = "Content-Type: text/plain; charset=utf-8\r\nContent-Disposition: form-data; name=exec\r\n\r\nsh"
    return between.encode() + file + f"\r\n{between}{exec_}\r\n--{DOTNET_BOUNDARY}--\r\n".encode()


DOTNET_NAMES = {
    "book.csv": "filename=book.csv; filename*=utf-8''book.csv",
    "my book.csv": "filename=\"my book.csv\"; filename*=utf-8''my%20book.csv",
    "見積.csv": "filename=\"=?utf-8?B?6KaL56mNLmNzdg==?=\"; filename*=utf-8''%E8%A6%8B%E7%A9%8D.csv",
}
"""The names that .NET writes for a file, by its name."""


def head(job_id: str, length: int | None, *, boundary: str = BOUNDARY, more: str = "") -> bytes:
    sizes = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    kind = f"multipart/form-data; boundary={boundary}"
    return f"POST /run/{job_id} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{sizes}\r\n{more}\r\n".encode()


def answer_to(sock: socket.socket) -> tuple[int, dict[str, Any]]:
    """(status, error) of what comes back on a raw connection, which the agent then ends."""
    received = b""
    while b"\r\n\r\n" not in received or len(received.partition(b"\r\n\r\n")[2]) < _length_of(received):
        piece = sock.recv(65536)
        assert piece, f"the connection ended after {received!r}"
        received += piece
    first, _, body = received.partition(b"\r\n\r\n")
    return int(first.split()[1]), json.loads(body)["error"]


def _length_of(received: bytes) -> int:
    for line in received.partition(b"\r\n\r\n")[0].lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0
