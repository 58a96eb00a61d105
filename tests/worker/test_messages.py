"""Messages at a worker: its functions get them one after the other, its handlers publish, and neither harms a job."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from tasuki import AsyncClient, Worker
from tasuki.core.protocol import DeliverMessages, PublishedMessage
from tasuki.errors import ConfigError
from tests.support.processes import start_server
from tests.support.waiting import until_async


@pytest.mark.parametrize("door", ["tcp", "http"])
def test_a_worker_takes_messages_and_publishes_beside_its_jobs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, door: str
) -> None:
    taken: list[bytes] = []

    async def main(url: str, worker_url: str, admin: str, limited: str) -> None:
        worker = Worker(worker_url, token=limited, worker_id="w", data=tmp_path / "worker")

        @worker.handler("math.square")
        async def square(job: object) -> bytes:
            await worker.publish("done.square", b"49", headers={"by": "w"})
            await worker.publish("secret.x")
            return b"49"

        @worker.subscribe("settings.>")
        async def changed(message: PublishedMessage) -> None:
            if message.payload == b"bad":
                raise ValueError("cannot be used")
            await asyncio.sleep(0)
            taken.append(message.payload)

        @worker.subscribe("secret.>")
        async def never(message: PublishedMessage) -> None:
            raise AssertionError("this token may not read it")

        serving = asyncio.ensure_future(worker.serve())
        async with AsyncClient(url, token=admin) as client, client.subscribe("done.>") as done:
            await until_async(lambda: "messages of secret.> are not read" in caplog.text, what="both subscriptions are answered")
            worker._messages.arrived(DeliverMessages([], dropped=7))  # as the server tells it
            for payload in (b"1", b"bad", b"2", b"3"):
                await client.publish("settings.a", payload)
            job = await client.submit(subject="math.square")

            assert await job.result(20) == b"49"
            assert await asyncio.wait_for(anext(done), 20) == PublishedMessage("done.square", b"49", "", {"by": "w"})
            await until_async(lambda: taken == [b"1", b"2", b"3"])
            await until_async(lambda: "a message was not published: this token may not publish to 'secret.x'" in caplog.text)
        worker.drain()
        await asyncio.wait_for(serving, 20)

    with start_server(tmp_path / "server", "--http", "127.0.0.1:0") as server, caplog.at_level(logging.WARNING, "tasuki.worker"):
        limited = server.create_token("worker", scope=["math.>", "publish:done.>", "subscribe:settings.>"])
        worker_url = server.url if door == "tcp" else server.http_url
        asyncio.run(main(server.url, worker_url, server.token, limited))
    assert "the function for messages of settings.> failed on settings.a" in caplog.text
    assert "cannot be used" in caplog.text
    assert caplog.text.count("7 messages of settings.> were dropped: its function is slower than they come") == 1


def test_a_function_for_messages_is_async() -> None:
    with pytest.raises(ConfigError, match="must be async def"):
        Worker(worker_id="w").subscribe("a.>")(print)  # type: ignore[arg-type]
