"""The gate: every request is judged by what the store said after it came, and those that come together cost one question."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request

from tasuki.core.access import PeerKind, token_sha256
from tasuki.core.machine import Now
from tasuki.core.store_messages import TokenRow
from tasuki.doors.http.context import Authenticator
from tasuki.doors.http.virtual_connection import Caller
from tasuki.errors import TokenRevoked, Unauthorized, Unavailable

KINDS = frozenset({PeerKind.CLIENT})


class Asked:
    """A store that answers when the test says so, with what it holds at that moment of the question."""

    def __init__(self) -> None:
        self.rows: dict[str, TokenRow] = {}
        self.questions: list[list[str]] = []
        self.error: Exception | None = None
        self._may_answer = asyncio.Semaphore(0)

    def add(self, secret: str, **fields: Any) -> None:
        sha256 = token_sha256(secret)
        self.rows[sha256] = TokenRow(token_id=secret, kind="client", sha256=sha256, created_at=1.0, **fields)

    def answer(self) -> None:
        self._may_answer.release()

    def now(self) -> Now:
        return Now(10.0, 10.0)

    async def ask_tokens(self, question: Callable[[Any], Any]) -> Any:
        self.questions.append([])
        found = question(self)
        await self._may_answer.acquire()
        if self.error is not None:
            raise self.error
        return found

    def token(self, sha256: str) -> TokenRow | None:
        self.questions[-1].append(sha256)
        return self.rows.get(sha256)


def admitted(gate: Authenticator, secret: str) -> asyncio.Future[Caller]:
    headers = [(b"authorization", f"Bearer {secret}".encode())]
    scope = {"type": "http", "method": "GET", "path": "/", "headers": headers, "client": ("10.0.0.1", 5)}
    return asyncio.ensure_future(gate.admit(Request(scope), KINDS))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def played(test: Callable[[Asked, Authenticator], Any]) -> None:
    async def play() -> None:
        store = Asked()
        await asyncio.wait_for(test(store, Authenticator(store)), 20.0)  # type: ignore[arg-type]

    asyncio.run(play())


def test_what_arrives_while_the_store_is_asked_goes_together_with_the_next_question() -> None:
    async def test(store: Asked, gate: Authenticator) -> None:
        store.add("a")
        store.add("b")
        first = admitted(gate, "a")
        await settle()
        others = [admitted(gate, secret) for secret in ("a", "b", "b")]
        await settle()

        store.answer()
        store.answer()

        assert [caller.secret for caller in await asyncio.gather(first, *others)] == ["a", "a", "b", "b"]
        assert store.questions == [[token_sha256("a")], [token_sha256("a"), token_sha256("b")]]

    played(test)


def test_a_token_that_was_revoked_before_a_request_came_is_refused_whatever_an_earlier_question_found() -> None:
    async def test(store: Asked, gate: Authenticator) -> None:
        store.add("a")
        before = admitted(gate, "a")
        await settle()  # asked for; the answer is on its way
        store.add("a", revoked_at=5.0)
        after = admitted(gate, "a")
        await settle()

        store.answer()
        store.answer()

        assert (await before).secret == "a"
        with pytest.raises(TokenRevoked):
            await after

    played(test)


def test_a_store_that_does_not_answer_is_told_to_each_and_asked_again_for_the_next() -> None:
    async def test(store: Asked, gate: Authenticator) -> None:
        store.add("a")
        store.error = Unavailable("the store is away")
        refused = [admitted(gate, "a"), admitted(gate, "b")]
        await settle()
        store.answer()
        assert [type(error) for error in await asyncio.gather(*refused, return_exceptions=True)] == [Unavailable, Unavailable]

        store.error = None
        store.answer()

        assert (await admitted(gate, "a")).secret == "a"

    played(test)


def test_one_who_leaves_takes_no_answer_from_the_others() -> None:
    async def test(store: Asked, gate: Authenticator) -> None:
        store.add("a")
        leaving, staying = admitted(gate, "a"), admitted(gate, "a")
        await settle()

        leaving.cancel()
        store.answer()

        assert (await staying).secret == "a"

    played(test)


def test_an_unknown_token_is_refused() -> None:
    async def test(store: Asked, gate: Authenticator) -> None:
        store.answer()

        with pytest.raises(Unauthorized):
            await admitted(gate, "nobody")

    played(test)
