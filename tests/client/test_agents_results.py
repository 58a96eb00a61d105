"""Results on their way into a file: what a killed client left is gone on with, and never mixed with anything else."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tasuki.blobs import files
from tasuki.client.agents.client import AgentResult, AsyncAgentsClient
from tasuki.client.agents.transfer import find_part, make_part, part_path
from tests.client.agent_stand_in import Asked, Reply, StandIn, http, result, result_zip
from tests.support.processes import TASUKI
from tests.support.waiting import until

DEADLINE_S = 20.0
DATA = result_zip(size_bytes=3_000_000)
HALF = len(DATA) // 2


class Desk:
    """A node that has the result of job 7f3c, and notes which parts of it are asked for."""

    def __init__(self, folder: Path, node: StandIn) -> None:
        self.node = node
        self.ranges: list[str] = []
        self.output = folder / "result.zip"
        self.part = part_path(self.output, "7f3c")
        self.book = folder / "book.csv"
        self.book.write_bytes(b"100,95")
        node.data = DATA
        node.job = {"job_id": "7f3c", "state": "done", "input": None}
        node.on_result = self.stored

    async def stored(self, asked: Asked) -> Reply:
        self.ranges.append(asked.headers.get("range", ""))
        return await self.node.stored(asked)

    async def run(self) -> AgentResult:
        async with AsyncAgentsClient(self.node.url, token="t") as client:
            return await client.run("pricer", files=[self.book], output=self.output, job_id="7f3c")

    def others(self) -> list[str]:
        return [path.name for path in self.output.parent.iterdir() if path not in (self.output, self.book)]


def at_desk(folder: Path, story: Callable[[Desk], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), StandIn() as node:
            await story(Desk(folder, node))

    asyncio.run(main())


def test_what_a_killed_client_left_is_gone_on_with(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.part.write_bytes(DATA[:HALF])

        ended = await desk.run()

        assert desk.ranges == [f"bytes={HALF}-"]
        assert (desk.output.read_bytes(), ended.sha256) == (DATA, hashlib.sha256(DATA).hexdigest())
        assert desk.others() == []

    at_desk(tmp_path, story)


@pytest.mark.parametrize("left", [b"of another result" * 1000, DATA + b"and more"], ids=["other", "too long"])
def test_what_was_left_of_something_else_is_not_kept(tmp_path: Path, left: bytes) -> None:
    async def story(desk: Desk) -> None:
        desk.part.write_bytes(left)

        async def stored(asked: Asked) -> Reply:
            answer = await desk.stored(asked)
            return http(416) if desk.ranges[-1] and len(left) > len(DATA) else answer

        desk.node.on_result = stored
        await desk.run()

        assert desk.ranges == [f"bytes={len(left)}-", ""]
        assert (desk.output.read_bytes(), desk.others()) == (DATA, [])

    at_desk(tmp_path, story)


def test_without_an_etag_nothing_is_gone_on_with(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.part.write_bytes(DATA[:HALF])

        async def anonymous(asked: Asked) -> Reply:
            desk.ranges.append(asked.headers.get("range", ""))
            return http(206, DATA[HALF:]) if "range" in asked.headers else result(DATA)

        desk.node.on_result = anonymous
        await desk.run()

        assert (desk.ranges, desk.output.read_bytes()) == ([f"bytes={HALF}-", ""], DATA)

    at_desk(tmp_path, story)


def test_a_file_that_somebody_writes_to_is_left_to_them(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        theirs = make_part(desk.output, "7f3c")
        theirs.write(DATA[:HALF])

        await desk.run()

        assert desk.ranges == [""]
        assert desk.part.read_bytes() == DATA[:HALF]
        theirs.publish(desk.output)
        assert desk.others() == []

    at_desk(tmp_path, story)


def test_a_file_that_becomes_the_output_at_this_moment_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "result.zip"
    path = part_path(output, "7f3c")
    path.write_bytes(b"whole")
    monkeypatch.setattr(files.fcntl, "flock", lambda *lock: path.replace(output))

    assert find_part(output, "7f3c") is None
    assert output.read_bytes() == b"whole"


def test_a_client_killed_in_the_middle_of_a_download_is_started_again_and_fetches_the_rest(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        async def half(asked: Asked) -> Reply:
            desk.ranges.append(asked.headers.get("range", ""))
            asked.writer.write(result(DATA)[:-HALF])
            await asyncio.Event().wait()
            return None

        desk.node.on_result = half
        options = ["--to", f"agents:{desk.node.url}", "--job-id", "7f3c", "--file", str(desk.book), "-o", str(desk.output)]
        process = await asyncio.create_subprocess_exec(
            *TASUKI,
            "run",
            *options,
            "pricer",
            env={"HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            await asyncio.to_thread(until, lambda: desk.part.exists() and desk.part.stat().st_size, what="a part is there")
        finally:
            process.kill()
            await process.wait()
        have = desk.part.stat().st_size

        desk.node.on_result = desk.stored
        await desk.run()

        assert desk.ranges == ["", f"bytes={have}-"]
        assert desk.output.read_bytes() == DATA

    at_desk(tmp_path, story)


@pytest.mark.parametrize("file_system_only", [False, True])
def test_systems_without_locks_use_a_file_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_system_only: bool
) -> None:
    def no_locks(*lock: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    if file_system_only:
        monkeypatch.setattr(files.fcntl, "flock", no_locks)
    else:
        monkeypatch.setattr(files, "HAS_LOCKS", False)
    output = tmp_path / "result.zip"
    left = part_path(output, "7f3c")
    left.write_bytes(b"left")

    assert find_part(output, "7f3c") is None
    part = make_part(output, "7f3c")
    part.write(b"mine")
    part.publish(output)
    make_part(output, "7f3c").discard()

    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {output.name: b"mine", left.name: b"left"}
