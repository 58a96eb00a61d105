"""A peer that speaks protocol version 1 and nothing newer, written apart from tasuki's own encoder and decoder.

What version 1 is stands in vectors-v1.json, which is frozen. This peer knows the frame types and field names of that file. It
ignores fields that it does not know, as version 1 does; a frame type that it does not know is an error, as in version 1.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

V1: dict[str, Any] = json.loads(Path(__file__).with_name("vectors-v1.json").read_text("utf-8"))
BATCH = 1
SUBMIT, ASSIGN, ACK, CREDIT, RESULT, HELLO_CLIENT, HELLO_WORKER, ERROR, HEARTBEAT, CHUNK = 1, 2, 3, 4, 5, 9, 10, 11, 12, 13
SUBSCRIBE, WELCOME, REQUEST, REPLY = 16, 17, 18, 19
ITEM_TYPES = {SUBMIT, ASSIGN, ACK, RESULT}
"""Whose payload is a list of maps with fields of their own."""
TIMEOUT_S = 25.0

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode


class OldFrame(NamedTuple):
    """One frame, decoded as far as every frame is alike."""

    type: int
    header: dict[str, Any]
    items: list[Any]
    """The payload: its items, or the one value it is."""


def write(type: int, header: dict[str, Any], items: list[Any] | None = None, *, batch: bool = True) -> bytes:
    """The bytes of a frame with these items, as a list or (`batch` False) the first alone."""
    payload = b"" if not items else pack(items) if batch else pack(items[0])
    head = pack(header)
    return struct.pack("<IBBH", 4 + len(head) + len(payload), type, BATCH if items and batch else 0, len(head)) + head + payload


def read(data: bytearray) -> Iterator[OldFrame]:
    """The whole frames at the beginning of the bytes, which are taken away."""
    while len(data) >= 8:
        length, type, flags, header_length = struct.unpack_from("<IBBH", data)
        if len(data) < 4 + length:
            return
        header, payload = bytes(data[8 : 8 + header_length]), bytes(data[8 + header_length : 4 + length])
        del data[: 4 + length]
        value = payload if type == CHUNK else unpack(payload) if payload else None
        yield OldFrame(type, unpack(header), value if flags & BATCH else [] if value is None else [value])


def names_in(frame: OldFrame) -> set[str]:
    """The names of all fields of a frame's header and items."""
    items = [item for item in frame.items if isinstance(item, dict)] if frame.type in ITEM_TYPES else []
    return {*frame.header, *(name for item in items for name in item)}


def _known() -> dict[int, set[str]]:
    known: dict[int, set[str]] = defaultdict(set)
    known[HELLO_WORKER] |= {"version", "oldest"}  # of every Hello of version 1; no vector shows them here
    known[HELLO_WORKER] |= {"caches"}  # said before the versions are known, and skipped by who does not know it
    for vector in V1["messages"]:
        data = bytearray.fromhex(vector["hex"])
        if not data[5] & ~BATCH:  # not compressed
            for frame in read(data):
                known[frame.type] |= names_in(frame)
    return dict(known)


KNOWN = _known()
"""Frame type -> field names of version 1."""


def check_known(frame: OldFrame) -> None:
    """AssertionError for what version 1 does not have."""
    assert frame.type in KNOWN, f"frame type {frame.type} is newer than version 1"
    newer = names_in(frame) - KNOWN[frame.type]
    assert not newer, f"frame type {frame.type} has fields that version 1 does not: {newer}"


class OldPeer:
    """A client or worker of version 1, over a real socket."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), TIMEOUT_S)
        self._data = bytearray()
        self._frames: list[OldFrame] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def send(self, type: int, header: dict[str, Any], items: list[Any] | None = None, *, batch: bool = True) -> None:
        data = write(type, header, items, batch=batch)
        for frame in read(bytearray(data)):
            check_known(frame)  # this peer is as old as it says
        self._socket.sendall(data)

    def receive(self, *types: int) -> OldFrame:
        """The next frame of these types; others are read over. A type that version 1 does not have is an AssertionError."""
        while True:
            while self._frames:
                frame = self._frames.pop(0)
                assert frame.type in KNOWN, f"the server sent frame type {frame.type}, which version 1 does not have"
                if frame.type in types:
                    return frame
            data = self._socket.recv(1 << 16)
            assert data, "the server hung up"
            self._data += data
            self._frames += read(self._data)


class OldServer:
    """A server of version 1 for one connection at a time: `answer(frame)` says what follows each frame. Refuses what is newer."""

    def __init__(self, answer: Callable[[OldFrame], list[bytes]]) -> None:
        self._answer = answer
        self.heard: list[OldFrame] = []
        self.problems: list[AssertionError] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        assert not self.problems, list(map(str, self.problems))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = bytearray()
        while piece := await reader.read(1 << 16):
            data += piece
            for frame in read(data):
                self.heard.append(frame)
                try:
                    check_known(frame)
                except AssertionError as error:
                    self.problems.append(error)
                writer.writelines(self._answer(frame))
        writer.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    """An asyncio test with a deadline."""

    async def main() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await test()

    asyncio.run(main())
