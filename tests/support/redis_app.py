"""An app on Redis whose keys outsiders write: a stage for the store, and a raw client beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec
import redis

from tasuki.core.apps import template_of
from tasuki.core.store_messages import Grant
from tasuki.stores.redis.store import RedisStore
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_stage import Stage

PAYLOAD = b'{"molecule": "H2"}'
RESULT_TTL_S = 3600


class Zpe:
    """The app `zpe`: a stage for the store, and a raw client beside it."""

    def __init__(self, url: str) -> None:
        self.clock = FakeClock()
        template = msgspec.structs.replace(template_of("zpe"), max_retries=2, max_losses=1)
        self.store = RedisStore.open(url, app="zpe", template=template, result_ttl_s=RESULT_TTL_S, clock=self.clock)
        self.stage = Stage(self.store, self.clock)
        port, number = urlsplit(url).port, urlsplit(url).path.strip("/")
        self.raw: Any = redis.Redis(port=port or 0, db=int(number), decode_responses=True)

    def push(self, *job_ids: str, payload: bytes = PAYLOAD) -> None:
        """All that an outsider does."""
        for job_id in job_ids:
            self.raw.set(f"zpe:payload:{job_id}", payload)
            self.raw.lpush("zpe:queue", job_id)

    def lease(self, worker_id: str = "w1", limit: int = 1) -> list[Grant]:
        return self.stage.lease(worker_id, limit=limit, patterns=("job.assign.zpe",))

    def queue(self) -> list[str]:
        """The oldest last."""
        queue: list[str] = self.raw.lrange("zpe:queue", 0, -1)
        return queue

    def status(self, job_id: str) -> dict[str, str]:
        status: dict[str, str] = self.raw.hgetall(f"zpe:status:{job_id}")
        return status

    def close(self) -> None:
        self.raw.close()
        self.store.close()


TYPES: dict[str, Callable[[Zpe, str], object]] = {
    "string": lambda zpe, name: zpe.raw.set(name, "x"),
    "list": lambda zpe, name: zpe.raw.rpush(name, "x"),
    "set": lambda zpe, name: zpe.raw.sadd(name, "x"),
    "zset": lambda zpe, name: zpe.raw.zadd(name, {"x": 1.0}),
    "hash": lambda zpe, name: zpe.raw.hset(name, "x", "1"),
    "stream": lambda zpe, name: zpe.raw.xadd(name, {"x": "1"}),
}
BAD_IDS = ["index", "mol:1", "a b", "x/y", "", ".hidden", "x" * 129, "Ünlaut", "a\nb", "../../evil"]


def make(zpe: Zpe, name: str, kind: str) -> None:
    """Write a key of this type, whatever was there."""
    zpe.raw.delete(name)
    TYPES[kind](zpe, name)
