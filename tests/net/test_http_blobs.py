"""Uploads over HTTP as a client sends them: in which pieces, from where, and again after what. The test is the server."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tasuki.core.job import BlobRef
from tasuki.errors import Corrupt, TooLarge, Unavailable
from tasuki.net.blob_transfer import BlobClient
from tasuki.net.http import blobs
from tasuki.net.http.blobs import HttpBlobs
from tasuki.net.http.transport import HttpTransport
from tasuki.net.streams import FileSource
from tests.net.odd_server import Answer, Asked, OddServer, envelope, http

DEADLINE_S = 25.0
MIB = 1024 * 1024
DATA = bytes(range(256)) * (5 * MIB // 256)
REF = BlobRef(hashlib.sha256(DATA).hexdigest(), len(DATA))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "PIECE_FIRST_BYTES", 2 * MIB)


def reply(**body: object) -> bytes:
    return http(200, json.dumps(body).encode(), kind="application/json")


class Keeper:
    """A server that takes pieces. `refuse` may answer a piece instead."""

    def __init__(self, kept: bytes = b"") -> None:
        self.kept = kept
        self.sent: list[tuple[int, int]] = []
        self.refuse: Callable[[int, int], bytes | None] = lambda start, stop: None

    def __call__(self, asked: Asked) -> bytes:
        if asked.method == "POST":
            return reply(have=len(self.kept) == len(DATA), offset=len(self.kept))
        found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", asked.headers["content-range"])
        assert found is not None
        start, stop, size = int(found[1]), int(found[2]) + 1, int(found[3])
        assert (len(asked.body), size) == (stop - start, len(DATA))
        self.sent.append((start, stop))
        refusal = self.refuse(start, stop)
        if refusal is not None:
            return refusal
        if start != len(self.kept):
            return envelope(409, "CONFLICT")
        self.kept += asked.body
        if len(self.kept) < size:
            return reply(sha256=REF.sha256, size_bytes=size, offset=len(self.kept))
        if hashlib.sha256(self.kept).hexdigest() != REF.sha256:
            self.kept = b""
            return envelope(400, "CORRUPT")
        return reply(sha256=REF.sha256, size_bytes=size)


def run(answer: Answer, test: Callable[[OddServer, HttpBlobs], Coroutine[Any, Any, None]]) -> OddServer:
    async def main() -> OddServer:
        async with asyncio.timeout(DEADLINE_S), OddServer(answer) as server:
            transport = HttpTransport(server.address, None, 5.0)
            try:
                await test(server, HttpBlobs(transport))
            finally:
                await transport.close()
            return server

    return asyncio.run(main())


async def put(blobs: HttpBlobs, progress: Callable[[int], None] | None = None, data: bytes = DATA) -> None:
    async with FileSource(io.BytesIO(data)) as source:
        await blobs.put(source, REF, progress)


# ---------------------------------------------------------------------------------------------------- pieces


def test_pieces_grow_and_all_of_them_are_the_blob() -> None:
    keeper, progress = Keeper(), list[int]()

    run(keeper, lambda server, blobs: put(blobs, progress.append))

    assert keeper.sent == [(0, 2 * MIB), (2 * MIB, 5 * MIB)]
    assert keeper.kept == DATA
    assert progress[-1] == len(DATA)
    assert progress == sorted(progress)


def test_only_what_the_server_lacks_is_sent() -> None:
    keeper = Keeper(DATA[: 4 * MIB])

    run(keeper, lambda server, blobs: put(blobs))

    assert keeper.sent == [(4 * MIB, 5 * MIB)]


def test_pieces_that_something_on_the_way_finds_too_large_are_halved_and_stay_so() -> None:
    keeper = Keeper()
    keeper.refuse = lambda start, stop: http(413, b"<html>") if stop - start > MIB else None

    run(keeper, lambda server, blobs: put(blobs))

    assert keeper.sent == [(0, 2 * MIB), *((at, at + MIB) for at in range(0, 5 * MIB, MIB))]
    assert keeper.kept == DATA


def test_they_become_no_smaller_than_1_mib() -> None:
    keeper = Keeper()
    keeper.refuse = lambda start, stop: http(413, b"<html>")

    async def test(server: OddServer, blobs: HttpBlobs) -> None:
        with pytest.raises(TooLarge, match="raise its limit"):
            await put(blobs)

    run(keeper, test)
    assert keeper.sent == [(0, 2 * MIB), (0, MIB)]


def test_an_older_server_gets_the_blob_in_one_piece() -> None:
    server = run(
        lambda asked: reply(have=False) if asked.method == "POST" else reply(sha256=REF.sha256, size_bytes=REF.size_bytes),
        lambda server, blobs: put(blobs),
    )

    assert [asked.method for asked in server.asked] == ["POST", "PUT"]
    assert "content-range" not in server.asked[1].headers
    assert server.asked[1].body == DATA


# ---------------------------------------------------------------------------------------------------- again


def line_put(blobs: HttpBlobs) -> Coroutine[Any, Any, None]:
    line = BlobClient()
    line.carried_by(blobs)
    return line.put(io.BytesIO(DATA), REF)


def test_after_a_cut_it_goes_on_where_the_server_is() -> None:
    keeper = Keeper()

    def cut_once(start: int, stop: int) -> bytes | None:
        if start != 2 * MIB or len(keeper.sent) > 2:
            return None
        keeper.kept += DATA[2 * MIB : 3 * MIB]  # a part of it came
        return b""

    keeper.refuse = cut_once
    server = run(keeper, lambda server, blobs: line_put(blobs))

    assert [asked.method for asked in server.asked] == ["POST", "PUT", "PUT", "POST", "PUT", "PUT"]
    assert [start for start, _ in keeper.sent] == [0, 2 * MIB, 3 * MIB, 9 * MIB // 2]
    assert keeper.kept == DATA


def test_after_cuts_the_pieces_become_smaller() -> None:
    keeper = Keeper()
    keeper.refuse = lambda start, stop: b"" if stop - start > MIB else None

    run(keeper, lambda server, blobs: line_put(blobs))

    assert keeper.sent[:3] == [(0, 2 * MIB), (0, MIB), (MIB, 3 * MIB)]
    assert keeper.kept == DATA


def test_after_another_upload_came_between_it_asks_where_to_go_on() -> None:
    keeper = Keeper()

    def advance_once(start: int, stop: int) -> bytes | None:
        if len(keeper.sent) == 1:
            keeper.kept = DATA[: 4 * MIB]
        return None

    keeper.refuse = advance_once
    run(keeper, lambda server, blobs: line_put(blobs))

    assert keeper.sent == [(0, 2 * MIB), (4 * MIB, 5 * MIB)]


def test_if_what_the_server_had_was_wrong_all_is_sent_again_once() -> None:
    keeper = Keeper(b"x" * (4 * MIB))

    run(keeper, lambda server, blobs: put(blobs))

    assert [start for start, _ in keeper.sent] == [4 * MIB, 0, 2 * MIB]
    assert keeper.kept == DATA


def test_wrong_bytes_of_our_own_are_not_sent_again() -> None:
    keeper = Keeper()

    async def test(server: OddServer, blobs: HttpBlobs) -> None:
        with pytest.raises(Corrupt):
            await put(blobs, data=b"x" * len(DATA))

    run(keeper, test)
    assert [start for start, _ in keeper.sent] == [0, 2 * MIB]


def test_a_file_that_became_shorter_is_corrupt() -> None:
    async def test(server: OddServer, blobs: HttpBlobs) -> None:
        with pytest.raises(Corrupt, match="changed while it was sent"):
            await put(blobs, data=DATA[:100])

    run(Keeper(), test)


def test_a_server_that_goes_nowhere_is_not_asked_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def pause(self: BlobClient, seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 5:
            self.close(Unavailable("enough"))

    monkeypatch.setattr(BlobClient, "_pause", pause)
    keeper = Keeper()
    keeper.refuse = lambda start, stop: envelope(409, "CONFLICT")

    async def test(server: OddServer, blobs: HttpBlobs) -> None:
        with pytest.raises(Unavailable, match="enough"):
            await line_put(blobs)

    run(keeper, test)
    assert pauses == sorted(set(pauses))
