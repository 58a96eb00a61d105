"""A worker's link over HTTP, against servers and proxies that answer oddly: what is said twice, what is heard, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tasuki.core.job import BlobRef, Outcome
from tasuki.core.protocol import (
    FRAMES_TYPE,
    SESSION_HEADER,
    CancelLeases,
    Ending,
    ErrorMessage,
    GiveCredit,
    Heartbeat,
    HeartbeatAnswer,
    HelloWorker,
    JobsFinished,
    Message,
    Welcome,
)
from tasuki.errors import Unavailable
from tasuki.net.http import base_link, transport, worker_link
from tasuki.net.http.worker_link import POLL_WAIT_S, HttpWorkerLink
from tasuki.wire.messages import encode, encode_frame
from tests.net.odd_server import Asked, OddServer, envelope, frames, http
from tests.net.owners import LinkOwner
from tests.support.certificates import TestAuthority

DEADLINE_S = 25.0
HELLO = HelloWorker(msg_id=1, worker_id="w", incarnation="i", token="tsk_w_secret", version=2)
WELCOME = Welcome(corr_id=1, version=2, server_id="s", identity="me", kind="worker", lease_ttl_s=60.0)
PAGE = b"<html>not found</html>"
REF = BlobRef("0" * 64, 10)


def welcome(**headers: str) -> bytes:
    return http(200, encode(WELCOME), {SESSION_HEADER: "s1", **headers}, FRAMES_TYPE)


class Server:
    """Answers as a tasuki server does, unless something else is due: in `greeting`, `to_said`, `to_polls`."""

    def __init__(self) -> None:
        self.greeting: Any = welcome()
        self.to_said: deque[Any] = deque()
        self.to_polls: asyncio.Queue[Any] = asyncio.Queue()
        self.said: list[Asked] = []
        self.polls: list[Asked] = []
        self.others: list[Asked] = []

    def __call__(self, asked: Asked) -> Any:
        query = parse_qs(urlsplit(asked.target).query)
        if asked.target == "/v1/worker":
            return self.greeting
        if "said" in query:
            self.said.append(asked)
            return self.to_said.popleft() if self.to_said else frames()
        if "heard" in query:
            self.polls.append(asked)
            return self._next()
        self.others.append(asked)
        return self.other(asked)

    async def _next(self) -> bytes:
        answer = await self.to_polls.get()
        if isinstance(answer, bytes):
            return answer
        late: bytes = await answer
        return late

    def other(self, asked: Asked) -> Any:
        return http(200, b"{}", kind="application/json")

    def tell(self, *answers: bytes | Awaitable[bytes]) -> None:
        for answer in answers:
            self.to_polls.put_nowait(answer)

    @property
    def numbers(self) -> list[str]:
        return [numbers_of(asked)["said"] for asked in self.said]

    @property
    def heard(self) -> list[str]:
        return [numbers_of(asked)["heard"] for asked in self.polls]

    @property
    def words(self) -> list[Message]:
        return [message for asked in self.said for message in asked.messages]


def numbers_of(asked: Asked) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(asked.target).query).items()}


class Owner(LinkOwner):
    """Owner of a worker's link."""

    kind = HttpWorkerLink

    async def greet(self) -> None:
        self.link.say(HELLO)
        assert await self.next() == WELCOME


Test = Callable[[OddServer, Server, Owner], Awaitable[None]]


def run(test: Test, *, greeted: bool = True) -> None:
    async def main() -> None:
        script = Server()
        async with asyncio.timeout(DEADLINE_S), OddServer(script) as server:
            owner = Owner(server.address)
            try:
                if greeted:
                    await owner.greet()
                await test(server, script, owner)
            finally:
                await owner.leave()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [task for task in others if "tasuki/net" in repr(task)], "the link has left something behind"

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "PAUSE_FIRST_S", 0.001)
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "https_proxy", "http_proxy", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


# ---------------------------------------------------------------------------------------------------- the session


def test_the_token_travels_in_a_header_and_the_session_in_the_path() -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        owner.link.say(GiveCredit(1))
        await server.until(lambda: bool(script.said and script.polls))
        hello, *rest = server.asked
        assert b"tsk_w_secret" not in hello.body
        assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer tsk_w_secret"}
        assert {urlsplit(asked.target).path for asked in rest} == {"/v1/worker/s1"}
        assert numbers_of(script.polls[0]) == {"heard": "0", "wait": f"{POLL_WAIT_S:g}"}
        assert not script.polls[0].body

    run(test)


def test_a_cookie_of_a_load_balancer_is_shown_again() -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        script.greeting = welcome(**{"Set-Cookie": "route=b; Path=/"})
        await owner.greet()
        owner.link.say(GiveCredit(1))
        await server.until(lambda: bool(script.said and script.polls))
        assert {asked.headers.get("cookie") for asked in server.asked[1:]} == {"route=b"}

    run(test, greeted=False)


def test_what_is_said_before_the_welcome_waits_for_it() -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        owner.link.say(HELLO)
        owner.link.say(GiveCredit(1))
        await server.until(lambda: bool(script.said))
        assert script.words == [GiveCredit(1)]

    run(test, greeted=False)


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        (http(200, encode(WELCOME), kind=FRAMES_TYPE), "answered the Hello of a worker with no session"),
        (http(200, b"", {SESSION_HEADER: "s1"}, FRAMES_TYPE), "answered the Hello of a worker with no session"),
        (envelope(404, "NOT_FOUND"), "has no /v1/worker: its path is another one, or it is older than this worker"),
        (http(200, PAGE), "answered with 'text/html': is this a tasuki server"),
        (http(404, PAGE), "answered 404: is this a tasuki server"),
        (http(403, PAGE), "is there a proxy or a firewall before it?"),
        (http(302, PAGE, {"Location": "https://login.example/"}), "redirects to https://login.example/"),
        (http(502, PAGE), "what is before it may not reach it"),
        (b"", "hung up without an answer"),
    ],
)
def test_a_server_that_is_none_is_named_and_is_not_the_end_of_the_worker(greeting: bytes, words: str) -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        script.greeting = greeting
        owner.link.say(HELLO)
        assert words in await owner.closed
        assert owner.heard.empty()

    run(test, greeted=False)


def test_nobody_there_is_told_at_once() -> None:
    async def main() -> None:
        async with OddServer(b"") as gone:
            address = gone.address
        owner = Owner(address)
        owner.link.say(HELLO)
        assert "no connection to" in await asyncio.wait_for(owner.closed, DEADLINE_S)
        assert owner.heard.empty()
        await owner.link.wait_closed()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (envelope(401, "UNAUTHORIZED"), "UNAUTHORIZED"),
        (envelope(403, "TOKEN_REVOKED"), "UNAUTHORIZED"),
        (envelope(403, "FORBIDDEN"), "FORBIDDEN"),
        (frames(ErrorMessage(0, "INVALID", "so it is")), "INVALID"),
        (envelope(400, "INVALID_PAYLOAD"), "INVALID"),
    ],
)
def test_a_hello_that_is_refused_is_told_before_the_end(answer: bytes, code: str) -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        script.greeting = answer
        owner.link.say(HELLO)
        heard = await owner.next()
        assert isinstance(heard, ErrorMessage)
        assert (heard.corr_id, heard.code, heard.message) == (0, code, "so it is")
        assert await owner.closed == "so it is"

    run(test, greeted=False)


def test_a_token_that_no_header_can_carry_is_refused_before_it_is_sent() -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        owner.link.say(HelloWorker(msg_id=1, worker_id="w", incarnation="i", token="tsk\nw"))
        heard = await owner.next()
        assert isinstance(heard, ErrorMessage)
        assert heard.code == "INVALID"
        assert not server.asked

    run(test, greeted=False)


@pytest.mark.parametrize("where", ["said", "poll"])
@pytest.mark.parametrize(
    ("answer", "code"), [(envelope(401, "UNAUTHORIZED"), "UNAUTHORIZED"), (envelope(403, "TOKEN_REVOKED"), "UNAUTHORIZED")]
)
def test_a_token_that_has_ended_is_told_wherever_it_shows(where: str, answer: bytes, code: str) -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        if where == "said":
            script.to_said.append(answer)
            owner.link.say(GiveCredit(1))
        else:
            script.tell(answer)
        heard = await owner.next()
        assert isinstance(heard, ErrorMessage)
        assert (heard.corr_id, heard.code) == (0, code)
        assert await owner.closed == "so it is"

    run(test)


# ---------------------------------------------------------------------------------------------------- saying


def test_what_is_said_in_one_turn_leaves_together_and_the_rest_behind_it() -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        answered = asyncio.Event()
        script.to_said.append(after(answered, frames()))
        owner.link.send_together([Heartbeat(2), GiveCredit(1)])
        await server.until(lambda: bool(script.said))
        for number in range(3, 6):
            owner.link.say(Heartbeat(number))
            await asyncio.sleep(0)
        answered.set()
        await server.until(lambda: len(script.said) == 2)
        assert [asked.messages for asked in script.said] == [
            [Heartbeat(2), GiveCredit(1)],
            [Heartbeat(3), Heartbeat(4), Heartbeat(5)],
        ]
        assert script.numbers == ["1", "2"]

    run(test)


async def after(event: asyncio.Event, answer: bytes) -> bytes:
    await event.wait()
    return answer


@pytest.mark.parametrize("odd", [b"", http(502, PAGE), envelope(503, "UNAVAILABLE"), envelope(404, "NOT_FOUND")])
def test_what_was_not_answered_is_said_again_word_for_word_under_its_number(odd: bytes) -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        script.to_said.extend([odd, odd])
        owner.link.say(Heartbeat(2))
        await server.until(lambda: bool(script.said))
        owner.link.say(Heartbeat(3))  # must not join what may have been taken
        await server.until(lambda: len(script.said) == 4)
        assert [asked.messages for asked in script.said] == [[Heartbeat(2)]] * 3 + [[Heartbeat(3)]]
        assert script.numbers == ["1", "1", "1", "2"]
        assert not owner.closed.done()

    run(test)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (b"", "the connection to"),
        (http(502, PAGE), "answered 502"),
        (envelope(404, "NOT_FOUND"), "the server does not know this session any more"),
    ],
)
def test_after_some_tries_the_link_ends_and_the_worker_does_not(odd: bytes, words: str) -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        script.to_said.extend([odd] * 20)
        owner.link.say(Heartbeat(2))
        assert words in await owner.closed
        assert owner.heard.empty()
        assert script.numbers == ["1"] * (worker_link.TRIES_MAX + 1)

    run(test)


@pytest.mark.parametrize("where", ["said", "poll"])
@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (envelope(409, "OUT_OF_TURN"), "so it is"),
        (envelope(400, "INVALID_PAYLOAD"), "so it is"),
        (envelope(500, "INTERNAL"), "so it is"),
        (http(200, PAGE), "answered with 'text/html'"),
        (http(302, PAGE, {"Location": "https://login.example/"}), "redirects to https://login.example/"),
        (http(403, PAGE), "is there a proxy or a firewall before it?"),
    ],
)
def test_a_session_that_is_out_of_step_is_begun_anew_and_is_not_the_end_of_the_worker(odd: bytes, words: str, where: str) -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        if where == "said":
            script.to_said.append(odd)
            owner.link.say(Heartbeat(2))
        else:
            script.tell(odd)
        assert words in await owner.closed
        assert owner.heard.empty()
        assert len(script.said) <= 1

    run(test)


def test_a_pause_that_the_server_asks_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "RETRY_AFTER_MAX_S", 0.3)

    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        script.to_said.append(envelope(503, "OVERLOADED", Retry_After="60"))
        owner.link.say(Heartbeat(2))
        await server.until(lambda: len(script.said) == 2)
        first, second = script.said
        assert second.at - first.at >= 0.29
        assert script.numbers == ["1", "1"]

    run(test)


@pytest.mark.parametrize("refusal", [http(413, PAGE), envelope(413, "TOO_LARGE"), envelope(400, "INVALID_PAYLOAD")])
def test_what_is_too_much_for_one_body_leaves_in_smaller_ones(refusal: bytes) -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        limit = 3 * len(encode(Heartbeat(1000)))
        taken: list[Asked] = []

        def proxy(asked: Asked) -> Any:
            if len(asked.body) > limit:
                return refusal
            if asked.body:
                taken.append(asked)
            return script(asked)

        server.answer = proxy
        beats = [Heartbeat(number) for number in range(1000, 1010)]
        owner.link.send_together(beats)
        await server.until(lambda: sum(len(asked.messages) for asked in taken) == len(beats))
        assert [message for asked in taken for message in asked.messages] == beats
        assert [numbers_of(asked)["said"] for asked in taken] == [str(n + 1) for n in range(len(taken))]

    run(test)


def test_one_message_that_is_too_large_for_a_proxy_is_the_end_in_clear_words() -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        script.to_said.append(http(413, PAGE))
        owner.link.say(Heartbeat(2))
        heard = await owner.next()
        assert isinstance(heard, ErrorMessage)
        assert heard.code == "TOO_LARGE"
        assert "a proxy before the server refuses a request that large; raise its limit for bodies" in await owner.closed

    run(test)


def test_endings_that_are_too_large_together_leave_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "REQUEST_MAX_BYTES", 1000)
    endings = [Ending(f"job-{n}", f"lease-{n}", 1, Outcome(result=bytes(300))) for n in range(7)]

    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        owner.link._request_max_bytes = 1000
        owner.link.say(JobsFinished(endings))
        await server.until(lambda: sum(len(words.endings) for words in script.words if isinstance(words, JobsFinished)) == 7)
        assert all(len(asked.body) <= 1000 for asked in script.said)
        assert [ending for words in script.words if isinstance(words, JobsFinished) for ending in words.endings] == endings

    run(test)


# ---------------------------------------------------------------------------------------------------- hearing


def test_what_was_heard_is_counted_also_what_is_newer_than_this_worker() -> None:
    newer = encode_frame(99, b"\x80")

    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        body = encode(HeartbeatAnswer(2)) + newer + encode(CancelLeases(["l"]))
        script.tell(http(200, body, kind=FRAMES_TYPE))
        assert [await owner.next(), await owner.next()] == [HeartbeatAnswer(2), CancelLeases(["l"])]
        await server.until(lambda: len(script.polls) == 2)
        assert script.heard == ["0", "3"]

    run(test)


def test_of_a_poll_that_was_cut_in_the_middle_of_a_frame_the_whole_ones_are_heard() -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        body = encode(HeartbeatAnswer(2)) + encode(HeartbeatAnswer(3))
        script.tell(http(200, body, {"Connection": "close"}, FRAMES_TYPE)[:-2], frames(HeartbeatAnswer(3)))
        assert [await owner.next(), await owner.next()] == [HeartbeatAnswer(2), HeartbeatAnswer(3)]
        await server.until(lambda: len(script.polls) == 3)
        assert script.heard == ["0", "1", "2"]

    run(test)


def test_a_poll_that_is_answered_with_half_a_frame_is_asked_again() -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        script.tell(http(200, encode(HeartbeatAnswer(2))[:-2], kind=FRAMES_TYPE), frames(HeartbeatAnswer(2)))
        assert await owner.next() == HeartbeatAnswer(2)
        assert script.heard[:2] == ["0", "0"]

    run(test)


@pytest.mark.parametrize("odd", [b"", http(504, PAGE), envelope(503, "OVERLOADED"), envelope(404, "NOT_FOUND")])
def test_a_poll_that_failed_is_asked_again_and_after_some_tries_the_link_ends(odd: bytes) -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        script.tell(odd, odd, frames(HeartbeatAnswer(2)))
        assert await owner.next() == HeartbeatAnswer(2)
        script.tell(*[odd] * 20)
        await owner.closed
        assert owner.heard.empty()
        assert len(script.polls) == 3 + worker_link.TRIES_MAX + 1

    run(test)


def test_polls_that_something_on_the_way_cuts_become_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (base_link, worker_link):
        monkeypatch.setattr(module, "POLL_WAIT_MIN_S", 0.1)

    async def cut() -> bytes:
        await asyncio.sleep(0.2)
        return b""

    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        script.tell(*[cut() for _ in range(worker_link.TRIES_MAX + 2)])
        await server.until(lambda: len(script.polls) == worker_link.TRIES_MAX + 3)
        waits = [float(numbers_of(asked)["wait"]) for asked in script.polls]
        assert waits[0] == POLL_WAIT_S
        assert all(0.1 <= wait < 0.25 for wait in waits[1:])
        assert not owner.closed.done()

    run(test)


def test_a_server_that_answers_polls_at_once_with_nothing_is_not_asked_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "PAUSE_FIRST_S", 0.05)

    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        script.tell(*[frames()] * 100)
        await asyncio.sleep(0.5)
        assert 2 <= len(script.polls) <= 5
        assert not owner.closed.done()

    run(test)


def test_the_server_hangs_up_and_says_why() -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        last = ErrorMessage(0, "PROTOCOL", "a new connection of it has taken its place")
        script.tell(frames(HeartbeatAnswer(2), last, HeartbeatAnswer(3)))
        assert [await owner.next(), await owner.next()] == [HeartbeatAnswer(2), last]
        assert await owner.closed == last.message
        assert owner.heard.empty()

    run(test)


def test_an_error_that_answers_a_question_ends_nothing() -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        script.tell(frames(ErrorMessage(7, "INVALID", "no")))
        assert await owner.next() == ErrorMessage(7, "INVALID", "no")
        await server.until(lambda: len(script.polls) == 2)

    run(test)


# ---------------------------------------------------------------------------------------------------- leaving


def test_who_leaves_says_what_was_left_to_say_and_then_that_it_leaves() -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        never = asyncio.Event()
        script.to_said.append(after(never, b""))
        owner.link.say(Heartbeat(2))
        await server.until(lambda: bool(script.said))  # it was taken, and its answer is lost
        owner.link.say(JobsFinished([Ending("j", "l", 1, Outcome(result=b"done"))]))
        await owner.leave()
        assert script.numbers == ["1", "1", "2"]
        assert [type(message) for message in script.words] == [Heartbeat, Heartbeat, JobsFinished]
        assert [(asked.method, asked.target) for asked in script.others] == [("DELETE", "/v1/worker/s1")]
        assert server.asked[-1].method == "DELETE"

    run(test)


def test_who_hangs_up_says_nothing_more() -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        owner.link.say(Heartbeat(2))
        owner.link.abort("the server does not answer")
        await owner.leave()
        assert not script.said
        assert not script.others
        owner.link.say(Heartbeat(3))
        assert owner.closed.result() == "the server does not answer"

    run(test)


def test_a_server_that_does_not_answer_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "LEAVE_S", 0.1)

    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        never = asyncio.Event()
        script.to_said.extend([after(never, b""), after(never, b"")])
        owner.link.say(Heartbeat(2))
        await server.until(lambda: bool(script.said))
        async with asyncio.timeout(2.0):
            await owner.leave()

    run(test)


# ---------------------------------------------------------------------------------------------------- blobs, proxies


def test_a_transfer_names_the_worker_and_waits_if_its_token_is_refused() -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        script.other = lambda asked: envelope(403, "TOKEN_REVOKED")  # type: ignore[method-assign]
        with pytest.raises(Unavailable):
            await anext(owner.link.blobs.pieces(REF, "j", 0))
        [asked] = script.others
        assert numbers_of(asked) == {"job_id": "j", "worker_id": "w", "incarnation": "i"}
        assert not owner.closed.done()

    run(test)


def test_a_transfer_that_is_under_way_when_the_link_ends_can_be_tried_again() -> None:
    async def test(server: OddServer, script: Server, owner: Owner) -> None:
        script.other = lambda asked: after(asyncio.Event(), b"")  # type: ignore[method-assign]
        piece = asyncio.ensure_future(anext(owner.link.blobs.pieces(REF, "j", 0)))
        await server.until(lambda: bool(script.others))
        owner.link.abort("gone")
        await owner.link.wait_closed()
        with pytest.raises(Unavailable):
            await piece

    run(test)


@contextlib.asynccontextmanager
async def connect_proxy() -> AsyncIterator[tuple[str, list[str]]]:
    """A proxy that knows CONNECT alone; its URL, and what it was asked for."""
    asked: list[str] = []
    pumps: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        asked.append(head.splitlines()[0])
        host, _, port = head.split()[1].partition(":")
        there, back = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 Go on\r\n\r\n")
        pumps.update({asyncio.ensure_future(pump(reader, back)), asyncio.ensure_future(pump(there, writer))})

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
        for task in pumps:
            task.cancel()


def test_https_goes_through_the_proxy_of_the_environment_and_trusts_the_ca_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = TestAuthority(tmp_path)

    async def main() -> None:
        script = Server()
        async with asyncio.timeout(DEADLINE_S), OddServer(script, tls=authority.serving()) as server, connect_proxy() as proxy:
            url, asked = proxy
            monkeypatch.setenv("HTTPS_PROXY", url)
            owner = Owner(server.address, tls=authority.trusted())
            await owner.greet()
            script.tell(frames(HeartbeatAnswer(2)))
            assert await owner.next() == HeartbeatAnswer(2)
            await owner.leave()
            assert set(asked) == {f"CONNECT 127.0.0.1:{server.address.port} HTTP/1.1"}
            assert script.others[-1].method == "DELETE"

    asyncio.run(main())


def test_a_server_whose_ca_is_not_trusted_is_not_spoken_to(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), OddServer(Server(), tls=authority.serving()) as server:
            owner = Owner(server.address)
            owner.link.say(HELLO)
            assert "no TLS connection to" in await owner.closed
            assert owner.heard.empty()
            await owner.link.wait_closed()
            assert not server.asked

    asyncio.run(main())
