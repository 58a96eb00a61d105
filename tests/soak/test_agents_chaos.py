"""Three node agents, 200 jobs of 8 clients, agents killed and started again at random: every call returns the right result."""

from __future__ import annotations

import asyncio
import random
import zipfile
from pathlib import Path

import pytest

from tasuki.client.agents.client import AsyncAgentsClient
from tests.client.agent_processes import Agents, start_agents

pytestmark = pytest.mark.soak

JOBS = 200
CLIENTS = 8
DEADLINE_S = 300.0
PATIENCE_S = 60.0  # for a machine on which three interpreters start at once


async def client_of(agents: Agents, number: int, folder: Path) -> int:
    """Its share of the jobs, one after the other; how many were right."""
    right = 0
    async with AsyncAgentsClient(agents.urls, token="") as client:
        for job in range(number, JOBS, CLIENTS):
            book, output = folder / f"book-{job}.csv", folder / f"result-{job}.zip"
            book.write_text(f"row {job}")
            ended = await client.run(
                "pricer", ["0"], files=[book], output=output, job_id=f"job-{job}", patience_s=PATIENCE_S, silent_s=5.0
            )
            with zipfile.ZipFile(output) as archive:
                right += ended.succeeded and archive.read("stdout.log") == f"priced row {job}\n".encode()
    return right


async def kill_at_random(agents: Agents, chance: random.Random) -> None:
    """Until it is canceled; one at a time, so that somebody is always there."""
    while True:
        node = chance.choice(agents.nodes)
        node.process.kill()
        await asyncio.to_thread(node.start_again)
        await asyncio.sleep(chance.random())


@pytest.mark.parametrize("seed", [1, 2])
def test_every_call_returns_the_right_result_while_agents_die(tmp_path: Path, seed: int) -> None:
    async def main(agents: Agents) -> list[int]:
        async with asyncio.timeout(DEADLINE_S):
            killing = asyncio.create_task(kill_at_random(agents, random.Random(seed)))
            try:
                return await asyncio.gather(*(client_of(agents, number, tmp_path) for number in range(CLIENTS)))
            finally:
                killing.cancel()
                await asyncio.gather(killing, return_exceptions=True)

    with start_agents(tmp_path, 3, slots=4) as agents:
        assert sum(asyncio.run(main(agents))) == JOBS
