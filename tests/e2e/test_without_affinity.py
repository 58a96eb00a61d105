"""Two servers behind a balancer that leads each connection of a worker to the next of them, as if there were no sessions."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tasuki.core.address import parse_url
from tests.support.processes import ServerProcess, start_servers, start_worker

pytestmark = pytest.mark.e2e

PIECE_BYTES = 64 * 1024
SOON_S = 20.0


class Round:
    """`with Round(ports) as balancer:`. Knows connections, and nothing of what is said on them."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.port = 0
        self.connections = 0
        self._next = itertools.cycle(ports)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Round:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._carry, "127.0.0.1", 0), self._loop).result(30)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, away = await asyncio.open_connection("127.0.0.1", next(self._next))
        await asyncio.gather(_copy(reader, away), _copy(there, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.fixture
def balancer(tmp_path: Path, redis_url: str) -> Iterator[tuple[Round, list[ServerProcess]]]:
    with (
        start_servers(tmp_path, 2, "--http", "127.0.0.1:0", store=redis_url) as servers,
        Round([parse_url(server.http_url)[0].port for server in servers]) as made,
    ):
        yield made, list(servers)


def test_a_worker_finds_the_server_that_has_its_session(tmp_path: Path, balancer: tuple[Round, list[ServerProcess]]) -> None:
    way, [server, _] = balancer
    worker = start_worker(
        f"http://127.0.0.1:{way.port}",
        *("--exec", "echo=/bin/echo {args}", "--worker-id", "lab", "--data", str(tmp_path / "lab")),
        command=True,
        token=server.create_token("worker"),
        log=tmp_path / "worker.log",
    )
    with worker, server.client() as client:
        for number in range(4):
            assert client.submit(exec="echo", args=[str(number)]).outcome(timeout=SOON_S).state == "SUCCEEDED"

        assert worker.output().count("connected to") == 1, "it kept its session"
        assert way.connections >= 3, "its requests did reach both servers"
