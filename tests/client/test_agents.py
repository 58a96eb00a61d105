"""Jobs on node agents over real sockets. The nodes are the test's own, so that they can fail as it wants."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasuki.client.agents.client import AgentResult, AgentsClient, AsyncAgentsClient, RunProgress
from tasuki.client.agents.jobs import AgentJobsClient
from tasuki.clocks import now
from tasuki.core.address import parse_url
from tasuki.core.failover.agent_protocol import InputRecord, input_hash
from tasuki.core.failover.nodes import BreakerState
from tasuki.errors import Conflict, InvalidInput, Unavailable
from tasuki.net.http.transport import HttpTransport
from tests.client.agent_stand_in import Asked, Reply, StandIn, http, refusal, result, result_zip
from tests.support.certificates import TestAuthority

DEADLINE_S = 20.0
FAILOVER_S = 0.3
BOOK = b"spot,strike\n100,95\n"


class Desk:
    """Nodes, and a client that knows them all."""

    def __init__(self, folder: Path, nodes: list[StandIn], client: AsyncAgentsClient) -> None:
        self.nodes = nodes
        self.client = client
        self.book = folder / "book.csv"
        self.output = folder / "result.zip"
        self.book.write_bytes(BOOK)

    async def run(self, **options: Any) -> AgentResult:
        return await self.client.run("pricer", ["--fast"], files=[self.book], output=self.output, **options)

    def leftovers(self) -> list[str]:
        return [path.name for path in self.output.parent.iterdir() if path.name.endswith(".part")]


def at_desk(folder: Path, count: int, story: Callable[[Desk], Coroutine[Any, Any, None]]) -> None:
    """The first node has most places, and comes first."""

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
            nodes = [await stack.enter_async_context(StandIn(limit=8 - place)) for place in range(count)]
            client = await stack.enter_async_context(AsyncAgentsClient([node.url for node in nodes], token="t"))
            await story(Desk(folder, nodes, client))

    asyncio.run(main())


async def never(asked: Asked) -> Reply:
    await asked.body()
    await asyncio.Event().wait()
    return None


def test_a_job_is_sent_as_a_form_and_its_result_saved_and_verified(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        (node,) = desk.nodes
        ended = await desk.run(timeout_s=90.0)

        assert desk.output.read_bytes() == node.data
        assert (ended.outcome, ended.exit_code, ended.sha256) == ("succeeded", 0, hashlib.sha256(node.data).hexdigest())
        form = node.posts[0]
        for part in (b'name="exec"\r\n\r\npricer\r\n', b'name="args"\r\n\r\n["--fast"]\r\n', b'name="timeout_s"\r\n\r\n90\r\n'):
            assert part in form
        assert b'name="file"; filename="book.csv"' in form
        assert BOOK in form
        assert desk.leftovers() == []

    at_desk(tmp_path, 1, story)


def test_the_input_hash_and_the_token_go_with_the_request(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        seen: list[Asked] = []

        async def take(asked: Asked) -> Reply:
            seen.append(asked)
            return await desk.nodes[0].take(asked)

        desk.nodes[0].on_post = take
        await desk.run()

        record = InputRecord("book.csv", hashlib.sha256(BOOK).hexdigest(), len(BOOK))
        assert seen[0].query == f"input={input_hash('pricer', ['--fast'], [record])}"
        assert seen[0].headers["authorization"] == "Bearer t"

    at_desk(tmp_path, 1, story)


def test_a_node_that_dies_is_followed_by_the_next_within_300_ms(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        first, second = desk.nodes
        first.on_post = never
        running = asyncio.create_task(desk.run())
        await first.until(lambda: any(line.startswith("POST") for line in first.asked))
        died_at = time.monotonic()

        first.die()

        await second.until(lambda: any(line.startswith("POST") for line in second.asked))
        assert time.monotonic() - died_at < FAILOVER_S
        assert (await running).node == second.url

    at_desk(tmp_path, 2, story)


def test_a_frozen_node_delays_nobody(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        first, second = desk.nodes
        first.frozen = True
        began = time.monotonic()

        assert (await desk.run()).node == second.url

        assert time.monotonic() - began < 1.5

    at_desk(tmp_path, 2, story)


def test_a_node_that_freezes_is_left_at_the_limit_and_its_breaker_opens(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        first, second = desk.nodes

        async def freeze(asked: Asked) -> Reply:
            first.frozen = True
            return await never(asked)

        first.on_post = freeze

        assert (await desk.run(silent_s=0.5)).node == second.url

        states = {line.node: line.breaker for line in desk.client.nodes.ranking(now().monotonic)}
        assert states == {first.url: BreakerState.OPEN, second.url: BreakerState.CLOSED}

    at_desk(tmp_path, 2, story)


def test_a_result_that_is_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        (node,) = desk.nodes
        node.data = result_zip(size_bytes=3_000_000)
        ranges: list[str] = []

        async def half(asked: Asked) -> Reply:
            await asked.body()
            answer = result(node.data)
            asked.writer.write(answer[: len(answer) // 2])
            await asked.writer.drain()
            return None

        async def rest(asked: Asked) -> Reply:
            ranges.append(asked.headers["range"])
            assert asked.headers["if-range"] == f'"{hashlib.sha256(node.data).hexdigest()}"'
            return await node.stored(asked)

        node.on_post, node.on_result = half, rest
        await desk.run()

        assert desk.output.read_bytes() == node.data
        assert len(ranges) == 1

    at_desk(tmp_path, 1, story)


def test_a_result_with_another_hash_than_announced_is_not_kept(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        first, second = desk.nodes
        second.data = result_zip(b"right\n")

        async def wrong(asked: Asked) -> Reply:
            if asked.method == "POST":
                await asked.body()
            return http(200, b"not what was announced", ETag=f'"{"0" * 64}"', Content_Type="application/zip")

        first.on_post = first.on_result = wrong

        assert (await desk.run()).node == second.url
        assert desk.output.read_bytes() == second.data

    at_desk(tmp_path, 2, story)


def test_a_lost_connection_is_told_with_its_reason() -> None:
    transport = HttpTransport(parse_url("http://n1:7090")[0], None, 1.0)
    at_first = transport._problem(httpx.ReadError(""), 1.0)
    transport._answered = True
    later = transport._problem(httpx.ReadError(""), 1.0)

    assert at_first.message == "http://n1:7090 hung up without an answer in HTTP; is it tcp://, or with TLS https://?"
    assert later.message == "the connection to http://n1:7090 was lost: ReadError"


def test_a_node_that_answers_with_something_else_is_left_out_of_a_list() -> None:
    async def story() -> None:
        async with StandIn() as odd, StandIn() as good, AsyncAgentsClient([odd.url, good.url], token="") as client:
            odd.job, good.job = {"jobs": [{"job_id": 7}]}, {"jobs": [{"job_id": "a", "state": "done", "node": "n1"}]}

            found = await AgentJobsClient(client).call("find", limit=10, cursor=None)

            assert [(job["job_id"], job["state"]) for job in found["jobs"]] == [("a", "SUCCEEDED")]

    asyncio.run(story())


def test_something_else_that_answers_there_is_not_taken_for_a_node(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        first, second = desk.nodes

        async def page(asked: Asked) -> Reply:
            await asked.body()
            return http(200, b"<html>Please log in</html>", Content_Type="text/html")

        first.on_post = page

        assert (await desk.run()).node == second.url

    at_desk(tmp_path, 2, story)


@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
def test_an_answer_that_comes_early_stops_the_upload(tmp_path: Path, secure: bool) -> None:
    authority = TestAuthority(tmp_path)
    sent: list[RunProgress] = []

    async def at_once(asked: Asked) -> Reply:
        return result(result_zip(), Tasuki_Cache="hit", Connection="close")

    async def main() -> None:
        async with StandIn(tls=authority.serving("127.0.0.1") if secure else None) as node:
            node.on_post = at_once
            async with AsyncAgentsClient(node.url, token="t", tls_ca=authority.ca) as client:
                desk = Desk(tmp_path, [node], client)
                desk.book.write_bytes(bytes(24_000_000))
                ended = await desk.run(on_progress=sent.append)

        assert (ended.cached, desk.output.read_bytes()) == (True, result_zip())
        assert max((one.done_bytes for one in sent if one.stage == "upload"), default=0) < 24_000_000

    asyncio.run(main())


def test_several_files_go_over_tls_whole(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)

    async def main() -> None:
        async with StandIn(tls=authority.serving("127.0.0.1")) as node:
            async with AsyncAgentsClient(node.url, token="t", tls_ca=authority.ca) as client:
                desk = Desk(tmp_path, [node], client)
                large, empty = tmp_path / 'large "quoted".bin', tmp_path / "empty.csv"
                large.write_bytes(bytes(range(256)) * 12_000)
                empty.write_bytes(b"")
                await client.run("pricer", files=[desk.book, large, empty], output=desk.output)

            (form,) = node.posts
            assert form.count(b'name="file"') == 3
            assert b'filename="large \\"quoted\\".bin"' in form
            assert BOOK in form
            assert large.read_bytes() in form

    asyncio.run(main())


def test_a_failed_program_is_not_tried_elsewhere_and_its_result_is_kept(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        first, second = desk.nodes
        first.data = result_zip(b"", b"no such option\n")

        async def failed(asked: Asked) -> Reply:
            await asked.body()
            return refusal(500, "PROGRAM_FAILED", exit_code=3, error_code="EXIT_CODE")

        async def stored(asked: Asked) -> Reply:
            return result(first.data, outcome="failed")

        first.on_post, first.on_result = failed, stored
        ended = await desk.run()

        assert (ended.outcome, ended.exit_code, ended.error_code) == ("failed", 3, "EXIT_CODE")
        assert desk.output.read_bytes() == first.data
        assert not any(line.startswith("POST") for line in second.asked)

    at_desk(tmp_path, 2, story)


def test_a_client_that_comes_again_with_its_id_takes_up_what_runs(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        first, second = desk.nodes
        second.job = {"job_id": "7f3c", "state": "running", "input": None}
        running = asyncio.create_task(desk.run(job_id="7f3c"))
        await second.until(lambda: second.asked.count("GET /jobs/7f3c") >= 2)

        second.job = {"job_id": "7f3c", "state": "done", "input": None}

        assert (await running).node == second.url
        assert [line for node in (first, second) for line in node.asked if line.startswith("POST")] == []

    at_desk(tmp_path, 2, story)


def test_the_same_id_with_another_input_is_a_conflict(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        async def conflict(asked: Asked) -> Reply:
            await asked.body()
            return refusal(409, "CONFLICT")

        desk.nodes[0].on_post = conflict
        with pytest.raises(Conflict, match="7f3c"):
            await desk.run(job_id="7f3c")

    at_desk(tmp_path, 1, story)


def test_a_second_node_is_tried_after_the_hedge_and_the_first_is_canceled(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        first, second = desk.nodes
        first.on_post = never

        ended = await desk.run(hedge_s=0.1)

        assert ended.node == second.url
        await first.until(lambda: bool(first.removed))
        assert (first.removed, first.removal_queries) == ([f"/jobs/{ended.job_id}"], ["state=running"])

    at_desk(tmp_path, 2, story)


def test_if_no_node_can_be_reached_one_error_names_them_all(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        first, second = desk.nodes
        first.die()
        second.well = False

        with pytest.raises(Unavailable) as told:
            await desk.run(patience_s=0.1)

        assert re.search(f"no connection to {first.url}: .*refused", told.value.message)
        assert f"{second.url}: answered 503 DRAINING" in told.value.message
        assert not desk.output.exists()
        assert desk.leftovers() == []

    at_desk(tmp_path, 2, story)


def test_progress_is_told_for_upload_run_and_download(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        (node,) = desk.nodes
        node.job = {"state": "running", "progress": {"fraction": 0.5, "message": "halfway"}}
        told: list[RunProgress] = []
        done = asyncio.Event()

        async def slowly(asked: Asked) -> Reply:
            await asked.body()
            await done.wait()
            return result(node.data)

        node.on_post = slowly
        running = asyncio.create_task(desk.run(on_progress=told.append))
        await node.until(lambda: any(line.startswith("GET /jobs") for line in node.asked))
        done.set()
        await running

        assert {one.stage for one in told} == {"upload", "run", "download"}
        (halfway, *_) = [one for one in told if one.stage == "run"]
        assert (halfway.fraction, halfway.message) == (0.5, "halfway")

    at_desk(tmp_path, 1, story)


def test_breakers_are_remembered_by_the_next_client_of_the_same_folder(tmp_path: Path) -> None:
    async def main() -> None:
        async with StandIn(limit=8) as first, StandIn() as second:
            urls = [first.url, second.url]
            first.well = False
            async with AsyncAgentsClient(urls, token="", notes=tmp_path / "data") as client:
                await client.ranking()
            first.well = True

            async with AsyncAgentsClient(urls, token="", notes=tmp_path / "data") as client:
                best, last = await client.ranking()

            assert (best.node, last.node, last.breaker, last.good_checks) == (second.url, first.url, BreakerState.OPEN, 1)

    asyncio.run(main())


def test_what_can_never_work_is_said_before_anything_is_sent(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        with pytest.raises(InvalidInput, match="at least one input file"):
            await desk.client.run("pricer", files=[], output=desk.output)
        with pytest.raises(InvalidInput, match=r"nothing\.csv"):
            await desk.client.run("pricer", files=[tmp_path / "nothing.csv"], output=desk.output)
        with pytest.raises(InvalidInput, match=r"folder of .* does not exist"):
            await desk.client.run("pricer", files=[desk.book], output=tmp_path / "no" / "result.zip")
        assert desk.nodes[0].asked == []

    at_desk(tmp_path, 1, story)


def test_the_blocking_client_gives_the_same_answers(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        def blocking() -> AgentResult:
            with AgentsClient(desk.nodes[0].url, token="t") as client:
                return client.run("pricer", files=[desk.book], output=desk.output)

        assert (await asyncio.to_thread(blocking)).succeeded

    at_desk(tmp_path, 1, story)
