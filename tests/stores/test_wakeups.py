"""Hints between servers over a real PostgreSQL and a real Redis: they arrive, and lost ones become "look at everything"."""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tasuki.coords.sql import SqlCoordination
from tasuki.core.cluster_messages import PIECE_MAX_BYTES, Hint, RelayedMessage, RelayedPieces, decode, everything, relay, split
from tasuki.core.protocol import PublishedMessage
from tasuki.errors import ConfigError
from tasuki.stores.redis.connection import RedisWakeups
from tasuki.stores.sql.postgres_wakeups import PostgresWakeups, SharedWakeups
from tasuki.stores.wakeups import BATCH_MAX, MESSAGES_MAX, QUEUE_MAX, Wakeups
from tests.stores.hearing import LISTENING, RUNNERS, TIMEOUT_S, Ear, hint, listening
from tests.support.postgres_service import PASSWORD, PostgresService
from tests.support.redis_service import RedisService
from tests.support.waiting import until, until_async

IDLE_S = 0.2
NOWHERE: dict[str, Callable[[], Wakeups]] = {
    "postgresql": lambda: PostgresWakeups("postgresql://tasuki@127.0.0.1:1/none", server_id="a"),
    "redis": lambda: RedisWakeups("redis://127.0.0.1:1/0", app="zpe", server_id="a"),
}


class PostgresCarrier:
    """A database that carries hints."""

    def __init__(self, service: PostgresService, url: str) -> None:
        self.service, self.url = service, url

    def wakeups(self, name: str) -> Wakeups:
        return PostgresWakeups(self.url, server_id=name)

    def cut(self) -> None:
        self._of_all("pg_terminate_backend(pid)")

    def connections(self) -> int:
        return len(self._of_all("pid"))

    def _of_all(self, what: str) -> list[tuple[Any, ...]]:
        of_tasuki = "datname = current_database() AND application_name = 'tasuki'"
        return self.service.execute(f"SELECT {what} FROM pg_stat_activity WHERE {of_tasuki}", url=self.url)


class SharedCarrier(PostgresCarrier):
    """Hints over the connection of the coordination of each server."""

    def __init__(self, service: PostgresService, url: str) -> None:
        super().__init__(service, url)
        self.coordinations: list[SqlCoordination] = []

    def wakeups(self, name: str) -> Wakeups:
        self.coordinations.append(SqlCoordination(self.url))
        return SharedWakeups(self.url, self.coordinations[-1].shared_connection, server_id=name)

    def close(self) -> None:
        for coordination in self.coordinations:
            coordination.close()


class RedisCarrier:
    """A Redis database that carries hints."""

    def __init__(self, service: RedisService) -> None:
        self.service, self.url = service, service.url()

    def wakeups(self, name: str) -> Wakeups:
        return RedisWakeups(self.url, app="zpe", server_id=name, idle_s=IDLE_S)

    def cut(self) -> None:
        with self.service.client() as raw:
            client: Any = raw
            client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            client.execute_command("CLIENT", "KILL", "TYPE", "normal")

    def connections(self) -> int:
        number = urlsplit(self.url).path.strip("/")
        with self.service.client() as raw:
            client: Any = raw
            own = str(client.client_id())
            return sum(one["db"] == number and one["id"] != own for one in client.client_list())


Carrier = PostgresCarrier | RedisCarrier


@pytest.fixture(params=["postgresql", "shared", "redis"])
def carrier(request: pytest.FixtureRequest) -> Iterator[Carrier]:
    if request.param == "redis":
        yield RedisCarrier(request.getfixturevalue("redis_service"))
        return
    place = request.getfixturevalue("postgres"), request.getfixturevalue("postgres_url")
    if request.param == "postgresql":
        yield PostgresCarrier(*place)
        return
    with closing(SharedCarrier(*place)) as shared:
        yield shared


@pytest.fixture(params=["postgresql", "shared", "redis"])
def own_carrier(request: pytest.FixtureRequest) -> Iterator[Carrier]:
    """A carrier whose service the test may stop."""
    if request.param == "redis":
        with RedisService() as redis:
            yield RedisCarrier(redis)
        return
    with PostgresService() as postgres:
        if request.param == "postgresql":
            yield PostgresCarrier(postgres, postgres.empty_database())
            return
        with closing(SharedCarrier(postgres, postgres.empty_database())) as shared:
            yield shared


def server(carrier: Carrier, name: str) -> AbstractAsyncContextManager[tuple[Wakeups, Ear]]:
    return listening(carrier.wakeups(name))


def redis_server(url: str, name: str, app: str = "zpe") -> AbstractAsyncContextManager[tuple[RedisWakeups, Ear]]:
    return listening(RedisWakeups(url, app=app, server_id=name, idle_s=IDLE_S))


def is_told(name: str, job_id: str) -> Callable[[list[Hint]], bool]:
    """Return the condition that the job was named, or everything of that server."""
    return lambda heard: any(job_id in one.ended or one == decode(everything(name)) for one in heard)


@pytest.mark.parametrize("loop", sorted(RUNNERS))
def test_a_hint_reaches_all_servers_within_a_second(carrier: Carrier, loop: str) -> None:
    async def scenario() -> None:
        async with server(carrier, "a") as (sender, own), server(carrier, "b") as (_, b), server(carrier, "c") as (_, c):
            took_s = []
            for told in (hint("a", "job-1"), hint("a", "job-2"), hint("a", "job-3")):  # one may meet other work of this machine
                began = time.monotonic()
                sender.publish(split(told))
                for ear in (b, c, own):
                    await ear.hears(lambda heard, told=told: told in heard)  # type: ignore[misc]
                took_s.append(time.monotonic() - began)
            assert statistics.median(took_s) < 1.0

    RUNNERS[loop](scenario())


def test_many_pieces_of_full_size_arrive_in_order(carrier: Carrier) -> None:
    pieces = [split(hint("a", f"{number:05d}", *["x" * 128] * 59))[0] for number in range(2 * BATCH_MAX + 3)]
    assert PIECE_MAX_BYTES - 200 < len(pieces[0]) <= PIECE_MAX_BYTES

    async def scenario() -> None:
        async with server(carrier, "a") as (sender, _), server(carrier, "b") as (_, b):
            sender.publish(pieces)

            await b.hears(lambda heard: len(heard) == 1 + len(pieces))
            assert b.heard[1:] == [decode(piece) for piece in pieces]

    asyncio.run(scenario())


@pytest.mark.parametrize("loop", sorted(RUNNERS))
@pytest.mark.parametrize("carrier", ["shared"], indirect=True)
def test_hints_arrive_on_a_connection_that_others_use_all_the_time(carrier: SharedCarrier, loop: str) -> None:
    async def scenario() -> None:
        async with server(carrier, "a") as (sender, _), server(carrier, "b") as (_, b):
            over = asyncio.Event()

            async def use(coordination: SqlCoordination) -> None:
                while not over.is_set():
                    await asyncio.to_thread(coordination.detached)

            # One each, as heartbeats are: several could keep the lock of a connection among them for seconds.
            users = [asyncio.ensure_future(use(coordination)) for coordination in carrier.coordinations]
            for number in range(200):
                sender.publish(split(hint("a", f"job-{number}")))
                await b.hears(lambda heard, last=number: hint("a", f"job-{last}") in heard)
            assert b.heard[1:] == [hint("a", f"job-{number}") for number in range(200)]
            over.set()
            await asyncio.gather(*users)

    RUNNERS[loop](scenario())


def test_any_text_arrives_as_it_was_sent(carrier: Carrier) -> None:
    odd = Hint(server_id="a", ready=("襷.é", "a\x00b", "\\x 'quoted' \"twice\" $1 %s"))

    async def scenario() -> None:
        async with server(carrier, "a") as (sender, _), server(carrier, "b") as (_, b):
            sender.publish(split(odd))

            await b.hears(lambda heard: odd in heard)

    asyncio.run(scenario())


def test_after_a_lost_connection_the_listener_looks_at_everything_and_hears_again(
    carrier: Carrier, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tasuki.wakeups")

    async def scenario() -> None:
        async with server(carrier, "a") as (sender, _), server(carrier, "b") as (_, b):
            await asyncio.to_thread(carrier.cut)
            await b.hears(lambda heard: heard.count(LISTENING) == 2)

            sender.publish(split(hint("a", "job-1")))

            # Sent on the new connection, or replaced because the loss of the old one was noticed by sending it.
            await b.hears(is_told("a", "job-1"))

    asyncio.run(scenario())
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2, "each server tells of its outage once"
    assert not any(PASSWORD in record.getMessage() for record in caplog.records)


def test_what_was_published_during_an_outage_is_told_as_everything(
    own_carrier: Carrier, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tasuki.wakeups")
    listens_once_more = isinstance(own_carrier, PostgresCarrier)  # a Redis that starts may hang up once more

    async def scenario() -> None:
        async with server(own_carrier, "a") as (sender, _), server(own_carrier, "b") as (_, b):
            await asyncio.to_thread(own_carrier.service.stop)
            lost: list[str] = []
            sender.publish_messages(relay("a", 1, [RelayedMessage(PublishedMessage("a.b"))]), partial(lost.append, "message"))
            for number in range(2 * QUEUE_MAX):
                sender.publish(split(hint("a", f"job-{number}")))
            await until_async(lambda: lost, what="a message is given up")
            await asyncio.to_thread(own_carrier.service.start)
            await b.hears(lambda heard: heard.count(LISTENING) == 2 or (heard.count(LISTENING) > 2 and not listens_once_more))

            # The sender may have come back before the listener did, which then was told to look at everything anyway.
            sender.publish(split(hint("a", "job-after")))

            await b.hears(is_told("a", "job-after"))
            assert (lost, [one for one in b.heard if one.relay is not None]) == (["message"], [])

    asyncio.run(scenario())
    messages = [record.getMessage() for record in caplog.records if record.name == "tasuki.wakeups"]
    if listens_once_more:
        assert sum("lost for now" in message for message in messages) == 2, messages
    assert not any(PASSWORD in message for message in messages)


def test_more_than_the_queue_holds_becomes_one_everything(carrier: Carrier) -> None:
    async def scenario() -> None:
        async with server(carrier, "a") as (sender, _), server(carrier, "b") as (_, b):
            # In one turn of the loop, so that nothing is sent in between.
            for number in range(QUEUE_MAX + 1):
                sender.publish(split(hint("a", f"job-{number}")))

            await b.hears(lambda heard: len(heard) >= 2)
            assert b.heard[1:] == [decode(everything("a"))]

    asyncio.run(scenario())


def test_messages_of_any_size_follow_the_hints_and_too_many_are_dropped(carrier: Carrier) -> None:
    large = RelayedMessage(PublishedMessage("a.ü", bytes(range(256)) * 1200, "r", {"h": "i"}), {"q": "b"})

    async def scenario() -> None:
        async with server(carrier, "a") as (sender, _), server(carrier, "b") as (_, b):
            pieces = relay("a", 1, [large], sender.piece_max_bytes)
            lost: list[str] = []
            sender.publish_messages(pieces, partial(lost.append, "few"))
            sender.publish(split(hint("a", "job-1")))  # in the same turn of the loop: it comes first
            sender.publish_messages([b"{}"] * MESSAGES_MAX, partial(lost.append, "many"))

            await b.hears(lambda heard: len(heard) == 2 + len(pieces))
            assert b.heard[1] == hint("a", "job-1")
            collected = RelayedPieces()
            got = [collected.take("a", one.relay) for one in b.heard[2:] if one.relay is not None]
            assert (got[-1], lost) == ([large], ["many"])

    asyncio.run(scenario())


@pytest.mark.parametrize("name", sorted(NOWHERE))
def test_a_service_that_is_not_there_neither_raises_nor_blocks(name: str) -> None:
    async def scenario() -> None:
        wakeups, ear = NOWHERE[name](), Ear()
        async with asyncio.timeout(TIMEOUT_S):
            await wakeups.start(ear)
            for _ in range(3 * QUEUE_MAX):
                wakeups.publish(split(hint("a", "job-1")))
                await asyncio.sleep(0)
            await wakeups.close()
        assert ear.heard == []

    asyncio.run(scenario())


def test_a_listener_that_raises_is_called_again(carrier: Carrier, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with server(carrier, "a") as (sender, _):
            clumsy, listening, heard = carrier.wakeups("b"), asyncio.Event(), asyncio.Event()

            def raise_first(piece: bytes) -> None:
                if not listening.is_set():
                    listening.set()
                    raise RuntimeError("not ready yet")
                heard.set()

            await clumsy.start(raise_first)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await listening.wait()
                    sender.publish(split(hint("a", "job-1")))
                    await heard.wait()
            finally:
                await clumsy.close()

    asyncio.run(scenario())
    assert "could not be taken in" in caplog.text


@pytest.mark.parametrize("carrier", ["postgresql", "redis"], indirect=True)
def test_closing_gives_both_connections_back(carrier: Carrier) -> None:
    async def scenario() -> None:
        async with server(carrier, "a") as (sender, ear):
            sender.publish(split(hint("a", "job-1")))
            await ear.hears(lambda heard: hint("a", "job-1") in heard)
            assert await asyncio.to_thread(carrier.connections) == 2

    asyncio.run(scenario())
    until(lambda: carrier.connections() == 0, TIMEOUT_S, "both are gone")


@pytest.mark.parametrize("carrier", ["postgresql", "redis"], indirect=True)
def test_the_connection_that_notifies_is_open_only_while_there_are_hints(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasuki.stores.wakeups.NOTIFY_IDLE_S", 0.05)

    async def scenario() -> None:
        async with server(carrier, "a") as (sender, ear):
            for number in range(2):
                assert await asyncio.to_thread(until, lambda: carrier.connections() == 1, TIMEOUT_S, "only one listens")
                sender.publish(split(hint("a", f"job-{number}")))
                await ear.hears(lambda heard, last=number: hint("a", f"job-{last}") in heard)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("make", "secret"),
    [
        (lambda: PostgresWakeups(f"postgresql://tasuki:{PASSWORD}@[127.0.0.1/x", server_id="a"), PASSWORD),
        (lambda: RedisWakeups("redis://user:hunt/er2@host:6379/0", app="zpe", server_id="a"), "hunt"),
    ],
    ids=["postgresql", "redis"],
)
def test_an_address_that_is_not_understood_is_refused_without_its_password(make: Callable[[], Wakeups], secret: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()

    assert secret not in str(raised.value)
    assert raised.value.__suppress_context__
    assert "%2F" in str(raised.value) or "postgresql://" in str(raised.value)


# -- Redis alone ------------------------------------------------------------------------------------------------------


def test_other_apps_and_other_databases_hear_nothing(redis_service: RedisService) -> None:
    here, elsewhere = redis_service.url(), redis_service.url()

    async def scenario() -> None:
        async with (
            redis_server(here, "a") as (sender, own),
            redis_server(elsewhere, "b") as (there, b),
            redis_server(here, "c", app="other") as (others, c),
        ):
            sender.publish(split(hint("a", "job-1")))
            await own.hears(lambda heard: hint("a", "job-1") in heard)
            # A later hint on the same connection shows that nothing came before.
            there.publish(split(hint("b", "last")))
            others.publish(split(hint("c", "last")))
            await b.hears(lambda heard: hint("b", "last") in heard)
            await c.hears(lambda heard: hint("c", "last") in heard)

            assert (b.heard, c.heard) == ([LISTENING, hint("b", "last")], [LISTENING, hint("c", "last")])

    asyncio.run(scenario())


def test_a_redis_that_hangs_is_noticed_though_nothing_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(service: RedisService) -> None:
        async with redis_server(service.url(), "a") as (_, ear):
            service.pause()
            await asyncio.to_thread(until, lambda: "no answer within" in caplog.text, TIMEOUT_S, "the silence is noticed")
            service.resume()

            await ear.hears(lambda heard: heard.count(LISTENING) == 2)

    with RedisService() as service:
        asyncio.run(scenario(service))


def test_behind_a_sentinel_the_master_carries_the_hints(redis_service: RedisService, tmp_path: Path) -> None:
    number = urlsplit(redis_service.url()).path.strip("/")
    config = tmp_path / "sentinel.conf"
    config.write_text(f"sentinel monitor main 127.0.0.1 {redis_service.port} 1\n")

    async def scenario(url: str) -> None:
        async with redis_server(url, "a") as (sender, _), redis_server(url, "b") as (_, b):
            sender.publish(split(hint("a", "job-1")))
            await b.hears(lambda heard: hint("a", "job-1") in heard)

    with RedisService(str(config), "--sentinel", only={"bind": "127.0.0.1"}) as sentinel:
        asyncio.run(scenario(f"redis+sentinel://127.0.0.1:{sentinel.port}/main/{number}"))
