"""A kept job on PostgreSQL whose worker is back at one server while another one gives the job to somebody else, or skips it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tasuki.core.job import State
from tasuki.core.store_messages import Grant, LeaseRequest, LeaseStatus
from tasuki.stores.sql.store import SqlStore
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_stage import GRACE_S, PAST_LEASE_S, Stage
from tests.stores.test_postgres_leader import WAIT_S, Background, waits_for_a_lock
from tests.support.postgres_service import PostgresService
from tests.support.waiting import until


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def here(postgres_url: str, clock: FakeClock) -> Iterator[Stage]:
    store = SqlStore.open_postgresql(postgres_url, clock=clock)
    yield Stage(store, clock)
    store.close()


@pytest.fixture
def there(postgres_url: str, clock: FakeClock) -> Iterator[SqlStore]:
    store = SqlStore.open_postgresql(postgres_url, clock=clock)
    yield store
    store.close()


@pytest.fixture
def kept(here: Stage) -> Grant:
    return here.orphaned("a", "w1", not_after=here.clock.wall() + PAST_LEASE_S + GRACE_S)


def lease(store: SqlStore) -> list[Grant]:
    return store.lease([LeaseRequest(worker_id="w2", incarnation="w2/1", patterns=(">",))])[0]


def test_a_worker_that_is_back_loses_to_a_grant_that_is_under_way(
    postgres: PostgresService, postgres_url: str, here: Stage, there: SqlStore, kept: Grant
) -> None:
    with there.turn():
        [new] = lease(there)
        renewing = Background(lambda: here.renew(kept))
        until(lambda: waits_for_a_lock(postgres, postgres_url), WAIT_S, "the renewal waits for the grant")

    assert renewing.result() is LeaseStatus.LOST
    job = here.job("a")
    assert (job.state, job.attempt, job.assigned_worker_id) == (State.ASSIGNED, new.attempt, "w2")
    assert here.kinds("a") == ["orphaned"]


def test_a_grant_steps_over_a_job_whose_worker_is_just_coming_back(here: Stage, there: SqlStore, kept: Grant) -> None:
    with here.store.turn():
        assert here.renew(kept) is LeaseStatus.GO_ON
        assert lease(there) == []

    assert (here.job("a").state, here.job("a").attempt) == (State.RUNNING, 1)
    assert lease(there) == []


def test_skipping_leaves_a_job_whose_worker_is_just_coming_back(here: Stage, there: SqlStore, kept: Grant) -> None:
    here.clock.advance(0.5)
    with here.store.turn():
        assert here.renew(kept) is LeaseStatus.GO_ON
        assert there.skip(epoch=here.epoch) == []

    assert there.skip(epoch=here.epoch) == []
    assert here.job("a").state is State.RUNNING
