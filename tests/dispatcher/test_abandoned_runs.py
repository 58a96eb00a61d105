"""A job that went on at another node is stopped at the first, once that answers again; and nothing else is."""

from __future__ import annotations

import asyncio

import pytest

from tasuki.client.agents import node as agent_node
from tasuki.client.agents.node import JobView
from tasuki.core.failover.events import NodeJobStatus
from tasuki.dispatcher import dispatch, node_pool
from tests.client.agent_stand_in import Asked, Reply, StandIn
from tests.dispatcher.stage import job, tell, two_nodes
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "WATCH_S", 0.02)
    monkeypatch.setattr(node_pool, "ASK_S", 0.1)
    monkeypatch.setattr(agent_node, "LOOK_S", 0.1)
    monkeypatch.setattr(dispatch, "CLEAR_EVERY_S", 0.02)


def freezing(node: StandIn) -> None:
    """Let the node take the job, be heard of once, and fall silent."""

    async def freeze(asked: Asked) -> Reply:
        await asked.body()
        node.job = job("running", started_at=12.5)
        await node.until(lambda: node.asked.count("GET /jobs/a") >= 2)  # before the run, and during it
        node.frozen = True
        await asyncio.Event().wait()
        return None

    node.on_post = freeze


def running(started_at: float) -> JobView:
    return JobView(NodeJobStatus("running"), started_at=started_at)


def test_a_run_that_was_done_elsewhere_is_stopped_when_its_node_answers_again() -> None:
    async def story() -> None:
        async with two_nodes(silent_s=0.5) as (one, two, stage):
            freezing(one)
            assert (await stage.post("a")).headers["tasuki-node"] == two.url
            assert not one.removed

            one.frozen = False
            await one.until(lambda: bool(one.removed))

            assert one.removed == ["/jobs/a"]
            assert not two.removed
            await asyncio.to_thread(until, lambda: not stage.dispatcher._dispatch.abandoned._left)
            assert "tasuki_dispatcher_stopped_duplicates_total 1.0" in (await stage.http.get("/metrics")).text

    tell(story())


@pytest.mark.parametrize("now_there", [None, job("done", started_at=12.5), job("running", started_at=99.0)])
def test_what_is_not_that_run_any_more_is_let_be(now_there: dict[str, object] | None) -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            kept = stage.dispatcher._dispatch.abandoned
            kept.seen(one.url, "a", running(12.5))
            kept.settled(two.url, "a")
            one.job = now_there

            await kept.stop_reachable()

            assert not kept._left
            assert not one.removed

    tell(story())


def test_where_nobody_gave_a_result_the_silent_run_is_the_only_hope() -> None:
    async def story() -> None:
        async with two_nodes(silent_s=0.5) as (one, two, stage):
            freezing(one)
            two.die()

            assert (await stage.post("a")).status_code == 503

            assert not stage.dispatcher._dispatch.abandoned._left

    tell(story())


def test_what_is_remembered_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "REMEMBERED_MAX", 5)

    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            kept = stage.dispatcher._dispatch.abandoned
            one.frozen = True
            for number in range(20):
                kept.seen(one.url, f"job-{number}", running(1.0))
            assert len(kept._seen) == 5
            for number in range(20):
                kept.seen(one.url, f"job-{number}", running(1.0))
                kept.settled(two.url, f"job-{number}")
            assert (len(kept._seen), len(kept._left)) == (0, 5)

            monkeypatch.setattr(dispatch, "REMEMBERED_S", -1.0)
            await kept.stop_reachable()
            assert not kept._left

    tell(story())
