"""Downloads to whoever does not read, or leaves: they end, at the agent and the dispatcher, and nothing more is read for them."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tasuki.doors.http.uvicorn_server import LimitedProtocol, UvicornServer
from tests.agent.stage import AgentStage
from tests.client.agent_stand_in import Asked, Reply, StandIn, result
from tests.dispatcher.stage import dispatching, job, tell
from tests.support.certificates import TestAuthority
from tests.support.processes import opened
from tests.support.waiting import until

LIMIT_S = 0.15
SIZE_BYTES = 8_000_000
SCRIPT = "head -c {} /dev/urandom > out/data.bin"


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedProtocol, "stalled_s", LIMIT_S)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentStage]:
    with AgentStage(tmp_path_factory.mktemp("agent")) as stage:
        for job_id, size_bytes in (("large", SIZE_BYTES), ("removed", SIZE_BYTES), ("small", 50_000)):
            assert stage.run(job_id, SCRIPT.format(size_bytes)).status_code == 200
        little_is_taken_over(stage.agent.http.serving)
        yield stage


def little_is_taken_over(serving: UvicornServer | None) -> None:
    """By the system, of what nobody reads."""
    assert serving is not None
    assert serving._listening is not None
    serving._listening.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def asking(port: int, job_id: str = "large", tls: ssl.SSLContext | None = None) -> socket.socket:
    """Somebody who asks for a result, and has read nothing of it yet."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(20.0)
    sock.connect(("127.0.0.1", port))
    if tls is not None:
        sock = tls.wrap_socket(sock, server_hostname="127.0.0.1")
    sock.sendall(f"GET /result/{job_id} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    return sock


def is_cut_off(sock: socket.socket) -> bool:
    """Found out without reading anything."""
    poll = select.poll()
    poll.register(sock, 0)
    return bool(poll.poll(0))


def open_results() -> int:
    """The number of results that the agent, which is in this process, has open."""
    return sum(target.name.startswith("result.zip") for target in opened(os.getpid()))


def test_who_reads_nothing_of_a_result_is_cut_off_and_the_job_can_be_removed_meanwhile(
    agent: AgentStage, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(asking(agent.port, "removed")) as sock:
        until(lambda: open_results() == 1)
        assert agent.http.delete("/jobs/removed").status_code == 200

        until(lambda: is_cut_off(sock), what="the connection is cut")

    until(lambda: not open_results(), what="the file is let go of")
    assert "jobs/removed" not in agent.files()
    assert f"read nothing of its answer for {LIMIT_S} s, and is disconnected" in caplog.text


def test_an_answer_that_was_written_whole_does_not_wait_for_ever_either(agent: AgentStage) -> None:
    with closing(asking(agent.port, "small")) as sock:
        until(lambda: is_cut_off(sock), what="the connection is cut")


def test_who_reads_slowly_gets_all_of_it(agent: AgentStage) -> None:
    with closing(asking(agent.port)) as sock:
        received, began = 0, time.monotonic()
        for step in range(9):
            until(lambda step=step: time.monotonic() >= began + step * LIMIT_S / 3)  # type: ignore[misc]
            received += len(sock.recv(8192))
        assert not is_cut_off(sock)
        while received < SIZE_BYTES:
            piece = sock.recv(1024 * 1024)
            assert piece, f"it ended after {received} bytes"
            received += len(piece)


def test_a_download_that_is_left_is_not_read_to_its_end(agent: AgentStage) -> None:
    sent = agent.agent._metrics.sent._value
    before = sent.get()
    with closing(asking(agent.port)) as sock:
        until(lambda: open_results() == 1)
        sock.recv(1000)

    until(lambda: not open_results())
    assert sent.get() - before < SIZE_BYTES


def test_a_dispatcher_cuts_off_who_reads_nothing_and_lets_go_of_the_node(agent: AgentStage, tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)

    async def story() -> None:
        async with dispatching(agent.url, tls=authority.serving(), trusting=authority.trusted()) as stage:
            little_is_taken_over(stage.dispatcher.http.serving)
            sock = await asyncio.to_thread(asking, stage.port, tls=authority.trusted())

            await asyncio.to_thread(until, lambda: is_cut_off(sock), what="the connection is cut")

            await asyncio.to_thread(until, lambda: not open_results(), what="the node is let go of")
            sock.close()
            assert len((await stage.http.get("/result/large")).content) > SIZE_BYTES

    tell(story())


def test_what_nobody_waits_for_any_more_is_not_fetched_from_the_node() -> None:
    async def story() -> None:
        dropped = asyncio.Event()

        async def endless(asked: Asked) -> Reply:
            head = result(b"").replace(b"Content-Length: 0", b"Content-Length: 1000000000000")
            asked.writer.write(head)
            try:
                while True:
                    asked.writer.write(bytes(65536))
                    await asked.writer.drain()
            finally:
                dropped.set()

        async with StandIn() as node, dispatching(node) as stage:
            node.job, node.on_result = job("done"), endless
            reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
            writer.write(b"GET /result/a HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readexactly(100_000)

            writer.close()

            await dropped.wait()

    tell(story())
