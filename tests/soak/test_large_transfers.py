"""Files of GiBs through a server: killed on the way, and never in memory."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from tasuki.core.job import BlobRef, InputFile
from tests.e2e.transfers import MIB, make_file, send_with_deaths
from tests.soak.memory import ALLOWED_BYTES, watched
from tests.support.processes import ServerProcess, start_server

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("door", ["http", "tcp"])
def test_a_gib_whose_client_and_server_are_killed_is_hardly_sent_twice(tmp_path: Path, door: str) -> None:
    sent = send_with_deaths(tmp_path, door, 1024 * MIB, patience_s=120.0)

    assert 1024 * MIB <= sent <= 1.1 * 1024 * MIB


@pytest.mark.parametrize("door", ["http", "tcp"])
def test_two_gib_in_and_out_stay_out_of_the_servers_memory(tmp_path: Path, door: str) -> None:
    path, back = tmp_path / "large.bin", tmp_path / "back.bin"
    sha256 = make_file(path, 2048 * MIB)

    async def main(server: ServerProcess) -> None:
        async with server.async_client(server.http_url if door == "http" else server.url) as client:
            ref = await client.put_file(path)
            assert ref == BlobRef(sha256, 2048 * MIB)
            file = InputFile("in", sha256=ref.sha256, size_bytes=ref.size_bytes)
            handle = await client.submit(subject="nobody.takes.it", files=[file])
            with back.open("wb") as out:
                await client._blobs.get(ref, handle.job_id, out.write)

    with start_server(tmp_path, "--http", "127.0.0.1:0") as server, watched(server.pid) as peak:
        asyncio.run(main(server))

    path.unlink()
    with back.open("rb") as received:
        back.unlink()
        assert hashlib.file_digest(received, "sha256").hexdigest() == sha256
    assert peak.grown <= ALLOWED_BYTES
