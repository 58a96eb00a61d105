"""Hints between servers over a real PostgreSQL: they arrive, and what is lost becomes "look at everything"."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager

import pytest

from tasuki.core.cluster_messages import PIECE_MAX_BYTES, Hint, decode, everything, split
from tasuki.errors import ConfigError
from tasuki.stores.sql.postgres import PostgresWakeups
from tasuki.stores.wakeups import BATCH_MAX, QUEUE_MAX, NoWakeups
from tests.stores.hearing import LISTENING, RUNNERS, TIMEOUT_S, Ear, hint, listening
from tests.support.postgres_service import PASSWORD, PostgresService
from tests.support.waiting import until


def server(url: str, name: str) -> AbstractAsyncContextManager[tuple[PostgresWakeups, Ear]]:
    return listening(PostgresWakeups(url, server_id=name))


def hang_up_on_all(postgres: PostgresService, url: str) -> None:
    ours = "datname = current_database() AND application_name = 'tasuki'"
    postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {ours}", url=url)


@pytest.mark.parametrize("loop", sorted(RUNNERS))
def test_a_hint_reaches_the_others_within_a_second(postgres_url: str, loop: str) -> None:
    async def scenario() -> None:
        async with (
            server(postgres_url, "a") as (sender, _),
            server(postgres_url, "b") as (_, b),
            server(postgres_url, "c") as (_, c),
        ):
            sender.publish(split(hint("a", "job-1")))

            await b.hears(lambda heard: hint("a", "job-1") in heard, timeout_s=1.0)
            await c.hears(lambda heard: hint("a", "job-1") in heard, timeout_s=1.0)

    RUNNERS[loop](scenario())


def test_many_pieces_of_full_size_arrive_in_order(postgres_url: str) -> None:
    pieces = [split(hint("a", f"{number:05d}", *["x" * 128] * 59))[0] for number in range(2 * BATCH_MAX + 3)]
    assert PIECE_MAX_BYTES - 200 < len(pieces[0]) <= PIECE_MAX_BYTES

    async def scenario() -> None:
        async with server(postgres_url, "a") as (sender, _), server(postgres_url, "b") as (_, b):
            sender.publish(pieces)

            await b.hears(lambda heard: len(heard) == 1 + len(pieces))
            assert b.heard[1:] == [decode(piece) for piece in pieces]

    asyncio.run(scenario())


def test_any_text_arrives_as_it_was_sent(postgres_url: str) -> None:
    odd = Hint(server_id="a", ready=("襷.é", "a\x00b", "\\x 'quoted' \"twice\" $1 %s"))

    async def scenario() -> None:
        async with server(postgres_url, "a") as (sender, _), server(postgres_url, "b") as (_, b):
            sender.publish(split(odd))

            await b.hears(lambda heard: odd in heard)

    asyncio.run(scenario())


def test_after_a_lost_connection_the_listener_looks_at_everything_and_hears_again(
    postgres: PostgresService, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tasuki.wakeups")

    async def scenario() -> None:
        async with server(postgres_url, "a") as (sender, _), server(postgres_url, "b") as (_, b):
            await asyncio.to_thread(hang_up_on_all, postgres, postgres_url)
            await b.hears(lambda heard: heard.count(LISTENING) == 2)

            sender.publish(split(hint("a", "job-1")))

            # Sent on the new connection, or replaced because the loss of the old one was noticed by sending it.
            await b.hears(lambda heard: any(one.server_id == "a" for one in heard))

    asyncio.run(scenario())
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2, "each server tells of its outage once"
    assert not any(PASSWORD in record.getMessage() for record in caplog.records)


def test_what_was_published_during_an_outage_is_told_as_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tasuki.wakeups")

    async def scenario(postgres: PostgresService) -> None:
        url = postgres.empty_database()
        async with server(url, "a") as (sender, _), server(url, "b") as (_, b):
            await asyncio.to_thread(postgres.stop)
            for number in range(2 * QUEUE_MAX):
                sender.publish(split(hint("a", f"job-{number}")))
            await asyncio.to_thread(postgres.start)
            await b.hears(lambda heard: heard.count(LISTENING) == 2)

            # The sender may have come back before the listener did, which then was told to look at everything anyway.
            sender.publish(split(hint("a", "job-after")))

            await b.hears(lambda heard: any("job-after" in one.ended or one == decode(everything("a")) for one in heard))

    with PostgresService() as postgres:
        asyncio.run(scenario(postgres))
    messages = [record.getMessage() for record in caplog.records if record.name == "tasuki.wakeups"]
    assert sum("lost for now" in message for message in messages) == 2, messages
    assert not any(PASSWORD in message for message in messages)


def test_more_than_the_queue_holds_becomes_one_everything(postgres_url: str) -> None:
    async def scenario() -> None:
        async with server(postgres_url, "a") as (sender, _), server(postgres_url, "b") as (_, b):
            # In one turn of the loop, so that nothing is sent in between.
            for number in range(QUEUE_MAX + 1):
                sender.publish(split(hint("a", f"job-{number}")))

            await b.hears(lambda heard: len(heard) >= 2)
            assert b.heard[1:] == [decode(everything("a"))]

    asyncio.run(scenario())


def test_a_database_that_is_not_there_neither_raises_nor_blocks(postgres_url: str) -> None:
    async def scenario() -> None:
        wakeups, ear = PostgresWakeups("postgresql://tasuki@127.0.0.1:1/none", server_id="a"), Ear()
        async with asyncio.timeout(TIMEOUT_S):
            await wakeups.start(ear)
            for _ in range(3 * QUEUE_MAX):
                wakeups.publish(split(hint("a", "job-1")))
                await asyncio.sleep(0)
            await wakeups.close()
        assert ear.heard == []

    asyncio.run(scenario())


def test_a_listener_that_raises_is_called_again(postgres_url: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with server(postgres_url, "a") as (sender, _):
            clumsy, listening, heard = PostgresWakeups(postgres_url, server_id="b"), asyncio.Event(), asyncio.Event()

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


def test_closing_gives_both_connections_back(postgres: PostgresService, postgres_url: str) -> None:
    count = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'tasuki'"

    async def scenario() -> None:
        async with server(postgres_url, "a") as (sender, ear):
            sender.publish(split(hint("a", "job-1")))
            await ear.hears(lambda heard: hint("a", "job-1") in heard)
            assert await asyncio.to_thread(postgres.execute, count, url=postgres_url) == [(2,)]

    asyncio.run(scenario())

    until(lambda: postgres.execute(count, url=postgres_url) == [(0,)], what="the backends are gone")


def test_an_address_that_is_not_understood_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError) as raised:
        PostgresWakeups(f"postgresql://tasuki:{PASSWORD}@[127.0.0.1/x", server_id="a")

    assert PASSWORD not in str(raised.value)
    assert raised.value.__suppress_context__


def test_where_there_is_one_server_nothing_is_heard() -> None:
    async def scenario() -> None:
        wakeups, ear = NoWakeups(), Ear()
        await wakeups.start(ear)
        wakeups.publish(split(hint("a", "job-1")))
        await wakeups.close()
        assert ear.heard == []

    asyncio.run(scenario())
