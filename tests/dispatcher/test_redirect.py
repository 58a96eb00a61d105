"""Redirect mode: 307 to a node of ours, followed by curl, and by our own client, which sends its body and its token again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tasuki.client.agents.client import AsyncAgentsClient
from tasuki.dispatcher.settings import Mode
from tasuki.errors import Unavailable
from tests.agent.stage import code_of
from tests.client.agent_stand_in import Asked, Reply, StandIn, http
from tests.dispatcher.stage import BOOK, dispatching, hash_of, job, tell, two_nodes

LARGE = bytes(3 * 1024 * 1024)


def test_a_run_is_told_where_to_go_before_its_body_is_read() -> None:
    async def story() -> None:
        async with two_nodes(mode=Mode.REDIRECT) as (one, _, stage):
            answer = await stage.post("a", LARGE, query=f"?input={hash_of()}")

            assert answer.status_code == 307
            assert answer.headers["location"] == f"{one.url}/run/a?input={hash_of()}"
            assert not one.posts

    tell(story())


def test_an_id_that_a_node_has_leads_there() -> None:
    async def story() -> None:
        async with two_nodes(mode=Mode.REDIRECT) as (_, two, stage):
            two.job = job("done")

            assert (await stage.post("a")).headers["location"] == f"{two.url}/run/a"
            assert (await stage.http.get("/result/a")).headers["location"] == f"{two.url}/result/a"
            assert (await stage.http.get("/jobs/a")).json() == two.job
            two.job = job("running")
            assert code_of(await stage.post("a")) == (423, "RUNNING")

    tell(story())


def test_nobody_is_sent_to_a_full_node() -> None:
    async def story() -> None:
        async with StandIn(running=4) as one, dispatching(one, mode=Mode.REDIRECT) as stage:
            assert code_of(await stage.post("a")) == (503, "FULL")

    tell(story())


def test_curl_follows_with_its_body(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_nodes(mode=Mode.REDIRECT, tokens=("secret",)) as (one, _, stage):
            seen: list[str] = []

            async def take(asked: Asked) -> Reply:
                seen.append(asked.headers.get("authorization", ""))
                return await one.take(asked)

            one.on_post = take
            (tmp_path / "book.csv").write_bytes(BOOK)
            command = ["curl", "-sS", "--location-trusted", "-H", "Authorization: Bearer secret", "-F", "file=@book.csv"]
            process = await asyncio.create_subprocess_exec(
                *command, f"{stage.url}/run/a", cwd=tmp_path, stdout=asyncio.subprocess.PIPE
            )
            output, _ = await process.communicate()

            assert output == one.data
            assert BOOK in one.posts[0]
            assert seen == ["Bearer secret"]

    tell(story())


def test_a_place_that_was_given_away_is_free_again_as_soon_as_its_job_has_ended() -> None:
    async def story() -> None:
        async with StandIn(limit=1) as node, dispatching(node, mode=Mode.REDIRECT) as stage:
            told = [(await stage.post(f"job-{number}")).status_code for number in range(4)]
            node.running = 1
            full = await stage.post("another")

            assert told == [307] * 4
            assert code_of(full) == (503, "FULL")

    tell(story())


def test_our_client_follows_with_its_body_and_fetches_the_result(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_nodes(mode=Mode.REDIRECT, tokens=("secret",), agent_token="secret") as (one, _, stage):
            (tmp_path / "book.csv").write_bytes(LARGE)
            seen: list[str] = []

            async def take(asked: Asked) -> Reply:
                seen.append(asked.headers.get("authorization", ""))
                return await one.take(asked)

            one.on_post = take
            output = tmp_path / "result.zip"
            async with AsyncAgentsClient(stage.url, token="secret") as client:
                ended = await client.run("pricer", files=[tmp_path / "book.csv"], output=output, job_id="a")
                one.job = job("done", input=hash_of(LARGE))
                stored = await client.run("pricer", files=[tmp_path / "book.csv"], output=output, job_id="a")

            assert (ended.succeeded, output.read_bytes()) == (True, one.data)
            assert LARGE in one.posts[0]
            assert seen == ["Bearer secret"]
            assert (stored.cached, len(one.posts)) == (True, 1)

    tell(story())


def test_our_client_follows_no_redirect_that_leads_on_to_another(tmp_path: Path) -> None:
    async def story() -> None:
        async with StandIn() as one, StandIn() as two, StandIn() as three:

            async def to_three(asked: Asked) -> Reply:
                return http(307, Location=f"{three.url}/run/a", Connection="close")

            async def to_two(asked: Asked) -> Reply:
                return http(307, Location=f"{two.url}/run/a", Connection="close")

            one.on_post, two.on_post = to_two, to_three
            async with AsyncAgentsClient(one.url, token="secret") as client:
                with pytest.raises(Unavailable, match=f"it redirects to {three.url}"):
                    await client.run("pricer", files=[__file__], output=tmp_path / "result.zip", job_id="a", patience_s=0.0)
            assert "POST /run/a" in two.asked
            assert not three.asked

    tell(story())
