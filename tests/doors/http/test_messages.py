"""/v1/messages: messages are published as JSON and read as server-sent events; what may not be is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import httpx
import pytest
from starlette.types import Message

from tasuki import Client
from tasuki.core.protocol import DeliverMessages, PublishedMessage
from tasuki.doors.http.exchange import StreamedResponse
from tasuki.doors.http.messages import EVENTS_TYPE
from tests.doors.http.stage import Stage
from tests.support.waiting import until


class Events:
    """The events of one stream, as they come."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()
        assert next(self._lines) == ": subscribed"  # from here on nothing is missed

    def __next__(self) -> tuple[str, Any]:
        while not (line := next(self._lines)).startswith("event: "):
            assert not line or line.startswith(":")
        data = next(self._lines)
        return line.removeprefix("event: "), json.loads(data.removeprefix("data: "))


@contextmanager
def events(stage: Stage, token: str, *patterns: str, **query: str) -> Iterator[Events]:
    headers = {"Authorization": f"Bearer {token}"}
    params: list[tuple[str, str | int | float | bool | None]] = [("pattern", one) for one in patterns]
    with httpx.stream("GET", f"{stage.url}/v1/messages", params=[*params, *query.items()], headers=headers, timeout=20) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith(EVENTS_TYPE)
        assert answer.headers["cache-control"] == "no-store"
        yield Events(answer)


def test_what_is_published_over_http_is_read_as_events_once_whatever_matches(stage: Stage) -> None:
    with events(stage, stage.client, "http.>", "http.a") as read, events(stage, stage.admin, "http.*", queue="g") as member:
        text = {"subject": "http.a", "payload": "1\n2", "headers": {"source": "ecb"}, "reply_to": "x"}
        assert stage.post("/v1/messages", text, stage.client).json() == {"subject": "http.a"}
        stage.post("/v1/messages", {"subject": "http.b.c", "payload_base64": "/w=="}, stage.client)
        stage.post("/v1/messages", {"subject": "http.b"}, stage.client)

        assert next(read) == ("message", {**text, "queue": ""})
        rest = {"headers": {}, "reply_to": "", "queue": ""}
        assert next(read) == ("message", {"subject": "http.b.c", "payload_base64": "/w==", **rest})
        assert next(read) == ("message", {"subject": "http.b", "payload": "", **rest})
        assert [next(member)[1]["subject"] for _ in range(2)] == ["http.a", "http.b"]


def test_a_reader_is_told_what_it_lost_and_its_subscription_ends_with_it(stage: Stage) -> None:
    routes = stage.server.broker.messages
    with events(stage, stage.client, "slow.>") as read:
        [conn] = routes.find("slow.x").places
        told = DeliverMessages([PublishedMessage("slow.x", b"1")], dropped=3)
        stage.server._loop.call_soon_threadsafe(stage.server._links[conn].deliver, told)
        assert [next(read)[0], next(read)] == ["message", ("dropped", {"dropped": 3})]
    until(lambda: not routes.find("slow.x"), what="the stream's connection ends")


@pytest.mark.parametrize(("stops_at", "ended"), [("http.response.start", ["stack"]), ("http.response.body", ["pieces", "stack"])])
def test_what_a_stream_needs_ends_with_its_reader_also_before_the_first_piece(stops_at: str, ended: list[str]) -> None:
    async def left_early() -> list[str]:
        ends: list[str] = []

        async def pieces() -> AsyncGenerator[bytes, None]:
            try:
                yield b"one"
                yield b"two"
            finally:
                ends.append("pieces")

        async def receive() -> Message:
            await stopped.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == stops_at:
                stopped.set()
                await asyncio.Event().wait()  # the peer reads no more

        stopped, stack = asyncio.Event(), AsyncExitStack()
        stack.callback(ends.append, "stack")
        answer = StreamedResponse(pieces(), stack, 200, {}, EVENTS_TYPE)
        await answer({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
        return ends

    assert asyncio.run(left_early()) == ended


@pytest.mark.parametrize(
    ("query", "status"),
    [({}, 400), ({"pattern": "a..b"}, 400), ({"pattern": "_INBOX.>"}, 400), ({"pattern": "a", "queue": "x" * 65}, 400)],
    ids=str,
)
def test_a_subscription_that_makes_no_sense_is_400(stage: Stage, query: dict[str, str], status: int) -> None:
    assert stage.get("/v1/messages", stage.client, params=query).status_code == status


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"subject": "a.*"}, 400),
        ({"subject": "a", "payload": "x", "payload_base64": "eA=="}, 400),
        ({"subject": "a", "payload": 5}, 400),
        ({"subject": "a", "payload": "x" * (1024 * 1024 + 1)}, 413),
        ({"subject": "a", "headers": {"h": "x" * 16_384}}, 413),
        ({}, 400),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_message_that_cannot_be_published_is_refused(stage: Stage, body: dict[str, Any], status: int) -> None:
    assert stage.post("/v1/messages", body, stage.client).status_code == status


def test_a_token_without_the_scope_neither_publishes_nor_reads(stage: Stage) -> None:
    token = stage.create_token("client", scope=["publish:a.>", "subscribe:b.>"])
    answers = [
        stage.post("/v1/messages", {"subject": "a.x"}, token),
        stage.post("/v1/messages", {"subject": "b.x"}, token),
        stage.get("/v1/messages", token, params={"pattern": "a.x"}),
        stage.get("/v1/messages", stage.register().token, params={"pattern": "a.x"}),
    ]
    assert [answer.status_code for answer in answers] == [200, 403, 403, 403]


def test_a_client_over_http_publishes_and_subscribes_and_its_streams_end_with_it(stage: Stage) -> None:
    routes = stage.server.broker.messages
    with Client(stage.url, token=stage.client) as client, events(stage, stage.client, "lib.>") as read:
        with client.subscribe("lib.>") as messages, client.subscribe("lib.a", queue="g") as member:
            assert len(routes.find("lib.a").places) == 2
            for number in range(3):
                client.publish("lib.a", b"%d" % number, headers={"n": str(number)})

            assert [next(read)[1]["headers"] for _ in range(3)] == [{"n": str(number)} for number in range(3)]
            assert [next(messages).payload for _ in range(3)] == [next(member).payload for _ in range(3)] == [b"0", b"1", b"2"]
            [conn] = routes.find("lib.a").queues["g"]
            told = DeliverMessages([PublishedMessage("lib.a", b"3")], queue="g", dropped=4)
            stage.server._loop.call_soon_threadsafe(stage.server._links[conn].deliver, told)
            assert next(member).payload == b"3"
            until(lambda: (messages.dropped, member.dropped) == (0, 4), what="the member knows what it lost")
        until(lambda: len(routes.find("lib.a").places) == 1 and not routes.find("lib.a").queues, what="its streams end")
