"""Random histories on Redis: it must answer as the memory store does, whichever way its queues are kept."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tasuki.core.job import JobSpec
from tasuki.stores.redis.store import RedisStore
from tasuki.stores.store import Store
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_machine import StoreMachine
from tests.support.redis_service import RedisService

LONG = settings(max_examples=120, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
SHORT = settings(LONG, max_examples=8, stateful_step_count=40)


class RedisMachine(StoreMachine):
    service: RedisService
    subject: str

    def make_store(self, clock: FakeClock) -> Store:
        template = JobSpec(job_id="", subject=self.subject)
        return RedisStore.open(self.service.url(), template=template, clock=clock)


def run(redis_service: RedisService, subject: str, how: settings) -> None:
    class Machine(RedisMachine):
        pass

    Machine.service, Machine.subject = redis_service, subject
    run_state_machine_as_test(Machine, settings=how)


# The machine's jobs have the subject a.x among others: with it as the app's own they wait in the list.
@pytest.mark.slow
@pytest.mark.parametrize("subject", ["job.assign.tasuki", "a.x"])
def test_redis_answers_as_the_memory_store_does(redis_service: RedisService, subject: str) -> None:
    run(redis_service, subject, SHORT)


@pytest.mark.soak
@pytest.mark.parametrize("subject", ["job.assign.tasuki", "a.x"])
def test_redis_answers_as_the_memory_store_does_for_long(redis_service: RedisService, subject: str) -> None:
    run(redis_service, subject, LONG)
