"""A link over HTTP, against servers that answer oddly: what its owner hears, what is asked again, and how it ends."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tasuki.core.address import Address
from tasuki.core.job import JobSpec, Outcome, State
from tasuki.core.protocol import (
    Accepted,
    CancelJobs,
    ErrorMessage,
    Heartbeat,
    HeartbeatAnswer,
    HelloClient,
    JobResult,
    PublishedMessage,
    Reply,
    Request,
    Results,
    SubmitJobs,
    Welcome,
)
from tasuki.errors import InvalidInput
from tasuki.net.http import client_link, event_streams
from tasuki.net.http.client_link import REQUESTS_AT_ONCE, HttpClientLink
from tasuki.net.messages import StreamedMessages
from tests.conftest import Require
from tests.net.odd_server import Asked, OddServer, envelope, frames, http, welcome
from tests.net.owners import LinkOwner

DEADLINE_S = 25.0
HELLO = HelloClient(msg_id=1, client_id="me", token="tsk_c_secret", version=2)


class Owner(LinkOwner):
    """Owner of a client's link."""

    kind = HttpClientLink

    async def greet(self) -> Owner:
        self.link.say(HELLO)
        assert isinstance(await self.next(), Welcome)
        return self


def run(answer: Any, test: Callable[[OddServer, Owner], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), OddServer(answer) as server:
            owner = Owner(server.address, **options)
            try:
                await test(server, owner)
            finally:
                await owner.leave()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [task for task in others if "tasuki/net" in repr(task)], "the link has left something behind"

    asyncio.run(main())


def greeted(answer: Callable[[Asked], Any]) -> Callable[[Asked], Any]:
    """A server that welcomes, and then answers so."""

    def both(asked: Asked) -> Any:
        return welcome(asked) if asked.body and isinstance(asked.first, HelloClient) else answer(asked)

    return both


def ended(job_id: str) -> JobResult:
    return JobResult(job_id, State.SUCCEEDED, 1, Outcome(result=b"done"))


def submit(msg_id: int, *job_ids: str) -> SubmitJobs:
    return SubmitJobs(msg_id, [JobSpec(job_id=job_id, subject="a.b") for job_id in job_ids])


# ---------------------------------------------------------------------------------------------------- requests


def test_the_token_travels_in_a_header_and_not_in_the_hello() -> None:
    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        asked = server.asked[0]
        assert (asked.method, asked.target) == ("POST", "/v1/frames")
        assert asked.headers["authorization"] == "Bearer tsk_c_secret"
        assert b"tsk_c_secret" not in asked.body

    run(welcome, test)


def test_a_path_in_the_address_comes_before_ours() -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), OddServer(welcome) as server:
            owner = Owner(Address("http", "127.0.0.1", server.address.port, "/team/tasuki"))
            await owner.greet()
            await owner.leave()
            assert server.asked[0].target == "/team/tasuki/v1/frames"

    asyncio.run(main())


def test_what_is_said_in_one_turn_of_the_loop_leaves_in_one_request_and_each_has_its_answer() -> None:
    def answer(asked: Asked) -> bytes:
        return frames(*(Reply(message.msg_id, "yes") for message in reversed(asked.messages)))  # type: ignore[union-attr]

    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        owner.link.send_together([Request(2, "counts"), CancelJobs(3, ["a"])])
        owner.link.say(Request(4, "workers"))
        assert {(await owner.next()).corr_id for _ in range(3)} == {2, 3, 4}  # type: ignore[union-attr]
        assert len(server.asked) == 2

    run(greeted(answer), test)


def test_no_more_requests_than_the_bound_are_under_way_and_the_rest_goes_together() -> None:
    gate = []

    async def late(asked: Asked) -> bytes:
        await gate[0].wait()
        return frames(*(Reply(message.msg_id) for message in asked.messages))  # type: ignore[union-attr]

    async def test(server: OddServer, owner: Owner) -> None:
        gate.append(asyncio.Event())
        await owner.greet()
        for msg_id in range(2, 2 + REQUESTS_AT_ONCE):
            owner.link.say(Request(msg_id, "counts"))
            await server.hears(msg_id)
        for msg_id in range(100, 120):
            owner.link.say(Request(msg_id, "counts"))
            await asyncio.sleep(0)
        gate[0].set()
        for _ in range(REQUESTS_AT_ONCE + 20):
            assert isinstance(await owner.next(), Reply)
        assert len(server.asked) == 1 + REQUESTS_AT_ONCE + 1

    run(greeted(late), test)


STREAM = b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
NEWS = b': subscribed\n\nevent: message\ndata: {"subject":"a.x","payload":"1","headers":{},"reply_to":"","queue":""}\n\n:\n\n'


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(text), text)


def subscribed(pattern: str) -> Request:
    return Request(2, "subscribe", {"pattern": pattern, "queue": ""})


def test_a_stream_that_is_cut_off_is_opened_again_and_ends_with_its_subscription(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_streams, "POLL_WAIT_MIN_S", 0.0)  # after which a cut is a proxy's

    def answer(asked: Asked) -> bytes:
        return STREAM + chunk(NEWS) + (b"0\r\n\r\n" if len(server_asked) < 3 else b"")

    async def test(server: OddServer, owner: Owner) -> None:
        nonlocal server_asked
        server_asked = server.asked
        await owner.greet()
        owner.link.say(subscribed("a.*"))
        assert await owner.next() == Reply(2)
        news = StreamedMessages([PublishedMessage("a.x", b"1")], pattern="a.*")
        assert [await owner.next() for _ in range(2)] == [news, news]  # and no second Reply
        assert [asked.target for asked in server.asked[1:]] == ["/v1/messages?pattern=a.%2A&queue="] * 2
        owner.link.say(Request(3, "unsubscribe", {"pattern": "a.*", "queue": ""}))
        assert await owner.next() == Reply(3)
        assert not owner.link._streams

    server_asked: list[Asked] = []
    run(greeted(answer), test)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        STREAM + b"0\r\n\r\n",
        STREAM + chunk(NEWS) + b"0\r\n\r\n",  # it was cut off at once
        STREAM + chunk(b": subscribed\n\nevent: message\ndata: {\n\n"),
        STREAM + chunk(b": subscribed\n\nevent: message\ndata: " + bytes(8 * 1024 * 1024)),
        envelope(503, "UNAVAILABLE"),
        envelope(401, "UNAUTHORIZED"),
        http(404),
    ],
    ids=["hung up", "empty", "cut off", "no JSON", "endless", "going down", "token revoked", "no such path"],
)
def test_a_stream_that_cannot_be_had_ends_the_link(answer: bytes) -> None:
    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        owner.link.say(subscribed("a.*"))
        assert await owner.closed

    run(greeted(lambda asked: answer), test)


def test_a_subscription_that_is_refused_is_an_error_of_its_own() -> None:
    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        owner.link.say(subscribed("a.*"))
        refusal = await owner.next()
        assert isinstance(refusal, ErrorMessage)
        assert (refusal.corr_id, refusal.code) == (2, "FORBIDDEN")
        assert not owner.link.closed

    run(greeted(lambda asked: envelope(403, "FORBIDDEN")), test)


def test_a_link_with_a_stream_asks_the_server_whether_it_is_there() -> None:
    def answer(asked: Asked) -> bytes:
        return frames(HeartbeatAnswer(3)) if asked.body else STREAM + chunk(NEWS)

    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        owner.link.say(subscribed("a.*"))
        assert await owner.next() == Reply(2)
        await owner.next()
        owner.link.say(Heartbeat(3))
        assert await owner.next() == HeartbeatAnswer(3)
        assert len(server.asked) == 3

    run(greeted(answer), test)


def test_a_question_that_waits_keeps_no_other_waiting() -> None:
    async def logs_never(asked: Asked) -> bytes:
        if isinstance(asked.first, Request) and asked.first.verb == "logs":
            await asyncio.Event().wait()
        return frames(*(Reply(message.msg_id) for message in asked.messages))  # type: ignore[union-attr]

    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        owner.link.say(Request(2, "logs", {"job_id": "a", "wait_s": 25.0}))
        owner.link.say(Request(3, "counts"))
        assert await owner.next() == Reply(3)

    run(greeted(logs_never), test)


def test_an_idle_link_asks_nothing_to_answer_a_heartbeat_and_one_that_waits_does() -> None:
    async def only_beats(asked: Asked) -> bytes:
        if not isinstance(asked.first, Heartbeat):
            await asyncio.Event().wait()
        return frames(HeartbeatAnswer(asked.first.msg_id))  # type: ignore[union-attr]

    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        owner.link.say(Heartbeat(2))
        assert await owner.next() == HeartbeatAnswer(2)
        assert len(server.asked) == 1
        owner.link.say(Request(3, "counts"))
        await server.hears(2)
        owner.link.say(Heartbeat(4))
        assert await owner.next() == HeartbeatAnswer(4)
        assert len(server.asked) == 3

    run(greeted(only_beats), test)


def test_what_the_server_left_without_an_answer_is_not_waited_for() -> None:
    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        owner.link.say(Request(2, "counts"))
        error = await owner.next()
        assert isinstance(error, ErrorMessage)
        assert (error.corr_id, error.code) == (2, "UNAVAILABLE")
        assert not owner.link.closed

    run(greeted(lambda asked: frames()), test)


# ---------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (http(301, headers={"Location": "https://new.example/tasuki"}), "redirects to https://new.example/tasuki"),
        (http(404, b"<h1>no</h1>"), "answered 404: is this a tasuki server with --http?"),
        (envelope(404, "NOT_FOUND"), "older than this client"),
        (envelope(405, "METHOD_NOT_ALLOWED"), "older than this client"),
        (http(407, b"who?"), "HTTP_PROXY"),
        (http(403, b"<h1>blocked</h1>"), "a proxy or a firewall"),
        (http(502, b"<h1>bad gateway</h1>"), "answered 502"),
        (http(200, b"<h1>log in</h1>"), "is this a tasuki server with --http?"),
        (http(200, b"\xff" * 100, kind="application/vnd.tasuki.frames"), "announces"),
        (http(200, b"\x20\x00\x00\x00\x06\x00\x05\x00half", kind="application/vnd.tasuki.frames"), "middle of a frame"),
        (envelope(503, "UNAVAILABLE", "the store is away"), "the store is away"),
        (envelope(500, "INTERNAL", "a defect"), "a defect"),
        (b"220 mail.example ESMTP\r\n\r\n", "without an answer in HTTP"),
        (b"", "or with TLS https://"),
        (
            http(200, b"half", {"Content-Length": "50", "Connection": "close"}, "application/vnd.tasuki.frames"),
            "peer closed connection",
        ),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_a_hello_that_comes_to_nothing_ends_the_link_with_the_reason(answer: bytes, words: str) -> None:
    async def test(server: OddServer, owner: Owner) -> None:
        owner.link.say(HELLO)
        assert words in await owner.closed

    run(answer, test)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (envelope(401, "UNAUTHORIZED"), "UNAUTHORIZED"),
        (envelope(403, "TOKEN_REVOKED"), "UNAUTHORIZED"),
        (envelope(403, "FORBIDDEN"), "FORBIDDEN"),
        (envelope(400, "INVALID_PAYLOAD"), "INVALID"),
        (frames(ErrorMessage(0, "VERSION", "too old")), "VERSION"),
    ],
)
def test_a_hello_that_will_never_be_taken_is_told_as_over_tcp(answer: bytes, code: str) -> None:
    async def test(server: OddServer, owner: Owner) -> None:
        owner.link.say(HELLO)
        error = await owner.next()
        assert isinstance(error, ErrorMessage)
        assert (error.corr_id, error.code) == (0, code)
        assert error.message in await owner.closed

    run(answer, test)


def test_without_a_token_the_way_to_give_one_is_told() -> None:
    async def test(server: OddServer, owner: Owner) -> None:
        owner.link.say(HelloClient(msg_id=1, client_id="me"))
        error = await owner.next()
        assert isinstance(error, ErrorMessage)
        assert "--token-file" in error.message
        assert "authorization" not in server.asked[0].headers

    run(envelope(401, "UNAUTHORIZED"), test)


@pytest.mark.parametrize("token", ["a\r\nX: y", "über", "\udcff", "x" * 600])
def test_what_cannot_be_a_token_is_not_sent(token: str) -> None:
    async def test(server: OddServer, owner: Owner) -> None:
        with pytest.raises(InvalidInput, match="token"):
            owner.link.say(HelloClient(msg_id=1, client_id="me", token=token))
        assert server.asked == []

    run(welcome, test)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (envelope(503, "OVERLOADED"), "OVERLOADED"),
        (envelope(503, "UNAVAILABLE"), "UNAVAILABLE"),
        (envelope(429, "TOO_MANY_REQUESTS"), "OVERLOADED"),
        (envelope(500, "INTERNAL"), "INTERNAL"),
        (envelope(413, "TOO_LARGE"), "TOO_LARGE"),
        (http(413, b"<h1>too large</h1>"), "TOO_LARGE"),
    ],
)
def test_a_request_that_is_refused_is_an_error_to_what_it_said_and_the_link_goes_on(answer: bytes, code: str) -> None:
    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        owner.link.say(Request(2, "counts"))
        error = await owner.next()
        assert isinstance(error, ErrorMessage)
        assert (error.corr_id, error.code) == (2, code)
        assert not owner.link.closed

    run(greeted(lambda asked: answer), test)


def test_a_server_that_asks_for_a_pause_gets_it() -> None:
    def once(asked: Asked) -> bytes:
        if isinstance(asked.first, Request) and asked.first.msg_id == 2:
            return envelope(503, "OVERLOADED", Retry_After="1")
        return frames(Reply(3))

    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        owner.link.say(Request(2, "counts"))
        await owner.next()
        owner.link.say(Request(3, "counts"))
        assert await owner.next() == Reply(3)
        assert server.asked[2].at - server.asked[1].at > 0.9

    run(greeted(once), test)


def test_what_is_too_much_together_for_something_on_the_way_is_sent_apart() -> None:
    def small_only(asked: Asked) -> bytes:
        if len(asked.body) > 40_000:
            return http(413, b"<h1>too large</h1>")
        return frames(*(Accepted(message.msg_id, 1) for message in asked.messages))  # type: ignore[union-attr]

    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        for msg_id in range(2, 10):
            owner.link.say(SubmitJobs(msg_id, [JobSpec(job_id=f"j-{msg_id}", subject="a.b", payload=bytes(15_000))], watch=False))
        answers = [await owner.next() for _ in range(8)]
        assert {message.corr_id for message in answers if isinstance(message, Accepted)} == set(range(2, 10))

    run(greeted(small_only), test)


@pytest.mark.parametrize(
    "answer", [b"", http(502, b"bad gateway"), b"HTTP/1.1 200 X\r\nContent-Length: 9\r\nConnection: close\r\n\r\n"]
)
def test_an_answer_that_does_not_come_ends_the_link_as_a_lost_connection_does(answer: bytes) -> None:
    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        owner.link.say(submit(2, "a"))
        assert await owner.closed
        assert owner.heard.empty()
        owner.link.say(submit(3, "a"))
        assert len(server.asked) == 2

    run(greeted(lambda asked: answer), test)


def test_what_is_bad_is_refused_by_itself_and_not_with_what_was_said_beside_it() -> None:
    def answer(asked: Asked) -> bytes:
        if any(isinstance(message, Request) and message.verb == "bad" for message in asked.messages):
            return envelope(400, "INVALID_PAYLOAD", "a verb that is bad")
        return frames(*(Accepted(message.msg_id, 1) for message in asked.messages))  # type: ignore[union-attr]

    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        owner.link.send_together([submit(2), Request(3, "bad"), submit(4)])
        answers = [await owner.next() for _ in range(3)]
        assert [type(message) for message in answers] == [Accepted, ErrorMessage, Accepted]

    run(greeted(answer), test)


def test_nobody_there_is_told_in_the_words_of_the_system() -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            async with OddServer(welcome) as server:
                address = server.address
            owner = Owner(address)
            owner.link.say(HELLO)
            assert await owner.closed == f"no connection to {address}: Connection refused"
            await owner.leave()

    asyncio.run(main())


# ---------------------------------------------------------------------------------------------------- the ends of jobs


def polls(server: OddServer) -> list[list[str]]:
    """The jobs that each long poll named."""
    named = [asked.messages for asked in server.asked if "wait=" in asked.target and "wait=0" not in asked.target]
    return [[job_id for watch in messages for job_id in watch.params["job_ids"]] for messages in named]  # type: ignore[union-attr]


def test_the_end_of_an_accepted_job_is_polled_for_and_told() -> None:
    def answer(asked: Asked) -> bytes:
        first = asked.first
        return frames(Accepted(first.msg_id, 2)) if isinstance(first, SubmitJobs) else frames(Results([ended("a"), ended("b")]))

    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        owner.link.say(submit(2, "a", "b"))
        assert isinstance(await owner.next(), Accepted)
        results = await owner.next()
        assert isinstance(results, Results)
        assert [item.job_id for item in results.items] == ["a", "b"]
        # and nothing is waited for any more
        assert not owner.link._polls._known
        assert polls(server) == [["a", "b"]]

    run(greeted(answer), test)


def test_a_poll_that_is_cut_is_asked_again_and_loses_nothing() -> None:
    cuts = [b"", http(504, b"<h1>gateway time-out</h1>"), frames(Results([ended("a")]))]

    def answer(asked: Asked) -> bytes:
        return frames(Accepted(2, 1)) if isinstance(asked.first, SubmitJobs) else cuts.pop(0)

    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        owner.link.say(submit(2, "a"))
        assert isinstance(await owner.next(), Accepted)
        assert isinstance(await owner.next(), Results)
        assert polls(server) == [["a"]] * 3

    run(greeted(answer), test)


def test_a_server_that_is_gone_while_only_a_poll_is_open_ends_the_link() -> None:
    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        owner.link.say(submit(2, "a"))
        assert "lost" in await owner.closed
        assert len(polls(server)) == client_link.CUTS_MAX + 1

    run(greeted(lambda asked: frames(Accepted(2, 1)) if isinstance(asked.first, SubmitJobs) else b""), test)


def test_polls_that_come_back_at_once_with_nothing_are_not_a_hot_loop() -> None:
    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        owner.link.say(submit(2, "a"))
        await server.hears(5)
        apart = [later.at - earlier.at for earlier, later in zip(server.asked[2:], server.asked[3:], strict=False)]
        assert apart[0] >= client_link.PAUSE_FIRST_S * 0.9
        assert apart[1] > apart[0]

    run(greeted(lambda asked: frames(Accepted(2, 1)) if isinstance(asked.first, SubmitJobs) else frames()), test)


def test_jobs_that_come_while_polls_are_open_go_into_others_and_in_time_into_few() -> None:
    async def answer(asked: Asked) -> bytes:
        if isinstance(asked.first, SubmitJobs):
            return frames(Accepted(asked.first.msg_id, 1))
        await asyncio.Event().wait()
        return b""

    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        for number in range(2, 9):
            owner.link.say(submit(number, f"job-{number}"))
            assert isinstance(await owner.next(), Accepted)
            await server.until(lambda: f"job-{number}" in {job_id for poll in polls(server) for job_id in poll})  # noqa: B023
        await server.until(lambda: len(polls(server)) - server.hung_up <= client_link.POLLS_MAX)
        assert server.hung_up > 0

    run(greeted(answer), test)


def test_jobs_asked_for_by_name_are_looked_at_before_they_are_waited_for() -> None:
    async def answer(asked: Asked) -> bytes:
        if "wait=0" not in asked.target:
            await asyncio.Event().wait()
        good, bad = asked.messages
        return frames(Reply(good.msg_id, {"states": {"a": "RUNNING"}}), ErrorMessage(bad.msg_id, "NOT_FOUND", "no b"))  # type: ignore[union-attr]

    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        owner.link.say(Request(2, "watch", {"job_ids": ["a"]}))
        owner.link.say(Request(3, "watch", {"job_ids": ["b"]}))
        assert await owner.next() == Reply(2, {"states": {"a": "RUNNING"}})
        assert isinstance(await owner.next(), ErrorMessage)
        await server.hears(3)
        assert polls(server) == [["a"]]

    run(greeted(answer), test)


def test_a_job_that_is_gone_ends_the_link_so_that_its_owner_asks_which() -> None:
    def answer(asked: Asked) -> bytes:
        if isinstance(asked.first, SubmitJobs):
            return frames(Accepted(2, 1))
        return frames(ErrorMessage(asked.first.msg_id, "NOT_FOUND", "there is no job a"))  # type: ignore[union-attr]

    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        owner.link.say(submit(2, "a"))
        assert "there is no job a" in await owner.closed

    run(greeted(answer), test)


def test_a_poll_names_a_bounded_number_of_jobs_and_all_have_their_turn() -> None:
    count = client_link.WINDOW_MAX + 500

    async def answer(asked: Asked) -> bytes:
        if isinstance(asked.first, SubmitJobs):
            return frames(*(Accepted(one.msg_id, len(one.specs)) for one in asked.messages))  # type: ignore[union-attr]
        named = [job_id for watch in asked.messages for job_id in watch.params["job_ids"]]  # type: ignore[union-attr]
        assert len(named) <= client_link.WINDOW_MAX
        results = [ended(job_id) for job_id in named]
        return frames(*(Results(results[begin : begin + 1000]) for begin in range(0, len(results), 1000)))

    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        for msg_id, begin in enumerate(range(0, count, 1000), 2):
            owner.link.say(submit(msg_id, *(f"j-{number}" for number in range(begin, min(begin + 1000, count)))))
        told: set[str] = set()
        while len(told) < count:
            message = await owner.next()
            told |= {item.job_id for item in message.items} if isinstance(message, Results) else set()

    run(greeted(answer), test)


def test_a_refused_job_and_one_that_nobody_waits_for_are_not_polled_for() -> None:
    from tasuki.core.protocol import Acceptance

    async def answer(asked: Asked) -> bytes:
        if isinstance(asked.first, SubmitJobs):
            return frames(Accepted(2, 3, [Acceptance(1, "b", code="INVALID", message="no")]))
        await asyncio.Event().wait()
        return b""

    async def test(server: OddServer, owner: Owner) -> None:
        await owner.greet()
        owner.link.say(submit(2, "a", "b", "c"))
        await owner.next()
        owner.link.forget(["c"])
        await server.hears(3)
        assert polls(server) == [["a"]]

    run(greeted(answer), test)


# ---------------------------------------------------------------------------------------------------- TLS, proxies


def certificate(folder: Path, name: str) -> tuple[str, str]:
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=server", "-addext", f"subjectAltName={name}", "-addext", "basicConstraints=critical,CA:TRUE",
         "-keyout", key, "-out", cert],
        check=True, capture_output=True, timeout=20,
    )  # fmt: skip
    return cert, key


@pytest.mark.parametrize(
    ("name", "trusts", "words"),
    [
        ("IP:127.0.0.1", True, ""),
        ("IP:127.0.0.1", False, "give the CA with --tls-ca"),
        ("DNS:other.example", True, "not for 127.0.0.1"),
    ],
)
def test_a_certificate_is_taken_or_refused_with_the_way_out(
    tmp_path: Path, require: Require, name: str, trusts: bool, words: str
) -> None:
    require("openssl", shutil.which("openssl") is not None, "certificates are made with it")
    cert, key = certificate(tmp_path, name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), OddServer(welcome, context) as server:
            owner = Owner(server.address, tls=ssl.create_default_context(cafile=cert) if trusts else None)
            owner.link.say(HELLO)
            if words:
                assert words in await owner.closed
            else:
                assert isinstance(await owner.next(), Welcome)
            await owner.leave()

    asyncio.run(main())


def test_tls_to_a_server_without_it_is_told() -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), OddServer(welcome) as server:
            owner = Owner(Address("https", "127.0.0.1", server.address.port))
            owner.link.say(HELLO)
            assert "is it http://?" in await owner.closed
            await owner.leave()

    asyncio.run(main())


@pytest.mark.parametrize("exempt", [False, True])
def test_the_proxy_of_the_environment_is_used_unless_the_host_is_exempt(monkeypatch: pytest.MonkeyPatch, exempt: bool) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), OddServer(welcome) as proxy, OddServer(welcome) as server:
            monkeypatch.setenv("HTTP_PROXY", str(proxy.address))
            monkeypatch.setenv("http_proxy", str(proxy.address))
            monkeypatch.setenv("NO_PROXY", "127.0.0.1" if exempt else "")
            monkeypatch.setenv("no_proxy", "127.0.0.1" if exempt else "")
            owner = Owner(server.address)
            await owner.greet()
            await owner.leave()
            assert [len(proxy.asked), len(server.asked)] == ([0, 1] if exempt else [1, 0])
            if not exempt:
                assert proxy.asked[0].target == f"{server.address}/v1/frames"

    asyncio.run(main())
