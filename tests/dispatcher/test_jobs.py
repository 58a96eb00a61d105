"""Requests that a dispatcher passes to the node that knows an id, and its answers about itself and its nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.dispatcher.settings import Mode
from tests.agent.stage import AgentStage, code_of
from tests.client.agent_stand_in import StandIn
from tests.dispatcher.stage import dispatching, job, tell, two_nodes
from tests.support.waiting import until


def test_a_result_comes_from_the_node_that_has_it_whole_or_in_part() -> None:
    async def story() -> None:
        async with two_nodes() as (_, two, stage):
            two.job = job("done")
            two.data = b"0123456789"

            whole = await stage.http.get("/result/a")
            part = await stage.http.get("/result/a", headers={"Range": "bytes=4-", "If-Range": whole.headers["etag"]})

            assert (whole.status_code, whole.content) == (200, b"0123456789")
            assert (part.status_code, part.content) == (206, b"456789")
            assert part.headers["etag"] == whole.headers["etag"]
            assert part.headers["tasuki-node"] == two.url

    tell(story())


def test_of_two_nodes_that_know_a_job_the_one_with_the_result_counts() -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            one.job, two.job = job("failed"), job("done")

            answer = await stage.http.get("/jobs/a")

            assert answer.json() == two.job
            assert answer.headers["tasuki-node"] == two.url

    tell(story())


def test_an_id_that_no_node_knows_is_not_found() -> None:
    async def story() -> None:
        async with two_nodes() as (_, _, stage):
            for path in ("/jobs/a", "/result/a"):
                assert code_of(await stage.http.get(path)) == (404, "NOT_FOUND")
            assert code_of(await stage.http.delete("/jobs/a")) == (404, "NOT_FOUND")

    tell(story())


def test_an_id_that_a_silent_node_might_know_is_not_called_unknown() -> None:
    async def story() -> None:
        async with two_nodes() as (one, _, stage):
            one.die()

            answer = await stage.http.get("/jobs/a")

            assert code_of(answer) == (503, "UNAVAILABLE")
            assert list(answer.json()["error"]["details"]["nodes"]) == [one.url]

    tell(story())


def test_a_job_is_removed_at_every_node_that_has_it() -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            one.job, two.job = job("running"), job("done")

            answer = await stage.http.delete("/jobs/a")

            assert answer.json() == {"job_id": "a", "state": "done", "removed": True}
            assert (one.removed, two.removed) == (["/jobs/a"], ["/jobs/a"])

    tell(story())


def test_capacity_is_that_of_all_nodes_that_are_well() -> None:
    async def story() -> None:
        async with StandIn(running=1) as one, StandIn(running=2) as two, StandIn() as dead:
            dead.die()
            async with dispatching(one, two, dead) as stage:
                nodes = {line["node"]: line for line in (await stage.http.get("/nodes")).json()}

                assert (await stage.http.get("/capacity")).json() == {"running": 3, "limit": 8}
                assert {url: line["standing"] for url, line in nodes.items()} == {
                    one.url: "free",
                    two.url: "free",
                    dead.url: "left_out",
                }
                assert "refused" in nodes[dead.url]["said"]

    tell(story())


def test_health_is_that_of_having_a_node_and_not_going_down() -> None:
    async def story() -> None:
        async with StandIn() as one, dispatching(one, tokens=("secret",)) as stage:
            stage.http.headers.pop("Authorization")

            assert (await stage.http.get("/health")).json() == "ok"
            one.well = False
            await one.until(lambda: not stage.dispatcher.pool.well)
            assert code_of(await stage.http.get("/health")) == (503, "UNAVAILABLE")
            await stage.dispatcher.drain()
            assert code_of(await stage.http.get("/health")) == (503, "DRAINING")

    tell(story())


def test_no_run_is_begun_while_it_goes_down() -> None:
    async def story() -> None:
        async with two_nodes() as (one, _, stage):
            await stage.dispatcher.drain()

            assert code_of(await stage.post("a")) == (503, "DRAINING")
            assert not one.posts

    tell(story())


def test_metrics_count_runs_moves_and_nodes() -> None:
    async def story() -> None:
        async with two_nodes() as (one, _, stage):
            one.die()
            await stage.post("a")
            await stage.post("b")

            text = (await stage.http.get("/metrics")).text

            assert 'tasuki_dispatcher_runs_total{status="200"} 2.0' in text
            assert 'tasuki_dispatcher_nodes{standing="left_out"} 1.0' in text
            assert 'tasuki_dispatcher_places{kind="limit"} 4.0' in text

    tell(story())


def test_of_nodes_that_know_of_one_run_the_one_that_tells_how_far_it_is_counts() -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            for mine, others in ((one, two), (two, one)):
                mine.job, others.job = job("running", progress={"fraction": 0.5, "message": ""}), job("running")

                answer = await stage.http.get("/jobs/a")

                assert answer.json()["progress"] == {"fraction": 0.5, "message": ""}
                assert answer.headers["tasuki-node"] == mine.url

    tell(story())


@pytest.mark.parametrize("mode", list(Mode))
def test_the_jobs_of_all_nodes_are_listed_and_a_running_ones_output_is_passed_on(tmp_path: Path, mode: Mode) -> None:
    async def story() -> None:
        async with dispatching(one.url, two.url, mode=mode) as stage:
            listed = (await stage.http.get("/jobs?state=done&limit=5")).json()
            log = await stage.http.get("/jobs/runs/logs/stdout?wait_s=5")
            unknown = await stage.http.get("/jobs/unknown/logs/stdout")
            bad = [await stage.http.get(path) for path in ("/jobs?limit=0", "/jobs?state=x", "/jobs/runs/logs/stdin")]

        assert ({job["job_id"] for job in listed["jobs"]}, listed["silent"]) == ({"first", "second"}, {})
        assert (log.content, log.headers["tasuki-offset"], log.headers["tasuki-ended"]) == (b"hello\n", "0", "false")
        assert code_of(unknown) == (404, "NOT_FOUND")
        assert [code_of(answer) for answer in bad] == [(400, "INVALID_PAYLOAD")] * 3

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with AgentStage(tmp_path / "one") as one, AgentStage(tmp_path / "two", node="n2") as two:
        one.run("first")
        two.run("second")
        running = two.begin("runs", "echo hello; sleep 60")
        until(lambda: two.http.get("/jobs/runs/logs/stdout").text == "hello\n", what="it has written")
        tell(story())
        two.http.delete("/jobs/runs")
        assert running.answer().status_code == 409
