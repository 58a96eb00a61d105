"""Several servers on one PostgreSQL: what they lease, and that they do not stand in each other's way."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tasuki.core.job import State
from tasuki.core.store_messages import LeaseRequest, Offer, Takes
from tasuki.errors import Unavailable
from tasuki.stores.sql.store import SqlStore
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_stage import PAST_LEASE_S, Stage
from tests.stores.steps import connection_of, submission
from tests.support import nursery
from tests.support.postgres_service import PostgresService

PROCESSES = 8


def lease(store: SqlStore, limit: int, **fields: Any) -> list[str]:
    request = LeaseRequest(**{"worker_id": "w1", "incarnation": "w1/1", "patterns": (">",), "limit": limit, **fields})
    return [grant.job_id for grant in store.lease([request])[0]]


@pytest.fixture
def stores(postgres_url: str) -> Iterator[list[SqlStore]]:
    stores = [SqlStore.open_postgresql(postgres_url, shard=shard) for shard in range(2)]
    yield stores
    for store in stores:
        store.close()


# -- no job twice -------------------------------------------------------------------------------------------------

# Leases until nothing is left, in turns of several requests, and says what it got.
CLAIMER = """
import json, sys
from tasuki.core.store_messages import LeaseRequest
from tasuki.stores.sql.store import SqlStore

store = SqlStore.open_postgresql(sys.argv[1])
worker = sys.argv[2]
requests = [
    LeaseRequest(worker_id=worker, incarnation="1", patterns=(pattern,), limit=40, ttl_s=600.0)
    for pattern in (">", "render.a", "render.*")
]
print("ready", flush=True)
sys.stdin.readline()
got, empty = [], 0
while empty < 3:
    found = [(grant.job_id, grant.attempt, grant.lease_id) for grants in store.lease(requests) for grant in grants]
    got += found
    empty = 0 if found else empty + 1
store.close()
json.dump(got, sys.stdout)
"""


def add_jobs(store: SqlStore, count: int) -> None:
    subjects = ("render.a", "render.b", "mail.a", "mail.b")
    for start in range(0, count, 1000):
        store.submit(
            [
                submission(f"job-{number:06}", subject=subjects[number % 4], priority=number % 3)
                for number in range(start, start + 1000)
            ]
        )


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [6_000, pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
def test_no_job_is_leased_twice_by_eight_processes(postgres: PostgresService, jobs: int) -> None:
    url = postgres.database()
    store = SqlStore.open_postgresql(url)
    add_jobs(store, jobs)
    blocked, gate = os.pipe()
    claimers = [nursery.start([sys.executable, "-c", CLAIMER, url, f"w{number}"], stdin=blocked) for number in range(PROCESSES)]
    for claimer in claimers:
        assert claimer.stdout is not None
        assert claimer.stdout.readline() == "ready\n"

    os.close(gate)  # all read the end of their input at the same time
    said = [claimer.communicate(timeout=500) for claimer in claimers]
    assert [claimer.returncode for claimer in claimers] == [0] * PROCESSES, [errors for _, errors in said]
    got = [json.loads(answer) for answer, _ in said]

    leased = Counter(job_id for found in got for job_id, _, _ in found)
    assert len(leased) == jobs
    assert set(leased.values()) == {1}
    assert {attempt for found in got for _, attempt, _ in found} == {1}
    assert len({lease_id for found in got for _, _, lease_id in found}) == jobs
    assert sum(1 for found in got if found) > 1, "one process had it all: they did not work at the same time"
    assert sum(count.active for count in store.counts().values()) == jobs
    store.close()
    postgres.drop(url)
    os.close(blocked)


# -- not in each other's way --------------------------------------------------------------------------------------


def test_what_another_server_is_about_to_lease_is_skipped_not_waited_for(stores: list[SqlStore]) -> None:
    one, two = stores
    one.submit([submission(f"job-{number}") for number in range(10)])

    with one.turn():
        mine = lease(one, 4)
        theirs = lease(two, 4)

    assert mine == [f"job-{number}" for number in range(4)]
    assert theirs == [f"job-{number}" for number in range(4, 8)]


def test_the_same_holds_for_a_single_queue(stores: list[SqlStore]) -> None:
    one, two = stores
    one.submit([submission(f"job-{number}") for number in range(10)])

    with one.turn():
        mine = lease(one, 4, offer=Offer(Takes.HANDLERS))
        theirs = lease(two, 4, offer=Offer(Takes.HANDLERS))

    assert mine == [f"job-{number}" for number in range(4)]
    assert theirs == [f"job-{number}" for number in range(4, 8)]


def test_a_server_gets_past_a_long_row_of_what_others_hold(stores: list[SqlStore]) -> None:
    one, two = stores
    one.submit([submission(f"job-{number:03}", subject=f"render.s{number % 5}") for number in range(200)])

    with one.turn():
        assert len(lease(one, 190)) == 190
        theirs = lease(two, 10)

    assert theirs == [f"job-{number:03}" for number in range(190, 200)]


def test_two_servers_that_submit_the_same_id_agree_on_one_job(stores: list[SqlStore]) -> None:
    one, two = stores

    first = one.submit([submission("a"), submission("b", payload=b"1")])
    second = two.submit([submission("b", payload=b"2"), submission("a"), submission("c")])

    assert [answer.job_id for answer in first] == ["a", "b"]
    assert [type(answer).__name__ for answer in second] == ["Conflict", "Submitted", "Submitted"]
    assert [getattr(answer, "created", None) for answer in second] == [None, False, True]
    assert one.counts()["render"].pending == 3


def test_servers_do_not_wait_for_each_others_counters(stores: list[SqlStore]) -> None:
    one, two = stores
    connection_of(two).execute("SET lock_timeout = '100ms'")

    with one.turn():
        one.submit([submission("a")])
        assert one.counts()["render"].pending == 1  # written, and not committed
        two.submit([submission("b")])

    assert one.counts() == two.counts()
    assert one.counts()["render"].pending == 2


def test_on_one_shard_they_would(postgres_url: str, stores: list[SqlStore]) -> None:
    one, _ = stores
    same = SqlStore.open_postgresql(postgres_url, shard=0)
    connection_of(same).execute("SET lock_timeout = '100ms'")
    one.submit([submission("first")])

    with one.turn():
        one.submit([submission("a")])
        one.counts()
        with pytest.raises(Unavailable, match="took too long"):
            same.submit([submission("b")])

    same.close()


def test_counters_of_many_shards_add_up_and_go_when_the_group_is_empty(postgres_url: str) -> None:
    clock = FakeClock()
    stores = [SqlStore.open_postgresql(postgres_url, shard=shard, clock=clock) for shard in range(3)]
    stages = [Stage(store, clock) for store in stores]
    stages[0].add("a", "b")
    grants = stages[1].lease(limit=2)
    for grant in grants:
        stages[2].finish(grant)
    assert stores[0].counts()["render"].succeeded == 2
    assert stores[0].counts()["render"].pending == 0

    clock.advance(60)
    stages[2].store.prune(before=clock.wall(), epoch=stages[2].epoch)

    assert stores[0].counts() == {}
    assert connection_of(stores[0]).execute("SELECT count(*) FROM tasuki_counter WHERE n <> 0").fetchone() == (0,)
    for store in stores:
        store.close()


def test_a_verdict_holds_although_another_server_had_the_row_just_before(stores: list[SqlStore]) -> None:
    """Cancel on one server, finish on another: one wins, the other learns it, and nobody is told of "another writer"."""
    one, two = stores
    one.submit([submission("a")])
    assert lease(one, 1) == ["a"]
    [job] = one.get(["a"])
    assert job is not None
    assert job.lease is not None

    [canceled] = two.cancel(["a"], actor="alice")

    assert (canceled.state, canceled.requested, canceled.worker_id) == (State.ASSIGNED, True, "w1")


def test_reaping_leaves_what_another_server_is_renewing(postgres_url: str) -> None:
    clock = FakeClock()
    one, two = (SqlStore.open_postgresql(postgres_url, clock=clock) for _ in range(2))
    stage = Stage(one, clock)
    grant = stage.running("a")
    clock.advance(PAST_LEASE_S)

    with one.turn():
        stage.renew(grant)
        assert two.reap(epoch=stage.epoch) == []

    assert two.reap(epoch=stage.epoch) == []
    assert stage.job("a").state is State.RUNNING
    one.close()
    two.close()
