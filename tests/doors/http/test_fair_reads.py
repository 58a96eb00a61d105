"""Reads of one token do not keep others out: tokens are looked up apart, and a token has one slow read at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasuki.core.broker.events import Query
from tasuki.core.protocol import HelloClient, Reply, Request, Welcome
from tasuki.server import server as server_module
from tasuki.server.queries import answer_query
from tests.doors.http.stage import Stage
from tests.server.peers import FakeConnection
from tests.support.waiting import until

FINDS = 120


class Brake:
    """Holds every `find` in the reader until it is let go, and notes which reads begin."""

    def __init__(self) -> None:
        self.let_go, self.began = threading.Event(), list[str]()

    def __call__(self, reader: Any, query: Query, *rest: Any) -> Any:
        self.began.append(f"{query.verb} {query.identity.name}")
        if query.verb == "find":
            assert self.let_go.wait(10.0)
        return answer_query(reader, query, *rest)


@pytest.fixture
def brake(monkeypatch: pytest.MonkeyPatch) -> Brake:
    brake = Brake()
    monkeypatch.setattr(server_module, "answer_query", brake)
    return brake


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Stage(tmp_path) as stage:
        yield stage


def test_a_token_that_finds_without_end_keeps_nobody_out(stage: Stage, brake: Brake) -> None:
    greedy_id, greedy = stage.create_named_token("client")
    other_id, other = stage.create_named_token("client")
    job_id = stage.post("/v1/jobs", {"exec": "x"}, other).json()["job_id"]
    worker = stage.create_token("worker", worker_id="w1")
    headers, limits = {"Authorization": f"Bearer {greedy}"}, httpx.Limits(max_connections=FINDS)
    with (
        httpx.Client(base_url=stage.url, headers=headers, limits=limits, timeout=20.0) as client,
        futures.ThreadPoolExecutor(FINDS + 1) as pool,
    ):
        finds = [pool.submit(client.get, "/v1/jobs") for _ in range(FINDS)]
        until(lambda: brake.began, 30.0, "a find is under way")

        # The reader stands still, and yet whoever comes in is known at once.
        assert stage.get("/v1/workers/self", worker, timeout=20.0).status_code == 200
        assert stage.get("/v1/workers/self", "tsk_w_wrong", timeout=20.0).status_code == 401
        assert brake.began == [f"find token:{greedy_id}"]

        asked = pool.submit(stage.get, f"/v1/jobs/{job_id}", other)
        until(lambda: stage.server._readers._threads[0].asked == 2, 30.0, "the other token's read is next")
        brake.let_go.set()

        assert asked.result(30.0).status_code == 200
        assert brake.began.index(f"get token:{other_id}") == 1
        assert {answer.result(20.0).status_code for answer in finds} == {200}


def test_finds_of_two_tokens_take_turns(stage: Stage, brake: Brake) -> None:
    greedy_id, greedy = stage.create_named_token("client")
    other_id, other = stage.create_named_token("client")
    with futures.ThreadPoolExecutor(FINDS) as pool:
        finds = [pool.submit(stage.get, "/v1/jobs", greedy) for _ in range(10)]
        until(lambda: brake.began, 30.0, "a find is under way")
        finds.append(pool.submit(stage.get, "/v1/jobs", other))
        until(lambda: stage.server._readers._threads[0].asked == 2, 30.0, "the other token's find is next")
        brake.let_go.set()
        futures.wait(finds, 20.0)

    assert brake.began[:2] == [f"find token:{greedy_id}", f"find token:{other_id}"]
    assert brake.began.count(f"find token:{greedy_id}") == 10


def test_a_token_has_one_find_at_a_time_over_all_its_connections(stage: Stage, brake: Brake) -> None:
    greedy_id, greedy = stage.create_named_token("client")
    other_id, other = stage.create_named_token("client")
    job_id = stage.post("/v1/jobs", {"exec": "x"}, other).json()["job_id"]

    async def find() -> FakeConnection:
        link = FakeConnection()
        conn = stage.server.opened(link)
        stage.server.received(conn, HelloClient(msg_id=1, client_id="greedy", token=greedy))
        await link.wait_for(Welcome)
        stage.server.received(conn, Request(2, "find", {}))
        return link

    links = [stage.run(find()) for _ in range(10)]
    until(lambda: brake.began, 30.0, "a find is under way")
    with futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(stage.get, f"/v1/jobs/{job_id}", other)
        until(lambda: stage.server._readers._threads[0].asked == 2, 30.0, "the other token's read is next")
        brake.let_go.set()
        assert asked.result(30.0).status_code == 200

    for link in links:
        stage.run(link.wait_for(Reply))
    assert brake.began[:2] == [f"find token:{greedy_id}", f"get token:{other_id}"]
    assert len(brake.began) == 11
