"""The Redis store keeps the contract: the shipped suite, with jobs in sorted sets, and again with them in the app's own list."""

from __future__ import annotations

import pytest

from tasuki.core.job import JobSpec
from tasuki.stores.redis import RedisStore
from tasuki.testing.store_suite import MakeStore, StoreSuite


class TestRedisStore(StoreSuite):
    @pytest.fixture
    def make_store(self, redis_url: str) -> MakeStore:
        return lambda clock: RedisStore.open(redis_url, clock=clock)


# The state machine goes through the list in every run (test_redis_machine.py); all cases do so only where time is no matter.
@pytest.mark.soak
class TestRedisStoreWithTheListOfItsApp(StoreSuite):
    @pytest.fixture
    def make_store(self, redis_url: str) -> MakeStore:
        template = JobSpec(job_id="", subject="render.eu")
        return lambda clock: RedisStore.open(redis_url, app="zpe", template=template, clock=clock)
