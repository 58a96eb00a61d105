"""Deadlines and bounds of the door, with the server in the test's own loop so that the clocks can be shortened."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tasuki import AsyncClient
from tasuki.config import DataFolder
from tasuki.core.address import Address
from tasuki.core.broker import authentication, broker
from tasuki.core.broker.turn_builder import ignore
from tasuki.core.job import JobSpec
from tasuki.core.protocol import Chunk, GiveCredit, HelloClient, Request
from tasuki.doors import listening
from tasuki.doors.tcp import TcpDoor
from tasuki.net import tcp_link
from tasuki.server import server as server_module
from tasuki.server.assembly import StorageLocations, make_server
from tasuki.server.backup import prepare_folder
from tasuki.server.server import Server, ServerConfig
from tasuki.wire.messages import encode
from tests.doors.raw import RawPeer, bomb
from tests.support.processes import open_files, start_server
from tests.support.waiting import until_async

DEADLINE_S = 25.0


class Door:
    """A server in this loop."""

    def __init__(self, server: Server, url: str, token: str) -> None:
        self.server, self.url, self.token = server, url, token

    def peer(self, **options: int) -> RawPeer:
        return RawPeer(self.url, **options)

    def client(self) -> AsyncClient:
        return AsyncClient(self.url, token=self.token, connect_timeout_s=DEADLINE_S)


@contextlib.asynccontextmanager
async def opened(root: Path) -> AsyncIterator[Door]:
    folder = DataFolder(root / "data")
    prepare_folder(folder)
    server = make_server(StorageLocations(folder), ServerConfig(server_id="here", data=folder.root))
    await server.start()
    door = TcpDoor(server)
    address = await door.listen_tcp(Address("tcp", "127.0.0.1", 0))
    try:
        yield Door(server, str(address), folder.token_file.read_text().strip())
    finally:
        await door.close()
        await server.stop()


async def in_thread(work, *arguments):
    """The raw peers block, the server must run."""
    return await asyncio.wait_for(asyncio.to_thread(work, *arguments), 2 * DEADLINE_S)


async def is_served(door: Door) -> None:
    async with asyncio.timeout(DEADLINE_S), door.client() as client:
        job_id = (await client.submit(subject="nobody.takes", watch=False)).job_id
        assert (await client.status(job_id)).state == "PENDING"


def test_silence_before_hello_ends_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "HANDSHAKE_TIMEOUT_S", 0.3)

    async def main() -> None:
        async with opened(tmp_path) as door:
            # Given a peer that says nothing at all
            with door.peer() as peer:
                await is_served(door)
                # Then it is told so and cut off
                error = await in_thread(peer.farewell)
            assert error.code == "PROTOCOL"
            assert "no Hello within 0.3 s" in error.message

    asyncio.run(main())


@pytest.mark.parametrize("greeted", [False, True])
def test_half_frame_and_silence_ends_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, greeted: bool) -> None:
    monkeypatch.setattr(tcp_link, "FRAME_TIMEOUT_S", 0.3)

    async def main() -> None:
        async with opened(tmp_path) as door:
            with door.peer() as peer:
                if greeted:
                    await in_thread(peer.as_client, door.token)
                # Given half a frame
                peer.send_bytes(encode(HelloClient(msg_id=1, client_id="half", token="t" * 40))[:20])
                await is_served(door)
                error = await in_thread(peer.farewell)
            assert error.code == "PROTOCOL"
            assert "did not end within 0.3 s" in error.message

    asyncio.run(main())


def test_one_byte_now_and_then_does_not_hold_a_frame_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_link, "FRAME_TIMEOUT_S", 0.4)

    async def main() -> None:
        async with opened(tmp_path) as door:
            with door.peer() as peer:
                await in_thread(peer.as_client, door.token)
                began = time.monotonic()
                # When a frame comes a byte at a time, each well inside of the deadline
                peer.send_bytes(bomb(announced_bytes=1000))
                with contextlib.suppress(ConnectionError):
                    while time.monotonic() - began < 2:
                        peer.send_bytes(b"x")
                        await asyncio.sleep(0.05)
                # Then the deadline counts from its first byte
                assert (await in_thread(peer.farewell)).code == "PROTOCOL"

    asyncio.run(main())


def test_steady_stream_whose_reads_never_end_with_a_frame_is_not_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_link, "FRAME_TIMEOUT_S", 0.3)

    async def main() -> None:
        async with opened(tmp_path) as door:
            with door.peer() as peer:
                await in_thread(peer.as_client, door.token)
                beat = encode(Chunk(99, 0, b"of no upload"))
                # Given frames that are each complete in time, cut so that a part of the next one is always there
                peer.send_bytes(beat[:5])
                for _ in range(20):
                    peer.send_bytes(beat[5:] + beat[:5])
                    await asyncio.sleep(0.05)
                peer.send_bytes(beat[5:])
                # Then the connection lives after several deadlines
                assert await in_thread(peer.alive)

    asyncio.run(main())


def test_client_that_says_nothing_for_long_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(authentication, "IDLE_TIMEOUT_S", 0.3)

    async def main() -> None:
        async with opened(tmp_path) as door:
            with door.peer() as peer:
                await in_thread(peer.as_client, door.token)
                assert (await in_thread(peer.farewell)).code == "UNAVAILABLE"
            # A real client beats often enough to stay.
            async with door.client() as client:
                await asyncio.sleep(1.0)
                assert client.welcome is not None
                assert (await client.counts()) == {}

    asyncio.run(main())


def test_slow_reader_is_cut_off_after_the_stall_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_link, "STALL_TIMEOUT_S", 0.4)
    monkeypatch.setattr(tcp_link, "WRITE_SOFT_BYTES", 64 * 1024)

    async def main() -> None:
        async with opened(tmp_path) as door:
            async with door.client() as client:
                specs = [JobSpec(job_id=f"j-{n}", subject="nobody.takes", headers={"n": "x" * 2000}) for n in range(900)]
                await client.submit_many(specs, watch=False)
            links = door.server._links
            with door.peer(receive_buffer_bytes=4096) as peer:
                await in_thread(peer.as_client, door.token)
                assert len(links) == 1
                # Given a peer that asks for megabytes and reads nothing
                for _ in range(20):
                    peer.send(Request(5, "find", {"limit": 900}))
                await is_served(door)
                # Then the server lets go of it
                await until_async(lambda: not links)
            await is_served(door)

    asyncio.run(main())


def test_peer_that_is_hung_up_on_and_does_not_read_is_dropped_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_link, "LINGER_S", 0.3)

    async def main() -> None:
        async with opened(tmp_path) as door:
            async with door.client() as client:
                specs = [JobSpec(job_id=f"j-{n}", subject="nobody.takes", headers={"n": "x" * 5000}) for n in range(900)]
                await client.submit_many(specs, watch=False)
            with door.peer(receive_buffer_bytes=4096) as peer:
                await in_thread(peer.as_client, door.token)
                connection = next(iter(door.server._links.values()))
                for number in range(5, 25):
                    peer.send(Request(number, "find", {"limit": 900}))
                await until_async(lambda: connection.transport.get_write_buffer_size())
                descriptors = open_files(os.getpid())
                # When it breaks the protocol with megabytes still unread
                peer.send(GiveCredit(1))  # a worker's word
                # Then the socket itself is gone soon, not only our memory of it
                await until_async(lambda: open_files(os.getpid()) < descriptors)

    asyncio.run(main())


def test_more_connections_than_allowed_are_told_so_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "CONNECTIONS_MAX", 7)  # 6 without those of the unix socket
    monkeypatch.setattr(listening, "TOKEN_SHARE", 1)

    async def main() -> None:
        async with opened(tmp_path) as door, door.client() as client:
            # Given as many connections as there may be
            peers = []
            for _ in range(5):
                peers.append(door.peer())
                await in_thread(peers[-1].as_client, door.token)
            # When one more comes
            with door.peer() as late:
                error = await in_thread(late.farewell)
            # Then it is refused with a code that says "try again", and the others do not notice
            assert error.code == "OVERLOADED"
            assert await client.counts() == {}
            # And there is room again when one leaves
            peers.pop().socket.close()
            await until_async(lambda: len(door.server._links) <= 5)
            with door.peer() as late:
                await in_thread(late.as_client, door.token)
            for peer in peers:
                peer.socket.close()

    asyncio.run(main())


@pytest.mark.e2e
def test_flood_of_connections_leaves_descriptors_for_those_who_are_served(tmp_path: Path) -> None:
    # Given a server that may open 256 files
    import resource

    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    with start_server(tmp_path, preexec_fn=few_files) as server, server.client() as client:
        # When strangers come, more than it can take
        peers = [RawPeer(server.url) for _ in range(300)]
        assert {peer.receive() for peer in peers[:20]} == {None}  # the first strangers made room for the last ones
        # Then the one who was there before them can still send a file, which needs descriptors
        large = tmp_path / "large.bin"
        large.write_bytes(os.urandom(200_000))
        job_id = client.submit(subject="nobody.takes", files=[large], watch=False).job_id
        assert client.status(job_id).state == "PENDING"
        for peer in peers:
            peer.socket.close()


def test_server_that_cannot_store_reports_ends_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that failed waits for its next try; an end in that time must neither spin nor last for ever."""

    monkeypatch.setattr(server_module, "STOP_TIMEOUT_S", 0.5)

    async def main() -> float:
        async with opened(tmp_path) as door:
            # Given a report that is carried from one failed turn to the next
            door.server.broker.builder.ask("release", ["no such thing as a claim"], ignore)
            began = time.monotonic()
        return time.monotonic() - began

    # Then the end comes after the time that it is given, not before and not much later
    assert 0.4 < asyncio.run(asyncio.wait_for(main(), DEADLINE_S)) < 3
