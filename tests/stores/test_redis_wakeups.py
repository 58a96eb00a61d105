"""Hints between servers over a real Redis: they arrive, and what is lost becomes "look at everything"."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tasuki.core.cluster_messages import Hint, decode, everything, split
from tasuki.errors import ConfigError
from tasuki.stores.redis.connection import RedisWakeups
from tasuki.stores.wakeups import BATCH_MAX, QUEUE_MAX
from tests.stores.hearing import LISTENING, RUNNERS, TIMEOUT_S, Ear, hint, listening
from tests.support.redis_service import RedisService
from tests.support.waiting import until

IDLE_S = 0.2


def server(url: str, name: str, app: str = "zpe") -> AbstractAsyncContextManager[tuple[RedisWakeups, Ear]]:
    return listening(RedisWakeups(url, app=app, server_id=name, idle_s=IDLE_S))


def is_told(name: str, job_id: str) -> Callable[[list[Hint]], bool]:
    """By name, or as a part of everything."""
    return lambda heard: any(job_id in one.ended or one == decode(everything(name)) for one in heard)


@pytest.mark.parametrize("loop", sorted(RUNNERS))
def test_a_hint_reaches_the_others(redis_url: str, loop: str) -> None:
    async def scenario() -> None:
        async with server(redis_url, "a") as (sender, own), server(redis_url, "b") as (_, b), server(redis_url, "c") as (_, c):
            sender.publish(split(hint("a", "job-1")))

            for ear in (b, c, own):
                await ear.hears(lambda heard: hint("a", "job-1") in heard)

    RUNNERS[loop](scenario())


def test_many_pieces_arrive_in_order(redis_url: str) -> None:
    pieces = [split(hint("a", f"{number:05d}", "襷", "x" * 128))[0] for number in range(2 * BATCH_MAX + 3)]

    async def scenario() -> None:
        async with server(redis_url, "a") as (sender, _), server(redis_url, "b") as (_, b):
            sender.publish(pieces)

            await b.hears(lambda heard: len(heard) == 1 + len(pieces))
            assert b.heard[1:] == [decode(piece) for piece in pieces]

    asyncio.run(scenario())


def test_other_apps_and_other_databases_hear_nothing(redis_service: RedisService) -> None:
    here, elsewhere = redis_service.url(), redis_service.url()

    async def scenario() -> None:
        async with (
            server(here, "a") as (sender, own),
            server(elsewhere, "b") as (there, b),
            server(here, "c", app="other") as (others, c),
        ):
            sender.publish(split(hint("a", "job-1")))
            await own.hears(lambda heard: hint("a", "job-1") in heard)
            # What comes later on the same connection shows that nothing came before.
            there.publish(split(hint("b", "last")))
            others.publish(split(hint("c", "last")))
            await b.hears(lambda heard: hint("b", "last") in heard)
            await c.hears(lambda heard: hint("c", "last") in heard)

            assert (b.heard, c.heard) == ([LISTENING, hint("b", "last")], [LISTENING, hint("c", "last")])

    asyncio.run(scenario())


def test_after_a_lost_connection_the_listener_looks_at_everything_and_hears_again(
    redis_service: RedisService, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tasuki.wakeups")
    raw: Any = redis_service.client()

    async def scenario() -> None:
        async with server(redis_url, "a") as (sender, _), server(redis_url, "b") as (_, b):
            await asyncio.to_thread(raw.execute_command, "CLIENT", "KILL", "TYPE", "pubsub")
            await asyncio.to_thread(raw.execute_command, "CLIENT", "KILL", "TYPE", "normal")
            await b.hears(lambda heard: heard.count(LISTENING) == 2)

            sender.publish(split(hint("a", "job-1")))

            await b.hears(is_told("a", "job-1"))

    asyncio.run(scenario())
    raw.close()
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2, "each server tells of its outage once"


def test_what_was_published_during_an_outage_is_told_as_everything() -> None:
    async def scenario(service: RedisService) -> None:
        url = service.url()
        async with server(url, "a") as (sender, _), server(url, "b") as (_, b):
            await asyncio.to_thread(service.stop)
            for number in range(2 * QUEUE_MAX):
                sender.publish(split(hint("a", f"job-{number}")))
            await asyncio.to_thread(service.start)
            await b.hears(lambda heard: heard.count(LISTENING) >= 2)

            sender.publish(split(hint("a", "job-after")))

            await b.hears(is_told("a", "job-after"))

    with RedisService() as service:
        asyncio.run(scenario(service))


def test_a_redis_that_hangs_is_noticed_though_nothing_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(service: RedisService) -> None:
        async with server(service.url(), "a") as (_, ear):
            service.pause()
            await asyncio.to_thread(until, lambda: "no answer within" in caplog.text, TIMEOUT_S, "the silence is noticed")
            service.resume()

            await ear.hears(lambda heard: heard.count(LISTENING) == 2)

    with RedisService() as service:
        asyncio.run(scenario(service))


def test_a_redis_that_is_not_there_neither_raises_nor_blocks() -> None:
    async def scenario() -> None:
        wakeups, ear = RedisWakeups("redis://127.0.0.1:1/0", app="zpe", server_id="a"), Ear()
        async with asyncio.timeout(TIMEOUT_S):
            await wakeups.start(ear)
            for _ in range(3 * QUEUE_MAX):
                wakeups.publish(split(hint("a", "job-1")))
                await asyncio.sleep(0)
            await wakeups.close()
        assert ear.heard == []

    asyncio.run(scenario())


def test_closing_gives_both_connections_back(redis_service: RedisService, redis_url: str) -> None:
    number = urlsplit(redis_url).path.strip("/")
    raw: Any = redis_service.client()

    def connections() -> int:
        return sum(client["db"] == number for client in raw.client_list())

    async def scenario() -> None:
        async with server(redis_url, "a") as (sender, ear):
            sender.publish(split(hint("a", "job-1")))
            await ear.hears(lambda heard: hint("a", "job-1") in heard)
            assert await asyncio.to_thread(connections) == 2

    asyncio.run(scenario())
    until(lambda: connections() == 0, TIMEOUT_S, "both are gone")
    raw.close()


def test_behind_a_sentinel_the_master_carries_the_hints(redis_service: RedisService, tmp_path: Path) -> None:
    number = urlsplit(redis_service.url()).path.strip("/")
    config = tmp_path / "sentinel.conf"
    config.write_text(f"sentinel monitor main 127.0.0.1 {redis_service.port} 1\n")

    async def scenario(url: str) -> None:
        async with server(url, "a") as (sender, _), server(url, "b") as (_, b):
            sender.publish(split(hint("a", "job-1")))
            await b.hears(lambda heard: hint("a", "job-1") in heard)

    with RedisService(str(config), "--sentinel", only={"bind": "127.0.0.1"}) as sentinel:
        asyncio.run(scenario(f"redis+sentinel://127.0.0.1:{sentinel.port}/main/{number}"))


def test_an_address_that_is_not_understood_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError, match="%2F") as raised:
        RedisWakeups("redis://user:hunt/er2@host:6379/0", app="zpe", server_id="a")

    assert "hunt" not in str(raised.value)
    assert raised.value.__suppress_context__
