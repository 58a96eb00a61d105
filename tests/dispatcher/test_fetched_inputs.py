"""A real agent that fetches its inputs: from a dispatcher, and from sources that lie, fail, or do not have them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tasuki.agent.app import Agent
from tasuki.agent.input_sources import DispatcherInputs
from tasuki.agent.settings import AgentConfig
from tasuki.core.address import Address, parse_url
from tasuki.core.failover.agent_protocol import InputRecord, input_hash
from tasuki.errors import NotFound, Unavailable
from tasuki.worker.execs import parse_exec_flag
from tests.agent.stage import code_of, members
from tests.dispatcher.stage import DEADLINE_S, dispatching, sha256_of, tell

SCRIPT = b"wc -c < in/data.bin"
DATA = bytes(range(256)) * 8192  # 2 MiB
FORM: list[Any] = [("file", ("job.sh", SCRIPT)), ("input", (None, f"{sha256_of(DATA)}:data.bin"))]


class Source:
    """Gives what it was told to give."""

    def __init__(self, *pieces: bytes | Exception) -> None:
        self._pieces = pieces

    async def pieces(self, sha256: str) -> AsyncGenerator[bytes, None]:
        for piece in self._pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def close(self) -> None:
        """Nothing is open."""


@asynccontextmanager
async def listening(folder: Path) -> AsyncIterator[tuple[Agent, str]]:
    execs = {"sh": parse_exec_flag("sh=/bin/sh {file}")}
    agent = Agent(AgentConfig(data=folder, node="n1", execs=execs, default_exec="sh", slots=2), secrets.token_hex(8))
    address = await agent.start(Address("http", "127.0.0.1", 0))
    try:
        yield agent, str(address)
    finally:
        agent.hurry()
        await agent.close()


def test_an_agent_fetches_what_the_dispatcher_keeps(tmp_path: Path) -> None:
    async def story() -> None:
        store = str(tmp_path / "inputs")
        async with listening(tmp_path / "data") as (agent, url), dispatching(url, inputs=store) as stage:
            agent._inputs = DispatcherInputs(parse_url(stage.url), "", None)  # each must know the other's address
            await stage.http.put(f"/inputs/{sha256_of(DATA)}", content=DATA)
            await stage.dispatcher.pool._check(url)
            assert stage.dispatcher.pool.pulls(url)

            answer = await stage.http.post("/run/a", files=FORM)
            again = await stage.http.post("/run/a", files=FORM)
            other = await stage.http.post("/run/a", files=[*FORM, ("args", (None, '["more"]'))])

            assert members(answer.content)["stdout.log"].strip() == b"2097152"
            assert (again.content, again.headers["tasuki-cache"]) == (answer.content, "hit")
            assert code_of(other) == (409, "CONFLICT")
            async with httpx.AsyncClient(base_url=url) as direct:
                assert (await direct.get("/capacity")).json() == {"running": 0, "limit": 2, "pulls": True}

    tell(story())


def test_all_agree_that_files_which_are_named_stand_behind_those_that_are_sent(tmp_path: Path) -> None:
    """However the form has them, and whether the agent fetches them or is sent them."""
    files = [InputRecord(name, sha256_of(data), len(data)) for name, data in (("job.sh", SCRIPT), ("data.bin", DATA))]
    query = {"input": input_hash("sh", (), files)}

    async def story() -> None:
        store = str(tmp_path / "inputs")
        async with listening(tmp_path / "data") as (agent, url), dispatching(url, inputs=store) as stage:
            await stage.http.put(f"/inputs/{sha256_of(DATA)}", content=DATA)
            sent = await stage.http.post("/run/sent", files=FORM[::-1], params=query)
            agent._inputs = DispatcherInputs(parse_url(stage.url), "", None)
            await stage.dispatcher.pool._check(url)
            fetched = await stage.http.post("/run/fetched", files=FORM[::-1], params=query)
            compared = await stage.http.post("/run/fetched", files=FORM)

            assert [answer.status_code for answer in (sent, fetched, compared)] == [200, 200, 200]

    tell(story())


def test_what_cannot_be_fetched_becomes_no_job(tmp_path: Path) -> None:
    async def story() -> None:
        async with listening(tmp_path) as (agent, url), httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as http:
            for source, status, code in (
                (None, 400, "INVALID_PAYLOAD"),
                (Source(NotFound("no blob")), 404, "INPUT_NOT_FOUND"),
                (Source(DATA[:100], Unavailable("the store is away")), 503, "UNAVAILABLE"),
                (Source(DATA[:-1], b"?"), 503, "UNAVAILABLE"),
            ):
                agent._inputs = source
                assert code_of(await http.post("/run/a", files=FORM)) == (status, code)
                assert code_of(await http.get("/jobs/a")) == (404, "NOT_FOUND")
            assert not list((tmp_path / "incoming").iterdir())
            agent._inputs = Source(DATA)
            assert (await http.post("/run/a", files=FORM)).status_code == 200

    tell(story())
