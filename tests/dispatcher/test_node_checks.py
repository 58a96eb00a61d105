"""A dispatcher looks at its nodes: one poller, never two questions to one node at once, and nobody waits for a frozen one."""

from __future__ import annotations

import asyncio
import secrets
import time

from tasuki.core.failover.nodes import RANK_WAIT_S
from tests.client.agent_stand_in import Asked, Reply, StandIn
from tests.dispatcher.stage import dispatching, job, tell, two_nodes


def looks(node: StandIn) -> int:
    return node.asked.count("GET /capacity")


def test_many_requests_at_once_share_the_looks_of_one_poller() -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            began = time.monotonic()
            for _ in range(4):
                answers = await asyncio.gather(*(stage.post(secrets.token_hex(4)) for _ in range(7)))
                assert {answer.status_code for answer in answers} == {200}  # as many as there are places
            seconds = time.monotonic() - began

            assert len(one.posts) + len(two.posts) == 28
            assert looks(one) <= 2 + seconds / 0.2  # one in a quarter of a second

    tell(story())


def test_a_job_that_was_sent_counts_as_taken_until_it_ends_whatever_the_node_says_meanwhile() -> None:
    async def story() -> None:
        async with StandIn(running=0) as one, StandIn(running=2) as two, dispatching(one, two) as stage:
            company = stage.dispatcher.pool
            go = asyncio.Event()

            async def hold(asked: Asked) -> Reply:
                reply = await one.take(asked)
                await go.wait()
                return reply

            one.on_post = hold
            held = [asyncio.create_task(stage.post("a")), asyncio.create_task(stage.post("b"))]
            await one.until(lambda: len(one.posts) == 2)
            one.limit = 3  # and it does not count the two
            await company._check(one.url)

            assert (await stage.post("c")).headers["tasuki-node"] == two.url
            go.set()
            await asyncio.gather(*held)
            assert (await stage.post("d")).headers["tasuki-node"] == one.url

    tell(story())


def test_a_frozen_node_is_asked_once_at_a_time_and_delays_nobody() -> None:
    async def story() -> None:
        async with StandIn() as frozen, StandIn() as well:
            frozen.frozen = True
            async with dispatching(frozen, well) as stage:
                began = time.monotonic()
                answers = await asyncio.gather(*(stage.post(f"job-{number}") for number in range(8)))
                seconds = time.monotonic() - began

                assert {answer.headers["tasuki-node"] for answer in answers} == {well.url}
                assert seconds < RANK_WAIT_S + 0.5 + 1.0  # for its capacity, for what it knows, and for a slow machine
                assert len(stage.dispatcher.pool._checks) <= 2

    tell(story())


def test_all_nodes_are_asked_for_an_id_at_once() -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            one.job = two.job = job("running")

            await stage.http.get("/jobs/a")

            assert (one.asked.count("GET /jobs/a"), two.asked.count("GET /jobs/a")) == (1, 1)

    tell(story())
