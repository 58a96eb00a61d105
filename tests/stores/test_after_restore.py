"""deploy/postgresql/after-restore.sql: a PostgreSQL that was set back in time begins a new life, as a restored SQLite does."""

from pathlib import Path

import psycopg
import pytest

from tasuki.core.job import State
from tasuki.core.lifecycle import ATTEMPT_STEP, EPOCH_STEP, LEASE_MARGIN_S, LEASE_TTL_S
from tasuki.core.store_messages import LeaseStatus, ReportStatus
from tasuki.stores.sql.store import SqlStore
from tasuki.testing.store_stage import Stage

SCRIPT = Path(__file__).parents[2] / "deploy/postgresql/after-restore.sql"


def opened(url: str) -> Stage:
    store = SqlStore.open_postgresql(url)
    return Stage(store, store.clock)  # type: ignore[arg-type]


def test_a_database_that_was_set_back_takes_nothing_from_the_life_that_was_lost(postgres_url: str) -> None:
    # given the store as it was at the time of the backup
    old = opened(postgres_url)
    ended = old.running("ended")
    old.finish(ended, result=b"the result")
    running = old.running("runs")
    canceled = old.running("canceled")
    old.store.cancel(["canceled"], actor="alice")
    old.add("waits")
    before = old.job("ended")
    old.store.close()

    # when
    with psycopg.connect(postgres_url) as connection:
        connection.execute(SCRIPT.read_bytes())
    new = opened(postgres_url)

    # then
    assert new.epoch > EPOCH_STEP
    assert new.store.renew([new.claim(running)]) == [LeaseStatus.LOST]
    assert [new.finish(grant).answer for grant in (running, canceled)] == [ReportStatus.FENCED] * 2
    assert new.take("waits").attempt == ATTEMPT_STEP + 1
    job = new.job("runs")
    assert (job.state, job.losses) == (State.PENDING, 0)
    assert job.not_before == pytest.approx(new.store.clock.wall() + LEASE_TTL_S + LEASE_MARGIN_S, abs=5)
    assert new.job("canceled").state is State.CANCELED
    assert new.job("ended") == before
    counts = new.store.counts()["render"]
    assert (counts.pending, counts.active, counts.succeeded, counts.canceled) == (1, 1, 1, 1)
    new.store.requeue(["ended"], actor="alice")
    assert new.take("ended").attempt == ATTEMPT_STEP + 1
    new.store.close()
