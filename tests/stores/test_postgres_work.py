"""What verbs cost on PostgreSQL: round trips by the batch, not by the job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tasuki.core.store_messages import GroupCounts, Turn
from tasuki.stores.batching import execute
from tasuki.stores.sql.postgres_session import PostgresSession
from tasuki.stores.sql.store import SqlStore
from tasuki.testing.clocks import FakeClock
from tasuki.testing.store_stage import PAST_LEASE_S, Stage

JOBS = 100


@pytest.fixture
def store(postgres_url: str) -> Iterator[SqlStore]:
    store = SqlStore.open_postgresql(postgres_url, clock=FakeClock())
    yield store
    store.close()


@pytest.fixture
def stage(store: SqlStore) -> Stage:
    assert isinstance(store.clock, FakeClock)
    return Stage(store, store.clock)


@pytest.fixture
def round_trips(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], int]:
    seen: list[object] = []
    run = PostgresSession._run

    def counted(session: PostgresSession, *arguments: Any) -> Any:
        seen.append(arguments)
        return run(session, *arguments)

    monkeypatch.setattr(PostgresSession, "_run", counted)

    def count(verb: Callable[[], object]) -> int:
        seen.clear()
        verb()
        return len(seen)

    return count


def test_the_ends_of_many_jobs_take_a_few_round_trips(
    store: SqlStore, stage: Stage, round_trips: Callable[[Callable[[], object]], int]
) -> None:
    ids = [f"job-{number}" for number in range(JOBS)]
    stage.add(*ids, backoff_s=0.0, not_after=stage.clock.wall() + 1_000)
    reports = [stage.report(grant, error_code="EXIT_CODE") for grant in stage.lease(limit=JOBS)]

    assert round_trips(lambda: store.fail(reports)) <= 5  # the mark of the turn, rows, endings, counters, incidents
    stage.lease(limit=JOBS)
    stage.clock.advance(PAST_LEASE_S)
    assert round_trips(stage.reap) <= 7
    stage.clock.advance(1_000)
    assert round_trips(stage.skip) <= 7
    assert round_trips(lambda: store.requeue(ids, actor="alice")) <= 7  # one of them for the epoch, above which attempts go on
    assert store.counts() == {"render": GroupCounts(pending=JOBS)}


def test_the_orders_of_one_actor_in_a_turn_are_one_batch(
    store: SqlStore, stage: Stage, round_trips: Callable[[Callable[[], object]], int]
) -> None:
    ids = [f"job-{number}" for number in range(JOBS)]
    stage.add(*ids)
    stage.lease(limit=JOBS // 2)
    # given: orders of two actors, one after the other
    turn = Turn(cancel=[(job_id, ("alice", "bob")[place % 2], "no more") for place, job_id in enumerate(ids)])

    assert round_trips(lambda: execute(store, turn)) <= 9

    assert [stage.store.incidents(job_id)[0].actor for job_id in ids[:3]] == ["alice", "bob", "alice"]
    assert store.counts() == {"render": GroupCounts(active=JOBS // 2, canceled=JOBS // 2)}
