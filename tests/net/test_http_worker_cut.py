"""A worker's link to a real door, through a line that breaks again and again: all is said once, and all is heard once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.core.address import Address
from tasuki.core.protocol import ErrorMessage, GiveCredit, Heartbeat, HeartbeatAnswer, HelloWorker, Message, Welcome
from tasuki.net.http import worker_link
from tasuki.net.http.worker_link import HttpWorkerLink
from tests.doors.http.stage import Stage
from tests.e2e.wire import Wire

BEATS = 120
DEADLINE_S = 30.0


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Stage(tmp_path) as stage:
        yield stage


@pytest.mark.parametrize("seed", [1, 2])
def test_a_line_that_breaks_costs_neither_a_message_nor_the_session(
    stage: Stage, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "PAUSE_FIRST_S", 0.005)
    chance = random.Random(seed)
    heard: list[Message] = []
    closed: list[str] = []

    async def main(wire: Wire) -> None:
        something = asyncio.Event()

        def take(link: HttpWorkerLink, message: Message) -> None:
            heard.append(message)
            something.set()

        link = HttpWorkerLink(
            Address("http", "127.0.0.1", wire.port), take, lambda link, reason: closed.append(reason), tls=None, timeout_s=3.0
        )
        link.say(HelloWorker(msg_id=1, worker_id="w", incarnation="i", token=stage.create_token("worker"), version=2))
        await something.wait()
        for number in range(2, BEATS + 2):
            link.say(Heartbeat(number))
            link.say(GiveCredit(1))
            await asyncio.sleep(chance.uniform(0.0, 0.02))
            if chance.random() < 0.2:
                await asyncio.to_thread(wire.snip)
        while len(heard) < BEATS + 1 and not closed:
            something.clear()
            await something.wait()
        assert credit_of(stage) == BEATS
        link.close()
        await link.wait_closed()

    with Wire("127.0.0.1", stage.address.port) as wire:
        asyncio.run(asyncio.wait_for(main(wire), DEADLINE_S))
        assert wire.connections > 10  # it did break

    assert closed == ["closed"], heard[-1]
    assert isinstance(heard[0], Welcome)
    assert not [message for message in heard if isinstance(message, ErrorMessage)]
    answered = [message.corr_id for message in heard if isinstance(message, HeartbeatAnswer)]
    assert answered == list(range(2, BEATS + 2))
    assert credit_of(stage) is None  # it has left


def credit_of(stage: Stage) -> object:
    views = stage.server.broker.describe_workers()
    return views[0]["credit"] if views else None
