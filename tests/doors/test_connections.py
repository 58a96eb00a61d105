"""Connections are counted from accept on: strangers cannot keep out the peers that have a token, nor the operator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from starlette.applications import Starlette

from tasuki.core.address import Address, parse_url
from tasuki.doors import listening
from tasuki.doors.http.uvicorn_server import UvicornServer, application
from tasuki.doors.listening import AcceptedSocket, Connections, ListeningSocket, bound
from tasuki.event_loop import loop_factory
from tests.support.certificates import TestAuthority
from tests.support.processes import open_files, open_sockets, start_server
from tests.support.waiting import until_async

LOOPS: list[Callable[[], asyncio.AbstractEventLoop] | None] = [asyncio.new_event_loop, loop_factory()]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    return TestAuthority(tmp_path_factory.mktemp("ca")).serving()


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "CONNECTIONS_MAX", 32)  # 24 of the network, 16 strangers


class Peer(asyncio.Protocol):
    def __init__(self, accepted: AcceptedSocket) -> None:
        self.accepted = accepted

    def data_received(self, data: bytes) -> None:
        self.accepted.trust(data.decode())


@contextlib.asynccontextmanager
async def accepting(tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[Connections, int]]:
    connections = Connections()
    listener = ListeningSocket(bound(Address("tcp", "127.0.0.1", 0)), connections, Peer, tls, b"full")
    try:
        yield connections, listener.sock.getsockname()[1]
    finally:
        listener.close()


async def dial(port: int, token: bytes = b"") -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    await asyncio.get_running_loop().sock_sendall(sock, token)
    return sock


async def ended(sock: socket.socket) -> bytes:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 100), 20.0)


@pytest.mark.parametrize("loop", LOOPS)
def test_handshakes_that_never_end_take_no_more_descriptors_than_strangers_may(
    tls: ssl.SSLContext, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def main() -> None:
        async with accepting(tls) as (connections, port):
            before = open_files(os.getpid())
            peers = [await dial(port) for _ in range(60)]
            assert await ended(peers[43]) == b""
            await until_async(lambda: open_files(os.getpid()) - before <= 60 + 16 + 2)  # uvloop opens one more for itself
            assert len(connections) == 16
            for peer in peers:
                peer.close()
            await until_async(lambda: len(connections) == 0)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("loop", LOOPS)
def test_peers_that_have_shown_a_token_stay_when_strangers_come(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        async with accepting() as (connections, port):
            known = [await dial(port, b"token:a") for _ in range(3)]
            await until_async(lambda: connections._shares.taken("token:a") == 3)
            strangers = [await dial(port) for _ in range(60)]
            assert await ended(strangers[40]) == b""
            assert len(connections) == 19
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ended(known[0]), 0.1)
            for peer in [*known, *strangers]:
                peer.close()
            await until_async(lambda: len(connections) == len(connections._shares) == 0)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def test_connections_beyond_the_share_of_a_token_make_room_for_others_and_the_rest_is_refused() -> None:
    async def main() -> None:
        async with accepting() as (connections, port):
            # Given one token with 8 connections, 2 more than its share, and others that take all the rest
            greedy = []
            for n in range(8):
                greedy.append(await dial(port, b"token:greedy"))
                await until_async(lambda: not connections._strangers and len(connections) == n + 1)  # noqa: B023
            others = []
            for n in range(16):
                others.append(await dial(port, b"token:%d" % (n % 4)))
                await until_async(lambda: not connections._strangers and len(connections) == n + 9)  # noqa: B023
            # When more come, then the two are closed, and after them nobody
            late = []
            for n in range(2):
                late.append(await dial(port, b"token:late"))
                assert await ended(greedy[6 + n]) == b""
                await until_async(lambda: not connections._strangers)
            refused = await dial(port)
            assert await ended(refused) == b"full"
            for peer in [*greedy, *others, *late, refused]:
                peer.close()
            await until_async(lambda: len(connections) == len(connections._shares) == 0)

    asyncio.run(main())


def test_a_token_with_more_than_its_share_leaves_strangers_the_time_to_show_theirs() -> None:
    connections = Connections()
    with contextlib.ExitStack() as stack:
        # Given a token that takes all connections but four, and four strangers
        for n in range(24):
            sock = _come(stack, connections, "10.0.0.1")
            if n < 20:
                sock.trust("token:greedy")
        # When more strangers come, then the token gives them as many as it may have itself
        for _ in range(10):
            _come(stack, connections, "10.0.0.1")

        assert len(connections._strangers["10.0.0.1"]) == 6
        assert len(connections) == 24


def _come(stack: contextlib.ExitStack, connections: Connections, group: str) -> AcceptedSocket:
    ours, theirs = socket.socketpair()
    stack.enter_context(theirs)
    sock = stack.enter_context(contextlib.closing(AcceptedSocket(ours, connections, group)))
    assert connections.add(sock)
    return sock


def test_the_address_with_most_strangers_loses_one() -> None:
    connections = Connections()
    with contextlib.ExitStack() as stack:
        first = _come(stack, connections, "10.0.0.1")
        crowd = [_come(stack, connections, "10.0.0.2") for _ in range(30)]

        assert [list(group) for group in connections._strangers.values()] == [[first], crowd[15:]]


@pytest.mark.parametrize("loop", LOOPS)
def test_after_each_connection_that_is_opened_the_others_are_served(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        turn, opened_at = 0, []

        def next_turn() -> None:
            nonlocal turn
            turn += 1
            asyncio.get_running_loop().call_soon(next_turn)

        def make(accepted: AcceptedSocket) -> Peer:
            opened_at.append(turn)
            return Peer(accepted)

        listener = ListeningSocket(bound(Address("tcp", "127.0.0.1", 0)), Connections(), make)
        peers = [socket.create_connection(listener.sock.getsockname()) for _ in range(12)]
        next_turn()
        await until_async(lambda: len(opened_at) == 12)
        assert len(set(opened_at)) == 12
        listener.close()
        for peer in peers:
            peer.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def test_of_more_connections_than_can_be_opened_the_newest_are_and_the_oldest_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "ACCEPTED_MAX", 4)

    async def main() -> None:
        async with accepting() as (connections, port):
            peers = [socket.create_connection(("127.0.0.1", port)) for _ in range(12)]  # before the loop accepts the first
            for peer in peers:
                peer.setblocking(False)
            assert [await ended(peer) for peer in peers[:8]] == [b""] * 8
            await until_async(lambda: len(connections) == 4)
            for peer in peers[8:]:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(ended(peer), 0.05)
            for peer in peers:
                peer.close()

    asyncio.run(main())


def test_the_unix_socket_has_room_when_the_network_has_none(tmp_path: Path) -> None:
    async def main() -> None:
        connections = Connections()
        door = bound(Address("tcp", "127.0.0.1", 0))
        local = socket.socket(socket.AF_UNIX)
        local.bind(str(tmp_path / "s"))
        listeners = [ListeningSocket(sock, connections, Peer) for sock in (door, local)]
        peers = []
        for n in range(24):
            peers.append(await dial(door.getsockname()[1], b"token:%d" % n))
            await until_async(lambda: not connections._strangers and len(connections) == n + 1)  # noqa: B023
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        await until_async(lambda: len(connections) == 25)
        writer.close()
        for peer in peers:
            peer.close()
        for listener in listeners:
            listener.close()

    asyncio.run(main())


def test_half_a_handshake_with_https_is_ended_after_ten_seconds(tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch) -> None:
    assert listening.HANDSHAKE_TIMEOUT_S == 10.0
    monkeypatch.setattr(listening, "HANDSHAKE_TIMEOUT_S", 0.2)

    async def main() -> None:
        server = UvicornServer(application(Starlette(), []), tls, 1)
        sock = bound(Address("https", "127.0.0.1", 0))
        await server.open(sock)
        assert await ended(await dial(sock.getsockname()[1], b"\x16\x03\x01")) == b""
        await server.close()

    asyncio.run(main())


def test_the_doors_of_a_server_count_together(tmp_path: Path) -> None:
    with start_server(
        tmp_path, "--http", "127.0.0.1:0", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    ) as server:
        ports = [server.port, parse_url(server.http_url)[0].port]
        before = open_sockets(server.pid)
        peers = [socket.create_connection(("127.0.0.1", ports[n % 2])) for n in range(200)]
        assert peers[0].recv(1) == b""
        # Half of 128 connections for strangers, and those just ended; if each door had a half, there would be 128.
        assert open_sockets(server.pid) < before + 2 * 64
        for peer in peers:
            peer.close()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 524_288), (10_128, 524_288)),
        ((1024, 4096), (4096, 4096)),
        ((1024, resource.RLIM_INFINITY), (10_128, resource.RLIM_INFINITY)),
        ((65_536, 65_536), (65_536, 65_536)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)),
    ],
)
def test_a_server_raises_its_soft_limit_of_open_files_to_what_it_needs(
    before: tuple[int, int], after: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "CONNECTIONS_MAX", 10_000)
    limits = {resource.RLIMIT_NOFILE: before}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    listening.raise_open_files()
    assert limits == {resource.RLIMIT_NOFILE: after}


def test_addresses_of_one_ipv6_network_are_one_peer() -> None:
    assert (
        listening._network_of("2001:db8::1%eth0") == listening._network_of("2001:db8::2") != listening._network_of("2001:db9::1")
    )
    assert listening._network_of("10.0.0.1") == "10.0.0.1"
