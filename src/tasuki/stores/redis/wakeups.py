"""Hints over Redis' publish and subscribe: one connection listens, another one publishes, both apart from the store's.

The channel names app and database: unlike keys, channels are the same in all databases of a Redis. Touches the network, no key.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import redis
import redis.asyncio

from tasuki.stores.redis.connection import connect_async
from tasuki.stores.wakeups import TIMEOUT_S, ReconnectingWakeups

IDLE_S = 5.0  # of silence: then the listener asks whether anybody is there; after as much again it connects anew


class RedisWakeups(ReconnectingWakeups[redis.asyncio.Redis]):
    """`app` is the prefix of the keys of those who belong together; `server_id` see `ReconnectingWakeups`."""

    def __init__(
        self, url: str, *, app: str, server_id: str, idle_s: float = IDLE_S, jitter: Callable[[], float] = random.random
    ) -> None:
        super().__init__(server_id=server_id, jitter=jitter)
        self._url = url
        self._idle_s = idle_s
        # Made, and thrown away: an address that is not understood is refused here, not tried for ever.
        number = connect_async(url, TIMEOUT_S).connection_pool.connection_kwargs.get("db") or 0
        self._channel = f"{app}:hints:{number}"

    async def _connect(self) -> redis.asyncio.Redis:
        client = connect_async(self._url, TIMEOUT_S)
        try:
            await client.ping()
        except BaseException:
            await client.aclose()
            raise
        return client

    async def _disconnect(self, connection: redis.asyncio.Redis) -> None:
        await connection.aclose()

    async def _received(self, connection: redis.asyncio.Redis) -> AsyncGenerator[bytes | None]:
        subscription: Any = connection.pubsub()
        try:
            await subscription.subscribe(self._channel)
            was_asked = False
            while True:
                message = await subscription.get_message(timeout=self._idle_s)
                if message is not None:
                    was_asked = False
                    if message["type"] in ("subscribe", "message"):
                        yield None if message["type"] == "subscribe" else message["data"]
                elif was_asked:
                    raise redis.ConnectionError(f"no answer within {self._idle_s:g} s")
                else:
                    await subscription.ping()
                    was_asked = True
        finally:
            await subscription.aclose()

    async def _prepare_sending(self, connection: redis.asyncio.Redis) -> None:
        pass

    async def _send(self, connection: redis.asyncio.Redis, batch: Sequence[bytes]) -> None:
        async with connection.pipeline(transaction=False) as pipeline:
            pipeline.ping()  # with nothing to send it still finds out whether the connection is whole
            for piece in batch:
                pipeline.publish(self._channel, piece)
            await pipeline.execute()

    def _describe(self, error: Exception) -> str:
        """Redis' own errors name host and port, and no password."""
        return " ".join(str(error).split())
