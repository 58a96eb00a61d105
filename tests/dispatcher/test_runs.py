"""Runs through a dispatcher: which node is chosen, what is passed on, and what leads to the next node."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tasuki.agent import upload
from tasuki.core.failover.nodes import BreakerRules, NodeState
from tasuki.dispatcher import dispatch, node_pool
from tests.agent.stage import DOTNET_KIND, DOTNET_NAMES, AgentStage, code_of, dotnet_form, form, head, members, part
from tests.client.agent_stand_in import Asked, Reply, StandIn, http, refusal, result, result_zip
from tests.dispatcher.stage import BOOK, dispatching, hash_of, job, sha256_of, tell, two_nodes

LARGE = bytes(3 * 1024 * 1024)


def answers(node: StandIn, reply: bytes) -> None:
    async def on_post(asked: Asked) -> Reply:
        node.posts.append(await asked.body())
        return reply

    node.on_post = on_post


async def hang_up(asked: Asked) -> Reply:
    """After the headers, as a node that is killed."""
    return None


def test_a_job_goes_to_the_node_with_most_room_and_its_result_comes_back_as_it_is() -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            answer = await stage.post("a", exec="pricer")

            assert (answer.status_code, answer.content) == (200, one.data)
            assert answer.headers["tasuki-node"] == one.url
            assert answer.headers["content-type"] == "application/zip"
            assert int(answer.headers["content-length"]) == len(one.data)
            assert answer.headers["etag"].strip('"')
            assert BOOK in one.posts[0]
            assert b'name="exec"\r\n\r\npricer' in one.posts[0]
            assert not two.posts

    tell(story())


def test_two_dispatchers_send_one_id_to_the_same_of_equal_nodes() -> None:
    async def story() -> None:
        async with AsyncExitStack() as stack:
            nodes = [await stack.enter_async_context(StandIn()) for _ in range(3)]
            stages = [await stack.enter_async_context(dispatching(*nodes)) for _ in range(2)]
            chosen = {(await stage.post("a")).headers["tasuki-node"] for stage in stages}

            assert len(chosen) == 1

    tell(story())


NO_OUTCOMES = [refusal(500, "INTERNAL"), refusal(503, "DRAINING"), refusal(503, "FULL"), refusal(401, "UNAUTHORIZED")]


def test_what_is_no_outcome_leads_to_the_next_node() -> None:
    async def story() -> None:
        async with AsyncExitStack() as stack:
            nodes = [await stack.enter_async_context(StandIn(limit=9 - place)) for place in range(len(NO_OUTCOMES) + 2)]
            for node, reply in zip(nodes, NO_OUTCOMES, strict=False):
                answers(node, reply)
            *_, killed, good = nodes
            killed.on_post = hang_up
            stage = await stack.enter_async_context(dispatching(*nodes))

            answer = await stage.post("a")

            assert (answer.status_code, answer.content) == (200, good.data)
            assert all("POST /run/a" in node.asked for node in nodes)
            assert BOOK in good.posts[0]

    tell(story())


OUTCOMES = [(500, "PROGRAM_FAILED"), (504, "TIMED_OUT"), (409, "CONFLICT"), (409, "CANCELED"), (400, "INVALID_PAYLOAD")]


def test_an_answer_of_a_node_is_passed_on_as_it_is() -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            for status, code in [*OUTCOMES, (423, "RUNNING")]:
                answers(one, refusal(status, code, "its own words", "7", exit_code=3))

                answer = await stage.post("a")

                assert code_of(answer) == (status, code)
                assert answer.json()["error"]["details"] == {"exit_code": 3}
                assert answer.headers["retry-after"] == "7"
                assert answer.headers["tasuki-node"] == one.url
            assert not two.posts

    tell(story())


NOT_HERE = [(400, "EXEC_NOT_ALLOWED"), (413, "TOO_LARGE"), (500, "PROGRAM_NOT_FOUND"), (503, "DISK_FULL")]


@pytest.mark.parametrize(("status", "code"), NOT_HERE)
def test_what_one_node_cannot_run_goes_to_the_next_and_leaves_no_node_out(status: int, code: str) -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            answers(one, refusal(status, code))

            assert (await stage.post("a")).content == two.data
            assert {line.standing for line in stage.dispatcher.pool.ranking()} == {NodeState.FREE}

            answers(two, refusal(status, code, "as well"))
            answer = await stage.post("b")

            assert code_of(answer) == (status, code)
            assert set(answer.json()["error"]["details"]["nodes"]) == {one.url, two.url}
            assert "as well" in answer.json()["error"]["message"]
            assert {line.standing for line in stage.dispatcher.pool.ranking()} == {NodeState.FREE}

    tell(story())


def test_what_one_node_cannot_run_waits_for_the_other_that_is_full() -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            answers(one, refusal(500, "PROGRAM_NOT_FOUND"))
            answers(two, refusal(503, "FULL"))

            assert code_of(await stage.post("a")) == (503, "FULL")

    tell(story())


def test_a_large_body_that_is_gone_is_answered_with_what_its_node_said() -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            answers(one, refusal(400, "EXEC_NOT_ALLOWED", "its own words"))

            answer = await stage.post("a", LARGE)

            assert (code_of(answer), answer.headers["tasuki-node"]) == ((400, "EXEC_NOT_ALLOWED"), one.url)
            assert not two.posts

    tell(story())


ZIP = result_zip()
NO_RESULTS = [
    http(204, Content_Type="application/zip", ETag=f'"{sha256_of(b"")}"'),
    result(ZIP, 206),
    http(200, b'"ok"', Content_Type="application/json"),
    http(200, ZIP, Content_Type="application/zip"),
    http(200, ZIP, ETag=f'"{sha256_of(ZIP)}"'),
]


@pytest.mark.parametrize("reply", NO_RESULTS, ids=["204", "206", "json", "no etag", "no type"])
def test_a_2xx_that_is_no_result_counts_as_a_failure_and_the_next_node_gets_the_job(reply: bytes) -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            answers(one, reply)

            answer = await stage.post("a")

            assert (answer.status_code, answer.content) == (200, two.data)
            standing = {line.node: line.standing for line in stage.dispatcher.pool.ranking()}
            assert standing[one.url] is NodeState.LEFT_OUT

    tell(story())


def test_a_stored_result_that_is_none_is_not_passed_on() -> None:
    async def story() -> None:
        async def nonsense(asked: Asked) -> Reply:
            return http(200, b"hello")

        async with StandIn() as node, dispatching(node) as stage:
            node.job, node.on_result = job("done"), nonsense

            assert code_of(await stage.http.get("/result/a")) == (503, "UNAVAILABLE")

    tell(story())


def test_a_failing_node_is_left_out_and_comes_back_after_good_checks() -> None:
    async def story() -> None:
        async with two_nodes(rules=BreakerRules(left_out_s=0.05, good_checks=2, check_spacing_s=0.01)) as (one, two, stage):
            one.on_post = hang_up
            await stage.post("a")
            standing = {line["node"]: line for line in (await stage.http.get("/nodes")).json()}

            assert standing[one.url]["standing"] == "left_out"
            assert standing[one.url]["breaker"] == "open"
            one.on_post = one.take
            await one.until(lambda: stage.dispatcher.pool.ranking()[0].node == one.url)
            assert (await stage.post("b")).headers["tasuki-node"] == one.url
            assert len(two.posts) == 1

    tell(story())


def test_full_everywhere_is_said_before_the_upload_is_read() -> None:
    async def story() -> None:
        async with StandIn(running=4) as one, StandIn(running=4) as two, dispatching(one, two) as stage:
            answer = await stage.post("a", LARGE)

            assert code_of(answer) == (503, "FULL")
            assert answer.json()["error"]["details"] == {"running": 8, "limit": 8}
            assert answer.headers["retry-after"] == "1"
            assert not any(asked.startswith("POST") for asked in [*one.asked, *two.asked])

    tell(story())


def test_without_a_node_the_answer_names_what_each_of_them_said() -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            one.die()
            two.die()

            answer = await stage.post("a")

            assert code_of(answer) == (503, "UNAVAILABLE")
            assert set(answer.json()["error"]["details"]["nodes"]) == {one.url, two.url}
            assert "retry-after" in answer.headers

    tell(story())


def test_a_running_id_is_answered_with_423_and_where_it_runs() -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            two.job = job("running")

            answer = await stage.post("a")

            assert code_of(answer) == (423, "RUNNING")
            details = answer.json()["error"]["details"]
            assert details == {"job_id": "a", "node": "n1", "address": two.url, "since": 1.0}
            assert not one.posts
            assert not two.posts

    tell(story())


def test_a_done_id_is_answered_by_its_node_without_an_upload() -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            two.job = job("done")
            two.data = b"what it had before"

            answer = await stage.post("a", query=f"?input={hash_of()}")

            assert (answer.status_code, answer.content) == (200, two.data)
            assert answer.headers["tasuki-cache"] == "hit"
            assert not one.posts
            assert not two.posts

    tell(story())


def test_a_done_id_with_another_input_is_a_conflict() -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            two.job = job("done")

            assert code_of(await stage.post("a", query=f"?input={hash_of(b'other')}")) == (409, "CONFLICT")
            assert not one.posts
            assert not two.posts

    tell(story())


def test_a_done_id_whose_input_is_not_named_is_compared_by_its_own_node() -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            two.job = job("done")
            answers(two, refusal(409, "CONFLICT"))

            assert code_of(await stage.post("a")) == (409, "CONFLICT")
            assert not one.posts

    tell(story())


def test_a_node_may_take_its_time_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "WATCH_S", 0.02)

    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            two.job = job("done")

            async def compare(asked: Asked) -> Reply:
                await two.until(lambda: two.asked.count("GET /jobs/a") > 5)
                return await two.take(asked)

            two.on_post = compare

            assert (await stage.post("a")).headers["tasuki-node"] == two.url
            assert not one.posts

    tell(story())


def test_a_failed_id_runs_again_wherever_there_is_room() -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            two.job = job("failed")

            assert (await stage.post("a")).headers["tasuki-node"] == one.url

    tell(story())


def test_a_large_upload_that_was_lost_must_be_sent_again() -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):

            async def die_late(asked: Asked) -> Reply:
                await asked.body()
                return None

            one.on_post = die_late

            answer = await stage.post("a", LARGE)

            assert code_of(answer) == (503, "UNAVAILABLE")
            assert "send it again" in answer.json()["error"]["message"]
            assert not two.posts

    tell(story())


def test_a_stored_upload_goes_to_the_next_node_without_a_second_upload(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_nodes(inputs=str(tmp_path)) as (one, two, stage):

            async def die_late(asked: Asked) -> Reply:
                await asked.body()
                return None

            one.on_post = die_late

            answer = await stage.post("a", LARGE, exec="pricer", args='["--fast"]', timeout_s="7.5")

            assert (answer.status_code, answer.content) == (200, two.data)
            assert LARGE in two.posts[0]
            for name, value in (("exec", "pricer"), ("args", '["--fast"]'), ("timeout_s", "7.5")):
                assert f'name="{name}"\r\n\r\n{value}\r\n'.encode() in two.posts[0]

    tell(story())


@pytest.mark.parametrize("stored", [True, False])
def test_a_client_in_dotnet_reaches_an_agent_through_a_dispatcher(tmp_path: Path, stored: bool) -> None:
    async def story() -> None:
        async with dispatching(agent.url, inputs=str(tmp_path / "inputs") if stored else None) as stage:
            for number, (name, written) in enumerate(DOTNET_NAMES.items()):
                body = dotnet_form(b"ls in", written)
                answer = await stage.http.post(f"/run/{number}", content=body, headers={"Content-Type": DOTNET_KIND})
                assert members(answer.content)["stdout.log"].decode() == f"{name}\n"

    with AgentStage(tmp_path) as agent:
        tell(story())


@pytest.mark.parametrize(
    "upload_head", [head("slow", 10**6), head("slow", None) + b"ffffffffffffff\r\n"], ids=["a length", "one endless chunk"]
)
def test_an_upload_that_does_not_go_on_is_the_clients_fault_and_not_the_nodes(
    tmp_path: Path, upload_head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "PATIENCE_S", 0.5)

    async def story() -> None:
        async with dispatching(agent.url) as stage:
            reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
            writer.write(upload_head + part("file", b"slow", "book.csv"))
            status = (await reader.readline()).split()[1]
            writer.close()

            assert status == b"400"
            (line,) = (await stage.http.get("/nodes")).json()
            assert (line["standing"], line["breaker"]) == ("free", "closed")

    with AgentStage(tmp_path) as agent:
        tell(story())


@pytest.mark.parametrize("says", [None, job("interrupted")])
def test_a_node_whose_connection_is_dead_is_left(says: dict[str, object] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "WATCH_S", 0.02)

    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            never = asyncio.Event()

            async def wait(asked: Asked) -> Reply:
                one.job = says
                await never.wait()
                return None

            one.on_post = wait

            assert (await stage.post("a")).headers["tasuki-node"] == two.url

    tell(story())


def test_a_node_that_froze_with_the_job_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "WATCH_S", 0.02)
    monkeypatch.setattr(node_pool, "ASK_S", 0.1)

    async def story() -> None:
        async with two_nodes(silent_s=0.5) as (one, two, stage):
            never = asyncio.Event()

            async def freeze(asked: Asked) -> Reply:
                one.frozen = True
                await never.wait()
                return None

            one.on_post = freeze

            assert (await stage.post("a")).headers["tasuki-node"] == two.url

    tell(story())


def test_a_client_that_leaves_is_not_waited_for_at_the_node() -> None:
    async def story() -> None:
        async with two_nodes() as (one, _, stage):
            dropped = asyncio.Event()

            async def wait(asked: Asked) -> Reply:
                await asked.body()
                one.job = job("running")
                await asked.reader.read()  # until the dispatcher hangs up
                dropped.set()
                return None

            one.on_post = wait
            asking = asyncio.create_task(stage.post("a"))
            await one.until(lambda: "POST /run/a" in one.asked)
            asking.cancel()

            await dropped.wait()
            assert not one.removed

    tell(story())


def test_a_result_that_breaks_off_is_not_taken_for_a_whole_one() -> None:
    async def story() -> None:
        async with two_nodes() as (one, _, stage):

            async def half(asked: Asked) -> Reply:
                await asked.body()
                asked.writer.write(result(one.data)[:-10])
                await asked.writer.drain()
                return None

            one.on_post = half
            with pytest.raises(Exception, match="peer closed connection"):
                await stage.post("a")

    tell(story())


def test_an_upload_that_is_still_coming_goes_on_at_the_next_node_with_nothing_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "WATCH_S", 0.02)

    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            never = asyncio.Event()

            async def lose(asked: Asked) -> Reply:
                await never.wait()
                return None

            one.on_post = lose  # it knows nothing of the job, so that the dispatcher gives it up
            body = form(part("file", bytes(range(256)) * 100, "book.csv"))
            _, writer = await asyncio.open_connection("127.0.0.1", stage.port)
            writer.write(head("a", len(body)) + body[:300])
            await two.until(lambda: "POST /run/a" in two.asked)
            writer.write(body[300:])
            await two.until(lambda: len(two.posts) == 1)

            assert two.posts == [body]
            writer.close()

    tell(story())
