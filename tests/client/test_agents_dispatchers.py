"""Dispatchers as a client's nodes: what they keep is not sent again, and they are not blamed for the nodes that they lead to."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tasuki.client.agents import transfer as agent_transfer
from tasuki.client.agents.client import AsyncAgentsClient
from tasuki.client.agents.transfer import LARGE_BYTES
from tasuki.clocks import now
from tasuki.core.failover.nodes import BreakerState, NodeState
from tasuki.dispatcher.settings import Mode
from tasuki.errors import Unauthorized
from tests.agent.stage import code_of
from tests.client.agent_stand_in import Asked, Reply, StandIn, refusal, result
from tests.dispatcher.stage import DispatcherStage, job, tell, two_nodes

LARGE = bytes(range(256)) * (LARGE_BYTES // 256)
SMALL = b"spot,strike\n"


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def field(data: bytes, name: str) -> bytes:
    return f'name="input"\r\n\r\n{sha256_of(data)}:{name}\r\n'.encode()


async def hang(asked: Asked) -> Reply:
    await asked.body()
    await asyncio.Event().wait()
    return None


class Desk:
    """Stand-ins of dispatchers that keep inputs, and a client that knows them. The first comes first."""

    def __init__(self, folder: Path, nodes: list[StandIn], client: AsyncAgentsClient) -> None:
        self.folder, self.nodes, self.client = folder, nodes, client

    async def run(self, **files: bytes) -> None:
        """The files in this order, `large` as large.bin."""
        paths = [self.folder / f"{name}.bin" for name in files]
        for path, data in zip(paths, files.values(), strict=True):
            path.write_bytes(data)
        assert (await self.client.run("pricer", files=paths, output=self.folder / "result.zip")).succeeded

    def asked(self, method: str) -> list[str]:
        return [line for node in self.nodes for line in node.asked if line.startswith(method)]


def at_desk(folder: Path, count: int, story: Callable[[Desk], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            nodes = [await stack.enter_async_context(StandIn(limit=8 - place)) for place in range(count)]
            for node in nodes:
                node.inputs = {}
            client = await stack.enter_async_context(AsyncAgentsClient([node.url for node in nodes], token="t"))
            await story(Desk(folder, nodes, client))

    tell(main())


# ---------------------------------------------------------------------------------------------------- what is kept


def test_a_large_file_that_is_kept_is_named_and_not_sent(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        (node,) = desk.nodes
        node.inputs = {sha256_of(LARGE): LARGE}

        await desk.run(large=LARGE)

        assert field(LARGE, "large.bin") in node.posts[0]
        assert len(node.posts[0]) < 1000

    at_desk(tmp_path, 1, story)


def test_what_is_missing_is_stored_first_and_the_files_keep_their_order(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        (node,) = desk.nodes
        node.inputs = {sha256_of(LARGE): LARGE}

        await desk.run(first=SMALL, large=LARGE, last=b"")

        assert node.inputs[sha256_of(SMALL)] == SMALL
        form = node.posts[0]
        places = [form.index(field(data, name)) for data, name in ((SMALL, "first.bin"), (LARGE, "large.bin"), (b"", "last.bin"))]
        assert places == sorted(places)
        assert b'name="file"' not in form

    at_desk(tmp_path, 1, story)


def test_nobody_is_asked_for_small_files_or_where_nothing_is_kept(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        keeps, keeps_nothing = desk.nodes
        await desk.run(small=SMALL)
        keeps.well, keeps_nothing.inputs = False, None
        await desk.client.ranking()
        await desk.run(large=LARGE)

        assert desk.asked("HEAD") == []
        assert (SMALL in keeps.posts[0], LARGE in keeps_nothing.posts[0]) == (True, True)

    at_desk(tmp_path, 2, story)


def test_the_second_try_sends_nothing_that_is_kept_however_small(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        first, second = desk.nodes
        second.inputs = first.inputs

        async def keep_and_die(asked: Asked) -> Reply:
            assert first.inputs is not None
            first.inputs[sha256_of(SMALL)] = SMALL
            await asked.body()
            return None

        first.on_post = keep_and_die

        await desk.run(small=SMALL)

        assert field(SMALL, "small.bin") in second.posts[0]
        assert SMALL not in second.posts[0]

    at_desk(tmp_path, 2, story)


def test_a_file_that_was_cleaned_away_meanwhile_is_sent(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        (node,) = desk.nodes
        node.inputs = {sha256_of(LARGE): LARGE}

        async def not_found(asked: Asked) -> Reply:
            await asked.body()
            node.on_post = node.take
            return refusal(404, "INPUT_NOT_FOUND", sha256=sha256_of(LARGE))

        node.on_post = not_found

        await desk.run(large=LARGE)

        assert LARGE in node.posts[0]

    at_desk(tmp_path, 1, story)


def test_a_dispatcher_says_that_it_keeps_inputs_only_if_requests_pass_through_it(tmp_path: Path) -> None:
    async def story() -> None:
        said = []
        for settings in ({"inputs": str(tmp_path)}, {"inputs": str(tmp_path), "mode": Mode.REDIRECT}, {}):
            async with two_nodes(**settings) as (_, _, stage):
                said.append((await stage.http.get("/capacity")).json().get("inputs", False))

        assert said == [True, False, False]

    tell(story())


# ---------------------------------------------------------------------------------------------------- what was cut off


def sent_again(folder: Path, monkeypatch: pytest.MonkeyPatch, before: bytes, data: bytes) -> tuple[int, bytes]:
    """(how much a client sends of this file, if so much of it came before through another dispatcher; what a node got of it)."""
    monkeypatch.setattr(agent_transfer, "RESUMED_BYTES", len(data))
    path, inputs, found = folder / "book.bin", str(folder / "inputs"), []
    path.write_bytes(data)

    async def story() -> None:
        headers = {"Content-Range": f"bytes 0-{len(before) - 1}/{len(data)}"}
        async with two_nodes(inputs=inputs) as (_, _, other):
            cut = await other.http.put(f"/inputs/{sha256_of(data)}", content=before, headers=headers)
            assert cut.json()["offset"] == len(before)
        async with two_nodes(inputs=inputs) as (one, _, stage), AsyncAgentsClient(stage.url, token="") as client:
            assert (await client.run("pricer", files=[path], output=folder / "result.zip")).succeeded
            found.append((int(stage.dispatcher.metrics.stored._value.get()), one.posts[0]))

    tell(story())
    return found[0]


def test_an_upload_that_was_cut_goes_on_where_it_was_through_another_dispatcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = LARGE + LARGE

    size, post = sent_again(tmp_path, monkeypatch, data[:-1000], data)

    assert 1000 <= size < 3000  # and a form with its name
    assert data in post


def test_what_is_kept_of_an_upload_and_is_something_else_is_sent_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = LARGE + LARGE

    size, post = sent_again(tmp_path, monkeypatch, bytes(len(data) - 1000), data)

    assert size > len(data)
    assert data in post


# ---------------------------------------------------------------------------------------------------- what is on its way


def test_a_job_that_no_node_knows_yet_is_not_unknown_to_the_dispatcher_that_has_its_upload(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_nodes(inputs=str(tmp_path)) as (one, _, stage):
            one.on_post = hang
            posting = asyncio.create_task(stage.post("a"))
            await one.until(lambda: "POST /run/a" in one.asked)

            assert code_of(await stage.http.get("/jobs/a")) == (503, "UNAVAILABLE")
            assert code_of(await stage.http.get("/jobs/b")) == (404, "NOT_FOUND")
            posting.cancel()

    tell(story())


# ---------------------------------------------------------------------------------------------------- what is removed


def test_a_result_through_a_dispatcher_names_the_node_that_ran_it_and_what_was_left_out(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_nodes() as (one, _, stage):
            answers = result(one.data, Tasuki_Left_Out="2")

            async def take(asked: Asked) -> Reply:
                await one.take(asked)
                return answers

            one.on_post = take
            (tmp_path / "book.csv").write_bytes(SMALL)
            async with AsyncAgentsClient([stage.url], token="") as client:
                ended = await client.run("pricer", files=[tmp_path / "book.csv"], output=tmp_path / "result.zip")

            assert (ended.node, ended.left_out) == (one.url, 2)

    tell(story())


def test_a_dispatcher_removes_only_what_runs_if_it_is_asked_to(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            one.job, two.job = job("done"), job("running")
            answer = await stage.http.delete("/jobs/a?state=running")
            two.job = job("done")
            nothing = await stage.http.delete("/jobs/a?state=running")

            assert (answer.status_code, answer.json()["state"], nothing.status_code) == (200, "running", 404)
            assert (one.removed, two.removed, two.removal_queries) == ([], ["/jobs/a"], ["state=running"])

    tell(story())


# ---------------------------------------------------------------------------------------------------- redirects


def blamed(client: AsyncAgentsClient) -> bool:
    (line,) = client.nodes.ranking(now().monotonic)
    return (line.breaker, line.standing) != (BreakerState.CLOSED, NodeState.FREE)


async def redirected(stage: DispatcherStage, folder: Path, **options: Any) -> tuple[AsyncAgentsClient, asyncio.Task[Any]]:
    (folder / "book.csv").write_bytes(SMALL)
    client = AsyncAgentsClient(stage.url, token="")
    run = client.run("pricer", files=[folder / "book.csv"], output=folder / "result.zip", **options)
    return client, asyncio.create_task(run)


def test_a_dispatcher_is_asked_again_and_not_blamed_when_the_node_that_it_led_to_dies(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_nodes(mode=Mode.REDIRECT) as (one, two, stage):
            one.on_post = hang
            client, running = await redirected(stage, tmp_path)
            async with client:
                await one.until(lambda: any(line.startswith("POST") for line in one.asked))
                one.die()
                ended = await running

                assert (ended.succeeded, ended.node, blamed(client)) == (True, stage.url, False)
                assert SMALL in two.posts[0]

    tell(story())


def test_a_dispatcher_is_not_blamed_when_the_node_that_it_led_to_says_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_nodes(mode=Mode.REDIRECT) as (one, two, stage):

            async def silent_once(asked: Asked) -> Reply:
                one.on_post = two.take
                return await hang(asked)

            one.on_post = silent_once
            one.job = None
            client, running = await redirected(stage, tmp_path, silent_s=0.5)
            async with client:
                ended = await running

                assert (ended.succeeded, blamed(client)) == (True, False)

    tell(story())


def test_what_the_node_refuses_that_a_dispatcher_led_to_is_told_as_its_word(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_nodes(mode=Mode.REDIRECT) as (one, _, stage):

            async def stranger(asked: Asked) -> Reply:
                await asked.body()
                return refusal(401, "UNAUTHORIZED", "this token is not one of ours")

            one.on_post = stranger
            client, running = await redirected(stage, tmp_path)
            async with client:
                with pytest.raises(Unauthorized, match=one.url):
                    await running

    tell(story())
