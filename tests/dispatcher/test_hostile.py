"""Requests that are malformed, oversized, half-sent, duplicated or unauthorised. Answered with 4xx; nothing is passed on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tasuki.agent import upload
from tests.agent.stage import BOUNDARY, code_of, form, head, part
from tests.client.agent_stand_in import Asked, Reply, StandIn, refusal
from tests.dispatcher.stage import BOOK, DispatcherStage, dispatching, hash_of, job, tell, two_nodes
from tests.support.foreign_sites import FOREIGN, OWN
from tests.support.waiting import until_async

GOOD = form(part("file", BOOK, "book.csv"))


async def raw(stage: DispatcherStage, data: bytes) -> tuple[int, str]:
    """(status, code) of the answer to these bytes, after which nothing more is sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.port)
    writer.write(data)
    headers = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in headers.lower().split(b"\r\n") if line.startswith(b"content-length"))
    error: dict[str, Any] = json.loads(await reader.readexactly(length))["error"]
    writer.close()
    return int(headers.split()[1]), error["code"]


MALFORMED = {
    "no multipart": b"POST /run/a HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 1\r\n\r\nx",
    "no boundary": b"POST /run/a HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data\r\nContent-Length: 1\r\n\r\nx",
    "another boundary": head("a", len(GOOD), boundary="other") + GOOD,
    "no file": head("a", len(form())) + form(),
    "a name that leads elsewhere": head("a", len(bad := form(part("file", BOOK, "../../etc/passwd")))) + bad,
    "two files of one name": head("a", len(twice := form(part("file", b"1", "a"), part("file", b"2", "a")))) + twice,
    "an input that is none": head("a", len(none := form(part("input", b"../x:name")))) + none,
    "an id that is none": head("..%2fa", len(GOOD)) + GOOD,
    "an unknown field": head("a", len(odd := form(part("file", BOOK, "a"), part("shell", b"sh")))) + odd,
    "something behind the form": head("a", len(GOOD) + 1) + GOOD + b"x",
    "an input hash that is none": b"POST /run/a?input=abc" + head("a", len(GOOD))[len("POST /run/a") :] + GOOD,
    "no HTTP": b"\x16\x03\x01 nothing\r\n\r\n",
}


def test_what_is_malformed_is_refused_and_nothing_is_passed_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_nodes(inputs=str(tmp_path / "inputs")) as (one, two, stage):
            for what, data in MALFORMED.items():
                assert await raw(stage, data) in [(400, "INVALID_PAYLOAD"), (404, "NOT_FOUND")], what
            assert not any(asked.startswith("POST") for asked in [*one.asked, *two.asked])
            assert [path.name for path in tmp_path.iterdir()] == ["inputs"]

    tell(story())


def test_a_web_page_of_another_site_is_refused_and_nothing_is_passed_on() -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            for headers in FOREIGN:
                answer = await stage.http.post("/run/a", files=[("file", ("book.csv", BOOK))], headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "FORBIDDEN"), headers
            for headers in OWN:
                assert (await stage.http.get("/nodes", headers=headers)).status_code == 200, headers
            assert not any(asked.startswith("POST") for asked in [*one.asked, *two.asked])

    tell(story())


def test_each_refusal_is_one_line_with_its_peer_and_without_a_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tasuki.dispatcher")
    config = {"inputs": str(tmp_path), "max_upload_bytes": 1000, "tokens": ("the-right-token",)}
    bearer = "Authorization: Bearer the-right-token\r\n"

    async def story() -> None:
        async with two_nodes(**config) as (_, _, stage):
            await stage.http.post("/run/a", headers={"Authorization": "Bearer a-wrong-token"})
            await stage.http.get("/jobs/b", headers={"Host": "evil.example"})
            await stage.http.get("/jobs/unknown")  # an answer, and no refusal
            await stage.post("c", b"x" * 2000)
            await stage.http.post("/run/d", content=b"no form")
            _, writer = await asyncio.open_connection("127.0.0.1", stage.port)
            writer.write(head("e", 500, more=bearer) + part("file", b"cut", "book.csv"))
            writer.close()
            await until_async(lambda: "job e" in caplog.text, what="the cut upload is logged")
            stage.dispatcher.draining = True
            await stage.post("f")

    tell(story())
    lines = [line.__dict__ for line in caplog.records if line.message.startswith("refused ")]
    assert [(line["code"], line["job_id"]) for line in lines] == [
        ("UNAUTHORIZED", "a"),
        ("FORBIDDEN", "b"),
        ("TOO_LARGE", "c"),
        ("INVALID", "d"),
        ("INVALID", "e"),
        ("DRAINING", "f"),
    ]
    assert all(line["levelname"] == "INFO" and line["peer"].startswith("127.0.0.1:") for line in lines)
    assert "a-wrong-token" not in caplog.text


def test_an_upload_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_nodes(inputs=str(tmp_path), max_upload_bytes=1000) as (one, _, stage):
            assert await raw(stage, head("a", 100 * 1024**3) + GOOD) == (413, "TOO_LARGE")
            assert await raw(stage, head("a", 10**30) + GOOD) in [(413, "TOO_LARGE"), (400, "INVALID_PAYLOAD")]
            chunk = b"%x\r\n" % len(GOOD) + GOOD[:-40] + bytes(2000)
            assert await raw(stage, head("a", None) + chunk) in [(413, "TOO_LARGE"), (400, "INVALID_PAYLOAD")]
            assert not one.posts

    tell(story())


def test_a_done_id_is_answered_however_large_the_upload_would_be(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_nodes(inputs=str(tmp_path), max_upload_bytes=10) as (one, _, stage):
            one.job = job("done")

            answer = await stage.post("a", query=f"?input={hash_of()}")

            assert (answer.status_code, answer.headers["tasuki-cache"]) == (200, "hit")

    tell(story())


@pytest.mark.parametrize("stored", [True, False])
def test_a_half_sent_upload_becomes_no_job(tmp_path: Path, stored: bool) -> None:
    async def story() -> None:
        async with StandIn() as node, dispatching(node, inputs=str(tmp_path) if stored else None) as stage:
            over = asyncio.Event()

            async def read_all(asked: Asked) -> Reply:
                try:
                    node.posts.append(await asked.body())
                finally:
                    over.set()
                return None

            node.on_post = read_all
            _, writer = await asyncio.open_connection("127.0.0.1", stage.port)
            writer.write(head("a", len(GOOD)) + GOOD[:-20])
            await writer.drain()
            if not stored:
                await node.until(lambda: "POST /run/a" in node.asked)
            writer.close()

            if not stored:
                await over.wait()
            await stage.dispatcher.drain()  # until nothing is under way
            assert not node.posts

    tell(story())


def test_an_upload_that_does_not_go_on_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PATIENCE_S", 0.1)

    async def story() -> None:
        async with two_nodes(inputs=str(tmp_path)) as (one, _, stage):
            assert await raw(stage, head("a", len(GOOD)) + GOOD[:-20]) == (400, "INVALID_PAYLOAD")
            put = f"PUT /inputs/{'ab' * 32} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nsome of it"
            assert await raw(stage, put.encode()) == (400, "INVALID_PAYLOAD")
            assert not one.posts

    tell(story())


def test_who_has_no_token_learns_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with StandIn() as node, dispatching(node, tokens=("secret", "other")) as stage:
            node.job = job("done")
            for given in ("", "Bearer wrong", "Basic c2VjcmV0", "Bearer secret secret"):
                stage.http.headers["Authorization"] = given
                assert code_of(await stage.post("a")) == (401, "UNAUTHORIZED"), given
                for path in ("/result/a", "/jobs/a", "/capacity", "/nodes", "/metrics"):
                    assert code_of(await stage.http.get(path)) == (401, "UNAUTHORIZED"), (given, path)
                assert code_of(await stage.http.delete("/jobs/a")) == (401, "UNAUTHORIZED")
            twice = "Authorization: Bearer secret\r\nAuthorization: Bearer secret\r\n"
            assert await raw(stage, head("a", len(GOOD), more=twice) + GOOD) == (401, "UNAUTHORIZED")
            stage.http.headers["Authorization"] = "Bearer other"
            assert (await stage.http.get("/jobs/a")).status_code == 200

    tell(story())


def test_the_clients_token_is_not_shown_to_the_nodes() -> None:
    async def story() -> None:
        async with StandIn() as node, dispatching(node, tokens=("from-outside",), agent_token="for-agents") as stage:
            seen: list[str] = []

            async def take(asked: Asked) -> Reply:
                seen.append(asked.headers.get("authorization", ""))
                return await node.take(asked)

            node.on_post = take
            await stage.post("a")

            assert seen == ["Bearer for-agents"]

    tell(story())


def test_an_id_that_comes_twice_at_once_goes_to_one_node() -> None:
    async def story() -> None:
        async with two_nodes() as (one, two, stage):
            go = asyncio.Event()

            async def hold(asked: Asked) -> Reply:
                if one.posts:
                    return refusal(423, "RUNNING")
                reply = await one.take(asked)
                await go.wait()
                return reply

            one.on_post = hold  # it does not yet tell others that it has the job
            asking = [asyncio.create_task(stage.post("a")) for _ in range(3)]
            await one.until(lambda: one.asked.count("POST /run/a") == 3)
            go.set()

            assert sorted([(await answer).status_code for answer in asking]) == [200, 423, 423]
            assert not two.posts

    tell(story())


def test_what_there_is_not_is_said_in_the_usual_words() -> None:
    async def story() -> None:
        async with two_nodes() as (_, _, stage):
            assert code_of(await stage.http.get("/nothing")) == (404, "NOT_FOUND")
            assert code_of(await stage.http.put("/run/a", content=b"")) == (405, "METHOD_NOT_ALLOWED")
            assert BOUNDARY not in (await stage.http.get("/nodes")).text

    tell(story())
